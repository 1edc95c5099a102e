//! The rules of moves, one by one: requests, their states, and the addresses of connections.

use std::sync::Arc;

use zerosock_proto::vsock::{
    Disposition, Event, FlowError, MoveError, PortTable, Shard, ShardConfig,
};
use zerosock_proto::wire::vsock::{Op, Repr, SocketType};
use zerosock_proto::{Address, Cid};

use super::{DEVICE, DRIVER, GUEST, NOW, SERVER, World};

#[test]
fn without_the_feature_moves_are_unknown_operations() {
    let mut world = World::new(false);
    let (pair, flow) = world.sides[DRIVER].ends[0].at.unwrap();
    for side in &mut world.sides {
        side.shards
            .iter_mut()
            .for_each(|shard| shard.set_moves(false));
    }
    let shard = &mut world.sides[DRIVER].shards[pair];
    assert_eq!(shard.request_move(flow, 1), Err(MoveError::NotNegotiated));
    let info = shard.flow(flow).unwrap();
    for op in [Op::Move, Op::Moved] {
        let header = Repr {
            src: info.local,
            dst: info.peer,
            len: 0,
            socket_type: SocketType::Stream.into(),
            op: op.into(),
            flags: 1,
            buf_alloc: 8192,
            fwd_cnt: 0,
        };
        let got = world.sides[DEVICE].shards[pair].handle_packet(NOW, &header);
        assert!(matches!(got, Disposition::Dropped(_)), "{got:?}");
    }
    world.check();
}

#[test]
fn only_a_driver_requests_moves_and_only_once() {
    let mut world = World::new(false);
    let (pair, flow) = world.sides[DEVICE].ends[0].at.unwrap();
    let device = &mut world.sides[DEVICE].shards[pair];
    assert_eq!(device.request_move(flow, 1), Err(MoveError::NotNegotiated));
    assert_eq!(device.decline_move(flow, 1), Err(MoveError::WrongState));
    assert!(matches!(
        device.extract(flow, 1),
        Err(MoveError::WrongState)
    ));
    let (pair, flow) = world.sides[DRIVER].ends[0].at.unwrap();
    let driver = &mut world.sides[DRIVER].shards[pair];
    let reserved = driver.reserve(flow, 10).unwrap();
    assert_eq!(driver.request_move(flow, 1), Err(MoveError::Busy));
    driver.cancel(reserved);
    driver.request_move(flow, 1).unwrap();
    assert_eq!(driver.request_move(flow, 1), Err(MoveError::Busy));
    assert!(
        driver.reserve(flow, 10).is_err(),
        "nothing leaves behind MOVE"
    );
}

#[test]
fn addresses_are_connected_while_their_connection_is_live() {
    let ports = Arc::new(PortTable::new());
    let mut driver = Shard::new(ShardConfig::driver(GUEST), ports);
    let spare = driver.spare_port();
    assert_ne!(spare, driver.spare_port(), "the next one each time");
    let local = Address::new(GUEST, spare);
    assert!(!driver.is_connected(local, SERVER));
    let stream = SocketType::Stream;
    let flow = driver.connect(NOW, local, SERVER, stream).unwrap();
    assert!(driver.is_connected(local, SERVER));
    assert!(!driver.is_connected(SERVER, local));
    assert!(!driver.is_connected(Address::new(Cid::ANY, spare), SERVER));
    driver.reset(flow).unwrap();
    // Its queued RST does not keep the addresses in use.
    assert!(!driver.is_connected(local, SERVER));
    driver.connect(NOW, local, SERVER, stream).unwrap();
}

#[test]
fn a_connection_without_its_driver_ends_without_rst() {
    let mut world = World::new(false);
    let (pair, flow) = world.sides[DEVICE].ends[0].at.unwrap();
    let device = &mut world.sides[DEVICE].shards[pair];
    while device.poll_event().is_some() {}
    while device.poll_transmit(NOW, 4096).is_some() {}
    let before = (device.connections(), device.ports().len());
    device.send(flow, 1000, 0).unwrap();
    device.forget(NOW, flow).unwrap();
    assert!(device.poll_transmit(NOW, 4096).is_none(), "not even an RST");
    let closed = device.poll_event();
    assert!(
        matches!(closed, Some(Event::Closed { flow: of, .. }) if of == flow),
        "{closed:?}"
    );
    assert_eq!(device.connections(), before.0 - 1);
    assert_eq!(
        device.ports().len(),
        before.1,
        "the driver's port was no port here"
    );
    assert_eq!(device.forget(NOW, flow), Err(FlowError::Stale));
}
