//! Hands the connections of a device over to another process that continues them, and takes them over.
//!
//! # Steps
//! 1. The worker is paused: nothing more is taken from the guest or from sockets. [`Device::release`] copies
//!    held bytes out and recalls buffers from siblings, whose messages the worker still handles.
//! 2. [`Device::save`] writes down the protocol core and the connections, and passes on their descriptors.
//! 3. Either the worker goes on as if nothing had happened, or the process is killed, and a device of the
//!    other one begins with [`Device::restore`].
//!
//! # What is not handed over
//! Each of these is reset, as by a crash: connections of several queue pairs with siblings, of which no
//! program has decided yet (the guest's request is decided anew), with zero-copy sends in flight; those of guest endpoints and their doorbells. Datagrams on their way are lost,
//! and their sockets outside begin anew.
//!
//! # Invariants
//! - A flow that is restored has a bridge, or is a request that is decided anew, or is reset.

use std::collections::HashMap;

use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use zerosock_proto::vsock::{FlowId, State, check_snapshot_version};
use zerosock_proto::wire::vsock::SocketType;
use zerosock_proto::{Address, Cid, Instant, Port};
use zerosock_sys::PeerFd;
use zerosock_virtio::poller::Interest;
use zerosock_virtio::queues::Rings;

use super::state::bridge::{Bridge, BridgePeer, Inbound, SiblingPeer};
use super::state::flags::Flags;
use super::state::forwarded::{Forwarded, SavedForwarded};
use super::state::guest_backlogs::GuestConnect;
use super::state::saved::{
    FlowKey, Saved, SavedBridge, SavedCaller, SavedConnect, SavedMessages, SavedPeer, SavedTables,
    encode,
};
use super::state::succession::SavedDevice;
use super::state::timers::Timer;
use super::virtio::BRIDGE;
use super::{Context, Device, DriverKind, RX, TX};
use crate::device::guest_bridges::GuestBridges;
use crate::device::host_sockets::HostSocket;
use crate::device::outbound::Outbound;
use crate::device::state::host::Caller;
use crate::device::state::messages::{Messages, Sending};
use crate::device::state::peer::Peer;
use crate::device::state::sibling_message::SiblingMessage;

/// The sibling of a connection is not known yet.
const UNKNOWN: zerosock_virtio::outbox::DeviceAddr = zerosock_virtio::outbox::DeviceAddr {
    worker: u32::MAX,
    number: u32::MAX,
};

/// Checks the form of what was saved.
pub(crate) fn check_saved(bytes: &[u8]) -> Result<(), String> {
    let saved = Saved::decode(bytes)?;
    check_snapshot_version(saved.shard).map_err(|error| error.to_string())
}

impl Device {
    /// The number of the VM's queue pair, if the device is one that can be saved.
    pub(crate) fn saved_pair(&self) -> Option<u16> {
        (self.driver == DriverKind::Vm && self.succession.is_kept).then_some(self.queue_pairs.pair)
    }

    /// The endpoint of the device.
    pub(crate) fn cid(&self) -> Cid {
        self.cid
    }

    /// Begins no more zero-copy sends, or begins some again. Returns whether some are in flight.
    pub(crate) fn set_ending(&mut self, is_ending: bool) -> bool {
        self.succession.is_ending = is_ending;
        self.bridges.have_sends_in_flight()
    }

    /// Copies out what is held of the guest, and recalls what siblings have.
    pub(crate) fn release(&mut self, cx: &mut Context<'_>) {
        self.drain_events(cx);
        self.release_chains(cx);
    }

    /// Saves the device: passes on its encoded form and the descriptors that belong to it, unless its
    /// connections end anyway.
    pub(crate) fn save(
        &mut self,
        cx: &mut Context<'_>,
        keep: impl FnOnce(&[u8], &[BorrowedFd<'_>]),
    ) {
        for ring in self.queues.rings.running() {
            ring.publish(cx.notifier);
        }
        self.shard.handle_published();
        let ends = self.queues.is_resetting()
            || self.has_lost_memory()
            || self.reset_next.is_some()
            || self.announce_reset;
        if ends {
            return;
        }
        let (mut payload, mut fds) = (Vec::new(), Vec::new());
        let mut tables = SavedTables {
            stopped_at: self.queues.stops().to_vec(),
            ..SavedTables::default()
        };
        for key in self.bridges.keys() {
            if let Some(bridge) = self.bridges.get(key) {
                let before = payload.len();
                match self.save_bridge(bridge, cx.now, &mut payload) {
                    Some((saved, socket)) => {
                        tables.bridges.push(saved);
                        fds.extend(socket);
                    }
                    None => payload.truncate(before),
                }
            }
        }
        for (_, handshake) in &self.handshakes {
            let messages = handshake.socket_type == SocketType::SeqPacket;
            tables.handshakes.push(messages);
            fds.push(handshake.socket.as_fd());
        }
        let waiting = self.guest_backlogs.ports.values();
        for (_, caller) in waiting.flat_map(|port| &port.waiting) {
            tables.callers.push(SavedCaller {
                messages: caller.socket_type == SocketType::SeqPacket,
                to: caller.to.get(),
                wants_ok: caller.wants_ok,
                forwarded: caller.forwarded.as_deref().map(Forwarded::save),
            });
            fds.push(caller.socket.as_fd());
        }
        match encode(&self.shard.save(cx.now), &payload, &tables) {
            Ok(bytes) => keep(&bytes, &fds),
            Err(error) => tracing::error!(cid = %self.cid, %error, "cannot save the connections"),
        }
    }

    /// Saves a connection: appends its bytes to `payload`, and returns its socket too. `None`: it cannot be
    /// handed over.
    fn save_bridge<'b>(
        &self,
        bridge: &'b Bridge,
        now: Instant,
        payload: &mut Vec<u8>,
    ) -> Option<(SavedBridge, Option<BorrowedFd<'b>>)> {
        let flow = match bridge.flow {
            Some(flow) => Some(FlowKey::of(&self.shard.flow(flow)?)),
            None => None,
        };
        let messages = bridge.messages.as_deref();
        if bridge.outbound.held_chains() > 0
            || bridge.has_lost_bytes()
            || bridge.has_sends_in_flight()
        {
            return None;
        }
        payload.extend_from_slice(bridge.outbound.overflow());
        let (peer, socket) = match &bridge.peer {
            BridgePeer::Socket { socket, ok } => {
                let connect = bridge
                    .flow
                    .and_then(|flow| self.guest_backlogs.unanswered.get(&flow));
                let connect = connect.map(|connect| SavedConnect {
                    to: connect.to.get(),
                    wants_ok: connect.wants_ok,
                    left: connect.deadline.saturating_duration_since(now),
                });
                let ok = ok.map(Port::get);
                (SavedPeer::Socket { ok, connect }, Some(socket.as_fd()))
            }
            BridgePeer::Sibling(sibling) | BridgePeer::Rejoining(sibling)
                if bridge.state.is_open()
                    && sibling.lent == 0
                    && self.queue_pairs.all.len() == 1 =>
            {
                let before = payload.len();
                for part in sibling.waiting() {
                    match part {
                        Inbound::Copied { bytes, taken } => payload.extend(bytes.get(*taken..)?),
                        Inbound::Lent { .. } => return None,
                    }
                }
                let inbound = u32::try_from(payload.len() - before).ok()?;
                (SavedPeer::Sibling { inbound }, None)
            }
            _ => return None,
        };
        let saved = SavedBridge {
            flow,
            peer,
            state: bridge.state,
            outbound: u32::try_from(bridge.outbound.len()).ok()?,
            messages: messages.map(|messages| SavedMessages {
                outbound: messages.outbound.iter().copied().collect(),
                incomplete: messages.incomplete,
                inbound: messages.inbound.iter().copied().collect(),
                sending: messages.sending.as_ref().map(|it| (it.left, it.ends)),
            }),
            forwarded: bridge.forwarded.as_deref().map(Forwarded::save),
            from_guest: bridge.from_guest,
            to_guest: bridge.to_guest,
        };
        Some((saved, socket))
    }

    /// Continues what another process has saved. To be called once, before the entries of the flow log that
    /// are left are reset.
    pub(super) fn restore(&mut self, saved: SavedDevice, cx: &mut Context<'_>) {
        let SavedDevice { bytes, fds, rules } = saved;
        let mut fds = fds.into_iter();
        let decoded = Saved::decode(&bytes).and_then(|saved| {
            let flows = self.shard.restore(cx.now, saved.shard);
            Ok((saved, flows.map_err(|error| error.to_string())?))
        });
        match decoded {
            Ok((
                Saved {
                    payload, tables, ..
                },
                flows,
            )) => {
                let forwarded = |saved: Option<SavedForwarded>, device: &Device| match saved {
                    Some(saved) => Forwarded::restore(saved, &rules, &device.access_log)
                        .map(|forwarded| Some(Box::new(forwarded))),
                    None => Some(None),
                };
                self.restore_tables(tables, payload, &flows, &mut fds, forwarded, cx);
            }
            Err(reason) => {
                let cid = self.cid;
                tracing::error!(%cid, reason, "connections end: what was saved of them cannot be used");
            }
        }
        // Those of peers may take long to close.
        fds.for_each(|fd| drop(PeerFd::from(fd).owned_by(&self.account)));
    }

    fn restore_tables(
        &mut self,
        tables: SavedTables,
        mut payload: &[u8],
        flows: &[FlowId],
        fds: &mut impl Iterator<Item = OwnedFd>,
        forwarded: impl Fn(Option<SavedForwarded>, &Device) -> Option<Option<Box<Forwarded>>>,
        cx: &mut Context<'_>,
    ) {
        let SavedTables {
            stopped_at,
            bridges,
            handshakes,
            callers,
        } = tables;
        let of_key = |&flow: &FlowId| Some((FlowKey::of(&self.shard.flow(flow)?), flow));
        let mut left: HashMap<FlowKey, FlowId> = flows.iter().filter_map(of_key).collect();
        let mut take = |len: u32| {
            let (bytes, rest) = payload.split_at_checked(len as usize)?;
            payload = rest;
            Some(bytes)
        };
        let mut continued = 0;
        for mut saved in bridges {
            let inbound = match saved.peer {
                SavedPeer::Sibling { inbound } => inbound,
                SavedPeer::Socket { .. } => 0,
            };
            let (Some(outbound), Some(inbound)) = (take(saved.outbound), take(inbound)) else {
                break;
            };
            let socket = match saved.peer {
                SavedPeer::Socket { .. } => fds.next(),
                SavedPeer::Sibling { .. } => None,
            };
            let by_rule = forwarded(saved.forwarded.take(), self);
            let flow = saved.flow.map(|key| left.remove(&key));
            if let (Some(by_rule), None | Some(Some(_))) = (by_rule, flow) {
                let bridge = (saved, flow.flatten(), outbound, inbound);
                if self
                    .bridges_with(cx)
                    .restore_bridge(bridge, socket, by_rule)
                {
                    continued += 1;
                } else if let Some(flow) = flow.flatten() {
                    let _ = self.shard.reset(flow);
                }
            } else if let Some(socket) = socket {
                drop(PeerFd::from(socket).owned_by(&self.account));
            }
        }
        let mut reset = 0;
        for flow in left.into_values() {
            let state = self.shard.flow(flow).map(|flow| flow.state);
            if !matches!(state, None | Some(State::Incoming)) {
                reset += 1;
                let _ = self.shard.reset(flow);
            }
        }
        let types = |messages| match messages {
            true => SocketType::SeqPacket,
            false => SocketType::Stream,
        };
        for (messages, fd) in handshakes.into_iter().zip(&mut *fds) {
            let socket = self.restore_socket(fd);
            let accepted = socket.map(|socket| (socket, types(messages)));
            self.succession.accepted.extend(accepted);
        }
        for (saved, fd) in callers.into_iter().zip(&mut *fds) {
            let by_rule = forwarded(saved.forwarded, self);
            if let (Some(socket), Some(forwarded)) = (self.restore_socket(fd), by_rule) {
                self.succession.callers.push(Caller {
                    socket,
                    socket_type: types(saved.messages),
                    to: Port::new(saved.to),
                    wants_ok: saved.wants_ok,
                    forwarded,
                });
            }
        }
        // Programs wait until the queues run.
        self.timers.set(cx.now, Timer::Accept(0));
        let is_stopped = |&queue: &u16| matches!(stopped_at.get(usize::from(queue)), Some(Some(_)));
        let is_stopped = [RX, TX].iter().any(is_stopped);
        self.queues.set_stops(stopped_at);
        if is_stopped {
            self.begin_stop(cx);
        }
        self.succession.is_continued = true;
        tracing::info!(cid = %self.cid, continued, reset, "connections of the former process");
    }

    /// A host socket of another process; `None`: it is none, or the budget has no place for it.
    fn restore_socket(&self, fd: OwnedFd) -> Option<HostSocket> {
        match self.account.take_descriptors(1) {
            Ok(permit) => {
                let socket = HostSocket::restored(fd, permit);
                // It makes no zero-copy sends here.
                socket.iter().for_each(HostSocket::close_in_order);
                socket
            }
            Err(_) => {
                drop(PeerFd::from(fd).owned_by(&self.account));
                None
            }
        }
    }
}

impl GuestBridges<'_, '_> {
    /// Continues a connection: what was saved of it, its flow, and its bytes in both directions. Returns
    /// false if that is not possible.
    fn restore_bridge(
        &mut self,
        (saved, flow, outbound, inbound): (SavedBridge, Option<FlowId>, &[u8], &[u8]),
        socket: Option<OwnedFd>,
        forwarded: Option<Box<Forwarded>>,
    ) -> bool {
        let now = self.cx.now;
        let is_open = saved.state.is_open();
        let mut connect = None;
        let peer = match saved.peer {
            SavedPeer::Socket { ok, connect: asked } => {
                let socket = socket.and_then(|fd| self.device.restore_socket(fd));
                let Some(socket) = socket else {
                    return false;
                };
                connect = asked;
                let ok = ok.map(Port::new);
                BridgePeer::Socket { socket, ok }
            }
            SavedPeer::Sibling { .. } => {
                let (Some(flow), Some(key)) = (flow, saved.flow) else {
                    return false;
                };
                let mut sibling = SiblingPeer::new(Peer::new(UNKNOWN, flow));
                if !inbound.is_empty() {
                    let bytes = inbound.to_vec();
                    let copied = Inbound::Copied { bytes, taken: 0 };
                    sibling.push(copied, self.device.bridges.spare_inbound());
                }
                let Some(device) = self.cx.shared.routes.target(key.local()) else {
                    return false;
                };
                let guest = self.device.shard.flow(flow).map(|flow| flow.peer);
                let Some(guest) = guest else {
                    return false;
                };
                let from = Peer::new(self.device.addr, flow);
                let (local, peer) = (guest, key.local());
                let message = SiblingMessage::Rejoin { from, local, peer };
                self.cx.outbox.send(device, message);
                BridgePeer::Rejoining(sibling)
            }
        };
        if flow.is_some_and(|flow| self.device.bridges.reserve(flow).is_err()) {
            return false;
        }
        let mut bridge = Bridge::restored(flow, peer, saved.state);
        bridge.outbound = Outbound::of_copies(outbound.to_vec());
        if let Some(messages) = saved.messages {
            let mut sending = None;
            if let (Some((left, ends)), Some(flow)) = (messages.sending, flow) {
                let Some(reservation) = self.device.shard.resume_message(flow, left) else {
                    return false;
                };
                sending = Some(Sending {
                    reservation,
                    left,
                    ends,
                });
            }
            bridge.messages = Some(Box::new(Messages {
                outbound: messages.outbound.into(),
                incomplete: messages.incomplete,
                inbound: messages.inbound.into(),
                sending,
            }));
        }
        bridge.forwarded = forwarded;
        (bridge.from_guest, bridge.to_guest) = (saved.from_guest, saved.to_guest);
        if is_open {
            bridge.flags.insert(Flags::READABLE.union(Flags::WRITABLE));
        }
        let idle = bridge.forwarded.as_mut().filter(|_| is_open);
        let idle = idle.and_then(|forwarded| forwarded.start_idle(now));
        let key = self.device.bridges.insert(bridge);
        self.cx.shared.counters.conns_added.add(1);
        if let Some(at) = idle {
            self.device.timers.set(at, Timer::Idle(key));
        }
        if let (Some(flow), Some(asked)) = (flow, connect) {
            let info = self.device.shard.flow(flow);
            let socket_type = info.map_or(SocketType::Stream, |info| info.socket_type);
            let connect = GuestConnect {
                to: Port::new(asked.to),
                socket_type,
                wants_ok: asked.wants_ok,
                deadline: now + asked.left,
            };
            self.await_answer(flow, connect);
        }
        if flow.is_none() {
            let limit = self.cx.shared.limits.linger;
            let timers = &mut self.device.timers;
            self.device.lingering.start(key, now, limit, timers);
        }
        let token = self.device.token(BRIDGE, key);
        if let Some(BridgePeer::Socket { socket, .. }) =
            self.device.bridges.get(key).map(|bridge| &bridge.peer)
            && let Err(error) = self.cx.poller.add(socket, token, Interest::Incoming)
        {
            let reason = format!("connection reset: its socket is not watched: {error}");
            self.device.warn(&reason);
            self.reset_bridge(key);
            return true;
        }
        self.device.bridges.recount(key);
        self.device.bridges.enqueue(key);
        self.device.bridges.mark_dirty(key);
        true
    }

    /// A sibling continues its side of a connection, as this device does or does not.
    pub(super) fn sibling_rejoins(&mut self, from: Peer, local: Address, guest: Address) {
        let flow = self.device.shard.find(local, guest);
        let key = flow.and_then(|flow| self.device.bridges.key_of(flow));
        let bridge = key.and_then(|key| Some((key, self.device.bridges.get_mut(key)?)));
        match bridge {
            Some((key, bridge)) if matches!(bridge.peer, BridgePeer::Rejoining(_)) => {
                let unknown = BridgePeer::Asked(None);
                if let BridgePeer::Rejoining(mut sibling) =
                    std::mem::replace(&mut bridge.peer, unknown)
                {
                    sibling.peer = from;
                    bridge.peer = BridgePeer::Sibling(sibling);
                }
                bridge.set_readable();
                self.device.bridges.recount(key);
                self.device.bridges.enqueue(key);
                self.flush(key);
            }
            _ => {
                let message = SiblingMessage::Reset { to: from.flow };
                self.cx.outbox.send(from.device, message);
            }
        }
    }

    /// Goes on with the programs that another process has accepted.
    pub(super) fn take_accepted(&mut self) {
        for (socket, socket_type) in std::mem::take(&mut self.device.succession.accepted) {
            self.begin_handshake(socket, socket_type);
        }
        for caller in std::mem::take(&mut self.device.succession.callers) {
            self.connect_guest(caller, Port::ANY, false);
        }
    }
}
