//! The device as one of several queue pairs (docs/queue-pairs.md), and connections that go from one
//! to another.
//!
//! A device with several pairs is several `Device`s, its queue_pairs, each with a shard, two queues and a
//! worker of its own; the first is the one that others know by address. What they share is the
//! memory and the front-end, which the control thread sees to.
//!
//! A connection leaves when its driver has asked and no chain of it is out any more: what is held
//! is copied, what a sibling has is called back. It goes as a message, with its bridge and the
//! protocol core's half; only when the other queue_pair has it, its driver is told, at the pair that it
//! has left.
//!
//! # The sibling's side
//! A sibling sends to the queue_pair that it knows. What comes to the old one is sent on from there. The
//! sibling is told of the new one by the new one, says to the old one that nothing more will come,
//! and from then on sends to the new one: which leaves that alone until the last of what was sent
//! on has come. So both may be moved at once.
//!
//! What must hold: bytes and ends keep their order; a chain goes back to the ring that it is of; a
//! connection that finds no place is ended for everybody.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use zerosock_proto::vsock::{FlowId, FlowSnapshot, QueuePairs};
use zerosock_proto::wire::vsock::{Op, Repr};

use super::app_store::QueueStore;
use super::bridge::{Bridge, BridgePeer};
use super::sibling;
use super::{Context, Device};
use crate::device::sibling_message::{Message, Peer};
use crate::io::poller::Source;
use crate::routing::DeviceAddr;

/// Which of its device's queue_pairs this is.
#[derive(Debug)]
pub(crate) struct QueuePairSet {
    /// The number of its pair.
    pub(super) pair: u16,
    own: DeviceAddr,
    /// All of them.
    all: Arc<[DeviceAddr]>,
    /// How many the driver uses.
    pub(super) used: QueuePairs,
    /// Connections that have left and have not arrived, as far as is known.
    departed: HashSet<FlowId>,
    /// Connections that have left, to which siblings may still send here.
    left: HashMap<FlowId, Left>,
    /// Connections that have come and wait for the last of what their siblings had sent elsewhere.
    parking: usize,
}

/// Where a connection went.
#[derive(Debug)]
enum Left {
    /// It has not arrived: what is to be sent on.
    OnItsWay(Vec<Message>),
    There(Peer),
}

/// A connection between two queue_pairs.
#[derive(Debug)]
pub(crate) struct Handoff {
    snapshot: FlowSnapshot,
    bridge: Bridge,
    /// Who it was.
    old: Peer,
    /// What its driver is told at the old pair when it has arrived.
    answer: Repr,
}

/// What a sibling sends to a connection that has arrived, before the last of what it had sent to
/// where that was.
#[derive(Debug)]
pub(crate) struct Parked {
    messages: Vec<Message>,
}

impl QueuePairSet {
    /// The only queue_pair, or the first of those that there will be.
    pub(super) fn one(addr: DeviceAddr) -> QueuePairSet {
        QueuePairSet::new(0, addr, Arc::new([addr]))
    }

    fn new(pair: u16, own: DeviceAddr, all: Arc<[DeviceAddr]>) -> QueuePairSet {
        QueuePairSet {
            pair,
            own,
            all,
            used: QueuePairs::ONE,
            departed: HashSet::new(),
            left: HashMap::new(),
            parking: 0,
        }
    }

    /// Whether no connection is on its way, as far as this queue_pair has to do with it.
    #[cfg(test)]
    pub(super) fn is_at_rest(&self) -> bool {
        self.departed.is_empty() && self.left.is_empty() && self.parking == 0
    }

    /// The one that others know the device by.
    pub(super) fn first(&self) -> DeviceAddr {
        self.all.first().copied().unwrap_or(self.own)
    }

    /// The queue_pair of pair `pair`, if the driver uses it and it is another one.
    pub(super) fn other(&self, pair: u32) -> Option<DeviceAddr> {
        let other = pair < u32::from(self.used.get()) && pair != u32::from(self.pair);
        self.all.get(pair as usize).copied().filter(|_| other)
    }
}

impl Device {
    /// Makes it the queue_pair of pair `pair` among `all`.
    pub(crate) fn set_lane(&mut self, pair: u16, all: Arc<[DeviceAddr]>) {
        self.queue_pairs = QueuePairSet::new(pair, self.addr, all);
        // A chain names the start of a queue that it is of, and no two queue_pairs have one in common.
        self.epoch = u32::from(pair) << 24;
    }

    /// The queue_pairs of its device, it among them, in the order of their pairs.
    pub(crate) fn all_lanes(&self) -> &Arc<[DeviceAddr]> {
        &self.queue_pairs.all
    }

    /// The number of its queue pair.
    pub(crate) fn pair(&self) -> u16 {
        self.queue_pairs.pair
    }

    /// The driver knows connections that we do not: the first queue_pair tells it, as it has the events.
    pub(super) fn announce_lost(&mut self, cx: &mut Context<'_>) {
        if self.queue_pairs.pair == 0 {
            self.announce_reset = true;
        } else {
            cx.outbox.send(self.queue_pairs.first(), Message::Lost);
        }
    }

    /// The driver wants a connection to go on at pair `pair`.
    pub(super) fn handle_move_request(&mut self, flow: FlowId, pair: u32, cx: &mut Context<'_>) {
        let key = self.key_of(flow).filter(|_| self.waiting.is_none());
        let queue_pair = self.queue_pairs.other(pair);
        let (Some(key), Some(_)) = (key, queue_pair) else {
            return self.stay(flow);
        };
        self.flush(key, cx);
        let Some(bridge) = self.bridges.get_mut(key as usize) else {
            return self.stay(flow);
        };
        match &mut bridge.end {
            BridgePeer::Socket { .. } if bridge.open => self.hand_off(flow, pair as u16, cx),
            BridgePeer::App(end) if end.loans == 0 => self.hand_off(flow, pair as u16, cx),
            // Where it came from last, something may be on its way still.
            BridgePeer::Sibling(s) if bridge.open && s.parked.is_none() => {
                s.move_to = Some(pair as u16);
                if s.out > 0 {
                    let (device, to) = (s.peer.device, s.peer.flow);
                    cx.outbox.send(device, Message::Recall { to });
                } else {
                    self.hand_off(flow, pair as u16, cx);
                }
            }
            _ => self.stay(flow),
        }
    }

    fn stay(&mut self, flow: FlowId) {
        if let Some(key) = self.key_of(flow)
            && let Some(bridge) = self.bridges.get_mut(key as usize)
            && let BridgePeer::Sibling(s) = &mut bridge.end
        {
            s.move_to = None;
        }
        // One that has ended meanwhile stays nowhere.
        let _ = self.shard.decline_move(flow, self.queue_pairs.pair);
    }

    /// The chains that a sibling had are back: a connection that waited for that goes.
    pub(super) fn chains_are_back(&mut self, key: u32, cx: &mut Context<'_>) {
        let Some(bridge) = self.bridges.get_mut(key as usize) else {
            return;
        };
        if let BridgePeer::Sibling(s) = &mut bridge.end
            && s.out == 0
            && let Some(pair) = s.move_to
            && let Some(flow) = bridge.flow
        {
            self.hand_off(flow, pair, cx);
        }
    }

    /// The worker is to take the connection to the other queue_pair.
    fn hand_off(&mut self, flow: FlowId, pair: u16, cx: &mut Context<'_>) {
        cx.outbox
            .send(self.addr, Message::HandOff { to: flow, pair });
    }

    /// Takes a connection out for another queue_pair, and says for which. `None`: it stays, or has ended.
    pub(crate) fn extract(
        &mut self,
        flow: FlowId,
        pair: u16,
        cx: &mut Context<'_>,
    ) -> Option<(DeviceAddr, Box<Handoff>)> {
        let key = self.key_of(flow)?;
        let queue_pair = self.queue_pairs.other(u32::from(pair));
        // A driver that reboots has stopped all queues before it starts one: from then on nothing
        // leaves that the next one does not know.
        let runs = self.waiting.is_none() && self.tx.is_some();
        let Some(queue_pair) = queue_pair.filter(|_| runs) else {
            self.stay(flow);
            return None;
        };
        if !self.hurry(flow, cx) || !self.shard.can_extract(flow) {
            // Half a message is out, or small writes that find no room, or it is being closed.
            self.stay(flow);
            return None;
        }
        if let Some(BridgePeer::Sibling(s)) = self
            .bridges
            .get_mut(key as usize)
            .map(|bridge| &mut bridge.end)
        {
            if s.out > 0 {
                // Its guest has sent behind MOVE.
                s.move_to = Some(pair);
                let (device, to) = (s.peer.device, s.peer.flow);
                cx.outbox.send(device, Message::Recall { to });
                return None;
            }
            s.move_to = None;
        }
        // Lent chains are back, and what is held is copied: none of it is of this ring any more.
        self.spill(key, 0, cx);
        if let Some(BridgePeer::App(end)) = self.bridges.get(key as usize).map(|bridge| &bridge.end)
            && let Some(app) = cx.app.as_deref_mut()
        {
            app.sockets.leave_pool(end.id, &mut self.store());
        }
        let (snapshot, answer) = match self.shard.extract(flow, pair) {
            Ok((snapshot, Some(answer))) => (snapshot, answer),
            // It may leave, and nothing has happened since.
            _ => {
                self.stay(flow);
                return None;
            }
        };
        let mut bridge = self.bridges.try_remove(key as usize)?;
        self.by_flow[flow.index()] = u32::MAX;
        if std::mem::take(&mut bridge.in_ready) {
            self.forget_ready();
        }
        bridge.in_dirty = false;
        bridge.hold_timer = false;
        bridge.held_since = None;
        bridge.flow = None;
        let counted = std::mem::take(&mut bridge.counted);
        self.stalled_chains -= counted.0 as usize;
        self.overflow_bytes -= counted.1 as usize;
        self.queue_pairs.departed.insert(flow);
        match &bridge.end {
            BridgePeer::Socket { socket, .. } => cx.poller.remove(socket),
            BridgePeer::Sibling(_) => {
                self.queue_pairs
                    .left
                    .insert(flow, Left::OnItsWay(Vec::new()));
            }
            _ => {}
        }
        let old = Peer {
            device: self.addr,
            flow,
        };
        let handoff = Handoff {
            snapshot,
            bridge,
            old,
            answer,
        };
        Some((queue_pair, Box::new(handoff)))
    }

    /// Takes a connection in. The queue_pair that it comes from is told, and a sibling.
    pub(crate) fn unpack(&mut self, handoff: Handoff, cx: &mut Context<'_>) {
        // Nothing that it brings needs a queue that runs: one that is paused goes on with it.
        if self.memory.is_none() {
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
        let key = self.bridges.insert(bridge) as u32;
        self.name_bridge(flow, key);
        let now = Peer {
            device: self.addr,
            flow,
        };
        let Some(bridge) = self.bridges.get_mut(key as usize) else {
            return;
        };
        // Edges may have passed meanwhile: look again.
        bridge.readable = true;
        bridge.writable = true;
        match &mut bridge.end {
            BridgePeer::Socket { socket, .. } => {
                let vm = self.addr.vm;
                if let Err(error) = cx.poller.add(&*socket, Source::Bridge { vm, key }) {
                    tracing::warn!(cid = %self.cid, %error, "cannot watch a host program");
                    self.reset_bridge(key, cx);
                }
            }
            BridgePeer::Sibling(s) => {
                let messages = Vec::new();
                s.parked = Some(Box::new(Parked { messages }));
                self.queue_pairs.parking += 1;
                let Peer { device, flow: to } = s.peer;
                let relocated = Message::Relocated { to, from: now, old };
                cx.outbox.send(device, relocated);
            }
            BridgePeer::App(end) => {
                let id = end.id;
                if let Some(app) = cx.app.as_deref_mut() {
                    let pool = self.app_pool(app);
                    app.sockets.enter_pool(id, pool, flow);
                }
                Self::app_writable(id, cx);
            }
            _ => {}
        }
        let arrived = Message::Arrived {
            to: old.flow,
            now: Some(now),
            answer,
        };
        cx.outbox.send(old.device, arrived);
        self.enqueue(key);
        self.flush(key, cx);
    }

    /// A connection that has left has arrived, or found no place: now its driver is told.
    fn arrived(&mut self, flow: FlowId, now: Option<Peer>, answer: Repr, cx: &mut Context<'_>) {
        if !self.queue_pairs.departed.remove(&flow) {
            // Its driver is gone, and the next one knows nothing of it: where it is now, that may have
            // been heard before it came.
            if let Some(now) = now {
                let to = now.flow;
                cx.outbox.send(now.device, Message::Orphaned { to });
            }
            return;
        }
        match now {
            Some(now) => {
                if let Some(left) = self.queue_pairs.left.get_mut(&flow) {
                    let waiting = std::mem::replace(left, Left::There(now));
                    if let Left::OnItsWay(messages) = waiting {
                        for message in messages {
                            self.send_on(flow, message, cx);
                        }
                    }
                }
                self.shard.send_moved(answer);
            }
            None => {
                if let Some(Left::OnItsWay(messages)) = self.queue_pairs.left.remove(&flow) {
                    messages
                        .into_iter()
                        .for_each(|message| turn_back(message, cx));
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

    /// Deals with what is about queue_pairs, or is for a connection that is on its way: nothing is left.
    pub(super) fn route_message(
        &mut self,
        message: Message,
        cx: &mut Context<'_>,
    ) -> Option<Message> {
        match message {
            Message::Arrived { to, now, answer } => self.arrived(to, now, answer, cx),
            Message::Orphaned { to } => self.orphaned(to, cx),
            Message::Lost => self.announce_reset = true,
            Message::SentOn(message) => match *message {
                Message::Flushed { to } => self.unpark(to, cx),
                message => return Some(message),
            },
            message if self.queue_pairs.left.is_empty() && self.queue_pairs.parking == 0 => {
                return Some(message);
            }
            message => {
                let Some(to) = message.to() else {
                    return Some(message);
                };
                if self.queue_pairs.left.contains_key(&to) {
                    self.send_on(to, message, cx);
                } else if let Some(parked) = self.parked(to) {
                    parked.messages.push(message);
                } else {
                    return Some(message);
                }
            }
        }
        None
    }

    fn parked(&mut self, flow: FlowId) -> Option<&mut Parked> {
        let key = self.key_of(flow)?;
        match &mut self.bridges.get_mut(key as usize)?.end {
            BridgePeer::Sibling(s) => s.parked.as_deref_mut(),
            _ => None,
        }
    }

    /// Sends on what a sibling has sent here for a connection that has left.
    fn send_on(&mut self, flow: FlowId, mut message: Message, cx: &mut Context<'_>) {
        let now = match self.queue_pairs.left.get_mut(&flow) {
            Some(Left::There(now)) => *now,
            Some(Left::OnItsWay(messages)) => return messages.push(message),
            None => return,
        };
        if let Message::Flushed { .. } = message {
            // Nothing more will come here.
            self.queue_pairs.left.remove(&flow);
        }
        message.set_to(now.flow);
        cx.outbox
            .send(now.device, Message::SentOn(Box::new(message)));
    }

    /// All that a sibling had sent to the old queue_pair is here.
    fn unpark(&mut self, flow: FlowId, cx: &mut Context<'_>) {
        let Some(key) = self.key_of(flow) else { return };
        if let Some(BridgePeer::Sibling(s)) = self
            .bridges
            .get_mut(key as usize)
            .map(|bridge| &mut bridge.end)
            && let Some(parked) = s.parked.take()
        {
            self.queue_pairs.parking -= 1;
            for message in parked.messages {
                self.sibling_says(message, cx);
            }
        }
    }

    /// A sibling's connection is somewhere else now.
    pub(super) fn relocated(&mut self, to: FlowId, from: Peer, old: Peer, cx: &mut Context<'_>) {
        if let Some(key) = self.key_of(to)
            && let Some(BridgePeer::Sibling(s)) = self
                .bridges
                .get_mut(key as usize)
                .map(|bridge| &mut bridge.end)
        {
            s.peer = from;
        }
        let to = old.flow;
        cx.outbox.send(old.device, Message::Flushed { to });
    }

    /// A connection has ended before all was here that its sibling had sent.
    pub(super) fn abandon_parked(&mut self, parked: Parked, cx: &mut Context<'_>) {
        self.queue_pairs.parking -= 1;
        for message in parked.messages {
            turn_back(message, cx);
        }
    }

    /// The driver of a connection that has come here went while it was on its way.
    fn orphaned(&mut self, flow: FlowId, cx: &mut Context<'_>) {
        let Some(key) = self.key_of(flow) else { return };
        // Whoever drives now has no such connection: an RST could only hit one of his own.
        let _ = self.shard.forget(cx.now, flow);
        if !self.linger(key, cx) {
            self.part_bridge(key, cx);
        }
    }

    /// Nobody comes back to what has left: its driver is gone.
    pub(super) fn forget_those_who_left(&mut self, cx: &mut Context<'_>) {
        for (_, left) in self.queue_pairs.left.drain() {
            match left {
                Left::OnItsWay(messages) => messages
                    .into_iter()
                    .for_each(|message| turn_back(message, cx)),
                // What its sibling sends here from now on is lost, and the rest waits for it.
                Left::There(now) => {
                    let to = now.flow;
                    cx.outbox.send(now.device, Message::Orphaned { to });
                }
            }
        }
        self.queue_pairs.departed.clear();
    }

    /// The front-end is gone, or starts anew: how many pairs are used is for the next one to say.
    pub(super) fn use_one_pair(&mut self) {
        self.queue_pairs.used = QueuePairs::ONE;
    }
}

impl Handoff {
    /// It finds no place: everybody is told, and what is lent goes back.
    pub(crate) fn abandon(self, cx: &mut Context<'_>) {
        let Handoff {
            snapshot,
            mut bridge,
            old,
            answer,
        } = self;
        drop(snapshot);
        if let BridgePeer::Sibling(s) = &mut bridge.end {
            sibling::return_inbound(s, false, cx);
        }
        sibling::tell_end(&bridge, false, cx);
        // What is held was the old queue_pair's, and went back when it left.
        Device::app_ended_in(&mut QueueStore::default(), &bridge, false, cx);
        cx.counters.conns_removed.add(1);
        let arrived = Message::Arrived {
            to: old.flow,
            now: None,
            answer,
        };
        cx.outbox.send(old.device, arrived);
    }
}

/// Answers for a connection that is not there any more.
fn turn_back(message: Message, cx: &mut Context<'_>) {
    if let Some((device, answer)) = message.undeliverable() {
        cx.outbox.send(device, answer);
    }
}
