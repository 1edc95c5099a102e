//! A memory that consists of parts of another one: of the pages that a guest has named as the memory of an
//! endpoint of its own.
//!
//! # Invariants
//! - It maps nothing. Its addresses are those of its parent's mapping, which it keeps.
//! - A byte of the parent has at most one address in it, and a huge page lies in one of its regions.
//! - A parent that is lost is a memory that is lost.

use std::sync::Arc;

use super::{MAX_REGIONS, Memory, Region, next_id};

/// A part of a memory: huge pages that lie one behind the other.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct Extent {
    /// The guest address of its first byte in the parent.
    pub addr: u64,
    /// Length in bytes.
    pub len: u64,
}

impl Extent {
    /// Bytes of a huge page. Extents consist of whole ones.
    pub const HUGE_PAGE: u64 = 2 << 20;

    /// The position of an extent of the list that has bytes of another one before it, if there is one. No extent reaches
    /// beyond the last address.
    pub fn find_overlap(list: &[Extent]) -> Option<usize> {
        let mut order: Vec<(Extent, usize)> = list.iter().copied().zip(0..).collect();
        order.sort_unstable_by_key(|(extent, _)| extent.addr);
        order.windows(2).find_map(|pair| match *pair {
            [(one, a), (next, b)] if next.addr < one.addr + one.len => Some(a.max(b)),
            _ => None,
        })
    }
}

/// Why a list of extents was refused, and at which position of the list.
#[derive(Copy, Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ExtentError {
    /// A list without extents.
    #[error("no extent is named")]
    NoExtents,
    /// More than [`MAX_REGIONS`] extents, or extents that lie in more regions.
    #[error("more than {MAX_REGIONS} extents")]
    TooMany,
    /// An extent that begins or ends inside a huge page, or has no length.
    #[error("extent {0} does not consist of whole huge pages of 2 MiB")]
    Unaligned(usize),
    /// An extent with a huge page that does not lie in one region of the parent.
    #[error("extent {0} does not lie in the memory")]
    Outside(usize),
    /// An extent that has bytes of another one before it.
    #[error("extent {0} overlaps another one")]
    Overlap(usize),
}

impl Memory {
    /// The memory that consists of these parts of `parent`, in the order of the list: extent `i` begins at the
    /// address at which extent `i - 1` ends, and the first one at 0. User addresses are the same.
    ///
    /// It keeps the mapping of `parent`, and takes no memory or address space of its own. So one lease on a
    /// page of it keeps all of the parent mapped: that counts for [its mapping](Memory::mapping).
    ///
    /// # Errors
    /// [`ExtentError`]: the fault of the list.
    pub fn of_extents(parent: &Arc<Memory>, extents: &[Extent]) -> Result<Memory, ExtentError> {
        check(extents)?;
        let mut regions: Vec<Region> = Vec::new();
        let mut offset = 0;
        for (index, extent) in extents.iter().enumerate() {
            let outside = ExtentError::Outside(index);
            let mut done = 0;
            while done < extent.len {
                // Cannot wrap: `check` has seen the end of the extent.
                let (number, inside) = parent.locate(extent.addr + done).ok_or(outside)?;
                let region = parent.regions.get(number).ok_or(outside)?;
                let room = (region.len - inside).min(extent.len - done);
                let len = room - room % Extent::HUGE_PAGE;
                let host = region.host(inside, len).filter(|_| len > 0);
                if regions.len() == MAX_REGIONS {
                    return Err(ExtentError::TooMany);
                }
                regions.push(Region {
                    guest_addr: offset,
                    user_addr: offset,
                    len,
                    host: host.ok_or(outside)?,
                });
                done += len;
                // Cannot wrap: parts that do not overlap are at most as long as the parent together.
                offset += len;
            }
        }
        Ok(Memory {
            id: next_id(),
            regions,
            backing: Vec::new(),
            parent: Some(Arc::clone(parent)),
        })
    }
}

/// Checks everything in a list that does not depend on the parent.
fn check(extents: &[Extent]) -> Result<(), ExtentError> {
    match extents.len() {
        0 => return Err(ExtentError::NoExtents),
        1..=MAX_REGIONS => {}
        _ => return Err(ExtentError::TooMany),
    }
    for (index, &Extent { addr, len }) in extents.iter().enumerate() {
        if len == 0 || (addr | len) % Extent::HUGE_PAGE != 0 {
            return Err(ExtentError::Unaligned(index));
        }
        if addr.checked_add(len).is_none() {
            return Err(ExtentError::Outside(index));
        }
    }
    match Extent::find_overlap(extents) {
        Some(index) => Err(ExtentError::Overlap(index)),
        None => Ok(()),
    }
}

#[cfg(test)]
#[path = "extents_tests.rs"]
mod tests;
