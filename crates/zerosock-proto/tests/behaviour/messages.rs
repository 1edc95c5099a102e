//! Messages: their limits and violations of them.

use super::*;
use zerosock_proto::vsock::messages::{MAX_SENT_EMPTY, MAX_UNREAD_EMPTY};

/// A SEQPACKET connection; the host's buffer has `window` bytes.
fn messages(window: u32) -> (Shard, Shard, FlowId, FlowId) {
    let mut config = ShardConfig::device(GUEST);
    config.buf_alloc = window;
    let mut host = Shard::new(config, Arc::new(PortTable::new()));
    host.listen(SERVER.port, 16).unwrap();
    host.set_seqpacket(true);
    let mut guest = guest();
    guest.set_seqpacket(true);
    let (ours, theirs) = open(&mut guest, &mut host, SocketType::SeqPacket);
    (guest, host, ours, theirs)
}

/// Sends a message in parts of at most `most` bytes; returns the receiver's verdicts.
fn send(
    from: &mut Shard,
    to: &mut Shard,
    flow: FlowId,
    len: u32,
    most: u32,
) -> Result<Vec<Disposition>, ReserveError> {
    let mut reservation = from.reserve_message(flow, len)?;
    let mut got = Vec::new();
    loop {
        let part = reservation.remaining().min(most);
        let end = (part == reservation.remaining()).then_some(0);
        let header = from.commit_part(&mut reservation, part, end).unwrap();
        got.push(to.handle_packet(NOW, &header));
        if end.is_some() {
            return Ok(got);
        }
    }
}

fn closed(shard: &mut Shard) -> Option<CloseReason> {
    core::iter::from_fn(|| shard.poll_event()).find_map(|event| match event {
        Event::Closed { reason, .. } => Some(reason),
        _ => None,
    })
}

#[test]
fn only_the_last_part_carries_eom() {
    let (mut guest, mut host, ours, theirs) = messages(262_144);
    let mut reservation = guest.reserve_message(ours, 1000).unwrap();
    let first = guest.commit_part(&mut reservation, 600, None).unwrap();
    let last = guest
        .commit_part(&mut reservation, 300, Some(SEQ_EOR))
        .unwrap();
    assert_eq!((first.flags, last.flags), (0, SEQ_EOM | SEQ_EOR));
    // Unused reserved credit is released.
    assert_eq!(guest.flow(ours).unwrap().send_credit, 262_144 - 900);
    let part = |len, flags| Disposition::Part {
        flow: theirs,
        len,
        flags,
    };
    assert_eq!(host.handle_packet(NOW, &first), part(600, 0));
    assert_eq!(host.handle_packet(NOW, &last), part(300, SEQ_EOM | SEQ_EOR));
    assert_eq!(
        guest.commit_part(&mut reservation, 1, None).unwrap_err(),
        CommitError::TooMany
    );
}

/// EMSGSIZE: a message above the peer's buffer or our own limit is refused before its first byte.
#[test]
fn a_message_above_the_buffer_fails_with_too_long() {
    let (mut guest, mut host, ours, _) = messages(1000);
    let too_long = guest.reserve_message(ours, 1001);
    assert_eq!(too_long.unwrap_err(), ReserveError::TooLong);
    assert_eq!(guest.flow(ours).unwrap().max_message_len, 1000);
    assert_eq!(guest.send(ours, 1001, SEQ_EOM), Err(SendError::TooLong));
    send(&mut guest, &mut host, ours, 1000, 100).unwrap();
    let (mut guest, _, ours, _) = messages(1 << 20);
    let too_long = guest.reserve_message(ours, 262_145);
    assert_eq!(too_long.unwrap_err(), ReserveError::TooLong, "Linux's rule");
    let (mut guest, _, ours, _) = opened();
    let stream = guest.reserve_message(ours, 1);
    assert_eq!(stream.unwrap_err(), ReserveError::SocketType);
}

#[test]
fn a_message_waits_until_there_is_credit_for_all_of_it() {
    let (mut guest, mut host, ours, theirs) = messages(100_000);
    send(&mut guest, &mut host, ours, 40_000, 40_000).unwrap();
    let late = guest.reserve_message(ours, 70_000);
    assert_eq!(late.unwrap_err(), ReserveError::NoCredit);
    // It requests credit, and gets an update although half of the buffer is not free yet.
    assert!(is(&step(&mut guest, &mut host).0, Op::CreditRequest));
    assert!(is(&step(&mut host, &mut guest).0, Op::CreditUpdate));
    assert_eq!(guest.poll_event(), None, "still not enough");
    host.consume(theirs, 10_000).unwrap();
    pump(&mut host, &mut guest);
    assert_eq!(
        guest.poll_event(),
        Some(Event::Writable { flow: ours }),
        "70 000 are free"
    );
    send(&mut guest, &mut host, ours, 70_000, 6400).unwrap();
}

#[test]
fn parts_of_two_messages_are_not_interleaved() {
    let (mut guest, mut host, ours, theirs) = messages(262_144);
    let mut first = guest.reserve_message(ours, 10).unwrap();
    let mut second = guest.reserve_message(ours, 10).unwrap();
    let header = guest.commit_part(&mut first, 5, None).unwrap();
    let _ = host.handle_packet(NOW, &header);
    assert_eq!(
        guest.commit_part(&mut second, 10, Some(0)).unwrap_err(),
        CommitError::Interleaved
    );
    let third = guest.reserve_message(ours, 10);
    assert_eq!(third.unwrap_err(), ReserveError::NoCredit);
    // A shutdown is sent behind it.
    guest.shutdown(NOW, ours, Directions::BOTH).unwrap();
    assert!(!guest.has_transmit());
    let header = guest.commit_part(&mut first, 5, Some(0)).unwrap();
    let _ = host.handle_packet(NOW, &header);
    assert!(is(&step(&mut guest, &mut host).0, Op::Shutdown));
    assert_eq!(host.flow(theirs).unwrap().unread, 10);
    assert_eq!(
        guest.commit_part(&mut second, 10, Some(0)).unwrap_err(),
        CommitError::Shutdown,
        "not begun"
    );
}

/// A receiver returns credit message by message, so a begun message must be completed, however
/// small its parts.
#[test]
fn the_packet_limit_does_not_apply_within_a_message() {
    let (mut guest, mut host, ours, theirs) = messages(6400);
    let got = send(&mut guest, &mut host, ours, 6400, 10).unwrap();
    assert_eq!(got.len(), 640, "packets for which a stream would wait");
    let late = guest.reserve_message(ours, 1);
    assert_eq!(late.unwrap_err(), ReserveError::NoCredit);
    host.consume(theirs, 6400).unwrap();
    pump(&mut host, &mut guest);
    send(&mut guest, &mut host, ours, 0, 1).unwrap();
    // The same for a queued message.
    let (mut guest, mut host, ours, _) = messages(6400);
    guest.send(ours, 6400, SEQ_EOM).unwrap();
    while let Some(packet) = guest.poll_transmit(NOW, 10) {
        let _ = host.handle_packet(NOW, &packet.header);
    }
    assert_eq!(guest.flow(ours).unwrap().unsent, 0);
}

#[test]
fn a_message_above_the_buffer_is_reset_with_its_own_reason() {
    for (len, ends) in [(1000, false), (1001, true)] {
        let (mut guest, mut host, ours, _) = messages(1000);
        // A peer that breaks the rule.
        let reservation = guest.reserve_message(ours, 1).unwrap();
        let mut header = guest.commit_part(&mut { reservation }, 1, Some(0)).unwrap();
        header.len = 500;
        header.flags = 0;
        assert!(matches!(
            host.handle_packet(NOW, &header),
            Disposition::Part { len: 500, .. }
        ));
        header.len = len - 500;
        header.flags = if ends { SEQ_EOM } else { 0 };
        assert_eq!(
            host.handle_packet(NOW, &header),
            Disposition::Dropped(DropReason::MessageTooLong)
        );
        assert_eq!(closed(&mut host), Some(CloseReason::MessageTooLong));
        assert!(is(&step(&mut host, &mut guest).0, Op::Rst));
        assert_eq!(host.stats().message_too_long, 1);
        assert_eq!(host.stats().credit_exceeded, 0);
    }
}

/// CVE-2026-53132: empty messages cost no credit.
#[test]
fn a_flood_of_empty_messages_is_reset() {
    let (mut guest, mut host, ours, theirs) = messages(262_144);
    send(&mut guest, &mut host, ours, 3, 3).unwrap();
    let reservation = guest.reserve_message(ours, 0).unwrap();
    let header = guest.commit_part(&mut { reservation }, 0, Some(0)).unwrap();
    for _ in 0..MAX_UNREAD_EMPTY {
        let got = host.handle_packet(NOW, &header);
        assert!(matches!(
            got,
            Disposition::Part {
                len: 0,
                flags: SEQ_EOM,
                ..
            }
        ));
    }
    host.consume_empty(theirs, 1).unwrap();
    let _ = host.handle_packet(NOW, &header);
    assert_eq!(
        host.handle_packet(NOW, &header),
        Disposition::Dropped(DropReason::MessageFlood)
    );
    assert_eq!(closed(&mut host), Some(CloseReason::MessageFlood));
    assert_eq!(host.stats().message_flood, 1);
    assert_eq!(host.consume_empty(theirs, 1), Err(ConsumeError::Stale));
}

/// Our own sender waits until its empty messages have been read.
#[test]
fn a_sender_of_empty_messages_waits_for_their_reader() {
    let (mut guest, mut host, ours, theirs) = messages(262_144);
    let mut unread = 0;
    for _ in 0..5 {
        while send(&mut guest, &mut host, ours, 0, 1).is_ok() {
            unread += 1;
        }
        assert_eq!(unread, MAX_SENT_EMPTY);
        assert!(is(&step(&mut guest, &mut host).0, Op::CreditRequest));
        assert!(!host.has_transmit(), "answered when they were read");
        host.consume_empty(theirs, unread - 1).unwrap();
        assert!(!host.has_transmit());
        host.consume_empty(theirs, 1).unwrap();
        assert!(is(&step(&mut host, &mut guest).0, Op::CreditUpdate));
        assert_eq!(guest.poll_event(), Some(Event::Writable { flow: ours }));
        unread = 0;
    }
    // With bytes in between, the sender learns that they were read.
    for _ in 0..1000 {
        if send(&mut guest, &mut host, ours, 0, 1).is_err() {
            pump(&mut guest, &mut host);
            pump(&mut host, &mut guest);
            send(&mut guest, &mut host, ours, 0, 1).unwrap();
        }
        send(&mut guest, &mut host, ours, 100, 64).unwrap();
        host.consume_empty(theirs, 1).unwrap();
        host.consume(theirs, 100).unwrap();
        pump(&mut host, &mut guest);
    }
    assert_eq!(host.consume_empty(theirs, 1), Err(ConsumeError::TooMany));
}

#[test]
fn cancelled_messages_release_their_credit() {
    let (mut guest, _, ours, _) = messages(1000);
    let reservation = guest.reserve_message(ours, 1000).unwrap();
    assert_eq!(
        guest.reserve_message(ours, 1).unwrap_err(),
        ReserveError::NoCredit
    );
    guest.cancel_message(reservation);
    assert_eq!(guest.poll_event(), Some(Event::Writable { flow: ours }));
    assert_eq!(guest.flow(ours).unwrap().send_credit, 1000);
}

/// Reserved messages: each has its credit, and gets `Writable` when the one before is complete
/// although no credit is left.
#[test]
fn a_reserved_message_is_writable_when_the_one_before_is_complete() {
    let (mut guest, mut host, ours, _) = messages(100_000);
    let mut first = guest.reserve_message(ours, 60_000).unwrap();
    let mut second = guest.reserve_message(ours, 40_000).unwrap();
    let header = guest.commit_part(&mut first, 30_000, None).unwrap();
    let _ = host.handle_packet(NOW, &header);
    for _ in 0..2 {
        assert_eq!(
            guest.commit_part(&mut second, 40_000, Some(0)).unwrap_err(),
            CommitError::Interleaved
        );
    }
    assert_eq!(guest.poll_event(), None);
    let header = guest.commit_part(&mut first, 30_000, Some(0)).unwrap();
    let _ = host.handle_packet(NOW, &header);
    assert_eq!(guest.poll_event(), Some(Event::Writable { flow: ours }));
    let header = guest.commit_part(&mut second, 40_000, Some(0)).unwrap();
    let got = host.handle_packet(NOW, &header);
    assert!(matches!(got, Disposition::Part { len: 40_000, .. }));
    assert_eq!(guest.poll_event(), None, "once");
}

/// A reserved message that turns out to be empty counts against the limit of empty ones.
#[test]
fn a_reserved_empty_message_waits_for_the_limit_of_empty_ones() {
    let (mut guest, mut host, ours, theirs) = messages(1000);
    let mut reservation = guest.reserve_message(ours, 1000).unwrap();
    for _ in 0..MAX_SENT_EMPTY {
        send(&mut guest, &mut host, ours, 0, 1).unwrap();
    }
    let late = guest.commit_part(&mut reservation, 0, Some(0)).unwrap_err();
    assert_eq!(late, CommitError::ManyEmpty);
    assert_eq!(guest.poll_event(), None);
    assert!(is(&step(&mut guest, &mut host).0, Op::CreditRequest));
    host.consume_empty(theirs, MAX_SENT_EMPTY).unwrap();
    assert!(is(&step(&mut host, &mut guest).0, Op::CreditUpdate));
    assert_eq!(guest.poll_event(), Some(Event::Writable { flow: ours }));
    let header = guest.commit_part(&mut reservation, 0, Some(0)).unwrap();
    let got = host.handle_packet(NOW, &header);
    assert!(matches!(got, Disposition::Part { len: 0, .. }));
    assert_eq!(guest.flow(ours).unwrap().send_credit, 1000);
}

/// Linux begins a message with the credit it has, waits when that is used up, and requests no more.
/// A receiver that keeps a message until it is complete must send updates without a request.
#[test]
fn a_partial_message_gets_credit_updates_without_a_request() {
    const BUFFER: u32 = 262_144;
    let (mut guest, mut host, ours, theirs) = messages(BUFFER);
    send(&mut guest, &mut host, ours, 200_000, 65_536).unwrap();
    host.consume(theirs, 131_072).unwrap();
    assert!(is(&step(&mut host, &mut guest).0, Op::CreditUpdate));
    // Less than half of the buffer: no update.
    host.consume(theirs, 200_000 - 131_072).unwrap();
    assert!(host.poll_transmit(NOW, 0).is_none());
    let mut left = BUFFER - (200_000 - 131_072);
    let mut header = part_of(&mut guest, ours);
    while left > 0 {
        header.len = left.min(65_536);
        left -= header.len;
        let got = host.handle_packet(NOW, &header);
        assert!(matches!(got, Disposition::Part { .. }), "{got:?}");
        // An update is sent only when the sender knows of less credit than a packet.
        let packet = host.poll_transmit(NOW, 0);
        assert_eq!(packet.is_some(), (1..65_536).contains(&left), "{left} left");
        if let Some(update) = packet {
            assert!(is(&update.header, Op::CreditUpdate));
            assert_eq!(update.header.fwd_cnt, 200_000);
        }
    }
    (header.len, header.flags) = (200_000 - 131_072, SEQ_EOM);
    let got = host.handle_packet(NOW, &header);
    assert!(matches!(got, Disposition::Part { .. }), "{got:?}");
}

/// If space is freed later, because the message before was unread, every consumption is announced
/// then.
#[test]
fn a_partial_message_gets_credit_when_the_one_before_is_read() {
    let (mut guest, mut host, ours, theirs) = messages(100_000);
    send(&mut guest, &mut host, ours, 2000, 1000).unwrap();
    let mut header = part_of(&mut guest, ours);
    for len in [50_000, 48_000] {
        header.len = len;
        let got = host.handle_packet(NOW, &header);
        assert!(matches!(got, Disposition::Part { .. }), "{got:?}");
        assert!(host.poll_transmit(NOW, 0).is_none(), "nothing is read");
    }
    for read in [1000, 2000] {
        host.consume(theirs, 1000).unwrap();
        let update = host.poll_transmit(NOW, 0).expect("an update");
        assert!(is(&update.header, Op::CreditUpdate));
        assert_eq!(update.header.fwd_cnt, read);
    }
}

/// A packet that does not end its message.
fn part_of(guest: &mut Shard, ours: FlowId) -> Repr {
    let mut reservation = guest.reserve_message(ours, 1).unwrap();
    let mut header = guest.commit_part(&mut reservation, 1, Some(0)).unwrap();
    header.flags = 0;
    header
}
