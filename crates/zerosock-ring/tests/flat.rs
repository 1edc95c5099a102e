//! The second mapping of a memory, in one piece. The kernel accesses it by address: so does this test, through
//! /proc/self/mem.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use zerosock_ring::{FlatError, FlatMapping, Memory, Piece, RegionConfig, RetiredRegion, Unmapper};

const PAGE: u64 = 4096;

fn file(len: u64) -> OwnedFd {
    let file = memfd_create("flat", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, len).unwrap();
    file
}

fn region(guest_addr: u64, len: u64, fd_offset: u64) -> RegionConfig {
    RegionConfig {
        guest_addr,
        user_addr: guest_addr,
        len,
        fd_offset,
    }
}

/// Counts the bytes of retired regions, and unmaps them.
#[derive(Debug, Default)]
struct Counting(AtomicU64);

impl Unmapper for Counting {
    fn unmap(&self, region: RetiredRegion) {
        self.0.fetch_add(region.size() as u64, Relaxed);
    }
}

fn pieces(memory: &Memory, addr: u64, len: u32) -> Vec<Piece> {
    let mut pieces = Vec::new();
    memory.translate(addr, len, &mut pieces).unwrap();
    pieces
}

fn read(mapping: &FlatMapping, offset: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    let memory = File::open("/proc/self/mem").unwrap();
    let at = mapping.addr() as u64 + offset;
    memory.read_exact_at(&mut bytes, at).unwrap();
    bytes
}

#[test]
fn regions_lie_back_to_back_and_share_their_bytes_with_the_memory() {
    let (one, two) = (file(4 * PAGE), file(3 * PAGE));
    // Not in the order of their addresses, and one begins inside its file.
    let regions = vec![
        (two, region(1 << 32, 3 * PAGE, 0)),
        (one, region(0, 2 * PAGE, PAGE)),
    ];
    let memory = Arc::new(Memory::map(regions).unwrap());
    let mapping = FlatMapping::new(Some(Arc::clone(&memory)), 100).unwrap();
    assert_eq!(mapping.private_start(), 5 * PAGE);
    assert_eq!(mapping.size(), 6 * PAGE);
    for (addr, offset) in [(0, 0), (2 * PAGE - 5, 2 * PAGE - 5), (1 << 32, 2 * PAGE)] {
        let place = pieces(&memory, addr, 5);
        assert_eq!(mapping.offset(place[0]), Some(offset));
        assert_eq!(memory.write(&place, 0, b"bytes"), 5);
        assert_eq!(read(&mapping, offset, 5), b"bytes");
    }
    let last = pieces(&memory, (1 << 32) + 3 * PAGE - 1, 1);
    assert_eq!(mapping.offset(last[0]), Some(5 * PAGE - 1));
}

#[test]
fn private_memory_is_accessed_within_its_bounds_only() {
    let memory = Memory::map(vec![(file(PAGE), region(0, PAGE, 0))]).unwrap();
    for (memory, start) in [(Some(Arc::new(memory)), PAGE), (None, 0)] {
        let mapping = FlatMapping::new(memory, PAGE as usize).unwrap();
        let slice = mapping.private(start + PAGE - 3, 3).unwrap();
        assert_eq!(slice.write(0, b"end"), 3);
        assert_eq!(read(&mapping, start + PAGE - 3, 3), b"end");
        assert!(mapping.private(start, PAGE as usize).is_some());
        for (offset, len) in [
            (start + PAGE - 3, 4),
            (start + PAGE, 1),
            (start.wrapping_sub(1), 2),
            (u64::MAX, 1),
            (start, usize::MAX),
        ] {
            assert!(mapping.private(offset, len).is_none(), "{offset} {len}");
        }
    }
}

#[test]
fn memory_lives_as_long_as_the_mapping_and_the_unmapper_gets_both() {
    let unmapper: Arc<Counting> = Arc::default();
    let regions = vec![(file(8 * PAGE), region(0, 8 * PAGE, 0))];
    let memory = Memory::map_with(regions, Some(unmapper.clone())).unwrap();
    let mapping = FlatMapping::new(Some(Arc::new(memory)), 2 * PAGE as usize).unwrap();
    assert_eq!(mapping.memory().unwrap().size(), 8 * PAGE);
    let range = format!("{:x}-", mapping.addr());
    let mapped = || {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        maps.contains(&range)
    };
    assert!(mapped());
    assert_eq!(unmapper.0.load(Relaxed), 0);
    drop(mapping);
    assert!(!mapped());
    assert_eq!(unmapper.0.load(Relaxed), (10 + 8) * PAGE);
}

#[test]
fn what_cannot_be_one_range_is_refused() {
    for config in [
        region(0, PAGE + 1, 0),
        region(0, PAGE, 1),
        region(0, PAGE - 1, 1),
    ] {
        let memory = Memory::map(vec![(file(4 * PAGE), config)]).unwrap();
        let refused = FlatMapping::new(Some(Arc::new(memory)), 0).unwrap_err();
        assert_eq!(refused, FlatError::Unaligned { guest_addr: 0 });
    }
    for private in [0, usize::MAX, isize::MAX as usize] {
        let refused = FlatMapping::new(None, private).unwrap_err();
        assert!(matches!(refused, FlatError::Reserve { .. }), "{refused}");
    }
}

/// The pages of the range behind the end of the file cannot be read, which a system call says.
#[test]
fn truncated_file_makes_the_kernel_fail_and_nothing_else() {
    let file = file(4 * PAGE);
    let regions = vec![(file.try_clone().unwrap(), region(0, 4 * PAGE, 0))];
    let memory = Arc::new(Memory::map(regions).unwrap());
    let mapping = FlatMapping::new(Some(memory), PAGE as usize).unwrap();
    ftruncate(&file, PAGE).unwrap();
    assert_eq!(read(&mapping, 0, 4), [0; 4]);
    let memory = File::open("/proc/self/mem").unwrap();
    let at = mapping.addr() as u64 + 2 * PAGE;
    memory.read_exact_at(&mut [0; 4], at).unwrap_err();
    assert_eq!(mapping.private(4 * PAGE, 4).unwrap().write(0, b"last"), 4);
}
