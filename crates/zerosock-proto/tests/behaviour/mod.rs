//! What a caller sees, one behaviour at a time: those that the public vsock test suite checks, and
//! those that other implementations got wrong.

mod closing;
mod connecting;
mod messages;
mod sending;

use std::sync::Arc;

use zerosock_proto::vsock::{
    CloseReason, CommitError, ConnectError, ConsumeError, Directions, Disposition, DropReason,
    Event, FlowError, FlowId, LocalCids, PortTable, RefuseReason, ReserveError, SendError, Shard,
    ShardConfig, State, Transmit,
};
use zerosock_proto::wire::vsock::{
    Op, Repr, SEQ_EOM, SEQ_EOR, SHUTDOWN_RECEIVE, SHUTDOWN_SEND, SocketType,
};
use zerosock_proto::{Address, Cid, Duration, Instant, Port};

const GUEST: Cid = Cid::new(3);
const SERVER: Address = Address::new(Cid::HOST, Port::new(1024));
const ANY: Address = Address::new(Cid::ANY, Port::ANY);
const NOW: Instant = Instant::ZERO;

fn guest() -> Shard {
    Shard::new(ShardConfig::driver(GUEST), Arc::new(PortTable::new()))
}

fn host() -> Shard {
    let mut shard = Shard::new(ShardConfig::device(GUEST), Arc::new(PortTable::new()));
    shard.listen(SERVER.port, 16).unwrap();
    shard
}

fn header(shard: &mut Shard) -> Repr {
    shard.poll_transmit(NOW, 65536).expect("a packet").header
}

fn is(header: &Repr, op: Op) -> bool {
    header.op == op.into()
}

/// Moves one packet.
fn step(from: &mut Shard, to: &mut Shard) -> (Repr, Disposition) {
    let header = header(from);
    (header, to.handle_packet(NOW, &header))
}

/// Moves all packets; bytes delivered stay unread.
fn pump(from: &mut Shard, to: &mut Shard) -> Vec<Repr> {
    let mut headers = Vec::new();
    while let Some(Transmit { header, span }) = from.poll_transmit(NOW, 65536) {
        let _ = to.handle_packet(NOW, &header);
        if let Some(span) = span {
            from.handle_released(span);
        }
        headers.push(header);
    }
    headers
}

fn open(guest: &mut Shard, host: &mut Shard, kind: SocketType) -> (FlowId, FlowId) {
    let ours = guest.connect(NOW, ANY, SERVER, kind).unwrap();
    pump(guest, host);
    let Some(Event::Incoming { flow, .. }) = host.poll_event() else {
        panic!("no REQUEST")
    };
    host.accept(NOW, flow).unwrap();
    pump(host, guest);
    assert_eq!(guest.poll_event(), Some(Event::Connected { flow: ours }));
    (ours, flow)
}

fn opened() -> (Shard, Shard, FlowId, FlowId) {
    let (mut guest, mut host) = (guest(), host());
    let (ours, theirs) = open(&mut guest, &mut host, SocketType::Stream);
    (guest, host, ours, theirs)
}

#[test]
fn packets_from_other_guests_are_dropped_and_to_other_cids_reset() {
    let mut host = host();
    let mut request = Repr {
        src: Address::new(Cid::new(4), Port::new(1)),
        dst: SERVER,
        len: 0,
        socket_type: SocketType::Stream.into(),
        op: Op::Request.into(),
        flags: 0,
        buf_alloc: 1,
        fwd_cnt: 0,
    };
    // Another guest's CID: dropped without RST.
    let got = host.handle_packet(NOW, &request);
    assert_eq!(got, Disposition::Dropped(DropReason::WrongSource));
    assert!(!host.has_transmit());
    // Not our CID: RST.
    let mut config = ShardConfig::device(GUEST);
    config.accept_all = true;
    let mut host = Shard::new(config.clone(), Arc::new(PortTable::new()));
    request.src.cid = GUEST;
    request.dst.cid = Cid::new(5);
    let got = host.handle_packet(NOW, &request);
    assert_eq!(got, Disposition::Dropped(DropReason::NoSocket));
    assert!(is(&header(&mut host), Op::Rst));
    // With `All`, the caller decides which CIDs exist.
    config.local = LocalCids::All;
    let mut host = Shard::new(config, Arc::new(PortTable::new()));
    assert_eq!(host.handle_packet(NOW, &request), Disposition::Handled);
    let Some(Event::Incoming { local, .. }) = host.poll_event() else {
        panic!()
    };
    assert_eq!(local, request.dst);
}

#[test]
fn a_transport_reset_drops_connections_and_keeps_listeners() {
    let (mut guest, mut host, _, theirs) = opened();
    let flow = guest.connect(NOW, ANY, SERVER, SocketType::Stream).unwrap();
    pump(&mut guest, &mut host);
    host.handle_transport_reset(NOW);
    guest.handle_transport_reset(NOW);
    let closed = Event::Closed {
        flow: theirs,
        reason: CloseReason::TransportReset,
    };
    assert_eq!(host.poll_event(), Some(closed));
    assert_eq!(host.poll_event(), None, "the undecided one was never known");
    let refused = Event::Refused {
        flow,
        reason: RefuseReason::TransportReset,
    };
    assert!(core::iter::from_fn(|| guest.poll_event()).any(|event| event == refused));
    assert!(!host.has_transmit() && !guest.has_transmit());
    open(&mut guest, &mut host, SocketType::Stream);
}

/// The header of a packet of an older driver's connection that asks for another queue pair.
fn move_request(guest: &Shard, flow: FlowId) -> Repr {
    let info = guest.flow(flow).unwrap();
    Repr {
        src: info.local,
        dst: info.peer,
        len: 0,
        socket_type: info.socket_type.into(),
        op: Op::Move.into(),
        flags: 1,
        buf_alloc: info.buf_alloc,
        fwd_cnt: info.fwd_cnt,
    }
}

#[test]
fn a_device_declines_the_moves_of_an_older_driver() {
    let (guest, mut host, ours, theirs) = opened();
    host.set_declines_moves(Some(2));
    let request = move_request(&guest, ours);
    // Any number of requests has one answer, before payload that is queued.
    host.send(theirs, 10, 0).unwrap();
    for _ in 0..3 {
        assert_eq!(host.handle_packet(NOW, &request), Disposition::Handled);
    }
    let answer = header(&mut host);
    assert!(is(&answer, Op::Moved), "{answer}");
    assert_eq!((answer.flags, answer.dst), (2, request.src));
    assert!(is(&header(&mut host), Op::Rw));
    assert!(!host.has_transmit());
    // Without a connection the answer is RST, as to any packet, and one that closes has none.
    let stray = Repr {
        src: Address::new(GUEST, Port::new(9)),
        ..request
    };
    let got = host.handle_packet(NOW, &stray);
    assert_eq!(got, Disposition::Dropped(DropReason::NoSocket));
    assert!(is(&header(&mut host), Op::Rst));
    host.shutdown(NOW, theirs, Directions::BOTH).unwrap();
    assert!(is(&header(&mut host), Op::Shutdown));
    let got = host.handle_packet(NOW, &request);
    assert_eq!(got, Disposition::Dropped(DropReason::Unexpected));
    assert!(!host.has_transmit());
}

#[test]
fn moves_are_unknown_operations_where_nothing_declines_them() {
    let (mut guest, mut host, ours, _) = opened();
    let request = move_request(&guest, ours);
    let answer = Repr {
        src: request.dst,
        dst: request.src,
        op: Op::Moved.into(),
        ..request
    };
    for (shard, header) in [(&mut host, request), (&mut guest, answer)] {
        let got = shard.handle_packet(NOW, &header);
        assert_eq!(got, Disposition::Dropped(DropReason::Unexpected));
        assert!(!shard.has_transmit());
    }
    // Nor does a device with several pairs take an answer for one.
    host.set_declines_moves(Some(0));
    let got = host.handle_packet(
        NOW,
        &Repr {
            op: Op::Moved.into(),
            ..request
        },
    );
    assert_eq!(got, Disposition::Dropped(DropReason::Unexpected));
    assert!(!host.has_transmit());
}

#[test]
fn calls_with_stale_ids_fail() {
    let (mut guest, mut host, ours, _) = opened();
    let reservation = guest.reserve(ours, 5).unwrap();
    guest.reset(ours).unwrap();
    assert_eq!(
        guest.commit(reservation, 5, 0).unwrap_err(),
        CommitError::Stale
    );
    let closed = Event::Closed {
        flow: ours,
        reason: CloseReason::LocalReset,
    };
    assert_eq!(guest.poll_event(), Some(closed));
    pump(&mut guest, &mut host);
    // The slot is reused, the id is not.
    while host.poll_event().is_some() {}
    let (new, _) = open(&mut guest, &mut host, SocketType::Stream);
    assert_eq!(new.index(), ours.index());
    assert_ne!(new, ours);
    assert_eq!(guest.flow(ours), None);
    assert_eq!(guest.consume(ours, 1), Err(ConsumeError::Stale));
    assert_eq!(guest.reset(ours), Err(FlowError::Stale));
    assert_eq!(
        guest.shutdown(NOW, ours, Directions::BOTH),
        Err(FlowError::Stale)
    );
    assert_eq!(guest.send(ours, 1, 0), Err(SendError::Stale));
    assert_eq!(guest.reserve(ours, 1).unwrap_err(), ReserveError::Stale);
    assert_eq!(guest.consume(new, 1), Err(ConsumeError::TooMany));
}
