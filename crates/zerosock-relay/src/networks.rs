//! Networks, and which addresses a rule may connect to or accept from.
//!
//! # Invariants
//! - An IPv6 address that embeds IPv4 addresses (IPv4-compatible, 6to4, Teredo, ISATAP, NAT64) is denied if
//!   any of all is. Only the address itself can permit it: the holder of 2002:a00:1::1 need not have 10.0.0.1. An
//!   IPv4-mapped address is the IPv4 address.
//! - The order is `deny`, `allow`, default. The default never permits what leads back into the machine
//!   or to the metadata service of a cloud.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

/// An IP address and the length of its prefix; bits behind the prefix are 0. IPv4-mapped IPv6 networks
/// are normalised to IPv4.
///
/// # Examples
/// ```
/// use zerosock_relay::Network;
///
/// let network: Network = "10.0.0.0/8".parse()?;
/// assert!(network.contains("10.200.0.1".parse().unwrap()));
/// assert_eq!("10.0.0.1/8".parse::<Network>().unwrap_err().to_string(),
///     "`10.0.0.1/8` has bits behind its prefix: write 10.0.0.0/8");
/// # Ok::<(), zerosock_relay::networks::ParseNetworkError>(())
/// ```
#[derive(Copy, Clone, Debug, Eq, PartialEq, Hash)]
pub struct Network {
    address: IpAddr,
    prefix: u8,
}

/// Why a text is no network.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("{0}")]
pub struct ParseNetworkError(String);

impl Network {
    /// The network of the first `prefix` bits of an address.
    ///
    /// # Errors
    /// The prefix is longer than the address, or a bit behind it is set.
    pub fn new(address: IpAddr, prefix: u8) -> Result<Self, ParseNetworkError> {
        let text = format!("{address}/{prefix}");
        let longest = if address.is_ipv4() { 32 } else { 128 };
        if prefix > longest {
            return Err(ParseNetworkError(format!(
                "`{text}` has a prefix of more than {longest} bits"
            )));
        }
        let first = masked(address, prefix);
        if first != address {
            return Err(ParseNetworkError(format!(
                "`{text}` has bits behind its prefix: write {first}/{prefix}"
            )));
        }
        // `::ffff:0:0/96` and longer prefixes. Shorter ones have bits behind the prefix.
        Ok(match (address, address.to_canonical()) {
            (IpAddr::V6(_), mapped @ IpAddr::V4(_)) => Network {
                address: mapped,
                prefix: prefix.saturating_sub(96),
            },
            _ => Network { address, prefix },
        })
    }

    /// Whether an address is in the network. An IPv4-mapped IPv6 address counts as IPv4.
    pub fn contains(&self, address: IpAddr) -> bool {
        // Addresses of different families are never equal.
        masked(address.to_canonical(), self.prefix) == self.address
    }

    const fn v4(a: u8, b: u8, c: u8, d: u8, prefix: u8) -> Self {
        Network {
            address: IpAddr::V4(Ipv4Addr::new(a, b, c, d)),
            prefix,
        }
    }

    const fn v6(first: [u16; 3], last: u16, prefix: u8) -> Self {
        let [a, b, c] = first;
        Network {
            address: IpAddr::V6(Ipv6Addr::new(a, b, c, 0, 0, 0, 0, last)),
            prefix,
        }
    }
}

/// An address with the bits behind a prefix set to 0. A prefix longer than the address keeps all.
fn masked(address: IpAddr, prefix: u8) -> IpAddr {
    match address {
        IpAddr::V4(address) => {
            let behind = u32::MAX.checked_shr(prefix.into()).unwrap_or(0);
            IpAddr::V4(Ipv4Addr::from_bits(address.to_bits() & !behind))
        }
        IpAddr::V6(address) => {
            let behind = u128::MAX.checked_shr(prefix.into()).unwrap_or(0);
            IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() & !behind))
        }
    }
}

impl FromStr for Network {
    type Err = ParseNetworkError;

    /// Parses `ADDRESS/PREFIX`, or a single address.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (address, prefix) = match text.split_once('/') {
            Some((address, prefix)) => (address, Some(prefix)),
            None => (text, None),
        };
        let address: IpAddr = address.parse().map_err(|_| {
            ParseNetworkError(format!(
                "`{text}` is no network: give ADDRESS or ADDRESS/PREFIX"
            ))
        })?;
        let prefix = match prefix {
            None if address.is_ipv4() => 32,
            None => 128,
            // `u8::from_str` takes a leading `+`.
            Some(prefix) => match prefix.parse() {
                Ok(number) if prefix.bytes().all(|byte| byte.is_ascii_digit()) => number,
                _ => {
                    return Err(ParseNetworkError(format!(
                        "`{prefix}` is no prefix in `{text}`: give a number of bits"
                    )));
                }
            },
        };
        Network::new(address, prefix)
    }
}

impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.prefix)
    }
}

/// Which addresses may be used: first `deny` decides, then `allow`, then the default.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct AddressPolicy {
    allow: Vec<Network>,
    deny: Vec<Network>,
    default: DefaultPolicy,
}

/// What happens to addresses in no list.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
enum DefaultPolicy {
    /// All are permitted.
    Permit,
    /// None is permitted.
    Deny,
    /// Those that lead back into the machine or to a metadata service are denied.
    Guests,
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

/// What guests are denied by default.
const DENIED_TO_GUESTS: [(Network, DenyReason); 14] = [
    // RFC 8215: where the IPv4 address is depends on the translator's prefix. First: all of it, for one reason.
    (
        Network::v6([0x64, 0xff9b, 1], 0, 48),
        DenyReason::LocalNat64,
    ),
    (Network::v4(127, 0, 0, 0, 8), DenyReason::Loopback),
    (Network::v6([0; 3], 1, 128), DenyReason::Loopback),
    (Network::v4(0, 0, 0, 0, 8), DenyReason::Unspecified),
    (Network::v6([0; 3], 0, 128), DenyReason::Unspecified),
    (Network::v4(169, 254, 0, 0, 16), DenyReason::LinkLocal),
    (Network::v6([0xfe80, 0, 0], 0, 10), DenyReason::LinkLocal),
    // Azure (WireServer) and Alibaba Cloud; AWS and Google Cloud.
    (Network::v4(168, 63, 129, 16, 32), DenyReason::Metadata),
    (Network::v4(100, 100, 100, 200, 32), DenyReason::Metadata),
    (
        Network::v6([0xfd00, 0xec2, 0], 0x254, 128),
        DenyReason::Metadata,
    ),
    (
        Network::v6([0xfd20, 0xce, 0], 0x254, 128),
        DenyReason::Metadata,
    ),
    (Network::v4(224, 0, 0, 0, 4), DenyReason::Multicast),
    (Network::v6([0xff00, 0, 0], 0, 8), DenyReason::Multicast),
    (Network::v4(255, 255, 255, 255, 32), DenyReason::Broadcast),
];

impl AddressPolicy {
    /// For connections that a guest or process asks for: denies what leads back into the machine or to
    /// its metadata service, unless `allow` has it.
    pub fn for_guests(allow: Vec<Network>, deny: Vec<Network>) -> Self {
        AddressPolicy {
            allow,
            deny,
            default: DefaultPolicy::Guests,
        }
    }

    /// For targets that the operator of the machine chose: permits what `deny` does not have.
    pub fn unrestricted(deny: Vec<Network>) -> Self {
        AddressPolicy {
            allow: Vec::new(),
            deny,
            default: DefaultPolicy::Permit,
        }
    }

    /// For clients of a listener: with an empty `allow` all that `deny` does not have, otherwise only
    /// what `allow` has.
    pub fn for_clients(allow: Vec<Network>, deny: Vec<Network>) -> Self {
        let default = match allow.is_empty() {
            true => DefaultPolicy::Permit,
            false => DefaultPolicy::Deny,
        };
        AddressPolicy {
            allow,
            deny,
            default,
        }
    }

    /// Judges an address that a name was resolved to, or that a client has.
    ///
    /// # Errors
    /// The address is denied.
    pub fn check(&self, address: IpAddr) -> Result<(), Denied> {
        self.check_literal(address)?;
        if self.allow.iter().any(|network| network.contains(address)) {
            return Ok(());
        }
        let forms = forms(address);
        let reason = match self.default {
            DefaultPolicy::Permit => return Ok(()),
            DefaultPolicy::Deny => Some(DenyReason::NotListed),
            DefaultPolicy::Guests => DENIED_TO_GUESTS
                .iter()
                .find(|(network, _)| forms.iter().any(|&form| network.contains(form)))
                .map(|(_, reason)| *reason),
        };
        reason.map_or(Ok(()), |reason| Err(Denied { address, reason }))
    }

    /// Judges an address that is written in the rule itself: only `deny` can deny it.
    ///
    /// # Errors
    /// The address is denied.
    pub fn check_literal(&self, address: IpAddr) -> Result<(), Denied> {
        let forms = forms(address);
        let has = |network: &&Network| forms.iter().any(|&form| network.contains(form));
        match self.deny.iter().find(has) {
            Some(&network) => Err(Denied {
                address,
                reason: DenyReason::Listed(network),
            }),
            None => Ok(()),
        }
    }
}

/// An address, and the IPv4 addresses that it leads to if it embeds some.
fn forms(address: IpAddr) -> Vec<IpAddr> {
    let address = address.to_canonical();
    let embedded = match address {
        IpAddr::V4(_) => Vec::new(),
        IpAddr::V6(address) => embedded(address),
    };
    let embedded = embedded.into_iter().map(IpAddr::V4);
    std::iter::once(address).chain(embedded).collect()
}

/// The IPv4 addresses that an IPv6 address leads to.
fn embedded(address: Ipv6Addr) -> Vec<Ipv4Addr> {
    let octets = address.octets();
    let at = |places: [usize; 4]| Ipv4Addr::from(places.map(|place| octets[place]));
    let last = [12, 13, 14, 15];
    let [a, b, c, d, e, f, g, h] = address.segments();
    let mut found = match [a, b, c, d, e, f] {
        // IPv4-compatible (RFC 4291, 2.5.5.1, deprecated); `::` and `::1` are none.
        [0, 0, 0, 0, 0, 0] if g != 0 || h > 1 => vec![at(last)],
        // NAT64 (RFC 6052, 2.1).
        [0x64, 0xff9b, 0, 0, 0, 0] => vec![at(last)],
        // Local NAT64 (RFC 8215): one of these, by the length of the translator's prefix (RFC 6052, 2.2). It
        // leads to none of 0.0.0.0/8, which the places of other lengths show.
        [0x64, 0xff9b, 1, ..] => {
            let places = [[6, 7, 9, 10], [7, 9, 10, 11], [9, 10, 11, 12], last];
            let found = places.map(at).into_iter();
            found.filter(|found| found.octets()[0] != 0).collect()
        }
        // IPv4-translated (RFC 2765, 2.1).
        [0, 0, 0, 0, 0xffff, 0] => vec![at(last)],
        // 6to4 (RFC 3056, 2).
        [0x2002, ..] => vec![at([2, 3, 4, 5])],
        // Teredo (RFC 4380, 4): the server, and the client's address, its bits inverted.
        [0x2001, 0, ..] => vec![at([4, 5, 6, 7]), Ipv4Addr::from_bits(!at(last).to_bits())],
        _ => Vec::new(),
    };
    // ISATAP (RFC 5214, 6.1), behind any prefix. Two bits tell whether the address is unique, and a group.
    if (e & !0x300, f) == (0, 0x5efe) {
        found.push(at(last));
    }
    found
}

impl fmt::Display for DenyReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match self {
            DenyReason::Listed(network) => return write!(f, "`deny` has {network}"),
            DenyReason::NotListed => "it is in no network of `allow`",
            DenyReason::Loopback => "a loopback address; `allow` can permit it",
            DenyReason::Unspecified => "an unspecified address, which leads to this machine",
            DenyReason::LinkLocal => "a link-local address; `allow` can permit it",
            DenyReason::Metadata => "the metadata service of a cloud; `allow` can permit it",
            DenyReason::Multicast => "a multicast address; `allow` can permit it",
            DenyReason::Broadcast => "the broadcast address; `allow` can permit it",
            DenyReason::LocalNat64 => "a local NAT64 address; `allow` can permit it",
        };
        f.write_str(what)
    }
}

#[cfg(test)]
#[path = "networks_tests.rs"]
mod tests;
