//! vsock addresses: parsed once, valid from then on.
//!
//! # Invariants
//! On the wire a CID has 64 bits, the upper half reserved and zero (virtio 1.2, 5.10.6); here it
//! has 32, so that a nonzero upper half cannot be represented. [`Cid::is_guest`] alone decides which
//! CIDs a guest may have.
//!
//! # Text
//! CIDs and ports are written as decimal numbers. Parsing also accepts what socat and systemd
//! accept: hexadecimal numbers (`0x3`), `-1`, the names of reserved CIDs (`hypervisor`, `local`,
//! `host`, `any`, and the constants `VMADDR_CID_HOST` and the like), `any` for a port, and the
//! prefix `vsock:` before an address, with which a CID may be left out (`vsock::1234`: any CID).

use core::fmt;
use core::str::FromStr;

/// A context identifier: the address of an endpoint.
///
/// ```
/// use zerosock_proto::Cid;
///
/// assert_eq!("host".parse(), Ok(Cid::HOST));
/// assert_eq!("-1".parse(), Ok(Cid::ANY));
/// assert_eq!("3".parse(), Ok(Cid::new(3)));
/// assert_eq!(Cid::HOST.to_string(), "2");
/// ```
#[derive(Copy, Clone, Eq, PartialEq, Ord, PartialOrd, Hash, Debug)]
pub struct Cid(u32);

impl Cid {
    /// Reserved, once the hypervisor.
    pub const HYPERVISOR: Cid = Cid(0);
    /// Loopback within one endpoint.
    pub const LOCAL: Cid = Cid(1);
    /// The host.
    pub const HOST: Cid = Cid(2);
    /// The wildcard of `bind`; never the address of an endpoint.
    pub const ANY: Cid = Cid(u32::MAX);

    /// Any CID, reserved ones included, as headers may carry them.
    #[inline]
    pub const fn new(cid: u32) -> Cid {
        Cid(cid)
    }

    /// The number.
    #[inline]
    pub const fn get(self) -> u32 {
        self.0
    }

    /// Whether an endpoint other than the host may have it: not reserved.
    pub const fn is_guest(self) -> bool {
        self.0 > Cid::HOST.0 && self.0 != Cid::ANY.0
    }

    /// The CID, if a guest may have it.
    ///
    /// # Errors
    /// [`AddressError::Reserved`]: it is 0, 1, 2 or 0xffffffff.
    pub const fn for_guest(self) -> Result<Cid, AddressError> {
        if self.is_guest() {
            Ok(self)
        } else {
            Err(AddressError::Reserved(self.0))
        }
    }
}

impl From<u32> for Cid {
    fn from(cid: u32) -> Cid {
        Cid(cid)
    }
}

/// A CID as headers and configuration spaces carry it.
impl TryFrom<u64> for Cid {
    type Error = AddressError;

    fn try_from(cid: u64) -> Result<Cid, AddressError> {
        u32::try_from(cid)
            .map(Cid)
            .map_err(|_| AddressError::TooWide(cid))
    }
}

impl fmt::Display for Cid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for Cid {
    type Err = AddressError;

    fn from_str(s: &str) -> Result<Cid, AddressError> {
        Ok(match s {
            "hypervisor" | "VMADDR_CID_HYPERVISOR" => Cid::HYPERVISOR,
            "local" | "VMADDR_CID_LOCAL" => Cid::LOCAL,
            "host" | "VMADDR_CID_HOST" => Cid::HOST,
            "any" | "-1" | "VMADDR_CID_ANY" => Cid::ANY,
            number => parse_u32(number).map(Cid).ok_or(AddressError::Cid)?,
        })
    }
}

/// A port: 32 bits, unlike those of TCP.
///
/// ```
/// use zerosock_proto::Port;
///
/// assert_eq!("1234".parse(), Ok(Port::from(1234)));
/// assert_eq!("any".parse(), Ok(Port::ANY));
/// ```
#[derive(Copy, Clone, Eq, PartialEq, Ord, PartialOrd, Hash, Debug)]
pub struct Port(u32);

impl Port {
    /// The wildcard of `bind` and `connect`: choose a port. Never a port in use.
    pub const ANY: Port = Port(u32::MAX);

    /// Any port, [`Port::ANY`] included.
    #[inline]
    pub const fn new(port: u32) -> Port {
        Port(port)
    }

    /// The number.
    #[inline]
    pub const fn get(self) -> u32 {
        self.0
    }
}

impl From<u32> for Port {
    fn from(port: u32) -> Port {
        Port(port)
    }
}

impl fmt::Display for Port {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for Port {
    type Err = AddressError;

    fn from_str(s: &str) -> Result<Port, AddressError> {
        Ok(match s {
            "any" | "-1" | "VMADDR_PORT_ANY" => Port::ANY,
            number => parse_u32(number).map(Port).ok_or(AddressError::Port)?,
        })
    }
}

/// A CID and a port, written `3:1024`, or `vsock:3:1024` as the alternate form.
///
/// ```
/// use zerosock_proto::{Address, Cid, Port};
///
/// let address = Address::from((Cid::HOST, Port::new(1024)));
/// assert_eq!("host:1024".parse(), Ok(address));
/// assert_eq!("vsock:2:1024".parse(), Ok(address));
/// assert_eq!(format!("{address} {address:#}"), "2:1024 vsock:2:1024");
/// // As systemd writes a listener at any CID.
/// let listener = Address::new(Cid::ANY, Port::new(22));
/// assert_eq!("vsock::22".parse(), Ok(listener));
/// assert_eq!(format!("{listener:#}"), "vsock::22");
/// ```
#[derive(Copy, Clone, Eq, PartialEq, Ord, PartialOrd, Hash, Debug)]
pub struct Address {
    /// The endpoint.
    pub cid: Cid,
    /// The port on it.
    pub port: Port,
}

impl Address {
    /// An address from its two parts.
    #[inline]
    pub const fn new(cid: Cid, port: Port) -> Address {
        Address { cid, port }
    }
}

impl From<(Cid, Port)> for Address {
    fn from((cid, port): (Cid, Port)) -> Address {
        Address { cid, port }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (f.alternate(), self.cid) {
            (true, Cid::ANY) => write!(f, "vsock::{}", self.port),
            (true, cid) => write!(f, "vsock:{cid}:{}", self.port),
            (false, cid) => write!(f, "{cid}:{}", self.port),
        }
    }
}

impl FromStr for Address {
    type Err = AddressError;

    fn from_str(s: &str) -> Result<Address, AddressError> {
        let prefixed = s.strip_prefix("vsock:");
        let (cid, port) = prefixed
            .unwrap_or(s)
            .split_once(':')
            .ok_or(AddressError::NoColon)?;
        let cid = match (prefixed, cid) {
            (Some(_), "") => Cid::ANY,
            (_, cid) => cid.parse()?,
        };
        let port = port.parse()?;
        Ok(Address { cid, port })
    }
}

/// Why a text is no address, or a number no CID of a guest.
#[derive(Copy, Clone, Eq, PartialEq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AddressError {
    /// A CID and a port with a colon between them are wanted.
    #[error("an address is written CID:PORT, for example 3:1024 or vsock:3:1024")]
    NoColon,
    /// The CID is neither a number of 32 bits nor a name.
    #[error("the CID is not a number from 0 to 4294967295, hypervisor, local, host or any")]
    Cid,
    /// The port is neither a number of 32 bits nor `any`.
    #[error("the port is not a number from 0 to 4294967295, or any")]
    Port,
    /// The CIDs 0, 1, 2 and 0xffffffff have a meaning of their own.
    #[error("CID {0} is reserved; a guest's CID is 3 or more and below 4294967295")]
    Reserved(u32),
    /// The upper 32 bits of a CID are reserved and must be zero.
    #[error("CID {0} is wider than 32 bits; a guest's CID is 3 or more and below 4294967295")]
    TooWide(u64),
}

/// Accepts decimal digits, or hexadecimal ones after `0x`: `u32::from_str` accepts a leading plus
/// too. Numbers with a leading zero are refused, because socat reads them as octal.
fn parse_u32(s: &str) -> Option<u32> {
    if let Some(digits) = s.strip_prefix("0x") {
        let all = digits.bytes().all(|b| b.is_ascii_hexdigit());
        return all.then(|| u32::from_str_radix(digits, 16).ok()).flatten();
    }
    if s.bytes().all(|b| b.is_ascii_digit()) && (s == "0" || !s.starts_with('0')) {
        s.parse().ok()
    } else {
        None
    }
}

#[cfg(test)]
#[path = "addr_tests.rs"]
mod tests;
