//! What a connection that a rule has made keeps beside its bridge.
//!
//! # Invariants
//! - Every established connection writes one line to the access log at its end, unless its VM or process has
//!   written too many.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant as StdInstant};

use serde::{Deserialize, Serialize};
use zerosock_proto::{Address, Cid, Instant, Port};
use zerosock_relay::target::Target;
use zerosock_sys::LogLimit;

use super::zero_copy::ZeroCopySends;
use crate::routing::forward::{Admitted, RuleBoard, ZeroCopy};

/// Payload bytes after which an open connection adds to the counters of its rule.
const PUBLISH: u64 = 1 << 20;

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct Forwarded {
    admitted: Admitted,
    /// The endpoint: with its own port if it has connected, else with the port that was connected to.
    endpoint: Address,
    remote: Remote,
    /// When both sides were connected, and the bound of the access log.
    opened: Option<(StdInstant, Arc<LogLimit>)>,
    /// Payload bytes to the socket.
    to_socket: u64,
    /// Payload bytes from the socket.
    from_socket: u64,
    /// The bytes that the rule has counted.
    published: (u64, u64),
    /// What the endpoint receives before the first byte of a client; empty if nothing is left of it.
    header: Vec<u8>,
    pub(in crate::device) idle: Option<Idle>,
    /// The remote side has reset the connection: end of file is none.
    pub(in crate::device) reset_by_remote: bool,
    /// Zero-copy sends; `None`: it makes none.
    pub(in crate::device) zero_copy: Option<ZeroCopySends>,
    /// Why it ended; the first reason counts.
    reason: Option<&'static str>,
}

/// What another process needs of it.
#[derive(Debug, Deserialize, Serialize)]
pub(in crate::device) struct SavedForwarded {
    rule: String,
    /// The CID of the guest among those that share the rule.
    guest: Option<u32>,
    /// CID and port of the endpoint.
    endpoint: (u32, u32),
    /// The target; `None`: a client.
    target: Option<String>,
    address: Option<SocketAddr>,
    /// How long both sides have been connected.
    open_for: Option<Duration>,
    to_socket: u64,
    from_socket: u64,
    header: Vec<u8>,
    idle: Option<Duration>,
    reset_by_remote: bool,
}

/// The other side of a forwarded connection.
#[derive(Debug)]
pub(crate) enum Remote {
    /// The endpoint has connected to this target.
    Target {
        target: Target,
        /// The address, if the target has a name.
        address: Option<SocketAddr>,
    },
    /// A client has connected to the endpoint; its address, unless it is a Unix socket.
    Client(Option<SocketAddr>),
}

/// The idle time-out of a connection.
#[derive(Clone, Copy, Debug)]
pub(in crate::device) struct Idle {
    /// The time-out.
    limit: Duration,
    /// Time of the next check; an earlier timer is one of another connection.
    pub(in crate::device) next: Instant,
    /// Bytes at the last check.
    seen: u64,
    /// Checks since bytes have passed.
    quiet: u8,
}

impl Idle {
    /// Time between two checks.
    fn pause(&self) -> Duration {
        (self.limit / 2).max(Duration::from_millis(1))
    }
}

impl Forwarded {
    /// A connection of `endpoint` to a target, or of a client to `endpoint`.
    pub(crate) fn new(
        admitted: Admitted,
        endpoint: Address,
        remote: Remote,
        idle: Option<Duration>,
    ) -> Forwarded {
        Forwarded {
            admitted,
            endpoint,
            remote,
            opened: None,
            to_socket: 0,
            from_socket: 0,
            published: (0, 0),
            header: Vec::new(),
            idle: idle.map(|limit| Idle {
                limit,
                next: Instant::ZERO,
                seen: 0,
                quiet: 0,
            }),
            reset_by_remote: false,
            zero_copy: None,
            reason: None,
        }
    }

    /// What another process needs of it.
    pub(in crate::device) fn save(&self) -> SavedForwarded {
        let (target, address) = match &self.remote {
            Remote::Target { target, address } => (Some(target.to_string()), *address),
            Remote::Client(address) => (None, *address),
        };
        SavedForwarded {
            rule: self.rule().to_owned(),
            guest: self.admitted.guest().map(Cid::get),
            endpoint: (self.endpoint.cid.get(), self.endpoint.port.get()),
            target,
            address,
            open_for: self.opened.as_ref().map(|(at, _)| at.elapsed()),
            to_socket: self.to_socket,
            from_socket: self.from_socket,
            header: self.header.clone(),
            idle: self.idle.map(|idle| idle.limit),
            reset_by_remote: self.reset_by_remote,
        }
    }

    /// The connection that another process has saved. `None`: it has saved something else. It makes no
    /// zero-copy sends.
    pub(in crate::device) fn restore(
        saved: SavedForwarded,
        rules: &RuleBoard,
        log: &Arc<LogLimit>,
    ) -> Option<Forwarded> {
        let remote = match saved.target {
            Some(target) => Remote::Target {
                target: target.parse().ok()?,
                address: saved.address,
            },
            None => Remote::Client(saved.address),
        };
        let (cid, port) = saved.endpoint;
        let endpoint = Address::new(Cid::new(cid), Port::new(port));
        let admitted = rules.readmit(&saved.rule, saved.guest.map(Cid::new));
        let mut restored = Forwarded::new(admitted, endpoint, remote, saved.idle);
        let now = StdInstant::now();
        let opened = |age| (now.checked_sub(age).unwrap_or(now), Arc::clone(log));
        restored.opened = saved.open_for.map(opened);
        // The rule of the former process has counted the bytes.
        restored.published = (saved.to_socket, saved.from_socket);
        (restored.to_socket, restored.from_socket) = restored.published;
        restored.header = saved.header;
        restored.reset_by_remote = saved.reset_by_remote;
        Some(restored)
    }

    /// Sets what the endpoint receives before the first byte of a client.
    pub(crate) fn set_header(&mut self, header: Vec<u8>) {
        self.header = header;
    }

    /// Whether some of the header is left.
    pub(in crate::device) fn has_header(&self) -> bool {
        !self.header.is_empty()
    }

    /// What is left of the header.
    pub(in crate::device) fn header(&mut self) -> &mut Vec<u8> {
        &mut self.header
    }

    /// Sets when a TCP connection sends without a copy.
    pub(crate) fn with_zero_copy(mut self, option: ZeroCopy) -> Forwarded {
        let is_tcp = match &self.remote {
            Remote::Target { target, .. } => matches!(target, Target::Tcp { .. }),
            Remote::Client(address) => address.is_some(),
        };
        self.zero_copy = ZeroCopySends::new(option).filter(|_| is_tcp);
        self
    }

    /// The rule in one line.
    pub(crate) fn rule(&self) -> &str {
        self.admitted.rule().text()
    }

    /// Whether the target is a Unix socket.
    pub(in crate::device) fn is_to_unix(&self) -> bool {
        matches!(
            &self.remote,
            Remote::Target {
                target: Target::UnixDatagram(_),
                ..
            }
        )
    }

    /// Records the address that the name of the target was resolved to.
    pub(in crate::device) fn set_address(&mut self, resolved: Option<SocketAddr>) {
        if let Remote::Target { address, .. } = &mut self.remote {
            *address = resolved;
        }
    }

    /// Records that both sides are connected. `log` bounds the access log.
    pub(in crate::device) fn open(&mut self, log: &Arc<LogLimit>) {
        self.opened = Some((StdInstant::now(), Arc::clone(log)));
        self.admitted.rule().count_opened();
    }

    /// Counts bytes that were passed on to the socket.
    #[inline]
    pub(in crate::device) fn sent(&mut self, bytes: usize) {
        self.to_socket += bytes as u64;
        if self.to_socket - self.published.0 >= PUBLISH {
            self.publish();
        }
    }

    /// Counts bytes that were received from the socket.
    #[inline]
    pub(in crate::device) fn received(&mut self, bytes: usize) {
        self.from_socket += bytes as u64;
        if self.from_socket - self.published.1 >= PUBLISH {
            self.publish();
        }
    }

    /// Counts a datagram that was dropped.
    pub(in crate::device) fn dropped(&self) {
        self.admitted.rule().count_dropped();
    }

    #[cold]
    fn publish(&mut self) {
        let to_socket = self.to_socket - self.published.0;
        let from_socket = self.from_socket - self.published.1;
        self.published = (self.to_socket, self.from_socket);
        let (sent, received) = self.directions(to_socket, from_socket);
        self.admitted.rule().add_bytes(sent, received);
    }

    /// Bytes of the side that has connected, and of the other.
    fn directions(&self, to_socket: u64, from_socket: u64) -> (u64, u64) {
        match self.remote {
            Remote::Target { .. } => (to_socket, from_socket),
            Remote::Client(_) => (from_socket, to_socket),
        }
    }

    /// Sets the reason for the end, unless there is one.
    pub(in crate::device) fn set_reason(&mut self, reason: &'static str) {
        self.reason.get_or_insert(reason);
    }

    /// Begins the idle time-out. Returns the time of the first check.
    pub(in crate::device) fn start_idle(&mut self, now: Instant) -> Option<Instant> {
        let idle = self.idle.as_mut()?;
        idle.next = now + idle.pause();
        Some(idle.next)
    }

    /// Checks the idle time-out at `now`. Returns the time of the next check; `None`: no byte has
    /// passed for too long.
    pub(in crate::device) fn check_idle(&mut self, now: Instant) -> Option<Instant> {
        let total = self.to_socket + self.from_socket;
        let idle = self.idle.as_mut()?;
        if total != idle.seen {
            (idle.seen, idle.quiet) = (total, 0);
        } else {
            idle.quiet += 1;
            if idle.quiet >= 2 {
                return None;
            }
        }
        idle.next = now + idle.pause();
        Some(idle.next)
    }

    /// Counts the connection as refused. Returns source and destination, for the log.
    pub(in crate::device) fn refuse(&self) -> (String, String) {
        self.admitted.rule().count_refused();
        self.ends()
    }

    /// Source and destination.
    fn ends(&self) -> (String, String) {
        let client = |client: &Option<SocketAddr>| match client {
            Some(address) => address.to_string(),
            None => "unix".to_owned(),
        };
        match &self.remote {
            Remote::Target { target, address } => {
                let target = match address {
                    Some(address) => format!("{target} ({address})"),
                    None => target.to_string(),
                };
                (self.endpoint.to_string(), target)
            }
            Remote::Client(address) => (client(address), self.endpoint.to_string()),
        }
    }

    /// Adds the rest of the bytes to the counters, and writes the line of the access log if the
    /// connection was established.
    pub(in crate::device) fn finish(&mut self) {
        self.publish();
        let Some((opened, log)) = &self.opened else {
            return;
        };
        let now = StdInstant::now();
        let Some(suppressed) = log.admit(now) else {
            return;
        };
        let (from, to) = self.ends();
        let (sent, received) = self.directions(self.to_socket, self.from_socket);
        tracing::info!(
            rule = self.rule(),
            from,
            to,
            sent,
            received,
            seconds = %Seconds(now.duration_since(*opened)),
            reason = self.reason.unwrap_or("closed"),
            suppressed,
            "forwarded connection ended"
        );
    }
}

/// Seconds with three decimals.
struct Seconds(Duration);

impl fmt::Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.3}", self.0.as_secs_f64())
    }
}

#[cfg(test)]
mod tests {
    use zerosock_proto::{Cid, Port};

    use super::*;
    use crate::routing::forward::RuleState;

    #[test]
    fn idle_time_is_between_the_limit_and_half_as_much_again() {
        let state = RuleState::new("rule".into(), None, None);
        let second = Duration::from_secs(1);
        let mut connection = Forwarded::new(
            state.admit().unwrap(),
            Address::new(Cid::new(3), Port::new(1)),
            Remote::Client(None),
            Some(2 * second),
        );
        let at = |seconds: u32| Instant::ZERO + second * seconds;
        assert_eq!(connection.start_idle(at(0)), Some(at(1)));
        connection.sent(1);
        assert_eq!(connection.check_idle(at(1)), Some(at(2)));
        assert_eq!(connection.check_idle(at(2)), Some(at(3)));
        assert_eq!(connection.check_idle(at(3)), None);
    }

    #[test]
    fn bytes_are_counted_in_the_direction_of_the_connect() {
        let state = RuleState::new("rule".into(), None, None);
        let target: Target = "unix:/a".parse().unwrap();
        let outward = Remote::Target {
            target,
            address: None,
        };
        for (remote, wanted) in [(outward, (7, 3)), (Remote::Client(None), (3, 7))] {
            let address = Address::new(Cid::new(3), Port::new(1));
            let mut connection = Forwarded::new(state.admit().unwrap(), address, remote, None);
            let before = state.bytes();
            connection.sent(7);
            connection.received(3);
            connection.finish();
            let after = state.bytes();
            assert_eq!((after.0 - before.0, after.1 - before.1), wanted);
        }
    }
}
