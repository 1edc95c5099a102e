//! A process that leaves loses its CID, name, route and connections; other endpoints are not
//! affected.

use super::*;
use crate::common::driver::{DriverEvent, WaitError};
use crate::common::{assert_bytes, bytes, eventually, eventually_with};
use zerosock::vsock::Fault;

#[test]
fn a_detached_process_frees_its_cid_name_and_ports() {
    for workers in [1, 2] {
        let lab = AttachDaemon::with(1, |config| config.workers = workers, |_| {});
        let mut guest = lab.guest(0);
        let mut cids = Vec::new();
        for _ in 0..20 {
            let request = AttachRequest {
                cid: Some(Cid::new(600)),
                ..named("db")
            };
            // Directly after the previous process: the request waits until its CID and name are
            // free.
            let mut process = lab.process_with(&request);
            process.driver.listen(PORT, 8).unwrap();
            let (stream, _) = connected(&mut guest, &mut process.driver);
            drop(process);
            eventually_with(&mut guest, "reset", |guest| {
                guest.state(stream) == Some(StreamState::Reset)
            });
            guest.close(stream);
            cids.push(lab.process("passing").cid);
        }
        cids.dedup();
        assert_eq!(cids.len(), 20, "a CID rests before it is given again");
        eventually("nobody attached", || lab.stats().attached == 0);
        assert!(lab.daemon().processes().is_empty());
        let refused = guest.wait_connect(at(Cid::new(600)), deadline());
        assert!(matches!(refused, Err(WaitError::Refused)), "{refused:?}");
        eventually("all connections gone", || {
            let stats = lab.stats();
            stats.conns_added == stats.conns_removed && stats.conns_added >= 40
        });
        assert_eq!(lab.stats().control_faults, 0);
    }
}

#[test]
fn a_lease_that_closes_ends_the_device() {
    let lab = AttachDaemon::new(0);
    let Process {
        mut driver,
        control,
        ..
    } = lab.process("db");
    drop(control);
    let give_up = deadline();
    loop {
        match driver.poll(Some(give_up)).unwrap() {
            Some(DriverEvent::DeviceGone) => break,
            Some(_) => {}
            None => panic!("the device is still there"),
        }
    }
    lab.process("db");
}

#[test]
fn a_device_that_closes_ends_the_lease() {
    let lab = AttachDaemon::new(0);
    let Process {
        driver,
        mut control,
        ..
    } = lab.process("db");
    drop(driver);
    eventually("the lease hung up", || hung_up(&control));
    let error = control.resolve(&"db".parse().unwrap()).unwrap_err();
    assert!(matches!(error, AttachError::Closed), "{error}");
    assert_eq!(error.fault(), Fault::Peer);
    // So does a lease that was never used.
    let attached = lab.ask(&named("db")).unwrap();
    drop(attached.socket);
    eventually("the lease hung up", || hung_up(&attached.control));
    eventually("nobody attached", || lab.stats().attached == 0);
}

#[test]
fn processes_are_notified_when_the_daemon_ends() {
    let mut lab = AttachDaemon::new(0);
    let mut process = lab.process("db");
    lab.daemon.take().unwrap().shutdown();
    eventually("the lease hung up", || hung_up(&process.control));
    let give_up = deadline();
    while process.driver.poll(Some(give_up)).unwrap() != Some(DriverEvent::DeviceGone) {
        assert!(Instant::now() < give_up);
    }
}

#[test]
fn a_process_that_dies_during_a_transfer_does_not_affect_others() {
    for workers in [1, 2] {
        let lab = AttachDaemon::with(1, |config| config.workers = workers, |_| {});
        let mut guest = lab.guest(0);
        let mut two = lab.process("two");
        guest.listen(PORT, 8).unwrap();
        two.driver.listen(PORT, 8).unwrap();
        let (from, to) = connected(&mut guest, &mut two.driver);
        let sent = bytes(3, 4 << 20);
        let (mut done, mut got, mut ended) = (0, Vec::new(), false);
        for round in 0..4 {
            let mut dying = lab.process("dying");
            dying.driver.listen(PORT, 8).unwrap();
            let (a, _) = connected(&mut dying.driver, &mut guest);
            let (b, _) = connected(&mut dying.driver, &mut two.driver);
            let (c, _) = connected(&mut guest, &mut dying.driver);
            // Unread bytes in both directions.
            for _ in 0..20 {
                for stream in [a, b] {
                    let _ = dying.driver.send(stream, &[1; 30_000]);
                }
                let _ = guest.send(c, &[2; 30_000]);
                dying.driver.drive().unwrap();
                guest.drive().unwrap();
            }
            drop(dying);
            // The other two continue their transfer.
            let until = sent.len() * (round + 1) / 4;
            all([&mut guest, &mut two.driver], "bytes", |[guest, two]| {
                push(guest, from, &sent, &mut done);
                pull(two, to, &mut got, &mut ended);
                got.len() >= until
            });
            all([&mut guest, &mut two.driver], "reset", |[guest, _]| {
                guest.state(c) == Some(StreamState::Reset)
            });
        }
        all([&mut guest, &mut two.driver], "the end", |[guest, two]| {
            push(guest, from, &sent, &mut done);
            pull(two, to, &mut got, &mut ended);
            ended
        });
        assert_bytes(&got, &sent);
        let stats = lab.stats();
        // Not `bad_packets`: a packet of the guest may cross the reset.
        assert_eq!((stats.bad_chains, stats.devices_lost), (0, 0));
    }
}
