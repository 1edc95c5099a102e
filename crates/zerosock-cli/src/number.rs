//! Whole numbers as command-line values. The error is the fix; clap prints option and value in
//! front.

use std::fmt::Display;
use std::str::FromStr;

use zerosock::{Cid, Port};

/// Number types and the largest value of each.
pub(crate) trait Whole: FromStr + Display {
    const LARGEST: Self;
}

impl Whole for u16 {
    const LARGEST: u16 = u16::MAX;
}

impl Whole for u32 {
    const LARGEST: u32 = u32::MAX;
}

impl Whole for u64 {
    const LARGEST: u64 = u64::MAX;
}

/// Parses a number of decimal digits.
pub(crate) fn parse<T: Whole>(text: &str) -> Result<T, String> {
    text.parse()
        .map_err(|_| format!("give a whole number from 0 to {}", T::LARGEST))
}

/// The forms of a CID.
pub(crate) const CIDS: &str =
    "a number from 0 to 4294967294, also as 0x3, or hypervisor, local or host (2)";
/// The forms of a port.
pub(crate) const PORTS: &str = "a number from 0 to 4294967294, also as 0x16";

/// Parses the CID of an endpoint. Any CID is none.
pub(crate) fn cid(text: &str) -> Result<Cid, String> {
    let cid = text.parse().ok().filter(|&cid| cid != Cid::ANY);
    cid.ok_or_else(|| format!("give {CIDS}"))
}

/// Parses the port of an endpoint. Any port is none.
pub(crate) fn port(text: &str) -> Result<Port, String> {
    let port = text.parse().ok().filter(|&port| port != Port::ANY);
    port.ok_or_else(|| format!("give {PORTS}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_invalid_number_error_states_the_valid_range() {
        assert_eq!(parse::<u32>("7"), Ok(7));
        for text in ["", "x", "-1", "1.5", "4294967296", "64k"] {
            let error = parse::<u32>(text).unwrap_err();
            assert_eq!(error, "give a whole number from 0 to 4294967295", "{text}");
        }
    }

    #[test]
    fn cids_and_ports_are_written_as_elsewhere() {
        assert_eq!(cid("host"), Ok(Cid::HOST));
        assert_eq!(cid("0x3"), Ok(Cid::new(3)));
        assert_eq!(port("0x16"), Ok(Port::new(22)));
        for text in ["guest", "any", "-1", "4294967295"] {
            assert!(cid(text).unwrap_err().contains("local or host"), "{text}");
            assert!(port(text).unwrap_err().contains("4294967294"), "{text}");
        }
        assert!(port("host").is_err());
    }
}
