//! Sending of messages, and consumption of empty ones.
//!
//! # Invariants
//! - A message is begun only if it can be completed: there is credit for all of it. The packet
//!   limit, which a receiver releases message by message, does not apply within one.
//! - The parts of a message are not interleaved with those of another.

use core::hash::BuildHasher;

use super::commands::{Unsendable, sendable};
use super::{CommitError, ConsumeError, ReserveError, Shard};
use crate::vsock::connection::{Connection, MessageReservation};
use crate::vsock::credit::Stall;
use crate::vsock::flow_id::FlowId;
use crate::vsock::state::State;
use crate::wire::vsock::{MAX_PAYLOAD, Op, Repr, SEQ_EOM, SEQ_EOR};

impl<S: BuildHasher> Shard<S> {
    /// Reserves credit for a whole message of up to `len` bytes of a SEQPACKET connection; `len`
    /// may be 0. Several may be outstanding; messages are sent one by one, in the order of their
    /// first [`commit_part`](Shard::commit_part).
    ///
    /// # Errors
    /// See [`ReserveError`]: `TooLong` (EMSGSIZE) for a message that exceeds the peer's buffer or
    /// our own limit of bytes in flight. After `NoCredit`
    /// [`Event::Writable`](crate::vsock::Event::Writable) follows when there is credit for the
    /// whole message.
    pub fn reserve_message(
        &mut self,
        flow: FlowId,
        len: u32,
    ) -> Result<MessageReservation, ReserveError> {
        let connection = self.table.get_mut(flow).ok_or(ReserveError::Stale)?;
        match sendable(connection) {
            Ok(()) => {}
            Err(Unsendable::NotConnected) => return Err(ReserveError::NotConnected),
            Err(Unsendable::Shutdown) => return Err(ReserveError::Shutdown),
            Err(Unsendable::PeerShutdown) => return Err(ReserveError::PeerShutdown),
        }
        let open = connection.message_in_progress();
        let Some(messages) = &mut connection.messages else {
            return Err(ReserveError::SocketType);
        };
        if len > connection.tx.limit() {
            return Err(ReserveError::TooLong);
        }
        let messages = &mut messages.tx;
        let waits = connection.control.response
            || connection.has_queued
            || open
            || (len == 0 && messages.empty_limit_reached());
        if !waits && connection.tx.reserve_whole(len) {
            return Ok(MessageReservation {
                flow,
                remaining: len,
                begun: false,
            });
        }
        // The waiter with the shortest message is woken first; the others retry.
        let wanted = len.max(1);
        messages.wanted = if connection.wants_credit {
            messages.wanted.min(wanted)
        } else {
            wanted
        };
        messages.wants_empty |= len == 0;
        connection.wants_credit = true;
        self.request_credit(flow.index);
        Err(ReserveError::NoCredit)
    }

    /// Whether [`reserve_message`](Shard::reserve_message) can succeed: no message is in progress,
    /// and there is more credit than when it last failed. If not,
    /// [`Event::Writable`](crate::vsock::Event::Writable) follows.
    pub fn can_reserve_message(&mut self, flow: FlowId) -> bool {
        let Some(connection) = self.table.get_mut(flow) else {
            return true;
        };
        if sendable(connection).is_err() {
            return !matches!(connection.state, State::Connecting | State::Incoming);
        }
        let ready = !connection.wants_credit
            && !connection.control.response
            && !connection.has_queued
            && !connection.message_in_progress()
            && connection.stall() == Stall::None;
        if !ready && !connection.wants_credit {
            connection.wants_credit = true;
            self.request_credit(flow.index);
        }
        ready
    }

    /// Turns the next `len` bytes of a message into a packet. Returns its header, to write in front
    /// of them now, before any other header of this shard. `end`: the message ends here, with
    /// SEQ_EOR or 0; unused credit is released. An empty message is one part of 0 bytes.
    ///
    /// A message that was begun may be completed after our own shutdown, which is sent behind it.
    ///
    /// # Errors
    /// See [`CommitError`]. `Interleaved`: another message is in progress; `ManyEmpty`: the peer
    /// has not read enough empty messages. Then nothing was changed, and
    /// [`Event::Writable`](crate::vsock::Event::Writable) follows when the message can be sent.
    /// After any other error the reservation is gone.
    pub fn commit_part(
        &mut self,
        reservation: &mut MessageReservation,
        len: u32,
        end: Option<u32>,
    ) -> Result<Repr, CommitError> {
        let flow = reservation.flow;
        let connection = self.table.get_mut(flow).ok_or(CommitError::Stale)?;
        let fault = match sendable(connection) {
            Err(Unsendable::Shutdown)
                if reservation.begun && matches!(connection.state, State::Established { .. }) =>
            {
                None
            }
            Err(Unsendable::Shutdown) => Some(CommitError::Shutdown),
            Err(Unsendable::PeerShutdown) => Some(CommitError::PeerShutdown),
            Err(Unsendable::NotConnected) => Some(CommitError::Stale),
            Ok(()) => None,
        };
        let fault = fault.or(match len {
            0 if end.is_none() || reservation.begun => Some(CommitError::Empty),
            _ if len > reservation.remaining.min(MAX_PAYLOAD) => Some(CommitError::TooMany),
            _ => None,
        });
        if let Some(fault) = fault {
            connection
                .tx
                .cancel(core::mem::take(&mut reservation.remaining));
            abort_message(connection, reservation.begun);
            self.credit_changed(flow.index);
            return Err(fault);
        }
        if connection.message_in_progress() && !reservation.begun {
            connection.rare.set_wants_space(true);
            return Err(CommitError::Interleaved);
        }
        if len == 0
            && let Some(messages) = connection.messages.as_mut()
            && messages.tx.empty_limit_reached()
        {
            messages.tx.wants_empty = true;
            connection.rare.set_wants_space(true);
            // A waiter for space is no waiter for credit, but only a waiter for credit causes a
            // request.
            connection.wants_credit = true;
            self.request_credit(flow.index);
            return Err(CommitError::ManyEmpty);
        }
        connection.tx.send_part(len);
        reservation.remaining -= len;
        reservation.begun = true;
        if let Some(messages) = &mut connection.messages {
            messages.tx.in_progress = end.is_none();
            if len == 0 {
                messages.tx.sent_empty(connection.tx.tx_cnt());
            }
        }
        if end.is_some() {
            connection
                .tx
                .cancel(core::mem::take(&mut reservation.remaining));
        }
        let update_queued = connection.control.credit_update;
        let flags = end.map_or(0, |flags| SEQ_EOM | flags & SEQ_EOR);
        let header = connection.header(Op::Rw, len, flags);
        let no_waiter = connection.has_no_waiter() && connection.may_send();
        self.stats.sent_bytes += u64::from(len);
        if update_queued || !no_waiter {
            self.credit_changed(flow.index);
        }
        Ok(header)
    }

    /// Continues a message that was begun in place before [`save`](Shard::save), of which `remaining` bytes were
    /// not committed. `None`: the connection has no such message, or lacks credit for the rest: reset it. Until the
    /// message is complete, the connection sends nothing else.
    pub fn resume_message(&mut self, flow: FlowId, remaining: u32) -> Option<MessageReservation> {
        let connection = self.table.get_mut(flow)?;
        let resumes = connection.message_in_progress() && connection.tx.reserve_rest(remaining);
        resumes.then_some(MessageReservation {
            flow,
            remaining,
            begun: true,
        })
    }

    /// Releases a message of which no part was sent.
    pub fn cancel_message(&mut self, reservation: MessageReservation) {
        if let Some(connection) = self.table.get_mut(reservation.flow) {
            connection.tx.cancel(reservation.remaining);
            abort_message(connection, reservation.begun);
            self.credit_changed(reservation.flow.index);
        }
    }

    /// Reports empty messages that the reader has read, as [`consume`](Shard::consume) reports
    /// bytes.
    ///
    /// # Errors
    /// See [`ConsumeError`].
    pub fn consume_empty(&mut self, flow: FlowId, messages: u16) -> Result<(), ConsumeError> {
        let connection = self.table.get_mut(flow).ok_or(ConsumeError::Stale)?;
        let of = connection.messages.as_mut();
        let update_due = of.and_then(|of| of.rx.consume(messages));
        let update_due = update_due.ok_or(ConsumeError::TooMany)?;
        if update_due && matches!(connection.state, State::Established { peer, .. } if !peer.send) {
            connection.control.credit_update = true;
            self.update_lists(flow.index);
        }
        Ok(())
    }
}

/// Ends a message that was begun and not completed.
fn abort_message(connection: &mut Connection, begun: bool) {
    if let Some(messages) = connection.messages.as_mut().filter(|_| begun) {
        messages.tx.in_progress = false;
    }
}
