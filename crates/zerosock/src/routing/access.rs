//! Who may reach whom: an access list, on top of what groups and the host's side give.
//!
//! A list is asked when a connection is asked for, never for a packet of one that exists. Its
//! rules are looked at in order; the first that fits decides. When none fits, everything is as it
//! is without a list: endpoints that share a group reach each other, the host and its services
//! reach everybody, and everybody reaches them. What must hold: a list says nothing illegal once
//! it exists; what cannot be meant (no ports, a reserved CID) cannot be made.

use std::ops::RangeInclusive;
use std::sync::Arc;

use zerosock_proto::{Cid, Port};

use crate::routing::name::Name;

/// Endpoints that a rule is about.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Party {
    /// All of them, the host included.
    Any,
    /// CID 2: programs behind hybrid sockets or AF_VSOCK, the program that embeds the device, and
    /// host services.
    Host,
    /// VMs and processes with these CIDs.
    Cids(Cids),
    /// VMs and processes in this group.
    Group(String),
    /// The attached process of this name, whoever has it at the time.
    Name(Name),
}

/// CIDs that VMs and processes can have, from one to another.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Cids(RangeInclusive<Cid>);

/// Ports, from one to another, at most to 4294967294.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Ports(Vec<RangeInclusive<Port>>);

/// Why a range is none.
#[derive(Copy, Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum RangeError {
    /// The last comes before the first.
    #[error("the last comes before the first")]
    Reversed,
    /// One end is reserved.
    #[error("an end of it is reserved")]
    Reserved,
    /// There is nothing in it.
    #[error("it is empty")]
    Empty,
}

/// Whether a rule lets in or keeps out.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub enum Verdict {
    /// They may.
    Allow,
    /// They may not: refused as where nobody listens.
    Deny,
}

/// One line of an [`AccessList`].
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Rule {
    /// What it says.
    pub verdict: Verdict,
    /// Who asks: one of these.
    pub from: Vec<Party>,
    /// Who is asked: one of these.
    pub to: Vec<Party>,
    /// At which ports of theirs.
    pub ports: Ports,
}

/// Rules in their order. The default has none.
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
/// // Of those in the group, nobody but the web server may reach the database's admin port.
/// let admin = |verdict, from| Rule {
///     verdict,
///     from: vec![from],
///     to: vec![Party::Name("db".parse().unwrap())],
///     ports: Ports::one(Port::new(9999)).unwrap(),
/// };
/// let access = AccessList::new([
///     admin(Verdict::Allow, Party::Name("web".parse()?)),
///     admin(Verdict::Deny, Party::Any),
/// ]);
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
/// daemon.shutdown();
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct AccessList(Arc<[Rule]>);

/// An endpoint, as a rule sees it.
#[derive(Copy, Clone, Debug)]
pub(crate) struct Who<'a> {
    pub(crate) cid: Cid,
    pub(crate) groups: &'a [String],
    pub(crate) name: Option<&'a Name>,
}

impl Cids {
    /// From one to another, both included.
    ///
    /// # Errors
    /// When there is none between them, or an end is no CID that a VM can have.
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
    /// All of them.
    pub fn all() -> Ports {
        Ports(vec![Port::new(0)..=Port::new(Port::ANY.get() - 1)])
    }

    /// This one.
    ///
    /// # Errors
    /// For [`Port::ANY`], which is none.
    pub fn one(port: Port) -> Result<Ports, RangeError> {
        Ports::new([port..=port])
    }

    /// All in these ranges.
    ///
    /// # Errors
    /// When there is no range, or one has nothing in it or ends with [`Port::ANY`].
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
    /// These rules, in this order.
    pub fn new(rules: impl IntoIterator<Item = Rule>) -> AccessList {
        AccessList(rules.into_iter().collect())
    }

    /// The rules, in their order.
    pub fn rules(&self) -> &[Rule] {
        &self.0
    }

    /// What the first rule that fits says; `None`: none fits.
    #[inline]
    pub(crate) fn verdict(&self, from: Who<'_>, to: Who<'_>, port: Port) -> Option<Verdict> {
        let fits = |rule: &&Rule| {
            rule.ports.contains(port)
                && rule.from.iter().any(|party| party.includes(from))
                && rule.to.iter().any(|party| party.includes(to))
        };
        self.0.iter().find(fits).map(|rule| rule.verdict)
    }
}

impl Party {
    fn includes(&self, who: Who<'_>) -> bool {
        match self {
            Party::Any => true,
            Party::Host => who.cid == Cid::HOST,
            Party::Cids(cids) => cids.0.contains(&who.cid),
            Party::Group(group) => who.groups.contains(group),
            Party::Name(name) => who.name == Some(name),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ports(first: u32, last: u32) -> Result<Ports, RangeError> {
        Ports::new([Port::new(first)..=Port::new(last)])
    }

    #[test]
    fn what_cannot_be_meant_cannot_be_made() {
        assert_eq!(Ports::new([]), Err(RangeError::Empty));
        assert_eq!(ports(5, 4), Err(RangeError::Reversed));
        assert_eq!(ports(5, u32::MAX), Err(RangeError::Reserved));
        assert_eq!(ports(0, u32::MAX - 1), Ok(Ports::all()));
        let cids = |first, last| Cids::new(Cid::new(first), Cid::new(last));
        for reserved in [0, 1, 2, u32::MAX] {
            assert_eq!(cids(reserved, 9), Err(RangeError::Reserved));
            assert_eq!(cids(9, reserved), Err(RangeError::Reserved));
        }
        assert_eq!(cids(9, 8), Err(RangeError::Reversed));
        assert!(cids(9, 9).is_ok());
    }

    #[test]
    fn the_first_rule_that_fits_decides() {
        let name: Name = "db".parse().unwrap();
        let groups = ["red".to_owned()];
        let who = |cid, groups, name| Who {
            cid: Cid::new(cid),
            groups,
            name,
        };
        let host = who(2, &[], None);
        let vm = who(3, &groups, None);
        let db = who(70, &[], Some(&name));
        let rule = |verdict, from: Party, to: Party, ports| Rule {
            verdict,
            from: vec![from],
            to: vec![to],
            ports,
        };
        use Verdict::{Allow, Deny};
        let red = Party::Group("red".into());
        let named = Party::Name(name.clone());
        let cids = Party::Cids(Cids::new(Cid::new(60), Cid::new(80)).unwrap());
        let list = AccessList::new([
            rule(Allow, red.clone(), named, ports(5, 6).unwrap()),
            rule(Deny, red, Party::Any, ports(0, 9).unwrap()),
            rule(Deny, cids, Party::Host, Ports::all()),
        ]);
        let asked = |from, to, port| list.verdict(from, to, Port::new(port));
        for port in [5, 6] {
            assert_eq!(asked(vm, db, port), Some(Allow));
        }
        for port in [0, 4, 7, 9] {
            assert_eq!(asked(vm, db, port), Some(Deny), "{port}");
        }
        assert_eq!(asked(vm, db, 10), None);
        assert_eq!(asked(vm, host, 5), Some(Deny), "any includes the host");
        assert_eq!(asked(db, host, 5), Some(Deny), "by its CID");
        assert_eq!(asked(host, db, 5), None);
        assert_eq!(asked(db, vm, 5), None, "not the other way round");
        assert_eq!(AccessList::default().verdict(vm, db, Port::new(5)), None);
    }
}
