//! Fills all free memory of the guest with patterns, small pages and huge ones, and checks them all the time.
//!
//! One thread takes pages as soon as they are free. Another one checks all pages in turn, and gives the oldest small
//! pages back, for others.

use std::collections::VecDeque;
use std::fs;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use rustix::process::setpriority_process;

use super::terms::{POLL, wait_until};
use crate::guest::blocks::{self, Block, SMALL, Template};

/// Of the pattern. No stream has it.
const SEED: u64 = 0x5eed_0000_0000;
/// Small pages are taken above the first amount of available memory and given back below the second.
const PLENTY: u64 = 64 << 20;
const SCARCE: u64 = 40 << 20;
/// Checks of a block of small pages after which one is given back.
const TURNOVER: u64 = 64;
/// The priority of the thread that checks. Wrong bytes wait for it, and the traffic is to go on.
const NICE: i32 = 10;
/// Looks at the huge pages for each look at the small ones.
const LOOKS: u64 = 16;

struct Shared {
    template: Template,
    /// Small and huge pages, those first that were checked longest ago.
    blocks: [Mutex<VecDeque<Block>>; 2],
    /// Number of huge pages in `blocks` or being checked.
    held: AtomicU64,
    /// Number of huge pages that are to be free.
    leave: AtomicU64,
    next: AtomicU64,
    checked: AtomicU64,
    is_over: AtomicBool,
    fault: Mutex<Option<io::Error>>,
}

/// The threads with their pages.
pub(super) struct Patterns {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl Patterns {
    pub(super) fn start() -> Patterns {
        let shared = Arc::new(Shared {
            template: Template::new(SEED),
            blocks: Default::default(),
            held: AtomicU64::new(0),
            leave: AtomicU64::new(0),
            next: AtomicU64::new(0),
            checked: AtomicU64::new(0),
            is_over: AtomicBool::new(false),
            fault: Mutex::default(),
        });
        let run = |body: fn(&Shared) -> io::Result<()>| {
            let shared = shared.clone();
            thread::spawn(move || {
                if let Err(error) = body(&shared) {
                    lock(&shared.fault).get_or_insert(error);
                }
            })
        };
        let threads = vec![run(Shared::take_all), run(Shared::check_all)];
        Patterns { shared, threads }
    }

    /// Leaves so many huge pages free. Returns when they are.
    pub(super) fn leave(&self, pages: u64) -> io::Result<()> {
        self.shared.leave.store(pages, Ordering::Relaxed);
        wait_until(|| {
            self.fault()?;
            let free = free_huge_pages()?;
            Ok(
                (free < pages)
                    .then(|| format!("{pages} huge pages are to be free, and {free} are")),
            )
        })
    }

    /// Huge pages that have patterns.
    pub(super) fn held(&self) -> u64 {
        self.shared.held.load(Ordering::Relaxed)
    }

    /// Bytes of small pages that have patterns.
    pub(super) fn small(&self) -> u64 {
        (lock(&self.shared.blocks[0]).len() * SMALL) as u64
    }

    /// Bytes that were found unchanged.
    pub(super) fn checked(&self) -> u64 {
        self.shared.checked.load(Ordering::Relaxed)
    }

    /// The first foreign byte.
    pub(super) fn fault(&self) -> io::Result<()> {
        lock(&self.shared.fault).take().map_or(Ok(()), Err)
    }

    /// Checks everything once more, and gives it back.
    pub(super) fn stop(self) -> io::Result<()> {
        self.shared.is_over.store(true, Ordering::Relaxed);
        for thread in self.threads {
            let _ = thread.join();
        }
        for blocks in &self.shared.blocks {
            while let Some(block) = lock(blocks).pop_front() {
                self.shared.check(&block)?;
            }
        }
        lock(&self.shared.fault).take().map_or(Ok(()), Err)
    }
}

impl Shared {
    fn take(&self, is_huge: bool) -> io::Result<()> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let block = Block::new(is_huge, number, &self.template)?;
        lock(&self.blocks[usize::from(is_huge)]).push_back(block);
        self.held.fetch_add(is_huge.into(), Ordering::Relaxed);
        Ok(())
    }

    /// Gives back a block.
    fn give(&self, is_huge: bool) -> io::Result<()> {
        let block = lock(&self.blocks[usize::from(is_huge)]).pop_front();
        if let Some(block) = block {
            self.check(&block)?;
            drop(block);
            self.held.fetch_sub(is_huge.into(), Ordering::Relaxed);
        }
        Ok(())
    }

    fn check(&self, block: &Block) -> io::Result<()> {
        block.check(&self.template)?;
        self.checked
            .fetch_add(block.len() as u64, Ordering::Relaxed);
        Ok(())
    }

    /// Takes what is free.
    fn take_all(&self) -> io::Result<()> {
        for look in 0.. {
            if self.is_over.load(Ordering::Relaxed) {
                break;
            }
            let (free, leave) = (free_huge_pages()?, self.leave.load(Ordering::Relaxed));
            if free > leave {
                // Another process may have been faster.
                let _ = self.take(true);
                continue;
            } else if free < leave {
                self.give(true)?;
                continue;
            }
            if look % LOOKS == 0 {
                match available()? {
                    SCARCE..=PLENTY => {}
                    0..SCARCE => self.give(false)?,
                    _ => self.take_plenty()?,
                }
            }
            thread::sleep(POLL);
        }
        Ok(())
    }

    /// Takes small pages while there are enough.
    fn take_plenty(&self) -> io::Result<()> {
        while available()? > PLENTY && free_huge_pages()? == self.leave.load(Ordering::Relaxed) {
            self.take(false)?;
        }
        Ok(())
    }

    fn check_all(&self) -> io::Result<()> {
        // Of this thread alone.
        setpriority_process(None, NICE)?;
        for count in 1.. {
            if self.is_over.load(Ordering::Relaxed) {
                break;
            }
            for blocks in &self.blocks {
                let block = lock(blocks).pop_front();
                if let Some(block) = block {
                    self.check(&block)?;
                    lock(blocks).push_back(block);
                }
            }
            if count % TURNOVER == 0 {
                self.give(false)?;
            }
        }
        Ok(())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Huge pages of the guest that nothing has.
pub(super) fn free_huge_pages() -> io::Result<u64> {
    let text = fs::read_to_string("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")?;
    Ok(text.trim().parse().unwrap_or(0))
}

/// Bytes that processes can still get.
pub(super) fn available() -> io::Result<u64> {
    blocks::memory("MemAvailable")
}
