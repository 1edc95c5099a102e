//! The records of transmit slots on loan. `lending` makes, sends and ends the loans.
//!
//! # Invariants
//! - A loan in place owns one transmit slot, and credit if it is of a connection, until it is sent or dropped.
//! - Connections leave a quarter of the slots, and each has at most an eighth, so that writes and control
//!   packets always find slots; datagrams have at most a quarter. Beyond that a loan is a private buffer,
//!   copied into a slot when it is sent.

use zerosock_proto::Address;
use zerosock_proto::vsock::datagram::DatagramId;
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
    /// Slots on loan for datagrams.
    datagrams: u16,
    /// Bytes sent that the holder wrote in place.
    pub(super) sent_in_place: u64,
    /// Bytes sent by copying.
    pub(super) copied_in: u64,
}

/// A loan that is out.
#[derive(Debug)]
pub(super) struct LoanRecord {
    pub(super) of: LoanOf,
    pub(super) queue_pair: QueuePairId,
    /// `None`: a private buffer.
    pub(super) slot: Option<u16>,
}

/// What a loan is for.
#[derive(Debug)]
pub(super) enum LoanOf {
    /// A packet of a stream, with its credit.
    Packet(StreamId, Reservation),
    /// A buffer of a message. The first one has the credit for the whole message, until it is sent.
    Part(StreamId, Option<MessageReservation>),
    /// A datagram of this socket to this address.
    Datagram(DatagramId, Address),
}

impl Loans {
    pub(super) fn new(capacity: usize, queue_pairs: usize, slots: u16) -> Loans {
        Loans {
            out: (0..capacity).map(|_| None).collect(),
            slots,
            in_place: vec![0; queue_pairs],
            per_connection: Vec::new(),
            datagrams: 0,
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

    /// Whether datagrams may have one more slot on loan.
    pub(super) fn may_lend_datagram(&self) -> bool {
        self.datagrams < self.slots / 4
    }

    /// Counts the slot of a loan that begins or ends.
    #[inline]
    fn count(&mut self, record: &LoanRecord, step: impl Fn(u16) -> u16) {
        if record.slot.is_none() {
            return;
        }
        let (LoanOf::Packet(stream, _) | LoanOf::Part(stream, _)) = record.of else {
            self.datagrams = step(self.datagrams);
            return;
        };
        if let Some(lent) = (self.in_place).get_mut(usize::from(record.queue_pair.pair())) {
            *lent = step(*lent);
        }
        let place = stream.index() as usize;
        if self.per_connection.len() <= place {
            self.per_connection.resize(place + 1, 0);
        }
        if let Some(of) = self.per_connection.get_mut(place) {
            *of = step(*of);
        }
    }

    #[inline(always)] // as `take`
    pub(super) fn put(&mut self, index: u32, record: LoanRecord) {
        self.count(&record, |count| count.saturating_add(1));
        if let Some(place) = self.out.get_mut(index as usize) {
            *place = Some(record);
        }
    }

    #[inline]
    pub(super) fn get(&self, index: u32) -> Option<&LoanRecord> {
        self.out.get(index as usize)?.as_ref()
    }

    /// The credit for a whole message, of its first loan.
    pub(super) fn room_mut(&mut self, index: u32) -> Option<&mut Option<MessageReservation>> {
        match &mut self.out.get_mut(index as usize)?.as_mut()?.of {
            LoanOf::Part(_, room) => Some(room),
            _ => None,
        }
    }

    #[inline(always)] // saves a copy of the record
    pub(super) fn take(&mut self, index: u32) -> Option<LoanRecord> {
        let record = self.out.get_mut(index as usize)?.take()?;
        self.count(&record, |count| count.saturating_sub(1));
        Some(record)
    }
}
