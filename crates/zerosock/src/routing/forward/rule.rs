//! A rule by which connections to ports of the host are forwarded, and its default limits.

use std::ops::RangeInclusive;
use std::time::Duration;

use zerosock_proto::Port;
use zerosock_relay::networks::Network;

use super::target::TargetTemplate;
use super::zero_copy::ZeroCopy;
use crate::routing::access::Party;
use crate::routing::name::RuleName;

/// Default idle time before the first TCP keepalive probe.
pub(crate) const KEEPALIVE: Duration = Duration::from_secs(60);

/// Default idle time-out of datagram sockets, which have no end of stream.
const DATAGRAM_IDLE: Duration = Duration::from_secs(60);

/// Forwards connections of VMs and processes to ports of CID 2 to a socket outside.
///
/// A rule for `tcp:` or `unix:` matches stream connections, one for `udp:`, `unix-dgram:` or
/// `unix-seqpacket:` connections of type SOCK_SEQPACKET, of which each message becomes one datagram or
/// packet. Rules for `udp:` and `unix-dgram:` match vsock datagrams, too: all from one port of an endpoint to
/// one port of CID 2 have a socket, and count as one connection. The first rule that matches decides.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct ForwardRule {
    /// Shown by logs and counters instead of the rule.
    pub name: Option<RuleName>,
    /// Matches connections from these endpoints. [`Party::Host`] is not possible.
    pub from: Vec<Party>,
    /// Matches connections to these ports.
    pub ports: RangeInclusive<Port>,
    /// Where they go.
    pub to: TargetTemplate,
    /// Networks that the addresses of a name may lie in, beyond the default.
    ///
    /// By default every address is allowed but those by which a guest would reach the machine of the
    /// daemon or services of its provider: loopback, unspecified, link-local (with the metadata
    /// services of clouds), multicast and broadcast. An address written in `to` is allowed by that.
    pub allow: Vec<Network>,
    /// Networks that an address may not lie in. Goes before `allow`, and before an address in `to`.
    pub deny: Vec<Network>,
    /// Time to resolve the name and to connect; `None`: that of the daemon.
    pub connect_timeout: Option<Duration>,
    /// A connection on which no byte passes for this time (up to half as long again) is reset. `None`:
    /// 60 s for datagram sockets, no limit for others.
    pub idle_timeout: Option<Duration>,
    /// Idle time before the first TCP keepalive probe, and interval of the probes; `None`: none.
    pub keepalive: Option<Duration>,
    /// Send the target a header of the PROXY protocol version 2 first, with the CID and the port of the
    /// source.
    pub proxy_protocol: bool,
    /// Most connections at once, of all endpoints together.
    pub max_connections: Option<u32>,
    /// When bytes to a TCP target are sent without a copy.
    pub zero_copy: ZeroCopy,
}

impl ForwardRule {
    /// A rule for all endpoints with the default limits: TCP keepalive after 60 s, everything else
    /// unlimited.
    pub fn new(ports: RangeInclusive<Port>, to: TargetTemplate) -> ForwardRule {
        ForwardRule {
            name: None,
            from: vec![Party::Any],
            ports,
            to,
            allow: Vec::new(),
            deny: Vec::new(),
            connect_timeout: None,
            idle_timeout: None,
            keepalive: Some(KEEPALIVE),
            proxy_protocol: false,
            max_connections: None,
            zero_copy: ZeroCopy::Auto,
        }
    }

    /// The same rule with a name.
    pub fn name(mut self, name: RuleName) -> ForwardRule {
        self.name = Some(name);
        self
    }

    /// The idle time-out in effect.
    pub(crate) fn idle(&self) -> Option<Duration> {
        let default = self.to.is_datagram().then_some(DATAGRAM_IDLE);
        self.idle_timeout.or(default)
    }

    /// Whether a connection can match both rules and the same endpoints are named in both.
    pub(super) fn overlaps(&self, other: &ForwardRule) -> bool {
        let same_parties = self.from.len() == other.from.len()
            && self.from.iter().all(|party| other.from.contains(party));
        let common =
            self.ports.start() <= other.ports.end() && other.ports.start() <= self.ports.end();
        same_parties && common && self.to.socket_type() == other.to.socket_type()
    }

    /// Whether `new` matches the same connections.
    pub(super) fn is_replaced_by(&self, new: &ForwardRule) -> bool {
        self.from == new.from
            && self.ports == new.ports
            && self.to.socket_type() == new.to.socket_type()
    }

    /// Whether two rules differ in nothing but the name.
    pub(super) fn is_same(&self, other: &ForwardRule) -> bool {
        let name = other.name.clone();
        ForwardRule {
            name,
            ..self.clone()
        } == *other
    }

    /// The rule in logs and counters: its name, or its text.
    pub(super) fn text(&self) -> String {
        match &self.name {
            Some(name) => format!("forward {name}"),
            None => format!("forward {} to {}", self.shown_ports(), self.to),
        }
    }

    /// The ports as text.
    fn shown_ports(&self) -> String {
        match (self.ports.start(), self.ports.end()) {
            (first, last) if first == last => first.to_string(),
            (first, last) => format!("{first}-{last}"),
        }
    }
}
