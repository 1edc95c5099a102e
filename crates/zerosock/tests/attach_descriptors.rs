//! Processes that attach and leave do not leak descriptors.
//!
//! The only test of this program, because others in the same process would open and close
//! descriptors.

mod common;

use crate::common::driver::{Driver, DriverConfig};
use common::{daemon_config, eventually, open_fds};
use zerosock::attach::{self, AttachConfig, AttachRequest, Client};
use zerosock::daemon::Daemon;

#[test]
fn descriptors_return_to_their_number_after_many_processes() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("attach.sock");
    let mut config = daemon_config(&[]);
    config.workers = 2;
    config.attach = Some(AttachConfig::new(attach::listen(&path).unwrap()));
    let daemon = Daemon::start(config).unwrap();
    let request = AttachRequest {
        name: Some("db".parse().unwrap()),
        ..AttachRequest::default()
    };
    let round = || {
        let attached = Client::connect(&path, &request).unwrap();
        // Refused: the name is taken.
        Client::connect(&path, &request).unwrap_err();
        let mut driver = Driver::attach_over(attached.socket, DriverConfig::default()).unwrap();
        driver.drive().unwrap();
        drop(driver);
        drop(attached.control);
        // Granted, and closed unused.
        drop(Client::connect(&path, &request).unwrap());
    };
    round();
    eventually("nobody attached", || daemon.stats().attached == 0);
    // The first round may have made one-time descriptors.
    let mut before = open_fds();
    eventually("at rest", || {
        let now = open_fds();
        std::mem::replace(&mut before, now) == now
    });
    for _ in 0..50 {
        round();
    }
    eventually("as many descriptors as before", || open_fds() <= before);
    daemon.shutdown();
}
