//! Unit tests of `event_idx`.

use super::need_event;

/// The definition, spelled out: one of the entries old, old + 1, …, new - 1 is `event`.
fn one_of_the_batch(event: u16, new: u16, old: u16) -> bool {
    let mut entry = old;
    while entry != new {
        if entry == event {
            return true;
        }
        entry = entry.wrapping_add(1);
    }
    false
}

#[test]
fn need_event_is_true_exactly_for_entries_of_the_batch() {
    // Batches across every border, with all events near them.
    for old in [0u16, 1, 2, 32767, 32768, 65533, 65534, 65535] {
        for count in [0u16, 1, 2, 3, 5, 255, 256] {
            let new = old.wrapping_add(count);
            for shift in 0..1024u16 {
                let event = old.wrapping_sub(512).wrapping_add(shift);
                assert_eq!(
                    need_event(event, new, old),
                    one_of_the_batch(event, new, old),
                    "event {event}, new {new}, old {old}"
                );
            }
        }
    }
}

#[test]
fn a_batch_of_the_largest_queue_across_the_wrap() {
    let (old, new) = (65535u16, 65535u16.wrapping_add(32768));
    for (event, wanted) in [
        (65534, false),
        (65535, true),
        (0, true),
        (32766, true),
        (32767, false),
    ] {
        assert_eq!(need_event(event, new, old), wanted, "event {event}");
    }
}
