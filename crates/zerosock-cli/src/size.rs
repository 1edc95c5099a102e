//! Sizes in bytes as command-line values: a whole number, optionally with K, M, G or T for powers
//! of 1024.

use std::fmt;

use serde::de::{self, Deserializer, Visitor};

/// Parses `4096` or `512G`. The error is the fix; clap prints option and value in front.
pub(crate) fn parse(text: &str) -> Result<u64, &'static str> {
    let shift = match text.bytes().last() {
        Some(b'K') => 10,
        Some(b'M') => 20,
        Some(b'G') => 30,
        Some(b'T') => 40,
        _ => 0,
    };
    let digits = if shift > 0 {
        &text[..text.len() - 1]
    } else {
        text
    };
    digits
        .parse()
        .ok()
        .and_then(|number: u64| number.checked_mul(1 << shift))
        .ok_or(
            "give a number of bytes, with K, M, G or T behind it for powers of 1024, such as 64G",
        )
}

/// Parses the same from a file, where it may also be a number.
pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u64>, D::Error> {
    from.deserialize_any(Size).map(Some)
}

struct Size;

impl Visitor<'_> for Size {
    type Value = u64;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a number of bytes such as 64G")
    }

    fn visit_u64<E: de::Error>(self, number: u64) -> Result<u64, E> {
        Ok(number)
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<u64, E> {
        parse(text).map_err(E::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn suffixes_are_powers_of_1024() {
        assert_eq!(parse("0"), Ok(0));
        assert_eq!(parse("4097"), Ok(4097));
        assert_eq!(parse("3K"), Ok(3 << 10));
        assert_eq!(parse("5M"), Ok(5 << 20));
        assert_eq!(parse("64G"), Ok(64 << 30));
        assert_eq!(parse("16777215T"), Ok(16_777_215 << 40));
        for text in ["", "K", "-1", "1.5G", "1g", "1GB", "x", "16777216T", "é"] {
            assert!(parse(text).is_err(), "{text:?}");
        }
    }
}
