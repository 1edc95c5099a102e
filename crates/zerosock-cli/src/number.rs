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

/// Parses a CID: a number, or the name of a reserved one.
pub(crate) fn cid(text: &str) -> Result<u32, String> {
    let cid = text.parse::<Cid>();
    cid.map(Cid::get).map_err(|error| error.to_string())
}

/// Parses a port.
pub(crate) fn port(text: &str) -> Result<u32, String> {
    let port = text.parse::<Port>();
    port.map(Port::get).map_err(|error| error.to_string())
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
        assert_eq!(
            (cid("host"), cid("0x3"), cid("-1")),
            (Ok(2), Ok(3), Ok(u32::MAX))
        );
        assert_eq!((port("22"), port("any")), (Ok(22), Ok(u32::MAX)));
        assert!(
            cid("guest")
                .unwrap_err()
                .contains("hypervisor, local, host or any")
        );
        assert!(port("host").is_err());
    }
}
