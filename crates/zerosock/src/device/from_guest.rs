//! Packets from the guest's transmit queue to the bridges; [`super::flush`] passes their bytes on.
//!
//! A packet costs one pop, one private copy of its 44-byte header, one lookup, and its share of one
//! `sendmsg` for all packets of a connection in the same turn; the payload is not touched. A full
//! socket leaves chains held, within bounds ([`super::outbound`]).

use super::flush::share_of;
use super::outbound::HeldChain;
use super::state::program::HostToken;
use super::{Context, Device};
use crate::device::half::DeviceHalf;
use crate::header;
use crate::table::sockets::{
    Arrival, HeldBuffer, LeaseParts, MessageEnd, NoLease, Shown, StreamId,
};
use crate::table::transfers::{Payload, ShowBounds};
use zerosock_proto::vsock::{Disposition, FlowId, Shard};
use zerosock_proto::wire::vsock::{HEADER_LEN, SocketType};
use zerosock_ring::{Chain, FrontChain, SliceBuf};

/// Packets processed in one turn.
const BUDGET: usize = 256;

/// Accounts for packets shown to the program; on drop, so that they count as consumed even if the
/// callback panics.
struct ShownPackets<'a, 'c> {
    device: &'a mut Device,
    cx: &'a mut Context<'c>,
    flow: FlowId,
    /// The callback is looking at the chain at the front of the ring.
    is_showing: bool,
    /// The popped chain that the callback is looking at.
    popped: Option<Chain>,
    shown: Shown,
    /// Bytes of packets that were delivered without being shown.
    delivered: u64,
    taken: u64,
}

impl<'a, 'c> ShownPackets<'a, 'c> {
    fn new(device: &'a mut Device, flow: FlowId, cx: &'a mut Context<'c>) -> Self {
        ShownPackets {
            device,
            cx,
            flow,
            is_showing: false,
            popped: None,
            shown: Shown::default(),
            delivered: 0,
            taken: 0,
        }
    }

    /// Whether the next packet may be taken. A packet that is shown changes nothing of it.
    fn may_receive(&self) -> bool {
        !self.device.receive_blocked() && !self.device.app_is_full(self.cx)
    }

    /// Takes the next packet, of any kind, in a chain of any form. Returns whether another one may be
    /// taken.
    #[inline(never)]
    fn show_popped(
        &mut self,
        bounds: ShowBounds,
        look: &mut dyn FnMut(Payload<'_>) -> bool,
    ) -> bool {
        let tx = self.device.queues.rings.tx.as_mut();
        let Some(chain) = tx.and_then(|tx| tx.pop()) else {
            return false;
        };
        self.taken += 1;
        let Some((chain, arrival)) = self.device.open(chain, self.cx) else {
            return self.may_receive();
        };
        let (mut slices, want) = (SliceBuf::<4>::new(), arrival.len as usize);
        if let Some(tx) = &self.device.queues.rings.tx
            && self.shown.takes(&arrival, self.flow, bounds)
            && tx
                .queue
                .memory()
                .slices(chain.readable(), HEADER_LEN, want, &mut slices)
                == want
        {
            self.shown.count(&arrival);
            self.popped = Some(chain);
            let more = look(Payload::in_place(&slices));
            self.complete_shown();
            return more;
        }
        self.hold(chain, arrival)
    }

    /// Delivers a packet without showing it. Returns whether another one may be taken.
    fn hold(&mut self, chain: Chain, arrival: Arrival) -> bool {
        self.cx.time();
        self.delivered += u64::from(arrival.len);
        self.device.deliver(chain, arrival, self.cx);
        // Packets behind a held packet must be held too.
        arrival.flow != self.flow && self.may_receive()
    }

    /// Completes the chain that the callback was looking at.
    fn complete_shown(&mut self) {
        if let Some(tx) = &mut self.device.queues.rings.tx {
            // A driver that changes a posted chain gets back what it is now.
            let posted = std::mem::take(&mut self.is_showing).then(|| tx.pop());
            if let Some(chain) = self.popped.take().or(posted.flatten()) {
                tx.complete(chain, 0);
            }
        }
    }
}

impl Drop for ShownPackets<'_, '_> {
    #[inline]
    fn drop(&mut self) {
        let panicked = self.is_showing || self.popped.is_some();
        if panicked {
            self.complete_shown();
        }
        let (device, cx) = (&mut *self.device, &mut *self.cx);
        let bytes = self.shown.bytes;
        if bytes > 0 {
            // Fails if the flow has ended.
            let _ = device.shard.consume(self.flow, bytes as u32);
        }
        cx.shared.counters.rx_packets.add(self.taken);
        cx.shared
            .counters
            .rx_bytes
            .add(bytes as u64 + self.delivered);
        if let Some(app) = cx.shared.app.as_deref_mut() {
            app.tally.packets_received += self.taken;
            if panicked {
                // Without a panic the caller counts them.
                app.sockets.count_shown(bytes);
            }
        }
        if device.shard.has_events() || device.bridges.has_dirty() {
            cx.time();
            device.drain_events(cx);
            device.bridges_with(cx).flush_dirty();
        }
    }
}

/// Reads the header of the packet in a chain at the front. Returns its payload if the protocol core
/// accepts it by its fast path; else nothing was changed.
#[inline(always)] // keeps the header in registers
fn open_front(shard: &mut Shard, front: &FrontChain<'_>) -> Option<Arrival> {
    // Overlap the cache miss of the payload with that of the header.
    front.body.prefetch();
    let header = header::load(front.header).ok()?;
    if header.len as usize > front.body.len() {
        return None;
    }
    match shard.handle_payload(&header)? {
        Disposition::Deliver { flow, len } => Some(Arrival::of_stream(flow, len)),
        Disposition::Part { flow, len, flags } => Some(Arrival::of_message(flow, len, flags)),
        // The fast path is for payload only.
        _ => None,
    }
}

impl Device {
    /// Whether packets of the guest must wait: too many answers wait for buffers, or a command is
    /// pending.
    pub(super) fn receive_blocked(&self) -> bool {
        self.queues.is_command_pending() || self.shard.is_backlogged()
    }

    /// Processes a budget of packets from the guest. Returns true if there may be more.
    pub(super) fn receive(&mut self, cx: &mut Context<'_>) -> bool {
        let mut posted = 0;
        if let Some(tx) = self.queues.rings.tx.as_mut().filter(|r| r.live()) {
            tx.queue.disable_notifications();
            posted = tx.queue.driver_index();
        }
        let most = self.from_guest_budget.bytes();
        let mut taken = 0;
        while taken < BUDGET
            && self.moved < most
            && !self.receive_blocked()
            && !self.app_is_full(cx)
        {
            let Some(chain) = self.queues.rings.tx.as_mut().and_then(|tx| tx.pop()) else {
                break;
            };
            if let Some((chain, arrival)) = self.open(chain, cx) {
                self.deliver(chain, arrival, cx);
            }
            taken += 1;
        }
        cx.shared.counters.rx_packets.add(taken as u64);
        let moved = self.moved - std::mem::take(&mut self.datagrams.charged).min(self.moved);
        cx.shared.counters.rx_bytes.add(moved as u64);
        if let Some(app) = cx.shared.app.as_deref_mut() {
            app.tally.packets_received += taken as u64;
        }
        self.drain_events(cx);
        self.bridges_with(cx).flush_dirty();
        self.datagrams_with(cx).put_app_controls();
        if cx.shared.app.is_none() {
            let tx = self.queues.rings.tx.as_ref();
            let has_posted = || tx.is_some_and(|tx| tx.queue.driver_index() != posted);
            let left = || tx.is_some_and(|tx| tx.queue.has_available());
            self.from_guest_budget
                .turn_ended(self.moved, has_posted, left);
        }
        taken == BUDGET || self.moved >= most
    }

    pub(super) fn receive_packet(&mut self, chain: Chain, cx: &mut Context<'_>) {
        if let Some((chain, arrival)) = self.open(chain, cx) {
            self.deliver(chain, arrival, cx);
        }
    }

    /// Parses a packet's header and processes control packets. Returns the chain of a packet
    /// that has payload, or ends a message; else the chain is completed or passed on.
    #[inline(always)] // saves a copy of the chain
    fn open(&mut self, chain: Chain, cx: &mut Context<'_>) -> Option<(Chain, Arrival)> {
        let tx = self.queues.rings.tx.as_mut()?;
        if cx.shared.app.is_some()
            && let Some(payload) = tx
                .queue
                .memory()
                .contiguous(chain.readable(), HEADER_LEN, 1)
        {
            // Overlap the cache miss of the payload with that of the header.
            payload.prefetch();
        }
        let header = match header::read(tx.queue.memory(), chain.readable()) {
            // The chain must contain the payload length that the header declares.
            Ok(h) if h.len as usize <= chain.readable_len() as usize - HEADER_LEN => h,
            _ => {
                cx.shared.counters.bad_packets.add(1);
                tx.complete(chain, 0);
                return None;
            }
        };
        let disposition = match self.shard.handle_payload(&header) {
            Some(disposition) => disposition,
            None if header.socket_type.get() == SocketType::Datagram as u16
                && self.datagrams.are_negotiated() =>
            {
                self.datagrams_with(cx).guest_datagram(chain, header);
                return None;
            }
            // Only the first queue pair carries datagrams; they get no answer.
            None if header.socket_type.get() == SocketType::Datagram as u16
                && self.queue_pairs.pair != 0 =>
            {
                cx.shared.counters.bad_packets.add(1);
                tx.complete(chain, 0);
                return None;
            }
            None => {
                if let Some(app) = cx.shared.app.as_deref() {
                    // It may ask for credit.
                    app.sockets.lease_table().end_round();
                }
                self.shard.handle_packet(cx.time(), &header)
            }
        };
        match disposition {
            Disposition::Deliver { flow, len } => {
                return Some((chain, Arrival::of_stream(flow, len)));
            }
            Disposition::Part { flow, len, flags } => {
                return Some((chain, Arrival::of_message(flow, len, flags)));
            }
            Disposition::Handled => {}
            Disposition::Dropped(reason) => {
                if reason.is_fault() {
                    tracing::debug!(cid = %self.cid, ?reason, ?header, "packet dropped");
                    cx.shared.counters.bad_packets.add(1);
                }
            }
        }
        tx.complete(chain, 0);
        // Now, because the next packet may reuse the addresses of a connection that ended.
        self.drain_events(cx);
        None
    }

    #[inline(always)] // as `open`
    fn deliver(&mut self, chain: Chain, arrival: Arrival, cx: &mut Context<'_>) {
        let Arrival { flow, len, ends } = arrival;
        if let Some(ends) = ends {
            return self.receive_part(chain, arrival, ends, cx);
        }
        self.moved += len as usize;
        let Some((key, bridge)) = self.bridges.of_flow(flow) else {
            return self.half(cx).deliver(chain, arrival);
        };
        let Some(tx) = self.queues.rings.tx.as_mut() else {
            return;
        };
        bridge.from_guest += u64::from(len);
        if bridge.state.drops_bytes() {
            tx.complete(chain, 0);
            let _ = self.shard.consume(flow, len);
            return;
        }
        let share = share_of(tx.queue.size());
        let held = HeldChain {
            chain,
            offset: HEADER_LEN as u32,
            len,
        };
        let memory = tx.queue.memory();
        if let Some(chain) = self.bridges.push_outbound(key, memory, held, share) {
            cx.shared.counters.copied_bytes.add(u64::from(len));
            tx.complete(chain, 0);
        }
    }
}

impl DeviceHalf<'_, '_> {
    /// The fast path for small packets of a connection with the program that holds nothing: passes
    /// the payload to `look` and completes each chain at once, within `bounds`. Packets of other
    /// connections are processed as usual. A packet of this connection beyond the bounds is held
    /// and ends the call.
    #[inline]
    pub(crate) fn show(
        &mut self,
        flow: FlowId,
        bounds: ShowBounds,
        look: &mut impl FnMut(Payload<'_>) -> bool,
    ) -> Shown {
        let mut packets = ShownPackets::new(self.device, flow, self.cx);
        let mut more = packets.may_receive();
        while more
            && (packets.shown.packets as usize) < bounds.packets
            && packets.taken < BUDGET as u64
        {
            let device = &mut *packets.device;
            let Some(tx) = &mut device.queues.rings.tx else {
                break;
            };
            let front = tx.front(HEADER_LEN, false);
            let front =
                front.and_then(|front| Some((open_front(&mut device.shard, &front)?, front)));
            let Some((arrival, FrontChain { body, token, .. })) = front else {
                // A packet of another kind, a chain of another form, or none.
                more = packets.show_popped(bounds, look);
                continue;
            };
            packets.taken += 1;
            if packets.shown.takes(&arrival, flow, bounds) {
                packets.shown.count(&arrival);
                packets.is_showing = true;
                more = look(Payload::in_place(&[body.part(0, arrival.len as usize)]));
                packets.is_showing = false;
                tx.complete_front(token, 0);
            } else {
                let chain = tx.pop_front(token);
                more = packets.hold(chain, arrival);
            }
        }
        packets.shown
    }

    /// Leases the next packet of a connection of the program: the first unread one, or if there is none, the
    /// next that has arrived of `flow`.
    #[inline]
    pub(crate) fn lease(
        &mut self,
        id: StreamId,
        flow: Option<FlowId>,
    ) -> Result<LeaseParts, NoLease> {
        // Updates whether replaced memory that leases keep mapped permits further leases in place.
        self.old_memory_fits();
        let arrived = flow.and_then(|flow| self.next(flow));
        let app = self.cx.shared.app.as_deref_mut().ok_or(NoLease::Empty)?;
        match arrived {
            Some(held) => app
                .sockets
                .lease_arrived(id, held, &mut self.device.store()),
            None => app.sockets.lease(id, &mut self.device.store()),
        }
    }

    /// Receives packets until one has bytes of `flow`, a stream that holds nothing, and returns it if
    /// its chain is short. Other packets are processed as usual.
    #[inline(always)] // as `Sockets::lease_arrived`
    fn next(&mut self, flow: FlowId) -> Option<HeldBuffer<HostToken>> {
        let mut packets = ShownPackets::new(self.device, flow, self.cx);
        let mut more = packets.may_receive();
        while more && packets.taken < BUDGET as u64 {
            let device = &mut *packets.device;
            let tx = device.queues.rings.tx.as_mut()?;
            let front = tx.front(HEADER_LEN, false);
            let front =
                front.and_then(|front| Some((open_front(&mut device.shard, &front)?, front.token)));
            let Some((arrival, token)) = front else {
                more = packets.show_popped(ShowBounds::HOLD, &mut |_| false);
                continue;
            };
            packets.taken += 1;
            let chain = tx.pop_front(token);
            if arrival.flow == flow && arrival.ends.is_none() {
                packets.delivered += u64::from(arrival.len);
                let app = packets.cx.shared.app.as_deref_mut()?;
                return device.hold_for_program(chain, arrival.len, MessageEnd::Nothing, None, app);
            }
            more = packets.hold(chain, arrival);
        }
        None
    }
}
