//! What the driver's or the device's side of the virtqueues, a *half*, provides for sending.
//!
//! A view that borrows a device or a driver for one call implements [`SendHalf`].
//! [`SendCalls`](super::send_calls::SendCalls) and [`LoanCalls`](super::loan_calls::LoanCalls) write the calls over it
//! once; the compiler makes a copy of them for each half.

use std::collections::VecDeque;
use std::sync::Arc;

use zerosock_proto::Instant;
use zerosock_proto::vsock::{FlowId, Shard};
use zerosock_proto::wire::vsock::Repr;
use zerosock_ring::{GuestSlice, Memory, Piece};

use super::coalesced::CoalescedWrites;
use super::flows::Flows;
use super::loans::{Loans, Mark};
use super::outgoing::Outgoing;
use super::sockets::{Sockets, StreamId, Waiters};
use super::tally::Tally;

/// What a half consists of beside its queue: `T` names a received buffer, `B` is one to send.
pub(crate) struct SendParts<'a, T, B> {
    pub(crate) shard: &'a mut Shard,
    pub(crate) flows: &'a mut Flows,
    /// Connections that wait for a buffer.
    pub(crate) waiters: &'a mut Waiters,
    pub(crate) coalesced: &'a mut CoalescedWrites,
    /// Messages with remaining bytes that wait for buffers.
    pub(crate) outgoing: &'a mut VecDeque<Outgoing>,
    /// `None`: no program embeds the device.
    pub(crate) program: Option<ProgramParts<'a, T, B>>,
}

/// The state of the program's endpoint.
pub(crate) struct ProgramParts<'a, T, B> {
    pub(crate) sockets: &'a mut Sockets<T>,
    pub(crate) loans: &'a mut Loans<B>,
    pub(crate) tally: &'a mut Tally,
}

/// One queue pair as a sender, with its shard of the protocol core.
pub(crate) trait SendHalf {
    /// A buffer of the outgoing queue, for one packet.
    type Buffer;
    /// Names a received buffer.
    type Token;

    /// The number of the half in its endpoint.
    fn number(&self) -> u32;

    fn parts(&mut self) -> SendParts<'_, Self::Token, Self::Buffer>;

    /// The flows of the queue pair.
    #[inline(always)] // as `parts`
    fn shard(&mut self) -> &mut Shard {
        self.parts().shard
    }

    /// The time for timers of the protocol core.
    fn now(&mut self) -> Instant;

    /// Sends control packets, and coalesced bytes that are due, as far as there are buffers.
    fn send_control(&mut self);

    /// Whether the program gets no buffers, because a command of the VMM waits for the queue.
    fn is_stopping(&self) -> bool {
        false
    }

    /// Whether the peer has left buffers for [`take_buffer`](Self::take_buffer), of whatever length.
    fn has_buffer(&mut self) -> bool;

    /// Takes a buffer for a packet of `len` bytes, or for as many as fit. A broken queue has none; the next
    /// turn reports it.
    fn take_buffer(&mut self, len: usize) -> Option<Self::Buffer>;

    /// As [`take_buffer`](Self::take_buffer), but leaves an unusable buffer where it is: returning it to the peer
    /// would keep the buffers taken before it from being put back.
    fn take_another(&mut self, len: usize) -> Option<Self::Buffer> {
        self.take_buffer(len)
    }

    /// Payload bytes that fit into a buffer.
    fn room(&self, buffer: &Self::Buffer) -> usize;

    /// Where the payload of a buffer lies: from this offset of the pieces on.
    fn payload<'b>(
        &'b self,
        buffer: &'b Self::Buffer,
    ) -> Option<(&'b Arc<Memory>, &'b [Piece], usize)>;

    /// Writes the header of a packet with its payload in the buffer, and queues the packet.
    fn emit(&mut self, buffer: Self::Buffer, header: &Repr);

    /// Returns a buffer to the front of the queue.
    ///
    /// # Panics
    /// If a buffer that was taken later was not put back before: the caller's mistake.
    fn put_back(&mut self, buffer: Self::Buffer);

    /// Returns a buffer unused, whatever was taken or returned since.
    fn discard(&mut self, buffer: Self::Buffer);

    /// Sends a packet in the common case: there is credit for all of it, nothing is waiting, and the next buffer
    /// is at hand and of the usual form. Its payload has `len` bytes, or as many as fit into the buffer if not
    /// `is_whole`; `fill` writes so many. `flags`: see [`Shard::send_whole_now`]. Returns the length of the
    /// payload; `None`: nothing was sent.
    fn send_front(
        &mut self,
        flow: FlowId,
        len: usize,
        is_whole: bool,
        flags: u32,
        fill: impl FnOnce(GuestSlice<'_>, usize),
    ) -> Option<usize>;

    /// Has a later turn send what waits in [`SendParts::outgoing`] and the protocol core, when there are buffers.
    fn want_buffers(&mut self) {}

    /// Has a later turn wake the connections in [`SendParts::waiters`], when there are buffers.
    fn want_buffers_for_waiters(&mut self) {}

    /// Makes a connection writable when there are buffers.
    #[cold]
    fn wait_for_buffer(&mut self, id: StreamId) {
        self.want_buffers_for_waiters();
        let parts = self.parts();
        if let Some(program) = parts.program {
            program.sockets.wait_for_room(id, parts.waiters);
        }
    }

    /// Whether the budget of the turn permits more bytes of kept messages.
    fn may_send_kept(&self) -> bool {
        true
    }

    /// Counts bytes of a kept message.
    fn count_kept(&mut self, _bytes: usize) {}

    /// Resets a flow because bytes of a message that was begun were lost.
    fn reset_after_loss(&mut self, flow: FlowId);

    /// Whether one more buffer may be lent in place, to the connection of a flow or for a datagram.
    fn may_lend(&mut self, flow: Option<FlowId>) -> bool;

    /// The number of buffers on loan, for connections or for datagrams (no flow).
    fn lent_mut(&mut self, flow: Option<FlowId>) -> &mut u16;

    /// The state of the queue; `None`: it has stopped.
    fn mark(&self) -> Option<Mark> {
        Some(Mark::default())
    }
}
