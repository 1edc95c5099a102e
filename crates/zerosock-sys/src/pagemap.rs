//! Where huge pages lie in physical memory, from `/proc/self/pagemap`: in a guest these are guest-physical addresses.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use zerosock_ring::Extent;

use crate::hugetlbfs::{HUGE_PAGE, HugeMapping};
use crate::pin::Pin;

/// Bytes of an entry, which is of a page of [`PAGE`] bytes.
const ENTRY: u64 = 8;
const PAGE: u64 = 4096;
/// The page is in memory.
const PRESENT: u64 = 1 << 63;
/// The bits of the frame number.
const FRAME: u64 = (1 << 55) - 1;

/// Why the addresses are not known.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PagemapError {
    /// The kernel shows 0 in the place of frame numbers.
    #[error(
        "physical addresses are hidden from this process: it needs CAP_SYS_ADMIN, which root has"
    )]
    Hidden,
    /// A page of the file is missing, or does not begin where a huge page can.
    #[error("page {0} of the file is not a huge page in memory")]
    Missing(usize),
    /// `/proc` is not mounted, or cannot be read.
    #[error("cannot read /proc/self/pagemap: {0}")]
    Io(#[from] io::Error),
}

/// The extents of a mapping in the order of its file. Pages that follow each other in both are one.
///
/// The pin says that the pages cannot move any more.
///
/// # Errors
/// See [`PagemapError`].
pub fn extents(mapping: &HugeMapping, _pin: &Pin) -> Result<Vec<Extent>, PagemapError> {
    let pagemap = File::open("/proc/self/pagemap")?;
    let first = mapping.addr() as u64 / PAGE * ENTRY;
    let pages = mapping.len() as u64 / HUGE_PAGE;
    let mut entry = [0; ENTRY as usize];
    let entries = (0..pages).map(|page| {
        pagemap.read_exact_at(&mut entry, first + page * (HUGE_PAGE / PAGE) * ENTRY)?;
        Ok(u64::from_ne_bytes(entry))
    });
    merge(entries)
}

/// The extents of pages with these entries.
fn merge(entries: impl Iterator<Item = io::Result<u64>>) -> Result<Vec<Extent>, PagemapError> {
    let mut extents: Vec<Extent> = Vec::new();
    for (index, entry) in entries.enumerate() {
        let entry = entry?;
        let addr = (entry & FRAME) * PAGE;
        if entry & PRESENT == 0 || !addr.is_multiple_of(HUGE_PAGE) {
            return Err(PagemapError::Missing(index));
        }
        // No huge page of a file begins at address 0, where the first pages of the machine are.
        if addr == 0 {
            return Err(PagemapError::Hidden);
        }
        match extents.last_mut() {
            Some(last) if last.addr + last.len == addr => last.len += HUGE_PAGE,
            _ => extents.push(Extent {
                addr,
                len: HUGE_PAGE,
            }),
        }
    }
    Ok(extents)
}

#[cfg(test)]
mod tests {
    use super::*;

    const FRAMES: u64 = HUGE_PAGE / PAGE;
    /// Soft-dirty, file-mapped: bits that are no part of the number.
    const OTHER: u64 = 1 << 55 | 1 << 61;

    fn of(entries: &[u64]) -> Result<Vec<Extent>, PagemapError> {
        merge(entries.iter().map(|&entry| Ok(entry)))
    }

    #[test]
    fn neighbours_in_both_orders_are_one_extent() {
        let pages = [3, 4, 5, 9, 8, 7, 6 | 1 << 30].map(|page| (page * FRAMES) | PRESENT | OTHER);
        let extents = of(&pages).unwrap();
        let extents: Vec<_> = extents.iter().map(|one| (one.addr, one.len)).collect();
        let page = HUGE_PAGE;
        let last = (6 | 1 << 30) * page;
        let expected =
            [(3, 3), (9, 1), (8, 1), (7, 1)].map(|(addr, len)| (addr * page, len * page));
        assert_eq!(extents, [&expected[..], &[(last, page)]].concat());
    }

    #[test]
    fn hidden_numbers_and_missing_pages_are_errors() {
        assert!(matches!(of(&[PRESENT | OTHER]), Err(PagemapError::Hidden)));
        let present = FRAMES | PRESENT;
        for bad in [FRAMES, 0, (FRAMES + 1) | PRESENT] {
            assert!(
                matches!(of(&[present, bad]), Err(PagemapError::Missing(1))),
                "{bad:#x}"
            );
        }
    }

    /// Root or not, huge pages or not: as far as this machine goes.
    #[test]
    fn pages_of_a_huge_file_are_pinned_and_then_have_addresses() {
        let file = match crate::memfd::create_huge("pagemap", 2 * HUGE_PAGE) {
            Ok(file) => file,
            Err(error) => return eprintln!("no huge pages here: {error}"),
        };
        let mapping = HugeMapping::new(&file).unwrap();
        let pin = match Pin::new(&mapping) {
            Ok(pin) => pin,
            Err(error) => return eprintln!("{error}"),
        };
        match extents(&mapping, &pin) {
            Ok(extents) => {
                let len: u64 = extents.iter().map(|extent| extent.len).sum();
                assert_eq!(len, 2 * HUGE_PAGE);
            }
            Err(error) => assert!(matches!(error, PagemapError::Hidden), "{error}"),
        }
    }
}
