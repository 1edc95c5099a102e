//! Events of the protocol core and expired timers, and the device's actions on them.

use super::ends::{end_host, end_other_side, stop_host};
use super::forwarded::set_reason;
use super::guest_ports::is_guest_port;
use super::state::bridge::BridgePeer;
use super::state::bridge_state::{BridgeAction, BridgeEvent};
use super::state::flags::Flags;
use super::state::timers::Timer;
use super::{Context, Device};
use crate::device::guest_bridges::GuestBridges;
use crate::device::host_sockets::{self, hybrid};
use crate::device::state::peer::Peer;
use crate::device::state::sibling_message::SiblingMessage;
use crate::header;
use crate::stats::RefusalCause;
use zerosock_proto::vsock::{Event, FlowId, RefuseReason};
use zerosock_proto::wire::vsock::{HEADER_LEN, Repr, SocketType};
use zerosock_proto::{Address, Cid};
use zerosock_ring::Chain;
use zerosock_virtio::ring::Ring;

/// Writes `repr` in front of the `len` payload bytes in `chain` and completes the chain.
#[inline(always)] // keeps the header in registers
pub(super) fn emit(rx: &mut Ring, chain: Chain, repr: &Repr, len: usize) {
    header::write(rx.queue.memory(), chain.writable(), repr);
    rx.complete(chain, (HEADER_LEN + len) as u32);
}

/// The reason in the log when a device or its guest has gone.
pub(super) const GONE: &str = "the endpoint has gone";
/// The reason in the log when the device resets a connection.
pub(super) const RESET: &str = "reset by the daemon";

impl Device {
    /// Handles all pending events of the core.
    #[inline]
    pub(super) fn drain_events(&mut self, cx: &mut Context<'_>) {
        while let Some(event) = self.shard.poll_event() {
            self.handle_event(event, cx);
        }
    }

    fn handle_event(&mut self, event: Event, cx: &mut Context<'_>) {
        match event {
            Event::Incoming {
                flow,
                local,
                peer,
                socket_type,
            } => self.guest_requests(flow, local, peer, socket_type, cx),
            Event::Connected { flow } => self.guest_accepted(flow, cx),
            Event::Refused { flow, reason } => self.connect_refused(flow, reason, cx),
            Event::PeerShutdown {
                flow,
                receive,
                send,
            } => {
                self.guest_shut_down(flow, receive, send, cx);
            }
            Event::Writable { flow } => {
                if let Some((key, bridge)) = self.bridges.of_flow(flow) {
                    bridge.flags.remove(Flags::WAITS);
                    self.bridges.enqueue(key);
                } else if let Some(id) = self.app.flows.get(flow)
                    && let Some(app) = cx.shared.app.as_deref_mut()
                {
                    app.sockets.set_writable(id);
                }
            }
            Event::Closed { flow, reason } => self.guest_closed(flow, reason.is_orderly(), cx),
        }
    }

    /// The guest requests a connection.
    fn guest_requests(
        &mut self,
        flow: FlowId,
        local: Address,
        peer: Address,
        socket_type: SocketType,
        cx: &mut Context<'_>,
    ) {
        if local.cid == Cid::HOST {
            if is_guest_port(local.port) && self.guests.as_ref().is_some_and(|it| it.is_open) {
                return self.open_guest_port(flow, local.port, peer, socket_type, cx);
            }
            if let Err(denial) = cx.shared.routes.admit(self.cid, local) {
                self.deny(peer, local, denial, cx);
                let _ = self.shard.reject(flow);
                return;
            }
            if self.half(cx).incoming(flow, local, peer, socket_type) {
                return;
            }
        }
        if !self.bridges_with(cx).reserve_bridge(flow) {
            cx.shared.counters.refuse(RefusalCause::Limit);
            return;
        }
        let routes = &cx.shared.routes;
        if local.cid != Cid::HOST || routes.service(local.port).is_some() {
            return self
                .bridges_with(cx)
                .ask_sibling(flow, local, peer, socket_type);
        }
        match routes
            .forward_rule(self.cid, local.port, socket_type)
            .cloned()
        {
            Some(rule) => self
                .bridges_with(cx)
                .forward_connect(flow, peer, local.port, &rule),
            None => self.bridges_with(cx).guest_connects(flow, local.port),
        }
    }

    /// The guest has refused a connection of the host or a sibling, or has not answered in time.
    fn connect_refused(&mut self, flow: FlowId, reason: RefuseReason, cx: &mut Context<'_>) {
        if reason == RefuseReason::Reset {
            let waits = self.bridges_with(cx).guest_connect_refused(flow);
            if waits {
                return;
            }
        }
        self.count_refused(flow, reason, cx);
        if let Some(id) = self.app.flows.get(flow)
            && let Some(app) = cx.shared.app.as_deref_mut()
        {
            app.sockets.refused(id, reason);
        }
        let Some(key) = self.bridges.key_of(flow) else {
            return self.half(cx).end_app(flow, false, GONE);
        };
        let bridge = self.bridges.get(key);
        if let Some(forwarded) = bridge.and_then(|bridge| bridge.forwarded.as_ref()) {
            self.refuse_forwarded(forwarded, "its endpoint refuses the connection");
        }
        self.bridges_with(cx).end_bridge(key);
    }

    /// The guest has accepted a connection of the host or a sibling.
    fn guest_accepted(&mut self, flow: FlowId, cx: &mut Context<'_>) {
        self.log_flow(flow, "connection opened");
        if let Some(id) = self.app.flows.get(flow) {
            if let Some(app) = cx.shared.app.as_deref_mut() {
                app.sockets.connected(id);
            }
            return;
        }
        let Some(key) = self.bridges.key_of(flow) else {
            return;
        };
        self.bridges_with(cx).guest_connect_accepted(flow);
        let Some(bridge) = self.bridges.get_mut(key) else {
            return;
        };
        bridge.state.apply(BridgeEvent::Connected);
        match &mut bridge.peer {
            BridgePeer::Socket { socket, ok } => {
                // Whether there are bytes was recorded before the guest answered.
                let forwarded = bridge.forwarded.as_ref();
                if forwarded.is_some_and(|it| it.has_header()) {
                    bridge.flags.insert(Flags::READABLE);
                }
                bridge.flags.insert(Flags::WRITABLE);
                if let Some(port) = ok.take()
                    && !hybrid::write_ok(&*socket, port)
                {
                    return self.bridges_with(cx).reset_bridge(key);
                }
            }
            BridgePeer::Sibling(s) => {
                let Peer { device, flow: to } = s.peer;
                cx.outbox.send(device, SiblingMessage::Accepted { to });
                bridge.flags.set(Flags::READABLE, !s.is_drained());
                // A sibling counts as writable until it stalls.
                bridge.flags.insert(Flags::WRITABLE);
            }
            _ => {}
        }
        self.bridges_with(cx).forwarded_opened(key);
        self.bridges.enqueue(key);
    }

    fn guest_shut_down(&mut self, flow: FlowId, receive: bool, send: bool, cx: &mut Context<'_>) {
        if receive && !self.coalesced.is_empty() {
            self.coalesced.forget(flow);
        }
        if let Some(id) = self.app.flows.get(flow) {
            if let Some(app) = cx.shared.app.as_deref_mut() {
                let store = &mut self.store();
                app.sockets.peer_shut_down(id, receive, send, store);
            }
            return;
        }
        let Some(key) = self.bridges.key_of(flow) else {
            return;
        };
        if receive {
            self.bridges_with(cx)
                .on_bridge_event(key, BridgeEvent::GuestStopped);
        }
        if send {
            self.bridges_with(cx)
                .on_bridge_event(key, BridgeEvent::GuestFinished);
        }
        // Bytes that waited for the guest were dropped.
        self.bridges_with(cx).update_bridge(key);
    }

    /// The flow of the guest has ended.
    fn guest_closed(&mut self, flow: FlowId, orderly: bool, cx: &mut Context<'_>) {
        if !self.coalesced.is_empty() {
            self.coalesced.forget(flow);
        }
        let reason = if orderly {
            "closed"
        } else {
            "reset by the endpoint"
        };
        let Some(key) = self.bridges.key_of(flow) else {
            return self.half(cx).end_app(flow, orderly, reason);
        };
        self.log_closed(key, reason);
        // One attempt to deliver what arrived in the same turn.
        self.bridges_with(cx).flush(key);
        let Some(bridge) = self.bridges.get_mut(key) else {
            return;
        };
        // After the guest's SHUTDOWN, its last bytes are still delivered. A reset in the middle of
        // its stream drops the bytes in flight, as a kernel would.
        bridge.read_reports(&mut self.queues.rings.tx, cx);
        let finished =
            bridge.state.has_guest_finished() || (orderly && bridge.has_sends_in_flight());
        if finished && self.bridges_with(cx).linger(key) {
            return;
        }
        if let Some(bridge) = self.bridges.get_mut(key)
            && !orderly
        {
            set_reason(bridge, "reset by the endpoint");
        }
        if let Some(bridge) = self.bridges_with(cx).remove_bridge(key) {
            // After end of file or `stop_reading` no unread bytes are left.
            if let (BridgePeer::Socket { socket, .. }, true) =
                (&bridge.peer, orderly && bridge.state.reads())
            {
                host_sockets::leave_nothing_unread(socket);
            }
            end_other_side(&bridge, orderly, cx);
        }
    }

    /// Handles expired timers of the device and the core.
    pub(super) fn fire_timers(&mut self, cx: &mut Context<'_>) {
        while let Some(timer) = self.timers.pop(cx.now) {
            match timer {
                Timer::Handshake(key) => self.bridges_with(cx).handshake_timed_out(key),
                Timer::Connect(key) => self.bridges_with(cx).connect_timed_out(key),
                Timer::Backlog(to) => self.bridges_with(cx).retry_connects(to),
                Timer::GuestBacklog(to) => self.bridges_with(cx).retry_guest_connects(to),
                Timer::Linger => self.bridges_with(cx).linger_timed_out(),
                Timer::Accept(key) => self.bridges_with(cx).accept(key),
                Timer::Hold(key) => self.hold_timed_out(key, cx),
                Timer::Idle(key) => self.bridges_with(cx).idle_timed_out(key),
                Timer::EndSends => self.bridges_with(cx).sends_timed_out(),
                Timer::Stopped => self.stop_timed_out(cx),
                Timer::Guests => self.guests_timed_out(cx),
            }
        }
        if self.shard.poll_timeout().is_some_and(|t| t <= cx.now) {
            self.shard.handle_timeout(cx.now);
            self.drain_events(cx);
        }
        if self.datagrams.next_timeout().is_some_and(|t| t <= cx.now) {
            self.datagrams_with(cx).datagram_timeout();
        }
    }

    /// Handles an expired hold limit.
    fn hold_timed_out(&mut self, key: u32, cx: &mut Context<'_>) {
        let Some(bridge) = self.bridges.get_mut(key) else {
            return;
        };
        if !bridge.flags.remove(Flags::HOLD_TIMER) {
            return;
        }
        if bridge
            .held_since
            .is_none_or(|since| since + cx.shared.limits.hold > cx.now)
        {
            // Other chains are held now: set a timer for the present ones.
            return self.bridges_with(cx).update_bridge(key);
        }
        bridge.held_since = None;
        bridge.flags.remove(Flags::NO_MEMORY);
        if let BridgePeer::Sibling(s) = &mut bridge.peer {
            s.stalled = true;
            let to = s.peer.flow;
            cx.outbox.send(s.peer.device, SiblingMessage::Recall { to });
            return self.bridges_with(cx).update_bridge(key);
        }
        self.bridges_with(cx).spill(key, 0);
        if let Some(bridge) = self.bridges.get_mut(key)
            && bridge.state.is_open()
        {
            // ENOBUFS and ENOMEM leave no edge: try once more.
            bridge.flags.insert(Flags::WRITABLE);
        }
        self.bridges_with(cx).flush(key);
    }

    /// Sends the driver the TRANSPORT_RESET event (virtio 1.2, 5.10.6.7). It resets all connections of the driver,
    /// so those that have begun since the queues run end here too.
    pub(super) fn send_reset_event(&mut self) {
        if !self.announce_reset {
            return;
        }
        let Some(event) = self.queues.rings.event.as_mut() else {
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
            self.reset_next = Some((0, 0));
            tracing::info!(
                cid = %self.cid,
                "sent TRANSPORT_RESET: the device has lost the connections of the driver"
            );
        }
    }
}

impl GuestBridges<'_, '_> {
    /// Changes the state of a bridge, and does what follows from it.
    pub(super) fn on_bridge_event(&mut self, key: u32, event: BridgeEvent) {
        let Some(bridge) = self.device.bridges.get_mut(key) else {
            return;
        };
        match bridge.state.apply(event) {
            BridgeAction::Nothing => {}
            BridgeAction::Flush => self.flush(key),
            BridgeAction::EndHost => end_host(bridge, self.cx),
            BridgeAction::StopHost => stop_host(bridge, self.cx),
            BridgeAction::ShutDownFlow(how) => {
                if let Some(flow) = bridge.flow {
                    // Fails if the flow has ended.
                    let _ = self.device.shard.shutdown(self.cx.now, flow, how);
                }
            }
        }
    }

    /// Separates a bridge from its flow and lets the host socket take the remaining bytes, as it
    /// would from a closed kernel socket. Returns false if there are no such bytes or no open host
    /// socket, or the limit of lingering sockets is reached.
    pub(super) fn linger(&mut self, key: u32) -> bool {
        let Some(bridge) = self.device.bridges.get(key) else {
            return false;
        };
        if bridge.is_delivered()
            || !bridge.state.is_open()
            || !matches!(bridge.peer, BridgePeer::Socket { .. })
            || self.device.lingering.len() >= self.cx.shared.limits.lingering
        {
            return false;
        }
        self.spill(key, 0);
        let Some(bridge) = self.device.bridges.get_mut(key) else {
            return false;
        };
        bridge.state.apply(BridgeEvent::FlowEnded);
        if bridge.flow.take().is_some() {
            let limit = self.cx.shared.limits.linger;
            self.device
                .lingering
                .start(key, self.cx.now, limit, &mut self.device.timers);
        }
        self.update_bridge(key);
        true
    }

    /// Resets the flow of a bridge, if it has one, and removes the bridge.
    pub(super) fn reset_bridge(&mut self, key: u32) {
        if let Some(bridge) = self.device.bridges.get_mut(key) {
            set_reason(bridge, RESET);
            if let Some(flow) = bridge.flow {
                let _ = self.device.shard.reset(flow);
            }
        }
        self.end_with(key, RESET);
    }

    /// Removes a bridge without its guest. The other end sees an orderly end of stream if the
    /// guest had shut down sending before, else a reset.
    pub(super) fn remove_without_guest(&mut self, key: u32) {
        self.device.log_closed(key, GONE);
        if let Some(bridge) = self.device.bridges.get_mut(key)
            && !bridge.state.has_guest_finished()
        {
            set_reason(bridge, GONE);
        }
        if let Some(bridge) = self.remove_bridge(key) {
            let orderly = bridge.state.has_guest_finished();
            end_other_side(&bridge, orderly, self.cx);
        }
    }

    /// Removes a bridge after a reset of its flow, and resets the other end.
    pub(super) fn end_bridge(&mut self, key: u32) {
        self.end_with(key, GONE);
    }

    fn end_with(&mut self, key: u32, reason: &'static str) {
        self.device.log_closed(key, reason);
        if let Some(bridge) = self.device.bridges.get_mut(key) {
            set_reason(bridge, reason);
        }
        if let Some(bridge) = self.remove_bridge(key) {
            end_other_side(&bridge, false, self.cx);
        }
    }
}
