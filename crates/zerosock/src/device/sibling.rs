//! Connections between two guests of this daemon, as one of the two devices sees them.
//!
//! # Invariants
//! - A lent chain is returned exactly once, whichever side ends first.
//! - Bytes and ends keep their order.
//!
//! [`sibling_message`](super::state::sibling_message) describes the messages.

use super::outbound::copy_out;
use super::state::bridge::{Bridge, BridgePeer, Inbound, SiblingPeer};
use super::state::bridge_state::BridgeEvent;
use super::state::flags::Flags;
use super::{Context, Device};
use crate::device::guest_bridges::GuestBridges;
use crate::device::state::peer::Peer;
use crate::device::state::sibling_message::SiblingMessage;
use crate::routing::Denial;
use crate::stats::RefusalCause;
use zerosock_proto::vsock::{FlowId, SMALL_PACKET};
use zerosock_proto::wire::vsock::{HEADER_LEN, SocketType};
use zerosock_proto::{Address, Port};
use zerosock_ring::{Chain, Memory};

/// Copies up to `most` of the oldest bytes from the sibling behind the header in `chain`. Returns how many.
#[inline]
pub(super) fn copy_front(
    sibling: &mut SiblingPeer,
    most: usize,
    to: &Memory,
    chain: &Chain,
    cx: &Context<'_>,
) -> usize {
    match sibling.front() {
        Some(Inbound::Lent { memory, held, .. }) => {
            let len = most.min(held.len as usize);
            let source = (&**memory, held.chain.readable(), held.offset as usize);
            Memory::copy(source, (to, chain.writable(), HEADER_LEN), len);
            held.offset += len as u32;
            held.len -= len as u32;
            cx.shared.counters.in_place_bytes.add(len as u64);
            len
        }
        Some(Inbound::Copied { bytes, taken }) => {
            let rest = bytes.get(*taken..).unwrap_or_default();
            let rest = rest.get(..most).unwrap_or(rest);
            let len = rest.len();
            to.write(chain.writable(), HEADER_LEN, rest);
            *taken += len;
            sibling.change_copied(|copied| copied.saturating_sub(len));
            len
        }
        None => 0,
    }
}

/// Reports that `bytes` of the front of `inbound` were read, for the sender's credit. With
/// `used_up`, also returns the sender's chain.
pub(super) fn return_read(
    sibling: &mut SiblingPeer,
    bytes: u32,
    used_up: bool,
    cx: &mut Context<'_>,
) {
    let chain = if used_up {
        match sibling.pop() {
            Some(Inbound::Lent { held, epoch, .. }) => Some((held.chain, epoch)),
            _ => None,
        }
    } else {
        None
    };
    let Peer { device, flow: to } = sibling.peer;
    cx.outbox
        .send(device, SiblingMessage::Returned { to, bytes, chain });
}

/// Merges small waiting packets into one copy and returns how many bytes wait. The guest would not
/// take as many packets, and the sender's chains have waited long enough.
pub(super) fn merge_inbound(sibling: &mut SiblingPeer, cx: &mut Context<'_>) -> u32 {
    let mut sizes = sibling.parts().map(|part| part.len());
    let (first, others) = (sizes.next().unwrap_or(0), sizes.sum::<usize>());
    if first < SMALL_PACKET as usize && others > 0 {
        let peer = sibling.peer;
        let mut bytes = Vec::new();
        if bytes.try_reserve_exact(first + others).is_err() {
            sibling.lose();
            return 0;
        }
        for inbound in sibling.drain() {
            match &inbound {
                Inbound::Lent { memory, held, .. } => {
                    copy_out(memory, held, &mut bytes);
                    cx.shared.counters.copied_bytes.add(held.len.into());
                    send_back(peer, inbound, false, cx);
                }
                Inbound::Copied { bytes: more, taken } => {
                    bytes.extend_from_slice(more.get(*taken..).unwrap_or_default());
                }
            }
        }
        sibling.restore(bytes);
    }
    u32::try_from(first + others).unwrap_or(u32::MAX)
}

/// Returns everything received from the sibling: with `read`, its bytes count as read because our
/// guest has stopped receiving; without, the connection ends.
pub(super) fn return_inbound(sibling: &mut SiblingPeer, read: bool, cx: &mut Context<'_>) {
    let peer = sibling.peer;
    for inbound in sibling.drain() {
        send_back(peer, inbound, read, cx);
    }
}

/// As [`return_inbound`], for a part of it.
fn send_back(to: Peer, inbound: Inbound, read: bool, cx: &mut Context<'_>) {
    let bytes = if read { inbound.len() as u32 } else { 0 };
    let chain = match inbound {
        Inbound::Lent { held, epoch, .. } => Some((held.chain, epoch)),
        Inbound::Copied { .. } => None,
    };
    let Peer { device, flow: to } = to;
    cx.outbox
        .send(device, SiblingMessage::Returned { to, bytes, chain });
}

/// Tells the sibling that this side has ended: in order (everything was read, both directions were
/// shut down), or by a reset.
pub(super) fn send_end(bridge: &Bridge, orderly: bool, cx: &mut Context<'_>) {
    let (device, message) = match &bridge.peer {
        BridgePeer::Sibling(s) if orderly => {
            let Peer { device, flow: to } = s.peer;
            if s.lent > 0 {
                // This side no longer enforces the hold limit on them.
                cx.outbox.send(device, SiblingMessage::Recall { to });
            }
            let (receive, send) = (true, true);
            (device, SiblingMessage::Shutdown { to, receive, send })
        }
        BridgePeer::Sibling(SiblingPeer { peer, .. }) | BridgePeer::Asked(Some(peer)) => {
            (peer.device, SiblingMessage::Reset { to: peer.flow })
        }
        _ => return,
    };
    cx.outbox.send(device, message);
}

/// Unanswered requests to siblings. This limit bounds what one guest can put into the mailbox of
/// another's worker.
const MAX_UNANSWERED: usize = 1024;

impl Device {
    /// Whether our guest may connect from this port. All services share CID 2, so two services
    /// must not connect from the same port.
    fn may_come_from(&self, port: Port, cx: &Context<'_>) -> bool {
        match &self.service {
            Some(own) => {
                own.contains(&port)
                    || cx.shared.routes.service(port) == Some(self.queue_pairs.first())
            }
            None => true,
        }
    }
}

impl GuestBridges<'_, '_> {
    /// Forwards our guest's request for `local` to the device of that endpoint or service.
    pub(super) fn ask_sibling(
        &mut self,
        flow: FlowId,
        local: Address,
        peer: Address,
        socket_type: SocketType,
    ) {
        let routes = &self.cx.shared.routes;
        let found = match routes.admit(self.device.cid, local) {
            Err(denial) => Err(denial),
            Ok(()) if self.device.unanswered >= MAX_UNANSWERED => Err(Denial::Busy),
            Ok(()) if !self.device.may_come_from(peer.port, self.cx) => Err(Denial::Unclaimed),
            Ok(()) => routes.target(local).ok_or(Denial::NoEndpoint),
        };
        let device = match found {
            Ok(device) => device,
            Err(denial) => {
                self.device.deny(peer, local, denial, self.cx);
                let _ = self.device.shard.reject(flow);
                return;
            }
        };
        self.device.unanswered += 1;
        self.add_bridge(flow, BridgePeer::Asked(None));
        let from = Peer::new(self.device.addr, flow);
        self.cx.outbox.send(
            device,
            SiblingMessage::Connect {
                from,
                local: peer,
                peer: local,
                socket_type,
            },
        );
    }

    /// Handles a message from a sibling's device.
    pub(crate) fn handle_sibling_message(&mut self, message: SiblingMessage) {
        match message {
            SiblingMessage::Connect {
                from,
                local,
                peer,
                socket_type,
            } => self.sibling_connects(from, local, peer, socket_type),
            SiblingMessage::Rejoin { from, local, peer } => self.sibling_rejoins(from, local, peer),
            SiblingMessage::Accepted { to } => self.sibling_accepted(to),
            SiblingMessage::Lent {
                to,
                from,
                memory,
                held,
                epoch,
            } => {
                let inbound = Inbound::Lent {
                    memory,
                    held,
                    epoch,
                };
                self.queue_inbound(to, Some(from), inbound);
            }
            SiblingMessage::Copied { to, bytes } => {
                self.queue_inbound(to, None, Inbound::Copied { bytes, taken: 0 });
            }
            SiblingMessage::Ended { to, len, ends } => self.sibling_ended_message(to, len, ends),
            SiblingMessage::ReadEmpty { to } => {
                // Fails if the flow has ended.
                let _ = self.device.shard.consume_empty(to, 1);
            }
            SiblingMessage::Returned { to, bytes, chain } => self.handle_returned(to, bytes, chain),
            SiblingMessage::Recall { to } => self.return_recalled(to),
            SiblingMessage::Shutdown { to, receive, send } => {
                self.sibling_shut_down(to, receive, send)
            }
            SiblingMessage::Asking { to, from } => self.sibling_asks(to, from),
            SiblingMessage::Refused { to } => {
                self.device.unanswered = self.device.unanswered.saturating_sub(1);
                if self.device.bridges.key_of(to).is_some() {
                    self.cx.shared.counters.refuse(RefusalCause::Unreachable);
                    let reason =
                        "the endpoint has no running driver, or as many connections as it may have";
                    self.device.log_refused(to, reason);
                }
                self.sibling_ended(to);
            }
            SiblingMessage::Reset { to } => self.sibling_ended(to),
            SiblingMessage::Datagram(datagram) => self
                .device
                .datagrams_with(self.cx)
                .sibling_datagram(datagram),
            SiblingMessage::DatagramDone {
                chain,
                epoch,
                copied,
                answer,
            } => self.device.datagram_done(chain, epoch, copied, answer),
            SiblingMessage::DatagramControl(control) => self.device.datagram_control(control),
            SiblingMessage::Call { caller, local } => self.connect_guest(*caller, local, false),
            SiblingMessage::Client(client) => self.client_connects(*client),
            SiblingMessage::Dialed { to, outcome } => self.dialed(to, outcome),
            SiblingMessage::DialedDatagrams { to, outcome } => self
                .device
                .datagrams_with(self.cx)
                .association_dialed(to, outcome),
            SiblingMessage::Lost => self.device.announce_reset = true,
            SiblingMessage::Guest(order) => self.device.guest_order(*order, self.cx),
            SiblingMessage::GuestAnswer(answer) => self.device.guest_answered(*answer, self.cx),
            // The turn that follows finds the buffers.
            SiblingMessage::Kick => self.cx.shared.counters.kicks.add(1),
        }
    }

    /// Ends a connection: its sibling has ended, refused it and counted that, or does not exist.
    fn sibling_ended(&mut self, to: FlowId) {
        let Some(key) = self.device.bridges.key_of(to) else {
            return;
        };
        let ended = match self.remove_bridge(key) {
            Some(Bridge {
                peer: BridgePeer::Asked(_),
                ..
            }) => self.device.shard.reject(to),
            _ => self.device.shard.reset(to),
        };
        // Fails if the flow has ended by itself.
        let _ = ended;
    }

    /// A sibling has passed our guest's request on to its own guest.
    fn sibling_asks(&mut self, to: FlowId, from: Peer) {
        self.device.unanswered = self.device.unanswered.saturating_sub(1);
        match self.device.bridges.of_flow(to) {
            Some((_, bridge)) => bridge.peer = BridgePeer::Asked(Some(from)),
            // Our guest has given up already.
            None => {
                let message = SiblingMessage::Reset { to: from.flow };
                self.cx.outbox.send(from.device, message);
            }
        }
    }

    fn sibling_connects(
        &mut self,
        from: Peer,
        local: Address,
        peer: Address,
        socket_type: SocketType,
    ) {
        if let Some(queue_pair) = self.device.queue_pair_for(peer, local) {
            let connect = SiblingMessage::Connect {
                from,
                local,
                peer,
                socket_type,
            };
            return self.cx.outbox.send(queue_pair, connect);
        }
        let running = self.device.accepts_requests();
        let flow = running.then(|| {
            self.device
                .shard
                .connect(self.cx.now, local, peer, socket_type)
        });
        let flow = flow.and_then(Result::ok);
        let Some(flow) = flow.filter(|&flow| self.reserve_bridge(flow)) else {
            return self
                .cx
                .outbox
                .send(from.device, SiblingMessage::Refused { to: from.flow });
        };
        let us = Peer::new(self.device.addr, flow);
        let asking = SiblingMessage::Asking {
            to: from.flow,
            from: us,
        };
        self.cx.outbox.send(from.device, asking);
        self.device.log_flow(flow, "connection requested");
        self.add_bridge(flow, BridgePeer::Sibling(SiblingPeer::new(from)));
    }

    fn sibling_accepted(&mut self, to: FlowId) {
        // If our guest has given up, the sibling was told so then.
        let Some((_, bridge)) = self.device.bridges.of_flow(to) else {
            return;
        };
        let BridgePeer::Asked(Some(peer)) = bridge.peer else {
            return;
        };
        bridge.peer = BridgePeer::Sibling(SiblingPeer::new(peer));
        bridge.state.apply(BridgeEvent::Connected);
        bridge.flags.insert(Flags::WRITABLE);
        let _ = self.device.shard.accept(self.cx.now, to);
        self.device.log_flow(to, "connection opened");
    }

    /// Queues bytes from a sibling for our guest.
    fn queue_inbound(&mut self, to: FlowId, from: Option<Peer>, inbound: Inbound) {
        let peer = match self.device.bridges.of_flow(to) {
            Some((key, bridge)) => {
                let BridgePeer::Sibling(s) = &bridge.peer else {
                    return;
                };
                let peer = s.peer;
                if bridge.state.reads() {
                    bridge.set_readable();
                    if let Some(inbound) = self.device.bridges.push_inbound(key, inbound) {
                        send_back(peer, inbound, false, self.cx);
                    }
                    self.device.bridges.enqueue(key);
                    return self.update_bridge(key);
                }
                Some(peer)
            }
            // The flow has ended here: copied bytes are dropped.
            None => from,
        };
        // Our guest never reads them: return the sender's credit and chain all the same.
        if let Some(peer) = peer {
            send_back(peer, inbound, true, self.cx);
        }
    }

    /// A sibling has read `bytes` of what we sent, or returns a chain.
    fn handle_returned(&mut self, to: FlowId, bytes: u32, chain: Option<(Chain, u32)>) {
        let returned = chain.is_some();
        if let (Some((chain, epoch)), Some(tx)) = (chain, self.device.queues.rings.tx.as_mut()) {
            // A chain of an earlier epoch needs no completion: its queue was stopped.
            if tx.epoch == epoch {
                tx.complete(chain, 0);
            }
        }
        let Some((key, bridge)) = self.device.bridges.of_flow(to) else {
            return;
        };
        if bytes > 0 {
            let _ = self.device.shard.consume(to, bytes);
        }
        let caught_up = self
            .device
            .shard
            .flow(to)
            .is_none_or(|flow| flow.unread == 0);
        if let BridgePeer::Sibling(s) = &mut bridge.peer {
            s.lent = s.lent.saturating_sub(u32::from(returned));
            s.stalled &= !caught_up;
            if s.lent <= s.lent_since_hold {
                // The sibling has returned every chain that was lent at `held_since` or before.
                bridge.held_since = None;
            }
        }
        self.device.drain_events(self.cx);
        self.update_bridge(key);
    }

    /// Copies out and returns all chains that a sibling recalls.
    fn return_recalled(&mut self, to: FlowId) {
        let Some((key, bridge)) = self.device.bridges.of_flow(to) else {
            return;
        };
        let BridgePeer::Sibling(s) = &mut bridge.peer else {
            return;
        };
        let peer = s.peer;
        let (mut copied, mut lost) = (0, false);
        for inbound in s.parts() {
            if let Inbound::Lent { memory, held, .. } = inbound {
                let mut bytes = Vec::new();
                if bytes.try_reserve_exact(held.len as usize).is_err() {
                    lost = true;
                    break;
                }
                copy_out(memory, held, &mut bytes);
                self.cx.shared.counters.copied_bytes.add(bytes.len() as u64);
                copied += bytes.len();
                let copy = Inbound::Copied { bytes, taken: 0 };
                let lent = std::mem::replace(inbound, copy);
                send_back(peer, lent, false, self.cx);
            }
        }
        s.change_copied(|before| before + copied);
        if lost {
            // The connection is reset, which returns the other chains.
            s.lose();
        }
        self.update_bridge(key);
    }

    fn sibling_shut_down(&mut self, to: FlowId, receive: bool, send: bool) {
        let Some((key, bridge)) = self.device.bridges.of_flow(to) else {
            return;
        };
        if !matches!(bridge.peer, BridgePeer::Sibling(_)) {
            return;
        }
        if send {
            bridge.state.apply(BridgeEvent::HostFinished);
            // With nothing left to deliver, a read finds the end of the stream.
            bridge.set_readable();
            self.device.bridges.enqueue(key);
        }
        if receive {
            self.on_bridge_event(key, BridgeEvent::HostStopped);
        }
    }
}
