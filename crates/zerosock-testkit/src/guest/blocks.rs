//! Memory of this guest with a pattern: a write of a device into memory that it does not have any more changes it.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::fs::{self, File};
use std::hint::black_box;
use std::io;
use std::os::unix::fs::FileExt;
use std::ptr::{self, NonNull};
use std::slice;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
use zerosock_cli::vm::pattern::Pattern;

const PAGE: usize = 4096;
/// Bytes of a huge page, and of a block of small ones.
const HUGE: usize = 2 << 20;
pub(super) const SMALL: usize = 4 << 20;
/// The bits of the frame number in `/proc/self/pagemap`.
const FRAME: u64 = (1 << 55) - 1;
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

    /// The physical addresses of its pages.
    pub(super) fn addresses(&self) -> io::Result<Vec<u64>> {
        let mut entries = vec![0; self.len / PAGE * 8];
        let first = self.start.addr().get() / PAGE * 8;
        File::open("/proc/self/pagemap")?.read_exact_at(&mut entries, first as u64)?;
        let (entries, _) = entries.as_chunks();
        let frames = entries.iter().map(|it| u64::from_ne_bytes(*it) & FRAME);
        Ok(frames.map(|frame| frame * PAGE as u64).collect())
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
    pub(super) fn new(seed: u64) -> Template {
        Template(Pattern::bytes(seed, PAGE))
    }
}

/// The bytes of memory that `/proc/meminfo` has under this name.
pub(super) fn memory(name: &str) -> io::Result<u64> {
    let text = fs::read_to_string("/proc/meminfo")?;
    let line = text.lines().find_map(|it| it.strip_prefix(name));
    let number = line.and_then(|it| it.strip_prefix(':')?.strip_suffix(" kB"));
    let kib = number.and_then(|it| it.trim().parse::<u64>().ok());
    kib.map(|kib| kib << 10)
        .ok_or_else(|| io::Error::other(format!("no {name} in /proc/meminfo")))
}
