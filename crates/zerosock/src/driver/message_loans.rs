//! Transmit slots on loan for a whole message.
//!
//! # Invariants
//! - The first buffer carries the credit for the whole message.
//! - All slots and lease table entries return, whatever happens.
//! - The parts of a started message that find no slot are queued, as for any message.

use zerosock_proto::vsock::{CommitError, MessageReservation};

use super::Driver;
use super::errors::{DriverError, SendError};
use super::lending::fault;
use super::loans::{LoanOf, LoanRecord};
use super::queue_pairs::QueuePairId;
use crate::table::leases::NONE;
use crate::table::outgoing::{Outgoing, end};
use crate::table::sockets::StreamId;
use crate::table::transfers::{LoanParts, LoanedPart, SendFault};

impl Driver {
    /// See [`Backend::loan_message`](crate::table::backend::Backend::loan_message).
    pub(super) fn lend_message(
        &mut self,
        stream: StreamId,
        len: usize,
    ) -> Result<Vec<LoanParts>, SendFault> {
        let (queue_pair, flow) = self.sendable(stream).map_err(fault)?;
        let total = u32::try_from(len).map_err(|_| SendFault::TooLong)?;
        let most = self.store.queue_pairs[queue_pair].slots.tx_data.len();
        // If the limits allow a slot on loan, none free means waiting, not a private buffer.
        let mut slot = self.slot_to_lend(stream, queue_pair, total.min(most));
        if slot.is_none() && self.loans.may_lend(stream, queue_pair) {
            self.wait_for_slot(stream);
            return Err(SendFault::WouldBlock);
        }
        let room = match self.reserve_message((queue_pair, flow), total) {
            Ok(room) => room,
            Err(error) => {
                self.return_slot(queue_pair, slot);
                return Err(fault(error));
            }
        };
        let Some(mut index) = self.sockets.begin_loan() else {
            self.return_slot(queue_pair, slot);
            self.store.queue_pairs[queue_pair]
                .shard
                .cancel_message(room);
            return Err(SendFault::TooManyLoans);
        };
        let mut room = Some(room);
        let mut left = total;
        let mut parts = Vec::new();
        loop {
            let len = if slot.is_some() { left.min(most) } else { left };
            let place = slot.and_then(|slot| self.place_of(queue_pair, slot));
            parts.push(LoanParts {
                index,
                len: len as usize,
                place,
            });
            let record = LoanRecord {
                of: LoanOf::Part(stream, room.take()),
                queue_pair,
                slot,
            };
            self.loans.put(index, record);
            left -= len;
            if left == 0 {
                return Ok(parts);
            }
            slot = self.slot_to_lend(stream, queue_pair, left.min(most));
            let word = slot.and_then(|_| self.sockets.begin_loan());
            match word {
                Some(word) => index = word,
                None => {
                    self.return_slot(queue_pair, slot);
                    parts.push(LoanParts {
                        index: NONE,
                        len: left as usize,
                        place: None,
                    });
                    return Ok(parts);
                }
            }
        }
    }

    /// A free slot, if the limits allow one more on loan.
    fn slot_to_lend(&mut self, stream: StreamId, queue_pair: QueuePairId, len: u32) -> Option<u16> {
        if !self.loans.may_lend(stream, queue_pair) {
            return None;
        }
        // The next turn reports a broken ring.
        self.store.queue_pairs[queue_pair]
            .tx
            .data_slot(len)
            .ok()
            .flatten()
    }

    fn return_slot(&mut self, queue_pair: QueuePairId, slot: Option<u16>) {
        if let Some(slot) = slot {
            self.store.queue_pairs[queue_pair].tx.put_back(slot);
        }
    }

    /// See [`Backend::send_message_loan`](crate::table::backend::Backend::send_message_loan).
    pub(super) fn send_lent_message(
        &mut self,
        stream: StreamId,
        parts: &[LoanedPart<'_>],
        ends_record: bool,
    ) -> Result<bool, SendFault> {
        let head = parts.first().map_or(NONE, |part| part.index);
        let record = self.loans.get(head).ok_or(SendFault::Unknown)?;
        let queue_pair = record.queue_pair;
        let room = self.loans.room_mut(head).and_then(Option::take);
        let mut room = room.ok_or(SendFault::Unknown)?;
        let sent = self.send_parts(queue_pair, stream, &mut room, parts, ends_record);
        if sent == Err(SendFault::WouldBlock) {
            if let Some(place) = self.loans.room_mut(head) {
                *place = Some(room);
            }
            return Err(SendFault::WouldBlock);
        }
        let rest = match sent {
            Ok(at) => self.unsent_bytes(queue_pair, parts, at),
            Err(_) => Vec::new(),
        };
        for part in parts {
            self.end_lent(part.index);
        }
        let fault = sent.err();
        let all = rest.is_empty();
        if !all {
            self.loans.copied_in += rest.len() as u64;
            self.queue_rest(queue_pair, stream, Outgoing::new(room, rest, ends_record));
        }
        fault.map_or(Ok(all), Err)
    }

    /// Sends parts while there are slots. Returns the first part not sent completely and its
    /// offset.
    fn send_parts(
        &mut self,
        queue_pair: QueuePairId,
        stream: StreamId,
        room: &mut MessageReservation,
        parts: &[LoanedPart<'_>],
        ends_record: bool,
    ) -> Result<(usize, usize), SendFault> {
        let most = self.store.queue_pairs[queue_pair].slots.tx_data.len() as usize;
        let mut left: usize = parts.iter().map(|part| part.len).sum();
        let (mut at, mut offset) = (0, 0);
        while let Some(part) = parts.get(at) {
            let len = (part.len - offset).min(most);
            let of = &mut self.store.queue_pairs[queue_pair];
            let slot = match part.private {
                None => {
                    let lent = self.loans.get(part.index);
                    // From here on the slot belongs to the device, or is free.
                    lent.and_then(|lent| lent.slot).ok_or(SendFault::Reset)?
                }
                Some(bytes) => {
                    let slot = of.tx.data_slot(len as u32);
                    let Some(slot) = slot.map_err(|e| fault(DriverError::from(e).into()))? else {
                        if (at, offset) == (0, 0) {
                            self.wait_for_slot(stream);
                            return Err(SendFault::WouldBlock);
                        }
                        return Ok((at, offset));
                    };
                    let bytes = bytes.get(offset..offset + len).unwrap_or(&[]);
                    of.slots
                        .memory
                        .write(of.slots.tx_data.pieces(slot), 0, bytes);
                    slot
                }
            };
            left -= len;
            let last = end(left, ends_record);
            let header = match of.shard.commit_part(room, len as u32, last) {
                Ok(header) => header,
                Err(error) => {
                    if part.private.is_some() {
                        of.tx.put_back(slot);
                    }
                    return Err(match error {
                        CommitError::Interleaved | CommitError::ManyEmpty => SendFault::WouldBlock,
                        CommitError::Shutdown | CommitError::PeerShutdown => SendFault::ShutDown,
                        _ => SendFault::Reset,
                    });
                }
            };
            if part.private.is_none() {
                self.loans.take(part.index);
                self.sockets.end_loan(part.index);
                self.loans.sent_in_place += len as u64;
            } else {
                self.loans.copied_in += len as u64;
            }
            let sent = self.transmit(queue_pair, slot, &header);
            sent.map_err(|error| fault(SendError::Driver(error)))?;
            offset += len;
            if offset >= part.len {
                (at, offset) = (at + 1, 0);
            }
        }
        Ok((at, offset))
    }

    /// The unsent bytes from that offset on.
    fn unsent_bytes(
        &self,
        queue_pair: QueuePairId,
        parts: &[LoanedPart<'_>],
        (at, offset): (usize, usize),
    ) -> Vec<u8> {
        let mut rest = Vec::new();
        let mut skip = offset;
        for part in parts.get(at..).unwrap_or(&[]) {
            let skip = std::mem::take(&mut skip);
            if let Some(bytes) = part.private {
                rest.extend_from_slice(bytes.get(skip..part.len).unwrap_or(&[]));
                continue;
            }
            let start = rest.len();
            rest.resize(start + part.len, 0);
            let slots = &self.store.queue_pairs[queue_pair].slots;
            if let Some(slot) = self.loans.get(part.index).and_then(|lent| lent.slot)
                && let Some(bytes) = rest.get_mut(start..)
            {
                slots.memory.read(slots.tx_data.pieces(slot), 0, bytes);
            }
        }
        rest
    }
}
