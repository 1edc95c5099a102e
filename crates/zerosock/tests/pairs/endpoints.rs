//! Processes with several queue pairs.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use zerosock::attach::{self, AttachConfig};
use zerosock::daemon::{Daemon, DaemonConfig};
use zerosock::vsock::{Endpoint, Host};
use zerosock::{Address, Port};

use crate::common::PATIENCE;

const PORT: Port = Port::new(7000);

/// A daemon with three queue pairs on two workers, and processes that use them.
fn processes<const N: usize>() -> (Daemon, [Endpoint; N], tempfile::TempDir) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("attach.sock");
    let daemon = Daemon::start(DaemonConfig {
        workers: 2,
        queue_pairs: 3,
        attach: Some(AttachConfig::new(attach::listen(&path).unwrap())),
        ..DaemonConfig::default()
    });
    let attach = |_| Endpoint::builder().queue_pairs(3).attach(&path).unwrap();
    (daemon.unwrap(), std::array::from_fn(attach), dir)
}

#[test]
fn connections_of_a_process_are_spread_over_its_pairs() {
    let (daemon, [one, two], _dir) = processes();
    let listener = two.listen(PORT, 64).unwrap();
    let to = Address::new(two.cid(), PORT);
    let mut pairs = [[0; 3]; 2];
    let mut kept = Vec::new();
    for _ in 0..40 {
        let ours = one.begin_connect(to).unwrap();
        let (theirs, _) = listener.accept_timeout(PATIENCE).unwrap();
        ours.wait_connected().unwrap();
        pairs[0][usize::from(ours.queue_pair())] += 1;
        pairs[1][usize::from(theirs.queue_pair())] += 1;
        kept.push((ours, theirs));
    }
    assert!(pairs.iter().flatten().all(|&count| count > 0), "{pairs:?}");
    daemon.shutdown();
}

#[test]
fn an_endpoint_that_requests_too_many_pairs_gets_the_available_ones() {
    let (daemon, [one], dir) = processes();
    assert_eq!(one.queue_pairs(), 3);
    let path = dir.path().join("attach.sock");
    let more = Endpoint::builder().queue_pairs(16).attach(&path).unwrap();
    assert_eq!(more.queue_pairs(), 3);
    let fewer = Endpoint::builder().queue_pairs(2).attach(&path).unwrap();
    assert_eq!(fewer.queue_pairs(), 2);
    assert!(Endpoint::builder().queue_pairs(17).attach(&path).is_err());
    assert_eq!(Endpoint::attach(&path).unwrap().queue_pairs(), 1);
    // A host without the setting has one pair.
    let attach = dir.path().join("host.sock");
    let host = Host::builder().attach(&attach).start().unwrap();
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                host.drive().unwrap();
            }
        });
        let endpoint = Endpoint::builder().queue_pairs(3).attach(&attach).unwrap();
        assert_eq!(endpoint.queue_pairs(), 1);
        stop.store(true, Ordering::Relaxed);
    });
    daemon.shutdown();
}
