//! Transmit slots on loan for a whole message.
//!
//! What must hold: the credit for all of it is with the first of them, and goes with it; slots and
//! words are back, whatever comes of it; of what was begun, what finds no slot is kept, as for any
//! message.

use zerosock_proto::vsock::{CommitError, MessageReservation};

use super::Driver;
use super::errors::{DriverError, SendError};
use super::lanes::LaneId;
use super::loans::{Part, fault};
use crate::vsock::engine::{LoanParts, LoanedPart, SendFault};
use crate::vsock::leases::NONE;
use crate::vsock::outgoing::{Outgoing, end};
use crate::vsock::sockets::StreamId;

impl Driver {
    /// See [`Engine::loan_message`](crate::vsock::engine::Engine::loan_message).
    pub(super) fn lend_message(
        &mut self,
        stream: StreamId,
        len: usize,
    ) -> Result<Vec<LoanParts>, SendFault> {
        let (lane, flow) = self.sendable(stream).map_err(fault)?;
        let total = u32::try_from(len).map_err(|_| SendFault::TooLong)?;
        let most = self.store.lanes[lane].slots.tx_data.len();
        // If one may be lent, there is to be one.
        let mut slot = self.slot_to_lend(stream, lane, total.min(most));
        if slot.is_none() && self.loans.may_lend(stream, lane) {
            self.wait_for_slot(stream);
            return Err(SendFault::WouldBlock);
        }
        let room = match self.reserve_message((lane, flow), total) {
            Ok(room) => room,
            Err(error) => {
                self.take_back(lane, slot);
                return Err(fault(error));
            }
        };
        let Some(mut index) = self.sockets.begin_loan() else {
            self.take_back(lane, slot);
            self.store.lanes[lane].shard.cancel_message(room);
            return Err(SendFault::TooManyLoans);
        };
        let mut room = Some(room);
        let mut left = total;
        let mut parts = Vec::new();
        loop {
            let len = if slot.is_some() { left.min(most) } else { left };
            let place = slot.map(|slot| self.place_of(lane, slot));
            parts.push(LoanParts {
                index,
                len: len as usize,
                place,
            });
            let part = Part {
                stream,
                lane,
                slot,
                room: room.take(),
            };
            self.loans.put_part(index, part);
            left -= len;
            if left == 0 {
                return Ok(parts);
            }
            slot = self.slot_to_lend(stream, lane, left.min(most));
            let word = slot.and_then(|_| self.sockets.begin_loan());
            match word {
                Some(word) => index = word,
                None => {
                    self.take_back(lane, slot);
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

    /// A slot, if one more may be lent and one is free.
    fn slot_to_lend(&mut self, stream: StreamId, lane: LaneId, len: u32) -> Option<u16> {
        if !self.loans.may_lend(stream, lane) {
            return None;
        }
        // A ring that is broken is told by the next turn.
        self.store.lanes[lane].tx.data_slot(len).ok().flatten()
    }

    fn take_back(&mut self, lane: LaneId, slot: Option<u16>) {
        if let Some(slot) = slot {
            self.store.lanes[lane].tx.put_back(slot);
        }
    }

    /// See [`Engine::send_message_loan`](crate::vsock::engine::Engine::send_message_loan).
    pub(super) fn send_lent_message(
        &mut self,
        stream: StreamId,
        parts: &[LoanedPart<'_>],
        ends_record: bool,
    ) -> Result<bool, SendFault> {
        let head = parts.first().map_or(NONE, |part| part.index);
        let part = self.loans.part_mut(head).ok_or(SendFault::Unknown)?;
        let lane = part.lane;
        let mut room = part.room.take().ok_or(SendFault::Unknown)?;
        let sent = self.send_parts(lane, stream, &mut room, parts, ends_record);
        if sent == Err(SendFault::WouldBlock) {
            if let Some(part) = self.loans.part_mut(head) {
                part.room = Some(room);
            }
            return Err(SendFault::WouldBlock);
        }
        let rest = match sent {
            Ok(at) => self.rest_of(lane, parts, at),
            Err(_) => Vec::new(),
        };
        for part in parts {
            self.end_lent(part.index);
        }
        let fault = sent.err();
        let all = rest.is_empty();
        if !all {
            self.loans.copied_in += rest.len() as u64;
            self.keep(lane, stream, Outgoing::of(room, rest, ends_record));
        }
        fault.map_or(Ok(all), Err)
    }

    /// Sends parts as far as there are slots: which part was not sent, and from which byte on.
    fn send_parts(
        &mut self,
        lane: LaneId,
        stream: StreamId,
        room: &mut MessageReservation,
        parts: &[LoanedPart<'_>],
        ends_record: bool,
    ) -> Result<(usize, usize), SendFault> {
        let most = self.store.lanes[lane].slots.tx_data.len() as usize;
        let mut left: usize = parts.iter().map(|part| part.len).sum();
        let (mut at, mut offset) = (0, 0);
        while let Some(part) = parts.get(at) {
            let len = (part.len - offset).min(most);
            let of = &mut self.store.lanes[lane];
            let slot = match part.private {
                None => {
                    let lent = self.loans.part_mut(part.index);
                    // It is the device's, or free, behind this.
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
                self.loans.part_left(part.index);
                self.sockets.end_loan(part.index);
                self.loans.sent_in_place += len as u64;
            } else {
                self.loans.copied_in += len as u64;
            }
            let sent = self.transmit(lane, slot, &header);
            sent.map_err(|error| fault(SendError::Driver(error)))?;
            offset += len;
            if offset >= part.len {
                (at, offset) = (at + 1, 0);
            }
        }
        Ok((at, offset))
    }

    /// The bytes from there on.
    fn rest_of(
        &self,
        lane: LaneId,
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
            let slots = &self.store.lanes[lane].slots;
            if let Some(slot) = self.loans.slot_of_part(part.index)
                && let Some(bytes) = rest.get_mut(start..)
            {
                slots.memory.read(slots.tx_data.pieces(slot), 0, bytes);
            }
        }
        rest
    }
}
