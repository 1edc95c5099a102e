//! No copy between a process and the host, in both directions; one copy through the daemon.
//!
//! Shown by counters, by address, and by a byte that is changed at the sender after the commit.

use std::io::{Read, Write};
use std::thread;

use zerosock::attach::{self, AttachConfig};
use zerosock::daemon::{Daemon, DaemonConfig};
use zerosock::vsock::{Endpoint, Stream, Trust};
use zerosock::{Address, Cid};

use super::hub::Hub;
use super::{FOR_EVER, PORT, patient};
use crate::common::{PATIENCE, assert_bytes, bytes, eventually};

/// File and offset of a byte: the same in every process that has it mapped.
fn place(at: *const u8) -> (String, usize) {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    for line in maps.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        let hex = |word| usize::from_str_radix(word, 16).unwrap();
        let (from, to) = words[0].split_once('-').unwrap();
        if (hex(from)..hex(to)).contains(&at.addr()) {
            let file = format!("{} {}", words[3], words[4]);
            return (file, hex(words[2]) + at.addr() - hex(from));
        }
    }
    panic!("{at:?} is not mapped");
}

fn trust() -> Trust {
    // SAFETY: both sides are in this test, and what they change under a lease is read through
    // calls that read as volatile.
    unsafe { Trust::declare() }
}

/// Sends `text` in a loan; returns the place of its first byte.
fn send(stream: &Stream, text: &[u8]) -> *mut u8 {
    let mut loan = stream.loan(text.len()).unwrap();
    assert!(loan.is_in_place());
    let mut slice = loan.as_mut_slice().unwrap();
    slice.copy_from_slice(text);
    let at = slice.as_mut_ptr();
    drop(slice);
    loan.set_filled(text.len());
    assert_eq!(loan.send().unwrap(), text.len());
    at
}

/// Changes a byte that was sent.
fn change(at: *mut u8, byte: u8) {
    // SAFETY: it is in a mapping that lives as long as the sender's endpoint, and no slice of it
    // exists: readers copy.
    unsafe { at.write_volatile(byte) }
}

/// Bytes sent on `from` reach `to` without a copy.
fn is_in_place(from: &Stream, to: &Stream) {
    let at = send(from, b"hello");
    let lease = to.recv().unwrap().unwrap();
    assert!(lease.is_in_place());
    assert_eq!(place(lease.read().as_ptr()), place(at), "the same byte");
    assert_ne!(lease.read().as_ptr(), at.cast_const(), "in two mappings");
    assert_eq!(lease.to_vec(), b"hello");
    change(at, b'j');
    assert_eq!(lease.to_vec(), b"jello", "not a copy");
}

#[test]
fn process_to_host_process_is_not_copied() {
    let hub = Hub::new();
    let process = hub.process_with("p", |builder| builder.trust_host(trust()));
    let (ours, theirs) = hub.joined(&process);
    is_in_place(&theirs, &ours);
    let (sent, got) = (process.stats(), hub.stats());
    assert_eq!((sent.sent_in_place, sent.copied_in), (5, 0));
    assert_eq!((got.received_in_place, got.copied_aside), (5, 0));
}

#[test]
fn host_process_to_process_is_not_copied() {
    let hub = Hub::with(|builder| builder.hold(FOR_EVER).trust_processes(trust()));
    let process = hub.process("p");
    let (ours, theirs) = hub.joined(&process);
    is_in_place(&ours, &theirs);
    let (sent, got) = (hub.stats(), process.stats());
    assert_eq!((sent.sent_in_place, sent.copied_in), (5, 0));
    assert_eq!((got.received_in_place, got.copied_aside), (5, 0));
}

#[test]
fn process_to_process_through_the_daemon_is_copied_once() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("attach.sock");
    let daemon = Daemon::start(DaemonConfig {
        attach: Some(AttachConfig::new(attach::listen(&path).unwrap())),
        // A slow machine must not look like a stalled receiver: its bytes would be copied.
        hold: FOR_EVER,
        ..DaemonConfig::default()
    })
    .unwrap();
    let open = || {
        Endpoint::builder()
            .trust_host(trust())
            .attach(&path)
            .unwrap()
    };
    let (one, two) = (open(), open());
    let listener = two.listen(PORT, 4).unwrap();
    thread::scope(|scope| {
        let accepted = scope.spawn(|| listener.accept_timeout(PATIENCE).unwrap().0);
        let from = patient(one.connect(Address::new(two.cid(), PORT)).unwrap());
        let to = patient(accepted.join().unwrap());
        let at = send(&from, b"hello");
        let lease = to.recv().unwrap().unwrap();
        assert!(lease.is_in_place(), "in the receiver's memory");
        assert_ne!(place(lease.read().as_ptr()).0, place(at).0);
        change(at, b'j');
        assert_eq!(lease.to_vec(), b"hello", "a copy");
        assert_eq!(one.stats().copied_in + two.stats().copied_aside, 0);
        // The worker counts after the receiver has been notified.
        eventually("the bytes are counted", || {
            daemon.stats().in_place_bytes == 5
        });
        assert_eq!(daemon.stats().copied_bytes, 0);
    });
    drop((one, two, listener));
    daemon.shutdown();
}

#[test]
fn many_bytes_both_ways_at_once_are_not_copied() {
    const LEN: usize = 2 << 20;
    let hub = Hub::new();
    let process = hub.process("p");
    let (ours, theirs) = hub.joined(&process);
    let fill = |stream: &Stream, seed| {
        let all = bytes(seed, LEN);
        let mut rest = &all[..];
        while !rest.is_empty() {
            let mut loan = stream.loan(rest.len()).unwrap();
            let took = loan.write(rest).unwrap();
            loan.send().unwrap();
            rest = &rest[took..];
        }
        stream.shutdown(std::net::Shutdown::Write).unwrap();
    };
    let empty = |stream: &Stream, seed| {
        let mut got = Vec::new();
        while let Some(lease) = stream.recv().unwrap() {
            got.extend_from_slice(&lease.to_vec());
        }
        assert_bytes(&got, &bytes(seed, LEN));
    };
    thread::scope(|scope| {
        scope.spawn(|| fill(&ours, 1));
        scope.spawn(|| fill(&theirs, 2));
        scope.spawn(|| empty(&ours, 2));
        empty(&theirs, 1);
    });
    for stats in [hub.stats(), process.stats()] {
        assert_eq!(
            (stats.sent, stats.copied_in, stats.copied_out),
            (LEN as u64, 0, 0)
        );
        assert_eq!(stats.received, LEN as u64);
        // A receiver that the scheduler keeps from its processor holds more than its share, and a lease that
        // was given out in place can be copied later: its bytes count twice.
        let received = stats.received_in_place + stats.copied_aside;
        assert!((LEN..=2 * LEN).contains(&(received as usize)), "{stats:?}");
        assert!(stats.sent_in_place > LEN as u64 / 2, "{stats:?}");
    }
}

#[test]
fn by_name_and_by_number_from_either_side() {
    let hub = Hub::new();
    let process = hub.process("db");
    let listener = process.listen(PORT, 4).unwrap();
    assert_eq!(hub.resolve("db").unwrap(), process.cid());
    assert_eq!(hub.processes().len(), 1);
    thread::scope(|scope| {
        scope.spawn(|| {
            let (stream, peer) = listener.accept_timeout(PATIENCE).unwrap();
            assert_eq!(peer.cid, Cid::HOST);
            (&stream).write_all(b"from the process").unwrap();
        });
        let mut got = String::new();
        let mut stream = patient(hub.connect_name("db", PORT).unwrap());
        stream.read_to_string(&mut got).unwrap();
        assert_eq!(got, "from the process");
    });
    let (ours, theirs) = hub.joined(&process);
    assert_eq!(ours.peer_addr().cid, process.cid());
    (&ours).write_all(b"word").unwrap();
    let mut got = [0; 4];
    (&theirs).read_exact(&mut got).unwrap();
    // Processes find each other too, through the host's device.
    let other = hub.process("web");
    assert_eq!(other.resolve("db").unwrap(), process.cid());
    thread::scope(|scope| {
        scope.spawn(|| {
            let (stream, peer) = listener.accept_timeout(PATIENCE).unwrap();
            assert_eq!(peer.cid, other.cid());
            (&stream).write_all(b"hello").unwrap();
        });
        let mut got = String::new();
        let mut stream = patient(other.connect_name("db", PORT).unwrap());
        stream.read_to_string(&mut got).unwrap();
        assert_eq!(got, "hello");
    });
}
