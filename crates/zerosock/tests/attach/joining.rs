//! Attached processes can be reached by CID and by name, by processes and by VMs.

use std::io::Read;

use super::*;
use crate::common::driver::WaitError;
use crate::common::{self, assert_bytes, bytes, eventually, host, host_listener};
use zerosock::attach::{AttachHost, DEFAULT_CIDS};
use zerosock::vsock::Fault;

#[test]
fn a_process_has_the_cid_and_the_name_it_asked_for() {
    let lab = AttachDaemon::new(1);
    let one = lab.process("db");
    assert!(DEFAULT_CIDS.contains(&one.cid.get()), "{}", one.cid);
    let mut two = lab.process_with(&numbered(500));
    assert_eq!(two.cid, Cid::new(500));
    let three = lab.process("web-1.example_x");
    assert_ne!(three.cid, one.cid);
    let name = |name: &str| name.parse().unwrap();
    assert_eq!(two.control.resolve(&name("db")).unwrap(), one.cid);
    let found = two.control.resolve(&name("web-1.example_x")).unwrap();
    assert_eq!(found, three.cid);
    let error = two.control.resolve(&name("nobody")).unwrap_err();
    assert!(matches!(error, AttachError::UnknownName(_)), "{error}");
    assert_eq!(error.fault(), Fault::Caller);
    // As the daemon lists it.
    assert_eq!(lab.daemon().resolve(&name("db")), Some(one.cid));
    assert_eq!(lab.daemon().resolve(&name("nobody")), None);
    let processes = lab.daemon().processes();
    let cids: Vec<Cid> = processes.iter().map(|p| p.cid).collect();
    assert_eq!(cids, [two.cid, one.cid, three.cid]);
    assert_eq!(processes[0].name, None);
    assert_eq!(processes[1].name, Some(name("db")));
    assert_eq!(processes[1].uid, rustix::process::geteuid().as_raw());
    assert_eq!(processes[1].pid as u32, std::process::id());
    assert_eq!(lab.stats().attached, 3);
}

#[test]
fn two_processes_talk_with_one_copy() {
    const LEN: usize = 4 << 20;
    for workers in [1, 2] {
        let tune = |config: &mut DaemonConfig| {
            config.workers = workers;
            // A slow machine must not look like a stalled receiver: its bytes would be copied.
            config.hold = common::PATIENCE;
        };
        let lab = AttachDaemon::with(0, tune, |_| {});
        let mut one = lab.process("one");
        let mut two = lab.process("two");
        two.driver.listen(PORT, 8).unwrap();
        let (from, to) = connected(&mut one.driver, &mut two.driver);
        let peer = two.driver.addresses(to).unwrap().1;
        assert_eq!(peer.cid, one.cid, "its own CID");
        for (seed, way) in [(1, true), (2, false)] {
            let sent = bytes(seed, LEN);
            let (a, b) = ((&mut one.driver, from), (&mut two.driver, to));
            let got = match way {
                true => transfer(a, b, &sent),
                false => transfer(b, a, &sent),
            };
            assert_bytes(&got, &sent);
        }
        // The workers count after the receiver has been notified.
        eventually("all bytes are counted", || {
            let stats = lab.stats();
            (stats.in_place_bytes, stats.rx_bytes) == (2 * LEN as u64, 2 * LEN as u64)
        });
        let stats = lab.stats();
        assert_eq!((stats.copied_bytes, stats.control_faults), (0, 0));
    }
}

#[test]
fn a_vm_and_a_process_reach_each_other() {
    for workers in [1, 2] {
        let lab = AttachDaemon::with(1, |config| config.workers = workers, |_| {});
        let mut guest = lab.guest(0);
        guest.listen(PORT, 8).unwrap();
        // Attached after the VM has run for a while, and another one after it.
        let mut first = lab.process("first");
        let mut process = lab.process("second");
        process.driver.listen(PORT, 8).unwrap();
        let sent = bytes(7, 1 << 20);
        let (from, to) = connected(&mut guest, &mut process.driver);
        let got = transfer((&mut guest, from), (&mut process.driver, to), &sent);
        assert_bytes(&got, &sent);
        let (from, to) = connected(&mut first.driver, &mut guest);
        let got = transfer((&mut first.driver, from), (&mut guest, to), &sent);
        assert_bytes(&got, &sent);
    }
}

#[test]
fn only_groups_in_common_reach_each_other() {
    let other = |attach: &mut AttachConfig| attach.groups = vec!["processes".into()];
    let lab = AttachDaemon::with(1, |_| {}, other);
    let mut guest = lab.guest(0);
    let mut one = lab.process("one");
    let mut two = lab.process("two");
    for listener in [&mut guest, &mut two.driver] {
        listener.listen(PORT, 8).unwrap();
    }
    let refused = one.driver.wait_connect(at(guest.cid()), deadline());
    assert!(matches!(refused, Err(WaitError::Refused)), "{refused:?}");
    let refused = guest.wait_connect(at(two.cid), deadline());
    assert!(matches!(refused, Err(WaitError::Refused)), "{refused:?}");
    connected(&mut one.driver, &mut two.driver);
}

#[test]
fn connects_to_ports_that_were_not_named_are_refused_by_the_switch() {
    let lab = AttachDaemon::new(1);
    let request = AttachRequest {
        ports: vec![Port::new(1000), PORT],
        ..named("server")
    };
    let mut server = lab.process_with(&request);
    let mut guest = lab.guest(0);
    for port in [Port::new(78), PORT] {
        server.driver.listen(port, 8).unwrap();
    }
    // The process makes no call meanwhile: the daemon refuses on its own.
    let before = server.driver.endpoint_stats().packets_received;
    let closed = Address::new(server.cid, Port::new(78));
    let refused = guest.wait_connect(closed, deadline());
    assert!(matches!(refused, Err(WaitError::Refused)), "{refused:?}");
    server.driver.drive().unwrap();
    assert_eq!(server.driver.endpoint_stats().packets_received, before);
    connected(&mut guest, &mut server.driver);
    // Its own connects are not limited.
    guest.listen(PORT, 8).unwrap();
    connected(&mut server.driver, &mut guest);
}

#[test]
fn a_process_meets_the_host_if_it_is_configured_so() {
    let lab = AttachDaemon::new(0);
    let mut process = lab.process("alone");
    let refused = process.driver.wait_connect(host(5), deadline());
    assert!(matches!(refused, Err(WaitError::Refused)), "{refused:?}");

    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("host");
    let listener = host_listener(&path, 5);
    let meet = |attach: &mut AttachConfig| {
        attach.host = AttachHost::Hybrid { path };
    };
    let lab = AttachDaemon::with(0, |_| {}, meet);
    let mut process = lab.process("served");
    let stream = process.driver.wait_connect(host(5), deadline()).unwrap();
    let (mut program, _) = listener.accept().unwrap();
    process
        .driver
        .wait_send(stream, b"hello", deadline())
        .unwrap();
    let mut got = [0; 5];
    program.read_exact(&mut got).unwrap();
    assert_eq!(&got, b"hello");
}

#[test]
fn assigned_cids_are_in_the_range_and_skip_those_of_vms() {
    let lab = AttachDaemon::with(3, |_| {}, |attach| attach.cids = 4..=7);
    // 4 and 5 are VMs.
    let one = lab.process("one");
    let two = lab.process("two");
    assert_eq!((one.cid.get(), two.cid.get()), (6, 7));
    let error = lab.ask(&named("three")).unwrap_err();
    assert!(matches!(error, AttachError::Full), "{error}");
    assert_eq!(error.fault(), Fault::System);
    drop(one);
    // The range has one CID, which is reused at once; the request waits for it.
    common::eventually("a CID free", || lab.ask(&named("three")).is_ok());
}
