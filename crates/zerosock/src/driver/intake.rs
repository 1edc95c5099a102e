//! Reception: packets, device events, events of the protocol core.
//!
//! # Invariants
//! - A header is read once into a private copy, and only the copy is used.
//! - A slot returns to the device at once unless a connection holds it.
//! - Packets are received only while their payload may be held, so that a quarter of the slots is
//!   always with the device or about to be posted.

use zerosock_proto::vsock::{Disposition, Event, FlowId};
use zerosock_proto::wire::vsock::{HEADER_LEN, SocketType};
use zerosock_proto::{Address, Instant};

use super::Driver;
use super::arena::{EVENT_SLOTS, PAYLOAD};
use super::errors::DriverError;
use super::link::Link;
use super::queue_pairs::{QueuePairId, RxSlot};
use crate::header::{self, HeaderFault};
use crate::table::sockets::{Arrival, HeldBuffer, MessageEnd, Shown, Store, StreamId, StreamState};
use crate::table::transfers::{Payload, ShowBounds};

/// Packets received by one turn before the caller runs again.
const TURN_BUDGET: u16 = 256;

/// Consumes packets shown directly from the queue when dropped, so that a panic of the callback
/// leaves the queue consistent.
struct ShownPackets<'a> {
    driver: &'a mut Driver,
    queue_pair: QueuePairId,
    flow: FlowId,
    /// The packet that the callback is looking at.
    slot: Option<RxSlot>,
    shown: Shown,
    taken: u64,
}

impl Drop for ShownPackets<'_> {
    #[inline]
    fn drop(&mut self) {
        let driver = &mut *self.driver;
        let bytes = self.shown.bytes;
        if let Some(slot) = self.slot {
            driver.store.release(slot);
            // Otherwise the caller counts them.
            driver.sockets.count_shown(bytes);
        }
        driver.tally.packets_received += self.taken;
        if bytes > 0 {
            driver
                .store
                .consumed(self.queue_pair.pool(), self.flow, bytes as u32);
        }
        if driver.store.queue_pairs[self.queue_pair].shard.has_events() {
            driver.take_core_events(driver.now());
        }
    }
}

impl Driver {
    /// Passes packets from the receive queues to the protocol core.
    pub(super) fn take_packets(&mut self, now: Instant) -> Result<bool, DriverError> {
        let mut any = false;
        for queue_pair in self.store.queue_pairs.ids() {
            any |= self.take_packets_of(queue_pair, now)?;
        }
        Ok(any)
    }

    fn take_packets_of(
        &mut self,
        queue_pair: QueuePairId,
        now: Instant,
    ) -> Result<bool, DriverError> {
        let (mut taken, mut cost) = (0, 0);
        while taken + cost < TURN_BUDGET && !self.is_blocked(queue_pair) {
            let Some((slot, written)) = self.store.queue_pairs[queue_pair].rx.take()? else {
                break;
            };
            taken += 1;
            let slot = RxSlot { queue_pair, slot };
            if let Some(arrival) = self.take_packet(Some(now), slot, written) {
                self.hold(now, slot, arrival);
            } else {
                cost += self.datagrams.take_cost();
            }
        }
        self.tally.packets_received += u64::from(taken);
        Ok(taken > 0)
    }

    /// Receives packets and passes those of one connection to `look` directly, within `bounds`,
    /// returning their slots at once. Packets of other connections are held; so is the first one
    /// out of bounds, which is the last received. Does nothing if the connection holds packets
    /// already, since those come first. The fast path for small packets.
    #[inline]
    pub(super) fn take_arrivals(
        &mut self,
        id: StreamId,
        bounds: ShowBounds,
        look: &mut impl FnMut(Payload<'_>) -> bool,
    ) -> Shown {
        let Some((pool, flow)) = self.sockets.drained_flow(id) else {
            return Shown::default();
        };
        let queue_pair = QueuePairId::of_pool(pool);
        if !self.store.queue_pairs[queue_pair].rx.has_used() {
            return Shown::default();
        }
        let mut packets = ShownPackets {
            driver: self,
            queue_pair,
            flow,
            slot: None,
            shown: Shown::default(),
            taken: 0,
        };
        // A packet that is shown does not change it.
        let mut more = !packets.driver.is_blocked(queue_pair);
        while more
            && (packets.shown.packets as usize) < bounds.packets
            && packets.taken < u64::from(TURN_BUDGET)
        {
            let driver = &mut *packets.driver;
            // The error recurs in the next turn, which reports it. Packets shown before count as
            // received.
            let Ok(Some((slot, written))) = driver.store.queue_pairs[queue_pair].rx.take() else {
                break;
            };
            packets.taken += 1;
            let slot = RxSlot { queue_pair, slot };
            let Some(arrival) = driver.take_packet(None, slot, written) else {
                more = !driver.is_blocked(queue_pair);
                continue;
            };
            let slots = &driver.store.queue_pairs[queue_pair].slots;
            match slots.rx_packets.slice(&slots.memory, slot.slot) {
                Some(packet) if packets.shown.takes(&arrival, flow, bounds) => {
                    packets.slot = Some(slot);
                    packets.shown.count(&arrival);
                    more = look(Payload::in_place(&[
                        packet.part(PAYLOAD, arrival.len as usize)
                    ]));
                    packets.slot = None;
                    packets.driver.store.release(slot);
                }
                _ => {
                    driver.hold(driver.now(), slot, arrival);
                    // Packets behind a held one are held too.
                    more = arrival.flow != flow && !driver.is_blocked(queue_pair);
                }
            }
        }
        packets.shown
    }

    /// Receives packets until one has bytes of stream `id`, and returns it. Packets of other
    /// connections are held. `None`: none has arrived, or the connection holds packets, which come
    /// first.
    pub(super) fn take_arrival(&mut self, id: StreamId) -> Option<HeldBuffer<RxSlot>> {
        let conn = self.sockets.get(id)?;
        let (queue_pair, flow) = (QueuePairId::of_pool(conn.pool), conn.drained_flow()?);
        let (mut taken, mut found) = (0, None);
        while found.is_none()
            && taken < TURN_BUDGET
            && !self.is_blocked(queue_pair)
            // The next turn reports an error.
            && let Ok(Some((slot, written))) = self.store.queue_pairs[queue_pair].rx.take()
        {
            taken += 1;
            let slot = RxSlot { queue_pair, slot };
            match self.take_packet(None, slot, written) {
                Some(arrival) if arrival.flow == flow && arrival.ends.is_none() => {
                    found = Some(HeldBuffer {
                        token: slot,
                        offset: 0,
                        len: arrival.len,
                        since: None,
                        ends: MessageEnd::Nothing,
                    });
                }
                Some(arrival) => {
                    let comes_first = arrival.flow == flow;
                    self.hold(self.now(), slot, arrival);
                    if comes_first {
                        break;
                    }
                }
                None => {}
            }
        }
        self.tally.packets_received += u64::from(taken);
        if self.store.queue_pairs[queue_pair].shard.has_events() {
            self.take_core_events(self.now());
        }
        found
    }

    /// Holds payload for a connection, if it still exists.
    #[inline]
    pub(super) fn hold(&mut self, now: Instant, slot: RxSlot, arrival: Arrival) {
        let held = HeldBuffer {
            token: slot,
            offset: 0,
            len: arrival.len,
            since: Some(now),
            ends: arrival.ends.unwrap_or_default(),
        };
        match self.flow(slot.queue_pair, arrival.flow) {
            Some(stream) if arrival.ends.is_some() => {
                self.sockets.deliver_part(stream, held, &mut self.store);
            }
            Some(stream) => self.sockets.deliver(stream, held, &mut self.store),
            // This side closed the connection, and the peer has not processed that yet.
            None => self.store.release(slot),
        }
    }

    /// Processes one packet. Its slot is returned, unless the packet has payload for a connection:
    /// then the caller owns the slot. Without `now` the clock is read only if the packet needs it,
    /// as few do.
    #[inline(always)] // keeps the header in registers
    pub(super) fn take_packet(
        &mut self,
        now: Option<Instant>,
        slot: RxSlot,
        written: u32,
    ) -> Option<Arrival> {
        let queue_pair = &mut self.store.queue_pairs[slot.queue_pair];
        let slots = &queue_pair.slots;
        // Prefetches the payload while the header is loaded, and both of a later packet.
        let packet = slots.rx_packets.slice(&slots.memory, slot.slot);
        if let Some(packet) = packet {
            packet.part(PAYLOAD, 1).prefetch();
        }
        if let Some(later) = queue_pair.rx.likely_next() {
            slots.rx_packets.prefetch(&slots.memory, later);
        }
        // The device may change the header concurrently; only this copy is used.
        let repr = packet.ok_or(HeaderFault::Short).and_then(header::load);
        let payload = written.checked_sub(HEADER_LEN as u32);
        let (Some(payload), Ok(repr)) = (payload, repr) else {
            self.malformed(slot);
            return None;
        };
        if repr.len > payload || repr.len > slots.rx_data.len() {
            self.malformed(slot);
            return None;
        }
        let disposition = match queue_pair.shard.handle_payload(&repr) {
            Some(disposition) => disposition,
            None if repr.socket_type.get() == SocketType::Datagram as u16
                && self.datagrams.are_offered()
                && slot.queue_pair == QueuePairId::FIRST =>
            {
                self.take_datagram(now, slot, &repr);
                return None;
            }
            None => {
                // It may ask for credit.
                self.sockets.lease_table().end_round();
                let now = now.unwrap_or_else(|| self.now());
                self.store.queue_pairs[slot.queue_pair]
                    .shard
                    .handle_packet(now, &repr)
            }
        };
        match disposition {
            Disposition::Deliver { flow, len } => return Some(Arrival::of_stream(flow, len)),
            Disposition::Part { flow, len, flags } => {
                return Some(Arrival::of_message(flow, len, flags));
            }
            Disposition::Handled => {}
            Disposition::Dropped(_) => self.stats.rx_dropped += 1,
        }
        self.store.release(slot);
        None
    }

    #[cold]
    fn malformed(&mut self, slot: RxSlot) {
        self.stats.rx_malformed += 1;
        self.store.release(slot);
    }

    /// The connection of a flow of the protocol core.
    #[inline]
    pub(super) fn flow(&self, queue_pair: QueuePairId, flow: FlowId) -> Option<StreamId> {
        self.store.queue_pairs[queue_pair].flows.get(flow)
    }

    /// Removes the flow of a connection that is being closed from the table; returns it.
    pub(super) fn remove_flow(&mut self, id: StreamId) -> Option<(QueuePairId, FlowId)> {
        let (queue_pair, flow) = self.flow_of(id)?;
        self.store.queue_pairs[queue_pair].flows.remove(flow);
        Some((queue_pair, flow))
    }

    /// The queue pair and flow of a connection that has one.
    #[inline]
    pub(super) fn flow_of(&self, id: StreamId) -> Option<(QueuePairId, FlowId)> {
        let conn = self.sockets.get(id)?;
        Some((QueuePairId::of_pool(conn.pool), conn.flow?))
    }

    /// Processes events from the event queue.
    pub(super) fn take_events(&mut self, now: Instant) -> Result<bool, DriverError> {
        let mut any = false;
        // Bounded, because a device can fill the buffers as fast as they are posted.
        for _ in 0..EVENT_SLOTS {
            let Some(id) = self.event_queue.take(&self.store.arena)? else {
                break;
            };
            any = true;
            if id == Some(0) {
                self.stats.transport_resets += 1;
                self.transport_reset(now);
            } else {
                self.stats.unknown_events += 1;
            }
        }
        Ok(any)
    }

    /// virtio 1.2, 5.10.6.7.1: read the CID again, drop the connections, keep the listeners.
    fn transport_reset(&mut self, now: Instant) {
        for queue_pair in self.store.queue_pairs.iter_mut() {
            queue_pair.shard.handle_transport_reset(now);
            queue_pair.coalesced.clear();
        }
        self.take_core_events(now);
        let cid = self.link.as_mut().and_then(Link::current_cid);
        // The CID of a service does not change.
        let Some(cid) = cid.filter(|_| self.config.host_ports.is_none()) else {
            return;
        };
        self.cid = cid;
        for queue_pair in self.store.queue_pairs.iter_mut() {
            queue_pair.shard.set_driver_cid(cid);
        }
        self.datagrams.reset(cid);
    }

    /// Translates events of the protocol core into events of the driver.
    pub(super) fn take_core_events(&mut self, now: Instant) {
        for queue_pair in self.store.queue_pairs.ids() {
            self.take_core_events_of(queue_pair, now);
        }
    }

    fn take_core_events_of(&mut self, queue_pair: QueuePairId, now: Instant) {
        while let Some(event) = self.store.queue_pairs[queue_pair].shard.poll_event() {
            match event {
                Event::Incoming {
                    flow,
                    local,
                    peer,
                    socket_type,
                } => self.incoming(now, (queue_pair, flow), local, peer, socket_type),
                Event::Connected { flow } => {
                    if let Some(stream) = self.flow(queue_pair, flow) {
                        self.sockets.connected(stream);
                    }
                }
                Event::Refused { flow, reason } => {
                    if let Some(stream) = self.flow(queue_pair, flow) {
                        self.sockets.refused(stream, reason);
                    }
                    self.closed(queue_pair, flow, false);
                }
                Event::PeerShutdown {
                    flow,
                    receive,
                    send,
                } => {
                    if receive {
                        self.store.queue_pairs[queue_pair].coalesced.forget(flow);
                    }
                    if let Some(stream) = self.flow(queue_pair, flow) {
                        self.sockets
                            .peer_shut_down(stream, receive, send, &mut self.store);
                    }
                }
                Event::Writable { flow } => {
                    if let Some(stream) = self.flow(queue_pair, flow) {
                        self.sockets.set_ready(stream);
                    }
                }
                Event::Closed { flow, reason } => {
                    self.closed(queue_pair, flow, reason.is_orderly())
                }
            }
        }
    }

    fn incoming(
        &mut self,
        now: Instant,
        (queue_pair, flow): (QueuePairId, FlowId),
        local: Address,
        peer: Address,
        socket_type: SocketType,
    ) {
        let admitted = self.listeners.admit(local.port, socket_type);
        let pair = &mut self.store.queue_pairs[queue_pair];
        let reserved = pair
            .flows
            .reserve(flow)
            .and_then(|()| self.sockets.reserve());
        let (Ok(buffer), Ok(())) = (admitted, reserved) else {
            // Fails only for a flow that has ended.
            let _ = pair.shard.reject(flow);
            return;
        };
        if self.store.queue_pairs[queue_pair]
            .shard
            .accept(now, flow)
            .is_ok()
        {
            if let Some(bytes) = buffer {
                // Cannot fail: the RESPONSE that carries the size has not been sent yet.
                let _ = self.store.queue_pairs[queue_pair]
                    .shard
                    .set_buf_alloc(flow, bytes);
            }
            let (pool, state) = (queue_pair.pool(), StreamState::Connected);
            let stream = self
                .sockets
                .insert(pool, flow, state, local, peer, socket_type);
            self.store.queue_pairs[queue_pair]
                .flows
                .insert(flow, stream);
            self.listeners.push(local.port, stream);
        }
    }

    /// The flow of a connection has ended.
    pub(super) fn closed(&mut self, queue_pair: QueuePairId, flow: FlowId, orderly: bool) {
        let of = &mut self.store.queue_pairs[queue_pair];
        of.coalesced.forget(flow);
        if let Some(stream) = of.flows.remove(flow) {
            self.sockets.ended(stream, orderly, &mut self.store);
        }
    }
}
