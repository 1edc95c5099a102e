//! Unit tests of `paused_destinations`.

use super::*;
use crate::addr::Cid;

fn at(cid: u32, port: u32) -> Address {
    Address::new(Cid::new(cid), Port::new(port))
}

const OURS: Port = Port::new(7);
const FULL: PauseReason = PauseReason::Full(PauseSource::Receiver);

#[test]
fn a_pause_affects_one_destination_and_expires() {
    let mut paused = PausedDestinations::new();
    let now = Instant::ZERO;
    assert!(paused.pause(now, OURS, at(3, 1), FULL));
    assert_eq!(paused.reason(now, OURS, at(3, 1)), Some(FULL));
    assert_eq!(paused.reason(now, OURS, at(3, 2)), None);
    assert_eq!(paused.reason(now, OURS, at(4, 1)), None);
    assert_eq!(paused.reason(now, Port::new(8), at(3, 1)), None);
    let end = now + STOP_DURATION;
    assert_eq!(paused.poll_timeout(), Some(end));
    assert_eq!(
        paused.reason(end, OURS, at(3, 1)),
        None,
        "expired without a call of expire"
    );
    let mut ended = Vec::new();
    paused.expire(end, |port| ended.push(port));
    assert_eq!((ended, paused.len()), (vec![OURS], 0));
}

#[test]
fn a_repeated_stop_extends_the_pause_and_start_ends_it() {
    let mut paused = PausedDestinations::new();
    let (zero, later) = (Instant::ZERO, Instant::ZERO + STOP_DURATION / 2);
    paused.pause(zero, OURS, at(3, 1), FULL);
    paused.pause(later, OURS, at(3, 1), FULL);
    paused.expire(zero + STOP_DURATION, |_| panic!("too early"));
    assert!(
        paused.resume(OURS, at(3, 1), PauseSource::Receiver)
            && !paused.resume(OURS, at(3, 1), PauseSource::Receiver)
    );
    assert!(paused.is_empty() && paused.poll_timeout().is_none());
}

#[test]
fn receiver_and_switch_are_paused_independently() {
    let mut paused = PausedDestinations::new();
    let (now, to) = (Instant::ZERO, at(3, 1));
    let way = PauseReason::Full(PauseSource::Switch);
    paused.pause(now, OURS, to, FULL);
    paused.pause(now, OURS, to, way);
    assert!(!paused.resume(OURS, to, PauseSource::Switch));
    assert_eq!(
        paused.reason(now, OURS, to),
        Some(FULL),
        "the receiver is still full"
    );
    paused.pause(now, OURS, to, way);
    assert!(!paused.resume(OURS, to, PauseSource::Receiver));
    assert_eq!(paused.reason(now, OURS, to), Some(way));
    assert!(paused.resume(OURS, to, PauseSource::Switch));
    assert_eq!(paused.reason(now, OURS, to), None);
}

#[test]
fn a_flood_of_stops_uses_only_the_quota_of_its_sender() {
    let mut paused = PausedDestinations::new();
    let now = Instant::ZERO;
    for port in 0..10_000 {
        paused.pause(now, OURS, at(3, port), FULL);
    }
    assert_eq!(paused.len(), PausedDestinations::MAX_PER_ENDPOINT);
    assert!(paused.pause(now, OURS, at(4, 1), FULL));
    for cid in 5..100 {
        (0..100).for_each(|port| {
            paused.pause(now, OURS, at(cid, port), FULL);
        });
    }
    assert_eq!(paused.len(), PausedDestinations::MAX);
    let later = now + STOP_DURATION;
    let mut named = 0;
    paused.expire(later, |_| named += 1);
    assert_eq!(named, PausedDestinations::MAX);
    assert!(paused.pause(later, OURS, at(3, 70_000), FULL));
    assert_eq!(paused.len(), 1, "expired entries free their space");
}
