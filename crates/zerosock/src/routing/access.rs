//! The access list: which endpoints may connect to which, beyond groups.
//!
//! The list is consulted when a connection is requested, never for a packet of an established one.
//! The first rule that matches decides. If none matches, endpoints that share a group reach each
//! other, and the host and its services reach, and are reached by, every endpoint.
//!
//! # Invariants
//!
//! - Invalid rules (no ports, a reserved CID) cannot be constructed.

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use zerosock_proto::{Cid, Port};

use crate::routing::name::{Name, check_names};

pub use crate::routing::name::{RuleName, RuleNameError, SameName};

/// A set of endpoints in a rule.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Party {
    /// All endpoints, including the host.
    Any,
    /// CID 2: programs behind hybrid sockets or AF_VSOCK, the program that embeds the device, and
    /// host services.
    Host,
    /// VMs and processes with these CIDs.
    Cids(Cids),
    /// VMs and processes in this group.
    Group(String),
    /// The attached process that has this name when the rule is applied.
    Name(Name),
}

/// A range of CIDs that VMs and processes can have.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Cids(RangeInclusive<Cid>);

/// Ranges of ports, up to 4294967294.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Ports(Vec<RangeInclusive<Port>>);

/// Why a range is invalid.
#[derive(Copy, Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum RangeError {
    /// The last element is less than the first.
    #[error("the last comes before the first")]
    Reversed,
    /// An end of the range is reserved.
    #[error("an end of it is reserved")]
    Reserved,
    /// There is no range.
    #[error("it is empty")]
    Empty,
}

/// Whether a rule allows or denies a connection.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub enum Verdict {
    /// The connection is allowed.
    Allow,
    /// The connection is refused, as if no program listened on the port.
    Deny,
}

/// A rule of an [`AccessList`].
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Rule {
    /// Shown by logs and counters instead of the number of the rule.
    pub name: Option<RuleName>,
    /// Allow or deny.
    pub verdict: Verdict,
    /// Matches if the source is in one of these sets.
    pub from: Vec<Party>,
    /// Matches if the destination is in one of these sets.
    pub to: Vec<Party>,
    /// The destination ports that the rule matches.
    pub ports: Ports,
}

/// An ordered list of rules, empty by default.
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// use std::io::ErrorKind;
/// use zerosock::access::{AccessList, Party, Ports, Rule, Verdict};
/// use zerosock::attach::{self, AttachConfig};
/// use zerosock::daemon::{Daemon, DaemonConfig};
/// use zerosock::vsock::Endpoint;
/// use zerosock::{Address, Port};
///
/// // Within the group, only the web server may connect to the database's admin port.
/// let admin = |verdict, from| Rule {
///     name: None,
///     verdict,
///     from: vec![from],
///     to: vec![Party::Name("db".parse().unwrap())],
///     ports: Ports::one(Port::new(9999)).unwrap(),
/// };
/// let access = AccessList::new([
///     admin(Verdict::Allow, Party::Name("web".parse()?)),
///     admin(Verdict::Deny, Party::Any),
/// ]);
/// let counted = access.clone();
/// let path = dir.path().join("attach.sock");
/// let daemon = Daemon::start(DaemonConfig {
///     attach: Some(AttachConfig::new(attach::listen(&path)?)),
///     access,
///     ..DaemonConfig::default()
/// })?;
/// let db = Endpoint::builder().name("db").attach(&path)?;
/// let cache = Endpoint::builder().name("cache").attach(&path)?;
/// let refused = cache.connect(Address::new(db.cid(), Port::new(9999)));
/// assert_eq!(refused.unwrap_err().kind(), ErrorKind::ConnectionRefused);
/// assert_eq!(counted.denied(), [0, 1]);
/// daemon.shutdown();
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// Clones share the counters of denied connections.
#[derive(Clone, Debug, Default)]
pub struct AccessList {
    rules: Arc<[Rule]>,
    /// Connections that each rule has denied.
    denied: Arc<[AtomicU64]>,
}

/// Compares the rules, not the counters.
impl PartialEq for AccessList {
    fn eq(&self, other: &AccessList) -> bool {
        self.rules == other.rules
    }
}

impl Eq for AccessList {}

/// The properties of an endpoint that rules match.
#[derive(Copy, Clone, Debug)]
pub(crate) struct EndpointTraits<'a> {
    pub(crate) cid: Cid,
    pub(crate) groups: &'a [String],
    pub(crate) name: Option<&'a Name>,
}

impl Cids {
    /// The CIDs from `first` to `last`, both included.
    ///
    /// # Errors
    /// `last` is less than `first`, or one of them is not a CID that a VM can have.
    pub fn new(first: Cid, last: Cid) -> Result<Cids, RangeError> {
        if !first.is_guest() || !last.is_guest() {
            return Err(RangeError::Reserved);
        }
        if last < first {
            return Err(RangeError::Reversed);
        }
        Ok(Cids(first..=last))
    }
}

impl Ports {
    /// All ports.
    pub fn all() -> Ports {
        Ports(vec![Port::new(0)..=Port::new(Port::ANY.get() - 1)])
    }

    /// A single port.
    ///
    /// # Errors
    /// The port is [`Port::ANY`].
    pub fn one(port: Port) -> Result<Ports, RangeError> {
        Ports::new([port..=port])
    }

    /// The union of these ranges.
    ///
    /// # Errors
    /// There is no range, or one is empty or ends with [`Port::ANY`].
    pub fn new(
        ranges: impl IntoIterator<Item = RangeInclusive<Port>>,
    ) -> Result<Ports, RangeError> {
        let ranges: Vec<_> = ranges.into_iter().collect();
        if ranges.is_empty() {
            return Err(RangeError::Empty);
        }
        for range in &ranges {
            if *range.end() == Port::ANY {
                return Err(RangeError::Reserved);
            }
            if range.is_empty() {
                return Err(RangeError::Reversed);
            }
        }
        Ok(Ports(ranges))
    }

    fn contains(&self, port: Port) -> bool {
        self.0.iter().any(|range| range.contains(&port))
    }
}

impl AccessList {
    /// A list of these rules, in this order.
    pub fn new(rules: impl IntoIterator<Item = Rule>) -> AccessList {
        let rules: Arc<[Rule]> = rules.into_iter().collect();
        let denied = rules.iter().map(|_| AtomicU64::new(0)).collect();
        AccessList { rules, denied }
    }

    /// The rules in order.
    pub fn rules(&self) -> &[Rule] {
        &self.rules
    }

    /// Checks the names of the rules.
    ///
    /// # Errors
    /// Two rules have the same name.
    pub fn check(&self) -> Result<(), SameName> {
        check_names("access", self.rules.iter().map(|rule| rule.name.as_ref()))
    }

    /// Goes on with the counters of `old` if the rules differ in their names only. Returns whether they do.
    pub fn continue_counters(&mut self, old: &AccessList) -> bool {
        let is_same = |(rule, old): (&Rule, &Rule)| {
            rule.verdict == old.verdict
                && rule.from == old.from
                && rule.to == old.to
                && rule.ports == old.ports
        };
        let continues =
            self.rules.len() == old.rules.len() && self.rules.iter().zip(&*old.rules).all(is_same);
        if continues {
            self.denied = Arc::clone(&old.denied);
        }
        continues
    }

    /// The name of the rule of this number.
    pub(crate) fn name(&self, rule: usize) -> Option<&RuleName> {
        self.rules.get(rule)?.name.as_ref()
    }

    /// Number of connections and datagrams that each rule has denied since the list was made, in the order of the rules.
    pub fn denied(&self) -> Vec<u64> {
        let counters = self.denied.iter();
        counters
            .map(|count| count.load(Ordering::Relaxed))
            .collect()
    }

    /// Counts what the rule of this number has denied.
    pub(crate) fn count_denied(&self, rule: usize) {
        if let Some(count) = self.denied.get(rule) {
            count.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Number and verdict of the first rule that matches; `None` if none does.
    #[inline]
    pub(crate) fn first_match(
        &self,
        from: EndpointTraits<'_>,
        to: EndpointTraits<'_>,
        port: Port,
    ) -> Option<(usize, Verdict)> {
        let matches = |rule: &Rule| {
            rule.ports.contains(port)
                && rule.from.iter().any(|party| party.includes(from))
                && rule.to.iter().any(|party| party.includes(to))
        };
        let mut rules = self.rules.iter().enumerate();
        let found = rules.find(|(_, rule)| matches(rule));
        found.map(|(number, rule)| (number, rule.verdict))
    }
}

impl Party {
    /// Whether it is one endpoint at most.
    pub(crate) fn is_single(&self) -> bool {
        match self {
            Party::Host | Party::Name(_) => true,
            Party::Cids(cids) => cids.0.start() == cids.0.end(),
            Party::Any | Party::Group(_) => false,
        }
    }

    pub(crate) fn includes(&self, endpoint: EndpointTraits<'_>) -> bool {
        match self {
            Party::Any => true,
            Party::Host => endpoint.cid == Cid::HOST,
            Party::Cids(cids) => cids.0.contains(&endpoint.cid),
            Party::Group(group) => endpoint.groups.contains(group),
            Party::Name(name) => endpoint.name == Some(name),
        }
    }
}

#[cfg(test)]
#[path = "access_tests.rs"]
mod tests;
