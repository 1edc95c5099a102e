//! What the fuzz targets share.

pub mod lab;

use std::fmt::{Debug, Display};
use std::fs;
use std::os::fd::OwnedFd;
use std::str::FromStr;

use arbitrary::{Result, Unstructured};

/// Most steps of an input. Longer ones are slower and find nothing new.
const STEPS: usize = 96;

/// Steps that `next` makes of the input until it has no more bytes.
pub fn steps<'a, T>(
    u: &mut Unstructured<'a>,
    mut next: impl FnMut(&mut Unstructured<'a>) -> Result<T>,
) -> Vec<T> {
    let mut steps = Vec::new();
    while !u.is_empty() && steps.len() < STEPS {
        match next(u) {
            Ok(step) => steps.push(step),
            Err(_) => break,
        }
    }
    steps
}

/// A number with a preference for small ones and for those near the largest.
pub fn number(u: &mut Unstructured<'_>) -> Result<u32> {
    Ok(match u.arbitrary::<u8>()? {
        0..=63 => u.int_in_range(0..=3)?,
        64..=159 => u32::from(u.arbitrary::<u16>()?),
        160..=191 => u32::MAX - u32::from(u.arbitrary::<u8>()?),
        _ => u.arbitrary()?,
    })
}

/// Descriptors that this process has.
pub fn open_descriptors() -> usize {
    fs::read_dir("/proc/self/fd").unwrap().count()
}

/// A memory file of `len` bytes.
pub fn memory_file(len: u64) -> OwnedFd {
    zerosock_sys::memfd::create("fuzz", len, true).unwrap()
}

/// A text that is accepted is written such that the same value is read from it.
pub fn round_trip<T: FromStr + Display + PartialEq + Debug>(text: &str) -> Option<T> {
    let value: T = text.parse().ok()?;
    let written = value.to_string();
    assert_eq!(written.parse().ok().as_ref(), Some(&value), "{text:?}");
    Some(value)
}
