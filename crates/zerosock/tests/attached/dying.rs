//! A process is killed during a transfer. What it held is freed, what it sent stays mapped while it
//! is read, and other endpoints are not affected.

use std::io::{ErrorKind, Read, Write};
use std::process::{Command, Stdio};

use zerosock::vsock::Endpoint;

use super::PORT;
use super::hub::Hub;
use crate::common::{self, PATIENCE, eventually};

/// Not a test by itself: the process that the next test kills.
#[test]
#[ignore = "a part of a_process_that_dies_during_a_transfer_is_detached_and_its_leases_are_torn"]
fn dying_process() {
    let Some(path) = std::env::var_os("ZEROSOCK_TEST_ATTACH") else {
        return;
    };
    let process = Endpoint::builder().name("dying").attach(path).unwrap();
    let listener = process.listen(PORT, 4).unwrap();
    println!("\nready");
    let (stream, _) = listener.accept_timeout(PATIENCE).unwrap();
    (&stream).write_all(b"half a mess").unwrap();
    // Until killed, or until the test that started it has ended.
    let mut byte = [0u8; 1];
    let _ = std::io::stdin().read(&mut byte);
}

#[test]
fn a_process_that_dies_during_a_transfer_is_detached_and_its_leases_are_torn() {
    let hub = Hub::new();
    let bystander = hub.process("bystander");
    let (ours, theirs) = hub.joined(&bystander);
    for round in 0..2 {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([
                "attached::dying::dying_process",
                "--exact",
                "--ignored",
                "--nocapture",
            ])
            .env("ZEROSOCK_TEST_ATTACH", hub.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        common::wait_for_line(&mut child, "ready");
        let stream = hub.reach("dying");
        let cid = stream.peer_addr().cid;
        let lease = stream.recv().unwrap().unwrap();
        assert!(lease.is_in_place());
        let reading = lease.read();
        let mut loan = stream.loan(100).unwrap();
        loan.write_all(b"for nobody").unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        let error = stream.recv().map(drop).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
        assert!(reading.is_revoked(), "round {round}");
        assert_eq!(reading.to_vec(), b"half a mess", "still mapped");
        drop(reading);
        loan.send().unwrap_err();
        drop(lease);
        eventually("its name and CID are free", || {
            hub.resolve("dying").is_err() && hub.processes().iter().all(|p| p.cid != cid)
        });
        // Other endpoints are not affected.
        (&theirs).write_all(b"alive").unwrap();
        assert_eq!(ours.recv().unwrap().unwrap().to_vec(), b"alive");
    }
}
