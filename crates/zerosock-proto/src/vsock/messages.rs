//! Messages of a SEQPACKET connection: their ends, their length, and the limits of empty ones.
//!
//! A message is sent in packets, the last of which has SEQ_EOM; credit counts their bytes. A
//! receiver returns credit when it has read a whole message, so a message longer than its buffer
//! never arrives: a sender does not begin it (EMSGSIZE), and a peer that does is reset as soon as
//! its buffer is full of one message.
//!
//! An empty message is a packet without payload that has SEQ_EOM. Linux sends none; we do. It costs
//! no credit, so without a limit a peer could make us keep any number of them (CVE-2026-23086,
//! CVE-2026-53132).
//!
//! # Invariants
//! - At most [`MAX_UNREAD_EMPTY`] empty messages of a peer are unread.
//! - Our sender stays below that: at most [`MAX_SENT_EMPTY`] of its empty messages are not known to
//!   have been read. They are when the peer has consumed a byte sent after them, or has answered a
//!   CREDIT_REQUEST sent after them; our receiver answers it when it has read them.

use super::snapshot::{Reader, RestoreError, Writer};

/// Most unread empty messages of a connection; the next one resets it.
pub const MAX_UNREAD_EMPTY: u16 = 512;

/// Most empty messages of a sender that are not known to have been read.
pub const MAX_SENT_EMPTY: u16 = 64;

/// Whether the payload of a packet is accepted.
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
pub(crate) enum Verdict {
    Fits,
    /// A message longer than our buffer.
    TooLong,
    /// Too many unread empty messages.
    Flood,
}

/// State of a SEQPACKET connection beyond that of a stream.
#[derive(Clone, Default, Debug)]
pub(crate) struct Messages {
    pub(crate) rx: RxMessages,
    pub(crate) tx: TxMessages,
}

impl Messages {
    pub(crate) fn save(&self, to: &mut Writer) {
        let (rx, tx) = (&self.rx, &self.tx);
        to.bits([
            rx.update_deferred,
            tx.in_progress,
            tx.wants_empty,
            tx.request_sent,
        ]);
        let empty = [rx.empty.into(), tx.empty.into()];
        to.u32s(empty);
        to.u32s([rx.partial_len, tx.wanted, tx.last_empty_at]);
    }

    pub(crate) fn load(from: &mut Reader<'_>) -> Result<Messages, RestoreError> {
        let [update_deferred, in_progress, wants_empty, request_sent] = from.bits()?;
        let [rx_empty, tx_empty] = from.u32s()?;
        let [partial_len, wanted, last_empty_at] = from.u32s()?;
        let bounded = |empty: u32, most: u16| {
            let empty = u16::try_from(empty).ok().filter(|&empty| empty <= most);
            empty.ok_or(RestoreError::Invalid("number of empty messages"))
        };
        Ok(Messages {
            rx: RxMessages {
                partial_len,
                empty: bounded(rx_empty, MAX_UNREAD_EMPTY)?,
                update_deferred,
            },
            tx: TxMessages {
                in_progress,
                wanted,
                wants_empty,
                empty: bounded(tx_empty, MAX_SENT_EMPTY)?,
                last_empty_at,
                request_sent,
            },
        })
    }
}

/// The incoming half.
#[derive(Copy, Clone, Default, Debug)]
pub(crate) struct RxMessages {
    /// Bytes received of a message that is not complete.
    partial_len: u32,
    /// Unread empty messages.
    empty: u16,
    /// The peer has requested credit; the update is sent when the empty messages have been read.
    update_deferred: bool,
}

impl RxMessages {
    /// Checks a packet of `len` bytes; at most `window` bytes may be unread.
    #[inline]
    pub(crate) fn check(&self, len: u32, ends: bool, window: u32) -> Verdict {
        let whole = u64::from(self.partial_len) + u64::from(len);
        let window = u64::from(window);
        // A buffer full of an incomplete message stays full.
        if whole > window || (whole == window && !ends) {
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

    /// Counts empty messages that were read. `None`: more than were unread. `Some(true)`: send the
    /// deferred update.
    pub(crate) fn consume(&mut self, count: u16) -> Option<bool> {
        self.empty = self.empty.checked_sub(count)?;
        Some(self.empty == 0 && core::mem::take(&mut self.update_deferred))
    }

    /// The peer has requested credit. True: the update is deferred.
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
    /// Credit that the waiter needs, in bytes.
    pub(crate) wanted: u32,
    /// The waiter needs to send an empty message.
    pub(crate) wants_empty: bool,
    /// Empty messages that are not known to have been read.
    empty: u16,
    /// `tx_cnt` when the last of them left.
    last_empty_at: u32,
    /// CREDIT_REQUEST was sent after the last of them.
    request_sent: bool,
}

impl Default for TxMessages {
    fn default() -> TxMessages {
        TxMessages {
            in_progress: false,
            wanted: 1,
            wants_empty: false,
            empty: 0,
            last_empty_at: 0,
            request_sent: false,
        }
    }
}

impl TxMessages {
    /// Whether no empty message may be sent now.
    pub(crate) fn empty_limit_reached(&self) -> bool {
        self.empty >= MAX_SENT_EMPTY
    }

    /// An empty message was sent.
    pub(crate) fn sent_empty(&mut self, tx_cnt: u32) {
        self.empty += 1;
        self.last_empty_at = tx_cnt;
        self.request_sent = false;
    }

    /// CREDIT_REQUEST was sent.
    pub(crate) fn handle_request_sent(&mut self) {
        self.request_sent = true;
    }

    /// A header says that the peer has consumed all bytes up to `fwd_cnt`; `answer`: the packet was
    /// a CREDIT_UPDATE.
    pub(crate) fn handle_fwd_cnt(&mut self, fwd_cnt: u32, tx_cnt: u32, answer: bool) {
        if self.empty == 0 {
            return;
        }
        let after = tx_cnt.wrapping_sub(self.last_empty_at);
        let left = tx_cnt.wrapping_sub(fwd_cnt);
        if left < after || (answer && self.request_sent && left == 0) {
            self.empty = 0;
        }
    }
}

#[cfg(test)]
#[path = "messages_tests.rs"]
mod tests;
