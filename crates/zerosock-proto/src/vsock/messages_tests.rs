//! Unit tests of `messages`.

use super::*;

#[test]
fn a_buffer_full_of_one_message_is_too_long_unless_it_ends() {
    let mut rx = RxMessages::default();
    assert_eq!(rx.check(100, true, 100), Verdict::Fits);
    assert_eq!(rx.check(100, false, 100), Verdict::TooLong);
    assert_eq!(rx.check(99, false, 100), Verdict::Fits);
    rx.receive(99, false);
    assert_eq!(rx.check(1, true, 100), Verdict::Fits);
    assert_eq!(rx.check(2, true, 100), Verdict::TooLong);
    rx.receive(1, true);
    assert_eq!(rx.check(100, true, 100), Verdict::Fits, "a new message");
    assert_eq!(rx.check(u32::MAX, true, 100), Verdict::TooLong);
}

#[test]
fn an_empty_last_part_is_no_empty_message() {
    let mut rx = RxMessages::default();
    rx.receive(5, false);
    rx.receive(0, true);
    assert_eq!(rx.consume(1), None, "it ended one of five bytes");
    rx.receive(0, true);
    assert_eq!(rx.consume(1), Some(false));
}

#[test]
fn unread_empty_messages_are_limited_and_reading_frees_them() {
    let mut rx = RxMessages::default();
    for _ in 0..MAX_UNREAD_EMPTY {
        assert_eq!(rx.check(0, true, 100), Verdict::Fits);
        rx.receive(0, true);
    }
    assert_eq!(rx.check(0, true, 100), Verdict::Flood);
    assert_eq!(
        rx.check(1, true, 100),
        Verdict::Fits,
        "a byte is bounded by credit"
    );
    assert!(rx.defer_update());
    assert_eq!(rx.consume(1), Some(false));
    assert_eq!(rx.check(0, true, 100), Verdict::Fits);
    assert_eq!(rx.consume(MAX_UNREAD_EMPTY - 1), Some(true), "an answer");
    assert!(!rx.defer_update());
}

#[test]
fn empty_messages_are_read_after_a_later_byte_or_an_answer() {
    let mut tx = TxMessages::default();
    let fill = |tx: &mut TxMessages, at| {
        while !tx.empty_limit_reached() {
            tx.sent_empty(at);
        }
    };
    fill(&mut tx, 10);
    tx.handle_fwd_cnt(10, 10, true);
    assert!(tx.empty_limit_reached(), "no request was sent");
    tx.handle_request_sent();
    tx.handle_fwd_cnt(10, 10, false);
    assert!(tx.empty_limit_reached(), "not a CREDIT_UPDATE");
    tx.handle_fwd_cnt(10, 10, true);
    assert!(!tx.empty_limit_reached());
    fill(&mut tx, 10);
    tx.handle_fwd_cnt(10, 11, false);
    assert!(tx.empty_limit_reached(), "the byte behind them is unread");
    tx.handle_fwd_cnt(11, 11, false);
    assert!(!tx.empty_limit_reached());
    // Counters wrap.
    fill(&mut tx, u32::MAX);
    tx.handle_fwd_cnt(u32::MAX, 3, false);
    assert!(tx.empty_limit_reached());
    tx.handle_fwd_cnt(0, 3, false);
    assert!(!tx.empty_limit_reached());
}
