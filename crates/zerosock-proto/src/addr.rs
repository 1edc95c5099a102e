//! vsock addresses: parsed once, valid from then on.
//!
//! # Invariants
//! On the wire a CID has 64 bits, the upper half reserved and zero (virtio 1.2, 5.10.6); here it
//! has 32, so that a nonzero upper half cannot be represented. [`Cid::guest`] alone decides which
//! CIDs a guest may have.

use core::fmt;
use core::str::FromStr;

/// A context identifier: the address of an endpoint.
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

    /// A CID that may be given to a guest.
    ///
    /// # Errors
    /// [`CidError`] when it is reserved (0, 1, 2, 0xffffffff) or wider than
    /// 32 bits (0xffffffffffffffff is reserved, the rest must be zero).
    pub const fn guest(cid: u64) -> Result<Cid, CidError> {
        if cid > u32::MAX as u64 {
            return Err(CidError::TooWide(cid));
        }
        let cid = Cid(cid as u32);
        if cid.is_guest() {
            Ok(cid)
        } else {
            Err(CidError::Reserved(cid.0))
        }
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
}

impl fmt::Display for Cid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for Cid {
    type Err = ParseAddressError;

    fn from_str(s: &str) -> Result<Cid, ParseAddressError> {
        parse_u32(s).map(Cid).ok_or(ParseAddressError::Cid)
    }
}

/// Why a number is no CID for a guest.
#[derive(Copy, Clone, Eq, PartialEq, Debug, thiserror::Error)]
pub enum CidError {
    /// 0, 1, 2 and 0xffffffff have a meaning of their own.
    #[error("CID {0} is reserved; a guest's CID is 3 or more and below 4294967295")]
    Reserved(u32),
    /// The upper 32 bits are reserved and must be zero.
    #[error("CID {0} is wider than 32 bits; a guest's CID is 3 or more and below 4294967295")]
    TooWide(u64),
}

/// A port: 32 bits, unlike those of TCP.
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

impl fmt::Display for Port {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for Port {
    type Err = ParseAddressError;

    fn from_str(s: &str) -> Result<Port, ParseAddressError> {
        parse_u32(s).map(Port).ok_or(ParseAddressError::Port)
    }
}

/// A CID and a port, written `3:1024`.
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

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.cid, self.port)
    }
}

impl FromStr for Address {
    type Err = ParseAddressError;

    fn from_str(s: &str) -> Result<Address, ParseAddressError> {
        let (cid, port) = s.split_once(':').ok_or(ParseAddressError::NoColon)?;
        Ok(Address {
            cid: cid.parse()?,
            port: port.parse()?,
        })
    }
}

/// Why a text is no address.
#[derive(Copy, Clone, Eq, PartialEq, Debug, thiserror::Error)]
pub enum ParseAddressError {
    /// Two numbers with a colon between them are wanted.
    #[error("an address is written CID:PORT, for example 3:1024")]
    NoColon,
    /// The CID is no decimal number of 32 bits.
    #[error("the CID is not a decimal number between 0 and 4294967295")]
    Cid,
    /// The port is no decimal number of 32 bits.
    #[error("the port is not a decimal number between 0 and 4294967295")]
    Port,
}

/// Accepts digits only: `u32::from_str` accepts a leading plus too, and only the displayed spelling
/// is to parse.
fn parse_u32(s: &str) -> Option<u32> {
    if s.bytes().all(|b| b.is_ascii_digit()) {
        s.parse().ok()
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reserved_cids_are_refused_for_guests() {
        for cid in [0, 1, 2, 0xffff_ffff] {
            assert_eq!(Cid::guest(cid), Err(CidError::Reserved(cid as u32)));
        }
        for cid in [0x1_0000_0000, 0x1_0000_0003, u64::MAX] {
            assert_eq!(Cid::guest(cid), Err(CidError::TooWide(cid)));
        }
        assert_eq!(Cid::guest(3), Ok(Cid::new(3)));
        assert_eq!(Cid::guest(0xffff_fffe), Ok(Cid::new(0xffff_fffe)));
    }

    #[test]
    fn displayed_addresses_parse() {
        let address = Address::new(Cid::new(3), Port::new(1024));
        assert_eq!(address.to_string(), "3:1024");
        assert_eq!("3:1024".parse(), Ok(address));
        assert_eq!("4294967295".parse(), Ok(Port::ANY));
    }

    #[test]
    fn invalid_addresses_have_distinct_errors() {
        let parse = |s: &str| s.parse::<Address>();
        assert_eq!(parse("3"), Err(ParseAddressError::NoColon));
        assert_eq!(parse(":3"), Err(ParseAddressError::Cid));
        assert_eq!(parse("3:"), Err(ParseAddressError::Port));
        assert_eq!(parse("+3:1"), Err(ParseAddressError::Cid));
        assert_eq!(parse("3:4294967296"), Err(ParseAddressError::Port));
        assert_eq!(parse("3:1:2"), Err(ParseAddressError::Port));
    }
}
