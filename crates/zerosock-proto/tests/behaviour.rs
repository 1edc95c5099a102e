//! What a caller sees, one behaviour at a time: the ones that the public
//! vsock test suite checks, and the ones that others got wrong.

use std::sync::Arc;

use zerosock_proto::vsock::{
    CloseReason, CommitError, ConnectError, ConsumeError, Disposition, DropReason, Event,
    FlowError, FlowId, How, LocalCids, PortTable, RefuseReason, ReserveError, SendError, Shard,
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
fn no_listener_is_known_at_once() {
    let (mut guest, mut host) = (guest(), host());
    let nobody = Address::new(Cid::HOST, Port::new(9));
    let flow = guest.connect(NOW, ANY, nobody, SocketType::Stream).unwrap();
    assert_eq!(
        step(&mut guest, &mut host).1,
        Disposition::Dropped(DropReason::NoSocket)
    );
    let (rst, _) = step(&mut host, &mut guest);
    // Addresses swapped, the type kept, no credit.
    assert!(is(&rst, Op::Rst) && rst.src == nobody && rst.buf_alloc == 0 && rst.fwd_cnt == 0);
    assert_eq!(
        guest.poll_event(),
        Some(Event::Refused {
            flow,
            reason: RefuseReason::Reset
        })
    );
    assert!(guest.poll_event().is_none() && guest.flow(flow).is_none());
    assert!(!guest.has_transmit(), "an RST is not answered");
}

#[test]
fn a_rejected_request_is_known_at_once() {
    let (mut guest, mut host) = (guest(), host());
    let ours = guest.connect(NOW, ANY, SERVER, SocketType::Stream).unwrap();
    pump(&mut guest, &mut host);
    let Some(Event::Incoming { flow, .. }) = host.poll_event() else {
        panic!()
    };
    host.reject(flow).unwrap();
    assert_eq!(host.reject(flow), Err(FlowError::Stale));
    assert_eq!(
        host.poll_event(),
        Some(Event::Closed {
            flow,
            reason: CloseReason::Rejected
        })
    );
    pump(&mut host, &mut guest);
    assert_eq!(
        guest.poll_event(),
        Some(Event::Refused {
            flow: ours,
            reason: RefuseReason::Reset
        })
    );
    assert_eq!(guest.occupied() + host.occupied(), 0);
}

#[test]
fn connecting_times_out_after_two_seconds() {
    let mut guest = guest();
    let flow = guest.connect(NOW, ANY, SERVER, SocketType::Stream).unwrap();
    assert!(is(&header(&mut guest), Op::Request));
    let at = guest.poll_timeout().unwrap();
    assert_eq!(at, NOW + Duration::from_secs(2));
    guest.handle_timeout(Instant::from_nanos(at.as_nanos() - 1));
    assert!(guest.poll_event().is_none());
    guest.handle_timeout(at);
    assert_eq!(
        guest.poll_event(),
        Some(Event::Refused {
            flow,
            reason: RefuseReason::TimedOut
        })
    );
    assert!(is(&header(&mut guest), Op::Rst));
    assert_eq!((guest.occupied(), guest.poll_timeout()), (0, None));
}

/// Complaint of others: a half-close taken for a full one, last bytes lost.
#[test]
fn half_close_leaves_the_other_half_open() {
    let (mut guest, mut host, ours, theirs) = opened();
    guest.send(ours, 5, 0).unwrap();
    guest.shutdown(NOW, ours, How::SEND).unwrap();
    let sent = pump(&mut guest, &mut host);
    assert!(sent.len() == 2 && is(&sent[0], Op::Rw) && is(&sent[1], Op::Shutdown));
    assert_eq!(sent[1].flags, SHUTDOWN_SEND);
    let shut = Event::PeerShutdown {
        flow: theirs,
        receive: false,
        send: true,
    };
    assert_eq!(host.poll_event(), Some(shut));
    assert_eq!(guest.send(ours, 1, 0), Err(SendError::Shutdown));
    assert_eq!(guest.reserve(ours, 1).unwrap_err(), ReserveError::Shutdown);
    host.send(theirs, 7, 0).unwrap();
    pump(&mut host, &mut guest);
    assert_eq!(guest.flow(ours).unwrap().unread, 7);
    // SHUTDOWN is cumulative: the second half makes it a close.
    guest.consume(ours, 7).unwrap();
    guest.shutdown(NOW, ours, How::RECEIVE).unwrap();
    let (shutdown, _) = step(&mut guest, &mut host);
    assert_eq!(shutdown.flags, SHUTDOWN_RECEIVE | SHUTDOWN_SEND);
    assert!(host.flow(theirs).is_some(), "five bytes are unread");
    host.consume(theirs, 5).unwrap();
    // The end says it all; a half that was not polled is not told any more.
    let closed = Event::Closed {
        flow: theirs,
        reason: CloseReason::PeerClosed,
    };
    assert_eq!(host.poll_event(), Some(closed));
    pump(&mut host, &mut guest);
    assert_eq!(
        guest.poll_event(),
        Some(Event::Closed {
            flow: ours,
            reason: CloseReason::Finished
        })
    );
}

/// A peer that will not receive: EPIPE, and queued sends are gone.
#[test]
fn shutting_down_receiving_breaks_the_pipe() {
    let (mut guest, mut host, ours, theirs) = opened();
    let reservation = host.reserve(theirs, 10).unwrap();
    host.send(theirs, 100, 0).unwrap();
    guest.shutdown(NOW, ours, How::RECEIVE).unwrap();
    assert_eq!(pump(&mut guest, &mut host)[0].flags, SHUTDOWN_RECEIVE);
    let shut = Event::PeerShutdown {
        flow: theirs,
        receive: true,
        send: false,
    };
    assert_eq!(host.poll_event(), Some(shut));
    assert_eq!(
        host.commit(reservation, 1, 0).unwrap_err(),
        CommitError::PeerShutdown
    );
    assert_eq!(host.send(theirs, 1, 0), Err(SendError::PeerShutdown));
    assert_eq!(
        host.reserve(theirs, 1).unwrap_err(),
        ReserveError::PeerShutdown
    );
    assert!(!host.has_transmit() && host.flow(theirs).unwrap().unsent == 0);
    guest.send(ours, 3, 0).unwrap();
    pump(&mut guest, &mut host);
    assert_eq!(host.flow(theirs).unwrap().unread, 3);
}

/// What is in flight when we stop receiving is thrown away, and its credit
/// given back, so that the sender does not hang.
#[test]
fn payload_after_shut_rd_gives_its_credit_back() {
    let (mut guest, mut host, ours, theirs) = opened();
    guest.shutdown(NOW, ours, How::RECEIVE).unwrap();
    host.send(theirs, 262144, 0).unwrap();
    pump(&mut host, &mut guest);
    assert_eq!(guest.stats().receive_shut, 4);
    let info = guest.flow(ours).unwrap();
    assert_eq!((info.unread, info.fwd_cnt), (0, 262144));
}

#[test]
fn the_close_timer_is_eight_seconds_and_then_rst() {
    let (mut guest, _, ours, _) = opened();
    guest.shutdown(NOW, ours, How::BOTH).unwrap();
    assert!(is(&header(&mut guest), Op::Shutdown));
    assert_eq!(
        guest.flow(ours).unwrap().state,
        State::Closing { peer: How::NONE }
    );
    let at = guest.poll_timeout().unwrap();
    assert_eq!(at, NOW + Duration::from_secs(8));
    guest.handle_timeout(at);
    let closed = Event::Closed {
        flow: ours,
        reason: CloseReason::TimedOut,
    };
    assert_eq!(guest.poll_event(), Some(closed));
    assert!(is(&header(&mut guest), Op::Rst));
    assert_eq!(guest.occupied(), 0);
}

/// Nothing waits 8 s when both close at once.
#[test]
fn both_may_close_at_once() {
    let (mut guest, mut host, ours, theirs) = opened();
    guest.shutdown(NOW, ours, How::BOTH).unwrap();
    host.shutdown(NOW, theirs, How::BOTH).unwrap();
    let (from_guest, from_host) = (header(&mut guest), header(&mut host));
    let _ = host.handle_packet(NOW, &from_guest);
    let _ = guest.handle_packet(NOW, &from_host);
    let closed = |flow| {
        Some(Event::Closed {
            flow,
            reason: CloseReason::Finished,
        })
    };
    assert_eq!(
        (guest.poll_event(), host.poll_event()),
        (closed(ours), closed(theirs))
    );
    // Two RSTs cross, and neither is answered.
    pump(&mut guest, &mut host);
    pump(&mut host, &mut guest);
    assert!(!guest.has_transmit() && !host.has_transmit());
    assert_eq!(guest.occupied() + host.occupied(), 0);
}

/// Closing waits behind data that has no credit yet, and not for ever.
#[test]
fn closing_says_first_what_was_queued() {
    let (mut guest, mut host, ours, theirs) = opened();
    guest.send(ours, 300_000, 0).unwrap();
    guest.shutdown(NOW, ours, How::BOTH).unwrap();
    let sent = pump(&mut guest, &mut host);
    assert!(sent.iter().all(|packet| !is(packet, Op::Shutdown)));
    assert_eq!(guest.flow(ours).unwrap().unsent, 300_000 - 262_144);
    pump(&mut host, &mut guest);
    host.consume(theirs, 262_144).unwrap();
    pump(&mut host, &mut guest);
    let sent = pump(&mut guest, &mut host);
    assert!(is(&sent[0], Op::Rw) && is(sent.last().unwrap(), Op::Shutdown));
    assert_eq!(host.flow(theirs).unwrap().unread, 300_000 - 262_144);
    host.consume(theirs, 300_000 - 262_144).unwrap();
    pump(&mut host, &mut guest);
    let closed = Event::Closed {
        flow: ours,
        reason: CloseReason::Finished,
    };
    assert_eq!((guest.poll_event(), guest.occupied()), (Some(closed), 0));
}

#[test]
fn the_same_port_is_reusable_at_once() {
    let (mut guest, mut host) = (guest(), host());
    let local = Address::new(GUEST, Port::new(5000));
    for round in 0..3 {
        let flow = guest
            .connect(NOW, local, SERVER, SocketType::Stream)
            .unwrap();
        let again = guest.connect(NOW, local, SERVER, SocketType::Stream);
        assert_eq!(again, Err(ConnectError::InUse));
        let sent = pump(&mut guest, &mut host);
        // The RST of the round before leaves before the REQUEST.
        let ops: Vec<_> = sent
            .iter()
            .map(|packet| packet.op.known().unwrap())
            .collect();
        assert_eq!(ops, [Op::Rst, Op::Request][usize::from(round == 0)..]);
        while host.poll_event().is_some() {}
        guest.reset(flow).unwrap();
    }
}

/// Linux forgets a socket whose peer has closed, though its reader is slow.
#[test]
fn a_port_is_reusable_while_the_old_reader_is_slow() {
    let (mut guest, mut host) = (guest(), host());
    let local = Address::new(GUEST, Port::new(5000));
    let old = guest
        .connect(NOW, local, SERVER, SocketType::Stream)
        .unwrap();
    pump(&mut guest, &mut host);
    let Some(Event::Incoming { flow: theirs, .. }) = host.poll_event() else {
        panic!()
    };
    host.accept(NOW, theirs).unwrap();
    pump(&mut host, &mut guest);
    guest.send(old, 10, 0).unwrap();
    guest.shutdown(NOW, old, How::BOTH).unwrap();
    pump(&mut guest, &mut host);
    guest.reset(old).unwrap();
    let _lost = header(&mut guest);
    guest
        .connect(NOW, local, SERVER, SocketType::Stream)
        .unwrap();
    pump(&mut guest, &mut host);
    let events: Vec<_> = core::iter::from_fn(|| host.poll_event()).collect();
    assert!(events.contains(&Event::Closed {
        flow: theirs,
        reason: CloseReason::Superseded
    }));
    assert!(matches!(
        events[..],
        [.., Event::Incoming { .. }] | [Event::Incoming { .. }, ..]
    ));
    assert!(
        !host.has_transmit(),
        "no RST that would hit the new connection"
    );
}

/// An RST of ours that crosses the peer's must not hit the next connection.
#[test]
fn a_crossing_rst_is_taken_back() {
    let (mut guest, mut host, ours, theirs) = opened();
    host.reset(theirs).unwrap();
    guest.reset(ours).unwrap();
    let (_, got) = step(&mut guest, &mut host);
    assert_eq!(got, Disposition::Dropped(DropReason::StrayReset));
    assert!(!host.has_transmit());
}

#[test]
fn the_backlog_is_bounded_and_given_back() {
    let ports = Arc::new(PortTable::new());
    let mut host = Shard::new(ShardConfig::device(GUEST), ports.clone());
    host.listen(SERVER.port, 2).unwrap();
    let mut guest = guest();
    for round in 0..5 {
        for _ in 0..3 {
            guest.connect(NOW, ANY, SERVER, SocketType::Stream).unwrap();
        }
        pump(&mut guest, &mut host);
        assert_eq!(
            (ports.waiting(SERVER), host.stats().over_cap),
            (Some(2), round + 1)
        );
        while let Some(event) = host.poll_event() {
            match event {
                Event::Incoming { flow, .. } if round % 2 == 0 => host.reject(flow).unwrap(),
                Event::Incoming { flow, .. } => host.accept(NOW, flow).unwrap(),
                _ => {}
            }
        }
        assert_eq!(ports.waiting(SERVER), Some(0));
        guest.handle_transport_reset(NOW);
        while guest.poll_event().is_some() || host.poll_event().is_some() {}
        pump(&mut host, &mut guest);
    }
    host.unlisten(SERVER.port).unwrap();
    assert!(ports.is_empty());
}

/// Without listeners the bound is the shard's own, and comes back however an
/// undecided connection ends.
#[test]
fn undecided_connections_are_bounded_without_a_listener() {
    let mut config = ShardConfig::device(GUEST);
    (config.accept_all, config.backlog) = (true, 2);
    let mut host = Shard::new(config, Arc::new(PortTable::new()));
    for round in 0..4 {
        let mut guest = guest();
        let flows: Vec<FlowId> = (0..3)
            .map(|_| guest.connect(NOW, ANY, SERVER, SocketType::Stream).unwrap())
            .collect();
        pump(&mut guest, &mut host);
        assert_eq!((host.connections(), host.stats().over_cap), (2, round + 1));
        if round == 0 {
            for flow in flows {
                let _ = guest.reset(flow);
            }
            pump(&mut guest, &mut host);
        }
        while let Some(event) = host.poll_event() {
            if let Event::Incoming { flow, .. } = event {
                if round == 1 {
                    host.reject(flow).unwrap()
                } else {
                    host.accept(NOW, flow).unwrap()
                }
            }
        }
        host.handle_transport_reset(NOW);
        while host.poll_event().is_some() {}
        assert_eq!(host.occupied(), 0);
    }
}

#[test]
fn a_dropped_shard_gives_its_ports_back() {
    let ports = Arc::new(PortTable::new());
    let mut shard = Shard::new(ShardConfig::driver(GUEST), ports.clone());
    shard.connect(NOW, ANY, SERVER, SocketType::Stream).unwrap();
    assert_eq!(ports.len(), 1);
    drop(shard);
    assert!(ports.is_empty());
}

#[test]
fn overrun_credit_is_reset_and_counted() {
    let (mut guest, mut host, ours, theirs) = opened();
    let reservation = guest.reserve(ours, 1).unwrap();
    let mut header = guest.commit(reservation, 1, 0).unwrap();
    for _ in 0..4 {
        header.len = 65536;
        let _ = host.handle_packet(NOW, &header);
    }
    header.len = 1;
    let got = host.handle_packet(NOW, &header);
    assert_eq!(got, Disposition::Dropped(DropReason::CreditExceeded));
    let closed = Event::Closed {
        flow: theirs,
        reason: CloseReason::CreditExceeded,
    };
    assert_eq!(
        (host.poll_event(), host.stats().credit_exceeded),
        (Some(closed), 1)
    );
    assert!(is(&self::header(&mut host), Op::Rst));
}

#[test]
fn a_stalled_sender_asks_once_and_hears() {
    let (mut guest, mut host, ours, theirs) = opened();
    guest.send(ours, 262_144, 0).unwrap();
    pump(&mut guest, &mut host);
    assert_eq!(guest.reserve(ours, 1).unwrap_err(), ReserveError::NoCredit);
    assert_eq!(guest.reserve(ours, 1).unwrap_err(), ReserveError::NoCredit);
    let asked = pump(&mut guest, &mut host);
    assert!(asked.len() == 1 && is(&asked[0], Op::CreditRequest));
    let told = pump(&mut host, &mut guest);
    assert!(told.len() == 1 && is(&told[0], Op::CreditUpdate) && told[0].fwd_cnt == 0);
    assert!(guest.poll_event().is_none());
    // It asked: now any amount is told, not only half a buffer.
    host.consume(theirs, 1).unwrap();
    pump(&mut host, &mut guest);
    assert_eq!(guest.poll_event(), Some(Event::Writable { flow: ours }));
    assert_eq!(guest.reserve(ours, 100).unwrap().len(), 1);
}

/// Linux before 6.8 tells nothing of bytes read while its reader waits for more than what is left
/// (SO_RCVLOWAT at 128 KiB + 1): asked now and then, ever more slowly, it does.
#[test]
fn a_full_window_is_asked_for_again() {
    let (mut guest, mut host, ours, theirs) = opened();
    guest.send(ours, 262_145, 0).unwrap();
    pump(&mut guest, &mut host);
    let mut waits = Vec::new();
    let mut last = NOW;
    for _ in 0..9 {
        let due = guest.poll_timeout().unwrap();
        waits.push((due.as_nanos() - last.as_nanos()) / 1_000_000);
        guest.handle_timeout(due);
        let asked = guest.poll_transmit(due, 0).unwrap();
        assert!(is(&asked.header, Op::CreditRequest));
        last = due;
    }
    assert_eq!(
        waits,
        [100, 200, 400, 800, 1600, 3200, 6400, 8000, 8000],
        "milliseconds"
    );
    // A receiver that does not tell of itself (ours does: what it says is lost here) answers.
    host.consume(theirs, 1000).unwrap();
    while host.poll_transmit(NOW, 0).is_some() {}
    let due = guest.poll_timeout().unwrap();
    guest.handle_timeout(due);
    let asked = guest.poll_transmit(due, 0).unwrap();
    let _ = host.handle_packet(due, &asked.header);
    pump(&mut host, &mut guest);
    let rest = pump(&mut guest, &mut host);
    assert!(rest.iter().any(|r| is(r, Op::Rw) && r.len == 1), "{rest:?}");
    // Nothing more to send: the timer that is left finds nothing.
    if let Some(due) = guest.poll_timeout() {
        guest.handle_timeout(due);
    }
    assert!(!guest.has_transmit() && guest.poll_timeout().is_none());
}

/// A packet limit is ours: a peer that sees its window wide open says nothing
/// (Linux before 6.8), so it is asked again, ever more slowly.
#[test]
fn a_stall_the_peer_cannot_see_is_probed() {
    let (mut guest, mut host, ours, theirs) = opened();
    let mut sent = 0;
    while let Ok(reservation) = guest.reserve(ours, 1) {
        let header = guest.commit(reservation, 1, 0).unwrap();
        let _ = host.handle_packet(NOW, &header);
        sent += 1;
    }
    assert_eq!(sent, 262_144 / 640);
    assert!(is(&header(&mut guest), Op::CreditRequest));
    let first = guest.poll_timeout().unwrap();
    guest.handle_timeout(first);
    let asked = guest.poll_transmit(first, 0).unwrap();
    assert!(is(&asked.header, Op::CreditRequest));
    let second = guest.poll_timeout().unwrap();
    assert!(second.as_nanos() - first.as_nanos() > first.as_nanos());
    host.consume(theirs, sent).unwrap();
    let _ = host.handle_packet(second, &asked.header);
    pump(&mut host, &mut guest);
    assert_eq!(guest.poll_event(), Some(Event::Writable { flow: ours }));
    // The timer that is left finds nothing.
    guest.handle_timeout(guest.poll_timeout().unwrap());
    assert!(!guest.has_transmit() && guest.poll_timeout().is_none());
}

/// RW in front of the RESPONSE would be a protocol error to the peer.
#[test]
fn nothing_overtakes_the_response() {
    let (mut guest, mut host) = (guest(), host());
    guest.connect(NOW, ANY, SERVER, SocketType::Stream).unwrap();
    pump(&mut guest, &mut host);
    let Some(Event::Incoming { flow, .. }) = host.poll_event() else {
        panic!()
    };
    assert_eq!(
        host.reserve(flow, 1).unwrap_err(),
        ReserveError::NotConnected
    );
    host.accept(NOW, flow).unwrap();
    assert_eq!(host.reserve(flow, 1).unwrap_err(), ReserveError::NoCredit);
    assert!(is(&step(&mut host, &mut guest).0, Op::Response));
    assert_eq!(host.poll_event(), Some(Event::Writable { flow }));
    assert!(host.reserve(flow, 1).is_ok());
}

/// The order of calls is the order of bytes, whichever way they go out.
#[test]
fn reserved_before_queued_and_queued_before_reserved() {
    let (mut guest, _, ours, _) = opened();
    let reservation = guest.reserve(ours, 10).unwrap();
    guest.send(ours, 5, 0).unwrap();
    assert!(!guest.has_transmit(), "the reservation comes first");
    assert_eq!(guest.reserve(ours, 1).unwrap_err(), ReserveError::NoCredit);
    guest.commit(reservation, 10, 0).unwrap();
    assert_eq!(guest.poll_event(), None);
    assert_eq!(header(&mut guest).len, 5);
    assert_eq!(guest.poll_event(), Some(Event::Writable { flow: ours }));
}

#[test]
fn connections_take_turns() {
    let (mut guest, mut host) = (guest(), host());
    let flows: Vec<FlowId> = (0..3)
        .map(|_| open(&mut guest, &mut host, SocketType::Stream).0)
        .collect();
    for &flow in &flows {
        guest.send(flow, 4000, 0).unwrap();
    }
    let order: Vec<FlowId> = (0..6)
        .map(|_| guest.poll_transmit(NOW, 1000).unwrap().span.unwrap().flow)
        .collect();
    assert_eq!(order, [&flows[..], &flows[..]].concat());
    // Control packets come first, and fit where data does not.
    guest.reset(flows[0]).unwrap();
    assert!(is(&guest.poll_transmit(NOW, 0).unwrap().header, Op::Rst));
    assert!(guest.poll_transmit(NOW, 0).is_none() && guest.has_transmit());
}

#[test]
fn spans_may_be_released_in_any_order() {
    let (mut guest, _, ours, _) = opened();
    let first = guest.send(ours, 2500, 0).unwrap();
    let second = guest.send(ours, 10, 0).unwrap();
    assert_eq!((first, second), (0, 1));
    let mut spans: Vec<_> = (0..4)
        .map(|_| guest.poll_transmit(NOW, 1000).unwrap().span.unwrap())
        .collect();
    let cuts: Vec<_> = spans
        .iter()
        .map(|span| (span.message, span.offset, span.len))
        .collect();
    assert_eq!(
        cuts,
        [(0, 0, 1000), (0, 1000, 1000), (0, 2000, 500), (1, 0, 10)]
    );
    assert_eq!(guest.flow(ours).unwrap().unreleased, 2510);
    spans.swap(0, 3);
    for span in spans {
        guest.handle_released(span);
    }
    assert_eq!(guest.flow(ours).unwrap().unreleased, 0);
}

/// EOM and EOR stand on the last packet of a message and nowhere else.
#[test]
fn seqpacket_flags_end_messages() {
    let (mut guest, mut host) = (guest(), host());
    let refused = guest.connect(NOW, ANY, SERVER, SocketType::SeqPacket);
    assert_eq!(refused, Err(ConnectError::SocketType), "not negotiated");
    guest.set_seqpacket(true);
    guest
        .connect(NOW, ANY, SERVER, SocketType::SeqPacket)
        .unwrap();
    assert_eq!(
        step(&mut guest, &mut host).1,
        Disposition::Dropped(DropReason::TypeMismatch)
    );
    pump(&mut host, &mut guest);
    while guest.poll_event().is_some() {}

    host.set_seqpacket(true);
    let (ours, theirs) = open(&mut guest, &mut host, SocketType::SeqPacket);
    guest.send(ours, 150_000, SEQ_EOM | SEQ_EOR).unwrap();
    let mut flags = Vec::new();
    while guest.has_transmit() {
        let (_, got) = step(&mut guest, &mut host);
        let Disposition::Deliver { flags: got, .. } = got else {
            panic!("{got:?}")
        };
        flags.push(got);
    }
    assert_eq!(flags, [0, 0, SEQ_EOM | SEQ_EOR]);
    assert_eq!(guest.send(ours, 262_145, SEQ_EOM), Err(SendError::TooLong));
    // A packet of another type between the same ports: RST, rule 3, and the
    // connection does not notice.
    let reservation = guest.reserve(ours, 1).unwrap();
    let mut stream = guest.commit(reservation, 1, 0).unwrap();
    stream.socket_type = SocketType::Stream.into();
    let got = host.handle_packet(NOW, &stream);
    assert_eq!(got, Disposition::Dropped(DropReason::TypeMismatch));
    assert_eq!(header(&mut host).socket_type, SocketType::Stream.into());
    assert!(host.flow(theirs).is_some());
}

#[test]
fn empty_rw_is_dropped() {
    let (mut guest, mut host, ours, _) = opened();
    let reservation = guest.reserve(ours, 1).unwrap();
    let mut empty = guest.commit(reservation, 1, 0).unwrap();
    empty.len = 0;
    assert_eq!(
        host.handle_packet(NOW, &empty),
        Disposition::Dropped(DropReason::Empty)
    );
    let reservation = guest.reserve(ours, 1).unwrap();
    assert_eq!(
        guest.commit(reservation, 0, 0).unwrap_err(),
        CommitError::Empty
    );
    assert_eq!(guest.send(ours, 0, 0), Err(SendError::Empty));
    assert_eq!(guest.flow(ours).unwrap().tx_cnt, 1);
}

#[test]
fn strangers_and_siblings() {
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
    // Not our guest: dropped without RST.
    let got = host.handle_packet(NOW, &request);
    assert_eq!(got, Disposition::Dropped(DropReason::WrongSource));
    assert!(!host.has_transmit());
    // Not our CID: RST, until it is declared.
    let mut config = ShardConfig::device(GUEST);
    config.accept_all = true;
    let mut host = Shard::new(config, Arc::new(PortTable::new()));
    request.src.cid = GUEST;
    request.dst.cid = Cid::new(5);
    let got = host.handle_packet(NOW, &request);
    assert_eq!(got, Disposition::Dropped(DropReason::NoSocket));
    assert!(is(&header(&mut host), Op::Rst));
    host.set_local_cids(LocalCids::host_and([Cid::new(9), Cid::new(5)]));
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

#[test]
fn stale_ids_do_nothing() {
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
    // The place is taken again, the name is not.
    while host.poll_event().is_some() {}
    let (new, _) = open(&mut guest, &mut host, SocketType::Stream);
    assert_eq!(new.index(), ours.index());
    assert_ne!(new, ours);
    assert_eq!(guest.flow(ours), None);
    assert_eq!(guest.consume(ours, 1), Err(ConsumeError::Stale));
    assert_eq!(guest.reset(ours), Err(FlowError::Stale));
    assert_eq!(guest.shutdown(NOW, ours, How::BOTH), Err(FlowError::Stale));
    assert_eq!(guest.send(ours, 1, 0), Err(SendError::Stale));
    assert_eq!(guest.reserve(ours, 1).unwrap_err(), ReserveError::Stale);
    assert_eq!(guest.consume(new, 1), Err(ConsumeError::TooMany));
}
