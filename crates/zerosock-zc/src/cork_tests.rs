//! Unit tests of `cork`.

use super::*;

#[test]
fn the_flag_more_determines_the_part_of_each_send() {
    let mut cork = Cork::default();
    let parts = [false, true, true, false, true, false, false].map(|more| cork.accept(more));
    let (whole, first, later) = (
        DatagramPart::Whole,
        DatagramPart::First,
        DatagramPart::Later,
    );
    assert_eq!(parts, [whole, first, later, later, first, later, whole]);
}

#[test]
fn no_other_send_starts_between_pieces() {
    let mut cork = Cork::default();
    assert!(cork.admits(DatagramPart::Whole, 5, true));
    assert!(!cork.admits(DatagramPart::First, 5, true));
    assert!(cork.admits(DatagramPart::First, 0, false));
    cork.started(DatagramPart::First);
    assert!(cork.admits(DatagramPart::Later, 1, true));
    assert!(
        !cork.admits(DatagramPart::Later, 1, false),
        "of another chain"
    );
    assert!(
        !cork.admits(DatagramPart::First, 1, true),
        "of another datagram"
    );
    assert!(!cork.admits(DatagramPart::Whole, 1, true));
}

#[test]
fn the_count_of_taken_pieces_starts_anew_with_each_datagram() {
    let mut cork = Cork::default();
    cork.started(DatagramPart::First);
    cork.taken = 1;
    cork.started(DatagramPart::Later);
    assert_eq!(cork.taken, 1);
    cork.started(DatagramPart::Whole);
    assert_eq!(cork.taken, 1, "a whole datagram is no piece");
    cork.started(DatagramPart::First);
    assert_eq!(cork.taken, 0);
}
