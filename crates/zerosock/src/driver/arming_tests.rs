//! Before a driver sleeps, it requests notifications queue by queue (`arm`). The device does not
//! notify for work that it made available before it saw the request; the driver must find that work
//! and stay awake.

use crate::table::sending::SendingCalls;
use zerosock_proto::vsock::QueuePairs;
use zerosock_proto::wire::vsock::{Op, Repr};
use zerosock_proto::{Address, Port};

use super::Driver;
use super::test_device::{TestDevice, connect, pairs};
use crate::table::backend::Backend;
use crate::table::transfers::Publish;

/// A driver with `count` queue pairs, each with 32 slots in each direction.
fn driver(count: u16) -> (Driver, TestDevice) {
    let count = QueuePairs::new(count).unwrap();
    pairs(count, |config| config.queue_size = 64)
}

/// Makes the device send a packet on the current queue pair. Returns whether the device must
/// notify.
fn device_sends(peer: &mut TestDevice) -> bool {
    let header = peer.header;
    peer.header = Repr {
        dst: Address::new(header.dst.cid, Port::new(9999)),
        ..header
    };
    peer.send(Op::Rst, &[]);
    peer.header = header;
    peer.rx.publish()
}

/// Makes the device take a packet. Returns whether the device must notify.
fn device_takes(peer: &mut TestDevice) -> bool {
    peer.take().expect("a packet");
    peer.tx.publish()
}

/// Takes turns without requesting notifications, until there is no more work.
fn take_turns(driver: &mut Driver) {
    driver.disarm();
    while Backend::drive(driver).unwrap() {}
}

#[test]
fn arming_finds_a_packet_that_arrived_without_a_notification() {
    let (mut driver, mut peer) = driver(3);
    for pair in 0..3 {
        if pair > 0 {
            peer.swap(pair);
        }
        // The first batch of a queue always notifies.
        device_sends(&mut peer);
        take_turns(&mut driver);
        assert!(!Backend::arm(&mut driver), "pair {pair}: no packet");
        assert!(device_sends(&mut peer), "pair {pair}: requested by arm");
        take_turns(&mut driver);
        assert!(!device_sends(&mut peer), "pair {pair}: not requested");
        assert!(Backend::arm(&mut driver), "pair {pair}: a packet waits");
        take_turns(&mut driver);
        if pair > 0 {
            peer.swap(pair);
        }
    }
}

#[test]
fn arming_finds_a_slot_that_returned_without_a_notification() {
    let (mut driver, mut peer) = driver(1);
    let id = connect(&mut driver, &mut peer);
    let fill = |driver: &mut Driver| {
        while driver.write(id, b"x", Publish::Later).is_ok() {}
        Backend::flush(driver);
    };
    fill(&mut driver);
    // The first batch of a queue always notifies.
    device_takes(&mut peer);
    take_turns(&mut driver);
    fill(&mut driver);
    assert!(!Backend::arm(&mut driver), "no slot is free");
    assert!(device_takes(&mut peer), "requested by arm");
    take_turns(&mut driver);
    fill(&mut driver);
    assert!(!device_takes(&mut peer), "not requested");
    assert!(Backend::arm(&mut driver), "a slot is free");
}
