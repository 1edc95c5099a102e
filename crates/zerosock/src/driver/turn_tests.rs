//! Limits on the packets that one turn, or one reading call, receives before the caller and other
//! connections run.

use crate::table::sending::SendingCalls;
use zerosock_proto::wire::vsock::{Op, Repr};

use super::test_device::{TestDevice, connect, pair};
use super::{Driver, StreamId};
use crate::table::backend::{Backend, ReadySource};
use crate::table::calls::ConnectionCalls;
use crate::table::transfers::Publish;

/// Packets that a turn receives.
const TURN: u64 = 256;

/// A driver with 512 slots each way, a connection with a peer that sends without end and one with a
/// single byte; the headers of both.
fn driver_with_two_connections() -> (Driver, TestDevice, [(StreamId, Repr); 2]) {
    let (mut driver, mut peer) = pair(|config| config.queue_size = 1024);
    let ends = [(); 2].map(|()| {
        let id = connect(&mut driver, &mut peer);
        (id, peer.header)
    });
    while driver.next_ready().is_some() {}
    (driver, peer, ends)
}

/// The device fills `count` buffers on a connection.
fn flood(peer: &mut TestDevice, header: Repr, count: usize) {
    peer.header = header;
    for _ in 0..count {
        peer.send(Op::Rw, b"x");
    }
}

fn taken(driver: &Driver) -> u64 {
    Backend::stats(driver).packets_received
}

#[test]
fn a_turn_receives_a_bounded_number_of_packets_and_reports_each_connection_once() {
    let (mut driver, mut peer, [(bulk, from), (small, other)]) = driver_with_two_connections();
    let mut out = [0; 1024];
    for round in 0..20 {
        flood(&mut peer, from, 200);
        flood(&mut peer, other, 1);
        flood(&mut peer, from, 120);
        let before = taken(&driver);
        assert!(Backend::drive(&mut driver).unwrap());
        assert_eq!(taken(&driver) - before, TURN, "round {round}");
        assert_eq!(driver.unread(bulk) + driver.unread(small), TURN as usize);
        let told: Vec<_> = std::iter::from_fn(|| driver.next_ready()).collect();
        assert_eq!(told, [ReadySource::Conn(bulk), ReadySource::Conn(small)]);
        assert_eq!(driver.read(small, &mut out, false), Ok(1));
        assert_eq!(driver.read(bulk, &mut out, false), Ok(255));
        assert!(driver.pending(), "the rest is still to be taken in");
        Backend::drive(&mut driver).unwrap();
        assert_eq!(taken(&driver) - before, 321);
        assert_eq!(driver.read(bulk, &mut out, false), Ok(65));
        while driver.next_ready().is_some() {}
        Backend::flush(&mut driver);
        while peer.take().is_some() {}
    }
}

/// The fast path, which shows packets directly from the queue.
#[test]
fn a_call_receives_a_bounded_number_of_packets() {
    let (mut driver, mut peer, [(bulk, from), (small, other)]) = driver_with_two_connections();
    let mut out = [0; 1024];
    for _ in 0..20 {
        flood(&mut peer, other, 1);
        flood(&mut peer, from, 320);
        let before = taken(&driver);
        assert_eq!(driver.read(bulk, &mut out, false), Ok(255));
        assert_eq!(taken(&driver) - before, TURN);
        assert_eq!(
            driver.unread(small),
            1,
            "the other connection's packet is held"
        );
        Backend::flush(&mut driver);
        flood(&mut peer, from, 250);
        let mut seen = 0;
        let each = driver.consume_in_place(bulk, usize::MAX, &mut |payload| {
            seen += payload.len();
            true
        });
        assert_eq!((each, seen), (Ok(256), 256));
        assert_eq!(driver.read(bulk, &mut out, false), Ok(59));
        assert_eq!(driver.read(small, &mut out, false), Ok(1));
        Backend::drive(&mut driver).unwrap();
        while driver.next_ready().is_some() {}
        while peer.take().is_some() {}
    }
}

/// A connection that finds no slot, beside one that takes every slot that returns.
#[test]
fn a_waiting_connection_gets_a_slot_beside_a_greedy_sender() {
    let (mut driver, mut peer, [(bulk, _), (small, _)]) = driver_with_two_connections();
    let mut sent = 0;
    for _ in 0..20 {
        // The order of notification is the order in which they retry.
        let mut order: Vec<_> = std::iter::from_fn(|| driver.next_ready()).collect();
        order.push(ReadySource::Conn(bulk));
        order.push(ReadySource::Conn(small));
        for ready in order {
            if ready == ReadySource::Conn(small) {
                sent += usize::from(driver.write(small, b"x", Publish::Later).is_ok());
            } else {
                while driver.write(bulk, b"x", Publish::Later).is_ok() {}
            }
        }
        Backend::flush(&mut driver);
        for _ in 0..3 {
            assert!(peer.take().is_some());
        }
        Backend::drive(&mut driver).unwrap();
    }
    assert!(sent >= 9, "{sent} of 20");
}
