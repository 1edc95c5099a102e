//! Loans for a whole message of the embedding program.
//!
//! # Invariants
//! - The credit for the whole message is kept with its first loan.
//! - The chains are popped without others in between, so that unused ones can all be un-popped.
//! - The rest of a message that was begun and finds no buffer is kept, as for any message.
//!
//! # Operation
//! A message gets as many receive buffers on loan as the bounds allow, and a private buffer for the
//! rest, which is copied when the message is sent. The guest sees nothing before that; then all
//! packets are completed one after the other.

use std::collections::TryReserveError;

use crate::device::state::loans::{Credit, Loan, LoanOf};
use zerosock_proto::vsock::{CommitError, FlowId, MessageReservation};
use zerosock_proto::wire::vsock::{HEADER_LEN, MAX_PAYLOAD};
use zerosock_ring::Chain;

use super::app::send_fault;
use super::events::emit;
use super::lending::lend_chain;
use super::{Context, Device};
use crate::table::leases::NONE;
use crate::table::outgoing::{Outgoing, end};
use crate::table::sockets::StreamId;
use crate::table::transfers::{LoanParts, LoanedPart, SendFault};

/// Payload bytes that fit into a chain.
fn room_of(chain: &Chain) -> u32 {
    (chain.writable_len().saturating_sub(HEADER_LEN as u32)).min(MAX_PAYLOAD)
}

impl Device {
    /// See [`Backend::loan_message`](crate::table::backend::Backend::loan_message).
    pub(crate) fn app_loan_message(
        &mut self,
        id: StreamId,
        flow: FlowId,
        len: usize,
        cx: &mut Context<'_>,
    ) -> Result<Vec<LoanParts>, SendFault> {
        if self.shard.has_transmit() {
            self.transmit_control(cx);
        }
        let total = u32::try_from(len).map_err(|_| SendFault::TooLong)?;
        let mut in_place = self.may_lend(flow, cx);
        // The message needs a buffer for its first part.
        let pending = self.queues.is_command_pending();
        let rx = self.queues.rings.rx.as_mut().filter(|_| !pending);
        let popped = rx.and_then(|rx| Some((rx.pop_if(HEADER_LEN + 1, true)?, rx)));
        let Some((mut chain, rx)) = popped else {
            self.wait_for_room(id, cx);
            return Err(SendFault::WouldBlock);
        };
        let room = match self.shard.reserve_message(flow, total) {
            Ok(room) => room,
            Err(error) => {
                rx.queue.unpop(chain);
                return Err(send_fault(error));
            }
        };
        let mut credit = Credit::Message(room);
        let mut left = total;
        let mut parts = Vec::new();
        loop {
            let slot = cx.shared.app.as_deref_mut().and_then(|app| {
                let index = app.sockets.begin_loan()?;
                Some((index, app))
            });
            let Some(rx) = self.queues.rings.rx.as_mut() else {
                return Err(SendFault::Reset);
            };
            let Some((index, app)) = slot else {
                rx.queue.unpop(chain);
                if let Credit::Message(room) = credit {
                    self.shard.cancel_message(room);
                    return Err(SendFault::TooManyLoans);
                }
                break;
            };
            let fits = room_of(&chain).min(left);
            let (chain_lent, place) = lend_chain(rx, chain, in_place);
            let lent = chain_lent.is_some();
            if !lent && !parts.is_empty() {
                app.sockets.end_loan(index);
                break;
            }
            let len = if lent { fits } else { left };
            let loan = Loan {
                of: LoanOf::Message,
                vm: self.addr.number,
                len,
                flow: Some(flow),
                chain: chain_lent,
                credit: std::mem::replace(&mut credit, Credit::None),
                copy: None,
            };
            app.add_loan(index, loan);
            parts.push(LoanParts {
                index,
                len: len as usize,
                place,
            });
            left -= len;
            if lent {
                self.count_loan(Some(flow), true);
            }
            in_place = left > 0 && self.may_lend(flow, cx);
            if !in_place {
                break;
            }
            // `skip` is false: earlier chains could not be un-popped behind a completed one.
            let next = self
                .queues
                .rings
                .rx
                .as_mut()
                .and_then(|rx| rx.pop_if(HEADER_LEN + 1, false));
            match next {
                Some(next) => chain = next,
                None => break,
            }
        }
        self.lent_together(&parts, cx);
        if left > 0 {
            parts.push(LoanParts {
                index: NONE,
                len: left as usize,
                place: None,
            });
        }
        Ok(parts)
    }

    /// Sets `taken` of all loans of a message to the value after the last one, so that they can be
    /// un-popped unless another chain is popped later.
    fn lent_together(&mut self, parts: &[LoanParts], cx: &mut Context<'_>) {
        let (Some(rx), Some(app)) = (&self.queues.rings.rx, cx.shared.app.as_deref_mut()) else {
            return;
        };
        for part in parts {
            let loan = app.loan_mut(part.index);
            if let Some(lent) = loan.and_then(|loan| loan.chain.as_mut()) {
                lent.taken = rx.taken;
            }
        }
    }

    /// See [`Backend::send_message_loan`](crate::table::backend::Backend::send_message_loan).
    pub(crate) fn app_send_message_loan(
        &mut self,
        id: StreamId,
        parts: &[LoanedPart<'_>],
        ends_record: bool,
        cx: &mut Context<'_>,
    ) -> Result<bool, SendFault> {
        let head = parts.first().map_or(NONE, |part| part.index);
        let app = cx.shared.app.as_deref_mut().ok_or(SendFault::Unknown)?;
        let loan = app.loan_mut(head).ok_or(SendFault::Unknown)?;
        let credit = std::mem::replace(&mut loan.credit, Credit::None);
        let Credit::Message(mut room) = credit else {
            loan.credit = credit;
            return Err(SendFault::Unknown);
        };
        let sent = self.send_parts(id, &mut room, parts, ends_record, cx);
        if sent == Err(SendFault::WouldBlock) {
            let app = cx.shared.app.as_deref_mut();
            if let Some(loan) = app.and_then(|app| app.loan_mut(head)) {
                loan.credit = Credit::Message(room);
            }
            return Err(SendFault::WouldBlock);
        }
        let rest = match sent {
            Ok(at) => self.remaining_bytes(parts, at, cx),
            Err(_) => Ok(Vec::new()),
        };
        for part in parts {
            self.app_drop_loan(part.index, cx);
        }
        sent?;
        let Ok(rest) = rest else {
            // The message was begun and cannot be completed.
            self.count_lost_bytes(cx);
            self.reset_app(room.flow(), cx);
            return Err(SendFault::Reset);
        };
        let all = rest.is_empty();
        if let Some(app) = cx.shared.app.as_deref_mut() {
            app.tally.sent += rest.len() as u64;
            app.tally.copied_in += rest.len() as u64;
        }
        if !all {
            self.keep_outgoing(Outgoing::new(room, rest, ends_record));
        }
        Ok(all)
    }

    /// Sends parts as far as there are buffers. Returns the index of the first part that was not
    /// sent completely, and the offset of its first unsent byte.
    fn send_parts(
        &mut self,
        id: StreamId,
        room: &mut MessageReservation,
        parts: &[LoanedPart<'_>],
        ends_record: bool,
        cx: &mut Context<'_>,
    ) -> Result<(usize, usize), SendFault> {
        let mut left: usize = parts.iter().map(|part| part.len).sum();
        let (mut at, mut offset) = (0, 0);
        while let Some(part) = parts.get(at) {
            // A part to be copied needs a buffer first.
            let pending = self.queues.is_command_pending();
            let rx = self.queues.rings.rx.as_mut().filter(|_| !pending);
            let copy_into = match part.private {
                None => None,
                Some(_) => match rx.and_then(|rx| rx.pop_if(HEADER_LEN + 1, true)) {
                    Some(chain) => Some(chain),
                    None if (at, offset) == (0, 0) => {
                        self.wait_for_room(id, cx);
                        return Err(SendFault::WouldBlock);
                    }
                    None => return Ok((at, offset)),
                },
            };
            let (Some(rx), Some(app)) =
                (self.queues.rings.rx.as_mut(), cx.shared.app.as_deref_mut())
            else {
                return Err(SendFault::Reset);
            };
            let room_here = copy_into.as_ref().map_or(u32::MAX, room_of) as usize;
            let len = (part.len - offset).min(room_here);
            let last = end(left - len, ends_record);
            if copy_into.is_none() {
                let lent = app
                    .loan_mut(part.index)
                    .and_then(|loan| loan.chain.as_ref());
                if lent.is_none_or(|lent| lent.epoch != rx.epoch) {
                    return Err(SendFault::Reset);
                }
            }
            let header = match self.shard.commit_part(room, len as u32, last) {
                Ok(header) => header,
                Err(error) => {
                    if let Some(chain) = copy_into {
                        rx.queue.unpop(chain);
                    }
                    return Err(match error {
                        CommitError::Interleaved | CommitError::ManyEmpty => SendFault::WouldBlock,
                        CommitError::Shutdown | CommitError::PeerShutdown => SendFault::ShutDown,
                        _ => SendFault::Reset,
                    });
                }
            };
            app.tally.sent += len as u64;
            app.tally.packets_sent += 1;
            match copy_into {
                Some(chain) => {
                    let bytes = part.private.unwrap_or_default();
                    let bytes = bytes.get(offset..offset + len).unwrap_or(&[]);
                    rx.queue.memory().write(chain.writable(), HEADER_LEN, bytes);
                    emit(rx, chain, &header, len);
                    app.tally.copied_in += len as u64;
                }
                None => {
                    let loan = app.remove_loan(part.index);
                    let lent = loan.and_then(|loan| Some((loan.flow, loan.chain?)));
                    if let Some((flow, lent)) = lent {
                        emit(rx, lent.chain, &header, len);
                        app.tally.sent_in_place += len as u64;
                        self.count_loan(flow, false);
                    }
                }
            }
            left -= len;
            offset += len;
            if offset >= part.len {
                (at, offset) = (at + 1, 0);
            }
        }
        Ok((at, offset))
    }

    /// Copies the bytes from part `at`, offset `offset`, to the end of the message.
    fn remaining_bytes(
        &mut self,
        parts: &[LoanedPart<'_>],
        (at, offset): (usize, usize),
        cx: &mut Context<'_>,
    ) -> Result<Vec<u8>, TryReserveError> {
        let mut rest = Vec::new();
        let mut skip = offset;
        let (Some(rx), Some(app)) = (&self.queues.rings.rx, cx.shared.app.as_deref_mut()) else {
            return Ok(rest);
        };
        let parts = parts.get(at..).unwrap_or(&[]);
        rest.try_reserve_exact(parts.iter().map(|part| part.len).sum())?;
        for part in parts {
            let skip = std::mem::take(&mut skip);
            if let Some(bytes) = part.private {
                rest.extend_from_slice(bytes.get(skip..part.len).unwrap_or(&[]));
                continue;
            }
            let start = rest.len();
            rest.resize(start + part.len, 0);
            let lent = app
                .loan_mut(part.index)
                .and_then(|loan| loan.chain.as_ref());
            if let Some(lent) = lent.filter(|lent| lent.epoch == rx.epoch)
                && let Some(bytes) = rest.get_mut(start..)
            {
                rx.queue
                    .memory()
                    .read(lent.chain.writable(), HEADER_LEN, bytes);
            }
        }
        Ok(rest)
    }
}
