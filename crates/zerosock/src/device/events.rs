//! What the protocol core says has happened to the guest's connections, and what follows.

use super::bridge::BridgePeer;
use super::ring::Ring;
use super::sibling;
use super::timers::Timer;
use super::{Context, Device};
use crate::device::host_sockets::{self, hybrid};
use crate::device::sibling_message::Message;
use crate::header;
use zerosock_proto::Cid;
use zerosock_proto::vsock::{Event, FlowId};
use zerosock_proto::wire::vsock::{HEADER_LEN, Repr};
use zerosock_ring::Chain;

/// Writes `repr` in front of the `len` bytes of payload that lie in `chain` and completes it.
pub(super) fn emit(rx: &mut Ring, chain: Chain, repr: &Repr, len: usize) {
    header::write(rx.queue.memory(), chain.writable(), repr);
    rx.complete(chain, (HEADER_LEN + len) as u32);
}

impl Device {
    /// Acts on every event that the core has.
    #[inline]
    pub(super) fn drain_events(&mut self, cx: &mut Context<'_>) {
        while let Some(event) = self.shard.poll_event() {
            self.event(event, cx);
        }
    }

    fn event(&mut self, event: Event, cx: &mut Context<'_>) {
        match event {
            Event::Incoming {
                flow,
                local,
                peer,
                socket_type,
            } => {
                if local.cid != Cid::HOST {
                    self.ask_sibling(flow, local, peer, socket_type, cx);
                } else if !cx.routes.may_reach(self.cid, local) {
                    cx.counters.conns_refused.add(1);
                    let _ = self.shard.reject(flow);
                } else if self.app_incoming(flow, local, peer, socket_type, cx) {
                } else if cx.routes.service(local.port).is_some() {
                    self.ask_sibling(flow, local, peer, socket_type, cx);
                } else {
                    self.guest_connects(flow, local.port, cx);
                }
            }
            Event::Connected { flow } => self.guest_accepted(flow, cx),
            Event::Refused { flow, reason } => {
                cx.counters.conns_refused.add(1);
                if let Some(key) = self.key_of(flow) {
                    if let Some(bridge) = self.bridges.get(key as usize)
                        && let BridgePeer::App(end) = &bridge.end
                        && let Some(app) = cx.app.as_deref_mut()
                        && let Some(conn) = app.sockets.get_mut(end.id)
                    {
                        conn.refused = Some(reason);
                    }
                    self.end_bridge(key, cx);
                }
            }
            Event::PeerShutdown {
                flow,
                receive,
                send,
            } => {
                self.guest_shut(flow, receive, send, cx);
            }
            Event::Writable { flow } => {
                if let Some(key) = self.key_of(flow) {
                    if let Some(bridge) = self.bridges.get_mut(key as usize) {
                        bridge.no_credit = false;
                        bridge.holds_back = false;
                        if let BridgePeer::App(end) = &bridge.end {
                            Self::app_writable(end.id, cx);
                        }
                    }
                    self.enqueue(key);
                }
            }
            Event::Closed { flow, reason } => self.guest_closed(flow, reason.is_orderly(), cx),
        }
    }

    /// The guest has accepted what the host or a sibling asked for.
    fn guest_accepted(&mut self, flow: FlowId, cx: &mut Context<'_>) {
        let Some(key) = self.key_of(flow) else { return };
        let Some(bridge) = self.bridges.get_mut(key as usize) else {
            return;
        };
        bridge.open = true;
        match &mut bridge.end {
            BridgePeer::Socket { socket, ok } => {
                // Edges may have passed while the guest made up its mind: look again.
                bridge.readable = true;
                bridge.writable = true;
                if let Some(port) = ok.take()
                    && !hybrid::write_ok(&*socket, port)
                {
                    return self.reset_bridge(key, cx);
                }
            }
            BridgePeer::Sibling(s) => {
                let from = crate::device::sibling_message::Peer {
                    device: self.addr,
                    flow,
                };
                let message = Message::Accepted {
                    to: s.peer.flow,
                    from,
                };
                cx.outbox.send(s.peer.device, message);
                bridge.readable = !s.is_drained();
                // A sibling has room, until it is found to have stalled.
                bridge.writable = true;
            }
            BridgePeer::App(end) => Self::app_connected(end.id, cx),
            _ => {}
        }
        self.enqueue(key);
    }

    fn guest_shut(&mut self, flow: FlowId, receive: bool, send: bool, cx: &mut Context<'_>) {
        if receive && !self.gathered.is_empty() {
            self.gathered.forget(flow);
        }
        let Some(key) = self.key_of(flow) else { return };
        let Some(bridge) = self.bridges.get_mut(key as usize) else {
            return;
        };
        if let BridgePeer::App(end) = &bridge.end {
            let id = end.id;
            return self.app_shut(id, receive, send, cx);
        }
        if receive && !bridge.read_closed {
            // Nothing more goes to the guest: the host learns it by EPIPE.
            bridge.read_closed = true;
            match &mut bridge.end {
                BridgePeer::Socket { socket, .. } => {
                    host_sockets::stop_reading(socket);
                }
                BridgePeer::Sibling(s) => {
                    sibling::return_inbound(s, true, cx);
                    let to = s.peer.flow;
                    let message = Message::Shutdown {
                        to,
                        receive: true,
                        send: false,
                    };
                    cx.outbox.send(s.peer.device, message);
                }
                _ => {}
            }
        }
        if send && !bridge.guest_finished {
            bridge.guest_finished = true;
            // Everything that came before it goes first.
            self.flush(key, cx);
        }
        // What was waiting for the guest waits no more.
        self.settle(key, cx);
    }

    /// The vsock half has ended.
    fn guest_closed(&mut self, flow: FlowId, orderly: bool, cx: &mut Context<'_>) {
        if !self.gathered.is_empty() {
            self.gathered.forget(flow);
        }
        let Some(key) = self.key_of(flow) else { return };
        // One attempt for what came in the same turn.
        self.flush(key, cx);
        let Some(bridge) = self.bridges.get_mut(key as usize) else {
            return;
        };
        // The guest may have sent its last byte and then given up waiting. A reset in the middle
        // of its stream drops what was under way, as it would in a kernel.
        if bridge.guest_finished && self.linger(key, cx) {
            return;
        }
        if let Some(bridge) = self.remove_bridge(key, cx) {
            // Whose end was read, or whom we had stopped reading before, has left nothing.
            if let (BridgePeer::Socket { socket, .. }, true) =
                (&bridge.end, orderly && !bridge.read_closed)
            {
                host_sockets::leave_nothing_unread(socket);
            }
            sibling::tell_end(&bridge, orderly, cx);
            self.app_ended(&bridge, orderly, cx);
        }
    }

    /// Parts a bridge from its vsock half but lets the host socket take the bytes that are here, as
    /// it would from a kernel socket whose owner has gone. False: there is nothing to take, or
    /// nobody to take it.
    pub(super) fn linger(&mut self, key: u32, cx: &mut Context<'_>) -> bool {
        let Some(bridge) = self.bridges.get(key as usize) else {
            return false;
        };
        if bridge.outbound.is_empty()
            || !bridge.open
            || !matches!(bridge.end, BridgePeer::Socket { .. })
            || self.lingering.len() >= cx.limits.lingering
        {
            return false;
        }
        self.spill(key, 0, cx);
        let Some(bridge) = self.bridges.get_mut(key as usize) else {
            return false;
        };
        bridge.read_closed = true;
        bridge.guest_finished = true;
        if let Some(flow) = bridge.flow.take() {
            self.by_flow[flow.index()] = u32::MAX;
            self.start_lingering(key, cx);
        }
        self.settle(key, cx);
        true
    }

    /// Ends the vsock half of a bridge (if it is there) with a RST, and the bridge with it.
    pub(super) fn reset_bridge(&mut self, key: u32, cx: &mut Context<'_>) {
        if let Some(flow) = self.bridges.get(key as usize).and_then(|j| j.flow) {
            let _ = self.shard.reset(flow);
        }
        self.end_bridge(key, cx);
    }

    /// Removes a bridge whose guest is gone. If it had said that it sends no more, the other side has
    /// missed nothing, and reads to the end; else it is told that the connection was cut off.
    pub(super) fn part_bridge(&mut self, key: u32, cx: &mut Context<'_>) {
        if let Some(bridge) = self.remove_bridge(key, cx) {
            let orderly = bridge.guest_finished;
            sibling::tell_end(&bridge, orderly, cx);
            self.app_ended(&bridge, orderly, cx);
        }
    }

    /// Removes a bridge whose vsock half has been cut off and tells a sibling so.
    pub(super) fn end_bridge(&mut self, key: u32, cx: &mut Context<'_>) {
        if let Some(bridge) = self.remove_bridge(key, cx) {
            sibling::tell_end(&bridge, false, cx);
            self.app_ended(&bridge, false, cx);
        }
    }

    /// Answers what the timers say is due.
    pub(super) fn fire_timers(&mut self, cx: &mut Context<'_>) {
        while let Some(timer) = self.timers.pop(cx.now) {
            match timer {
                Timer::Handshake(key) => self.handshake_timed_out(key, cx),
                Timer::Connect(key) => self.connect_timed_out(key, cx),
                Timer::Backlog(to) => self.retry_connects(to, cx),
                Timer::Linger => self.linger_timed_out(cx),
                Timer::Accept(key) => self.accept(key, cx),
                Timer::Hold(key) => self.hold_timed_out(key, cx),
                // The turn itself looks again.
                Timer::Recall => {}
            }
        }
        if self.shard.poll_timeout().is_some_and(|t| t <= cx.now) {
            self.shard.handle_timeout(cx.now);
            self.drain_events(cx);
        }
        if self.datagrams.next_timeout().is_some_and(|t| t <= cx.now) {
            self.datagram_timeout(cx);
        }
    }

    /// A bridge has held chains for long enough.
    fn hold_timed_out(&mut self, key: u32, cx: &mut Context<'_>) {
        let Some(bridge) = self.bridges.get_mut(key as usize) else {
            return;
        };
        if !std::mem::take(&mut bridge.hold_timer) {
            return;
        }
        if bridge
            .held_since
            .is_none_or(|since| since + cx.limits.hold > cx.now)
        {
            // Held for less than that, or no more: look again in time.
            return self.settle(key, cx);
        }
        bridge.held_since = None;
        bridge.no_memory = false;
        if let BridgePeer::Sibling(s) = &mut bridge.end {
            s.stalled = true;
            let to = s.peer.flow;
            cx.outbox.send(s.peer.device, Message::Recall { to });
            return self.settle(key, cx);
        }
        self.spill(key, 0, cx);
        if let Some(bridge) = self.bridges.get_mut(key as usize) {
            // A send that failed for want of memory leaves no edge behind: try once more.
            bridge.writable |= bridge.open;
        }
        self.flush(key, cx);
    }

    /// Tells the driver that the device lost its connections (virtio 1.2, 5.10.6.7).
    pub(super) fn serve_events(&mut self) {
        if !self.announce_reset {
            return;
        }
        let Some(event) = self.event.as_mut() else {
            return;
        };
        if let Some(chain) = event.pop() {
            const TRANSPORT_RESET: [u8; 4] = 0u32.to_le_bytes();
            let written = event
                .queue
                .memory()
                .write(chain.writable(), 0, &TRANSPORT_RESET);
            event.complete(chain, written as u32);
            self.announce_reset = false;
            tracing::info!(cid = %self.cid, "told the driver that its connections are gone");
        }
    }
}
