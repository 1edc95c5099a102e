//! The order and the times of attempts, as RFC 8305 gives them.

use super::*;

fn v4(last: u8) -> IpAddr {
    IpAddr::from([192, 0, 2, last])
}

fn v6(last: u16) -> IpAddr {
    IpAddr::from([0x2001, 0xdb8, 0, 0, 0, 0, 0, last])
}

/// Starts all attempts when they are due, as if none ever finished; the addresses with the milliseconds
/// since `start`.
fn run(schedule: &mut Schedule, start: Instant, mut now: Instant) -> Vec<(u128, IpAddr)> {
    let mut attempts = Vec::new();
    while let Some(at) = schedule.next_attempt(now) {
        now = at;
        let address = schedule.start(now).unwrap();
        attempts.push(((now - start).as_millis(), address));
    }
    attempts
}

#[test]
fn families_take_turns_every_250_ms_beginning_with_ipv6() {
    let start = Instant::now();
    let mut schedule = Schedule::new(Order::default());
    schedule.on_answer(start, Family::V6, vec![v6(1), v6(2)]);
    schedule.on_answer(start, Family::V4, vec![v4(1), v4(2), v4(3)]);
    let attempts = run(&mut schedule, start, start);
    assert_eq!(
        attempts,
        [
            (0, v6(1)),
            (250, v4(1)),
            (500, v6(2)),
            (750, v4(2)),
            (1000, v4(3))
        ]
    );
    assert!(schedule.is_exhausted());
}

#[test]
fn an_ipv4_answer_waits_50_ms_for_ipv6() {
    let start = Instant::now();
    let mut schedule = Schedule::new(Order::default());
    schedule.on_answer(start, Family::V4, vec![v4(1), v4(2)]);
    assert_eq!(schedule.next_attempt(start), Some(start + RESOLUTION_DELAY));
    assert!(!schedule.is_exhausted());

    // In time: IPv6 is first and does not wait for the rest of the delay.
    let at = start + Duration::from_millis(49);
    schedule.on_answer(at, Family::V6, vec![v6(1)]);
    assert_eq!(
        run(&mut schedule, start, at),
        [(49, v6(1)), (299, v4(1)), (549, v4(2))]
    );
}

#[test]
fn an_ipv6_answer_that_is_late_has_the_next_turn() {
    let start = Instant::now();
    let mut schedule = Schedule::new(Order::default());
    schedule.on_answer(start, Family::V4, vec![v4(1), v4(2)]);
    let now = start + RESOLUTION_DELAY;
    assert_eq!(schedule.start(now), Some(v4(1)));
    let now = now + Duration::from_millis(100);
    schedule.on_answer(now, Family::V6, vec![v6(1)]);
    assert_eq!(run(&mut schedule, start, now), [(300, v6(1)), (550, v4(2))]);
}

#[test]
fn ipv6_does_not_wait_for_ipv4_and_a_missing_family_holds_nothing_up() {
    let start = Instant::now();
    let mut schedule = Schedule::new(Order::default());
    schedule.on_answer(start, Family::V6, vec![v6(1)]);
    assert_eq!(schedule.next_attempt(start), Some(start));

    let mut schedule = Schedule::new(Order::default());
    schedule.on_answer(start, Family::V6, Vec::new());
    assert_eq!(schedule.next_attempt(start), None);
    schedule.on_answer(start, Family::V4, vec![v4(1)]);
    assert_eq!(schedule.next_attempt(start), Some(start));

    let mut schedule = Schedule::new(Order::default());
    schedule.on_answer(start, Family::V4, vec![v4(1)]);
    schedule.on_answer(start, Family::V6, Vec::new());
    assert_eq!(schedule.next_attempt(start), Some(start));
}

#[test]
fn a_failed_attempt_starts_the_next_at_once() {
    let start = Instant::now();
    let mut schedule = Schedule::new(Order::default());
    schedule.on_answer(start, Family::V6, vec![v6(1)]);
    schedule.on_answer(start, Family::V4, vec![v4(1)]);
    assert_eq!(schedule.start(start), Some(v6(1)));
    let now = start + Duration::from_millis(1);
    assert_eq!(schedule.next_attempt(now), Some(start + ATTEMPT_DELAY));
    schedule.on_failure();
    assert_eq!(schedule.next_attempt(now), Some(now));
    assert_eq!(schedule.start(now), Some(v4(1)));
    schedule.on_failure();
    assert_eq!(schedule.next_attempt(now), None);
    assert!(schedule.is_exhausted());
}

#[test]
fn a_request_makes_at_most_16_attempts() {
    let start = Instant::now();
    let mut schedule = Schedule::new(Order::default());
    schedule.on_answer(start, Family::V6, (0..16).map(v6).collect());
    schedule.on_answer(start, Family::V4, (0..16).map(v4).collect());
    let attempts = run(&mut schedule, start, start);
    assert_eq!(attempts.len(), 16);
    assert_eq!(attempts.iter().filter(|(_, ip)| ip.is_ipv4()).count(), 8);
    assert!(schedule.is_exhausted());
}

#[test]
fn nothing_is_exhausted_while_an_answer_is_missing() {
    let start = Instant::now();
    let mut schedule = Schedule::new(Order::default());
    assert!(!schedule.is_exhausted());
    schedule.on_answer(start, Family::V4, Vec::new());
    assert!(!schedule.is_exhausted() && !schedule.is_answered());
    schedule.on_answer(start, Family::V6, Vec::new());
    assert!(schedule.is_exhausted() && schedule.is_answered());
}

#[test]
fn the_address_that_accepted_last_is_tried_first_and_at_once() {
    let start = Instant::now();
    let order = |first| Order {
        first: Some(first),
        last: Vec::new(),
    };
    // It does not wait for the other family, and the others follow as they would without it.
    let mut schedule = Schedule::new(order(v4(3)));
    schedule.on_answer(start, Family::V4, (1..=4).map(v4).collect());
    assert_eq!(schedule.start(start), Some(v4(3)));
    schedule.on_answer(start, Family::V6, vec![v6(1)]);
    let attempts = run(&mut schedule, start, start);
    assert_eq!(
        attempts,
        [(250, v6(1)), (500, v4(1)), (750, v4(2)), (1000, v4(4))]
    );
    // In the family that is answered later.
    let mut schedule = Schedule::new(order(v4(1)));
    schedule.on_answer(start, Family::V6, vec![v6(1)]);
    assert_eq!(schedule.start(start), Some(v6(1)));
    let now = start + Duration::from_millis(10);
    schedule.on_answer(now, Family::V4, vec![v4(2), v4(1)]);
    assert_eq!(run(&mut schedule, start, now), [(10, v4(1)), (260, v4(2))]);
    // The name has lost it.
    let mut schedule = Schedule::new(order(v4(9)));
    schedule.on_answer(start, Family::V4, vec![v4(1)]);
    assert_eq!(schedule.next_attempt(start), Some(start + RESOLUTION_DELAY));
    assert_eq!(run(&mut schedule, start, start), [(50, v4(1))]);
}

#[test]
fn addresses_that_refused_are_tried_last_in_their_order() {
    let start = Instant::now();
    let mut schedule = Schedule::new(Order {
        first: None,
        last: vec![v4(2), v6(1)],
    });
    schedule.on_answer(start, Family::V6, vec![v6(1)]);
    assert_eq!(
        schedule.next_attempt(start),
        None,
        "IPv4 may have a better one"
    );
    schedule.on_answer(start, Family::V4, vec![v4(1), v4(2)]);
    assert!(schedule.has_alternative());
    assert_eq!(schedule.start(start), Some(v4(1)));
    assert!(!schedule.has_alternative() && !schedule.is_exhausted());
    let attempts = run(&mut schedule, start, start);
    assert_eq!(attempts, [(250, v4(2)), (500, v6(1))]);
    assert!(schedule.is_exhausted());
}
