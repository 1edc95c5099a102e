//! No copy of a datagram between a process and the host; one through the daemon.

use std::io::Write;

use super::*;
use crate::common::eventually;
use zerosock::vsock::{Lease, Trust};

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

/// The place where a loan's bytes are written. A datagram that was copied has another file or
/// another offset.
fn travels_in_place(from: &Datagram, to: &Datagram) {
    let mut loan = from.loan(to.local_addr(), 64).unwrap();
    assert!(loan.is_in_place());
    loan.write_all(b"where it is read").unwrap();
    assert_eq!((loan.capacity(), loan.filled()), (64, 16));
    assert_eq!(loan.send().unwrap(), 16);
    let got = to.recv_lease().unwrap();
    assert!(got.is_in_place());
    assert_eq!(got.to_vec(), b"where it is read");
    let lease: &Lease<'_> = got.lease().unwrap();
    let (file, _) = place(lease.read().as_ptr());
    drop(got);
    // The receiver has the sender's memory mapped, not a buffer of its own.
    assert!(file.contains(':'), "a file's device and inode: {file}");
    assert!(!file.starts_with("00:00 0"), "anonymous memory is a copy");
}

#[test]
fn between_a_process_and_the_host_nothing_is_copied() {
    let hub = Hub::new();
    let process = hub.process();
    let (ours, theirs) = (at_host(&hub, PORT), at(&process, PORT));
    travels_in_place(&theirs, &ours);
    let (sent, got) = (process.stats(), hub.stats());
    assert_eq!((sent.sent_in_place, sent.copied_in), (16, 0));
    assert_eq!((got.received_in_place, got.copied_aside), (16, 0));
    travels_in_place(&ours, &theirs);
    let (sent, got) = (hub.stats(), process.stats());
    assert_eq!((sent.sent_in_place, sent.copied_in), (16, 0));
    assert_eq!((got.received_in_place, got.copied_aside), (16, 0));
}

#[test]
fn through_the_daemon_it_is_one_copy() {
    let serve = Serve::new(2);
    let (one, other) = (serve.process(), serve.process());
    travels_in_place(&at(&one, PORT), &at(&other, PORT));
    // The worker counts after the receiver has been notified.
    eventually("the bytes are counted", || {
        serve.stats().in_place_bytes == 16
    });
    assert_eq!(serve.stats().copied_bytes, 0);
    assert_eq!(one.stats().copied_in + other.stats().copied_aside, 0);
}

#[test]
fn a_byte_changed_after_the_send_is_visible_to_the_reader() {
    // SAFETY: what is on lease here is read through calls that read as volatile.
    let trust = unsafe { Trust::declare() };
    let hub = Hub::with(|builder| builder.hold(FOR_EVER).trust_processes(trust));
    let process = hub.process_with(|builder| builder.trust_host(trust));
    let (ours, theirs) = (at_host(&hub, PORT), at(&process, PORT));
    theirs.send_to(b"hello", ours.local_addr()).unwrap();
    let got = ours.recv_lease().unwrap();
    assert_eq!(got.lease().unwrap().read().as_slice(), Some(&b"hello"[..]));
    let at = got.lease().unwrap().read().as_ptr();
    let (file, offset) = place(at);
    // The sender's own mapping of the same byte.
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let twin = maps.lines().find_map(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let hex = |word| usize::from_str_radix(word, 16).unwrap();
        let (from, to) = words[0].split_once('-')?;
        let (from, to, start) = (hex(from), hex(to), hex(words[2]));
        let other = from + offset.checked_sub(start)?;
        let same = format!("{} {}", words[3], words[4]) == file && other < to;
        (same && other != at.addr()).then_some(other)
    });
    let twin = at
        .with_addr(twin.expect("mapped by its sender as well"))
        .cast_mut();
    // SAFETY: the sender's mapping, which lives as long as its endpoint; no slice of it exists
    // now.
    unsafe { twin.write_volatile(b'j') };
    assert_eq!(got.to_vec(), b"jello", "not a copy");
}

#[test]
fn loans_come_back_unsent_and_beyond_their_bound_are_private() {
    let hub = Hub::new();
    let process = hub.process();
    let (ours, theirs) = (at_host(&hub, PORT), at(&process, PORT));
    for (from, to) in [(&ours, &theirs), (&theirs, &ours)] {
        for _ in 0..1000 {
            drop(from.loan(to.local_addr(), 10).unwrap());
        }
        let mut loans: Vec<_> = (0..100)
            .map(|_| from.loan(to.local_addr(), 10).unwrap())
            .collect();
        assert!(loans[0].is_in_place() && !loans[99].is_in_place());
        for (at, loan) in loans.iter_mut().enumerate() {
            write!(loan, "{at}").unwrap();
        }
        // In the order of the sends, whatever the kind of loan.
        let last = loans.split_off(98);
        for loan in last.into_iter().chain(loans.drain(..2)) {
            loan.send().unwrap();
        }
        drop(loans);
        for text in ["98", "99", "0", "1"] {
            assert_eq!(recv(to).0, text.as_bytes());
        }
    }
}

#[test]
fn recv_each_gives_plain_slices_of_trusted_peers_only() {
    // SAFETY: no code here writes these bytes while they are leased.
    let trust = unsafe { Trust::declare() };
    for trusted in [true, false] {
        let hub = Hub::with(|builder| match trusted {
            true => builder.trust_processes(trust),
            false => builder,
        });
        let process = hub.process_with(|builder| match trusted {
            true => builder.trust_host(trust),
            false => builder,
        });
        let (ours, theirs) = (at_host(&hub, PORT), at(&process, PORT));
        for (from, to) in [(&ours, &theirs), (&theirs, &ours)] {
            for _ in 0..20 {
                from.send_to(b"shown", to.local_addr()).unwrap();
                let look = |shown: zerosock::vsock::Message<'_>, _| {
                    let plain = (trusted || !shown.is_in_place()).then_some(&b"shown"[..]);
                    assert_eq!((shown.as_slice(), shown.len()), (plain, 5));
                };
                assert_eq!(to.recv_each(9, look).unwrap(), 1);
            }
        }
    }
}

#[test]
fn bytes_of_a_loan_that_were_skipped_are_zeros() {
    let hub = Hub::new();
    let process = hub.process();
    let (ours, theirs) = (at_host(&hub, PORT), at(&process, PORT));
    for (from, to) in [(&ours, &theirs), (&theirs, &ours)] {
        // Every buffer has held earlier bytes.
        for _ in 0..1000 {
            from.send_to(&[0xee; 3000], to.local_addr()).unwrap();
            assert_eq!(recv(to).0.len(), 3000);
        }
        let mut loan = from.loan(to.local_addr(), 3000).unwrap();
        assert!(loan.is_in_place());
        loan.write_at(3, b"some").unwrap();
        assert_eq!(loan.write_at(2995, b"at the end").unwrap(), 5);
        loan.send().unwrap();
        let expected = [&[0; 3], &b"some"[..], &[0; 2988], b"at th"].concat();
        assert_eq!(recv(to).0, expected);
        // Without written bytes, the offset still sets the length.
        let mut loan = from.loan(to.local_addr(), 3000).unwrap();
        assert_eq!(loan.write_at(100, b"").unwrap(), 0);
        assert_eq!(loan.send().unwrap(), 100);
        assert_eq!(recv(to).0, [0; 100]);
    }
}
