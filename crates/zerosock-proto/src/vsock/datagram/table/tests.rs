//! The table by itself: ports, limits, back-pressure and flow control.

use super::super::{STOP_DURATION, STOP_REPEAT_INTERVAL};
use super::*;
use crate::vsock::datagram::wire::Control;
use crate::wire::vsock::Repr;

const US: Cid = Cid::HOST;
const THEM: Address = Address::new(Cid::new(3), Port::new(1));

fn now() -> Instant {
    Instant::ZERO
}

fn table() -> DatagramTable {
    DatagramTable::new(US)
}

fn small() -> DatagramLimits {
    DatagramLimits {
        receive: 8 * 1024,
        send: 1000,
    }
}

fn control(table: &mut DatagramTable) -> Option<Repr> {
    table.poll_control(now(), |_| true)
}

fn at(port: u32) -> Address {
    Address::new(US, Port::new(port))
}

#[test]
fn a_port_has_one_socket_and_is_free_again() {
    let mut table = table();
    let id = table.bind(Port::new(9), small()).unwrap();
    assert_eq!(table.bind(Port::new(9), small()), Err(BindError::InUse));
    let any = table.bind(Port::ANY, small()).unwrap();
    let (local, _) = table.addresses(any).unwrap();
    assert!(local.port.get() >= EPHEMERAL_FIRST && local.cid == US);
    assert_eq!(table.find(Port::new(9)), Some(id));
    table.close(id);
    assert_eq!(table.find(Port::new(9)), None);
    let next = table.bind(Port::new(9), small()).unwrap();
    assert!(next != id && table.addresses(id).is_none());
    table.close(id);
    assert_eq!(
        table.find(Port::new(9)),
        Some(next),
        "the stale id closed nothing"
    );
}

#[test]
fn the_wildcard_port_has_no_socket() {
    let mut table = table();
    let one = table.bind(Port::new(9), small()).unwrap();
    let to_any = Address::new(US, Port::ANY);
    let put = |table: &mut DatagramTable| table.receive(THEM, to_any, 1, false, now);
    assert_eq!(
        put(&mut table),
        Err(DropCause::NoSocket),
        "no socket was found"
    );
    let other = table.bind(Port::new(10), small()).unwrap();
    assert_eq!(table.find(Port::new(10)), Some(other));
    assert_eq!(put(&mut table), Err(DropCause::NoSocket), "another was");
    table.close(other);
    assert_eq!(put(&mut table), Err(DropCause::NoSocket), "one has gone");
    assert_eq!(table.stats(one).unwrap().received, 0);
}

#[test]
fn ephemeral_ports_skip_what_is_taken() {
    let mut table = table();
    table.next_ephemeral = EPHEMERAL_COUNT - 1;
    let taken = Port::new(EPHEMERAL_FIRST);
    table.bind(taken, small()).unwrap();
    let ports = [(); 2].map(|()| {
        let id = table.bind(Port::ANY, small()).unwrap();
        table.addresses(id).unwrap().0.port.get()
    });
    let last = EPHEMERAL_FIRST + EPHEMERAL_COUNT - 1;
    assert_eq!(ports, [last, EPHEMERAL_FIRST + 1]);
}

#[test]
fn a_socket_drops_only_when_it_exceeds_its_limit() {
    let mut table = table();
    let id = table.bind(Port::new(9), small()).unwrap();
    let mut put = |len| table.receive(THEM, at(9), len, false, now);
    assert_eq!(put(8192 - OVERHEAD), Ok(id));
    assert_eq!(
        put(MAX_DATAGRAM),
        Ok(id),
        "the last one may exceed the limit"
    );
    assert_eq!(put(0), Err(DropCause::Full));
    table.consume(id, MAX_DATAGRAM);
    assert_eq!(table.receive(THEM, at(9), 0, false, now), Ok(id));
    let stats = table.stats(id).unwrap();
    assert_eq!((stats.received, stats.dropped_full), (3, 1));
    assert_eq!(table.drops().full, 1);
}

#[test]
fn empty_datagrams_count_against_the_limit() {
    let mut table = table();
    table.bind(Port::new(9), small()).unwrap();
    let put = |_: &u32| table.receive(THEM, at(9), 0, false, now).is_ok();
    assert_eq!((0..1000).take_while(put).count(), 8192 / 128 + 1);
}

#[test]
fn drops_without_socket_or_from_another_peer_are_counted() {
    let mut table = table();
    let id = table.bind(Port::new(9), small()).unwrap();
    let no_socket = Err(DropCause::NoSocket);
    assert_eq!(table.receive(THEM, at(8), 1, true, now), no_socket);
    let elsewhere = Address::new(Cid::new(7), Port::new(9));
    assert_eq!(table.receive(THEM, elsewhere, 1, true, now), no_socket);
    table.connect(id, Some(at(5)));
    assert_eq!(
        table.receive(THEM, at(9), 1, true, now),
        Err(DropCause::NotPeer)
    );
    table.connect(id, Some(THEM));
    assert_eq!(table.receive(THEM, at(9), 1, true, now), Ok(id));
    let drops = table.drops();
    assert_eq!((drops.no_socket, drops.not_peer, drops.full), (2, 1, 0));
    assert!(control(&mut table).is_none(), "no control packet");
}

#[test]
fn sources_stop_at_a_quarter_and_start_at_an_eighth() {
    let mut table = table();
    let id = table.bind(Port::new(9), small()).unwrap();
    let len = 1024 - OVERHEAD;
    for _ in 0..2 {
        table.receive(THEM, at(9), len, true, now).unwrap();
    }
    assert_eq!(control(&mut table), None);
    table.receive(THEM, at(9), len, true, now).unwrap();
    let stop = Control::Stop(PauseSource::Receiver).emit(at(9), THEM);
    assert_eq!(control(&mut table), Some(stop));
    table.consume(id, len);
    assert_eq!(control(&mut table), None);
    table.consume(id, len);
    let start = Control::Start(PauseSource::Receiver).emit(at(9), THEM);
    assert_eq!(control(&mut table), Some(start));
    assert_eq!(table.poll_timeout(), None);
}

#[test]
fn a_source_without_flow_control_gets_no_stop() {
    let mut table = table();
    table.bind(Port::new(9), small()).unwrap();
    for _ in 0..100 {
        let _ = table.receive(THEM, at(9), 100, false, now);
    }
    assert_eq!(control(&mut table), None);
}

#[test]
fn close_sends_start_to_paused_sources() {
    let mut table = table();
    let id = table.bind(Port::new(9), small()).unwrap();
    table.receive(THEM, at(9), 5000, true, now).unwrap();
    assert!(control(&mut table).is_some());
    table.close(id);
    let start = Control::Start(PauseSource::Receiver).emit(at(9), THEM);
    assert_eq!(control(&mut table), Some(start));
}

#[test]
fn a_full_send_buffer_throttles_until_datagrams_complete() {
    let mut table = table();
    let id = table.bind(Port::ANY, small()).unwrap();
    let send = |table: &mut DatagramTable, len| {
        let may = table.may_send(id, THEM, len, now);
        if may.is_ok() {
            table.sent(id, len as u32, true);
        }
        may.err()
    };
    assert_eq!(send(&mut table, 999 - OVERHEAD as usize), None);
    assert_eq!(
        send(&mut table, 65536),
        None,
        "the last one may exceed the limit"
    );
    assert_eq!(send(&mut table, 0), Some(DatagramRefusal::Throttled));
    assert_eq!(
        send(&mut table, 65537),
        Some(DatagramRefusal::TooLong(65537))
    );
    table.handle_completed(id, 999 - OVERHEAD);
    assert_eq!(table.poll_writable(), None, "still full");
    table.handle_completed(id, 65536);
    assert_eq!(table.poll_writable(), Some(id));
    assert_eq!(table.poll_writable(), None, "once");
    assert_eq!(send(&mut table, 1), None);
    assert_eq!(table.stats(id).unwrap().sent, 3);
}

#[test]
fn a_throttled_socket_is_writable_when_half_of_its_buffer_is_free() {
    let mut table = table();
    let limits = DatagramLimits {
        send: 8 * (100 + OVERHEAD),
        ..small()
    };
    let id = table.bind(Port::ANY, limits).unwrap();
    for _ in 0..8 {
        table.may_send(id, THEM, 100, now).unwrap();
        table.sent(id, 100, true);
    }
    assert_eq!(
        table.completions_until_writable(),
        None,
        "not throttled yet"
    );
    assert!(table.may_send(id, THEM, 100, now).is_err());
    for left in (1..=4).rev() {
        assert_eq!(table.completions_until_writable(), Some(left));
        assert_eq!(table.poll_writable(), None);
        table.handle_completed(id, 100);
    }
    assert_eq!(table.completions_until_writable(), None);
    assert_eq!(table.poll_writable(), Some(id));
    // A socket without a refused send is not returned when half of its buffer is free.
    table.handle_completed(id, 100);
    assert_eq!(table.poll_writable(), None);
}

#[test]
fn a_send_buffer_of_zero_allows_one_datagram_at_a_time() {
    let mut table = table();
    let limits = DatagramLimits { send: 0, ..small() };
    let id = table.bind(Port::ANY, limits).unwrap();
    for _ in 0..3 {
        table.may_send(id, THEM, 0, now).unwrap();
        table.sent(id, 0, true);
        assert_eq!(
            table.may_send(id, THEM, 0, now),
            Err(DatagramRefusal::Throttled)
        );
        assert_eq!(table.completions_until_writable(), Some(1));
        table.handle_completed(id, 0);
        assert_eq!(table.poll_writable(), Some(id));
    }
}

#[test]
fn a_flushing_socket_is_writable_when_nothing_is_in_flight() {
    let mut table = table();
    let id = table.bind(Port::ANY, small()).unwrap();
    assert!(table.is_flushed(id));
    for len in [10, 20] {
        table.sent(id, len, true);
    }
    table.sent(id, 30, false);
    assert!(!table.is_flushed(id));
    assert_eq!(table.completions_until_writable(), Some(2));
    table.handle_completed(id, 20);
    assert_eq!(table.poll_writable(), None);
    table.handle_completed(id, 10);
    assert_eq!(table.poll_writable(), Some(id));
    assert!(table.is_flushed(id));
    table.sent(id, 10, true);
    table.close(id);
    assert!(table.is_flushed(id), "a closed socket does not wait");
    assert!(!table.has_throttled());
}

/// Random datagrams complete in any order: `completions_until_writable` is at least 1 and at most
/// the number in flight, and no socket stays throttled after the wake-up it is entitled to.
#[test]
fn no_throttled_socket_wakes_later_than_predicted() {
    proptest::proptest!(|(
        limits in proptest::collection::vec(0u32..5000, 1..20),
        steps in proptest::collection::vec((0usize..20, 0u32..3000, 0usize..64), 1..200),
    )| {
        let mut table = table();
        let bind = |&send: &u32| table.bind(Port::ANY, DatagramLimits { send, ..small() });
        let ids: Vec<_> = limits.iter().map(bind).map(Result::unwrap).collect();
        let mut flying: Vec<(usize, u32)> = Vec::new();
        // The bytes in flight that each socket waits for.
        let mut waiting: Vec<Option<u32>> = vec![None; ids.len()];
        for (which, len, back) in steps {
            let which = which % ids.len();
            if back % 8 == 0 {
                let left = flying.iter().any(|(of, _)| *of == which);
                assert_eq!(table.is_flushed(ids[which]), !left);
                if left {
                    waiting[which].get_or_insert(0);
                }
            } else if table.may_send(ids[which], THEM, len as usize, now).is_ok() {
                table.sent(ids[which], len, true);
                flying.push((which, len));
            } else {
                waiting[which] = Some(limits[which] / 2);
            }
            assert_eq!(table.has_throttled(), waiting.iter().any(Option::is_some));
            let Some(packets) = table.completions_until_writable() else { continue };
            assert!(packets >= 1 && packets as usize <= flying.len());
            // Datagrams complete one by one, until the predicted wake-up.
            for n in 1..=packets {
                let (of, len) = flying.swap_remove(back % flying.len());
                table.handle_completed(ids[of], len);
                while let Some(id) = table.poll_writable() {
                    assert_eq!(n, packets, "woken before the prediction");
                    let at = ids.iter().position(|&other| other == id).unwrap();
                    assert!(waiting[at].take().is_some(), "woken once");
                }
            }
            for (at, until) in waiting.iter().enumerate() {
                let under_way = flying.iter().filter(|(of, _)| *of == at);
                let under_way: u32 = under_way.map(|(_, len)| len + OVERHEAD).sum();
                assert!(until.is_none_or(|until| under_way > until), "writable and still throttled");
            }
        }
    });
}

#[test]
fn stop_pauses_one_destination_until_start() {
    let mut table = table();
    let id = table.bind(Port::new(9), small()).unwrap();
    let stop = Control::Stop(PauseSource::Receiver).emit(THEM, at(9));
    let other = Address::new(THEM.cid, Port::new(2));
    assert!(table.handle_control(now(), &stop));
    assert_eq!(
        table.may_send(id, THEM, 1, now),
        Err(DatagramRefusal::Stopped)
    );
    assert_eq!(table.may_send(id, other, 1, now), Ok(at(9)));
    let start = Control::Start(PauseSource::Receiver).emit(THEM, at(9));
    assert!(table.handle_control(now(), &start));
    assert_eq!(table.poll_writable(), Some(id));
    assert_eq!(table.may_send(id, THEM, 1, now), Ok(at(9)));
}

#[test]
fn a_lost_start_delays_sending_until_stop_expires() {
    let mut table = table();
    let id = table.bind(Port::new(9), small()).unwrap();
    table.handle_control(
        now(),
        &Control::Stop(PauseSource::Receiver).emit(THEM, at(9)),
    );
    assert_eq!(
        table.may_send(id, THEM, 1, now),
        Err(DatagramRefusal::Stopped)
    );
    let end = now() + STOP_DURATION;
    assert_eq!(table.poll_timeout(), Some(end));
    table.handle_timeout(end);
    assert_eq!(table.poll_writable(), Some(id));
    assert_eq!(table.may_send(id, THEM, 1, || end), Ok(at(9)));
}

#[test]
fn a_receiver_that_stays_full_keeps_its_sources_stopped() {
    let (mut ours, mut theirs) = (table(), DatagramTable::new(THEM.cid));
    let source = theirs.bind(THEM.port, small()).unwrap();
    ours.bind(Port::new(9), small()).unwrap();
    ours.receive(THEM, at(9), 5000, true, now).unwrap();
    let mut time = now();
    for _ in 0..100 {
        while let Some(control) = ours.poll_control(time, |_| true) {
            assert!(theirs.handle_control(time, &control));
        }
        theirs.handle_timeout(time);
        assert_eq!(
            theirs.may_send(source, at(9), 1, || time),
            Err(DatagramRefusal::Stopped)
        );
        time = ours.poll_timeout().unwrap();
        assert!(time <= now() + STOP_REPEAT_INTERVAL * 200);
    }
}

#[test]
fn control_packets_for_other_sockets_are_ignored() {
    let mut table = table();
    let id = table.bind(Port::new(9), small()).unwrap();
    let stop = Control::Stop(PauseSource::Receiver);
    assert!(!table.handle_control(now(), &stop.emit(THEM, at(8))));
    let elsewhere = Address::new(Cid::new(7), Port::new(9));
    assert!(!table.handle_control(now(), &stop.emit(THEM, elsewhere)));
    assert!(!table.handle_control(now(), &super::super::data(THEM, at(9), 0, true)));
    assert!(table.handle_control(
        now(),
        &Control::Start(PauseSource::Receiver).emit(THEM, at(9))
    ));
    assert_eq!(table.may_send(id, THEM, 1, now), Ok(at(9)));
    assert_eq!(table.poll_timeout(), None);
}

#[test]
fn an_unsupported_destination_is_an_error() {
    let mut table = table();
    let id = table.bind(Port::new(9), small()).unwrap();
    table.handle_control(now(), &Control::Unsupported.emit(THEM, at(9)));
    assert_eq!(
        table.may_send(id, THEM, 1, now),
        Err(DatagramRefusal::Unsupported)
    );
    let end = now() + STOP_DURATION;
    assert_eq!(table.may_send(id, THEM, 1, || end), Ok(at(9)), "it expires");
}

#[test]
fn a_waiting_socket_wakes_when_another_stop_finds_its_pause_expired() {
    let mut table = table();
    let id = table.bind(Port::new(9), small()).unwrap();
    let other = Address::new(THEM.cid, Port::new(2));
    let stop = |table: &mut DatagramTable, by: Address, now| {
        let header = Control::Stop(PauseSource::Receiver).emit(by, at(9));
        assert!(table.handle_control(now, &header));
    };
    stop(&mut table, THEM, now());
    let refused = table.may_send(id, THEM, 1, now);
    assert_eq!(refused, Err(DatagramRefusal::Stopped));
    let later = now() + STOP_DURATION;
    stop(&mut table, other, later);
    assert_eq!(table.poll_writable(), Some(id));
    assert!(table.may_send(id, THEM, 1, || later).is_ok());
    assert_eq!(
        table.may_send(id, other, 1, || later),
        Err(DatagramRefusal::Stopped)
    );
}
