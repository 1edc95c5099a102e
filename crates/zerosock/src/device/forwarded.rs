//! Connections by rule between the guest and sockets outside.
//!
//! # Invariants
//! - The worker connects to literal addresses and Unix sockets itself, without waiting. Names, headers,
//!   full backlogs, and paths that lead through links or file systems with servers are left to the connector,
//!   whose answer comes as [`SiblingMessage::Dialed`].
//! - The connector has at most [`MAX_DIALS`] requests of one VM or user, and the guest is charged for all
//!   sockets that it may hold for them.
//! - A request that is refused by the target, the policy or a limit is reset, at the latest at the
//!   connect time-out.
//! - A reset of either side resets the other; an end of stream shuts down the other in one direction.

use std::sync::Arc;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::sockopt;
use zerosock_proto::vsock::FlowId;
use zerosock_proto::{Address, Port};
use zerosock_relay::associations::AssociationId;
use zerosock_relay::connector::{
    ATTEMPTS_AT_ONCE, ConnectError, ConnectRequest, ConnectStage, Connected, PendingConnect,
};
use zerosock_relay::proxy_protocol::{self, Source};
use zerosock_relay::target::{Host, Target};
use zerosock_sys::account::{Account, Exceeded, Permit, RequestPermit};
use zerosock_virtio::mailbox::Sender;

use super::state::bridge::{Bridge, BridgePeer};
use super::state::forwarded::{Forwarded, Remote};
use super::state::host::{Caller, Client};
use super::state::sibling_message::{Dialed, SiblingMessage};
use super::state::timers::Timer;
use super::{Context, Device, WorkerMessage};
use crate::device::guest_bridges::GuestBridges;
use crate::device::host_sockets::hybrid;
use crate::device::host_sockets::{Attempt, HostSocket, Refusal, network};
use crate::routing::forward::{ActiveRule, Admitted};
use crate::stats::RefusalCause;

/// Requests of one VM, or of the processes of one user, to the connector at once; fewer if there are many
/// of them. The connector is shared: a guest with targets that do not answer must leave it to its neighbours.
const MAX_DIALS: usize = 256;
/// As many are possible always.
const LEAST_DIALS: usize = 32;

/// Requests of one VM or user at once, if so many are expected. The connector takes those of all.
fn dials(peers: usize) -> usize {
    (MAX_DIALS * 16 / peers.max(1)).clamp(LEAST_DIALS, MAX_DIALS)
}

/// Requests of all VMs and users at once, if so many are expected.
pub(crate) fn all_dials(peers: usize) -> usize {
    dials(peers).saturating_mul(peers.max(16))
}

impl GuestBridges<'_, '_> {
    /// Connects a flow of the guest by `rule` to a target outside.
    pub(super) fn forward_connect(
        &mut self,
        flow: FlowId,
        from: Address,
        port: Port,
        rule: &Arc<ActiveRule>,
    ) {
        let Some((target, admitted)) = self.device.admit_by(rule, from, port) else {
            self.cx.shared.counters.refuse(RefusalCause::Limit);
            let _ = self.device.shard.reject(flow);
            return;
        };
        let deadline = self.cx.now + connect_timeout(rule, self.cx);
        let key = self.add_bridge(flow, BridgePeer::Resolving(None));
        let remote = Remote::Target {
            target: target.clone(),
            address: None,
        };
        if let Some(bridge) = self.device.bridges.get_mut(key) {
            let forwarded = Forwarded::new(admitted, from, remote, rule.rule.idle())
                .with_zero_copy(rule.rule.zero_copy);
            bridge.forwarded = Some(Box::new(forwarded));
        }
        match self.device.connect_by(rule, &target) {
            Some(Attempt::Ready(socket)) => self.host_connected(key, socket),
            Some(Attempt::InProgress(socket)) => {
                self.watch(key, BridgePeer::Connecting { socket, deadline });
                self.device.timers.set(deadline, Timer::Connect(key));
            }
            Some(Attempt::Refused(error)) => {
                let refusal = match is_ip(&target) {
                    true => error.into(),
                    false => Refusal::by_unix_socket(error),
                };
                self.refuse(key, &refusal);
            }
            None | Some(Attempt::Later | Attempt::NeedsConnector) => {
                let request = request_by(rule, target, from, port, self.cx);
                self.dial(key, flow, request);
            }
        }
    }

    /// Lets the connector make a connection.
    pub(super) fn dial(&mut self, key: u32, flow: FlowId, request: ConnectRequest) {
        match self
            .device
            .ask_connector(DialedFor::Flow(flow), request, self.cx)
        {
            Ok(pending) => {
                if let Some(bridge) = self.device.bridges.get_mut(key) {
                    bridge.peer = BridgePeer::Resolving(Some(pending));
                }
            }
            Err(reason) => self.refuse(key, &Refusal::new(RefusalCause::Limit, reason)),
        }
    }

    /// Handles the connector's answer.
    pub(super) fn dialed(&mut self, to: FlowId, outcome: Result<Box<Dialed>, Refusal>) {
        // Without a bridge the guest has given up already, and the socket is closed.
        let Some((key, bridge)) = self.device.bridges.of_flow(to) else {
            return;
        };
        if !matches!(bridge.peer, BridgePeer::Resolving(_)) {
            return;
        }
        match outcome {
            Ok(dialed) => {
                if let Some(forwarded) = &mut bridge.forwarded {
                    forwarded.set_address(dialed.address);
                }
                self.host_connected(key, dialed.socket);
            }
            Err(refusal) => self.refuse(key, &refusal),
        }
    }

    /// Connects a client of a listening rule to the guest.
    pub(super) fn client_connects(&mut self, client: Client) {
        let Client {
            socket,
            socket_type,
            to,
            forwarded,
            ..
        } = client;
        match self.device.account.take_descriptors(1) {
            Ok(permit) => {
                let caller = Caller {
                    socket: socket.recount(permit),
                    socket_type,
                    to,
                    wants_ok: false,
                    forwarded: Some(forwarded),
                };
                self.call_guest(caller, false);
            }
            Err(exceeded) => {
                self.cx.shared.counters.refuse(RefusalCause::Limit);
                self.device
                    .refuse_forwarded(&forwarded, &exceeded.to_string());
                socket.abort();
            }
        }
    }

    /// Begins to account for a bridge with both sides connected.
    pub(super) fn forwarded_opened(&mut self, key: u32) {
        let Some(bridge) = self.device.bridges.get_mut(key) else {
            return;
        };
        if let Some(forwarded) = &mut bridge.forwarded {
            forwarded.open(&self.device.access_log);
            if let Some(at) = forwarded.start_idle(self.cx.now) {
                self.device.timers.set(at, Timer::Idle(key));
            }
        }
    }

    /// Resets a connection on which no byte has passed for its idle time-out.
    pub(super) fn idle_timed_out(&mut self, key: u32) {
        let Some(bridge) = self.device.bridges.get_mut(key) else {
            return;
        };
        let Some(forwarded) = &mut bridge.forwarded else {
            return;
        };
        // A lingering bridge has a time-out of its own.
        if bridge.flow.is_none() || forwarded.idle.is_none_or(|idle| idle.next > self.cx.now) {
            return;
        }
        match forwarded.check_idle(self.cx.now) {
            Some(at) => self.device.timers.set(at, Timer::Idle(key)),
            None => {
                forwarded.set_reason("idle");
                self.reset_bridge(key);
            }
        }
    }

    /// Handles a failed receive from the socket of a bridge. Returns false if it was no TCP socket.
    pub(super) fn tcp_failed(&mut self, key: u32, errno: Option<Errno>) -> bool {
        let Some(bridge) = self.device.bridges.get_mut(key) else {
            return true;
        };
        if !is_tcp(bridge) {
            return false;
        }
        set_reason(bridge, reason_of(errno));
        self.reset_bridge(key);
        true
    }

    /// Handles a failed send to the socket of a bridge: bytes that a TCP peer has sent before its reset
    /// still go to the guest, and the reset follows them.
    pub(super) fn tcp_gone(&mut self, key: u32) {
        let Some(bridge) = self.device.bridges.get_mut(key) else {
            return;
        };
        if !is_tcp(bridge) {
            return;
        }
        set_reason(bridge, reason_of(Some(Errno::CONNRESET)));
        if !bridge.state.reads() || bridge.flow.is_none() {
            return self.reset_bridge(key);
        }
        if let Some(forwarded) = &mut bridge.forwarded {
            forwarded.reset_by_remote = true;
        }
        bridge.set_readable();
        self.device.bridges.enqueue(key);
    }

    /// Handles the end of file of a bridge's socket that its peer has reset before. Returns false if
    /// there was no reset.
    pub(super) fn ended_by_reset(&mut self, key: u32) -> bool {
        let bridge = self.device.bridges.get(key);
        let forwarded = bridge.and_then(|bridge| bridge.forwarded.as_ref());
        let reset = forwarded.is_some_and(|forwarded| forwarded.reset_by_remote);
        if reset {
            self.reset_bridge(key);
        }
        reset
    }

    /// Handles the failure of a TCP socket whose end of file was read before. Returns false if it has
    /// not failed.
    pub(super) fn tcp_reset_after_end(&mut self, key: u32) -> bool {
        let errno = match self.device.bridges.get(key).map(|bridge| &bridge.peer) {
            Some(BridgePeer::Socket { socket, .. }) if socket.is_tcp() => {
                sockopt::socket_error(socket)
            }
            _ => return false,
        };
        let Ok(Err(errno)) = errno else {
            return false;
        };
        self.tcp_failed(key, Some(errno))
    }
}

impl Device {
    /// The target of a rule for a connection or a datagram of `from` to `port`. `None`: the rule or its
    /// limit refuses it, which is counted and logged.
    pub(super) fn admit_by(
        &self,
        rule: &ActiveRule,
        from: Address,
        port: Port,
    ) -> Option<(Target, Admitted)> {
        let target = rule.rule.to.resolve(from.cid, port);
        let target = target.ok_or("the target of the rule has no such port");
        match target.and_then(|target| Ok((target, rule.admit(from.cid)?))) {
            Ok(both) => Some(both),
            Err(reason) => {
                rule.state.count_refused();
                let (from, to) = (from.to_string(), rule.rule.to.to_string());
                self.log_refusal(rule.state.text(), &from, &to, reason);
                None
            }
        }
    }

    /// Connects to a target of a rule without waiting; `None`: the connector has to do it.
    pub(super) fn connect_by(&self, rule: &ActiveRule, target: &Target) -> Option<Attempt> {
        match rule.rule.proxy_protocol {
            true => None,
            false => network::connect(target, rule.rule.keepalive, &self.account),
        }
    }

    /// Sends the connector a request, whose answer comes as a message. The error is why it is refused.
    pub(super) fn ask_connector(
        &self,
        to: DialedFor,
        mut request: ConnectRequest,
        cx: &mut Context<'_>,
    ) -> Result<PendingConnect, String> {
        let Some(request_permit) = self.account.take_request(dials(self.account.expected())) else {
            let reason = "as many targets as a guest may have are being resolved or connected to";
            return Err(reason.to_owned());
        };
        let charge = Charge::new(&self.account, &request.target);
        let charge = charge.map_err(|exceeded| exceeded.to_string())?;
        request.attempts = charge.attempts;
        let (Some(connector), Some(mailbox)) = (&cx.shared.connector, &cx.shared.mailbox) else {
            return Err("there is no thread for connects".to_owned());
        };
        let answer = Answer {
            mailbox: mailbox.clone(),
            number: self.addr.number,
            to,
            target: request.target.clone(),
            charge: Some(charge),
            _request: request_permit,
        };
        Ok(connector.connect(request, Box::new(move |result| answer.send(result))))
    }

    /// Counts a forwarded connection that is refused, and logs it.
    pub(super) fn refuse_forwarded(&self, forwarded: &Forwarded, reason: &str) {
        let (from, to) = forwarded.refuse();
        self.log_refusal(forwarded.rule(), &from, &to, reason);
    }

    /// Logs a refused connection, rate limited.
    pub(super) fn log_refusal(&self, rule: &str, from: &str, to: &str, reason: &str) {
        if let Some(suppressed) = self.warnings.admit(std::time::Instant::now()) {
            tracing::info!(
                rule,
                from,
                to,
                reason,
                suppressed,
                "connection not forwarded"
            );
        }
    }
}

/// Sets why a forwarded connection ends.
pub(super) fn set_reason(bridge: &mut Bridge, reason: &'static str) {
    if let Some(forwarded) = &mut bridge.forwarded {
        forwarded.set_reason(reason);
    }
}

/// Makes the close of a bridge's TCP socket a reset, after a reset of the guest's flow.
pub(super) fn abort(bridge: &Bridge) {
    if let BridgePeer::Connecting { socket, .. } | BridgePeer::Socket { socket, .. } = &bridge.peer
    {
        socket.abort();
    }
}

fn is_tcp(bridge: &Bridge) -> bool {
    matches!(&bridge.peer, BridgePeer::Socket { socket, .. } if socket.is_tcp())
}

fn reason_of(errno: Option<Errno>) -> &'static str {
    match errno {
        Some(Errno::TIMEDOUT) => "the remote side does not answer",
        Some(Errno::HOSTUNREACH | Errno::NETUNREACH) => "the remote side is unreachable",
        _ => "reset by the remote side",
    }
}

/// The time for connecting to a target of a rule.
fn connect_timeout(rule: &ActiveRule, cx: &Context<'_>) -> Duration {
    let own = rule.rule.connect_timeout;
    own.unwrap_or(cx.shared.limits.connect)
}

/// What the connector is asked for, for a connection or datagrams of `from` to `port`.
pub(super) fn request_by(
    rule: &ActiveRule,
    target: Target,
    from: Address,
    port: Port,
    cx: &Context<'_>,
) -> ConnectRequest {
    let source = Source::Vsock {
        cid: from.cid.get(),
        port: from.port.get(),
        to_port: port.get(),
    };
    let header = || proxy_protocol::header(source, None);
    ConnectRequest {
        target,
        policy: Arc::clone(&rule.policy),
        timeout: connect_timeout(rule, cx),
        keepalive: rule.rule.keepalive,
        first_bytes: rule.rule.proxy_protocol.then(header).unwrap_or_default(),
        attempts: ATTEMPTS_AT_ONCE,
    }
}

fn is_ip(target: &Target) -> bool {
    matches!(target, Target::Tcp { .. } | Target::Udp { .. })
}

/// Why the connector's request for `target` has failed.
fn refusal(error: ConnectError, target: &Target) -> Refusal {
    let is_unix = !is_ip(target);
    let error = match error {
        ConnectError::Io(error) if is_unix => return Refusal::by_unix_socket(error),
        other => other,
    };
    let cause = match &error {
        ConnectError::Refused(_) => RefusalCause::NoListener,
        // A connect to a Unix socket waits only for room in the backlog.
        ConnectError::TimedOut(ConnectStage::Connecting) if is_unix => RefusalCause::BacklogFull,
        ConnectError::TimedOut(_) => RefusalCause::Unreachable,
        ConnectError::Io(error) => RefusalCause::of(error),
        _ => RefusalCause::Other,
    };
    Refusal::new(cause, error.to_string())
}

/// What a guest is charged for a request to the connector.
struct Charge {
    socket: Permit,
    /// For the attempts that lose.
    racing: Option<Permit>,
    /// Addresses that may be tried at once.
    attempts: usize,
}

impl Charge {
    fn new(account: &Account, target: &Target) -> Result<Charge, Exceeded> {
        // Other targets have one address.
        let has_name = matches!(
            target,
            Target::Tcp {
                host: Host::Name(_),
                ..
            } | Target::Udp {
                host: Host::Name(_),
                ..
            }
        );
        let socket = account.take_descriptors(1)?;
        // A guest that has nearly used up its share tries fewer addresses at once.
        let most = ATTEMPTS_AT_ONCE - 1;
        let racing = [most, 1]
            .into_iter()
            .filter(|_| has_name)
            .find_map(|others| {
                let permit = account.take_descriptors(others as u64).ok()?;
                Some((permit, others))
            });
        let (racing, others) = racing.unzip();
        Ok(Charge {
            socket,
            racing,
            attempts: 1 + others.unwrap_or(0),
        })
    }

    /// The request has ended with one socket.
    fn connected(self) -> Permit {
        drop(self.racing);
        self.socket
    }
}

/// What the connector makes a connection for.
pub(super) enum DialedFor {
    /// A connection of the guest.
    Flow(FlowId),
    /// Datagrams of the guest.
    Association(AssociationId),
}

/// Takes the connector's answer to the device, exactly once: dropping it answers with an error.
struct Answer {
    mailbox: Sender<WorkerMessage>,
    number: u32,
    to: DialedFor,
    target: Target,
    /// `None` once it was sent.
    charge: Option<Charge>,
    _request: RequestPermit,
}

impl Answer {
    fn send(mut self, result: Result<Connected, ConnectError>) {
        let Some(charge) = self.charge.take() else {
            return;
        };
        let permit = charge.connected();
        let dialed = |connected: Connected| {
            let Connected {
                socket,
                address,
                has_alternative,
            } = connected;
            use rustix::net::SocketType;
            let socket = socket.into_trusted();
            let socket = match &self.target {
                Target::Tcp { .. } => HostSocket::tcp(socket, permit),
                Target::Udp { .. } => HostSocket::udp(socket, permit),
                Target::Unix(_) => HostSocket::unix(socket, permit, SocketType::STREAM),
                Target::UnixDatagram(_) => HostSocket::unix(socket, permit, SocketType::DGRAM),
                Target::UnixSeqpacket(_) => {
                    let socket = HostSocket::unix(socket, permit, SocketType::SEQPACKET);
                    if !hybrid::configure_packets(&socket) {
                        return Err(Refusal::new(
                            RefusalCause::Other,
                            "packets of its socket have no bounds",
                        ));
                    }
                    socket
                }
            };
            Ok(Box::new(Dialed {
                socket,
                address,
                has_alternative,
            }))
        };
        self.pass(match result {
            Ok(connected) => dialed(connected),
            Err(error) => Err(refusal(error, &self.target)),
        });
    }

    fn pass(&self, outcome: Result<Box<Dialed>, Refusal>) {
        let message = match self.to {
            DialedFor::Flow(to) => SiblingMessage::Dialed { to, outcome },
            DialedFor::Association(to) => SiblingMessage::DialedDatagrams { to, outcome },
        };
        let number = self.number;
        // A worker that has ended has no connections.
        let _ = self.mailbox.send(WorkerMessage::Device { number, message });
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        if self.charge.take().is_some() {
            self.pass(Err(Refusal::new(
                RefusalCause::Other,
                "the thread for connects has ended",
            )));
        }
    }
}

#[cfg(test)]
mod tests {
    use zerosock_sys::account::{Budget, Limits};

    use super::*;

    #[test]
    fn the_connector_takes_the_requests_of_all_peers() {
        for (peers, each) in [
            (0, 256),
            (1, 256),
            (16, 256),
            (17, 240),
            (100, 40),
            (5000, 32),
        ] {
            assert_eq!(dials(peers), each);
            assert!(all_dials(peers) >= each * peers.max(1));
        }
    }

    #[test]
    fn missing_permission_for_a_path_names_what_permits_it() {
        for (target, named) in [
            ("unix:/a", true),
            ("unix-dgram:/a", true),
            ("tcp:1.1.1.1:1", false),
        ] {
            let error = std::io::Error::from_raw_os_error(Errno::ACCESS.raw_os_error());
            let said = refusal(error.into(), &target.parse().unwrap()).reason;
            assert!(said.starts_with("Permission denied"), "{said}");
            assert_eq!(said.contains("--socket-group"), named, "{target}: {said}");
        }
    }

    #[test]
    fn a_guest_whose_share_is_nearly_used_up_tries_fewer_addresses_at_once() {
        let target = "tcp:example.com:80".parse().unwrap();
        for (left, attempts) in [(9, 6), (6, 6), (5, 2), (2, 2), (1, 1)] {
            let limits = Limits {
                descriptors: left,
                numbers: u64::MAX,
                mapped: 0,
                mapped_each: 0,
            };
            let account = Budget::new(limits, 1).account();
            let charge = Charge::new(&account, &target).unwrap();
            assert_eq!(charge.attempts, attempts, "{left} left");
        }
    }

    #[test]
    fn a_connect_by_name_is_charged_for_all_its_attempts_until_it_has_ended() {
        for (target, under_way) in [
            ("tcp:example.com:80", ATTEMPTS_AT_ONCE as u64),
            ("udp:example.com:53", ATTEMPTS_AT_ONCE as u64),
            ("tcp:127.0.0.1:80", 1),
            ("unix:/a", 1),
        ] {
            let account = Budget::unlimited().account();
            let charge = Charge::new(&account, &target.parse().unwrap()).unwrap();
            assert_eq!(account.descriptors(), under_way, "{target}");
            let permit = charge.connected();
            assert_eq!(account.descriptors(), 1, "{target}");
            drop(permit);
            assert_eq!(account.descriptors(), 0, "{target}");
        }
    }
}
