//! Each row of the table in docs/copies.md is a test of the daemon's counters.
//!
//! Amounts are such that a socket takes them without a stall, except in tests of stalls.

use std::io::{Read, Write};

use crate::common::{
    self, TestDaemon, assert_bytes, bytes, connect_guest, deadline, eventually, eventually_with,
    host,
};
use zerosock::daemon::DaemonConfig;
use zerosock::driver::{Address, Directions, Port};

const LEN: usize = 60_000;

/// `LEN` bytes have gone through the daemon, if it says so, without a stop in its memory.
#[track_caller]
fn in_place(daemon: &TestDaemon) {
    // The worker counts after the receiver has been notified.
    eventually("all counted", || {
        daemon
            .stats()
            .is_none_or(|stats| stats.in_place_bytes == LEN as u64)
    });
    let copied = daemon.stats().map_or(0, |stats| stats.copied_bytes);
    assert_eq!(copied, 0);
}

#[test]
fn guest_to_socket_is_not_copied() {
    let daemon = TestDaemon::new();
    let listener = daemon.host_listener(1000);
    let mut guest = daemon.guest();
    let stream = guest.wait_connect(host(1000), deadline()).unwrap();
    let (mut program, _) = listener.accept().unwrap();
    guest.wait_send(stream, &bytes(1, LEN), deadline()).unwrap();
    let mut got = vec![0; LEN];
    program.read_exact(&mut got).unwrap();
    assert_bytes(&got, &bytes(1, LEN));
    in_place(&daemon);
}

#[test]
fn socket_to_guest_is_not_copied() {
    let daemon = TestDaemon::new();
    let mut guest = daemon.guest();
    guest.listen(Port::new(1000), 1).unwrap();
    let program = std::thread::scope(|scope| {
        let program = scope.spawn(|| {
            let mut program = connect_guest(&daemon.uds_path(), 1000).unwrap();
            program.write_all(&bytes(2, LEN)).unwrap();
            program
        });
        let stream = guest.wait_accept(Port::new(1000), deadline()).unwrap();
        let mut got = vec![0; LEN];
        guest.wait_recv_exact(stream, &mut got, deadline()).unwrap();
        assert_bytes(&got, &bytes(2, LEN));
        program.join().unwrap()
    });
    in_place(&daemon);
    drop(program);
}

/// One copy, and it is the one from guest to guest.
fn siblings(workers: usize) {
    // A slow machine is not to be taken for a stalled receiver.
    let tune: fn(&mut DaemonConfig) = match workers {
        1 => |config| (config.workers, config.hold) = (1, common::PATIENCE),
        _ => |config| (config.workers, config.hold) = (2, common::PATIENCE),
    };
    let daemon = TestDaemon::with(2, tune);
    let (mut one, mut two) = (daemon.guest_of(0, |_| {}), daemon.guest_of(1, |_| {}));
    two.listen(Port::new(1000), 1).unwrap();
    std::thread::scope(|scope| {
        let receiver = scope.spawn(|| {
            let stream = two.wait_accept(Port::new(1000), deadline()).unwrap();
            let mut got = vec![0; LEN];
            two.wait_recv_exact(stream, &mut got, deadline()).unwrap();
            got
        });
        let to = Address {
            cid: zerosock::Cid::new(4),
            port: Port::new(1000),
        };
        let stream = one.wait_connect(to, deadline()).unwrap();
        // No more at once than the receiver has buffers for, so that nothing stalls.
        let mut sent = 0;
        for part in bytes(3, LEN).chunks(4096) {
            one.wait_send(stream, part, deadline()).unwrap();
            sent += part.len() as u64;
            eventually_with(&mut one, "passed on", |_| {
                daemon.stats().is_none_or(|stats| stats.tx_bytes == sent)
            });
        }
        eventually_with(&mut one, "everything received", |_| receiver.is_finished());
        assert_bytes(&receiver.join().unwrap(), &bytes(3, LEN));
    });
    in_place(&daemon);
}

/// Small packets as fast as they go: a receiver that keeps up is no reason to copy twice.
#[test]
fn small_packets_to_a_sibling_are_copied_once() {
    const LEN: usize = 4 << 20;
    let daemon = TestDaemon::with(2, |config| {
        config.workers = 1;
        // A slow machine is not to be taken for a stalled receiver.
        config.hold = common::PATIENCE;
    });
    let (mut one, mut two) = (daemon.guest_of(0, |_| {}), daemon.guest_of(1, |_| {}));
    two.listen(Port::new(1000), 1).unwrap();
    std::thread::scope(|scope| {
        let receiver = scope.spawn(|| {
            let stream = two.wait_accept(Port::new(1000), deadline()).unwrap();
            let mut got = vec![0; LEN];
            two.wait_recv_exact(stream, &mut got, deadline()).unwrap();
            for part in bytes(6, LEN).chunks(1000) {
                two.wait_send(stream, part, deadline()).unwrap();
            }
            got
        });
        let to = Address {
            cid: zerosock::Cid::new(4),
            port: Port::new(1000),
        };
        let stream = one.wait_connect(to, deadline()).unwrap();
        for part in bytes(5, LEN).chunks(1000) {
            one.wait_send(stream, part, deadline()).unwrap();
        }
        // And back: the side that accepted sends as the side that connected does.
        let mut back = vec![0; LEN];
        one.wait_recv_exact(stream, &mut back, deadline()).unwrap();
        assert_bytes(&back, &bytes(6, LEN));
        assert_bytes(&receiver.join().unwrap(), &bytes(5, LEN));
    });
    eventually("all counted", || {
        daemon
            .stats()
            .is_none_or(|stats| stats.tx_bytes == 2 * LEN as u64)
    });
    if !daemon.is_ours("small_packets_to_a_sibling_are_copied_once") {
        return;
    }
    let stats = daemon.stats().expect("our device");
    // A receiver that the scheduler keeps from its CPU holds more than its share.
    assert!(stats.copied_bytes < LEN as u64 / 2, "{stats:?}");
}

#[test]
fn sibling_to_sibling_is_copied_once() {
    siblings(1);
}

#[test]
fn sibling_to_sibling_on_another_worker_is_copied_once() {
    siblings(2);
}

/// A reader that stalls makes us copy, but no more than the guest was promised.
#[test]
fn a_stalled_reader_costs_one_bounded_copy() {
    const BUF_ALLOC: u64 = 262_144;
    let daemon = TestDaemon::new();
    let listener = daemon.host_listener(1000);
    let mut guest = daemon.guest();
    let stream = guest.wait_connect(host(1000), deadline()).unwrap();
    let (mut program, _) = listener.accept().unwrap();
    let all = bytes(4, 2 << 20);
    let mut sent = 0;
    // Until the guest has no credit left and what was held has been copied out.
    eventually_with(&mut guest, "stalled", |guest| {
        sent += guest.send(stream, &all[sent..]).unwrap_or(0);
        daemon.stats().is_none_or(|stats| {
            stats.copied_bytes > 0 && stats.rx_bytes == stats.in_place_bytes + stats.copied_bytes
        })
    });
    if let Some(stats) = daemon.stats() {
        assert!(stats.copied_bytes <= BUF_ALLOC, "{stats:?}");
    }
    let reader = std::thread::spawn(move || {
        let mut got = Vec::new();
        program.read_to_end(&mut got).unwrap();
        got
    });
    guest.wait_send(stream, &all[sent..], deadline()).unwrap();
    guest.shutdown(
        stream,
        Directions {
            receive: false,
            send: true,
        },
    );
    eventually_with(&mut guest, "everything read", |_| reader.is_finished());
    assert_bytes(&reader.join().unwrap(), &all);
    eventually("every byte accounted for", || {
        daemon
            .stats()
            .is_none_or(|s| s.in_place_bytes + s.copied_bytes == all.len() as u64)
    });
}
