//! The calls that send on a connection, written once for both halves of the virtqueues.
//!
//! # Invariants
//! - Sent bytes are copied once, into the buffer that the peer reads.
//! - Control packets of the protocol core go first, above all a RESPONSE.
//! - Coalesced bytes are sent in order, after earlier packets and before the end of the stream.
//! - A message is sent completely or not at all. The part that finds no buffer is kept, and leaves before
//!   anything else of its connection.

use std::io::IoSlice;

use zerosock_proto::vsock::{FlowId, ReserveError, SMALL_PACKET};
use zerosock_proto::wire::vsock::Repr;
use zerosock_ring::GuestSlice;

use super::outgoing::{Outgoing, Slices, end};
use super::send_half::SendHalf;
use super::sockets::StreamId;
use super::transfers::SendFault;

/// A packet that is to be sent if all of it can be sent at once.
#[derive(Copy, Clone)]
pub(crate) struct WholePacket {
    pub(crate) flow: FlowId,
    /// Bytes of payload.
    pub(crate) len: usize,
    /// See [`Shard::send_whole_now`](zerosock_proto::vsock::Shard::send_whole_now).
    pub(crate) flags: u32,
}

/// The calls that send. See the module documentation.
pub(crate) trait SendCalls: SendHalf {
    /// Sends a packet with the payload that `fill` writes, in the common case: there are credit and a buffer for all
    /// of it, and nothing goes first. False: nothing was sent.
    #[inline(always)] // keeps the header in registers
    fn send_whole(&mut self, packet: WholePacket, fill: impl FnOnce(GuestSlice<'_>)) -> bool {
        let WholePacket { flow, len, flags } = packet;
        if self.shard().has_transmit() || self.is_stopping() {
            return false;
        }
        let sent = self.send_front(flow, len, true, flags, |body, _| fill(body));
        if sent.is_none() {
            return false;
        }
        if let Some(program) = self.parts().program {
            program.tally.count_sent(len as u32);
            program.tally.copied_in += len as u64;
        }
        true
    }

    /// Sends as many of `bytes` as credit and buffers allow, in packets as long as possible, and returns
    /// how many. Small writes may be coalesced.
    fn write(&mut self, id: StreamId, flow: FlowId, bytes: &[u8]) -> Result<usize, SendFault> {
        if self.shard().has_transmit() {
            self.send_control();
        }
        let mut sent = 0;
        while let Some(rest) = bytes.get(sent..).filter(|rest| !rest.is_empty()) {
            match self.write_packet(id, flow, rest) {
                Ok(more) => sent += more,
                // The error recurs when the caller writes the rest.
                Err(_) if sent > 0 => break,
                Err(fault) => return Err(fault),
            }
        }
        self.count_copied(sent);
        Ok(sent)
    }

    /// Sends one packet of as many of `bytes` as there is room for, or coalesces them; returns how many.
    #[inline]
    fn write_packet(
        &mut self,
        id: StreamId,
        flow: FlowId,
        bytes: &[u8],
    ) -> Result<usize, SendFault> {
        if self.is_stopping() {
            self.wait_for_buffer(id);
            return Err(SendFault::WouldBlock);
        }
        let fill = |body: GuestSlice<'_>, len| {
            body.write(0, bytes.get(..len).unwrap_or(bytes));
        };
        if let Some(sent) = self.send_front(flow, bytes.len(), false, 0, fill) {
            self.count_sent(sent as u32);
            return Ok(sent);
        }
        let len = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        if self.shard().should_coalesce(flow, len) && self.has_buffer() {
            return self.coalesce(id, flow, bytes);
        }
        self.write_uncoalesced(id, flow, bytes)
    }

    /// Writes payload into a buffer, from the offset `at` of its payload part on.
    #[inline(always)] // every packet
    fn fill(&mut self, buffer: &Self::Buffer, at: usize, bytes: &[u8]) {
        if let Some((memory, pieces, offset)) = self.payload(buffer) {
            memory.write(pieces, offset + at, bytes);
        }
    }

    /// Sends the packet with the payload in the buffer, and counts it.
    #[inline(always)] // every packet
    fn transmit(&mut self, buffer: Self::Buffer, header: &Repr) {
        self.emit(buffer, header);
        self.count_sent(header.len);
    }

    #[inline(always)] // every packet
    fn count_sent(&mut self, bytes: u32) {
        if let Some(program) = self.parts().program {
            program.tally.count_sent(bytes);
        }
    }

    /// Counts bytes that a call has copied.
    #[inline(always)] // every packet
    fn count_copied(&mut self, bytes: usize) {
        if let Some(program) = self.parts().program {
            program.tally.copied_in += bytes as u64;
        }
    }

    /// Sends as many of `bytes` as `header` says, or returns the buffer.
    fn send_bytes(
        &mut self,
        buffer: Self::Buffer,
        header: Result<Repr, ReserveError>,
        bytes: &[u8],
    ) -> Result<usize, ReserveError> {
        match header {
            Ok(header) => {
                let bytes = bytes.get(..header.len as usize).unwrap_or(bytes);
                self.fill(&buffer, 0, bytes);
                self.transmit(buffer, &header);
                Ok(bytes.len())
            }
            Err(error) => {
                self.put_back(buffer);
                Err(error)
            }
        }
    }

    /// A buffer for a packet of `len` bytes of the program. Without one the connection waits for it.
    #[inline(always)] // every packet
    fn next_buffer(&mut self, id: StreamId, len: usize) -> Result<Self::Buffer, SendFault> {
        if !self.is_stopping()
            && let Some(buffer) = self.take_buffer(len)
        {
            return Ok(buffer);
        }
        self.wait_for_buffer(id);
        Err(SendFault::WouldBlock)
    }

    /// Coalesces the first of `bytes` with later writes; returns how many.
    #[cold]
    fn coalesce(&mut self, id: StreamId, flow: FlowId, bytes: &[u8]) -> Result<usize, SendFault> {
        let parts = self.parts();
        let Some(taken) = parts.coalesced.push(parts.shard, flow, bytes) else {
            return self.write_uncoalesced(id, flow, bytes);
        };
        let now = self.now();
        let shard = self.shard();
        if shard.poll_timeout().is_some_and(|at| at <= now) {
            // The coalescing delay has expired and no turn ran since.
            shard.handle_timeout(now);
        }
        self.send_coalesced();
        match taken {
            0 => Err(SendFault::WouldBlock),
            taken => Ok(taken),
        }
    }

    /// Sends one packet of as many of `bytes` as there is room for, without coalescing.
    fn write_uncoalesced(
        &mut self,
        id: StreamId,
        flow: FlowId,
        bytes: &[u8],
    ) -> Result<usize, SendFault> {
        let buffer = self.next_buffer(id, bytes.len())?;
        let most = bytes.len().min(self.room(&buffer)) as u32;
        let shard = self.shard();
        let header = shard.reserve(flow, most).and_then(|reservation| {
            let len = reservation.len();
            // Cannot fail: nothing ran since the reservation.
            let header = shard.commit(reservation, len, 0);
            header.map_err(|_| ReserveError::Stale)
        });
        Ok(self.send_bytes(buffer, header, bytes)?)
    }

    /// Sends coalesced bytes that are due, as far as there are buffers.
    #[inline]
    fn send_coalesced(&mut self) {
        if self.shard().has_data() {
            self.send_coalesced_now();
        }
    }

    #[cold]
    fn send_coalesced_now(&mut self) {
        let now = self.now();
        // Later packets of the connection, such as SHUTDOWN, follow at once.
        while self.shard().has_transmit() {
            let Some(buffer) = self.take_buffer(SMALL_PACKET as usize) else {
                return self.want_buffers();
            };
            let room = self.room(&buffer) as u32;
            let Some(packet) = self.shard().poll_transmit(now, room) else {
                return self.put_back(buffer);
            };
            if let Some(span) = packet.span {
                let bytes = self.parts().coalesced.pop(span.flow, span.len);
                self.fill(&buffer, 0, &bytes);
                self.shard().handle_released(span);
            }
            self.transmit(buffer, &packet.header);
        }
    }

    /// Sends the coalesced bytes of a connection as far as there are credit and buffers.
    fn flush_coalesced(&mut self, flow: FlowId) {
        let parts = self.parts();
        if parts.coalesced.has(flow) {
            parts.shard.flush_coalesced(flow);
            self.send_coalesced();
        }
    }

    /// Sends a copy of a message: all of it, or nothing. The part that finds no buffer is kept. Returns
    /// whether all of it was sent.
    fn send_message(
        &mut self,
        id: StreamId,
        flow: FlowId,
        slices: &[IoSlice<'_>],
        ends_record: bool,
    ) -> Result<bool, SendFault> {
        if self.shard().has_transmit() {
            self.send_control();
        }
        let mut slices = Slices::new(slices);
        let total = u32::try_from(slices.left()).map_err(|_| SendFault::TooLong)?;
        // A message starts only if there is a buffer for its first part.
        let mut buffer = self.next_buffer(id, slices.left())?;
        let mut reservation = match self.shard().reserve_message(flow, total) {
            Ok(reservation) => reservation,
            Err(error) => {
                self.put_back(buffer);
                return Err(error.into());
            }
        };
        self.count_copied(slices.left());
        loop {
            let len = slices.left().min(self.room(&buffer));
            slices.take(len, |at, bytes| self.fill(&buffer, at, bytes));
            let last = end(slices.left(), ends_record);
            match self.shard().commit_part(&mut reservation, len as u32, last) {
                Ok(header) => self.transmit(buffer, &header),
                // Cannot happen: nothing ran since the credit was reserved.
                Err(_) => {
                    self.discard(buffer);
                    return Err(SendFault::Reset);
                }
            }
            if last.is_some() {
                return Ok(true);
            }
            match self.take_buffer(slices.left()) {
                Some(next) => buffer = next,
                None => {
                    self.keep_outgoing(Outgoing::from_slices(reservation, slices, ends_record));
                    return Ok(false);
                }
            }
        }
    }

    /// Keeps the rest of a message until there are buffers for it.
    fn keep_outgoing(&mut self, rest: Outgoing) {
        self.want_buffers();
        self.parts().outgoing.push_back(rest);
    }

    /// Sends kept messages as far as there are buffers.
    fn send_outgoing(&mut self) {
        while self.may_send_kept()
            && let Some(mut kept) = self.parts().outgoing.pop_front()
        {
            let Some(buffer) = self.take_buffer(kept.left().len()) else {
                self.want_buffers();
                return self.parts().outgoing.push_front(kept);
            };
            let len = kept.left().len().min(self.room(&buffer));
            self.fill(&buffer, 0, kept.left().get(..len).unwrap_or(&[]));
            let last = kept.end(len);
            match self
                .shard()
                .commit_part(&mut kept.reservation, len as u32, last)
            {
                Ok(header) => self.emit(buffer, &header),
                // The connection has ended or the peer receives no more: the rest is not needed.
                Err(_) => {
                    self.discard(buffer);
                    self.wake_sender(kept.reservation.flow());
                    continue;
                }
            }
            kept.advance(len);
            self.count_kept(len);
            let parts = self.parts();
            // A flow of a host socket has no connection of the program.
            if parts.flows.get(kept.reservation.flow()).is_some()
                && let Some(program) = parts.program
            {
                program.tally.count_sent(len as u32);
            }
            match last {
                Some(_) => self.wake_sender(kept.reservation.flow()),
                None => parts.outgoing.push_front(kept),
            }
        }
    }

    /// Wakes a sender that waits for the end of its message, which no other event reports.
    fn wake_sender(&mut self, flow: FlowId) {
        let parts = self.parts();
        if let Some(id) = parts.flows.get(flow)
            && let Some(program) = parts.program
        {
            program.sockets.set_writable(id);
        }
    }

    /// Whether the program may send a message: see
    /// [`Backend::is_writable`](super::backend::Backend::is_writable).
    fn may_send_message(&mut self, id: StreamId, flow: FlowId) -> bool {
        if self.is_stopping() || !self.has_buffer() {
            self.wait_for_buffer(id);
            return false;
        }
        self.shard().can_reserve_message(flow)
    }
}

impl<H: SendHalf> SendCalls for H {}
