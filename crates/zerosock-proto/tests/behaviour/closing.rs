//! Half-closes, closes, and bytes in flight.

use super::*;

/// A bug of other implementations: a half-close taken for a close loses the last bytes.
#[test]
fn shutdown_wr_leaves_receiving_open() {
    let (mut guest, mut host, ours, theirs) = opened();
    guest.send(ours, 5, 0).unwrap();
    guest.shutdown(NOW, ours, Directions::SEND).unwrap();
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
    guest.shutdown(NOW, ours, Directions::RECEIVE).unwrap();
    let (shutdown, _) = step(&mut guest, &mut host);
    assert_eq!(shutdown.flags, SHUTDOWN_RECEIVE | SHUTDOWN_SEND);
    assert!(host.flow(theirs).is_some(), "five bytes are unread");
    host.consume(theirs, 5).unwrap();
    // The end replaces a shutdown event that was not polled.
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

/// A peer that shuts down receiving: EPIPE, and queued sends are dropped.
#[test]
fn shutdown_rd_of_the_peer_fails_sends_with_epipe() {
    let (mut guest, mut host, ours, theirs) = opened();
    let reservation = host.reserve(theirs, 10).unwrap();
    host.send(theirs, 100, 0).unwrap();
    guest.shutdown(NOW, ours, Directions::RECEIVE).unwrap();
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

/// Bytes in flight when we shut down receiving are discarded, and their credit is returned, so that
/// the sender does not stall.
#[test]
fn payload_after_shutdown_rd_returns_its_credit() {
    let (mut guest, mut host, ours, theirs) = opened();
    guest.shutdown(NOW, ours, Directions::RECEIVE).unwrap();
    host.send(theirs, 262144, 0).unwrap();
    pump(&mut host, &mut guest);
    assert_eq!(guest.stats().receive_shut, 4);
    let info = guest.flow(ours).unwrap();
    assert_eq!((info.unread, info.fwd_cnt), (0, 262144));
}

#[test]
fn close_without_progress_resets_after_eight_seconds() {
    let (mut guest, _, ours, _) = opened();
    guest.shutdown(NOW, ours, Directions::BOTH).unwrap();
    assert!(is(&header(&mut guest), Op::Shutdown));
    assert_eq!(
        guest.flow(ours).unwrap().state,
        State::Closing {
            peer: Directions::NONE
        }
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

/// No side waits 8 s when both close at once.
#[test]
fn simultaneous_close_ends_at_once() {
    let (mut guest, mut host, ours, theirs) = opened();
    guest.shutdown(NOW, ours, Directions::BOTH).unwrap();
    host.shutdown(NOW, theirs, Directions::BOTH).unwrap();
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

/// SHUTDOWN waits for data that has no credit yet, until the close timer fires.
#[test]
fn close_sends_queued_data_before_shutdown() {
    let (mut guest, mut host, ours, theirs) = opened();
    guest.send(ours, 300_000, 0).unwrap();
    guest.shutdown(NOW, ours, Directions::BOTH).unwrap();
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
