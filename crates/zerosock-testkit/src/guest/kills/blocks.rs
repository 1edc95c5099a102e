//! Memory of the guest with a pattern, and how a client frees the pages of its own file.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::fs;
use std::hint::black_box;
use std::io;
use std::os::fd::OwnedFd;
use std::ptr::{self, NonNull};
use std::slice;

use rustix::fs::{FallocateFlags, fallocate, fstat, ftruncate};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
use rustix::process::{PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open};
use zerosock_cli::vm::pattern::Pattern;

use super::terms::{How, PAGES};

const PAGE: usize = 4096;
/// Bytes of a huge page, and of a block of small ones.
const HUGE: usize = 2 << 20;
pub(super) const SMALL: usize = 4 << 20;
/// Bytes at the beginning of a page that no other page has.
const NUMBERS: usize = 16;

/// Pages that this process has for itself, filled with a pattern.
pub(super) struct Block {
    start: NonNull<c_void>,
    len: usize,
    number: u64,
}

// SAFETY: the value owns the mapping.
unsafe impl Send for Block {}

impl Block {
    /// Takes small pages, or a huge one. `number` tells it from all others.
    pub(super) fn new(is_huge: bool, number: u64, template: &Template) -> io::Result<Block> {
        let (len, huge) = match is_huge {
            true => (HUGE, MapFlags::HUGETLB | MapFlags::HUGE_2MB),
            false => (SMALL, MapFlags::empty()),
        };
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::POPULATE | huge;
        // SAFETY: a new mapping at an address that the kernel chooses replaces no other mapping.
        let start = unsafe { mmap_anonymous(ptr::null_mut(), len, access, flags)? };
        let start = NonNull::new(start).ok_or(io::ErrorKind::OutOfMemory)?;
        let mut block = Block { start, len, number };
        // Children of this process are not to keep the pages.
        // SAFETY: the mapping above. The advice changes no byte.
        unsafe { madvise(start.as_ptr(), len, Advice::LinuxDontFork)? };
        for (index, page) in block.bytes_mut().chunks_exact_mut(PAGE).enumerate() {
            page.copy_from_slice(&template.0);
            page[..NUMBERS].copy_from_slice(&numbers(number, index));
        }
        Ok(block)
    }

    /// Bytes.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Looks at all bytes.
    ///
    /// # Errors
    /// One is not that of the pattern.
    pub(super) fn check(&self, template: &Template) -> io::Result<()> {
        let pages = self.bytes().chunks_exact(PAGE).enumerate();
        for (index, page) in pages {
            let numbers = numbers(self.number, index);
            let page = black_box(page);
            if page[..NUMBERS] == numbers && page[NUMBERS..] == template.0[NUMBERS..] {
                continue;
            }
            let wanted = [&numbers, &template.0[NUMBERS..]].concat();
            let wrong = |at: &usize| page[*at] != wanted[*at];
            let at = (0..PAGE).find(wrong).unwrap_or_default();
            let count = (0..PAGE).filter(wrong).count();
            let found = &page[at..PAGE.min(at + 32)];
            let text = format!(
                "foreign bytes in free memory, {count} in page {index} of a block of {} bytes, the first at {at}: \
                 {found:x?}",
                self.len
            );
            return Err(io::Error::other(text));
        }
        Ok(())
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: the mapping is readable, has this length, and lives as long as the value. Only `new` writes to it; a
        // device that does so against all rules is what `check` is for, which reads through `black_box`.
        unsafe { slice::from_raw_parts(self.start.as_ptr().cast(), self.len) }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as for `bytes`; the mapping is writable, and the reference is the only one.
        unsafe { slice::from_raw_parts_mut(self.start.as_ptr().cast(), self.len) }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: the mapping that `new` made, unmapped once; nothing has a reference to its bytes.
        let _ = unsafe { munmap(self.start.as_ptr(), self.len) };
    }
}

fn numbers(block: u64, page: usize) -> [u8; NUMBERS] {
    let mut numbers = [0; NUMBERS];
    numbers[..8].copy_from_slice(&block.to_le_bytes());
    numbers[8..].copy_from_slice(&(page as u64).to_le_bytes());
    numbers
}

/// What each page has behind its numbers.
pub(super) struct Template(Vec<u8>);

impl Template {
    pub(super) fn new() -> Template {
        /// No stream has it.
        const SEED: u64 = 0x5eed_0000_0000;
        Template(Pattern::bytes(SEED, PAGE))
    }
}

/// The only file of the agent that this process has open.
fn own_file() -> io::Result<(i32, String)> {
    for entry in fs::read_dir("/proc/self/fd")? {
        let entry = entry?;
        // The descriptor of the directory itself is closed meanwhile.
        let target = fs::read_link(entry.path()).unwrap_or_default();
        if target.starts_with(PAGES)
            && let Some(fd) = entry.file_name().to_str().and_then(|it| it.parse().ok())
        {
            return Ok((fd, target.to_string_lossy().into_owned()));
        }
    }
    Err(io::Error::other("no file of huge pages is open"))
}

/// Frees all pages of the memory of the endpoint of this process.
pub(super) fn free_own_pages(how: How) -> io::Result<()> {
    let (fd, path) = own_file()?;
    if how == How::Remove {
        return remove_mapping(&path);
    }
    // The endpoint owns the descriptor; this is a copy.
    let own = pidfd_open(getpid(), PidfdFlags::empty())?;
    let file: OwnedFd = pidfd_getfd(own, fd, PidfdGetfdFlags::empty())?;
    match how {
        How::Truncate => ftruncate(&file, 0)?,
        _ => {
            let len = fstat(&file)?.st_size as u64;
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            fallocate(&file, flags, 0, len)?;
        }
    }
    Ok(())
}

/// MADV_REMOVE on the mapping of this file.
fn remove_mapping(path: &str) -> io::Result<()> {
    let maps = fs::read_to_string("/proc/self/maps")?;
    let mut mappings = maps.lines().filter(|line| line.ends_with(path));
    let range = mappings.next().and_then(|line| {
        let (start, end) = line.split_once(' ')?.0.split_once('-')?;
        let [start, end] = [start, end].map(|it| usize::from_str_radix(it, 16).ok());
        Some((start?, end?))
    });
    let (start, end) = range.ok_or_else(|| io::Error::other("the file is not mapped"))?;
    let address = ptr::with_exposed_provenance_mut(start);
    // SAFETY: the mapping is that of memory which the daemon on the host writes as well, so all of this process's
    // accesses to it are volatile. Later ones find zeroes.
    unsafe { madvise(address, end - start, Advice::LinuxRemove)? };
    Ok(())
}
