//! Forwarding by rule between vsock endpoints and sockets outside: TCP, UDP and Unix.
//!
//! A [`ForwardRule`] connects guests and processes to the outside, a [`ListenRule`] clients outside to
//! them. docs/forward.md describes both.
//!
//! # Invariants
//! - A set of rules with a conflict is refused as a whole ([`RuleError`]).
//! - Connections keep the rule that they were made by: a rule that is removed or changed lets them
//!   continue.

mod listen;
mod parse_error;
mod rule;
mod state;
mod target;
mod zero_copy;

use std::net::IpAddr;
use std::sync::Arc;

use zerosock_proto::wire::vsock::SocketType;
use zerosock_proto::{Cid, Port};
use zerosock_relay::networks::AddressPolicy;

use crate::routing::access::{EndpointTraits, Party};
use crate::routing::name::check_names;

pub use self::listen::{Destination, ListenAddress, ListenRule};
pub use self::parse_error::ParseRuleError;
pub use self::rule::ForwardRule;
pub use self::state::RuleStats;
pub(crate) use self::state::{Admitted, RuleBoard, RuleState};
pub use self::target::TargetTemplate;
pub use self::zero_copy::ZeroCopy;
pub use crate::routing::name::{RuleName, RuleNameError, SameName};
pub use zerosock_relay::networks::{Network, ParseNetworkError};

/// Why a set of rules cannot take effect. Rules are counted from 0.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum RuleError {
    /// A rule matches no port, or [`Port::ANY`].
    #[error("forward[{0}]: the ports are no range from 0 to 4294967294")]
    Ports(usize),
    /// A rule names no endpoint, or CID 2.
    #[error(
        "forward[{0}]: from: name VMs or processes; connections of the host itself are not forwarded"
    )]
    From(usize),
    /// Two rules of the same kind with the same endpoints have a port in common.
    #[error(
        "forward[{first}] and forward[{second}]: both match connections from the same endpoints to \
         port {port}; change the ports or `from` of one"
    )]
    Overlap {
        /// The first rule.
        first: usize,
        /// The second rule.
        second: usize,
        /// The first port that both match.
        port: Port,
    },
    /// The target takes the port of the connection, which is no TCP or UDP port.
    #[error(
        "forward[{0}]: to: without a port of its own, only ports from 1 to 65535 can be forwarded"
    )]
    OwnPort(usize),
    /// A rule denies the address that it names.
    #[error("forward[{rule}]: to: {address} lies in a network of `deny`")]
    DeniedTarget {
        /// The rule.
        rule: usize,
        /// The address.
        address: IpAddr,
    },
    /// Two rules listen on the same address.
    #[error("listen[{first}] and listen[{second}]: both are on {on}; keep one")]
    SameListener {
        /// The first rule.
        first: usize,
        /// The second rule.
        second: usize,
        /// The address.
        on: ListenAddress,
    },
    /// Two rules of the same kind have the same name.
    #[error(transparent)]
    SameName(#[from] SameName),
    /// A rule has no socket, and the daemon has none for its address.
    #[error("listen[{rule}]: {on}: there is no socket for this address")]
    NoSocket {
        /// The rule.
        rule: usize,
        /// The address.
        on: ListenAddress,
    },
}

/// A forwarding rule in effect.
#[derive(Debug)]
pub(crate) struct ActiveRule {
    pub(crate) rule: ForwardRule,
    pub(crate) policy: Arc<AddressPolicy>,
    pub(crate) state: Arc<RuleState>,
}

/// The forwarding rules in effect, in their order.
#[derive(Clone, Debug, Default)]
pub(crate) struct ForwardRules(Arc<[Arc<ActiveRule>]>);

impl ForwardRules {
    /// The rules `wanted`. Those that are also in `self` keep their state, and with another name their
    /// counters; one that replaces another for the same endpoints, ports and type counts the connections of
    /// that one.
    pub(crate) fn replaced(&self, wanted: Vec<ForwardRule>) -> Result<ForwardRules, RuleError> {
        check(&wanted)?;
        let mut kept: Vec<_> = self.0.to_vec();
        let rules =
            wanted
                .into_iter()
                .map(|rule| match kept.iter().position(|old| old.rule == rule) {
                    Some(at) => kept.swap_remove(at),
                    None => {
                        let old = self.0.iter().find(|old| old.rule.is_replaced_by(&rule));
                        Arc::new(ActiveRule::new(rule, old.map(|old| &**old)))
                    }
                });
        Ok(ForwardRules(rules.collect()))
    }

    /// The rule for a connection of this endpoint. Without rules this is one comparison.
    #[inline]
    pub(crate) fn find(
        &self,
        from: EndpointTraits<'_>,
        port: Port,
        socket_type: SocketType,
    ) -> Option<&Arc<ActiveRule>> {
        let matches = |active: &&Arc<ActiveRule>| {
            active.rule.ports.contains(&port)
                && active.rule.to.takes(socket_type)
                && active.rule.from.iter().any(|party| party.includes(from))
        };
        self.0.iter().find(matches)
    }

    /// Whether there is no rule.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The states of all rules.
    pub(crate) fn states(&self) -> impl Iterator<Item = Arc<RuleState>> + '_ {
        self.0.iter().map(|active| Arc::clone(&active.state))
    }
}

impl ActiveRule {
    /// Counts a connection of `guest`. Guests that share the rule have shares.
    ///
    /// # Errors
    /// The reason for a refusal.
    pub(crate) fn admit(&self, guest: Cid) -> Result<Admitted, &'static str> {
        match &self.rule.from[..] {
            [one] if one.is_single() => self.state.admit(),
            _ => self.state.admit_guest(guest),
        }
    }

    /// A rule that may take the place of an old one.
    fn new(rule: ForwardRule, old: Option<&ActiveRule>) -> ActiveRule {
        let policy = AddressPolicy::for_guests(rule.allow.clone(), rule.deny.clone());
        let text = rule.text();
        let state = match old {
            Some(old) if old.rule.is_same(&rule) => old.state.renamed(text),
            old => RuleState::new(text, rule.max_connections, old.map(|old| &*old.state)),
        };
        ActiveRule {
            policy: Arc::new(policy),
            state,
            rule,
        }
    }
}

/// Checks forwarding rules: a set with a conflict cannot take effect.
///
/// # Errors
/// The first conflict.
pub fn check(rules: &[ForwardRule]) -> Result<(), RuleError> {
    for (index, rule) in rules.iter().enumerate() {
        if rule.ports.is_empty() || *rule.ports.end() == Port::ANY {
            return Err(RuleError::Ports(index));
        }
        if rule.from.is_empty() || rule.from.contains(&Party::Host) {
            return Err(RuleError::From(index));
        }
        let last = u32::from(u16::MAX);
        let own = rule.ports.start().get() > 0 && rule.ports.end().get() <= last;
        if rule.to.takes_own_port() && !own {
            return Err(RuleError::OwnPort(index));
        }
        let policy = AddressPolicy::for_guests(rule.allow.clone(), rule.deny.clone());
        if let Some(address) = rule.to.address()
            && policy.check_literal(address).is_err()
        {
            let rule = index;
            return Err(RuleError::DeniedTarget { rule, address });
        }
        let before = rules.iter().take(index).enumerate();
        if let Some((first, other)) = before.into_iter().find(|(_, it)| it.overlaps(rule)) {
            return Err(RuleError::Overlap {
                first,
                second: index,
                port: *rule.ports.start().max(other.ports.start()),
            });
        }
    }
    Ok(check_names(
        "forward",
        rules.iter().map(|rule| rule.name.as_ref()),
    )?)
}

/// Checks the addresses and names of listening rules.
///
/// # Errors
/// Two rules are on the same address, or have the same name.
pub fn check_listeners(rules: &[ListenRule]) -> Result<(), RuleError> {
    for (second, rule) in rules.iter().enumerate() {
        let mut before = rules.iter().take(second);
        if let Some(first) = before.position(|other| other.on == rule.on) {
            let on = rule.on.clone();
            return Err(RuleError::SameListener { first, second, on });
        }
    }
    Ok(check_names(
        "listen",
        rules.iter().map(|rule| rule.name.as_ref()),
    )?)
}

#[cfg(test)]
mod tests;
