//! Unit tests of `paused_senders`.

use super::*;
use crate::addr::{Cid, Port};

const fn at(cid: u32, port: u32) -> Address {
    Address::new(Cid::new(cid), Port::new(port))
}

const ME: Address = at(2, 9);
const STOP: Control = Control::Stop(PauseSource::Receiver);

fn poll(paused: &mut PausedSenders, now: Instant) -> Option<Repr> {
    paused.poll(now, |_| true)
}

fn ms(ms: u64) -> Instant {
    Instant::from_nanos(ms * 1_000_000)
}

#[test]
fn stop_is_sent_once_and_repeated_while_the_receiver_is_full() {
    let mut paused = PausedSenders::new(PauseSource::Receiver);
    paused.pause(ms(0), ME, at(3, 1));
    assert_eq!(poll(&mut paused, ms(0)), Some(STOP.emit(ME, at(3, 1))));
    paused.pause(ms(9), ME, at(3, 1));
    assert_eq!(
        poll(&mut paused, ms(9)),
        None,
        "no repeat for datagrams already in flight"
    );
    paused.pause(ms(10), ME, at(3, 1));
    assert!(
        poll(&mut paused, ms(10)).is_some(),
        "the source ignored STOP"
    );
    assert_eq!(poll(&mut paused, ms(209)), None);
    assert_eq!(paused.poll_timeout(), Some(ms(210)));
    assert!(
        poll(&mut paused, ms(210)).is_some(),
        "repeated before it expires"
    );
    paused.resume(ME);
    assert_eq!(
        poll(&mut paused, ms(220)),
        Some(Control::Start(PauseSource::Receiver).emit(ME, at(3, 1)))
    );
    assert_eq!(poll(&mut paused, ms(900)), None);
    assert!(paused.is_empty() && paused.poll_timeout().is_none());
}

#[test]
fn a_source_without_stop_gets_no_start() {
    let mut paused = PausedSenders::new(PauseSource::Receiver);
    paused.pause(ms(0), ME, at(3, 1));
    paused.resume(ME);
    assert_eq!(poll(&mut paused, ms(0)), None);
    assert!(paused.is_empty());
}

#[test]
fn an_unsent_start_becomes_stop_when_the_receiver_fills_again() {
    let mut paused = PausedSenders::new(PauseSource::Receiver);
    paused.pause(ms(0), ME, at(3, 1));
    assert!(poll(&mut paused, ms(0)).is_some());
    paused.resume(ME);
    paused.pause(ms(5), ME, at(3, 1));
    assert_eq!(poll(&mut paused, ms(5)), Some(STOP.emit(ME, at(3, 1))));
}

#[test]
fn a_packet_that_found_no_buffer_is_retried() {
    let mut paused = PausedSenders::new(PauseSource::Receiver);
    paused.pause(ms(0), ME, at(3, 1));
    let stop = poll(&mut paused, ms(0)).unwrap();
    paused.retry_later(ms(0), |_| true);
    assert_eq!(
        (poll(&mut paused, ms(0)), poll(&mut paused, ms(1))),
        (None, Some(stop))
    );
    paused.resume(ME);
    let start = poll(&mut paused, ms(2)).unwrap();
    paused.retry_later(ms(2), |_| true);
    assert_eq!(
        (poll(&mut paused, ms(2)), poll(&mut paused, ms(3))),
        (None, Some(start))
    );
    assert!(paused.is_empty());
}

#[test]
fn poll_returns_packets_of_the_chosen_endpoint_only() {
    let mut paused = PausedSenders::new(PauseSource::Receiver);
    paused.pause(ms(0), ME, at(3, 1));
    paused.pause(ms(0), ME, at(4, 1));
    let of = |cid: u32| move |to: Address| to.cid.get() == cid;
    assert_eq!(paused.poll(ms(0), of(5)), None);
    assert!(paused.is_due());
    assert_eq!(paused.poll(ms(0), of(4)), Some(STOP.emit(ME, at(4, 1))));
    assert_eq!(paused.poll(ms(0), of(4)), None);
    assert!(paused.is_due());
    assert_eq!(paused.poll(ms(0), of(3)), Some(STOP.emit(ME, at(3, 1))));
    assert_eq!(paused.poll(ms(0), of(3)), None);
    assert!(!paused.is_due());
}

#[test]
fn many_ports_of_one_endpoint_do_not_exhaust_the_table() {
    let mut paused = PausedSenders::new(PauseSource::Receiver);
    for port in 0..1000 {
        paused.pause(ms(0), ME, at(3, port));
    }
    assert_eq!(paused.len(), PausedSenders::MAX_PER_ENDPOINT);
    paused.pause(ms(0), ME, at(4, 1));
    assert_eq!(paused.len(), PausedSenders::MAX_PER_ENDPOINT + 1);
    for cid in 5..100 {
        (0..100).for_each(|port| paused.pause(ms(0), ME, at(cid, port)));
    }
    assert_eq!(paused.len(), PausedSenders::MAX);
    paused.forget(|address| address.cid.get() == 3);
    assert_eq!(
        paused.len(),
        PausedSenders::MAX - PausedSenders::MAX_PER_ENDPOINT
    );
}
#[test]
fn retries_to_a_stalled_source_back_off_and_others_are_not_delayed() {
    let mut paused = PausedSenders::new(PauseSource::Receiver);
    for port in 0..50 {
        paused.pause(ms(0), ME, at(3, port));
    }
    paused.pause(ms(0), ME, at(4, 1));
    let mut others = 0;
    let mut tries = Vec::new();
    for now in 0..1000 {
        while let Some(message) = poll(&mut paused, ms(now)) {
            if message.dst.cid.get() == 4 {
                others += 1;
                continue;
            }
            tries.push(now);
            paused.retry_later(ms(now), |to| to.cid.get() == 3);
        }
        assert!(!paused.is_due() && paused.poll_timeout() > Some(ms(now)));
    }
    // One attempt for all ports of endpoint 3: at once, after 1, 2, 4, 8 and 16 ms, then every
    // 32 ms.
    assert_eq!(tries[..7], [0, 1, 3, 7, 15, 31, 63]);
    assert_eq!(tries.len(), 5 + 31);
    assert_eq!(others, 5, "one every 200 ms");
    // No source of endpoint 3 got STOP: none needs START.
    paused.resume(ME);
    assert_eq!(paused.len(), 1);
}

#[test]
fn start_is_not_retried_after_stop_expired() {
    let mut paused = PausedSenders::new(PauseSource::Receiver);
    paused.pause(ms(0), ME, at(3, 1));
    assert!(poll(&mut paused, ms(0)).is_some());
    paused.resume(ME);
    let mut tries = 0;
    for now in 1..600 {
        if poll(&mut paused, ms(now)).is_some() {
            tries += 1;
            paused.retry_later(ms(now), |_| true);
        }
    }
    // After 1, 2, 4, 8 and 16 ms, then every 32 ms, until STOP has expired.
    assert_eq!(tries, 6 + (500 - 32) / 32 + 1);
    assert!(paused.is_empty());
    assert_eq!(paused.quota.len(), 0);
}

#[test]
fn more_datagrams_do_not_shorten_the_retry_delay_of_stop() {
    let mut paused = PausedSenders::new(PauseSource::Receiver);
    paused.pause(ms(0), ME, at(3, 1));
    let mut tries = 0;
    for now in 0..100 {
        (0..10).for_each(|_| paused.pause(ms(now), ME, at(3, 1)));
        while poll(&mut paused, ms(now)).is_some() {
            tries += 1;
            paused.retry_later(ms(now), |_| true);
        }
    }
    assert_eq!(tries, 8, "after 1, 2, 4, 8, 16, 32 and 32 ms");
}
