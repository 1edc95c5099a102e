//! Routes: the device of each CID, and the rules on which endpoints may connect to which.

pub mod access;
pub mod forward;
pub(crate) mod name;

use self::access::{AccessList, EndpointTraits, Verdict};
use self::forward::{ActiveRule, ForwardRules};
use self::name::{Name, RuleName};
use crate::stats::RefusalCause;
use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use zerosock_proto::wire::vsock::SocketType;
use zerosock_proto::{Address, Cid, Port};
use zerosock_virtio::outbox::DeviceAddr;

/// The routes to all endpoints. They are immutable once shared: each worker has a snapshot and gets the
/// next one by message, so that connects take no lock.
#[derive(Clone, Debug, Default)]
pub(crate) struct Routes {
    by_cid: HashMap<Cid, Route>,
    /// The ports of CID 2 that services have claimed.
    services: HashMap<Port, DeviceAddr>,
    names: HashMap<Name, Cid>,
    access: AccessList,
    forward: ForwardRules,
}

/// Why an endpoint cannot reach an address.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) enum Denial {
    /// No endpoint has the CID, or none that can be reached has it now.
    NoEndpoint,
    /// It is the endpoint's own CID.
    Itself,
    /// The process did not name the port when it attached.
    Port,
    /// The rule with this number in the access list, and its name.
    Rule(usize, Option<RuleName>),
    /// No rule matches, and they have no group in common.
    Group,
    /// Too many requests of the endpoint are without an answer.
    Busy,
    /// A service connects from a port that it has not claimed.
    Unclaimed,
}

impl Denial {
    /// The counter of connections that are refused for it.
    pub(crate) fn cause(&self) -> RefusalCause {
        match self {
            Denial::Port | Denial::Rule(..) | Denial::Group => RefusalCause::Denied,
            Denial::NoEndpoint | Denial::Itself => RefusalCause::Unreachable,
            Denial::Busy => RefusalCause::Limit,
            Denial::Unclaimed => RefusalCause::Other,
        }
    }
}

impl fmt::Display for Denial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Denial::NoEndpoint => "no endpoint has this CID, or no service this port",
            Denial::Itself => "an endpoint cannot connect to itself",
            Denial::Port => "the process has not named this port",
            Denial::Rule(_, Some(name)) => return write!(f, "access {name} denies it"),
            Denial::Rule(rule, None) => return write!(f, "access[{rule}] denies it"),
            Denial::Group => "they have no group in common",
            Denial::Busy => "too many connects of this endpoint are not answered yet",
            Denial::Unclaimed => "the service has not claimed the port that it connects from",
        })
    }
}

#[derive(Clone, Debug)]
struct Route {
    device: DeviceAddr,
    groups: Arc<[String]>,
    name: Option<Name>,
    /// The ports that others may connect to, sorted; `None`: all.
    ports: Option<Arc<[Port]>>,
}

impl Routes {
    /// Adds an endpoint, or replaces the one with the same CID.
    pub(crate) fn add(&mut self, cid: Cid, device: DeviceAddr, groups: &[String]) {
        let groups = groups.into();
        self.by_cid.insert(
            cid,
            Route {
                device,
                groups,
                name: None,
                ports: None,
            },
        );
    }

    /// Sets the name by which rules match `cid`.
    pub(crate) fn set_name(&mut self, cid: Cid, name: &Name) {
        if let Some(route) = self.by_cid.get_mut(&cid) {
            route.name = Some(name.clone());
            self.names.insert(name.clone(), cid);
        }
    }

    /// Replaces the groups of `cid`.
    pub(crate) fn set_groups(&mut self, cid: Cid, groups: &[String]) {
        if let Some(route) = self.by_cid.get_mut(&cid) {
            route.groups = groups.into();
        }
    }

    /// Replaces the access list. It applies to later requests.
    pub(crate) fn set_access(&mut self, access: AccessList) {
        self.access = access;
    }

    /// The forwarding rules.
    pub(crate) fn forward(&self) -> &ForwardRules {
        &self.forward
    }

    /// Replaces the forwarding rules. They apply to later requests.
    pub(crate) fn set_forward(&mut self, forward: ForwardRules) {
        self.forward = forward;
    }

    /// The rule that forwards a connection of `from` to `port` of CID 2.
    #[inline]
    pub(crate) fn forward_rule(
        &self,
        from: Cid,
        port: Port,
        socket_type: SocketType,
    ) -> Option<&Arc<ActiveRule>> {
        if self.forward.is_empty() {
            return None;
        }
        self.forward.find(self.traits(from)?, port, socket_type)
    }

    /// Limits the ports of `cid` that others may connect to.
    pub(crate) fn limit_ports(&mut self, cid: Cid, ports: impl IntoIterator<Item = Port>) {
        let mut ports: Vec<Port> = ports.into_iter().collect();
        ports.sort_unstable();
        if let Some(route) = self.by_cid.get_mut(&cid) {
            route.ports = Some(ports.into());
        }
    }

    pub(crate) fn remove(&mut self, cid: Cid) {
        if let Some(name) = self.by_cid.remove(&cid).and_then(|route| route.name)
            && self.names.get(&name) == Some(&cid)
        {
            self.names.remove(&name);
        }
    }

    /// The CID of the attached process with this name.
    pub(crate) fn named(&self, name: &Name) -> Option<Cid> {
        self.names.get(name).copied()
    }

    pub(crate) fn contains(&self, cid: Cid) -> bool {
        self.by_cid.contains_key(&cid)
    }

    pub(crate) fn len(&self) -> usize {
        self.by_cid.len()
    }

    /// Whether the endpoint accepts connections to this port at all.
    fn is_open(&self, to: Address) -> bool {
        let ports = self.by_cid.get(&to.cid).and_then(|r| r.ports.as_ref());
        ports.is_none_or(|ports| ports.binary_search(&to.port).is_ok())
    }

    /// Routes `port` of CID 2 to a service.
    pub(crate) fn claim(&mut self, port: Port, service: DeviceAddr) {
        self.services.insert(port, service);
    }

    /// Removes the route of `port` of CID 2.
    pub(crate) fn unclaim(&mut self, port: Port) {
        self.services.remove(&port);
    }

    /// The service that has claimed `port` of CID 2. Unclaimed ports belong to the host side of the
    /// requesting device.
    #[inline]
    pub(crate) fn service(&self, port: Port) -> Option<DeviceAddr> {
        self.services.get(&port).copied()
    }

    /// The device that handles a request to `to`, which [`may_reach`](Routes::may_reach) has allowed:
    /// the endpoint's, or that of the service that has claimed the port.
    pub(crate) fn target(&self, to: Address) -> Option<DeviceAddr> {
        match to.cid {
            Cid::HOST => self.service(to.port),
            cid => self.device(cid),
        }
    }

    /// The device of `cid`.
    pub(crate) fn device(&self, cid: Cid) -> Option<DeviceAddr> {
        self.by_cid.get(&cid).map(|route| route.device)
    }

    /// Whether `from` may connect to `to`, or send it a datagram, by groups, the ports that a process
    /// accepts, and the access list. `from` and `to.cid` may be [`Cid::HOST`], which stands for
    /// everything at CID 2: host programs and services. The answer applies to new connections only.
    ///
    /// - An endpoint cannot reach itself, and the host cannot reach itself.
    /// - A CID without an endpoint cannot be reached.
    /// - A port that a process did not list when it attached cannot be reached.
    /// - The first matching rule of the access list decides.
    /// - If none matches, the host reaches all endpoints and all reach the host (the host side finds out
    ///   whether the port is served); other endpoints need a common group.
    ///
    /// Without a list this takes two lookups by CID and, between guests, a comparison of a few names;
    /// with a list, a walk over its rules. No lock and no allocation.
    pub(crate) fn may_reach(&self, from: Cid, to: Address) -> bool {
        self.check(from, to).is_ok()
    }

    /// As [`check`](Routes::check), for a connection or datagram that is refused then: counts a denial by
    /// the rule.
    pub(crate) fn admit(&self, from: Cid, to: Address) -> Result<(), Denial> {
        self.check(from, to).inspect_err(|denial| {
            if let Denial::Rule(rule, _) = denial {
                self.access.count_denied(*rule);
            }
        })
    }

    /// As [`may_reach`](Routes::may_reach), with the reason.
    pub(crate) fn check(&self, from: Cid, to: Address) -> Result<(), Denial> {
        let (Some(asking), Some(asked)) = (self.traits(from), self.traits(to.cid)) else {
            return Err(Denial::NoEndpoint);
        };
        if from == to.cid {
            return Err(Denial::Itself);
        }
        if !self.is_open(to) {
            return Err(Denial::Port);
        }
        match self.access.first_match(asking, asked, to.port) {
            Some((_, Verdict::Allow)) => Ok(()),
            Some((rule, Verdict::Deny)) => Err(Denial::Rule(rule, self.access.name(rule).cloned())),
            None if from == Cid::HOST || to.cid == Cid::HOST => Ok(()),
            None if asking.groups.iter().any(|g| asked.groups.contains(g)) => Ok(()),
            None => Err(Denial::Group),
        }
    }

    fn traits(&self, cid: Cid) -> Option<EndpointTraits<'_>> {
        if cid == Cid::HOST {
            let (groups, name) = (&[][..], None);
            return Some(EndpointTraits { cid, groups, name });
        }
        let route = self.by_cid.get(&cid)?;
        Some(EndpointTraits {
            cid,
            groups: &route.groups,
            name: route.name.as_ref(),
        })
    }
}

#[cfg(test)]
mod tests;
