//! Sending and receiving bytes on a driver's connections.
//!
//! # Invariants
//! - Sent bytes are written once, into the buffer that the device reads; received bytes are copied
//!   once, out of the buffer that the device wrote.
//! - Credit is given only for bytes that the reader has copied out.

use zerosock_proto::Instant;
use zerosock_proto::vsock::{CommitError, FlowId, Reservation, ReserveError, SMALL_PACKET};
use zerosock_ring::GuestSlice;

use super::Driver;
use super::errors::{DriverError, RecvError, SendError};
use super::loans::Loan;
use super::queue_pairs::QueuePairId;
use super::{StreamId, StreamState};
use crate::table::transfers::Publish;

impl Driver {
    /// Borrows a transmit buffer for a packet of at most `max` bytes, limited by credit and buffer
    /// size.
    pub fn loan(&mut self, stream: StreamId, max: u32) -> Result<Loan, SendError> {
        let flow = self.sendable(stream)?;
        self.borrow_slot(stream, flow, max)
    }

    /// The queue pair and flow for sending on a connection; an error if it cannot send.
    #[inline]
    pub(super) fn sendable(&self, stream: StreamId) -> Result<(QueuePairId, FlowId), SendError> {
        let entry = self.sockets.get(stream).ok_or(SendError::Unknown)?;
        match (entry.state, entry.flow) {
            _ if entry.send_shutdown || entry.peer_recv_shutdown => Err(SendError::ShutDown),
            (StreamState::Connecting, _) => Err(SendError::NotConnected),
            (StreamState::Connected, Some(flow)) => Ok((QueuePairId::of_pool(entry.pool), flow)),
            (StreamState::Finished, _) => Err(SendError::ShutDown),
            _ => Err(SendError::Reset),
        }
    }

    /// Takes a transmit slot and reserves credit for at most `max` bytes.
    #[inline]
    pub(super) fn borrow_slot(
        &mut self,
        stream: StreamId,
        (queue_pair, flow): (QueuePairId, FlowId),
        max: u32,
    ) -> Result<Loan, SendError> {
        let Some(slot) = self.store.queue_pairs[queue_pair]
            .tx
            .data_slot(max)
            .map_err(DriverError::from)?
        else {
            self.wait_for_slot(stream);
            return Err(SendError::WouldBlock);
        };
        match self.reserve((queue_pair, flow), max) {
            Ok(reservation) => Ok(Loan {
                stream,
                queue_pair,
                slot,
                len: reservation.len(),
                reservation,
            }),
            Err(error) => {
                self.store.queue_pairs[queue_pair].tx.put_back(slot);
                Err(error)
            }
        }
    }

    /// Makes a connection wait for a slot after a send found none.
    #[cold]
    pub(super) fn wait_for_slot(&mut self, stream: StreamId) {
        if let Some(entry) = self.sockets.get(stream) {
            let queue_pair = QueuePairId::of_pool(entry.pool);
            let waiters = &mut self.store.queue_pairs[queue_pair].waiters;
            self.sockets.wait_for_room(stream, waiters);
        }
    }

    /// Reserves credit for a packet of at most `max` bytes, at most the size of a slot.
    #[inline]
    pub(super) fn reserve(
        &mut self,
        (queue_pair, flow): (QueuePairId, FlowId),
        max: u32,
    ) -> Result<Reservation, SendError> {
        let max = max.min(self.store.queue_pairs[queue_pair].slots.tx_data.len());
        let mut result = self.store.queue_pairs[queue_pair].shard.reserve(flow, max);
        if matches!(result, Err(ReserveError::NoCredit)) {
            // Coalesced writes are sent first.
            self.store.queue_pairs[queue_pair]
                .shard
                .flush_coalesced(flow);
        }
        if matches!(result, Err(ReserveError::NoCredit))
            && self.store.queue_pairs[queue_pair].shard.has_transmit()
        {
            // A pending RESPONSE must precede the data.
            let now = self.now();
            self.transmit_control_of(queue_pair, now)?;
            result = self.store.queue_pairs[queue_pair].shard.reserve(flow, max);
        }
        result.map_err(refused)
    }

    /// Writes `bytes` into a loan at `offset`; returns how many fit.
    pub fn fill(&mut self, loan: &Loan, offset: u32, bytes: &[u8]) -> usize {
        let room = loan.len.saturating_sub(offset) as usize;
        let bytes = &bytes[..bytes.len().min(room)];
        let slots = &self.store.queue_pairs[loan.queue_pair].slots;
        slots
            .memory
            .write(slots.tx_data.pieces(loan.slot), offset as usize, bytes)
    }

    /// Sends the first `len` bytes of a loan and returns the rest of its credit. Visible to the
    /// device after the next turn or flush. Bytes that were not filled contain data of an earlier
    /// packet: fill all `len`.
    pub fn commit(&mut self, loan: Loan, len: u32) -> Result<(), SendError> {
        let len = len.min(loan.len);
        if len == 0 {
            self.cancel(loan);
            return Ok(());
        }
        self.send_slot(loan.queue_pair, loan.slot, loan.reservation, len)
    }

    /// Sends the first `len` bytes of a slot, which is free when the device has returned it, or at
    /// once if sending failed.
    #[inline]
    pub(super) fn send_slot(
        &mut self,
        queue_pair: QueuePairId,
        slot: u16,
        reservation: Reservation,
        len: u32,
    ) -> Result<(), SendError> {
        match self.store.queue_pairs[queue_pair]
            .shard
            .commit(reservation, len, 0)
        {
            Ok(header) => Ok(self.transmit(queue_pair, slot, &header)?),
            Err(error) => {
                self.store.queue_pairs[queue_pair].tx.put_back(slot);
                Err(match error {
                    CommitError::Shutdown | CommitError::PeerShutdown => SendError::ShutDown,
                    _ => SendError::Reset,
                })
            }
        }
    }

    /// Drops a loan unsent.
    pub fn cancel(&mut self, loan: Loan) {
        let queue_pair = &mut self.store.queue_pairs[loan.queue_pair];
        queue_pair.shard.cancel(loan.reservation);
        queue_pair.tx.put_back(loan.slot);
    }

    /// Sends `len` bytes that `fill` writes in one packet, in the common case: there are a slot and
    /// credit for them, and nothing goes first. `flags`: see [`Shard::send_whole_now`]. False: nothing was
    /// sent. Packets and returned slots of this queue pair are published. The next turn reports an error
    /// of the ring.
    ///
    /// [`Shard::send_whole_now`]: zerosock_proto::vsock::Shard::send_whole_now
    #[inline(always)] // keeps the header in registers
    pub(super) fn send_packet(
        &mut self,
        stream: StreamId,
        len: usize,
        flags: u32,
        publish: Publish,
        fill: impl FnOnce(GuestSlice<'_>),
    ) -> bool {
        let Ok((queue_pair, flow)) = self.sendable(stream) else {
            return false;
        };
        let of = &mut self.store.queue_pairs[queue_pair];
        if len > of.slots.tx_data.len() as usize || of.shard.has_transmit() {
            return false;
        }
        // Shorter than a slot.
        let len = len as u32;
        let Some(slot) = of.tx.ready_slot(len) else {
            return false;
        };
        let Some(header) = of.shard.send_whole_now(flow, len, flags) else {
            of.tx.put_back(slot);
            return false;
        };
        of.prefetch_free();
        let sent = of.send(slot, &header, fill);
        let is_now = publish == Publish::Now;
        let kick = is_now && of.tx.publish();
        // The device may be waiting for the slots that were returned before.
        let kick_rx = is_now && of.rx.publish();
        match sent {
            Ok(()) => {
                self.count_sent(&header);
                self.loans.copied_in += u64::from(len);
            }
            Err(error) => self.store.fail(error),
        }
        if kick {
            self.event_fds.kick(queue_pair.tx());
            self.stats.kicks += 1;
        }
        if kick_rx {
            self.event_fds.kick(queue_pair.rx());
            self.stats.kicks += 1;
        }
        true
    }

    /// Sends as many of `bytes` as credit and buffers allow, in packets as long as possible, and
    /// returns how many. Visible to the device after the next turn or flush, unless
    /// small writes are coalesced.
    pub fn send(&mut self, stream: StreamId, bytes: &[u8]) -> Result<usize, SendError> {
        let mut sent = 0;
        if bytes.is_empty() {
            return Ok(0);
        }
        let flow = self.sendable(stream)?;
        while let Some(rest) = bytes.get(sent..).filter(|rest| !rest.is_empty()) {
            match self.send_part_of(stream, flow, rest) {
                Ok(more) => sent += more,
                // The error recurs when the caller writes the rest.
                Err(_) if sent > 0 => break,
                Err(error) => return Err(error),
            }
        }
        self.loans.copied_in += sent as u64;
        Ok(sent)
    }

    /// Sends one packet of as many of `bytes` as there is room for, and returns how many.
    fn send_part_of(
        &mut self,
        stream: StreamId,
        (queue_pair, flow): (QueuePairId, FlowId),
        bytes: &[u8],
    ) -> Result<usize, SendError> {
        let of = &mut self.store.queue_pairs[queue_pair];
        let most = of.slots.tx_data.len();
        let want = most.min(u32::try_from(bytes.len()).unwrap_or(most));
        let Some(slot) = of.tx.data_slot(want).map_err(DriverError::from)? else {
            self.wait_for_slot(stream);
            return Err(SendError::WouldBlock);
        };
        of.prefetch_free();
        match of.shard.send_now(flow, want, 0) {
            Ok(header) => {
                // The header has at most as many.
                let bytes = bytes.get(..header.len as usize).unwrap_or(bytes);
                let fill = |payload: GuestSlice<'_>| {
                    payload.write(0, bytes);
                };
                of.send(slot, &header, fill).map_err(DriverError::from)?;
                self.count_sent(&header);
                Ok(bytes.len())
            }
            Err(error) => {
                of.tx.put_back(slot);
                self.send_without_credit(stream, (queue_pair, flow), bytes, error)
            }
        }
    }

    /// Continues a send that found no credit: coalesces it, or retries after pending control
    /// packets.
    #[cold]
    fn send_without_credit(
        &mut self,
        stream: StreamId,
        (queue_pair, flow): (QueuePairId, FlowId),
        bytes: &[u8],
        error: ReserveError,
    ) -> Result<usize, SendError> {
        if error == ReserveError::ShouldCoalesce {
            return self.coalesce(stream, (queue_pair, flow), bytes);
        }
        if error != ReserveError::NoCredit
            || !self.store.queue_pairs[queue_pair].shard.has_transmit()
        {
            return Err(refused(error));
        }
        self.send_uncoalesced(stream, (queue_pair, flow), bytes)
    }

    /// Sends one packet of as many of `bytes` as there is room for, without coalescing.
    fn send_uncoalesced(
        &mut self,
        stream: StreamId,
        (queue_pair, flow): (QueuePairId, FlowId),
        bytes: &[u8],
    ) -> Result<usize, SendError> {
        let want = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        let loan = self.borrow_slot(stream, (queue_pair, flow), want)?;
        let filled = self.fill(&loan, 0, bytes);
        self.commit(loan, filled as u32)?;
        Ok(filled)
    }

    /// Coalesces the first of `bytes` with later writes; returns how many.
    #[cold]
    fn coalesce(
        &mut self,
        stream: StreamId,
        (queue_pair, flow): (QueuePairId, FlowId),
        bytes: &[u8],
    ) -> Result<usize, SendError> {
        let of = &mut self.store.queue_pairs[queue_pair];
        let Some(taken) = of.coalesced.push(&mut of.shard, flow, bytes) else {
            return self.send_uncoalesced(stream, (queue_pair, flow), bytes);
        };
        let now = self.now();
        let of = &mut self.store.queue_pairs[queue_pair];
        if of.shard.poll_timeout().is_some_and(|at| at <= now) {
            // No turn was taken for the whole delay.
            of.shard.handle_timeout(now);
        }
        if of.shard.has_data() {
            self.send_coalesced(queue_pair, now)?;
        }
        match taken {
            0 => Err(SendError::WouldBlock),
            taken => Ok(taken),
        }
    }

    /// Sends coalesced writes that are due, while there are slots.
    #[cold]
    pub(super) fn send_coalesced(
        &mut self,
        queue_pair: QueuePairId,
        now: Instant,
    ) -> Result<(), DriverError> {
        // Later packets of the connection, such as SHUTDOWN, follow at once.
        while self.store.queue_pairs[queue_pair].shard.has_transmit() {
            let of = &mut self.store.queue_pairs[queue_pair];
            let most = of.slots.tx_data.len();
            // The pending transmission makes `wants_slots` true, so a returned slot retries this.
            let Some(slot) = of.tx.data_slot(most.min(SMALL_PACKET))? else {
                break;
            };
            let Some(packet) = of.shard.poll_transmit(now, most) else {
                of.tx.put_back(slot);
                break;
            };
            if let Some(span) = packet.span {
                let slots = &of.slots;
                of.coalesced.pop(span.flow, span.len, |bytes| {
                    slots.memory.write(slots.tx_data.pieces(slot), 0, bytes);
                });
                of.shard.handle_released(span);
            }
            self.transmit(queue_pair, slot, &packet.header)?;
        }
        Ok(())
    }

    /// Receives into `out`: at least one byte, or 0 at the end of the stream or for an empty `out`.
    pub fn recv(&mut self, stream: StreamId, out: &mut [u8]) -> Result<usize, RecvError> {
        let done = self.sockets.read(stream, out, false, &mut self.store);
        if done > 0 {
            return Ok(done);
        }
        self.store.check().map_err(DriverError::from)?;
        let entry = self.sockets.get(stream).ok_or(RecvError::Unknown)?;
        match entry.state {
            _ if out.is_empty() || entry.is_at_end() => Ok(0),
            StreamState::Finished => Ok(0),
            StreamState::Reset => Err(RecvError::Reset),
            StreamState::Connecting | StreamState::Connected => Err(RecvError::WouldBlock),
        }
    }

    /// Bytes that [`Driver::recv`] would return now.
    pub fn unread(&self, stream: StreamId) -> usize {
        self.sockets.unread(stream)
    }
}

pub(super) fn refused(error: ReserveError) -> SendError {
    match error {
        ReserveError::NoCredit | ReserveError::ShouldCoalesce => SendError::WouldBlock,
        ReserveError::NotConnected => SendError::NotConnected,
        ReserveError::Shutdown | ReserveError::PeerShutdown => SendError::ShutDown,
        ReserveError::TooLong => SendError::TooLong,
        ReserveError::Stale | ReserveError::Empty | ReserveError::SocketType => SendError::Reset,
    }
}
