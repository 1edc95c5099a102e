//! Unit tests of `copy_feedback`.

use super::*;

/// Copies until the pause is over; returns how many MiB.
fn end_pause(feedback: &mut CopyFeedback) -> u64 {
    let mut copied = 0;
    while feedback.is_paused() {
        feedback.copied(1 << 20);
        copied += 1;
    }
    copied
}

#[test]
fn many_copies_in_a_row_begin_a_pause() {
    let mut feedback = CopyFeedback::beginning_in_place();
    for _ in 0..100 {
        (1..MAX_COPIED).for_each(|_| feedback.reported(1, true));
        feedback.reported(1, false);
        assert_eq!(feedback.most_in_flight(64), 64);
    }
    (0..MAX_COPIED).for_each(|_| feedback.reported(1, true));
    assert_eq!(feedback.most_in_flight(64), 0);
    // Reports of sends that were made before the pause.
    (0..100).for_each(|_| feedback.reported(1, true));
    assert_eq!(end_pause(&mut feedback), 1);
    assert_eq!(feedback.most_in_flight(64), 1);
}

#[test]
fn a_report_counts_as_many_sends_as_it_is_about() {
    let mut feedback = CopyFeedback::beginning_in_place();
    feedback.reported(MAX_COPIED - 1, true);
    assert!(!feedback.is_paused());
    feedback.reported(1, false);
    feedback.reported(MAX_COPIED, true);
    assert!(feedback.is_paused());
}

#[test]
fn a_good_attempt_ends_the_pauses() {
    let mut feedback = CopyFeedback::beginning_with_a_pause();
    assert_eq!(end_pause(&mut feedback), 1);
    feedback.reported(1, false);
    assert_eq!(feedback.most_in_flight(64), 64);
}

#[test]
fn each_bad_attempt_doubles_the_pause_and_good_reports_halve_it() {
    let mut feedback = CopyFeedback::beginning_with_a_pause();
    let pauses: Vec<u64> = (0..13)
        .map(|_| {
            let pause = end_pause(&mut feedback);
            feedback.reported(1, true);
            pause
        })
        .collect();
    assert_eq!(pauses[..4], [1, 2, 4, 8]);
    assert_eq!(pauses[10..], [1024; 3]);
    end_pause(&mut feedback);
    (0..2 * GOOD).for_each(|_| feedback.reported(1, false));
    feedback.back_off();
    assert_eq!(end_pause(&mut feedback), 256);
}

#[test]
fn a_refused_send_is_followed_by_a_short_pause() {
    let mut feedback = CopyFeedback::beginning_in_place();
    for _ in 0..3 {
        feedback.refused();
        assert_eq!(end_pause(&mut feedback), 1);
    }
}
