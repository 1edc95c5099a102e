//! Credit, stalls, and the order of sends.

use super::*;

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
fn a_stalled_sender_requests_credit_once_and_gets_it() {
    let (mut guest, mut host, ours, theirs) = opened();
    guest.send(ours, 262_144, 0).unwrap();
    pump(&mut guest, &mut host);
    assert_eq!(guest.reserve(ours, 1).unwrap_err(), ReserveError::NoCredit);
    assert_eq!(guest.reserve(ours, 1).unwrap_err(), ReserveError::NoCredit);
    let requests = pump(&mut guest, &mut host);
    assert!(requests.len() == 1 && is(&requests[0], Op::CreditRequest));
    let updates = pump(&mut host, &mut guest);
    assert!(updates.len() == 1 && is(&updates[0], Op::CreditUpdate) && updates[0].fwd_cnt == 0);
    assert!(guest.poll_event().is_none());
    // It has requested credit: now each quarter is announced, not only half a buffer.
    host.consume(theirs, 65_535).unwrap();
    assert!(pump(&mut host, &mut guest).is_empty());
    host.consume(theirs, 1).unwrap();
    pump(&mut host, &mut guest);
    assert_eq!(guest.poll_event(), Some(Event::Writable { flow: ours }));
    assert_eq!(guest.reserve(ours, 100).unwrap().len(), 100);
}

/// Linux before 6.8 sends no update for bytes read while its reader waits for more than what is
/// left (SO_RCVLOWAT at 128 KiB + 1); it answers requests, which back off exponentially.
#[test]
fn requests_for_a_full_window_back_off() {
    let (mut guest, mut host, ours, theirs) = opened();
    guest.send(ours, 262_145, 0).unwrap();
    pump(&mut guest, &mut host);
    let mut waits = Vec::new();
    let mut last = NOW;
    for _ in 0..9 {
        let due = guest.poll_timeout().unwrap();
        waits.push((due.as_nanos() - last.as_nanos()) / 1_000_000);
        guest.handle_timeout(due);
        let requests = guest.poll_transmit(due, 0).unwrap();
        assert!(is(&requests.header, Op::CreditRequest));
        last = due;
    }
    assert_eq!(
        waits,
        [100, 200, 400, 800, 1600, 3200, 6400, 8000, 8000],
        "milliseconds"
    );
    // A receiver that sends no update by itself (ours does: it is lost here) answers.
    host.consume(theirs, 1000).unwrap();
    while host.poll_transmit(NOW, 0).is_some() {}
    let due = guest.poll_timeout().unwrap();
    guest.handle_timeout(due);
    let requests = guest.poll_transmit(due, 0).unwrap();
    let _ = host.handle_packet(due, &requests.header);
    pump(&mut host, &mut guest);
    let rest = pump(&mut guest, &mut host);
    assert!(rest.iter().any(|r| is(r, Op::Rw) && r.len == 1), "{rest:?}");
    // Nothing more to send: the armed timer has no effect.
    if let Some(due) = guest.poll_timeout() {
        guest.handle_timeout(due);
    }
    assert!(!guest.has_transmit() && guest.poll_timeout().is_none());
}

/// The packet limit is our own: a peer that sees its window open sends no update (Linux before
/// 6.8), so requests are repeated with exponential back-off.
#[test]
fn a_stall_by_the_packet_limit_is_probed() {
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
    let requests = guest.poll_transmit(first, 0).unwrap();
    assert!(is(&requests.header, Op::CreditRequest));
    let second = guest.poll_timeout().unwrap();
    assert!(second.as_nanos() - first.as_nanos() > first.as_nanos());
    host.consume(theirs, sent).unwrap();
    let _ = host.handle_packet(second, &requests.header);
    pump(&mut host, &mut guest);
    assert_eq!(guest.poll_event(), Some(Event::Writable { flow: ours }));
    // The armed timer has no effect.
    guest.handle_timeout(guest.poll_timeout().unwrap());
    assert!(!guest.has_transmit() && guest.poll_timeout().is_none());
}

/// RW in front of the RESPONSE would be a protocol error to the peer.
#[test]
fn no_payload_is_sent_before_the_response() {
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

/// Bytes keep the order of the calls, in place or queued.
#[test]
fn reserved_and_queued_sends_keep_the_order_of_calls() {
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

/// Only the last packet of a message carries EOM and EOR.
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
        let Disposition::Part { flags: got, .. } = got else {
            panic!("{got:?}")
        };
        flags.push(got);
    }
    assert_eq!(flags, [0, 0, SEQ_EOM | SEQ_EOR]);
    assert_eq!(guest.send(ours, 262_145, SEQ_EOM), Err(SendError::TooLong));
    // A packet of another type between the same ports: RST, rule 3, and the connection is
    // unaffected.
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
fn send_now_equals_reserve_and_commit() {
    let (mut guest, mut host, ours, theirs) = opened();
    let header = guest.send_now(ours, 100, SEQ_EOM).unwrap();
    assert!(is(&header, Op::Rw));
    assert_eq!(
        (header.len, header.flags),
        (100, 0),
        "streams have no flags"
    );
    let got = host.handle_packet(NOW, &header);
    let deliver = Disposition::Deliver {
        flow: theirs,
        len: 100,
    };
    assert_eq!(got, deliver);
    assert_eq!(guest.flow(ours).unwrap().send_credit, 262_044);
    assert_eq!(guest.send_now(ours, 0, 0), Err(ReserveError::Empty));
    // A packet carries 64 KiB; the rest of the credit follows.
    let lens: Vec<u32> = core::iter::from_fn(|| guest.send_now(ours, u32::MAX, 0).ok())
        .map(|header| header.len)
        .collect();
    assert_eq!(lens, [65536, 65536, 65536, 65436]);
    assert_eq!(guest.send_now(ours, 1, 0), Err(ReserveError::NoCredit));
    assert!(is(&self::header(&mut guest), Op::CreditRequest));
    assert_eq!(guest.stats().sent_bytes, 262_144);
    // Not behind queued sends, and not after the end.
    let sent = host.send(theirs, 1, 0);
    assert!(sent.is_ok());
    assert_eq!(host.send_now(theirs, 1, 0), Err(ReserveError::NoCredit));
    pump(&mut host, &mut guest);
    assert_eq!(host.poll_event(), Some(Event::Writable { flow: theirs }));
    assert_eq!(host.send_now(theirs, 1, 0).unwrap().len, 1);
    host.shutdown(NOW, theirs, Directions::SEND).unwrap();
    assert_eq!(host.send_now(theirs, 1, 0), Err(ReserveError::Shutdown));
    pump(&mut host, &mut guest);
    guest.shutdown(NOW, ours, Directions::RECEIVE).unwrap();
    guest.reset(ours).unwrap();
    assert_eq!(guest.send_now(ours, 1, 0), Err(ReserveError::Stale));
}

#[test]
fn a_partial_send_now_does_not_end_the_record() {
    let (mut guest, mut host) = (guest(), host());
    guest.set_seqpacket(true);
    host.set_seqpacket(true);
    let (ours, theirs) = open(&mut guest, &mut host, SocketType::SeqPacket);
    let part = guest.send_now(ours, 65537, SEQ_EOM | SEQ_EOR).unwrap();
    assert_eq!((part.len, part.flags), (65536, 0));
    let rest = guest.send_now(ours, 1, SEQ_EOM | SEQ_EOR).unwrap();
    assert_eq!((rest.len, rest.flags), (1, SEQ_EOM | SEQ_EOR));
    for (header, flags) in [(part, 0), (rest, SEQ_EOM | SEQ_EOR)] {
        let got = host.handle_packet(NOW, &header);
        let part = Disposition::Part {
            flow: theirs,
            len: header.len,
            flags,
        };
        assert_eq!(got, part);
    }
}

/// Every header carries our credit and replaces an update.
#[test]
fn send_now_replaces_a_credit_update() {
    let (mut guest, mut host, ours, theirs) = opened();
    for _ in 0..2 {
        let header = guest.send_now(ours, 65536, 0).unwrap();
        let _ = host.handle_packet(NOW, &header);
    }
    // The bytes of many packets at once.
    host.consume(theirs, 131_072).unwrap();
    assert!(host.has_transmit(), "half of the buffer");
    let header = host.send_now(theirs, 1, 0).unwrap();
    assert_eq!(header.fwd_cnt, 131_072);
    assert!(!host.has_transmit());
    let _ = guest.handle_packet(NOW, &header);
    assert_eq!(guest.flow(ours).unwrap().send_credit, 262_144);
}

/// A peer may have no more in flight than its own buffer holds, however large ours is (Linux since
/// the fix of CVE-2026-23086; our own drivers): it gets updates in time.
#[test]
fn a_peer_with_a_small_buffer_gets_updates_for_a_large_window() {
    let config = ShardConfig {
        buf_alloc: 1 << 30,
        ..ShardConfig::device(GUEST)
    };
    let mut host = Shard::new(config, Arc::new(PortTable::new()));
    host.listen(SERVER.port, 8).unwrap();
    let mut guest = guest();
    let (ours, theirs) = open(&mut guest, &mut host, SocketType::Stream);
    let mut sent = 0u64;
    while sent < 1 << 20 {
        let reservation = guest.reserve(ours, 4096).expect("credit comes back");
        let header = guest.commit(reservation, 4096, 0).unwrap();
        let got = host.handle_packet(NOW, &header);
        assert!(matches!(got, Disposition::Deliver { len: 4096, .. }));
        host.consume(theirs, 4096).unwrap();
        pump(&mut host, &mut guest);
        sent += 4096;
    }
}

/// A reader with a low-water mark as large as its buffer reads nothing before: the peer must know
/// all free space. (SO_RCVLOWAT of the public test suite: 128 KiB, and 128 KiB + 1 sent.)
#[test]
fn the_low_water_mark_triggers_credit_updates() {
    const BUFFER: u32 = 128 << 10;
    let (mut guest, mut host, ours, theirs) = opened();
    host.set_buf_alloc(theirs, BUFFER).unwrap();
    pump(&mut host, &mut guest);
    guest.send(ours, BUFFER, 0).unwrap();
    pump(&mut guest, &mut host);
    host.consume(theirs, 1).unwrap();
    assert!(!host.has_transmit(), "a byte is no news of itself");
    host.set_low_water(theirs, BUFFER).unwrap();
    let (update, _) = step(&mut host, &mut guest);
    assert!(is(&update, Op::CreditUpdate));
    assert_eq!(update.fwd_cnt, 1);
    guest.send(ours, 1, 0).unwrap();
    pump(&mut guest, &mut host);
    assert_eq!(host.flow(theirs).unwrap().unread, BUFFER);
    // From now on every byte is announced, until the mark is lowered.
    host.consume(theirs, 1).unwrap();
    assert!(is(&step(&mut host, &mut guest).0, Op::CreditUpdate));
    host.set_low_water(theirs, 1).unwrap();
    host.consume(theirs, 1).unwrap();
    assert!(!host.has_transmit());
}

#[test]
fn set_buf_alloc_limits_bytes_in_flight() {
    let (mut guest, mut host, ours, theirs) = opened();
    guest.set_buf_alloc(ours, 500).unwrap();
    let (update, _) = step(&mut guest, &mut host);
    assert_eq!(
        (is(&update, Op::CreditUpdate), update.buf_alloc),
        (true, 500)
    );
    guest.set_buf_alloc(ours, 500).unwrap();
    assert!(!guest.has_transmit(), "no change is no news");
    guest.send(ours, 800, 0).unwrap();
    pump(&mut guest, &mut host);
    assert_eq!(host.flow(theirs).unwrap().unread, 500);
    guest.set_buf_alloc(ours, 700).unwrap();
    pump(&mut guest, &mut host);
    assert_eq!(host.flow(theirs).unwrap().unread, 700);
    // It also bounds what the peer may send.
    assert_eq!(host.flow(theirs).unwrap().peer_buf_alloc, 700);
}

#[test]
fn progress_is_requested_once() {
    let (mut guest, mut host, ours, theirs) = opened();
    guest.request_progress(ours).unwrap();
    assert!(!guest.has_transmit(), "nothing is under way");
    guest.send(ours, 100, 0).unwrap();
    pump(&mut guest, &mut host);
    guest.request_progress(ours).unwrap();
    guest.request_progress(ours).unwrap();
    assert!(is(&step(&mut guest, &mut host).0, Op::CreditRequest));
    guest.request_progress(ours).unwrap();
    assert!(!guest.has_transmit(), "a request is outstanding");
    // It announces what it has consumed, also later.
    pump(&mut host, &mut guest);
    host.consume(theirs, 100).unwrap();
    pump(&mut host, &mut guest);
    let flow = guest.flow(ours).unwrap();
    assert_eq!(flow.peer_fwd_cnt, 100);
}

#[test]
fn set_connect_timeout_restarts_the_timer() {
    let mut guest = guest();
    let ours = guest.connect(NOW, ANY, SERVER, SocketType::Stream).unwrap();
    let soon = Duration::from_millis(10);
    guest.set_connect_timeout(NOW, ours, soon).unwrap();
    assert_eq!(guest.poll_timeout(), Some(NOW + soon));
    guest.handle_timeout(NOW + soon);
    let refused = Event::Refused {
        flow: ours,
        reason: RefuseReason::TimedOut,
    };
    assert_eq!(guest.poll_event(), Some(refused));
}
