//! What a relay or a rule connects to: an address or a name with a port, or the path of a Unix socket.
//!
//! # Invariants
//! - A port is never 0.
//! - A [`DomainName`] cannot be mistaken for an IPv4 address in any notation, so that what a policy
//!   sees as a name is never an address for the resolver.

use std::fmt;
use std::net::IpAddr;
use std::num::NonZeroU16;
use std::path::PathBuf;
use std::str::FromStr;

/// What to connect to.
#[derive(Clone, Debug, Eq, PartialEq, Hash)]
pub enum Target {
    /// `tcp:HOST:PORT`
    Tcp {
        /// The address or name.
        host: Host,
        /// The port.
        port: NonZeroU16,
    },
    /// `udp:HOST:PORT`
    Udp {
        /// The address or name.
        host: Host,
        /// The port.
        port: NonZeroU16,
    },
    /// `unix:PATH`: a stream socket.
    Unix(PathBuf),
    /// `unix-seqpacket:PATH`
    UnixSeqpacket(PathBuf),
    /// `unix-dgram:PATH`
    UnixDatagram(PathBuf),
}

/// An IP address or a name to resolve.
#[derive(Clone, Debug, Eq, PartialEq, Hash)]
pub enum Host {
    /// A literal address. IPv4-mapped IPv6 addresses are normalised to IPv4.
    Address(IpAddr),
    /// A name.
    Name(DomainName),
}

/// A host name by RFC 1123 with `_` allowed, in lower case: at most 253 bytes in labels of at most 63.
/// A trailing dot is kept; it keeps the resolver from trying search domains.
#[derive(Clone, Debug, Eq, PartialEq, Hash)]
pub struct DomainName(Box<str>);

/// Why a text is no target.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("{0}")]
pub struct ParseTargetError(pub(crate) String);

impl Target {
    /// Whether message bounds are kept: every kind but `tcp` and `unix`.
    pub fn keeps_messages(&self) -> bool {
        !matches!(self, Target::Tcp { .. } | Target::Unix(_))
    }
}

impl FromStr for Target {
    type Err = ParseTargetError;

    fn from_str(_text: &str) -> Result<Self, Self::Err> {
        unimplemented!()
    }
}

impl fmt::Display for Target {
    fn fmt(&self, _f: &mut fmt::Formatter<'_>) -> fmt::Result {
        unimplemented!()
    }
}

impl FromStr for Host {
    type Err = ParseTargetError;

    fn from_str(_text: &str) -> Result<Self, Self::Err> {
        unimplemented!()
    }
}

impl fmt::Display for Host {
    fn fmt(&self, _f: &mut fmt::Formatter<'_>) -> fmt::Result {
        unimplemented!()
    }
}

impl DomainName {
    /// The name, with its trailing dot if it has one.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for DomainName {
    type Err = ParseTargetError;

    fn from_str(_text: &str) -> Result<Self, Self::Err> {
        unimplemented!()
    }
}

impl fmt::Display for DomainName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
