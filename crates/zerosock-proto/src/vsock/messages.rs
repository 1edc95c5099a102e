//! Messages of a SEQPACKET connection: where one ends, how long it may be, and what those without
//! a byte may cost.
//!
//! A message goes over in packets, the last of which has SEQ_EOM; credit counts their bytes. A
//! receiver gives credit back when it has read a message as a whole, so one that is longer than its
//! buffer never arrives: a sender does not begin it (EMSGSIZE), and a peer that does is reset as
//! soon as its buffer is full of one message.
//!
//! A message without a byte is a packet without payload that has SEQ_EOM. Linux sends none; we do.
//! It costs no credit, so without a bound of its own a peer could have us keep any number of them
//! (CVE-2026-23086, CVE-2026-53132). [`MAX_UNREAD_EMPTY`] is the bound, and [`MAX_SENT_EMPTY`]
//! what keeps a sender of ours well within it: so many may be out of which it does not know that
//! they were read. It knows when the peer has consumed a byte that was sent after them; or when it
//! has asked (CREDIT_REQUEST) and the peer has answered. A receiver of ours answers that when it
//! has read them.

/// Messages without a byte that may be unread in one connection; the next one resets it.
pub const MAX_UNREAD_EMPTY: u16 = 512;

/// Messages without a byte that a sender has out of which it does not know that they were read.
pub const MAX_SENT_EMPTY: u16 = 64;

/// What becomes of a packet's payload.
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
pub(crate) enum Verdict {
    Fits,
    /// A message longer than our buffer.
    TooLong,
    /// One more message without a byte than is kept.
    Flood,
}

/// What a connection that carries messages has beside a stream's.
#[derive(Clone, Default, Debug)]
pub(crate) struct Messages {
    pub(crate) rx: RxMessages,
    pub(crate) tx: TxMessages,
}

/// The incoming half.
#[derive(Copy, Clone, Default, Debug)]
pub(crate) struct RxMessages {
    /// Bytes of the message that has not ended.
    partial_len: u32,
    /// Unread messages without a byte.
    empty: u16,
    /// The peer has asked for our credit, and is answered when those have been read.
    update_deferred: bool,
}

impl RxMessages {
    /// What a packet of `len` bytes is, of which `window` may be unread.
    #[inline]
    pub(crate) fn check(&self, len: u32, ends: bool, window: u32) -> Verdict {
        let whole = u64::from(self.partial_len) + u64::from(len);
        let room = u64::from(window);
        // A buffer that is full of a message without end stays full.
        if whole > room || (whole == room && !ends) {
            Verdict::TooLong
        } else if whole == 0 && self.empty >= MAX_UNREAD_EMPTY {
            Verdict::Flood
        } else {
            Verdict::Fits
        }
    }

    /// Counts a packet that fits.
    #[inline]
    pub(crate) fn receive(&mut self, len: u32, ends: bool) {
        if ends && self.partial_len == 0 && len == 0 {
            self.empty += 1;
        }
        self.partial_len = if ends { 0 } else { self.partial_len + len };
    }

    /// Counts messages without a byte that were read. `None`: more than were unread. `Some(true)`:
    /// the peer waits to be told.
    pub(crate) fn consume(&mut self, count: u16) -> Option<bool> {
        self.empty = self.empty.checked_sub(count)?;
        Some(self.empty == 0 && core::mem::take(&mut self.update_deferred))
    }

    /// The peer has asked for our credit. True: it is answered later.
    pub(crate) fn defer_update(&mut self) -> bool {
        self.update_deferred = self.empty > 0;
        self.update_deferred
    }
}

/// The outgoing half.
#[derive(Copy, Clone, Debug)]
pub(crate) struct TxMessages {
    /// A part that is not the last has left.
    pub(crate) in_progress: bool,
    /// Credit that somebody waits for, in bytes.
    pub(crate) wanted: u32,
    /// Somebody waits to send a message without a byte.
    pub(crate) wants_empty: bool,
    /// Messages without a byte of which we do not know that they were read.
    empty: u16,
    /// `tx_cnt` when the last of them left.
    last_empty_at: u32,
    /// CREDIT_REQUEST has left since.
    asked: bool,
}

impl Default for TxMessages {
    fn default() -> TxMessages {
        TxMessages {
            in_progress: false,
            wanted: 1,
            wants_empty: false,
            empty: 0,
            last_empty_at: 0,
            asked: false,
        }
    }
}

impl TxMessages {
    /// Whether no message without a byte may leave now.
    pub(crate) fn empty_limit_reached(&self) -> bool {
        self.empty >= MAX_SENT_EMPTY
    }

    /// A message without a byte has left.
    pub(crate) fn sent_empty(&mut self, tx_cnt: u32) {
        self.empty += 1;
        self.last_empty_at = tx_cnt;
        self.asked = false;
    }

    /// CREDIT_REQUEST has left.
    pub(crate) fn handle_request_sent(&mut self) {
        self.asked = true;
    }

    /// A header has told that the peer has consumed what was sent up to `fwd_cnt`; with `answer` it
    /// was a CREDIT_UPDATE.
    pub(crate) fn handle_fwd_cnt(&mut self, fwd_cnt: u32, tx_cnt: u32, answer: bool) {
        if self.empty == 0 {
            return;
        }
        let after = tx_cnt.wrapping_sub(self.last_empty_at);
        let left = tx_cnt.wrapping_sub(fwd_cnt);
        if left < after || (answer && self.asked && left == 0) {
            self.empty = 0;
        }
    }
}

#[cfg(test)]
mod tests {
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
    fn an_end_without_a_byte_is_no_message_of_its_own() {
        let mut rx = RxMessages::default();
        rx.receive(5, false);
        rx.receive(0, true);
        assert_eq!(rx.consume(1), None, "it ended one of five bytes");
        rx.receive(0, true);
        assert_eq!(rx.consume(1), Some(false));
    }

    #[test]
    fn messages_without_a_byte_are_bounded_and_the_bound_is_given_back() {
        let mut rx = RxMessages::default();
        for _ in 0..MAX_UNREAD_EMPTY {
            assert_eq!(rx.check(0, true, 100), Verdict::Fits);
            rx.receive(0, true);
        }
        assert_eq!(rx.check(0, true, 100), Verdict::Flood);
        assert_eq!(rx.check(1, true, 100), Verdict::Fits, "it pays with credit");
        assert!(rx.defer_update());
        assert_eq!(rx.consume(1), Some(false));
        assert_eq!(rx.check(0, true, 100), Verdict::Fits);
        assert_eq!(rx.consume(MAX_UNREAD_EMPTY - 1), Some(true), "an answer");
        assert!(!rx.defer_update());
    }

    #[test]
    fn a_sender_knows_what_was_read_by_a_later_byte_or_an_answer() {
        let mut tx = TxMessages::default();
        let fill = |tx: &mut TxMessages, at| {
            while !tx.empty_limit_reached() {
                tx.sent_empty(at);
            }
        };
        fill(&mut tx, 10);
        tx.handle_fwd_cnt(10, 10, true);
        assert!(tx.empty_limit_reached(), "nobody had asked");
        tx.handle_request_sent();
        tx.handle_fwd_cnt(10, 10, false);
        assert!(tx.empty_limit_reached(), "that was no answer");
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
}
