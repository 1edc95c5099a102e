//! Lends transmit slots: their holders write them, and they are sent later, or never.

use super::Driver;
use super::errors::{DriverError, SendError};
use super::loans::LoanRecord;
use super::queue_pairs::QueuePairId;
use crate::table::sockets::{BufferPlace, StreamId};
use crate::table::transfers::{LoanParts, SendFault};

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
            LoanRecord::InPlace(loan) => (loan.len, self.place_of(queue_pair, loan.slot)),
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
