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
}

/// Why a list of extents was refused. An index is a position in the list.
#[derive(Copy, Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ExtentError {
    /// A list without extents.
    #[error("no extent is named")]
    NoExtents,
    /// More than [`MAX_REGIONS`] extents, or extents that lie in more regions.
    #[error("{count} extents or more, at most {MAX_REGIONS} are taken")]
    TooMany {
        /// How many there are, as far as they were counted.
        count: usize,
    },
    /// An extent of no bytes.
    #[error("extent {index} has no length")]
    ZeroLength {
        /// Position of the extent.
        index: usize,
    },
    /// An extent that begins or ends inside a huge page.
    #[error("extent {index} at {addr:#x} does not consist of whole huge pages of 2 MiB")]
    Unaligned {
        /// Position of the extent.
        index: usize,
        /// Where it begins.
        addr: u64,
    },
    /// A huge page that does not lie in one region of the parent.
    #[error("extent {index}: the page at {addr:#x} does not lie in one region of memory")]
    Outside {
        /// Position of the extent.
        index: usize,
        /// The page.
        addr: u64,
    },
    /// Two extents have bytes in common.
    #[error("extents {first} and {second} overlap")]
    Overlap {
        /// Position of one.
        first: usize,
        /// Position of the other.
        second: usize,
    },
}

impl Memory {
    /// The memory that consists of these parts of `parent`, in the order of the list: extent `i` begins at the
    /// address at which extent `i - 1` ends, and the first one at 0. User addresses are the same. Extents
    /// that follow each other in the parent too are one region.
    ///
    /// It keeps the mapping of `parent`, and takes no memory or address space of its own. So one lease on a
    /// page of it keeps all of the parent mapped: [`kept_size`](Memory::kept_size) counts that.
    ///
    /// # Errors
    /// [`ExtentError`]: the fault of the list.
    pub fn of_extents(parent: &Arc<Memory>, extents: &[Extent]) -> Result<Memory, ExtentError> {
        check(extents)?;
        let mut regions: Vec<Region> = Vec::new();
        // The region of the parent, and the offset in it, at which the last part ends.
        let mut end = None;
        let mut offset = 0;
        for (index, extent) in extents.iter().enumerate() {
            let mut done = 0;
            while done < extent.len {
                // Cannot wrap: `check` has seen the end of the extent.
                let addr = extent.addr + done;
                let outside = ExtentError::Outside { index, addr };
                let (number, inside) = parent.locate(addr).ok_or(outside)?;
                let region = parent.regions.get(number).ok_or(outside)?;
                let room = (region.len - inside).min(extent.len - done);
                let len = room - room % Extent::HUGE_PAGE;
                let host = region.host(inside, len).filter(|_| len > 0);
                let host = host.ok_or(outside)?;
                if end == Some((number, inside))
                    && let Some(last) = regions.last_mut()
                {
                    last.len += len;
                } else if regions.len() == MAX_REGIONS {
                    let count = MAX_REGIONS + 1;
                    return Err(ExtentError::TooMany { count });
                } else {
                    regions.push(Region {
                        guest_addr: offset,
                        user_addr: offset,
                        len,
                        host,
                    });
                }
                end = Some((number, inside + len));
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
        count => return Err(ExtentError::TooMany { count }),
    }
    for (index, &Extent { addr, len }) in extents.iter().enumerate() {
        if len == 0 {
            return Err(ExtentError::ZeroLength { index });
        }
        if (addr | len) % Extent::HUGE_PAGE != 0 {
            return Err(ExtentError::Unaligned { index, addr });
        }
        if addr.checked_add(len).is_none() {
            return Err(ExtentError::Outside { index, addr });
        }
    }
    let mut order: Vec<(u64, u64, usize)> = (extents.iter().enumerate())
        .map(|(index, extent)| (extent.addr, extent.addr + extent.len, index))
        .collect();
    order.sort_unstable();
    for pair in order.windows(2) {
        if let [(_, end, first), (next, _, second)] = *pair
            && next < end
        {
            let (first, second) = (first.min(second), first.max(second));
            return Err(ExtentError::Overlap { first, second });
        }
    }
    Ok(())
}

#[cfg(test)]
#[path = "extents_tests.rs"]
mod tests;
