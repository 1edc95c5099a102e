//! Loans of buffers for a whole message, written once for both halves of the virtqueues.
//!
//! # Invariants
//! - The credit for the whole message is kept with its first loan.
//! - The buffers are taken without others in between, so that unused ones can all be put back.
//! - The rest of a message that was begun and finds no buffer is kept, as for any message.
//!
//! # Operation
//! A message gets as many buffers on loan as the bounds allow, and a private buffer for the rest, which is
//! copied when the message is sent. The peer sees nothing before that; then all packets are sent one after
//! the other.

use std::collections::TryReserveError;
use std::mem::{replace, take};

use zerosock_proto::vsock::{FlowId, MessageReservation};

use super::leases::NONE;
use super::loan_calls::LoanCalls;
use super::loans::{Credit, LoanOf};
use super::outgoing::{Outgoing, end};
use super::sockets::StreamId;
use super::transfers::{LoanParts, LoanedPart, SendFault};

/// The calls on loans of messages. See the module documentation.
pub(crate) trait MessageLoanCalls: LoanCalls {
    /// Lends buffers for a message: see
    /// [`SendingCalls::loan_message`](super::sending::SendingCalls::loan_message).
    fn lend_message(
        &mut self,
        id: StreamId,
        flow: FlowId,
        len: usize,
    ) -> Result<Vec<LoanParts>, SendFault> {
        if self.shard().has_transmit() {
            self.send_control();
        }
        let total = u32::try_from(len).map_err(|_| SendFault::TooLong)?;
        let mut in_place = self.may_lend(Some(flow));
        // The message needs a buffer for its first part.
        let mut buffer = self.next_buffer(id, len)?;
        let mut credit = match self.shard().reserve_message(flow, total) {
            Ok(reservation) => Credit::Message(reservation),
            Err(error) => {
                self.put_back(buffer);
                return Err(error.into());
            }
        };
        let mut left = len;
        let mut parts = Vec::new();
        loop {
            let program = self.parts().program;
            let Some(index) = program.and_then(|program| program.sockets.begin_loan()) else {
                self.put_back(buffer);
                if let Credit::Message(reservation) = credit {
                    self.shard().cancel_message(reservation);
                    return Err(SendFault::TooManyLoans);
                }
                break;
            };
            let fits = self.room(&buffer).min(left);
            let of = (
                LoanOf::Message,
                Some(flow),
                replace(&mut credit, Credit::None),
            );
            let place = self.add_loan(index, fits as u32, of, buffer, in_place);
            let is_lent = place.is_some();
            if !is_lent && !parts.is_empty() {
                self.drop_loan(index);
                break;
            }
            let len = if is_lent { fits } else { left };
            parts.push(LoanParts { index, len, place });
            left -= len;
            in_place = left > 0 && self.may_lend(Some(flow));
            if !in_place {
                break;
            }
            match self.take_another(left) {
                Some(next) => buffer = next,
                None => break,
            }
        }
        self.mark_together(&parts);
        if left > 0 {
            parts.push(LoanParts {
                index: NONE,
                len: left,
                place: None,
            });
        }
        Ok(parts)
    }

    /// Sets `taken` of all loans of a message to the value after the last one, so that they can be put back
    /// unless another buffer is taken later.
    fn mark_together(&mut self, parts: &[LoanParts]) {
        let (mark, program) = (self.mark(), self.parts().program);
        let (Some(mark), Some(program)) = (mark, program) else {
            return;
        };
        for part in parts {
            let loan = program.loans.get_mut(part.index);
            if let Some(lent) = loan.and_then(|loan| loan.lent.as_mut()) {
                lent.mark.taken = mark.taken;
            }
        }
    }

    /// Sends the loans of a message: see
    /// [`SendingCalls::send_message_loan`](super::sending::SendingCalls::send_message_loan).
    fn send_message_loan(
        &mut self,
        id: StreamId,
        parts: &[LoanedPart<'_>],
        ends_record: bool,
    ) -> Result<bool, SendFault> {
        let head = parts.first().map_or(NONE, |part| part.index);
        let credit = self.credit_mut(head).ok_or(SendFault::Unknown)?;
        let mut reservation = match replace(credit, Credit::None) {
            Credit::Message(reservation) => reservation,
            other => {
                *credit = other;
                return Err(SendFault::Unknown);
            }
        };
        let sent = self.send_parts(id, &mut reservation, parts, ends_record);
        if sent == Err(SendFault::WouldBlock) {
            if let Some(credit) = self.credit_mut(head) {
                *credit = Credit::Message(reservation);
            }
            return Err(SendFault::WouldBlock);
        }
        let rest = match sent {
            Ok(at) => self.remaining_bytes(parts, at),
            Err(_) => Ok(Vec::new()),
        };
        for part in parts {
            self.drop_loan(part.index);
        }
        sent?;
        let Ok(rest) = rest else {
            // The message was begun and cannot be completed.
            self.reset_after_loss(reservation.flow());
            return Err(SendFault::Reset);
        };
        let all = rest.is_empty();
        if !all {
            self.count_copied(rest.len());
            self.keep_outgoing(Outgoing::new(reservation, rest, ends_record));
        }
        Ok(all)
    }

    /// The credit of a loan.
    fn credit_mut(&mut self, index: u32) -> Option<&mut Credit> {
        let loan = self.parts().program?.loans.get_mut(index)?;
        Some(&mut loan.credit)
    }

    /// Sends parts as far as there are buffers. Returns the index of the first part that was not sent
    /// completely, and the offset of its first unsent byte.
    fn send_parts(
        &mut self,
        id: StreamId,
        reservation: &mut MessageReservation,
        parts: &[LoanedPart<'_>],
        ends_record: bool,
    ) -> Result<(usize, usize), SendFault> {
        let mut left: usize = parts.iter().map(|part| part.len).sum();
        let (mut at, mut offset) = (0, 0);
        while let Some(part) = parts.get(at) {
            let mut len = part.len - offset;
            // A part to be copied needs a buffer first.
            let copy_into = match part.private {
                None => None,
                Some(bytes) => {
                    let buffer = match self.next_buffer(id, len) {
                        Ok(buffer) => buffer,
                        Err(fault) if (at, offset) == (0, 0) => return Err(fault),
                        Err(_) => return Ok((at, offset)),
                    };
                    len = len.min(self.room(&buffer));
                    let bytes = bytes.get(offset..offset + len).unwrap_or(&[]);
                    self.fill(&buffer, 0, bytes);
                    Some(buffer)
                }
            };
            if copy_into.is_none() && !self.is_lent(part.index) {
                return Err(SendFault::Reset);
            }
            let last = end(left - len, ends_record);
            let header = match self.shard().commit_part(reservation, len as u32, last) {
                Ok(header) => header,
                Err(error) => {
                    if let Some(buffer) = copy_into {
                        self.put_back(buffer);
                    }
                    return Err(error.into());
                }
            };
            if let Some(buffer) = copy_into {
                self.transmit(buffer, &header);
                self.count_copied(len);
            } else if let Some(lent) = self.take_lent(part.index) {
                self.transmit(lent.buffer, &header);
                self.count_in_place(len);
            }
            left -= len;
            offset += len;
            if offset >= part.len {
                (at, offset) = (at + 1, 0);
            }
        }
        Ok((at, offset))
    }

    /// Whether a loan has a buffer of the running queue.
    fn is_lent(&mut self, index: u32) -> bool {
        let (mark, program) = (self.mark(), self.parts().program);
        let loan = program.and_then(|program| program.loans.get(index));
        let lent = loan.and_then(|loan| loan.lent.as_ref());
        lent.zip(mark)
            .is_some_and(|(lent, mark)| lent.mark.epoch == mark.epoch)
    }

    /// Copies the bytes from part `at`, offset `offset`, to the end of the message. Ends the loans.
    fn remaining_bytes(
        &mut self,
        parts: &[LoanedPart<'_>],
        (at, offset): (usize, usize),
    ) -> Result<Vec<u8>, TryReserveError> {
        let mut rest = Vec::new();
        let mut skip = offset;
        let parts = parts.get(at..).unwrap_or(&[]);
        rest.try_reserve_exact(parts.iter().map(|part| part.len).sum())?;
        for part in parts {
            let skip = take(&mut skip);
            if let Some(bytes) = part.private {
                rest.extend_from_slice(bytes.get(skip..part.len).unwrap_or(&[]));
                continue;
            }
            let start = rest.len();
            rest.resize(start + part.len, 0);
            let is_lent = self.is_lent(part.index);
            let Some(lent) = self.take_lent(part.index).filter(|_| is_lent) else {
                continue;
            };
            if let Some((memory, pieces, at)) = self.payload(&lent.buffer)
                && let Some(bytes) = rest.get_mut(start..)
            {
                memory.read(pieces, at, bytes);
            }
            self.discard(lent.buffer);
        }
        Ok(rest)
    }
}

impl<L: LoanCalls> MessageLoanCalls for L {}
