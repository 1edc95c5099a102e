//! Invalid answers to moves: a device that sends them affects that connection only.

use std::time::Duration;

use zerosock_proto::vsock::{MoveError, QueuePairs};
use zerosock_proto::wire::vsock::{Op, Repr, SocketType};
use zerosock_proto::{Address, Port};

use super::bare::{Peer, SERVER, pairs};
use super::{Driver, StreamId, StreamState};
use crate::table::{backend::Backend, calls::ConnectionCalls, transfers::RecvFault};

/// A driver with three queue pairs, and a connection at the first.
fn connected() -> (Driver, Peer, StreamId) {
    let three = QueuePairs::new(3).unwrap();
    let (mut driver, mut peer) = pairs(three, |config| config.queue_size = 64);
    let id = connect(&mut driver, &mut peer, 0);
    (driver, peer, id)
}

/// A connection that begins at pair `pair`, which the peer uses.
fn connect(driver: &mut Driver, peer: &mut Peer, pair: u16) -> StreamId {
    let three = QueuePairs::new(3).unwrap();
    let mut ports = (5000..).map(Port::new);
    let fits = |port: &Port| {
        let local = Address::new(super::bare::CID, *port);
        let queue_pairs = &driver.store.queue_pairs;
        three.of_flow(*port, SERVER) == pair
            && !queue_pairs
                .iter()
                .any(|queue_pair| queue_pair.shard.is_connected(local, SERVER))
    };
    let port = ports.find(fits).unwrap();
    let id = Backend::connect(driver, port, SERVER, SocketType::Stream).unwrap();
    Backend::flush(driver);
    peer.header.dst = peer.take_op(Op::Request).src;
    peer.header.fwd_cnt = 0;
    peer.send(Op::Response, &[]);
    Backend::drive(driver).unwrap();
    assert_eq!(driver.state(id), Some(StreamState::Connected));
    assert_eq!(driver.queue_pair(id), Some(pair));
    id
}

/// Requests a move; the device has received MOVE.
fn ask(driver: &mut Driver, peer: &mut Peer, id: StreamId, pair: u16) {
    driver.move_to_pair(id, pair).unwrap();
    Backend::flush(driver);
    assert_eq!(peer.take_op(Op::Move).flags, u32::from(pair));
    assert!(driver.is_moving(id));
}

/// Sends MOVED with that pair number.
fn send_moved(driver: &mut Driver, peer: &mut Peer, pair: u32) {
    peer.header.flags = pair;
    peer.send(Op::Moved, &[]);
    peer.header.flags = 0;
    let _ = Backend::drive(driver).unwrap();
    Backend::flush(driver);
}

/// The packets that the driver sent at the pair that the peer uses.
fn taken(peer: &mut Peer) -> Vec<(Op, Repr)> {
    let headers = std::iter::from_fn(|| peer.take());
    headers
        .map(|(header, _)| (header.op.known().unwrap(), header))
        .collect()
}

#[test]
fn a_move_to_an_unrequested_pair_is_accepted() {
    let (mut driver, mut peer, id) = connected();
    ask(&mut driver, &mut peer, id, 1);
    send_moved(&mut driver, &mut peer, 2);
    assert_eq!(driver.queue_pair(id), Some(2));
    peer.swap(2);
    assert_eq!(taken(&mut peer)[0].0, Op::CreditUpdate);
    peer.send(Op::Rw, b"here");
    Backend::drive(&mut driver).unwrap();
    let mut out = [0; 8];
    assert_eq!(driver.read(id, &mut out, false), Ok(4));
}

#[test]
fn a_move_to_a_missing_pair_closes_the_connection_with_an_event() {
    for wrong in [3, 16, 1 << 16, u32::MAX] {
        let (mut driver, mut peer, id) = connected();
        ask(&mut driver, &mut peer, id, 1);
        peer.send(Op::Rw, b"before");
        send_moved(&mut driver, &mut peer, wrong);
        assert_eq!(driver.state(id), Some(StreamState::Reset), "{wrong}");
        assert!(!driver.is_moving(id));
        let packets = taken(&mut peer);
        assert!(packets.iter().any(|(op, _)| *op == Op::Rst), "{packets:?}");
        // Bytes received before are readable, then the stream ends.
        let mut out = [0; 8];
        assert_eq!(driver.read(id, &mut out, false), Ok(6));
        assert_eq!(driver.read(id, &mut out, false), Err(RecvFault::Reset));
        assert_eq!(driver.move_to_pair(id, 1), Err(MoveError::Stale));
    }
}

#[test]
fn an_unrequested_move_answer_changes_nothing() {
    let (mut driver, mut peer, id) = connected();
    for pair in [0, 1, 2, 3, u32::MAX] {
        send_moved(&mut driver, &mut peer, pair);
        assert_eq!(driver.queue_pair(id), Some(0));
    }
    // A repeated answer changes nothing either: the connection has left that pair.
    ask(&mut driver, &mut peer, id, 1);
    for pair in [1, 2, 0, 1] {
        send_moved(&mut driver, &mut peer, pair);
        assert_eq!(driver.queue_pair(id), Some(1));
    }
    peer.swap(1);
    // A device does not start moves, and a driver does not act as a device.
    peer.header.flags = 2;
    peer.send(Op::Move, &[]);
    peer.header.flags = 0;
    peer.send(Op::Rw, b"on");
    Backend::drive(&mut driver).unwrap();
    assert_eq!(driver.queue_pair(id), Some(1));
    assert_eq!(driver.read(id, &mut [0; 8], false), Ok(2));
}

#[test]
fn a_move_of_an_unknown_connection_is_reset_at_the_named_pair() {
    let (mut driver, mut peer, _) = connected();
    peer.header.dst.port = Port::new(4711);
    for pair in [1, 2] {
        send_moved(&mut driver, &mut peer, pair as u32);
        assert!(taken(&mut peer).is_empty());
        peer.swap(pair);
        let packets = taken(&mut peer);
        assert_eq!(packets.len(), 1, "{packets:?}");
        assert_eq!(
            (packets[0].0, packets[0].1.src.port),
            (Op::Rst, Port::new(4711))
        );
        peer.swap(pair);
    }
    // A pair that does not exist cannot be answered.
    send_moved(&mut driver, &mut peer, 3);
    assert!(taken(&mut peer).is_empty());
}

#[test]
fn a_flood_of_move_answers_is_bounded_and_others_continue() {
    let (mut driver, mut peer, id) = connected();
    let ours = peer.header;
    for n in 0..20_000u32 {
        peer.header.dst.port = Port::new(100_000 + n);
        peer.header.flags = 1 + n % 2;
        while !peer.try_send(Op::Moved, &[]) {
            Backend::drive(&mut driver).unwrap();
        }
    }
    Backend::drive(&mut driver).unwrap();
    peer.header = ours;
    peer.send(Op::Rw, b"on");
    Backend::drive(&mut driver).unwrap();
    let mut out = [0; 8];
    assert_eq!(driver.read(id, &mut out, false), Ok(2));
}

#[test]
fn connections_between_the_same_addresses_do_not_share_a_pair() {
    let (mut driver, mut peer, _) = connected();
    let port = Port::new(80);
    driver.listen(port, 4).unwrap();
    peer.header.dst.port = port;
    let mut ask_in = |peer: &mut Peer| {
        peer.send(Op::Request, &[]);
        Backend::drive(&mut driver).unwrap();
        peer.take_op(Op::Response);
        driver.accept(port).unwrap()
    };
    let first = ask_in(&mut peer);
    peer.swap(1);
    let second = ask_in(&mut peer);
    peer.swap(1);
    assert_eq!(driver.queue_pair(first), Some(0));
    assert_eq!(driver.queue_pair(second), Some(1));
    ask(&mut driver, &mut peer, first, 1);
    send_moved(&mut driver, &mut peer, 1);
    assert_eq!(driver.state(first), Some(StreamState::Reset));
    assert_eq!(
        driver.read(first, &mut [0; 8], false),
        Err(RecvFault::Reset)
    );
    assert_eq!(driver.state(second), Some(StreamState::Connected));
}

#[test]
fn a_device_that_hangs_up_in_a_move_ends_the_connection() {
    let (mut driver, mut peer, id) = connected();
    ask(&mut driver, &mut peer, id, 1);
    peer.socket = None;
    let give_up = std::time::Instant::now() + Duration::from_secs(60);
    while driver.state(id) == Some(StreamState::Connected) {
        let _ = Backend::drive(&mut driver);
        let _ = Backend::arm(&mut driver);
        Backend::disarm(&mut driver);
        assert!(std::time::Instant::now() < give_up);
    }
    assert!(!driver.is_moving(id));
}
