//! When a driver requests a notification for a waiting sender. The device is the test.

use zerosock_proto::vsock::datagram::{DatagramId, DatagramLimits, OVERHEAD};
use zerosock_proto::{Address, Cid, Port};

use super::QUEUE_PAIR;
use crate::driver::Driver;
use crate::driver::test_device::{TestDevice, pair};
use crate::table::backend::Backend;
use crate::table::calls::InboxCalls;
use crate::table::datagrams::{DatagramBackend, DatagramFault};

const TO: Address = Address::new(Cid::HOST, Port::new(9));

/// A driver, its device, and a socket with a send buffer of `send` bytes.
fn scene(send: u32) -> (Driver, TestDevice, DatagramId) {
    let (mut driver, mut peer) = pair(|config| {
        config.queue_size = 128;
        config.tx_buffer_size = 4096;
    });
    let limits = DatagramLimits {
        send,
        ..DatagramLimits::default()
    };
    let (id, _) = InboxCalls::bind(&mut driver, Port::ANY, limits).unwrap();
    // The first returned packet always notifies.
    DatagramBackend::send(&mut driver, id, TO, b"").unwrap();
    Backend::flush(&mut driver);
    assert!(take(&mut peer));
    driver.store.queue_pairs[QUEUE_PAIR].tx.reap().unwrap();
    driver.collect_consumed_datagrams();
    (driver, peer, id)
}

/// Sends until it would block; returns the number of datagrams sent.
fn fill(driver: &mut Driver, id: DatagramId, bytes: &[u8]) -> usize {
    let mut sent = 0;
    loop {
        match DatagramBackend::send(driver, id, TO, bytes) {
            Ok(()) => sent += 1,
            Err(fault) => {
                assert_eq!(fault, DatagramFault::WouldBlock);
                Backend::flush(driver);
                return sent;
            }
        }
    }
}

/// The device takes a packet. Returns whether it must notify.
fn take(peer: &mut TestDevice) -> bool {
    let chain = peer.tx.pop().unwrap().expect("a packet");
    peer.tx.complete(chain, 0);
    peer.tx.publish()
}

#[test]
fn one_notification_is_requested_when_half_of_the_buffer_is_free() {
    let (mut driver, mut peer, id) = scene(8 * (100 + OVERHEAD));
    for _ in 0..3 {
        let sent = fill(&mut driver, id, &[7; 100]);
        assert!(sent == 8 || sent == 4, "{sent}: all of it, or half of it");
        assert!(!Backend::arm(&mut driver));
        let calls = [(); 4].map(|()| take(&mut peer));
        assert_eq!(calls, [false, false, false, true]);
        Backend::disarm(&mut driver);
        Backend::drive(&mut driver).unwrap();
        assert!(DatagramBackend::may_send(&mut driver, id, Some(TO)));
    }
}

/// A datagram of sixteen packets: once some have returned, a notification requested after sixteen
/// more would never come.
#[test]
fn the_last_packet_of_a_long_datagram_brings_a_call() {
    let (mut driver, mut peer, id) = scene(1000);
    assert_eq!(fill(&mut driver, id, &[7; 65536]), 1);
    for left in (0..16).rev() {
        assert!(!Backend::arm(&mut driver), "{left} are in flight");
        let called = take(&mut peer);
        Backend::disarm(&mut driver);
        assert!(called, "the next packet may be the last one");
        Backend::drive(&mut driver).unwrap();
        let may = DatagramBackend::may_send(&mut driver, id, Some(TO));
        assert_eq!(may, left == 0);
    }
}

/// Datagrams reclaimed by a search for a free slot bring no notification any more.
#[test]
fn arming_finds_datagrams_consumed_without_a_notification() {
    let (mut driver, mut peer, id) = scene(4 * (100 + OVERHEAD));
    assert_eq!(fill(&mut driver, id, &[7; 100]), 4);
    for _ in 0..4 {
        take(&mut peer);
    }
    assert!(driver.store.queue_pairs[QUEUE_PAIR].tx.reap().unwrap());
    assert!(Backend::arm(&mut driver), "the caller must not sleep");
    Backend::disarm(&mut driver);
    assert_eq!(driver.datagrams.inboxes.table.poll_writable(), Some(id));
    assert!(!Backend::arm(&mut driver), "once");
}

#[test]
fn a_spinning_sender_sees_consumed_datagrams() {
    let (mut driver, mut peer, id) = scene(100 + OVERHEAD);
    assert!(!Backend::pending(&mut driver));
    assert_eq!(fill(&mut driver, id, &[7; 100]), 1);
    assert!(!Backend::pending(&mut driver));
    take(&mut peer);
    assert!(Backend::pending(&mut driver));
    Backend::drive(&mut driver).unwrap();
    assert!(!Backend::pending(&mut driver));
    assert!(DatagramBackend::may_send(&mut driver, id, Some(TO)));
    // No sender waits: consumed packets do not make the socket ready.
    DatagramBackend::send(&mut driver, id, TO, b"x").unwrap();
    Backend::flush(&mut driver);
    take(&mut peer);
    assert!(!Backend::pending(&mut driver));
}
