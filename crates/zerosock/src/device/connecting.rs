//! Connects of the guest to host sockets, and the events of these sockets.

use std::sync::Arc;

use rustix::net::SocketType as SocketKind;
use zerosock_proto::Instant;
use zerosock_relay::connector::ConnectRequest;
use zerosock_relay::networks::AddressPolicy;
use zerosock_relay::target::Target;
use zerosock_virtio::poller::{Interest, Readiness};

use super::backlog::Tried;
use super::state::bridge::{Bridge, BridgePeer};
use super::state::bridge_state::BridgeEvent;
use super::state::flags::Flags;
use super::state::timers::Timer;
use super::virtio::BRIDGE;
use crate::device::guest_bridges::GuestBridges;
use crate::device::host_sockets::{Attempt, HostPort, HostSocket, Refusal, forward};
use crate::device::state::host::HostAccess;
use crate::stats::RefusalCause;

impl GuestBridges<'_, '_> {
    /// Tries to connect a bridge of the guest to its host socket.
    pub(super) fn try_connect(&mut self, key: u32) -> Tried {
        let Some(bridge) = self.device.bridges.get(key) else {
            return Tried::Decided;
        };
        let BridgePeer::Retrying { to, deadline } = bridge.peer else {
            return Tried::Decided;
        };
        let HostPort { port, messages } = to;
        let account = &self.device.account;
        let attempt = match &self.device.host {
            HostAccess::Hybrid { messages: way, .. } if messages => match way {
                Some((services, _)) => services.connect(port, SocketKind::SEQPACKET, account),
                None => Attempt::Refused(std::io::ErrorKind::ConnectionRefused.into()),
            },
            HostAccess::Hybrid { services, .. } => {
                services.connect(port, SocketKind::STREAM, account)
            }
            HostAccess::Forward { .. } if messages => {
                Attempt::Refused(std::io::ErrorKind::Unsupported.into())
            }
            HostAccess::Forward { cid, .. } => forward::connect(*cid, port, account),
            HostAccess::None => Attempt::Refused(std::io::ErrorKind::ConnectionRefused.into()),
        };
        match attempt {
            Attempt::Ready(socket) => self.host_connected(key, socket),
            Attempt::InProgress(socket) => {
                self.watch(key, BridgePeer::Connecting { socket, deadline });
                self.device.timers.set(deadline, Timer::Connect(key));
            }
            Attempt::Later => return Tried::Full,
            Attempt::NeedsConnector => self.dial_service(key, to, deadline),
            Attempt::Refused(error) => {
                let mut refusal = Refusal::by_unix_socket(error);
                if let Some(path) = self.device.host.service_path(port, messages) {
                    refusal.reason = format!("{}: {}", path.display(), refusal.reason);
                }
                self.refuse(key, &refusal);
            }
        }
        Tried::Decided
    }

    /// Lets the connector connect a bridge to its host program.
    fn dial_service(&mut self, key: u32, to: HostPort, deadline: Instant) {
        let HostPort { port, messages } = to;
        let flow = self.device.bridges.get(key).and_then(|bridge| bridge.flow);
        let path = self.device.host.service_path(port, messages);
        let (Some(flow), Some(path)) = (flow, path) else {
            return;
        };
        let request = ConnectRequest {
            target: match messages {
                true => Target::UnixSeqpacket(path),
                false => Target::Unix(path),
            },
            policy: Arc::new(AddressPolicy::for_guests(Vec::new(), Vec::new())),
            timeout: deadline.saturating_duration_since(self.cx.now),
            keepalive: None,
            first_bytes: Vec::new(),
            // A path is one address.
            attempts: 1,
        };
        if let Some(bridge) = self.device.bridges.get_mut(key) {
            bridge.peer = BridgePeer::Resolving(None);
        }
        self.dial(key, flow, request);
    }

    /// Refuses a connect after its deadline.
    pub(super) fn connect_timed_out(&mut self, key: u32) {
        match self.device.bridges.get(key).map(|bridge| &bridge.peer) {
            Some(BridgePeer::Connecting { deadline, .. }) if *deadline <= self.cx.now => {
                let reason = "no answer before the connect deadline";
                let refusal = Refusal::new(RefusalCause::Unreachable, reason);
                self.refuse(key, &refusal);
            }
            _ => {}
        }
    }

    /// Rejects the guest's connection: no host program accepted it.
    pub(super) fn refuse(&mut self, key: u32, refusal: &Refusal) {
        self.cx.shared.counters.refuse(refusal.cause);
        let reason = &*refusal.reason;
        let bridge = self.device.bridges.get(key);
        if let Some(forwarded) = bridge.and_then(|bridge| bridge.forwarded.as_ref()) {
            self.device.refuse_forwarded(forwarded, reason);
        }
        if let Some(flow) = bridge.and_then(|bridge| bridge.flow) {
            let port = self.device.shard.flow(flow).map(|f| f.local.port);
            let port = port.map(tracing::field::display);
            tracing::debug!(cid = %self.device.cid, %flow, port, reason, "connection of the guest refused");
            let _ = self.device.shard.reject(flow);
        }
        self.remove_bridge(key);
    }

    /// Sets the socket of a bridge and adds it to the poller. Returns false if that failed.
    pub(super) fn watch(&mut self, key: u32, end: BridgePeer) -> bool {
        let token = self.device.token(BRIDGE, key);
        let Some(bridge) = self.device.bridges.get_mut(key) else {
            return false;
        };
        bridge.peer = end;
        let (socket, interest) = match &bridge.peer {
            BridgePeer::Connecting { socket, .. } => (socket, Interest::All),
            BridgePeer::Socket { socket, .. } => (socket, Interest::Incoming),
            _ => return false,
        };
        match self.cx.poller.add(socket, token, interest) {
            Ok(()) => true,
            Err(error) => {
                self.refuse(key, &Refusal::from(error));
                false
            }
        }
    }

    pub(super) fn host_connected(&mut self, key: u32, socket: HostSocket) {
        if self.watch(key, BridgePeer::Socket { socket, ok: None }) {
            self.host_accepted(key);
            // The socket was added to the poller after it connected, so readable data produces an
            // edge; a read now would almost always find nothing.
            if let Some(bridge) = self.device.bridges.get_mut(key) {
                bridge.flags.remove(Flags::READABLE);
            }
        }
    }

    pub(super) fn host_accepted(&mut self, key: u32) {
        let Some(bridge) = self.device.bridges.get_mut(key) else {
            return;
        };
        bridge.state.apply(BridgeEvent::Connected);
        bridge.flags.insert(Flags::READABLE.union(Flags::WRITABLE));
        if let Some(flow) = bridge.flow {
            let _ = self.device.shard.accept(self.cx.now, flow);
            self.device.log_flow(flow, "connection opened");
        }
        let bridge = self.device.bridges.get(key);
        if bridge.is_some_and(|bridge| bridge.forwarded.is_some()) {
            self.forwarded_opened(key);
        }
        self.device.bridges.enqueue(key);
    }

    /// Handles an edge of a bridge's socket.
    pub(crate) fn bridge_ready(&mut self, key: u32, readiness: Readiness) {
        let Some(bridge) = self.device.bridges.get_mut(key) else {
            return;
        };
        match &bridge.peer {
            BridgePeer::Connecting { .. } if readiness.writable() => {
                return self.connect_decided(key, readiness);
            }
            BridgePeer::Socket { .. } => {}
            _ => return,
        }
        let readiness = self.handle_reports(key, readiness);
        let Some(bridge) = self.device.bridges.get_mut(key) else {
            return;
        };
        if readiness.readable() {
            bridge.set_readable();
        }
        if readiness.writable() {
            bridge.flags.insert(Flags::WRITABLE);
        }
        if readiness.urgent() {
            bridge.flags.insert(Flags::URGENT);
        }
        let (is_open, reads) = (bridge.state.is_open(), bridge.state.reads());
        if readiness.peer_finished() {
            if readiness.hung_up() && !reads && self.tcp_reset_after_end(key) {
                return;
            }
            self.on_bridge_event(key, end_of(readiness));
        }
        if !is_open {
            // Not even if the program has gone: bytes that it wrote are still to be delivered.
            return;
        }
        let has_bytes = |bridge: &Bridge| !bridge.outbound.is_empty();
        self.device.bridges.enqueue(key);
        if readiness.writable() && self.device.bridges.get(key).is_some_and(has_bytes) {
            self.flush(key);
        }
    }

    fn connect_decided(&mut self, key: u32, readiness: Readiness) {
        let Some(bridge) = self.device.bridges.get_mut(key) else {
            return;
        };
        let placeholder = BridgePeer::Asked(None);
        let BridgePeer::Connecting { socket, deadline } =
            std::mem::replace(&mut bridge.peer, placeholder)
        else {
            return;
        };
        self.device.timers.cancel(deadline, Timer::Connect(key));
        match rustix::net::sockopt::socket_error(&socket) {
            Ok(Ok(())) => {
                bridge.peer = BridgePeer::Socket { socket, ok: None };
                // The same edge may report bytes and the end of a peer that has closed already.
                if readiness.peer_finished() {
                    bridge.state.apply(end_of(readiness));
                }
                if readiness.urgent() {
                    bridge.flags.insert(Flags::URGENT);
                }
                self.host_accepted(key);
            }
            Ok(Err(e)) | Err(e) => {
                self.refuse(key, &Refusal::from(std::io::Error::from(e)));
            }
        }
    }
}

/// The end of a host socket that its readiness reports.
fn end_of(readiness: Readiness) -> BridgeEvent {
    match readiness.hung_up() {
        true => BridgeEvent::HostGone,
        false => BridgeEvent::HostFinished,
    }
}
