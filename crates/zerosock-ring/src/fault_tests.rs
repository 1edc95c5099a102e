//! Unit tests of `fault`.

use super::*;

/// An owner that is no memory of another test: their ids count up from 1.
const OWNER: u64 = u64::MAX - 1;

#[test]
fn registered_slots_are_found_until_dropped() {
    // No mapping of another test can have these addresses.
    let start = 0x1000;
    let first = Registration::new(start, 0x2000, 0x1000, OWNER, None);
    let second = Registration::new(0x8000, 0x1000, 0x1000, OWNER, Some(&first));
    assert!(first.0.find(start).is_some());
    assert!(first.0.find(start + 0x1fff).is_some());
    assert!(first.0.find(start + 0x2000).is_none());
    assert!(first.0.find(start - 1).is_none());
    let found = second.0.find(0x8000).expect("in range");
    assert!(ptr::eq(found.leader, first.0));
    let slot = first.0;
    drop(first);
    assert!(slot.find(start).is_none());
    drop(second);
    // SAFETY: no mapping of any memory has this address, so nothing is put anywhere.
    assert!(unsafe { !handle_fault(start) });
}

#[test]
fn the_table_grows_beyond_one_chunk() {
    let all: Vec<_> = (0..3 * CHUNK)
        .map(|i| Registration::new(0x10_0000 + i * 16, 16, 1, OWNER, None))
        .collect();
    for (i, registration) in all.iter().enumerate() {
        assert!(registration.0.find(0x10_0000 + i * 16 + 15).is_some());
    }
    let mut distinct: Vec<_> = all.iter().map(|r| ptr::from_ref(r.0)).collect();
    distinct.sort_unstable();
    distinct.dedup();
    assert_eq!(distinct.len(), all.len());
}

#[test]
fn a_late_loss_does_not_affect_the_next_user_of_the_slot() {
    let first = Registration::new(0x4000_0000, 16, 1, OWNER, None);
    let slot = first.0;
    drop(first);
    slot.lost.store(OWNER, Relaxed);
    // The next user of the slot has another id.
    let next = Registration(slot);
    assert!(!next.is_lost(OWNER - 1));
    core::mem::forget(next);
}
