//! Unit tests of `notification_ids`.

use super::*;

fn completed(ids: &mut NotificationIds, lo: u32, hi: u32) -> Vec<u32> {
    let mut freed = Vec::new();
    assert!(ids.complete(lo, hi, |id| freed.push(id.0)));
    freed.sort_unstable();
    freed
}

/// Ids from `first` on, one for each request.
fn ids(first: u32, keys: &[u32]) -> NotificationIds {
    let mut ids = NotificationIds {
        next: first,
        ..NotificationIds::default()
    };
    keys.iter().for_each(|&key| ids.assign(RequestId(key)));
    ids
}

#[test]
fn ranges_are_reported_in_any_order_and_wrap() {
    let first = u32::MAX - 1;
    let mut ids = ids(first, &[10, 11, 12, 13]);
    assert_eq!(completed(&mut ids, 0, 0), [12]);
    assert_eq!(completed(&mut ids, first, u32::MAX), [10, 11]);
    assert_eq!(completed(&mut ids, first, 0), []);
    // A range that begins before the first outstanding id.
    assert_eq!(completed(&mut ids, u32::MAX - 9, 1), [13]);
    assert!(ids.is_empty());
    assert_eq!(ids.next, 2);
}

#[test]
fn the_last_id_can_be_withdrawn_until_it_is_reported() {
    let mut ids = ids(u32::MAX, &[10, 11]);
    assert!(ids.is_last_outstanding() && !ids.is_only_last_outstanding());
    ids.withdraw_last();
    assert_eq!(completed(&mut ids, u32::MAX, u32::MAX), [10]);
    assert!(!ids.is_last_outstanding() && !ids.is_only_last_outstanding());
    ids.assign(RequestId(12));
    assert!(ids.is_only_last_outstanding());
    assert_eq!(completed(&mut ids, 0, 0), [12], "the withdrawn id");
}

#[test]
fn a_range_with_ids_that_were_not_assigned_is_not_all_ours() {
    for (lo, hi, ours) in [(0, 1, &[10][..]), (1, 1, &[]), (5, 9, &[])] {
        let mut ids = ids(0, &[10]);
        let mut freed = Vec::new();
        assert!(!ids.complete(lo, hi, |id| freed.push(id.0)));
        assert_eq!(freed, ours);
    }
}

#[test]
fn an_id_that_stays_outstanding_does_not_retain_later_ids() {
    let mut ids = ids(u32::MAX - 500, &[7]);
    for _ in 0..100_000 {
        let number = ids.next;
        ids.assign(RequestId(8));
        ids.assign(RequestId(9));
        let after = number.wrapping_add(1);
        assert_eq!(completed(&mut ids, after, after), [9]);
        assert_eq!(completed(&mut ids, number, number), [8]);
    }
    assert_eq!(ids.outstanding.len(), 1);
    assert!(ids.outstanding.capacity() < 16);
    assert_eq!(completed(&mut ids, u32::MAX - 500, u32::MAX - 500), [7]);
    assert!(ids.is_empty());
}

#[test]
fn the_first_id_is_learnt_from_reported_ranges() {
    for start in [0, 7, u32::MAX - 1] {
        let at = |offset: u32| start.wrapping_add(offset);
        let mut ids = NotificationIds::default();
        ids.start(None);
        (10..14).for_each(|key| ids.assign(RequestId(key)));
        // Which requests took these depends on the ids still to be reported.
        assert!(!ids.infer_first_id(at(1), at(1)));
        assert!(!ids.infer_first_id(at(3), at(3)));
        assert!(!ids.is_first_id_known());
        assert!(ids.infer_first_id(at(0), at(0)));
        let freed = [1, 3, 0].map(|offset| completed(&mut ids, at(offset), at(offset)));
        assert_eq!(freed, [[11], [13], [10]]);
        assert_eq!(completed(&mut ids, at(2), at(2)), [12]);
        assert_eq!(ids.next, at(4));
    }
}

#[test]
fn a_range_longer_than_the_assigned_ids_ends_with_them() {
    let mut ids = NotificationIds::default();
    ids.start(None);
    ids.assign(RequestId(1));
    ids.assign(RequestId(2));
    assert!(ids.infer_first_id(90, 100));
    assert_eq!(completed(&mut ids, 90, 100), [1, 2]);
    assert_eq!(ids.next, 101);
}
