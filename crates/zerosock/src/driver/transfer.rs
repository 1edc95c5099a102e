//! Bytes in and out of a driver's connections.
//!
//! What must hold here: sent bytes are written once, into the buffer that the
//! device reads; received bytes are copied once, out of the buffer that the
//! device wrote. Credit goes back to the peer when bytes have left our hands,
//! not before.

use zerosock_proto::Instant;
use zerosock_proto::vsock::{CommitError, FlowId, Reservation, ReserveError, SMALL_PACKET};

use super::Driver;
use super::errors::{DriverError, RecvError, SendError};
use super::queue_pairs::QueuePairId;
use super::{StreamId, StreamState};

/// Room in a transmit buffer that the device will read in place: fill it with
/// [`Driver::fill`], then [`Driver::commit`] or [`Driver::cancel`] it. Credit
/// for it is taken already.
#[derive(Debug)]
#[must_use = "a loan that is neither committed nor cancelled keeps a buffer and credit"]
pub struct Loan {
    pub(super) stream: StreamId,
    pub(super) queue_pair: QueuePairId,
    pub(super) slot: u16,
    pub(super) len: u32,
    pub(super) reservation: Reservation,
}

impl Loan {
    /// Bytes that may be filled.
    #[expect(clippy::len_without_is_empty, reason = "a loan is never empty")]
    pub fn len(&self) -> u32 {
        self.len
    }

    /// The connection it belongs to.
    pub fn stream(&self) -> StreamId {
        self.stream
    }
}

impl Driver {
    /// Borrows a transmit buffer for a packet of at most `max` bytes, as many
    /// as credit and buffer size allow.
    pub fn loan(&mut self, stream: StreamId, max: u32) -> Result<Loan, SendError> {
        let flow = self.sendable(stream)?;
        self.borrow_slot(stream, flow, max)
    }

    /// The queue_pair and the flow that a connection sends by.
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

    /// Takes a transmit slot, and credit for at most `max` bytes.
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

    /// A send has found no slot: it is told when there are some.
    #[cold]
    pub(super) fn wait_for_slot(&mut self, stream: StreamId) {
        if let Some(entry) = self.sockets.get(stream) {
            let queue_pair = QueuePairId::of_pool(entry.pool);
            let waiters = &mut self.store.queue_pairs[queue_pair].waiters;
            self.sockets.wait_for_room(stream, waiters);
        }
    }

    /// Takes credit for a packet of at most `max` bytes, and no more than a slot has.
    #[inline]
    pub(super) fn reserve(
        &mut self,
        (queue_pair, flow): (QueuePairId, FlowId),
        max: u32,
    ) -> Result<Reservation, SendError> {
        let max = max.min(self.store.queue_pairs[queue_pair].slots.tx_data.len());
        let mut result = self.store.queue_pairs[queue_pair].shard.reserve(flow, max);
        if matches!(result, Err(ReserveError::NoCredit)) {
            // Small sends that wait for others go first, and at once.
            self.store.queue_pairs[queue_pair]
                .shard
                .flush_coalesced(flow);
        }
        if matches!(result, Err(ReserveError::NoCredit))
            && self.store.queue_pairs[queue_pair].shard.has_transmit()
        {
            // Perhaps there is credit, but a RESPONSE must not be overtaken by the data behind it.
            let now = self.now();
            self.transmit_control_of(queue_pair, now)?;
            result = self.store.queue_pairs[queue_pair].shard.reserve(flow, max);
        }
        result.map_err(refused)
    }

    /// Writes `bytes` into a loan at `offset`; returns how many fitted.
    pub fn fill(&mut self, loan: &Loan, offset: u32, bytes: &[u8]) -> usize {
        let room = loan.len.saturating_sub(offset) as usize;
        let bytes = &bytes[..bytes.len().min(room)];
        let slots = &self.store.queue_pairs[loan.queue_pair].slots;
        slots
            .memory
            .write(slots.tx_data.pieces(loan.slot), offset as usize, bytes)
    }

    /// Sends the first `len` bytes of a loan; the rest of its credit returns.
    /// Visible to the device with the next turn or flush. Those of them that
    /// were not filled are what an earlier packet left in the buffer: fill all
    /// `len`.
    pub fn commit(&mut self, loan: Loan, len: u32) -> Result<(), SendError> {
        let len = len.min(loan.len);
        if len == 0 {
            self.cancel(loan);
            return Ok(());
        }
        self.send_slot(loan.queue_pair, loan.slot, loan.reservation, len)
    }

    /// Sends the first `len` bytes of a slot, which is free again when the device has read it, or
    /// at once if nothing was sent.
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

    /// Gives a loan back unsent.
    pub fn cancel(&mut self, loan: Loan) {
        let queue_pair = &mut self.store.queue_pairs[loan.queue_pair];
        queue_pair.shard.cancel(loan.reservation);
        queue_pair.tx.put_back(loan.slot);
    }

    /// Sends as many of `bytes` as there is room for now, in packets as long
    /// as buffers and credit allow, and returns how many. Visible to the
    /// device with the next turn or flush, unless [`set_coalesces`](Driver::set_coalesces)
    /// has few bytes wait.
    pub fn send(&mut self, stream: StreamId, bytes: &[u8]) -> Result<usize, SendError> {
        let mut sent = 0;
        if bytes.is_empty() {
            return Ok(0);
        }
        let flow = self.sendable(stream)?;
        while let Some(rest) = bytes.get(sent..).filter(|rest| !rest.is_empty()) {
            match self.send_packet(stream, flow, rest) {
                Ok(more) => sent += more,
                // It says so again when the rest is written.
                Err(_) if sent > 0 => break,
                Err(error) => return Err(error),
            }
        }
        self.loans.copied_in += sent as u64;
        Ok(sent)
    }

    /// Sends one packet of as many of `bytes` as there is room for, and returns how many.
    #[inline]
    fn send_packet(
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
        let slots = &of.slots;
        if let Some(later) = of.tx.later() {
            slots.tx_headers.prefetch_write(&slots.memory, later);
            slots.tx_data.prefetch_write(&slots.memory, later);
        }
        match of.shard.send_now(flow, want, 0) {
            Ok(header) => {
                // As many as the header says: no more than there are.
                let bytes = bytes.get(..header.len as usize).unwrap_or(bytes);
                slots.memory.write(slots.tx_data.pieces(slot), 0, bytes);
                of.send(slot, &header).map_err(DriverError::from)?;
                self.count_sent(&header);
                Ok(bytes.len())
            }
            Err(error) => {
                of.tx.put_back(slot);
                self.send_again(stream, (queue_pair, flow), bytes, error)
            }
        }
    }

    /// There was no credit; perhaps there is when what waits to be sent has left.
    #[cold]
    fn send_again(
        &mut self,
        stream: StreamId,
        (queue_pair, flow): (QueuePairId, FlowId),
        bytes: &[u8],
        error: ReserveError,
    ) -> Result<usize, SendError> {
        if error == ReserveError::ShouldCoalesce {
            return self.gather(stream, (queue_pair, flow), bytes);
        }
        if error != ReserveError::NoCredit
            || !self.store.queue_pairs[queue_pair].shard.has_transmit()
        {
            return Err(refused(error));
        }
        self.send_alone(stream, (queue_pair, flow), bytes)
    }

    /// Sends one packet of as many of `bytes` as there is room for, however few.
    fn send_alone(
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

    /// Whether small sends of a connection wait for each other while its peer has very many packets of
    /// ours unread: until they are 2 KiB, the peer has read, or for some milliseconds in which turns
    /// are to be taken. At first each is a packet of its own.
    pub fn set_coalesces(&mut self, stream: StreamId, coalesces: bool) {
        if let Some((queue_pair, flow)) = self.flow_of(stream) {
            self.store.queue_pairs[queue_pair]
                .shard
                .set_coalescing(flow, coalesces);
        }
    }

    /// Takes the first of `bytes` to be sent with those that follow; how many.
    #[cold]
    fn gather(
        &mut self,
        stream: StreamId,
        (queue_pair, flow): (QueuePairId, FlowId),
        bytes: &[u8],
    ) -> Result<usize, SendError> {
        let of = &mut self.store.queue_pairs[queue_pair];
        let Some(taken) = of.gathered.take_in(&mut of.shard, flow, bytes) else {
            return self.send_alone(stream, (queue_pair, flow), bytes);
        };
        let now = self.now();
        let of = &mut self.store.queue_pairs[queue_pair];
        if of.shard.poll_timeout().is_some_and(|at| at <= now) {
            // No turn has been taken for as long as it was to wait.
            of.shard.handle_timeout(now);
        }
        if of.shard.has_data() {
            self.send_gathered(queue_pair, now)?;
        }
        match taken {
            0 => Err(SendError::WouldBlock),
            taken => Ok(taken),
        }
    }

    /// Sends what was gathered of connections that wait no longer, while there are slots.
    #[cold]
    pub(super) fn send_gathered(
        &mut self,
        queue_pair: QueuePairId,
        now: Instant,
    ) -> Result<(), DriverError> {
        // What follows it, such as the end, goes with it.
        while self.store.queue_pairs[queue_pair].shard.has_transmit() {
            let of = &mut self.store.queue_pairs[queue_pair];
            let most = of.slots.tx_data.len();
            // Who waits for slots is told of some by the queue_pair's having something to send.
            let Some(slot) = of.tx.data_slot(most.min(SMALL_PACKET))? else {
                break;
            };
            let Some(packet) = of.shard.poll_transmit(now, most) else {
                of.tx.put_back(slot);
                break;
            };
            if let Some(span) = packet.span {
                let slots = &of.slots;
                of.gathered.leave(span.flow, span.len, |bytes| {
                    slots.memory.write(slots.tx_data.pieces(slot), 0, bytes);
                });
                of.shard.handle_released(span);
            }
            self.transmit(queue_pair, slot, &packet.header)?;
        }
        Ok(())
    }

    /// Sends what was gathered of a connection, if there is credit and a slot. Whether nothing is
    /// left.
    pub(super) fn hurry(&mut self, queue_pair: QueuePairId, flow: FlowId) -> bool {
        if self.store.queue_pairs[queue_pair].gathered.has(flow) {
            self.store.queue_pairs[queue_pair]
                .shard
                .flush_coalesced(flow);
            let now = self.now();
            // What goes wrong here goes wrong again in the next turn, which says so.
            let _ = self.send_gathered(queue_pair, now);
        }
        !self.store.queue_pairs[queue_pair].gathered.has(flow)
    }

    /// Receives into `out`: at least one byte, or 0 at the end of the stream
    /// (or for an empty `out`).
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

    /// Bytes that [`Driver::recv`] would give at once.
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
