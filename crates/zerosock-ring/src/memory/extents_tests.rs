//! Memories of extents: hostile lists, and the order of the list.

use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use crate::memory::{RegionConfig, TranslateError};
use crate::slice::Piece;

const HUGE: u64 = Extent::HUGE_PAGE;
/// Guest addresses of the regions of `parent`: two that follow each other, and one behind a gap.
const LOW: u64 = 4 * HUGE;
const BORDER: u64 = LOW + 4 * HUGE;
const HIGH: u64 = 64 * HUGE;
/// The extents of a hostile list.
const MANY: usize = if cfg!(miri) { 1 << 10 } else { 1 << 20 };
/// The last region ends with half a huge page.
const HIGH_LEN: u64 = 2 * HUGE + HUGE / 2;

fn region(guest_addr: u64, user_addr: u64, len: u64) -> RegionConfig {
    RegionConfig {
        guest_addr,
        user_addr,
        len,
        fd_offset: 0,
    }
}

fn parent() -> Arc<Memory> {
    Arc::new(Memory::from_heap(&[
        region(HIGH, 0x7000_0000_0000, HIGH_LEN),
        region(LOW, 0x7100_0000_0000, BORDER - LOW),
        region(BORDER, 0x7200_0000_0000, 2 * HUGE),
    ]))
}

fn extents(list: &[(u64, u64)]) -> Vec<Extent> {
    let extents = list.iter().map(|&(addr, len)| Extent { addr, len });
    extents.collect()
}

fn of(parent: &Arc<Memory>, list: &[(u64, u64)]) -> Memory {
    Memory::of_extents(parent, &extents(list)).expect("a list without errors")
}

fn translate(memory: &Memory, addr: u64, len: u32) -> Result<Vec<Piece>, TranslateError> {
    let mut pieces = Vec::new();
    memory
        .translate(addr, len, &mut pieces)
        .map(|()| pieces.clone())
}

fn poke(memory: &Memory, addr: u64, bytes: &[u8]) {
    let pieces = translate(memory, addr, bytes.len() as u32).expect("an address in memory");
    assert_eq!(memory.write(&pieces, 0, bytes), bytes.len());
}

fn peek<const N: usize>(memory: &Memory, addr: u64) -> [u8; N] {
    let pieces = translate(memory, addr, N as u32).expect("an address in memory");
    memory.read_array(&pieces, 0).expect("as many bytes")
}

#[test]
fn addresses_count_through_the_extents_in_the_order_of_the_list() {
    let parent = parent();
    let memory = of(&parent, &[(HIGH, HUGE), (LOW + HUGE, 2 * HUGE)]);
    assert_eq!((memory.size(), memory.end()), (3 * HUGE, 3 * HUGE));
    assert_ne!(memory.id(), parent.id());
    for (here, there) in [
        (0, HIGH),
        (HUGE - 8, HIGH + HUGE - 8),
        (HUGE, LOW + HUGE),
        (3 * HUGE - 8, LOW + 3 * HUGE - 8),
    ] {
        poke(&memory, here, &here.to_le_bytes());
        assert_eq!(peek(&parent, there), here.to_le_bytes(), "{here:#x}");
        poke(&parent, there, b"from far");
        assert_eq!(&peek(&memory, here), b"from far", "{here:#x}");
        // Rings are found by user addresses.
        let host = parent.at_guest_addr(there, 8);
        assert_eq!(memory.at_user_addr(here, 8), host);
        assert_eq!(memory.at_guest_addr(here, 8), host);
    }
    let end = 3 * HUGE;
    let unmapped = Err(TranslateError::Unmapped { addr: end });
    assert_eq!(translate(&memory, end, 1), unmapped);
    assert_eq!(translate(&memory, end - 1, 2), unmapped);
    let far = Err(TranslateError::Unmapped { addr: HIGH });
    assert_eq!(translate(&memory, HIGH, 1), far);
    // A buffer over the border of two extents has a piece in each.
    let lens =
        |addr, len| translate(&memory, addr, len).map(|p| p.iter().map(|p| p.len()).collect());
    assert_eq!(lens(HUGE - 3, 8), Ok(vec![3, 5]));
    assert_eq!(lens(2 * HUGE - 3, 8), Ok(vec![8]));
    assert_eq!(memory.at_guest_addr(HUGE - 3, 8), None);
}

#[test]
fn an_extent_over_several_regions_of_the_parent_is_as_many() {
    let parent = parent();
    let regions = |list: &[(u64, u64)]| {
        let memory = of(&parent, list);
        let lens = memory.regions.iter().map(|region| region.len / HUGE);
        lens.collect::<Vec<_>>()
    };
    assert_eq!(regions(&[(LOW, 2 * HUGE), (HIGH, HUGE)]), [2, 1]);
    // The parent's regions may lie anywhere in this process.
    assert_eq!(regions(&[(LOW, 6 * HUGE)]), [4, 2]);
    assert_eq!(regions(&[(LOW, 4 * HUGE), (BORDER, HUGE)]), [4, 1]);
}

#[test]
fn hostile_lists_are_refused_by_name() {
    use ExtentError::*;
    let half = HUGE / 2;
    let cases: Vec<(Vec<(u64, u64)>, ExtentError)> = vec![
        (vec![], NoExtents),
        (vec![(LOW, 0)], Unaligned(0)),
        (vec![(LOW, HUGE), (HIGH, 0)], Unaligned(1)),
        (vec![(LOW + 1, HUGE)], Unaligned(0)),
        (vec![(LOW + 4096, HUGE)], Unaligned(0)),
        (vec![(LOW, HUGE), (HIGH, HUGE + 4096)], Unaligned(1)),
        (vec![(LOW, half)], Unaligned(0)),
        (vec![(LOW, u64::MAX)], Unaligned(0)),
        // Before, between and behind the regions, and over their ends.
        (vec![(0, HUGE)], Outside(0)),
        (vec![(LOW - HUGE, 2 * HUGE)], Outside(0)),
        (vec![(BORDER + 2 * HUGE, HUGE)], Outside(0)),
        (vec![(LOW, 7 * HUGE)], Outside(0)),
        (vec![(HIGH, HUGE), (LOW, 8 * HUGE)], Outside(1)),
        (vec![(HIGH, 4 * HUGE)], Outside(0)),
        // The half of this page that is there is no page.
        (vec![(HIGH + 2 * HUGE, HUGE)], Outside(0)),
        (vec![(u64::MAX - (HUGE - 1), HUGE)], Outside(0)),
        (vec![(HUGE, u64::MAX - (HUGE - 1))], Outside(0)),
        (vec![(LOW, u64::MAX - (HUGE - 1))], Outside(0)),
        (vec![(1 << 63, 1 << 63)], Outside(0)),
        // Pages that are named twice.
        (vec![(LOW, HUGE), (LOW, HUGE)], Overlap(1)),
        (
            vec![(LOW + HUGE, HUGE), (HIGH, HUGE), (LOW, 3 * HUGE)],
            Overlap(2),
        ),
        (vec![(LOW, 3 * HUGE), (LOW + 2 * HUGE, HUGE)], Overlap(1)),
        (vec![(LOW, 4 * HUGE), (BORDER - HUGE, 2 * HUGE)], Overlap(1)),
        // Too long a list is not looked at.
        (vec![(1, 0); MAX_REGIONS + 1], TooMany),
        (vec![(LOW, HUGE); MANY], TooMany),
    ];
    let parent = parent();
    for (list, error) in cases {
        let result = Memory::of_extents(&parent, &extents(&list));
        let shown = &list[..list.len().min(3)];
        assert_eq!(result.map(|_| ()), Err(error), "{shown:x?}");
    }
    let empty = Arc::new(Memory::from_heap(&[]));
    let result = Memory::of_extents(&empty, &extents(&[(LOW, HUGE)]));
    assert_eq!(result.map(|_| ()), Err(Outside(0)));
    assert_eq!(Arc::strong_count(&parent), 1, "no refused list keeps it");
}

#[test]
fn the_bytes_of_a_memory_outlive_other_references_to_its_parent() {
    let parent = parent();
    let memory = of(&parent, &[(LOW, HUGE)]);
    let watched = Arc::downgrade(&parent);
    poke(&parent, LOW + 5, b"kept");
    drop(parent);
    assert_eq!(&peek(&memory, 5), b"kept");
    drop(memory);
    assert!(watched.upgrade().is_none());
}

#[test]
fn a_memory_of_extents_counts_the_mapping_of_its_parent_as_kept() {
    let parent = parent();
    let all = 6 * HUGE + HIGH_LEN;
    let middle = Arc::new(of(&parent, &[(LOW, 2 * HUGE)]));
    let memory = of(&middle, &[(HUGE, HUGE)]);
    let sizes = [&*parent, &*middle, &memory].map(|m| (m.size(), m.mapping().size()));
    assert_eq!(sizes, [(all, all), (2 * HUGE, all), (HUGE, all)]);
}

#[test]
fn extents_of_a_memory_of_extents_are_those_of_its_parent() {
    let parent = parent();
    let middle = Arc::new(of(&parent, &[(HIGH, HUGE), (LOW, 2 * HUGE)]));
    let memory = of(&middle, &[(2 * HUGE, HUGE), (0, HUGE)]);
    poke(&memory, 7, b"low");
    poke(&memory, HUGE + 7, b"high");
    assert_eq!(&peek(&parent, LOW + HUGE + 7), b"low");
    assert_eq!(&peek(&parent, HIGH + 7), b"high");
}

/// The first pages of the extents of a list, in its order.
fn pages(list: &[Extent]) -> Vec<u64> {
    let pages = list.iter().flat_map(|extent| {
        let count = extent.len / HUGE;
        (0..count).map(move |page| extent.addr + page * HUGE)
    });
    pages.collect()
}

/// Lists of pages of `parent`, in any order, some of them as one extent.
fn lists() -> impl Strategy<Value = Vec<Extent>> {
    let all: Vec<u64> = (0..6)
        .map(|page| LOW + page * HUGE)
        .chain((0..2).map(|page| HIGH + page * HUGE))
        .collect();
    let some = (Just(all).prop_shuffle(), 1..=8usize, any::<u8>());
    some.prop_map(|(pages, count, joins)| {
        let mut list: Vec<Extent> = Vec::new();
        for (number, &addr) in pages.iter().take(count).enumerate() {
            match list.last_mut() {
                Some(last) if last.addr + last.len == addr && joins & 1 << number != 0 => {
                    last.len += HUGE;
                }
                _ => list.push(Extent { addr, len: HUGE }),
            }
        }
        list
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 2 } else { 64 }))]
    #[test]
    fn every_byte_is_that_of_its_page(
        list in lists(), at: prop::sample::Index, len in 1..9000u32,
    ) {
        let parent = parent();
        let memory = Memory::of_extents(&parent, &list).unwrap();
        let pages = pages(&list);
        let end = pages.len() as u64 * HUGE;
        prop_assert_eq!(memory.size(), end);
        // Near a border of pages, where mistakes are.
        let at = (at.index(2 * pages.len()) as u64 * (HUGE / 2)).saturating_sub(4500);
        let there = |offset: u64| pages[(offset / HUGE) as usize] + offset % HUGE;
        let pieces = translate(&memory, at, len);
        prop_assert_eq!(pieces.is_ok(), at + u64::from(len) <= end);
        let Ok(pieces) = pieces else { return Ok(()) };
        let mut offset = at;
        for piece in &pieces {
            prop_assert_eq!(memory.flat_offset(*piece), Some(offset));
            let one = [offset as u8];
            memory.write(std::slice::from_ref(piece), 0, &one);
            prop_assert_eq!(peek(&parent, there(offset)), one);
            let last = piece.len() - 1;
            memory.write(std::slice::from_ref(piece), last, &one);
            offset += last as u64;
            prop_assert_eq!(peek(&parent, there(offset)), one);
            offset += 1;
        }
        prop_assert_eq!(offset, at + u64::from(len));
    }
}

#[cfg(not(miri))]
mod mapped {
    use std::sync::Mutex;

    use rustix::fd::OwnedFd;
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    use super::*;
    use crate::memory::{FlatMapping, RetiredRegion, Unmapper};

    fn memfd(len: u64) -> OwnedFd {
        let fd = memfd_create("ring-extents", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&fd, len).unwrap();
        fd
    }

    /// The lengths of the regions that were given back, each of which is unmapped.
    #[derive(Debug, Default)]
    struct Retired(Mutex<Vec<usize>>);

    impl Unmapper for Retired {
        fn unmap(&self, region: RetiredRegion) {
            self.0.lock().unwrap().push(region.size());
        }
    }

    /// A parent of `pages` huge pages from 0 on, which takes no memory until it is written.
    fn sparse(pages: u64, retired: &Arc<Retired>) -> Arc<Memory> {
        let len = pages * HUGE;
        let table = vec![(memfd(len), region(0, 0, len))];
        Arc::new(Memory::map_with(table, Some(Arc::clone(retired) as _)).unwrap())
    }

    #[test]
    fn as_many_extents_are_taken_as_there_can_be_regions() {
        let retired = Arc::default();
        let parent = sparse(2 * MAX_REGIONS as u64 + 2, &retired);
        // Every second page, so that no two are one region.
        let mut list: Vec<Extent> = (0..MAX_REGIONS as u64)
            .map(|n| Extent {
                addr: 2 * n * HUGE,
                len: HUGE,
            })
            .collect();
        let memory = Memory::of_extents(&parent, &list).unwrap();
        let last = MAX_REGIONS as u64 - 1;
        poke(&memory, last * HUGE + 3, b"end");
        assert_eq!(&peek(&parent, 2 * last * HUGE + 3), b"end");
        list.push(Extent {
            addr: HUGE,
            len: HUGE,
        });
        let count = MAX_REGIONS + 1;
        let refused = Memory::of_extents(&parent, &list).map(|_| ());
        assert_eq!(refused, Err(ExtentError::TooMany));
        // An extent over the border of two regions of the parent takes two.
        let table = [
            (0, 4 * HUGE * count as u64),
            (4 * HUGE * count as u64, HUGE),
        ];
        let table = table.map(|(addr, len)| (memfd(len), region(addr, addr, len)));
        let parent = Arc::new(Memory::map(table.into()).unwrap());
        list.pop();
        let end = 4 * HUGE * count as u64;
        list[7] = Extent {
            addr: end - HUGE,
            len: 2 * HUGE,
        };
        let refused = Memory::of_extents(&parent, &list).map(|_| ());
        assert_eq!(refused, Err(ExtentError::TooMany));
        list[7].len = HUGE;
        assert!(Memory::of_extents(&parent, &list).is_ok());
    }

    #[test]
    fn the_mapping_is_returned_after_the_last_memory_of_extents() {
        let retired: Arc<Retired> = Arc::default();
        let parent = sparse(8, &retired);
        let [one, two] = [[(HUGE, HUGE)], [(4 * HUGE, HUGE)]].map(|list| of(&parent, &list));
        drop(parent);
        drop(one);
        poke(&two, 0, b"mapped");
        assert!(retired.0.lock().unwrap().is_empty());
        drop(two);
        assert_eq!(*retired.0.lock().unwrap(), [8 * HUGE as usize]);
    }

    /// What the kernel is given as one range has the order of the list too.
    #[test]
    fn a_flat_mapping_has_the_order_of_the_list() {
        let retired: Arc<Retired> = Arc::default();
        let parent = sparse(8, &retired);
        let memory = Arc::new(of(&parent, &[(6 * HUGE, HUGE), (HUGE, 2 * HUGE)]));
        let flat = FlatMapping::new(Some(Arc::clone(&memory)), 4096).unwrap();
        assert_eq!(flat.private_start(), 3 * HUGE);
        let source = memfd(4096);
        for at in [0, HUGE - 1, HUGE, 3 * HUGE - 1] {
            let [piece] = translate(&memory, at, 1).unwrap()[..] else {
                panic!("one byte in several pieces");
            };
            assert_eq!(flat.offset(piece), Some(at));
            // The kernel writes through the flat mapping.
            let bytes = [0x51 ^ (at / HUGE) as u8];
            rustix::io::pwrite(&source, &bytes, 0).unwrap();
            // SAFETY: the byte at `at` of the flat mapping, which is writable and lives here.
            let n = unsafe {
                let to = (flat.addr() + at as usize) as *mut libc::c_void;
                use std::os::fd::AsRawFd;
                libc::pread(source.as_raw_fd(), to, 1, 0)
            };
            assert_eq!((n, peek(&memory, at)), (1, bytes));
        }
        drop(flat);
        assert_eq!(*retired.0.lock().unwrap(), [3 * HUGE as usize + 4096]);
    }
}
