//! Transmit slots on loan: written by their holders and sent later, or never.
//!
//! # Invariants
//! - A loan in place owns one transmit slot and credit until it is sent or dropped.
//! - A quarter of the slots is never on loan, and a connection has at most an eighth, so that
//!   writes and control packets always find slots. Beyond that a loan is a private buffer with
//!   credit only, copied into a slot when it is sent.

use zerosock_proto::vsock::{MessageReservation, Reservation};

use super::Driver;
use super::errors::{DriverError, SendError};
use super::queue_pairs::QueuePairId;
use super::transfer::Loan;
use crate::table::sockets::{BufferPlace, StreamId};
use crate::table::transfers::{LoanParts, SendFault};

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

#[derive(Debug)]
enum LoanRecord {
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

    fn put(&mut self, index: u32, out: LoanRecord) {
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

    fn take(&mut self, index: u32) -> Option<LoanRecord> {
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

impl Driver {
    /// See [`Backend::loan`](crate::table::backend::Backend::loan).
    pub(super) fn lend(&mut self, stream: StreamId, max: usize) -> Result<LoanParts, SendFault> {
        let (queue_pair, flow) = self.sendable(stream).map_err(fault)?;
        let index = self.sockets.begin_loan().ok_or(SendFault::TooManyLoans)?;
        let max = u32::try_from(max).unwrap_or(u32::MAX);
        let out = if self.loans.may_lend(stream, queue_pair) {
            self.borrow_slot(stream, (queue_pair, flow), max)
                .map(LoanRecord::InPlace)
        } else {
            let reserved = self.reserve((queue_pair, flow), max);
            reserved.map(|reservation| LoanRecord::Private {
                stream,
                queue_pair,
                reservation,
            })
        };
        let out = match out {
            Ok(out) => out,
            Err(error) => {
                self.sockets.end_loan(index);
                return Err(fault(error));
            }
        };
        let (len, place) = match &out {
            LoanRecord::InPlace(loan) => (loan.len, Some(self.place_of(queue_pair, loan.slot))),
            LoanRecord::Private { reservation, .. } => (reservation.len(), None),
            // Message loans are made in `message_loans`.
            LoanRecord::Part(_) => (0, None),
        };
        self.loans.put(index, out);
        Ok(LoanParts {
            index,
            len: len as usize,
            place,
        })
    }

    /// Where the payload of a slot lies.
    pub(super) fn place_of(&self, queue_pair: QueuePairId, slot: u16) -> BufferPlace {
        let slots = &self.store.queue_pairs[queue_pair].slots;
        BufferPlace::InPlace {
            memory: slots.memory.clone(),
            pieces: slots.tx_data.pieces(slot).iter().copied().collect(),
            offset: 0,
        }
    }

    /// See [`Backend::send_loan`](crate::table::backend::Backend::send_loan).
    pub(super) fn send_lent(
        &mut self,
        index: u32,
        len: usize,
        private: Option<&[u8]>,
    ) -> Result<usize, SendFault> {
        if self.loans.part_mut(index).is_some() {
            return Err(SendFault::Unknown);
        }
        let out = self.loans.take(index).ok_or(SendFault::Unknown)?;
        let (queue_pair, slot, reservation, copied) = match out {
            // Sent by `message_loans`.
            LoanRecord::Part(_) => return Err(SendFault::Unknown),
            LoanRecord::InPlace(loan) => (loan.queue_pair, loan.slot, loan.reservation, false),
            LoanRecord::Private {
                stream,
                queue_pair,
                reservation,
            } => match self.store.queue_pairs[queue_pair]
                .tx
                .data_slot(reservation.len())
            {
                Ok(Some(slot)) => (queue_pair, slot, reservation, true),
                Ok(None) => {
                    let out = LoanRecord::Private {
                        stream,
                        queue_pair,
                        reservation,
                    };
                    self.loans.put(index, out);
                    self.wait_for_slot(stream);
                    return Err(SendFault::WouldBlock);
                }
                Err(error) => {
                    self.sockets.end_loan(index);
                    return Err(fault(DriverError::from(error).into()));
                }
            },
        };
        self.sockets.end_loan(index);
        let mut len = len.min(reservation.len() as usize);
        if copied {
            let slots = &self.store.queue_pairs[queue_pair].slots;
            let bytes = private.unwrap_or(&[]);
            len = len.min(bytes.len());
            let bytes = bytes.get(..len).unwrap_or(bytes);
            let pieces = slots.tx_data.pieces(slot);
            len = slots.memory.write(pieces, 0, bytes);
        }
        if len == 0 {
            self.store.queue_pairs[queue_pair].shard.cancel(reservation);
            self.store.queue_pairs[queue_pair].tx.put_back(slot);
            return Ok(0);
        }
        self.send_slot(queue_pair, slot, reservation, len as u32)
            .map_err(fault)?;
        let counted = if copied {
            &mut self.loans.copied_in
        } else {
            &mut self.loans.sent_in_place
        };
        *counted += len as u64;
        Ok(len)
    }

    /// Ends a loan that was dropped unsent.
    pub(super) fn end_lent(&mut self, index: u32) {
        match self.loans.take(index) {
            Some(LoanRecord::InPlace(loan)) => self.cancel(loan),
            Some(LoanRecord::Private {
                queue_pair,
                reservation,
                ..
            }) => self.store.queue_pairs[queue_pair].shard.cancel(reservation),
            Some(LoanRecord::Part(part)) => {
                let queue_pair = &mut self.store.queue_pairs[part.queue_pair];
                if let Some(room) = part.room {
                    queue_pair.shard.cancel_message(room);
                }
                if let Some(slot) = part.slot {
                    queue_pair.tx.put_back(slot);
                }
            }
            None => return,
        }
        self.sockets.end_loan(index);
    }
}

/// Translates an error for the holder. The next turn reports a broken ring.
pub(super) fn fault(error: SendError) -> SendFault {
    match error {
        SendError::WouldBlock => SendFault::WouldBlock,
        SendError::NotConnected => SendFault::NotConnected,
        SendError::ShutDown => SendFault::ShutDown,
        SendError::Reset | SendError::Driver(_) => SendFault::Reset,
        SendError::TooLong => SendFault::TooLong,
        SendError::Unknown => SendFault::Unknown,
    }
}
