//! The records of transmit slots on loan. `lending` makes, sends and ends the loans.
//!
//! # Invariants
//! - A loan in place owns one transmit slot and credit until it is sent or dropped.
//! - A quarter of the slots is never on loan, and a connection has at most an eighth, so that
//!   writes and control packets always find slots. Beyond that a loan is a private buffer with
//!   credit only, copied into a slot when it is sent.

use zerosock_proto::vsock::{MessageReservation, Reservation};

use super::queue_pairs::QueuePairId;
use crate::table::sockets::StreamId;

/// A loaned transmit buffer that the device reads in place: [fill](super::Driver::fill) it, then
/// [commit](super::Driver::commit) or [cancel](super::Driver::cancel) it. Its credit is already
/// reserved.
#[derive(Debug)]
#[must_use = "a loan that is neither committed nor cancelled keeps a buffer and credit"]
pub struct Loan {
    pub(super) stream: StreamId,
    pub(super) queue_pair: QueuePairId,
    pub(super) slot: u16,
    pub(super) len: u32,
    pub(super) reservation: Reservation,
}

impl Loan {
    /// Bytes that may be filled.
    #[expect(clippy::len_without_is_empty, reason = "a loan is never empty")]
    pub fn len(&self) -> u32 {
        self.len
    }

    /// The connection it was borrowed for.
    pub fn stream(&self) -> StreamId {
        self.stream
    }
}

/// The loans that are out.
#[derive(Debug)]
pub(crate) struct Loans {
    /// Indexed by the lease table's index.
    out: Vec<Option<LoanRecord>>,
    /// Transmit slots of a queue pair.
    slots: u16,
    /// Slots on loan, for each queue pair.
    in_place: Vec<u16>,
    /// Slots on loan, for each connection's index.
    per_connection: Vec<u16>,
    /// Bytes sent that the holder wrote in place.
    pub(super) sent_in_place: u64,
    /// Bytes sent by copying.
    pub(super) copied_in: u64,
}

/// A loan that is out.
#[derive(Debug)]
pub(super) enum LoanRecord {
    InPlace(Loan),
    Private {
        stream: StreamId,
        queue_pair: QueuePairId,
        reservation: Reservation,
    },
    Part(MessagePart),
}

/// One buffer of a message loan.
#[derive(Debug)]
pub(super) struct MessagePart {
    pub(super) stream: StreamId,
    pub(super) queue_pair: QueuePairId,
    /// `None`: a private buffer.
    pub(super) slot: Option<u16>,
    /// The credit for the whole message; with the first buffer only, until it is sent.
    pub(super) room: Option<MessageReservation>,
}

impl LoanRecord {
    /// The connection and queue pair of a loan that has a slot.
    fn has_slot(&self) -> Option<(StreamId, QueuePairId)> {
        match self {
            LoanRecord::InPlace(loan) => Some((loan.stream, loan.queue_pair)),
            LoanRecord::Private { .. } => None,
            LoanRecord::Part(part) => part.slot.map(|_| (part.stream, part.queue_pair)),
        }
    }
}

impl Loans {
    pub(super) fn new(capacity: usize, queue_pairs: usize, slots: u16) -> Loans {
        Loans {
            out: (0..capacity).map(|_| None).collect(),
            slots,
            in_place: vec![0; queue_pairs],
            per_connection: Vec::new(),
            sent_in_place: 0,
            copied_in: 0,
        }
    }

    /// Whether the limits allow one more slot on loan to a connection.
    pub(super) fn may_lend(&self, stream: StreamId, queue_pair: QueuePairId) -> bool {
        let of = self
            .per_connection
            .get(stream.index() as usize)
            .copied()
            .unwrap_or(0);
        let lent = self.in_place.get(usize::from(queue_pair.pair())).copied();
        of < (self.slots / 8).max(1)
            && lent.is_some_and(|lent| lent < self.slots - (self.slots / 4).max(1))
    }

    pub(super) fn put(&mut self, index: u32, out: LoanRecord) {
        if let Some((stream, queue_pair)) = out.has_slot() {
            if let Some(lent) = self.in_place.get_mut(usize::from(queue_pair.pair())) {
                *lent += 1;
            }
            let place = stream.index() as usize;
            if self.per_connection.len() <= place {
                self.per_connection.resize(place + 1, 0);
            }
            if let Some(of) = self.per_connection.get_mut(place) {
                *of += 1;
            }
        }
        if let Some(place) = self.out.get_mut(index as usize) {
            *place = Some(out);
        }
    }

    /// Records a buffer of a message loan.
    pub(super) fn put_part(&mut self, index: u32, part: MessagePart) {
        self.put(index, LoanRecord::Part(part));
    }

    /// The record of a buffer of a message loan.
    pub(super) fn part_mut(&mut self, index: u32) -> Option<&mut MessagePart> {
        match self.out.get_mut(index as usize)? {
            Some(LoanRecord::Part(part)) => Some(part),
            _ => None,
        }
    }

    /// The slot of a buffer of a message loan.
    pub(super) fn slot_of_part(&self, index: u32) -> Option<u16> {
        match self.out.get(index as usize)? {
            Some(LoanRecord::Part(part)) => part.slot,
            _ => None,
        }
    }

    /// The slot of a buffer was sent and belongs to the device.
    pub(super) fn part_sent(&mut self, index: u32) {
        self.take(index);
    }

    pub(super) fn take(&mut self, index: u32) -> Option<LoanRecord> {
        let out = self.out.get_mut(index as usize)?.take()?;
        if let Some((stream, queue_pair)) = out.has_slot() {
            if let Some(lent) = self.in_place.get_mut(usize::from(queue_pair.pair())) {
                *lent = lent.saturating_sub(1);
            }
            if let Some(of) = self.per_connection.get_mut(stream.index() as usize) {
                *of = of.saturating_sub(1);
            }
        }
        Some(out)
    }
}
