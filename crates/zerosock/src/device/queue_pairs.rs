//! Devices with several queue pairs (docs/queue-pairs.md), and the handoff of connections between
//! the pairs.
//!
//! # Invariants
//! - Bytes and ends of stream keep their order.
//! - A chain is completed in the ring that it came from.
//! - A connection that cannot be taken over is reset for both of its ends.
//!
//! # Structure
//! Each queue pair is a `Device` of its own with a shard, two queues and a worker; the address of
//! the first pair is the address of the whole device. The pairs share the memory and the
//! front-end, which the control thread manages.
//!
//! # Handoff
//! A connection leaves its pair after the driver has sent MOVE and all its chains have been
//! returned: held chains are copied out, chains lent to a sibling are recalled. It travels as a
//! [`Handoff`] message with its bridge and its state in the protocol core. The old pair answers
//! the driver after the new pair has taken over the connection.
//!
//! A sibling keeps sending to the old pair, which forwards its messages, until the new pair sends
//! it `Relocated`. The sibling then sends `Flushed` to the old pair and everything after that to
//! the new pair. The new pair parks messages that come directly until the forwarded `Flushed` has
//! arrived. So both ends may move at the same time.

use std::sync::Arc;

use zerosock_proto::vsock::{FlowId, QueuePairs};
use zerosock_proto::wire::vsock::{Op, Repr};

use super::forwarded::abort;
use super::sibling;
use super::state::bridge::{BridgePeer, SiblingPeer};
use super::state::timers::Timer;
use super::virtio::BRIDGE;
use super::{Context, Device};
use crate::device::state::app::QueueStore;
use crate::device::state::peer::Peer;
use crate::device::state::queue_pairs::{Forwarding, QueuePairSet};
use crate::device::state::sibling_message::{Handoff, SiblingMessage};
use zerosock_virtio::outbox::DeviceAddr;
use zerosock_virtio::poller::Interest;

/// Whether a connection can be handed off.
enum MoveState {
    Ready,
    /// A sibling was asked to return the connection's chains.
    AwaitsChains,
    /// The pair does not exist, a command is pending, the connection is not established, the
    /// program has loans on it, or its previous handoff is not complete.
    Refused,
}

impl Device {
    /// Makes this device queue pair `pair` of `all`.
    pub(crate) fn set_queue_pair(&mut self, pair: u16, all: Arc<[DeviceAddr]>) {
        self.queue_pairs = QueuePairSet::new(pair, self.addr, all);
        // The pair in the upper bits keeps epochs of different pairs apart.
        self.queues.epoch = u32::from(pair) << 24;
    }

    /// The addresses of all queue pairs of the device, by number.
    pub(crate) fn queue_pair_addrs(&self) -> &Arc<[DeviceAddr]> {
        &self.queue_pairs.all
    }

    /// The number of this queue pair.
    pub(crate) fn pair(&self) -> u16 {
        self.queue_pairs.pair
    }

    /// Announces lost connections to the driver. Only the first pair has the event queue.
    pub(super) fn announce_lost(&mut self, cx: &mut Context<'_>) {
        if self.queue_pairs.pair == 0 {
            self.announce_reset = true;
        } else {
            cx.outbox
                .send(self.queue_pairs.first(), SiblingMessage::Lost);
        }
    }

    /// Handles the driver's request (MOVE) to continue a connection at queue pair `pair`: starts
    /// the handoff, waits until a sibling has returned the connection's chains, or refuses.
    pub(super) fn handle_move_request(&mut self, flow: FlowId, pair: u32, cx: &mut Context<'_>) {
        match self.prepare_move(flow, pair, cx) {
            MoveState::Ready => self.request_handoff(flow, pair as u16, cx),
            // `handoff_if_returned` continues.
            MoveState::AwaitsChains => {}
            MoveState::Refused => self.refuse_move(flow),
        }
    }

    /// Passes on the bytes that came before MOVE and decides whether the connection can move.
    fn prepare_move(&mut self, flow: FlowId, pair: u32, cx: &mut Context<'_>) -> MoveState {
        if self.queues.is_command_pending() || self.queue_pairs.other(pair).is_none() {
            return MoveState::Refused;
        }
        let Some(key) = self.bridges.key_of(flow) else {
            return MoveState::Refused;
        };
        self.flush(key, cx);
        let Some(bridge) = self.bridges.get_mut(key) else {
            return MoveState::Refused;
        };
        match &mut bridge.peer {
            BridgePeer::Socket { .. } if bridge.open => MoveState::Ready,
            BridgePeer::App(end) if end.loans == 0 => MoveState::Ready,
            // Parked messages mean that the previous handoff is not complete.
            BridgePeer::Sibling(s) if bridge.open && !s.parked => {
                s.move_to = Some(pair as u16);
                if s.lent == 0 {
                    return MoveState::Ready;
                }
                recall_chains(s, cx);
                MoveState::AwaitsChains
            }
            _ => MoveState::Refused,
        }
    }

    /// Answers the driver that the connection stays at this queue pair.
    fn refuse_move(&mut self, flow: FlowId) {
        if let Some((_, bridge)) = self.bridges.of_flow(flow)
            && let BridgePeer::Sibling(s) = &mut bridge.peer
        {
            s.move_to = None;
        }
        // Fails if the flow has ended, and then there is nothing to refuse.
        let _ = self.shard.decline_move(flow, self.queue_pairs.pair);
    }

    /// Continues a requested handoff after the sibling has returned all chains.
    pub(super) fn handoff_if_returned(&mut self, key: u32, cx: &mut Context<'_>) {
        let Some(bridge) = self.bridges.get_mut(key) else {
            return;
        };
        if let BridgePeer::Sibling(s) = &mut bridge.peer
            && s.lent == 0
            && let Some(pair) = s.move_to
            && let Some(flow) = bridge.flow
        {
            self.request_handoff(flow, pair, cx);
        }
    }

    /// Asks the worker to hand the connection off: see [`extract`](Self::extract).
    fn request_handoff(&mut self, flow: FlowId, pair: u16, cx: &mut Context<'_>) {
        cx.outbox
            .send(self.addr, SiblingMessage::HandOff { to: flow, pair });
    }

    /// Removes a connection from this device for queue pair `pair`. Returns the address of that
    /// pair and the connection; `None` if it has ended, the move was refused, or chains that a
    /// sibling still has were recalled.
    pub(crate) fn extract(
        &mut self,
        flow: FlowId,
        pair: u16,
        cx: &mut Context<'_>,
    ) -> Option<(DeviceAddr, Box<Handoff>)> {
        let key = self.bridges.key_of(flow)?;
        let queue_pair = self.queue_pairs.other(u32::from(pair));
        // A driver that reboots stops all queues before it starts one. No connection may leave
        // after that: the next driver would not know it.
        let runs = !self.queues.is_command_pending() && self.queues.rings.tx.is_some();
        let Some(queue_pair) = queue_pair.filter(|_| runs) else {
            self.refuse_move(flow);
            return None;
        };
        if !self.flush_coalesced(flow, cx) || !self.shard.can_extract(flow) {
            // A partly sent message, coalesced writes without buffers, or a close in progress.
            self.refuse_move(flow);
            return None;
        }
        let bridge = self.bridges.get_mut(key)?;
        if bridge.has_sends_in_flight() {
            self.refuse_move(flow);
            return None;
        }
        if let BridgePeer::Sibling(s) = &mut bridge.peer {
            if s.lent > 0 {
                // The guest has sent more bytes after MOVE.
                s.move_to = Some(pair);
                recall_chains(s, cx);
                return None;
            }
            s.move_to = None;
        }
        // No chain of this ring is lent any more; held chains are copied out here.
        self.spill(key, 0, cx);
        if let Some(BridgePeer::App(end)) = self.bridges.get(key).map(|bridge| &bridge.peer)
            && let Some(app) = cx.shared.app.as_deref_mut()
        {
            app.sockets.leave_pool(end.id, &mut self.store());
        }
        let (snapshot, answer) = match self.shard.extract(flow, pair) {
            Ok((snapshot, Some(answer))) => (snapshot, answer),
            // `can_extract` was true and nothing ran in between.
            _ => {
                self.refuse_move(flow);
                return None;
            }
        };
        let mut bridge = self.bridges.remove(key)?;
        bridge.hold_timer = false;
        bridge.held_since = None;
        bridge.flow = None;
        if let Some(idle) = bridge.forwarded.as_ref().and_then(|it| it.idle) {
            self.timers.cancel(idle.next, Timer::Idle(key));
        }
        self.queue_pairs.unconfirmed.insert(flow);
        match &bridge.peer {
            BridgePeer::Socket { socket, .. } => cx.poller.remove(socket),
            BridgePeer::Sibling(_) => {
                self.queue_pairs
                    .forwarding
                    .insert(flow, Forwarding::InTransit(Vec::new()));
            }
            _ => {}
        }
        let old = Peer::new(self.addr, flow);
        let handoff = Handoff {
            snapshot,
            bridge,
            old,
            answer,
        };
        Some((queue_pair, Box::new(handoff)))
    }

    /// Adopts a connection that another queue pair has handed off; notifies that pair and the
    /// sibling. A connection that cannot be taken over is reset.
    pub(crate) fn take_over(&mut self, handoff: Handoff, cx: &mut Context<'_>) {
        // The queues need not run: a paused pair continues with the connection later.
        if self.queues.memory.is_none() || self.queues.is_resetting() {
            return handoff.abandon(cx);
        }
        let Handoff {
            snapshot,
            mut bridge,
            old,
            answer,
        } = handoff;
        let flow = match self.shard.insert(snapshot) {
            Ok(flow) => flow,
            Err(snapshot) => {
                let handoff = Handoff {
                    snapshot,
                    bridge,
                    old,
                    answer,
                };
                return handoff.abandon(cx);
            }
        };
        bridge.flow = Some(flow);
        let key = self.bridges.insert(bridge);
        let now = Peer::new(self.addr, flow);
        let token = self.token(BRIDGE, key);
        let Some(bridge) = self.bridges.get_mut(key) else {
            return;
        };
        // Events may have been missed during the handoff: poll both directions.
        bridge.readable = true;
        bridge.writable = true;
        match &mut bridge.peer {
            BridgePeer::Socket { socket, .. } => {
                if let Err(error) = cx.poller.add(&*socket, token, Interest::All) {
                    self.warn(&format!(
                        "cannot add a host program's socket to the poller: {error}"
                    ));
                    self.reset_bridge(key, cx);
                }
            }
            BridgePeer::Sibling(s) => {
                s.parked = true;
                self.queue_pairs.parked.insert(flow, Vec::new());
                let Peer { device, flow: to } = s.peer;
                let relocated = SiblingMessage::Relocated { to, from: now, old };
                cx.outbox.send(device, relocated);
            }
            BridgePeer::App(end) => {
                let id = end.id;
                if let Some(app) = cx.shared.app.as_deref_mut() {
                    let pool = self.app_pool(app);
                    app.sockets.enter_pool(id, pool, flow);
                }
                Self::app_writable(id, cx);
            }
            _ => {}
        }
        let arrived = SiblingMessage::Arrived {
            to: old.flow,
            now: Some(now),
            answer,
        };
        cx.outbox.send(old.device, arrived);
        self.resume_idle(key, cx);
        self.bridges.enqueue(key);
        self.flush(key, cx);
    }

    /// Completes a handoff at the old pair: `now` is the new address, or `None` if the connection
    /// could not be taken over. Answers the driver's MOVE.
    fn complete_handoff(
        &mut self,
        flow: FlowId,
        now: Option<Peer>,
        answer: Repr,
        cx: &mut Context<'_>,
    ) {
        if !self.queue_pairs.unconfirmed.remove(&flow) {
            // The driver has gone, and the next one does not know the connection. The new pair
            // may have processed the reset before the connection arrived.
            if let Some(now) = now {
                let to = now.flow;
                cx.outbox.send(now.device, SiblingMessage::Orphaned { to });
            }
            return;
        }
        match now {
            Some(now) => {
                if let Some(target) = self.queue_pairs.forwarding.get_mut(&flow) {
                    let earlier = std::mem::replace(target, Forwarding::To(now));
                    if let Forwarding::InTransit(messages) = earlier {
                        for message in messages {
                            self.forward_message(flow, message, cx);
                        }
                    }
                }
                self.shard.send_moved(answer);
            }
            None => {
                if let Some(Forwarding::InTransit(messages)) =
                    self.queue_pairs.forwarding.remove(&flow)
                {
                    messages
                        .into_iter()
                        .for_each(|message| send_undeliverable(message, cx));
                }
                self.shard.send_moved(Repr {
                    op: Op::Rst.into(),
                    flags: 0,
                    buf_alloc: 0,
                    fwd_cnt: 0,
                    ..answer
                });
            }
        }
    }

    /// Handles messages about handoffs and messages for connections in transit. Returns any other
    /// message.
    pub(super) fn route_message(
        &mut self,
        message: SiblingMessage,
        cx: &mut Context<'_>,
    ) -> Option<SiblingMessage> {
        match message {
            SiblingMessage::Arrived { to, now, answer } => {
                self.complete_handoff(to, now, answer, cx)
            }
            SiblingMessage::Orphaned { to } => self.end_orphan(to, cx),
            SiblingMessage::Lost => self.announce_reset = true,
            SiblingMessage::SentOn(message) => match *message {
                SiblingMessage::Flushed { to } => self.process_parked(to, cx),
                message => return Some(message),
            },
            message
                if self.queue_pairs.forwarding.is_empty() && self.queue_pairs.parked.is_empty() =>
            {
                return Some(message);
            }
            mut message => {
                let Some(&mut to) = message.to_mut() else {
                    return Some(message);
                };
                if self.queue_pairs.forwarding.contains_key(&to) {
                    self.forward_message(to, message, cx);
                } else if let Some(parked) = self.queue_pairs.parked.get_mut(&to) {
                    parked.push(message);
                } else {
                    return Some(message);
                }
            }
        }
        None
    }

    /// Forwards a sibling's message for a connection that was handed off.
    fn forward_message(&mut self, flow: FlowId, mut message: SiblingMessage, cx: &mut Context<'_>) {
        let now = match self.queue_pairs.forwarding.get_mut(&flow) {
            Some(Forwarding::To(now)) => *now,
            Some(Forwarding::InTransit(messages)) => return messages.push(message),
            None => return,
        };
        if let SiblingMessage::Flushed { .. } = message {
            // The sibling sends nothing more to this pair.
            self.queue_pairs.forwarding.remove(&flow);
        }
        if let Some(to) = message.to_mut() {
            *to = now.flow;
        }
        cx.outbox
            .send(now.device, SiblingMessage::SentOn(Box::new(message)));
    }

    /// Processes the parked messages: everything that the sibling sent to the old pair is here.
    fn process_parked(&mut self, flow: FlowId, cx: &mut Context<'_>) {
        if let Some((_, bridge)) = self.bridges.of_flow(flow)
            && let BridgePeer::Sibling(s) = &mut bridge.peer
        {
            s.parked = false;
            let parked = self.queue_pairs.parked.remove(&flow);
            for message in parked.into_iter().flatten() {
                self.handle_sibling_message(message, cx);
            }
        }
    }

    /// Records the new address of a sibling's connection.
    pub(super) fn handle_relocated(
        &mut self,
        to: FlowId,
        from: Peer,
        old: Peer,
        cx: &mut Context<'_>,
    ) {
        if let Some((_, bridge)) = self.bridges.of_flow(to)
            && let BridgePeer::Sibling(s) = &mut bridge.peer
        {
            s.peer = from;
        }
        let to = old.flow;
        cx.outbox.send(old.device, SiblingMessage::Flushed { to });
    }

    /// Returns what parked messages carry: the connection ended while they were parked.
    pub(super) fn abandon_parked(&mut self, flow: FlowId, cx: &mut Context<'_>) {
        let parked = self.queue_pairs.parked.remove(&flow);
        for message in parked.into_iter().flatten() {
            send_undeliverable(message, cx);
        }
    }

    /// Ends a connection that was taken over: its driver went away during the handoff.
    fn end_orphan(&mut self, flow: FlowId, cx: &mut Context<'_>) {
        let Some(key) = self.bridges.key_of(flow) else {
            return;
        };
        // Without an RST: the current driver does not know the connection, and an RST could only
        // hit one of its own.
        let _ = self.shard.forget(cx.now, flow);
        if !self.linger(key, cx) {
            self.remove_without_guest(key, cx);
        }
    }

    /// Forgets at most `most` connections that were handed off: their driver has gone. Returns true if none
    /// is left.
    pub(super) fn forget_handed_off(&mut self, most: usize, cx: &mut Context<'_>) -> bool {
        let forwarding = &mut self.queue_pairs.forwarding;
        for (_, target) in forwarding.extract_if(|_, _| true).take(most) {
            match target {
                Forwarding::InTransit(messages) => messages
                    .into_iter()
                    .for_each(|message| send_undeliverable(message, cx)),
                // Messages that siblings send here from now on are dropped, so the new pair must
                // not wait for them.
                Forwarding::To(now) => {
                    let to = now.flow;
                    cx.outbox.send(now.device, SiblingMessage::Orphaned { to });
                }
            }
        }
        let is_last = self.queue_pairs.forwarding.is_empty();
        if is_last {
            self.queue_pairs.unconfirmed.clear();
        }
        is_last
    }

    /// Resets the number of pairs in use; the next driver sets it again.
    pub(super) fn reset_used_pairs(&mut self) {
        self.queue_pairs.used = QueuePairs::ONE;
    }
}

impl Handoff {
    /// Resets the connection for both ends and returns lent chains: no pair can take it over.
    pub(crate) fn abandon(self, cx: &mut Context<'_>) {
        let Handoff {
            snapshot,
            mut bridge,
            old,
            answer,
        } = self;
        drop(snapshot);
        if let BridgePeer::Sibling(s) = &mut bridge.peer {
            sibling::return_inbound(s, false, cx);
        }
        sibling::send_end(&bridge, false, cx);
        abort(&bridge);
        if let Some(forwarded) = &mut bridge.forwarded {
            forwarded.set_reason("moved to a queue pair that has stopped");
            forwarded.finish();
        }
        // Held chains belonged to the old pair, which completed them before the handoff.
        Device::app_ended_in(&mut QueueStore::default(), &bridge, false, cx);
        cx.shared.counters.conns_removed.add(1);
        let arrived = SiblingMessage::Arrived {
            to: old.flow,
            now: None,
            answer,
        };
        cx.outbox.send(old.device, arrived);
    }
}

/// Asks a sibling to return the chains of a connection.
fn recall_chains(sibling: &SiblingPeer, cx: &mut Context<'_>) {
    let Peer { device, flow: to } = sibling.peer;
    cx.outbox.send(device, SiblingMessage::Recall { to });
}

/// Answers a message for a connection that no longer exists.
fn send_undeliverable(message: SiblingMessage, cx: &mut Context<'_>) {
    if let Some((device, answer)) = message.undeliverable() {
        cx.outbox.send(device, answer);
    }
}
