//! Credit: single rules, and a sender and a receiver joined by a plain list.

use super::*;
use proptest::prelude::*;
use std::collections::VecDeque;

fn sender(first: u32, peer_buf_alloc: u32) -> TxCredit {
    let mut tx = TxCredit::new(first, u32::MAX);
    assert!(tx.update(peer_buf_alloc, first));
    tx
}

fn send(tx: &mut TxCredit, len: u32) -> u32 {
    let got = tx.reserve(len);
    if got > 0 {
        tx.commit(got, got);
    }
    got
}

/// virtio 1.2, 5.10.6.3: payload must not exceed the peer's free space.
#[test]
fn space_that_is_used_before_it_is_announced_gives_no_more_credit() {
    let mut rx = RxCredit::new(0, 100);
    rx.announce();
    let take = |rx: &mut RxCredit, len: u32| {
        assert!(rx.allows(len));
        rx.receive(len);
    };
    take(&mut rx, 100);
    rx.consume(40, 100).unwrap();
    // The peer does not know of this space, and may use it.
    take(&mut rx, 40);
    rx.consume(70, 100).unwrap();
    assert_eq!((rx.unread(), rx.window()), (30, 100));
    assert!(rx.allows(70) && !rx.allows(71));
    rx.announce();
    assert_eq!(rx.window(), 100);
    // An old promise stays: the peer was told of 100 bytes from 110 on.
    rx.set_buf_alloc(10);
    assert!(rx.allows(70) && !rx.allows(71));
}

#[test]
fn free_space_is_the_buffer_minus_bytes_in_flight() {
    let mut tx = sender(0, 1000);
    assert_eq!(tx.available(), 1000);
    assert_eq!(send(&mut tx, 600), 600);
    assert_eq!(tx.available(), 0, "one packet fits a buffer this small");
    assert!(tx.update(1000, 600));
    assert_eq!(tx.available(), 1000);
    assert!(tx.update(1_000_000, 600));
    assert_eq!(send(&mut tx, u32::MAX), MAX_PAYLOAD);
}

/// CVE-2026-23069.
#[test]
fn a_shrinking_buffer_gives_no_credit() {
    let mut tx = sender(0, 100_000);
    send(&mut tx, 60_000);
    assert!(tx.update(10_000, 0));
    assert_eq!((tx.available(), tx.stall()), (0, Stall::Window));
    assert!(tx.update(10_000, 50_000));
    assert_eq!(tx.available(), 0);
    assert!(tx.update(10_001, 50_000));
    assert_eq!(tx.available(), 1);
}

#[test]
fn fwd_cnt_cannot_run_ahead_or_back() {
    let mut tx = sender(7, 1000);
    send(&mut tx, 10);
    assert!(!tx.update(1000, 18));
    assert_eq!(tx.in_flight(), 10);
    assert!(tx.update(1000, 12));
    assert!(!tx.update(1000, 11));
    assert!(!tx.update(1000, 7u32.wrapping_sub(1)));
    assert_eq!(tx.in_flight(), 5);
}

#[test]
fn counters_wrap() {
    let first = u32::MAX - 5;
    let mut tx = sender(first, 1000);
    send(&mut tx, 100);
    assert_eq!((tx.tx_cnt(), tx.in_flight()), (94, 100));
    assert!(tx.update(1000, u32::MAX));
    assert_eq!(tx.in_flight(), 95);
    assert!(tx.update(1000, 94));
    assert_eq!((tx.available(), tx.packets()), (1000, 0));

    let mut rx = RxCredit::new(first, 100);
    rx.announce();
    assert!(rx.allows(100) && !rx.allows(101));
    rx.receive(100);
    assert_eq!((rx.unread(), rx.allows(1)), (100, false));
    assert_eq!(rx.consume(49, u32::MAX), Some(false));
    assert_eq!(rx.consume(1, u32::MAX), Some(true));
    assert_eq!(rx.announce(), (100, 44));
}

/// Linux 6.12.92 accepts about 455 unread packets of any size with a buffer of 256 KiB.
#[test]
fn packets_are_limited_as_well_as_bytes() {
    let mut tx = sender(0, 262144);
    let sent = (0..10_000).take_while(|_| send(&mut tx, 1) == 1).count();
    assert_eq!(sent, 262144 / 640);
    assert_eq!(tx.stall(), Stall::Limit);
    assert!(tx.update(262144, 1));
    assert_eq!(tx.available(), 0);
    assert!(tx.update(262144, sent as u32 / 4));
    assert_eq!(tx.packets(), sent as u32 * 3 / 4 + 1);
    assert!(tx.available() > 0);
}

#[test]
fn a_tiny_buffer_still_takes_one_packet() {
    let mut tx = sender(0, 10);
    assert_eq!(send(&mut tx, 3), 3);
    assert_eq!((tx.available(), tx.stall()), (0, Stall::Limit));
    assert!(tx.update(10, 3));
    assert_eq!(tx.available(), 10);
}

/// SO_VM_SOCKETS_BUFFER_SIZE may be as small as 128. After the peer has read, no packet is
/// outstanding that a small one could wait for.
#[test]
fn small_packets_do_not_wait_when_nothing_is_outstanding() {
    for buf_alloc in [1, 128, 639, 640, 1279, 1280, 2048, 4096, 262_144] {
        let mut tx = sender(0, buf_alloc);
        for n in 1..10 {
            assert!(!tx.nears_packet_limit(), "a window of {buf_alloc}");
            assert_eq!(send(&mut tx, 1), 1);
            assert!(tx.update(buf_alloc, n));
        }
        assert_eq!(tx.reserve(1), 1);
        assert_eq!(
            tx.nears_packet_limit(),
            buf_alloc < 3 * PACKET_OVERHEAD,
            "{buf_alloc}"
        );
    }
}

#[test]
fn reservations_count_until_cancelled() {
    let mut tx = sender(0, 10_000);
    assert_eq!(tx.reserve(9_000), 9_000);
    assert_eq!(tx.reserve(9_000), 1_000);
    assert_eq!(tx.reserve(1), 0);
    tx.cancel(9_000);
    tx.commit(1_000, 10);
    assert_eq!((tx.available(), tx.in_flight()), (9_990, 10));
}

#[test]
fn the_senders_own_limit_applies() {
    let mut tx = TxCredit::new(0, 100);
    assert!(tx.update(1000, 0));
    assert_eq!(tx.reserve(500), 100);
    assert_eq!(tx.stall(), Stall::Limit);
}

#[test]
fn credit_given_before_shrinking_stays_valid() {
    let mut rx = RxCredit::new(0, 1000);
    rx.announce();
    rx.set_buf_alloc(10);
    rx.announce();
    assert!(rx.allows(1000) && !rx.allows(1001));
    rx.receive(1000);
    assert_eq!(rx.consume(1000, u32::MAX), Some(true));
    rx.announce();
    assert!(rx.allows(10) && !rx.allows(11));
}

#[test]
fn a_credit_request_is_answered_before_half_a_buffer_is_free() {
    let mut rx = RxCredit::new(0, 1000);
    rx.announce();
    rx.receive(3);
    rx.handle_credit_request();
    rx.announce();
    assert_eq!(rx.consume(1, u32::MAX), Some(true));
    assert_eq!(rx.consume(2, u32::MAX), Some(true));
    rx.receive(1);
    assert_eq!(rx.consume(1, u32::MAX), Some(false));
    assert_eq!(rx.consume(1, u32::MAX), None);
}

#[test]
fn a_peer_that_waits_learns_of_each_quarter_and_of_the_last_byte() {
    let mut rx = RxCredit::new(0, 1000);
    rx.announce();
    rx.receive(402);
    rx.handle_credit_request();
    rx.announce();
    let mut updates = Vec::new();
    for at in 1..=402 {
        if rx.consume(1, u32::MAX) == Some(true) {
            updates.push(at);
            rx.announce();
        }
    }
    assert_eq!(updates, [101, 202, 303, 402]);
    // A small buffer of the peer bounds the step.
    rx.receive(402);
    rx.handle_credit_request();
    assert_eq!(rx.consume(19, 40), Some(false));
    assert_eq!(rx.consume(1, 40), Some(true));
}

proptest! {
    /// A sender and a receiver with a plain list of packets between them:
    /// credit is never overrun, and the epochs never count fewer packets
    /// than the list holds.
    #[test]
    fn sender_and_receiver_agree(
        first in prop_oneof![Just(0u32), (u32::MAX - 5000)..],
        size in 1u32..5000,
        steps in prop::collection::vec((0u8..4, 1u32..3000), 1..300),
    ) {
        let mut rx = RxCredit::new(first, size);
        let mut tx = TxCredit::new(first, u32::MAX);
        let (mut queued, mut announcements) = (VecDeque::new(), VecDeque::new());
        announcements.push_back(rx.announce());
        for (step, n) in steps {
            match step {
                0 => {
                    let max = (tx.peer_buf_alloc() / PACKET_OVERHEAD).max(1) as usize;
                    let got = tx.reserve(n);
                    if got > 0 {
                        let len = got.min(n / 2 + 1);
                        tx.commit(got, len);
                        prop_assert!(rx.allows(len), "overrun");
                        rx.receive(len);
                        queued.push_back(len);
                        prop_assert!(queued.len() <= max);
                    }
                }
                1 => {
                    if let Some(len) = queued.pop_front() {
                        prop_assert!(rx.consume(len, u32::MAX).is_some());
                    }
                    announcements.push_back(rx.announce());
                }
                2 => {
                    rx.set_buf_alloc(n);
                    announcements.push_back(rx.announce());
                }
                _ => {
                    if let Some((buf_alloc, fwd_cnt)) = announcements.pop_front() {
                        prop_assert!(tx.update(buf_alloc, fwd_cnt));
                    }
                }
            }
            prop_assert!(tx.packets() as usize >= queued.len());
        }
    }

    /// Whatever a peer says, the free space is never above its buffer.
    #[test]
    fn no_header_invents_credit(
        first in any::<u32>(),
        steps in prop::collection::vec((any::<u32>(), any::<u32>(), 0u32..70_000), 1..100),
    ) {
        let mut tx = TxCredit::new(first, u32::MAX);
        for (buf_alloc, fwd_cnt, n) in steps {
            let near = tx.tx_cnt().wrapping_sub(fwd_cnt % 100_000);
            tx.update(buf_alloc, if n % 2 == 0 { near } else { fwd_cnt });
            prop_assert!(tx.available() <= buf_alloc);
            send(&mut tx, n);
            prop_assert!(u64::from(tx.available()) + u64::from(tx.in_flight())
                <= u64::from(buf_alloc).max(u64::from(tx.in_flight())));
        }
    }
}
