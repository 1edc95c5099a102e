//! Messages out: credit for a whole one before its first byte leaves, then its parts; and messages
//! without a byte that were read.
//!
//! What must hold: a message is begun only if it can be ended (there is credit for all of it, and
//! the bound on packets, which a receiver releases by messages, is no bound within one); no part of
//! another stands between its parts.

use core::hash::BuildHasher;

use super::commands::{Unsendable, sendable};
use super::{CommitError, ConsumeError, ReserveError, Shard};
use crate::vsock::connection::{Connection, FlowId, MessageReservation};
use crate::vsock::credit::Stall;
use crate::vsock::state::State;
use crate::wire::vsock::{MAX_PAYLOAD, Op, Repr, SEQ_EOM, SEQ_EOR};

impl<S: BuildHasher> Shard<S> {
    /// Takes credit for a whole message of up to `len` bytes of a SEQPACKET connection, which may
    /// be 0. Several may be outstanding; each goes out by itself, in the order of their first
    /// [`commit_part`](Shard::commit_part).
    ///
    /// # Errors
    /// See [`ReserveError`]: `TooLong` (EMSGSIZE) for one that the peer's buffer, or our own bound
    /// on what is under way, can never take. After `NoCredit`
    /// [`Event::Writable`](crate::vsock::Event::Writable) follows when there is credit for all of
    /// it.
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
        // Whoever wants least is told first, and others ask again.
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

    /// Whether [`reserve_message`](Shard::reserve_message) is worth a call: it would not find that
    /// another message has not ended, nor less credit than it found when it failed last. If not,
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

    /// Makes the next `len` bytes of a message a packet, whose header is to be written in front of
    /// them, now, before any other header of this shard. `expire`: the message ends here, with
    /// SEQ_EOR or 0; what is left of its credit goes back. A message without a byte is one part of
    /// 0 bytes.
    ///
    /// What was begun may be ended after our own shutdown, which stands behind it.
    ///
    /// # Errors
    /// See [`CommitError`]. `Interleaved`: another message has begun and not ended; `ManyEmpty`: the
    /// peer has not read enough of those without a byte. Nothing was changed then, and
    /// [`Event::Writable`](crate::vsock::Event::Writable) follows when that is over. Else what was
    /// reserved is gone.
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
            // Whoever is told of space is not told of credit: but it is by that that it is asked for.
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

    /// Gives up a message of which no part has left.
    pub fn cancel_message(&mut self, reservation: MessageReservation) {
        if let Some(connection) = self.table.get_mut(reservation.flow) {
            connection.tx.cancel(reservation.remaining);
            abort_message(connection, reservation.begun);
            self.credit_changed(reservation.flow.index);
        }
    }

    /// Counts received messages without a byte that have left the caller's hands, as
    /// [`consume`](Shard::consume) counts bytes.
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

/// A message ends before its time, if it had begun.
fn abort_message(connection: &mut Connection, begun: bool) {
    if let Some(messages) = connection.messages.as_mut().filter(|_| begun) {
        messages.tx.in_progress = false;
    }
}
