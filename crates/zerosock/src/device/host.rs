//! The host side of a device: listeners, CONNECT handshakes, and connects to host programs.

use super::backlog::Tried;
use super::state::bridge::{Bridge, BridgePeer};
use super::state::guest_backlogs::GuestConnect;
use super::state::timers::Timer;
use super::virtio::{BRIDGE, HANDSHAKE, LISTENER};
use super::{Context, Device};
use crate::device::host_sockets::hybrid::{self, Line, OkConvention};
use crate::device::host_sockets::{Attempt, HostPort, HostSocket, Refusal, forward};
use crate::device::state::host::{Caller, Handshake, HostAccess};
use crate::device::state::sibling_message::SiblingMessage;
use crate::stats::RefusalCause;
use rustix::fd::{AsFd, BorrowedFd};
use rustix::io::Errno;
use rustix::net::{SocketFlags, SocketType as SocketKind};
use std::sync::Arc;
use std::time::Duration;
use zerosock_proto::vsock::{Directions, FlowId, QueuePairs};
use zerosock_proto::wire::vsock::SocketType;
use zerosock_proto::{Address, Cid, Instant, Port};
use zerosock_relay::connector::ConnectRequest;
use zerosock_relay::networks::AddressPolicy;
use zerosock_relay::target::Target;
use zerosock_sys::PeerFd;
use zerosock_virtio::poller::{EventKind, Interest, Readiness, Token};

/// Pause after an accept that failed for lack of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Connections accepted per call.
const ACCEPT_BUDGET: usize = 64;

/// Poller keys of a hybrid device's listeners.
const STREAMS: u32 = 0;
const MESSAGES: u32 = 1;

impl Device {
    /// Adds the listeners to the poller. The worker that owns the device calls it once.
    pub(crate) fn listen(&mut self, cx: &Context<'_>) -> std::io::Result<()> {
        let watch = |listener: BorrowedFd<'_>, key| {
            let token = self.token(LISTENER, key);
            cx.poller.add(listener, token, Interest::Read)
        };
        match &self.host {
            HostAccess::Hybrid {
                listener, messages, ..
            } => {
                if let Some(listener) = listener {
                    watch(listener.as_fd(), STREAMS)?;
                }
                if let Some((_, Some(listener))) = messages {
                    watch(listener.as_fd(), MESSAGES)?;
                }
                Ok(())
            }
            HostAccess::Forward { listeners, .. } => {
                for (key, (_, listener)) in listeners.iter().enumerate() {
                    watch(listener.as_fd(), key as u32)?;
                }
                Ok(())
            }
            HostAccess::None => Ok(()),
        }
    }

    /// The name of a descriptor in the poller.
    pub(super) fn token(&self, kind: EventKind, key: u32) -> Token {
        Token {
            device: self.addr.number,
            kind,
            key,
        }
    }

    /// Removes the listeners from the poller. The reaper closes them later; until then they would
    /// be reported again and again.
    pub(super) fn stop_listening(&self, cx: &Context<'_>) {
        if let HostAccess::Hybrid {
            listener, messages, ..
        } = &self.host
        {
            let of_messages = messages.iter().flat_map(|(_, listener)| listener);
            for listener in listener.iter().chain(of_messages) {
                cx.poller.remove(listener);
            }
        }
    }

    /// Accepts pending connections of a listener, up to a budget.
    pub(crate) fn accept(&mut self, key: u32, cx: &mut Context<'_>) {
        if self.account.is_clogged() {
            // Closes of this account's earlier sockets are stuck: accept no more for now.
            self.timers.set(cx.now + ACCEPT_PAUSE, Timer::Accept(key));
            return;
        }
        for _ in 0..ACCEPT_BUDGET {
            let mut socket_type = SocketType::Stream;
            let found = match &self.host {
                HostAccess::Hybrid {
                    messages: Some((_, Some(listener))),
                    ..
                } if key == MESSAGES => {
                    socket_type = SocketType::SeqPacket;
                    Some((listener.as_fd(), None))
                }
                HostAccess::Hybrid { listener, .. } => {
                    listener.as_ref().map(|one| (one.as_fd(), None))
                }
                HostAccess::Forward { listeners, .. } => {
                    let of_port = listeners.get(key as usize);
                    of_port.map(|(port, listener)| (listener.as_fd(), Some(*port)))
                }
                HostAccess::None => None,
            };
            let Some((listener, port)) = found else {
                return;
            };
            let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
            match rustix::net::accept_with(listener, flags) {
                Ok(socket) => match (port, self.account.take_descriptors(1)) {
                    (_, Err(exceeded)) => {
                        // No HostSocket was made of it yet, so its close waits for the program
                        // only if descriptors are queued in it.
                        drop(PeerFd::from(socket).owned_by(&self.account));
                        cx.shared.counters.refuse(RefusalCause::Limit);
                        self.warn(&format!("host program refused: {exceeded}"));
                    }
                    (None, Ok(permit)) => {
                        let socket = HostSocket::accepted(socket, permit);
                        self.begin_handshake(socket, socket_type, cx);
                    }
                    (Some(port), Ok(permit)) => {
                        let socket = HostSocket::vsock(socket, permit);
                        let caller = Caller {
                            socket,
                            socket_type,
                            to: Port::new(port),
                            wants_ok: false,
                            forwarded: None,
                        };
                        self.call_guest(caller, false, cx);
                    }
                },
                Err(Errno::AGAIN) => return,
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(e) => {
                    // Most likely out of descriptors. The edge is used up: retry after a pause.
                    self.warn(&format!(
                        "cannot accept a connection of a host program: {e}"
                    ));
                    self.timers.set(cx.now + ACCEPT_PAUSE, Timer::Accept(key));
                    return;
                }
            }
        }
        // There may be more and the edge is used up: continue in the next turn.
        let next = cx.now + Duration::from_nanos(1);
        self.timers.set(next, Timer::Accept(key));
    }

    /// Logs a warning. Peers can cause any number of them, and a write to the log can block: so
    /// their rate is limited.
    pub(super) fn warn(&self, text: &str) {
        if let Some(suppressed) = self.warnings.admit(std::time::Instant::now()) {
            tracing::warn!(cid = %self.cid, suppressed, "{text}");
        }
    }

    fn begin_handshake(
        &mut self,
        socket: HostSocket,
        socket_type: SocketType,
        cx: &mut Context<'_>,
    ) {
        // Most programs have sent the line already: such a socket is added to the poller once, as a
        // bridge's.
        let line = hybrid::read_line(&socket, socket_type);
        if line != Line::Partial {
            return self.end_handshake(socket, socket_type, line, false, cx);
        }
        let limit = cx.shared.limits.handshakes;
        if self.handshakes.len() >= limit {
            cx.shared.counters.refuse(RefusalCause::Limit);
            return self.warn(&format!(
                "host program refused: {limit} others have not sent their CONNECT lines yet"
            ));
        }
        let deadline = cx.now + cx.shared.limits.handshake;
        let entry = self.handshakes.vacant_entry();
        let key = entry.key() as u32;
        let token = Token {
            device: self.addr.number,
            kind: HANDSHAKE,
            key,
        };
        // Bytes that have arrived since the line was read are reported.
        if let Err(error) = cx.poller.add(&socket, token, Interest::ReadUntilEnd) {
            self.warn(&format!(
                "cannot add a host program's socket to the poller: {error}"
            ));
            return;
        }
        entry.insert(Handshake {
            socket,
            socket_type,
            deadline,
        });
        self.timers.set(deadline, Timer::Handshake(key));
    }

    /// Handles bytes from a host program with an incomplete CONNECT line, and its end.
    pub(crate) fn handshake_ready(&mut self, key: u32, readiness: Readiness, cx: &mut Context<'_>) {
        let Some(handshake) = self.handshakes.get(key as usize) else {
            return;
        };
        let line = match hybrid::read_line(&handshake.socket, handshake.socket_type) {
            // No byte follows those that were read: the peek does not consume them, so it never
            // returns 0 for the end of file behind them.
            Line::Partial if readiness.peer_finished() => Line::CLOSED,
            line => line,
        };
        if line != Line::Partial {
            let done = self.handshakes.remove(key as usize);
            self.timers.cancel(done.deadline, Timer::Handshake(key));
            self.end_handshake(done.socket, done.socket_type, line, true, cx);
        }
    }

    /// Connects the program that has sent this line, or refuses it. `watched`: its socket is in the
    /// poller.
    fn end_handshake(
        &mut self,
        socket: HostSocket,
        socket_type: SocketType,
        line: Line,
        watched: bool,
        cx: &mut Context<'_>,
    ) {
        match line {
            Line::Connect(to) => {
                let caller = Caller {
                    socket,
                    socket_type,
                    to,
                    wants_ok: true,
                    forwarded: None,
                };
                self.call_guest(caller, watched, cx);
            }
            Line::Bad(reason) => {
                if watched {
                    forget_handshake(&socket, cx);
                }
                tracing::debug!(cid = %self.cid, reason, "host program refused: bad CONNECT line");
                cx.shared.counters.bad_handshakes.add(1);
            }
            Line::Partial => {}
        }
    }

    pub(super) fn handshake_timed_out(&mut self, key: u32, cx: &Context<'_>) {
        let due = self
            .handshakes
            .get(key as usize)
            .is_some_and(|h| h.deadline <= cx.now);
        if due {
            let handshake = self.handshakes.remove(key as usize);
            forget_handshake(&handshake.socket, cx);
            tracing::debug!(cid = %self.cid, "host program refused: no CONNECT line in time");
            cx.shared.counters.bad_handshakes.add(1);
        }
    }

    /// Connects a host program to the guest, at the queue pair to which the connection belongs.
    /// `watched`: the program's socket is in the poller.
    pub(super) fn call_guest(&mut self, caller: Caller, watched: bool, cx: &mut Context<'_>) {
        let guest = Address::new(self.cid, caller.to);
        if self.queue_pairs.used == QueuePairs::ONE {
            return self.connect_guest(caller, Port::ANY, watched, cx);
        }
        let local = Address::new(Cid::HOST, self.shard.spare_port());
        match self.queue_pair_for(guest, local) {
            Some(queue_pair) => {
                if watched {
                    cx.poller.remove(&caller.socket);
                }
                let (caller, local) = (Box::new(caller), local.port);
                cx.outbox
                    .send(queue_pair, SiblingMessage::Call { caller, local });
            }
            None => self.connect_guest(caller, local.port, watched, cx),
        }
    }

    /// Connects a host program to the guest, from port `local`. On failure the socket is closed,
    /// which tells the program.
    pub(super) fn connect_guest(
        &mut self,
        caller: Caller,
        local: Port,
        watched: bool,
        cx: &mut Context<'_>,
    ) {
        let Some(caller) = self.wait_for_listener(caller, watched, cx) else {
            return;
        };
        let deadline = cx.now + cx.shared.limits.connect;
        self.try_guest_connect(caller, local, watched, deadline, cx);
    }

    /// Sends the guest the request of a program, which it has to answer before `deadline`. Returns the
    /// flow, or `None` if the program is refused.
    pub(super) fn try_guest_connect(
        &mut self,
        caller: Caller,
        local: Port,
        watched: bool,
        deadline: Instant,
        cx: &mut Context<'_>,
    ) -> Option<FlowId> {
        let Some(flow) = self.begin_connect(&caller, local, cx) else {
            if watched {
                forget_handshake(&caller.socket, cx);
            }
            if let Some(forwarded) = &caller.forwarded {
                self.refuse_forwarded(forwarded, "its endpoint cannot be connected to");
            }
            caller.socket.abort();
            return None;
        };
        let Caller {
            socket,
            socket_type,
            to: port,
            wants_ok,
            forwarded,
        } = caller;
        let left = deadline.saturating_duration_since(cx.now);
        // Fails if the flow has ended.
        let _ = self.shard.set_connect_timeout(cx.now, flow, left);
        let connect = GuestConnect {
            to: port,
            socket_type,
            wants_ok,
            deadline,
        };
        self.await_answer(flow, connect);
        let given = self.shard.flow(flow).map_or(port, |f| f.local.port);
        let ok = wants_ok.then_some(match cx.shared.limits.ok {
            OkConvention::GuestPort => port,
            OkConvention::HostPort => given,
        });
        let key = self.add_bridge(flow, BridgePeer::Socket { socket, ok }, cx);
        let token = self.token(BRIDGE, key);
        let bridge = self.bridges.get_mut(key)?;
        bridge.forwarded = forwarded;
        let BridgePeer::Socket { socket, .. } = &bridge.peer else {
            return None;
        };
        let watched = match watched {
            true => cx.poller.change(socket, token, Interest::Incoming),
            false => cx.poller.add(socket, token, Interest::Incoming),
        };
        if let Err(error) = watched {
            self.warn(&format!(
                "cannot add a host program's socket to the poller: {error}"
            ));
            self.reset_bridge(key, cx);
            return None;
        }
        Some(flow)
    }

    /// Sends the guest a request of a host program. `None`: the program is refused.
    fn begin_connect(
        &mut self,
        caller: &Caller,
        local: Port,
        cx: &mut Context<'_>,
    ) -> Option<FlowId> {
        let port = caller.to;
        if !self.accepts_requests() {
            cx.shared.counters.refuse(RefusalCause::Unreachable);
            tracing::debug!(cid = %self.cid, %port, "host program refused: no driver runs");
            return None;
        }
        let peer = Address {
            cid: self.cid,
            port,
        };
        let local = Address::new(Cid::HOST, self.port_here(local, peer));
        // A client of a rule is connected to a service by the port that it has claimed.
        let service = self.service.is_some()
            && caller.forwarded.is_some()
            && cx.shared.routes.service(port) == Some(self.queue_pairs.first());
        if !service && let Err(denial) = cx.shared.routes.admit(Cid::HOST, peer) {
            self.deny(local, peer, denial, cx);
            return None;
        }
        match self.shard.connect(cx.now, local, peer, caller.socket_type) {
            Ok(flow) => {
                self.log_flow(flow, "connection requested");
                Some(flow)
            }
            Err(error) => {
                cx.shared.counters.refuse(error.into());
                self.warn(&format!(
                    "cannot connect to port {port} of the guest: {error}"
                ));
                None
            }
        }
    }

    /// Tries to connect a bridge of the guest to its host socket.
    pub(super) fn try_connect(&mut self, key: u32, cx: &mut Context<'_>) -> Tried {
        let Some(bridge) = self.bridges.get(key) else {
            return Tried::Decided;
        };
        let BridgePeer::Retrying { to, deadline } = bridge.peer else {
            return Tried::Decided;
        };
        let HostPort { port, messages } = to;
        let account = &self.account;
        let attempt = match &self.host {
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
            Attempt::Ready(socket) => self.host_connected(key, socket, cx),
            Attempt::InProgress(socket) => {
                self.watch(key, BridgePeer::Connecting { socket, deadline }, cx);
                self.timers.set(deadline, Timer::Connect(key));
            }
            Attempt::Later => return Tried::Full,
            Attempt::NeedsConnector => self.dial_service(key, to, deadline, cx),
            Attempt::Refused(error) => {
                let mut refusal = Refusal::by_unix_socket(error);
                if let Some(path) = self.host.service_path(port, messages) {
                    refusal.reason = format!("{}: {}", path.display(), refusal.reason);
                }
                self.refuse(key, &refusal, cx);
            }
        }
        Tried::Decided
    }

    /// Lets the connector connect a bridge to its host program.
    fn dial_service(&mut self, key: u32, to: HostPort, deadline: Instant, cx: &mut Context<'_>) {
        let HostPort { port, messages } = to;
        let flow = self.bridges.get(key).and_then(|bridge| bridge.flow);
        let path = self.host.service_path(port, messages);
        let (Some(flow), Some(path)) = (flow, path) else {
            return;
        };
        let request = ConnectRequest {
            target: match messages {
                true => Target::UnixSeqpacket(path),
                false => Target::Unix(path),
            },
            policy: Arc::new(AddressPolicy::for_guests(Vec::new(), Vec::new())),
            timeout: deadline.saturating_duration_since(cx.now),
            keepalive: None,
            first_bytes: Vec::new(),
            // A path is one address.
            attempts: 1,
        };
        if let Some(bridge) = self.bridges.get_mut(key) {
            bridge.peer = BridgePeer::Resolving(None);
        }
        self.dial(key, flow, request, cx);
    }

    /// Refuses a connect after its deadline.
    pub(super) fn connect_timed_out(&mut self, key: u32, cx: &mut Context<'_>) {
        if let Some(BridgePeer::Connecting { deadline, .. }) =
            self.bridges.get(key).map(|j| &j.peer)
            && *deadline <= cx.now
        {
            let reason = "no answer before the connect deadline";
            let refusal = Refusal::new(RefusalCause::Unreachable, reason);
            self.refuse(key, &refusal, cx);
        }
    }

    /// Rejects the guest's connection: no host program accepted it.
    pub(super) fn refuse(&mut self, key: u32, refusal: &Refusal, cx: &mut Context<'_>) {
        cx.shared.counters.refuse(refusal.cause);
        let reason = &*refusal.reason;
        let bridge = self.bridges.get(key);
        if let Some(forwarded) = bridge.and_then(|bridge| bridge.forwarded.as_ref()) {
            self.refuse_forwarded(forwarded, reason);
        }
        if let Some(flow) = bridge.and_then(|bridge| bridge.flow) {
            let port = self.shard.flow(flow).map(|f| f.local.port);
            let port = port.map(tracing::field::display);
            tracing::debug!(cid = %self.cid, %flow, port, reason, "connection of the guest refused");
            let _ = self.shard.reject(flow);
        }
        self.remove_bridge(key, cx);
    }

    /// Sets the socket of a bridge and adds it to the poller. Returns false if that failed.
    pub(super) fn watch(&mut self, key: u32, end: BridgePeer, cx: &mut Context<'_>) -> bool {
        let token = self.token(BRIDGE, key);
        let Some(bridge) = self.bridges.get_mut(key) else {
            return false;
        };
        bridge.peer = end;
        let (socket, interest) = match &bridge.peer {
            BridgePeer::Connecting { socket, .. } => (socket, Interest::All),
            BridgePeer::Socket { socket, .. } => (socket, Interest::Incoming),
            _ => return false,
        };
        match cx.poller.add(socket, token, interest) {
            Ok(()) => true,
            Err(error) => {
                self.refuse(key, &Refusal::from(error), cx);
                false
            }
        }
    }

    pub(super) fn host_connected(&mut self, key: u32, socket: HostSocket, cx: &mut Context<'_>) {
        if self.watch(key, BridgePeer::Socket { socket, ok: None }, cx) {
            self.host_accepted(key, cx);
            // The socket was added to the poller after it connected, so readable data produces an
            // edge; a read now would almost always find nothing.
            if let Some(bridge) = self.bridges.get_mut(key) {
                bridge.readable = false;
            }
        }
    }

    fn host_accepted(&mut self, key: u32, cx: &mut Context<'_>) {
        let Some(bridge) = self.bridges.get_mut(key) else {
            return;
        };
        bridge.open = true;
        bridge.readable = true;
        bridge.writable = true;
        if let Some(flow) = bridge.flow {
            let _ = self.shard.accept(cx.now, flow);
            self.log_flow(flow, "connection opened");
        }
        let bridge = self.bridges.get(key);
        if bridge.is_some_and(|bridge| bridge.forwarded.is_some()) {
            self.forwarded_opened(key, cx);
        }
        self.bridges.enqueue(key);
    }

    /// Handles an edge of a bridge's socket.
    pub(crate) fn bridge_ready(&mut self, key: u32, readiness: Readiness, cx: &mut Context<'_>) {
        let Some(bridge) = self.bridges.get_mut(key) else {
            return;
        };
        match &bridge.peer {
            BridgePeer::Connecting { .. } if readiness.writable() => {
                return self.connect_decided(key, readiness, cx);
            }
            BridgePeer::Socket { .. } => {}
            _ => return,
        }
        let readiness = self.handle_reports(key, readiness, cx);
        let Some(bridge) = self.bridges.get_mut(key) else {
            return;
        };
        bridge.readable |= readiness.readable();
        if readiness.readable() {
            bridge.stop_waiting_for_bytes();
        }
        bridge.writable |= readiness.writable();
        bridge.urgent |= readiness.urgent();
        bridge.host_finished |= readiness.peer_finished();
        bridge.host_gone |= readiness.hung_up();
        if !bridge.open {
            // Not even if the program has gone: bytes that it wrote are still to be delivered.
            return;
        }
        if bridge.host_gone && bridge.read_closed {
            if self.tcp_reset_after_end(key, cx) {
                return;
            }
            let Some(bridge) = self.bridges.get_mut(key) else {
                return;
            };
            // The program's end of stream was passed on before; now it has also stopped reading.
            if let Some(flow) = bridge.flow {
                let _ = self.shard.shutdown(cx.now, flow, Directions::BOTH);
            }
        }
        let has_bytes = |bridge: &Bridge| !bridge.outbound.is_empty();
        self.bridges.enqueue(key);
        if readiness.writable() && self.bridges.get(key).is_some_and(has_bytes) {
            self.flush(key, cx);
        }
    }

    fn connect_decided(&mut self, key: u32, readiness: Readiness, cx: &mut Context<'_>) {
        let Some(bridge) = self.bridges.get_mut(key) else {
            return;
        };
        let placeholder = BridgePeer::Asked(None);
        let BridgePeer::Connecting { socket, deadline } =
            std::mem::replace(&mut bridge.peer, placeholder)
        else {
            return;
        };
        self.timers.cancel(deadline, Timer::Connect(key));
        match rustix::net::sockopt::socket_error(&socket) {
            Ok(Ok(())) => {
                bridge.peer = BridgePeer::Socket { socket, ok: None };
                // The same edge may report bytes and the end of a peer that has closed already.
                bridge.host_finished |= readiness.peer_finished();
                bridge.host_gone |= readiness.hung_up();
                bridge.urgent |= readiness.urgent();
                self.host_accepted(key, cx);
            }
            Ok(Err(e)) | Err(e) => {
                self.refuse(key, &Refusal::from(std::io::Error::from(e)), cx);
            }
        }
    }
}

/// Removes a handshake's socket from the poller before it is dropped.
fn forget_handshake(socket: &HostSocket, cx: &Context<'_>) {
    if socket.is_closed_later() {
        // An event of the open socket would be attributed to the next handshake with this key.
        cx.poller.remove(socket);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::lab::DeviceFixture;
    use std::io::Write;
    use std::os::unix::net::UnixStream;
    use zerosock_virtio::poller::{Events, Poller};

    /// A program that has sent these bytes, and whose handshake has begun.
    fn begin(device: &mut Device, bytes: &[u8], cx: &mut Context<'_>) -> UnixStream {
        let (ours, mut program) = UnixStream::pair().unwrap();
        let permit = device.account.take_descriptors(1).unwrap();
        program.write_all(bytes).unwrap();
        let socket = HostSocket::accepted(ours.into(), permit);
        device.begin_handshake(socket, SocketType::Stream, cx);
        program
    }

    /// Handles the events that are there.
    fn dispatch(device: &mut Device, cx: &mut Context<'_>) {
        let mut events = Events::default();
        events.wait(cx.poller, Some(Duration::ZERO)).unwrap();
        for (token, readiness) in Poller::interpret(&events) {
            device.handshake_ready(token.key, readiness, cx);
        }
    }

    #[test]
    fn an_end_of_file_behind_part_of_a_line_ends_the_handshake() {
        for half in [false, true] {
            let mut lab = DeviceFixture::new();
            let (device, mut cx) = lab.lend();
            let program = begin(device, b"CONN", &mut cx);
            dispatch(device, &mut cx);
            assert_eq!(device.handshakes.len(), 1, "the program may send the rest");
            let _half_closed = half.then(|| {
                program.shutdown(std::net::Shutdown::Write).unwrap();
                program.try_clone().unwrap()
            });
            drop(program);
            dispatch(device, &mut cx);
            assert_eq!(device.handshakes.len(), 0, "half: {half}");
            assert_eq!(cx.shared.counters.bad_handshakes.get(), 1);
        }
    }

    #[test]
    fn a_program_may_shut_down_sending_behind_its_line() {
        let mut lab = DeviceFixture::new();
        let (device, mut cx) = lab.lend();
        let mut program = begin(device, b"CONN", &mut cx);
        program.write_all(b"ECT 1\nall").unwrap();
        program.shutdown(std::net::Shutdown::Write).unwrap();
        dispatch(device, &mut cx);
        // The guest was asked for the connection: no driver runs here.
        assert_eq!(cx.shared.counters.bad_handshakes.get(), 0);
        assert_eq!(cx.shared.counters.conns_refused.get(), 1);
    }

    #[test]
    fn a_full_table_of_handshakes_refuses_and_counts() {
        let mut lab = DeviceFixture::new();
        let (device, mut cx) = lab.lend();
        let _first = begin(device, b"C", &mut cx);
        let _second = begin(device, b"C", &mut cx);
        assert_eq!(device.handshakes.len(), cx.shared.limits.handshakes);
        assert_eq!(cx.shared.counters.refused_by_limit.get(), 1);
    }

    #[test]
    fn refused_handshake_leaves_the_poller_before_it_is_closed() {
        let mut lab = DeviceFixture::new();
        let (device, mut cx) = lab.lend();
        let (ours, mut program) = UnixStream::pair().unwrap();
        // As if the reaper had not closed it yet.
        let open = ours.try_clone().unwrap();
        let permit = device.account.take_descriptors(1).unwrap();
        let socket = HostSocket::accepted(ours.into(), permit);
        assert!(socket.is_closed_later());
        program.write_all(b"CONNECT").unwrap();
        device.begin_handshake(socket, SocketType::Stream, &mut cx);
        program.write_all(b" 1\n").unwrap();
        dispatch(device, &mut cx);
        assert_eq!(cx.shared.counters.conns_refused.get(), 1);
        program.write_all(b"x").unwrap();
        let mut events = Events::default();
        events.wait(cx.poller, Some(Duration::ZERO)).unwrap();
        let sources: Vec<_> = Poller::interpret(&events)
            .map(|(source, _)| source)
            .collect();
        assert!(sources.is_empty(), "{sources:?}");
        drop(open);
    }
}
