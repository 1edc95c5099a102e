//! Addresses of names that are remembered, and for how long.

use super::*;

fn name(text: &str) -> DomainName {
    text.parse().unwrap()
}

fn address(last: u8) -> IpAddr {
    IpAddr::from([192, 0, 2, last])
}

#[test]
fn the_address_that_accepted_last_is_first_for_a_minute() {
    let start = Instant::now();
    let mut history = AddressHistory::default();
    let db = name("db.test");
    history.accepted(start, &db, address(1));
    history.accepted(start, &db, address(2));
    let first = |now| history.order_of_streams(now, &db).first;
    assert_eq!(first(start), Some(address(2)));
    assert_eq!(
        first(start + VALID - Duration::from_millis(1)),
        Some(address(2))
    );
    assert_eq!(first(start + VALID), None);
    // Neither of other names nor for datagrams.
    let other = history.order_of_streams(start, &name("web.test"));
    assert_eq!(other, Order::default());
    assert_eq!(history.order_of_datagrams(start, &db), Order::default());
}

#[test]
fn addresses_that_refused_datagrams_are_last_the_oldest_refusal_first() {
    let start = Instant::now();
    let second = Duration::from_secs(1);
    let mut history = AddressHistory::default();
    let dns = name("dns.test");
    for (after, last) in [(0, 1), (1, 2), (2, 1)] {
        history.refused(start + second * after, &dns, address(last));
    }
    let last = |now| history.order_of_datagrams(now, &dns).last;
    assert_eq!(last(start + second * 3), [address(2), address(1)]);
    assert_eq!(last(start + VALID + second), [address(1)]);
    assert!(last(start + VALID + second * 2).is_empty());
}

#[test]
fn names_and_addresses_are_bounded_and_room_comes_back() {
    let start = Instant::now();
    let mut history = AddressHistory::default();
    for n in 0..2 * MAX_NAMES {
        history.accepted(start, &name(&format!("n{n}.test")), address(1));
        history.refused(start, &name(&format!("n{n}.test")), address(1));
    }
    assert_eq!(
        (history.accepted.len(), history.refused.len()),
        (MAX_NAMES, MAX_NAMES)
    );
    // A name that is known is still updated.
    history.accepted(start, &name("n0.test"), address(2));
    assert_eq!(
        history.order_of_streams(start, &name("n0.test")).first,
        Some(address(2))
    );
    for last in 0..=255 {
        history.refused(start, &name("n0.test"), address(last));
    }
    assert_eq!(
        history
            .order_of_datagrams(start, &name("n0.test"))
            .last
            .len(),
        2 * MAX_ADDRESSES
    );
    history.accepted(start + VALID, &name("late.test"), address(3));
    assert_eq!((history.accepted.len(), history.refused.len()), (1, 0));
}
