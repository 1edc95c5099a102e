//! The vsock device as a device of a worker ([`WorkerDevice`]) and a virtio device
//! ([`VirtioDevice`]): its handling of events and messages, its turn, and its part in the commands
//! of the VMM, which [`zerosock_virtio::command`] carries out.
//!
//! # Invariants
//! - A command that needs buffers back waits until siblings have returned their chains, no loan is
//!   being written to, no lease is under a read guard, and no zero-copy send is in flight.
//! - Bytes that the guest sent before its front-end disconnected are delivered.

use std::io;
use std::sync::Arc;
use zerosock_proto::Instant;
use zerosock_proto::vsock::features::{F_PAIRS, F_SEQPACKET};
use zerosock_ring::Memory;
use zerosock_vhost_user::{DeviceCommand, Reply};
use zerosock_virtio::command::{self, QueueStarted, VirtioDevice};
use zerosock_virtio::deadline::earlier;
use zerosock_virtio::device::{Event, Message, WorkerDevice};
use zerosock_virtio::outbox::{DeviceAddr, Outbox};
use zerosock_virtio::poller::EventKind;
use zerosock_virtio::queues::{QueueSet, Quiesced, Rings, Scope};
use zerosock_virtio::ring::Ring;

use super::events::{GONE, RESET};
use super::model::used_pairs;
use super::state::bridge::{Bridge, BridgePeer};
use super::state::guests::Pause;
use super::{Context, Device, EVENT, RX, Shared, TX, VsockRings};
use crate::device::state::sibling_message::SiblingMessage;

/// A listening socket on the host.
pub(super) const LISTENER: EventKind = EventKind::new(1);
/// The socket of a host program that has connected and not sent its complete CONNECT line.
pub(super) const HANDSHAKE: EventKind = EventKind::new(2);
/// The host socket of a bridge.
pub(super) const BRIDGE: EventKind = EventKind::new(3);
/// The socket of an association.
pub(super) const ASSOCIATION: EventKind = EventKind::new(4);
/// A guest endpoint is to be notified. The key is that of the bridge of its doorbell.
pub(super) const GUEST_CALL: EventKind = EventKind::new(5);

impl Rings for VsockRings {
    fn slot(&mut self, index: u16) -> Option<&mut Option<Ring>> {
        match index {
            RX => Some(&mut self.rx),
            TX => Some(&mut self.tx),
            EVENT => Some(&mut self.event),
            _ => None,
        }
    }

    fn slots(&mut self) -> impl Iterator<Item = &mut Option<Ring>> {
        [&mut self.rx, &mut self.tx, &mut self.event].into_iter()
    }
}

impl Message for SiblingMessage {
    fn copied_bytes(&self) -> usize {
        match self {
            SiblingMessage::Datagram(datagram) => datagram.header.len as usize,
            _ => 0,
        }
    }
}

impl WorkerDevice for Device {
    type Shared = Shared;
    type Message = SiblingMessage;

    fn addr(&self) -> DeviceAddr {
        self.addr
    }

    fn start(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        self.begin_succession(cx);
        self.bridges_with(cx).listen().inspect_err(|error| {
            let cid = self.cid;
            tracing::error!(%cid, %error, "host programs cannot reach a device");
        })
    }

    fn begin_call(&mut self, shared: &Shared) {
        // A program that embeds the device also works on it outside these calls, and has counters of its own.
        if shared.app.is_none() {
            self.traffic.begin(&shared.counters);
        }
    }

    fn end_call(&mut self, shared: &Shared) {
        if shared.app.is_none() {
            self.traffic.end(&shared.counters);
        }
    }

    fn on_event(&mut self, event: Event, cx: &mut Context<'_>) {
        if self.has_lost_memory() && event.kind == BRIDGE {
            // Its socket must not get bytes of the lost memory.
            return;
        }
        match event.kind {
            EventKind::KICK => cx.shared.counters.kicks.add(1),
            LISTENER => self.bridges_with(cx).accept(event.key),
            HANDSHAKE => self
                .bridges_with(cx)
                .handshake_ready(event.key, event.readiness),
            BRIDGE => self
                .bridges_with(cx)
                .bridge_ready(event.key, event.readiness),
            ASSOCIATION => self
                .datagrams_with(cx)
                .association_ready(event.key, event.readiness),
            GUEST_CALL => self.bridges_with(cx).ring_doorbell(event.key),
            _ => {}
        }
    }

    fn on_message(&mut self, message: SiblingMessage, cx: &mut Context<'_>) {
        self.bridges_with(cx).handle_sibling_message(message);
    }

    fn undeliverable(message: SiblingMessage, outbox: &mut Outbox<SiblingMessage>) {
        if let Some((to, answer)) = message.undeliverable() {
            outbox.send(to, answer);
        }
    }

    fn command(&mut self, command: DeviceCommand, reply: Reply, cx: &mut Context<'_>) {
        command::command(self, command, reply, cx);
    }

    fn turn(&mut self, cx: &mut Context<'_>) -> bool {
        self.moved = 0;
        if self.queues.is_resetting() {
            self.teardown_turn(cx);
            return true;
        }
        self.fire_timers(cx);
        let mut more = self.receive(cx);
        self.moved = 0;
        more |= self.transmit(cx);
        // The packets received may have freed buffers or produced answers.
        self.drain_events(cx);
        self.send_reset_event();
        // A driver of datagrams waits for its buffers, and a program must not wait for anything.
        let delays = cx.shared.app.is_none()
            && !self.datagrams.negotiated
            && !self.queues.is_command_pending();
        let VsockRings { rx, tx, event } = &mut self.queues.rings;
        for (ring, late) in [(rx, false), (tx, delays), (event, false)] {
            let Some(ring) = ring else { continue };
            let notified = match late {
                true => ring.publish_late(cx.now, cx.notifier),
                false => ring.publish(cx.notifier),
            };
            if let Some(app) = cx.shared.app.as_deref_mut() {
                app.tally.notifications += u64::from(notified);
            }
            cx.shared
                .counters
                .bad_chains
                .add(std::mem::take(&mut ring.malformed));
        }
        self.shard.handle_published();
        more |= self.reset_on_broken_ring(cx);
        command::finish(self, cx);
        if self.queues.is_memory_lost() && !self.has_lost_memory() {
            self.fail("guest memory vanished under the device", cx);
        }
        self.publish_gauges(cx);
        if self.queues.is_resetting() {
            return true;
        }
        // The embedding program requests kicks itself before it sleeps.
        more || (cx.shared.app.is_none() && !cx.spins && self.rearm(false))
            || self.has_work_for_guest()
    }

    fn next_timeout(&self) -> Option<Instant> {
        let streams = earlier(self.timers.next(), self.shard.poll_timeout());
        let queues = self.queues.next_timeout();
        let tx = self.queues.rings.tx.as_ref();
        let queues = earlier(queues, tx.and_then(Ring::publish_at));
        earlier(earlier(streams, queues), self.datagrams.next_timeout())
    }

    fn has_available_chains(&mut self) -> bool {
        let (takes, starved) = (!self.receive_blocked(), self.starved);
        let VsockRings { rx, tx, .. } = &mut self.queues.rings;
        let mut rings = [(tx, takes), (rx, starved)].into_iter();
        rings.any(|(ring, wanted)| {
            let ring = ring.as_mut().filter(|ring| wanted && ring.live());
            ring.is_some_and(|ring| ring.queue.available() > 0)
        })
    }

    fn enable_kicks(&mut self) -> bool {
        self.rearm(false)
    }

    /// Ends the remaining bridges, most of which linger, notifies siblings and returns their
    /// chains. Memory of this guest that siblings are reading stays mapped until they have read it.
    fn retire(&mut self, cx: &mut Context<'_>) {
        for key in self.bridges.keys() {
            self.bridges_with(cx).end_bridge(key);
        }
        for flow in self.app.flows.all() {
            self.half(cx).end_app(flow, false, GONE);
        }
        self.stop_listening(cx);
        self.detach_guests(cx);
        self.queues.link = None;
        command::disconnect(self, cx);
        while self.queues.is_resetting() {
            command::finish(self, cx);
        }
        self.half(cx).retire();
        // The device no longer counts in the worker's totals.
        let before = std::mem::take(&mut self.counted);
        cx.shared.counters.replace_gauges(before, self.counted);
    }

    fn end(&mut self, cx: &mut Context<'_>) {
        for key in self.bridges.keys() {
            self.bridges_with(cx).reset_bridge(key);
        }
        for flow in self.app.flows.all() {
            self.half(cx).reset_app(flow);
        }
        self.datagrams_with(cx).end_associations(RESET, usize::MAX);
        self.turn(cx);
        // Also what the turn has put off: the next daemon would see these packets again.
        for ring in self.queues.rings.running() {
            ring.publish(cx.notifier);
        }
    }
}

impl VirtioDevice for Device {
    type Rings = VsockRings;

    fn queues(&mut self) -> &mut QueueSet<VsockRings> {
        &mut self.queues
    }

    fn set_features(&mut self, features: u64) {
        let pair = (features & F_PAIRS != 0).then_some(self.queue_pairs.pair);
        self.shard.set_declines_moves(pair);
        self.shard.set_seqpacket(features & F_SEQPACKET != 0);
        // Only the first queue pair carries datagrams.
        let first = self.queue_pairs.pair == 0;
        self.datagrams
            .set_features(if first { features } else { 0 });
    }

    fn set_config(&mut self, config: &[u8]) {
        self.queue_pairs.used = used_pairs(config);
    }

    fn queue_started(&mut self, index: u16, started: QueueStarted, cx: &mut Context<'_>) {
        if index == TX {
            self.half(cx).started();
        }
        self.end_stop(index, cx);
        if started.resumed && !self.succession.is_continued {
            // The driver has connections that this device does not know.
            self.announce_lost(cx);
        }
        self.guests_queue_started(index, started, cx);
    }

    fn release(&mut self, scope: Scope, cx: &mut Context<'_>) {
        if let Scope::Queue(RX | TX) = scope {
            self.begin_stop(cx);
        }
        match scope {
            Scope::Queue(TX) | Scope::Memory => {
                self.release_chains(cx);
                self.bridges_with(cx).limit_sends();
            }
            Scope::Reset => self.bridges_with(cx).limit_sends(),
            Scope::Queue(_) => {}
        }
        self.stop_guests(scope, cx);
    }

    fn quiesce(&mut self, scope: Scope, cx: &mut Context<'_>) -> Quiesced {
        if let Some(guests) = &self.guests
            && guests.quiesced() != Quiesced::Done
        {
            return guests.quiesced();
        }
        let (chains, leases, loans) = match scope {
            Scope::Queue(TX) => (true, true, false),
            Scope::Queue(RX) => (false, false, true),
            Scope::Queue(_) => (false, false, false),
            Scope::Reset => (false, true, true),
            Scope::Memory => (true, true, true),
        };
        let mut returned = !loans || self.half(cx).recall_loans(false);
        returned &= !leases || self.half(cx).recall(false);
        if !returned {
            // No event reports that the program no longer uses a buffer.
            let reason = "the embedding program kept a guest buffer in use for too long";
            return Quiesced::Unknown(reason);
        }
        let tx = self.queues.rings.tx.as_ref();
        let sends = scope == Scope::Reset && self.bridges.have_sends_in_flight();
        match sends || chains && tx.is_some_and(|tx| tx.queue.outstanding() > 0) {
            true => Quiesced::Waits,
            false => Quiesced::Done,
        }
    }

    fn command_finished(&mut self) {
        self.sends_end_by = None;
        // While the command was pending, the program was not notified of new buffers: search again.
        self.starved |= self.queues.rings.rx.is_some() && self.program_waits();
    }

    fn reset_part(&mut self, stopped: bool, cx: &mut Context<'_>) -> bool {
        self.end_guests(cx) && self.forget_connections(stopped, cx)
    }

    fn reset(&mut self, stopped: bool, cx: &mut Context<'_>) {
        self.end_teardown(cx);
        // The driver knows none of the connections that have ended.
        self.shard.handle_published();
        self.cancel_stop();
        self.stop.has_ended = false;
        if let Some(guests) = &mut self.guests {
            guests.pause = Pause::default();
        }
        if stopped {
            self.reset_used_pairs();
            self.announce_reset = false;
            self.starved = false;
        }
    }

    fn forgotten(&mut self) {
        self.stop.has_ended = true;
    }

    fn receive_remaining(&mut self, cx: &mut Context<'_>) {
        if self.has_lost_memory() {
            return;
        }
        let taken = |device: &Device| device.queues.rings.tx.as_ref().map_or(0, |tx| tx.taken);
        let tx = self.queues.rings.tx.as_ref();
        let size = tx.map_or(0, |tx| tx.queue.size());
        let start = taken(self);
        loop {
            // Copies out what the program has not read: that frees room for more packets.
            self.half(cx).recall(false);
            let before = taken(self);
            self.moved = 0;
            self.receive(cx);
            let after = taken(self);
            if after == before || after.wrapping_sub(start) >= u32::from(size) {
                return;
            }
        }
    }

    fn memory_replaced(&mut self, old: Option<Arc<Memory>>, cx: &mut Context<'_>) {
        self.half(cx).track_old_memory(old);
        self.guests_memory_replaced(cx);
    }
}

impl Device {
    /// Copies out held chains and recalls those lent to siblings.
    pub(super) fn release_chains(&mut self, cx: &mut Context<'_>) {
        // Leases under a read guard are recalled by `quiesce`.
        self.half(cx).recall(false);
        let holds = |bridge: &Bridge| {
            let lent = matches!(&bridge.peer, BridgePeer::Sibling(s) if s.lent > 0);
            lent || !bridge.is_delivered()
        };
        for key in self.bridges.keys_where(holds) {
            self.bridges_with(cx).spill(key, 0);
            self.bridges_with(cx).update_bridge(key);
            if let Some(bridge) = self.bridges.get(key)
                && let BridgePeer::Sibling(s) = &bridge.peer
                && s.lent > 0
            {
                cx.outbox
                    .send(s.peer.device, SiblingMessage::Recall { to: s.peer.flow });
            }
        }
    }
}
