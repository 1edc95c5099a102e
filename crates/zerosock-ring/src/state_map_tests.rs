//! Which files are mapped as state, and that no byte is in two arrays.

use core::sync::atomic::{AtomicU8, AtomicU16, AtomicU64, Ordering::Relaxed};

use rustix::fd::OwnedFd;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fstat, ftruncate, memfd_create};

use super::{StateMap, StateMapError};

fn file(len: u64, seals: SealFlags) -> OwnedFd {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = memfd_create("state", flags).unwrap();
    ftruncate(&fd, len).unwrap();
    fcntl_add_seals(&fd, seals).unwrap();
    fd
}

fn sealed(len: u64) -> OwnedFd {
    file(len, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
}

#[test]
fn files_that_can_change_their_length_are_refused() {
    for seals in [SealFlags::empty(), SealFlags::SHRINK, SealFlags::GROW] {
        let refused = StateMap::map(file(4096, seals), 4096).unwrap_err();
        assert_eq!(refused, StateMapError::Unsealed);
    }
    let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
    let refused = StateMap::map(&socket, 4096).unwrap_err();
    assert_eq!(refused, StateMapError::Unsealed);
    StateMap::map(file(4096, SealFlags::SHRINK | SealFlags::GROW), 4096).unwrap();
}

#[test]
fn files_that_are_read_only_are_refused() {
    let fd = file(4096, SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE);
    let refused = StateMap::map(&fd, 4096).unwrap_err();
    assert!(matches!(refused, StateMapError::System(_)), "{refused}");
}

#[test]
fn short_files_and_lengths_that_no_mapping_has_are_refused() {
    let fd = sealed(4096);
    let refused = StateMap::map(&fd, 4097).unwrap_err();
    let short = StateMapError::ShortFile {
        len: 4097,
        file_len: 4096,
    };
    assert_eq!(refused, short);
    for len in [0, usize::MAX, isize::MAX as usize + 1] {
        let refused = StateMap::map(&fd, len).unwrap_err();
        assert_eq!(refused, StateMapError::Length(len));
    }
}

#[test]
fn huge_pages_are_refused() {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let Ok(fd) = memfd_create("huge", flags | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB) else {
        return eprintln!("this kernel has no huge pages");
    };
    ftruncate(&fd, 2 << 20).unwrap();
    fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW).unwrap();
    let refused = StateMap::map(&fd, 4096).unwrap_err();
    assert!(matches!(refused, StateMapError::FileSystem(_)), "{refused}");
}

#[test]
fn ranges_outside_the_map_are_refused() {
    let mut map = StateMap::map(sealed(8192), 8192).unwrap();
    for at in [8200, usize::MAX, 1, 4, 12] {
        assert!(map.split_off(at).is_none(), "{at}");
        assert_eq!(map.len(), 8192);
    }
    let rest = map.split_off(8192).unwrap();
    assert!(rest.is_empty() && rest.populate().is_ok());
    assert_eq!(rest.into_array::<AtomicU64>().len(), 0);
    let mut part = map.split_off(8184).unwrap();
    assert!(part.split_off(16).is_none());
    assert_eq!(part.into_array::<AtomicU64>().len(), 1);
    assert_eq!(map.len(), 8184);
}

#[test]
fn each_byte_is_in_one_array_and_in_the_file() {
    let fd = sealed(8192);
    let mut map = StateMap::map(&fd, 8000).unwrap();
    let mut bytes = map.split_off(16).unwrap();
    let last = bytes.split_off(8).unwrap();
    let words = map.into_array::<AtomicU64>();
    let bytes = bytes.into_array::<AtomicU8>();
    let last = last.into_array::<AtomicU16>();
    assert_eq!((words.len(), bytes.len(), last.len()), (2, 8, 3988));
    for word in &*words {
        word.store(u64::MAX, Relaxed);
    }
    last[0].store(0xffff, Relaxed);
    assert!(bytes.iter().all(|byte| byte.load(Relaxed) == 0));
    bytes[7].store(7, Relaxed);
    // The mapping lives as long as a part of it.
    drop(words);
    let mut again = StateMap::map(&fd, 8192).unwrap();
    let rest = again.split_off(24).unwrap();
    drop(rest);
    let again = again.into_array::<AtomicU8>();
    let values: Vec<u8> = again.iter().map(|byte| byte.load(Relaxed)).collect();
    assert_eq!(values[..16], [0xff; 16]);
    assert_eq!(values[16..], [0, 0, 0, 0, 0, 0, 0, 7]);
}

#[test]
fn only_touched_pages_take_memory() {
    let fd = sealed(1 << 30);
    let blocks = || fstat(&fd).unwrap().st_blocks as u64 * 512;
    let mut map = StateMap::map(&fd, 1 << 30).unwrap();
    let mut part = map.split_off(1 << 29).unwrap();
    let rest = part.split_off(8).unwrap();
    assert_eq!(blocks(), 0);
    part.populate().unwrap();
    let page = rustix::param::page_size() as u64;
    // A kernel before 5.14 populates nothing.
    assert!(blocks() <= page);
    part.into_array::<AtomicU64>()[0].store(1, Relaxed);
    assert_eq!(blocks(), page);
    rest.into_array::<AtomicU8>()[0].store(1, Relaxed);
    assert_eq!(blocks(), page);
}
