//! Patterns in the free memory of this guest.
//!
//! # Invariants
//! Huge pages that overlap pages of a former endpoint get a pattern, and no endpoint gets them before they are freed, as far
//! as the kernel can make others.

use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use zerosock_ring::Extent;
use zerosock_sys::hugetlbfs::{HUGE_PAGE, HugeMapping};
use zerosock_sys::pagemap;
use zerosock_sys::pin::Pin;

use super::blocks::{Block, Template, memory};
use crate::protocol::PatternStep;

/// Free memory that is left for programs and the kernel.
const RESERVE: u64 = 48 << 20;
const POOL: &str = "/proc/sys/vm/nr_hugepages";
/// Attempts to make so many huge pages.
const ATTEMPTS: usize = 20;

/// Memory with patterns.
pub(super) struct Patterns {
    template: Template,
    blocks: Vec<Block>,
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
            let bytes: usize = filled.blocks.iter().map(Block::len).sum();
            Ok(format!("filled={bytes} covered={covered}"))
        }
        PatternStep::Check => {
            let filled = patterns.as_ref().ok_or(io::ErrorKind::NotFound)?;
            let mut blocks = filled.blocks.iter();
            let checked = blocks.try_for_each(|it| it.check(&filled.template));
            Ok(checked.map_or_else(|error| error.to_string(), |()| String::new()))
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
        let mut patterns = Patterns {
            template: Template::new(seed),
            blocks: Vec::new(),
        };
        patterns.fill_huge(former, huge_pages)?;
        while memory("MemFree")? > RESERVE {
            let number = patterns.blocks.len() as u64;
            let block = Block::new(false, number, &patterns.template)?;
            patterns.blocks.push(block);
        }
        Ok(patterns)
    }

    fn fill_huge(&mut self, former: &[Extent], left: u64) -> io::Result<()> {
        let overlapping = former.iter().map(|it| it.len / HUGE_PAGE).sum::<u64>();
        grow_pool(left + overlapping)?;
        // They are kept until all have been seen.
        let mut others = Vec::new();
        for _ in 0..left + overlapping {
            // The pool has as many as the kernel could make.
            let Ok(block) = Block::new(true, self.blocks.len() as u64, &self.template) else {
                break;
            };
            match block.addresses()?.iter().any(|&it| is_in(former, it)) {
                true => self.blocks.push(block),
                false => others.push(block),
            }
        }
        // Where free memory is in pieces, there are fewer others: some of the former ones are left, too.
        let missing = left.saturating_sub(others.len() as u64) as usize;
        let Some(rest) = self.blocks.len().checked_sub(missing) else {
            let count = others.len() + self.blocks.len();
            let text = format!("{count} huge pages can be had, not {left}");
            return Err(io::Error::other(text));
        };
        self.blocks.truncate(rest);
        drop(others);
        fs::write(POOL, (left + self.blocks.len() as u64).to_string())
    }

    /// Pages of the former endpoints that have a pattern.
    fn covered(&self, former: &[Extent]) -> io::Result<usize> {
        let mut covered = 0;
        for block in &self.blocks {
            let addresses = block.addresses()?;
            covered += addresses.iter().filter(|&&it| is_in(former, it)).count();
        }
        Ok(covered)
    }
}

fn is_in(extents: &[Extent], addr: u64) -> bool {
    let mut extents = extents.iter();
    extents.any(|it| (it.addr..it.addr + it.len).contains(&addr))
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
