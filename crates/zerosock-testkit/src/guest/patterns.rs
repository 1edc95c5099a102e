//! Patterns in the free memory of this guest: a write of a device into memory that it does not have any more changes them.
//!
//! # Invariants
//! - Huge pages that overlap pages of a former endpoint get a pattern, and no endpoint gets them before they are freed.
//! - Each page has a number of its own, so that a copy of one page over another is found.

use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::Path;

use zerosock_cli::vm::pattern::Pattern;
use zerosock_ring::{Extent, Memory};
use zerosock_sys::hugetlbfs::{HUGE_PAGE, HugeMapping};
use zerosock_sys::pin::Pin;
use zerosock_sys::{memfd, pagemap};

use super::pages::map;
use crate::protocol::PatternStep;

const PAGE: usize = 4096;
const WORDS: usize = PAGE / size_of::<u64>();
/// Words that are taken from the kernel at once.
const CHUNK: usize = (4 << 20) / size_of::<u64>();
/// Free memory that is left for programs and the kernel, in KiB.
const RESERVE: u64 = 48 << 10;
const POOL: &str = "/proc/sys/vm/nr_hugepages";
/// Attempts to make so many huge pages.
const ATTEMPTS: usize = 20;
/// The bits of the frame number in `/proc/self/pagemap`.
const FRAME: u64 = (1 << 55) - 1;

/// Memory with patterns.
pub(super) struct Patterns {
    /// A page, but for its number, which is the first word.
    page: Vec<u64>,
    /// The same in bytes.
    bytes: Vec<u8>,
    chunks: Vec<Vec<u64>>,
    huge: Vec<(Memory, OwnedFd)>,
}

/// Carries out a step on `patterns`. Returns its text.
pub(super) fn run(step: &PatternStep, patterns: &mut Option<Patterns>) -> io::Result<String> {
    match step {
        PatternStep::Fill {
            former,
            huge_pages,
            seed,
        } => {
            // What an earlier step has filled is free again.
            *patterns = None;
            let former = former.iter().map(|&(addr, len)| Extent { addr, len });
            let former: Vec<Extent> = former.collect();
            let filled = patterns.insert(Patterns::fill(&former, *huge_pages, *seed)?);
            let covered = filled.covered(&former)?;
            Ok(format!("filled={} covered={covered}", filled.bytes()))
        }
        PatternStep::Check => {
            let filled = patterns.as_ref().ok_or(io::ErrorKind::NotFound)?;
            Ok(filled.find_change().unwrap_or_default())
        }
        PatternStep::Locate { dir } => {
            let extents = locate(Path::new(dir))?;
            let lines = extents.iter().map(|it| format!("{} {}\n", it.addr, it.len));
            Ok(lines.collect())
        }
    }
}

impl Patterns {
    /// Fills all huge pages that overlap `former`, and all other free memory but `huge_pages`, which are left in the pool.
    fn fill(former: &[Extent], huge_pages: u64, seed: u64) -> io::Result<Patterns> {
        let bytes = Pattern::bytes(seed, PAGE);
        let words = bytes.chunks_exact(8);
        let words = words.map(|word| word.try_into().map_or(0, u64::from_ne_bytes));
        let mut patterns = Patterns {
            page: words.collect(),
            bytes,
            chunks: Vec::new(),
            huge: Vec::new(),
        };
        patterns.fill_huge(former, huge_pages)?;
        while free_kib()? > RESERVE {
            let mut chunk = vec![0; CHUNK];
            for page in whole_pages_mut(&mut chunk) {
                page.copy_from_slice(&patterns.page);
                page[0] = page.as_ptr() as u64;
            }
            patterns.chunks.push(chunk);
        }
        Ok(patterns)
    }

    fn fill_huge(&mut self, former: &[Extent], left: u64) -> io::Result<()> {
        let overlapping = former.iter().map(|it| it.len / HUGE_PAGE).sum::<u64>();
        grow_pool(left + overlapping)?;
        let mut others = 0;
        // Those without a pattern are kept until all have been seen.
        let mut rest = Vec::new();
        for _ in 0..left + overlapping {
            // The pool has as many as the kernel could make.
            let Ok(file) = memfd::create_huge("pattern", HUGE_PAGE) else {
                break;
            };
            let addr = address(&file)?;
            if former
                .iter()
                .any(|it| (it.addr..it.addr + it.len).contains(&addr))
            {
                self.huge.push((map(&file)?, file));
            } else {
                others += 1;
                rest.push(file);
            }
        }
        if others < left {
            let text = format!("{others} huge pages are not of a former endpoint, not {left}");
            return Err(io::Error::other(text));
        }
        drop(rest);
        fs::write(POOL, (left + self.huge.len() as u64).to_string())?;
        let mut bytes = self.bytes.clone();
        for (index, (memory, _)) in self.huge.iter().enumerate() {
            for page in 0..HUGE_PAGE / PAGE as u64 {
                bytes[..8].copy_from_slice(&number(index, page));
                write_page(memory, page, &bytes)?;
            }
        }
        Ok(())
    }

    fn bytes(&self) -> u64 {
        let chunks = self.chunks.len() * CHUNK * size_of::<u64>();
        chunks as u64 + self.huge.len() as u64 * HUGE_PAGE
    }

    /// Pages of the former endpoints that have a pattern.
    fn covered(&self, former: &[Extent]) -> io::Result<u64> {
        let mut covered = self.huge.len() as u64 * (HUGE_PAGE / PAGE as u64);
        let pagemap = File::open("/proc/self/pagemap")?;
        for chunk in &self.chunks {
            let pages = whole_pages(chunk);
            let mut entries = vec![0; pages.len() / WORDS * 8];
            pagemap.read_exact_at(&mut entries, pages.as_ptr() as u64 / PAGE as u64 * 8)?;
            let addrs = entries.chunks_exact(8).map(|entry| {
                let entry = entry.try_into().map_or(0, u64::from_ne_bytes);
                (entry & FRAME) * PAGE as u64
            });
            let is_former = |addr: &u64| {
                let mut former = former.iter();
                former.any(|it| (it.addr..it.addr + it.len).contains(addr))
            };
            covered += addrs.filter(is_former).count() as u64;
        }
        Ok(covered)
    }

    /// Describes the first page that is not as it was filled.
    fn find_change(&self) -> Option<String> {
        for page in self
            .chunks
            .iter()
            .flat_map(|it| whole_pages(it).chunks_exact(WORDS))
        {
            let number = page.as_ptr() as u64;
            if page[1..] != self.page[1..] || page[0] != number {
                let at = (1..WORDS).find(|&at| page[at] != self.page[at]);
                let at = at.unwrap_or(0);
                return Some(format!("word {at} of a page is {:#018x}", page[at]));
            }
        }
        for (index, (memory, _)) in self.huge.iter().enumerate() {
            for page in 0..HUGE_PAGE / PAGE as u64 {
                let found = read_page(memory, page);
                if found[..8] != number(index, page) || found[8..] != self.bytes[8..] {
                    let at = (8..PAGE).find(|&at| found[at] != self.bytes[at]);
                    let at = at.unwrap_or(0);
                    let bytes = &found[at..PAGE.min(at + 16)];
                    return Some(format!("byte {at} of page {page} is {bytes:02x?}"));
                }
            }
        }
        None
    }
}

/// The first word of a page of a huge page.
fn number(index: usize, page: u64) -> [u8; 8] {
    ((index as u64) << 32 | page).to_ne_bytes()
}

/// The part of a chunk that consists of whole pages.
fn whole_pages(chunk: &[u64]) -> &[u64] {
    let first = first_page(chunk);
    let pages = (chunk.len() - first) / WORDS;
    &chunk[first..first + pages * WORDS]
}

fn whole_pages_mut(chunk: &mut [u64]) -> impl Iterator<Item = &mut [u64]> {
    let first = first_page(chunk);
    chunk[first..].chunks_exact_mut(WORDS)
}

/// The index of the first word that begins a page.
fn first_page(chunk: &[u64]) -> usize {
    let addr = chunk.as_ptr() as usize;
    (addr.next_multiple_of(PAGE) - addr) / size_of::<u64>()
}

fn write_page(memory: &Memory, page: u64, bytes: &[u8]) -> io::Result<()> {
    let mut pieces = Vec::new();
    memory
        .translate(page * PAGE as u64, PAGE as u32, &mut pieces)
        .map_err(io::Error::other)?;
    memory.write(&pieces, 0, bytes);
    Ok(())
}

fn read_page(memory: &Memory, page: u64) -> Vec<u8> {
    let (mut bytes, mut pieces) = (vec![0; PAGE], Vec::new());
    let found = memory.translate(page * PAGE as u64, PAGE as u32, &mut pieces);
    if found.is_ok() {
        memory.read(&pieces, 0, &mut bytes);
    }
    bytes
}

fn free_kib() -> io::Result<u64> {
    let text = fs::read_to_string("/proc/meminfo")?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemFree:"));
    let number = line.and_then(|line| line.trim().strip_suffix(" kB"));
    let number = number.and_then(|number| number.trim().parse().ok());
    number.ok_or_else(|| io::Error::other("no MemFree in /proc/meminfo"))
}

/// Where the huge page of a file lies.
fn address(file: &OwnedFd) -> io::Result<u64> {
    let extents = extents(file)?;
    let first = extents.first().map(|it| it.addr);
    first.ok_or_else(|| io::ErrorKind::NotFound.into())
}

fn extents(file: &OwnedFd) -> io::Result<Vec<Extent>> {
    let mapping = HugeMapping::new(file).map_err(io::Error::other)?;
    let pin = Pin::new(&mapping).map_err(io::Error::other)?;
    pagemap::extents(&mapping, &pin).map_err(io::Error::other)
}

/// Sets the size of the pool. The kernel makes fewer pages if free memory is in pieces: then it is asked again.
fn grow_pool(pages: u64) -> io::Result<()> {
    for _ in 0..ATTEMPTS {
        fs::write(POOL, pages.to_string())?;
        if fs::read_to_string(POOL)?.trim().parse() == Ok(pages) {
            break;
        }
        fs::write("/proc/sys/vm/drop_caches", "3")?;
        fs::write("/proc/sys/vm/compact_memory", "1")?;
    }
    Ok(())
}

/// Where the files of the agent lie.
fn locate(dir: &Path) -> io::Result<Vec<Extent>> {
    let mut all = Vec::new();
    for entry in fs::read_dir(dir)? {
        let mut options = File::options();
        let file = options.read(true).write(true).open(entry?.path())?;
        all.extend(extents(&file.into())?);
    }
    Ok(all)
}
