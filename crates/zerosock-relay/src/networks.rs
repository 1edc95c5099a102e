//! Networks, and which addresses a rule may connect to or accept from.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

/// An IP address and the length of its prefix; bits behind the prefix are 0. IPv4-mapped IPv6 networks
/// are normalised to IPv4.
#[derive(Copy, Clone, Debug, Eq, PartialEq, Hash)]
pub struct Network {
    address: IpAddr,
    prefix: u8,
}

/// Which addresses may be used: first `deny` decides, then `allow`, then the default.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct AddressPolicy {
    allow: Vec<Network>,
    deny: Vec<Network>,
}

/// An address that a policy denies.
#[derive(Copy, Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("{address} is denied: {reason}")]
pub struct Denied {
    /// The address.
    pub address: IpAddr,
    /// Why.
    pub reason: DenyReason,
}

/// Why a policy denies an address.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub enum DenyReason {
    /// A network of `deny`.
    Listed(Network),
    /// It is in no network of `allow`, and the policy permits only those.
    NotListed,
    /// 127.0.0.0/8 or ::1.
    Loopback,
    /// 0.0.0.0/8 or ::, by which Linux reaches the machine itself.
    Unspecified,
    /// 169.254.0.0/16 or fe80::/10, where metadata services of clouds are.
    LinkLocal,
    /// A metadata service of a cloud outside the link-local networks.
    Metadata,
    /// 224.0.0.0/4 or ff00::/8.
    Multicast,
    /// 255.255.255.255.
    Broadcast,
    /// 64:ff9b:1::/48: the place of the embedded IPv4 address is not known.
    LocalNat64,
}

impl Network {
    /// The network of the first `prefix` bits of an address.
    ///
    /// # Errors
    /// The prefix is longer than the address, or a bit behind it is set.
    pub fn new(_address: IpAddr, _prefix: u8) -> Result<Self, ParseNetworkError> {
        unimplemented!()
    }

    /// Whether an address is in the network. An IPv4-mapped IPv6 address counts as IPv4.
    pub fn contains(&self, _address: IpAddr) -> bool {
        unimplemented!()
    }
}

/// Why a text is no network.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("{0}")]
pub struct ParseNetworkError(String);

impl FromStr for Network {
    type Err = ParseNetworkError;

    fn from_str(_text: &str) -> Result<Self, Self::Err> {
        unimplemented!()
    }
}

impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.prefix)
    }
}

impl fmt::Display for DenyReason {
    fn fmt(&self, _f: &mut fmt::Formatter<'_>) -> fmt::Result {
        unimplemented!()
    }
}

impl AddressPolicy {
    /// For connections that a guest or process asks for: denies what leads back into the machine or to
    /// its metadata service, unless `allow` has it.
    pub fn for_guests(_allow: Vec<Network>, _deny: Vec<Network>) -> Self {
        unimplemented!()
    }

    /// For targets that the operator of the machine chose: permits what `deny` does not have.
    pub fn unrestricted(_deny: Vec<Network>) -> Self {
        unimplemented!()
    }

    /// For clients of a listener: with an empty `allow` all that `deny` does not have, otherwise only
    /// what `allow` has.
    pub fn for_clients(_allow: Vec<Network>, _deny: Vec<Network>) -> Self {
        unimplemented!()
    }

    /// Judges an address that a name was resolved to, or that a client has.
    ///
    /// # Errors
    /// The address is denied.
    pub fn check(&self, _address: IpAddr) -> Result<(), Denied> {
        unimplemented!()
    }

    /// Judges an address that is written in the rule itself: only `deny` can deny it.
    ///
    /// # Errors
    /// The address is denied.
    pub fn check_literal(&self, _address: IpAddr) -> Result<(), Denied> {
        unimplemented!()
    }
}
