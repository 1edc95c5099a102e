//! Lends transmit slots: their holders write them, and they are sent later, or never.

use super::Driver;
use super::errors::{DriverError, SendError};
use super::loans::{LoanOf, LoanRecord};
use super::queue_pairs::QueuePairId;
use crate::table::sockets::{BufferPlace, StreamId};
use crate::table::transfers::{LoanParts, SendFault};

impl Driver {
    /// See [`Backend::loan`](crate::table::backend::Backend::loan).
    pub(super) fn lend(&mut self, stream: StreamId, max: usize) -> Result<LoanParts, SendFault> {
        let (queue_pair, flow) = self.sendable(stream).map_err(fault)?;
        let index = self.sockets.begin_loan().ok_or(SendFault::TooManyLoans)?;
        let max = u32::try_from(max).unwrap_or(u32::MAX);
        let reserved = if self.loans.may_lend(stream, queue_pair) {
            self.borrow_slot(stream, (queue_pair, flow), max)
                .map(|loan| (Some(loan.slot), loan.reservation))
        } else {
            let reserved = self.reserve((queue_pair, flow), max);
            reserved.map(|reservation| (None, reservation))
        };
        let (slot, reservation) = match reserved {
            Ok(reserved) => reserved,
            Err(error) => {
                self.sockets.end_loan(index);
                return Err(fault(error));
            }
        };
        let place = slot.and_then(|slot| self.place_of(queue_pair, slot));
        let len = reservation.len();
        let record = LoanRecord {
            of: LoanOf::Packet(stream, reservation),
            queue_pair,
            slot,
        };
        self.loans.put(index, record);
        if self.store.queue_pairs[queue_pair].tx.is_dirty() {
            // A control packet or coalesced bytes were sent first. The program may keep the loan.
            self.flush();
        }
        Ok(LoanParts {
            index,
            len: len as usize,
            place,
        })
    }

    /// Where the payload of a slot lies.
    pub(super) fn place_of(&self, queue_pair: QueuePairId, slot: u16) -> Option<BufferPlace> {
        let slots = &self.store.queue_pairs[queue_pair].slots;
        BufferPlace::new(&slots.memory, slots.tx_data.pieces(slot), 0)
    }

    /// See [`Backend::send_loan`](crate::table::backend::Backend::send_loan).
    pub(super) fn send_lent(
        &mut self,
        index: u32,
        len: usize,
        private: Option<&[u8]>,
    ) -> Result<usize, SendFault> {
        let (stream, reservation, queue_pair, lent) = match self.loans.take(index) {
            Some(LoanRecord {
                of: LoanOf::Packet(stream, reservation),
                queue_pair,
                slot,
            }) => (stream, reservation, queue_pair, slot),
            Some(other) => {
                self.loans.put(index, other);
                return Err(SendFault::Unknown);
            }
            None => return Err(SendFault::Unknown),
        };
        let copied = lent.is_none();
        let slot = match lent {
            Some(slot) => slot,
            None => match self.store.queue_pairs[queue_pair]
                .tx
                .data_slot(reservation.len())
            {
                Ok(Some(slot)) => slot,
                Ok(None) => {
                    let record = LoanRecord {
                        of: LoanOf::Packet(stream, reservation),
                        queue_pair,
                        slot: None,
                    };
                    self.loans.put(index, record);
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
        let Some(record) = self.loans.take(index) else {
            return;
        };
        self.sockets.end_loan(index);
        let queue_pair = &mut self.store.queue_pairs[record.queue_pair];
        match record.of {
            LoanOf::Packet(_, reservation) => queue_pair.shard.cancel(reservation),
            LoanOf::Part(_, Some(room)) => queue_pair.shard.cancel_message(room),
            LoanOf::Part(_, None) | LoanOf::Datagram(..) => {}
        }
        if let Some(slot) = record.slot {
            queue_pair.tx.put_back(slot);
        }
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
