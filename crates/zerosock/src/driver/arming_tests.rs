//! Arming: before a driver sleeps, it requests notifications queue by queue. Work that arrived
//! before the device saw a request brings no notification; the driver must find it and stay awake.

use zerosock_proto::vsock::QueuePairs;
use zerosock_proto::wire::vsock::{Op, Repr};
use zerosock_proto::{Address, Port};

use super::Driver;
use super::bare::{Peer, connect, pairs};
use crate::table::backend::Backend;

/// A driver with `count` queue pairs of 32 slots each way.
fn driver(count: u16) -> (Driver, Peer) {
    let count = QueuePairs::new(count).unwrap();
    pairs(count, |config| config.queue_size = 64)
}

/// The device sends a packet of any queue pair. Returns whether it must notify.
fn send(peer: &mut Peer) -> bool {
    let header = peer.header;
    peer.header = Repr {
        dst: Address::new(header.dst.cid, Port::new(9999)),
        ..header
    };
    peer.send(Op::Rst, &[]);
    peer.header = header;
    peer.rx.publish()
}

/// The device takes a packet. Returns whether it must notify.
fn take(peer: &mut Peer) -> bool {
    peer.take().expect("a packet");
    peer.tx.publish()
}

/// Takes a turn without requesting notifications.
fn work(driver: &mut Driver) {
    driver.disarm();
    while Backend::turn(driver).unwrap() {}
}

#[test]
fn arming_finds_a_packet_that_brought_no_call() {
    let (mut driver, mut peer) = driver(3);
    for pair in 0..3 {
        if pair > 0 {
            peer.swap(pair);
        }
        // The first batch of a queue always notifies.
        send(&mut peer);
        work(&mut driver);
        assert!(!Backend::arm(&mut driver), "pair {pair}: nothing is there");
        assert!(send(&mut peer), "pair {pair}: a call is wanted");
        work(&mut driver);
        assert!(!send(&mut peer), "pair {pair}: one call was wanted");
        assert!(Backend::arm(&mut driver), "pair {pair}: a packet is there");
        work(&mut driver);
        if pair > 0 {
            peer.swap(pair);
        }
    }
}

#[test]
fn arming_finds_a_slot_that_returned_without_a_call() {
    let (mut driver, mut peer) = driver(1);
    let id = connect(&mut driver, &mut peer);
    let fill = |driver: &mut Driver| {
        while driver.write(id, b"x").is_ok() {}
        Backend::flush(driver);
    };
    fill(&mut driver);
    // The first batch of a queue always notifies.
    take(&mut peer);
    work(&mut driver);
    fill(&mut driver);
    assert!(!Backend::arm(&mut driver), "no slot is free");
    assert!(take(&mut peer), "a call is wanted");
    work(&mut driver);
    fill(&mut driver);
    assert!(!take(&mut peer), "one call was wanted");
    assert!(Backend::arm(&mut driver), "a slot is free");
}
