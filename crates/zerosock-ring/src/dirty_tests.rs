//! Which bits a mark sets.

use std::os::fd::OwnedFd;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use super::*;

fn log(bytes: u64) -> (OwnedFd, DirtyLog) {
    let file = memfd_create("log", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, 8 + bytes).unwrap();
    let log = DirtyLog::map(&file, 8, bytes, None).unwrap();
    (file, log)
}

/// The numbers of the pages that are marked, and those of the bits in front of the log.
fn marked(file: &OwnedFd, bytes: u64) -> Vec<i64> {
    let mut all = vec![0; 8 + bytes as usize];
    let mut done = 0;
    while done < all.len() {
        let rest = &mut all[done..];
        done += rustix::io::pread(file, rest, done as u64).unwrap();
    }
    let bits = (0..8 * all.len() as i64).filter(|bit| all[*bit as usize / 8] & 1 << (bit % 8) != 0);
    bits.map(|bit| bit - 64).collect()
}

#[test]
#[cfg_attr(miri, ignore = "no files")]
fn a_mark_sets_the_bits_of_the_pages_that_it_touches() {
    let cases: [(u64, u64, Vec<i64>); 12] = [
        (0, 0, vec![]),
        (0, 1, vec![0]),
        (4095, 1, vec![0]),
        (4095, 2, vec![0, 1]),
        (0, 4096, vec![0]),
        (0, 4097, vec![0, 1]),
        (7 * 4096, 4097, vec![7, 8]),
        (3 * 4096 + 5, 16 * 4096, (3..=19).collect()),
        // The last page; the rest lies beyond the log.
        (31 * 4096, 1 << 40, vec![31]),
        (32 * 4096, 1, vec![]),
        (u64::MAX, 1, vec![]),
        (u64::MAX - 5, u64::MAX, vec![]),
    ];
    for (addr, len, expected) in cases {
        let (file, log) = log(4);
        log.mark(addr, len);
        assert_eq!(marked(&file, 4), expected, "{len} bytes at {addr:#x}");
    }
}

#[test]
#[cfg_attr(miri, ignore = "no files")]
fn a_log_covers_as_many_pages_as_it_has_bits() {
    let (_file, log) = log(4);
    assert!(log.covers(0) && log.covers(32 * LOG_PAGE));
    assert!(!log.covers(32 * LOG_PAGE + 1) && !log.covers(u64::MAX));
}

#[test]
#[cfg_attr(miri, ignore = "no files")]
fn a_log_needs_a_file_as_long_as_itself() {
    let file = memfd_create("log", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, 100).unwrap();
    assert!(DirtyLog::map(&file, 0, 100, None).is_ok());
    for (offset, bytes) in [(0, 101), (1, 100), (u64::MAX, 100), (0, u64::MAX), (0, 0)] {
        assert!(DirtyLog::map(&file, offset, bytes, None).is_err());
    }
}
