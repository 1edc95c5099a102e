//! The memory of pools that a ring has registered.
//!
//! A ring has room for 64 arenas. The first request without a copy for a block of an arena
//! registers the arena; until that succeeds its blocks are sent like other memory. Registration
//! pins every page and counts against the limit of locked memory. If there is no room or no memory,
//! arenas that no pool and no block refers to are removed first, then those that were not used for
//! the longest time. An arena that was used a moment ago stays: pools that are used in turns would
//! otherwise be registered again for every send.
//!
//! # Invariants
//! An arena is replaced only while no request that names its number is under way. The kernel looks
//! up the number when it executes the request, which may be long after its submission. From then
//! until the notification the kernel itself keeps the pages.
#![allow(unsafe_code)]

use std::sync::Arc;

use io_uring::IoUring;

use super::pool::Arena;

/// How many arenas a ring registers at most.
const ARENAS: usize = 64;
/// Requests from pools after which an arena that was not sent from may be replaced, and one that
/// could not be registered is tried again.
const PAUSE: u64 = 1024;

/// The arenas that the ring has registered.
#[derive(Default)]
pub(super) struct Arenas {
    /// The arenas by number.
    entries: Vec<Option<Entry>>,
    /// The number of the arena of the last request.
    last: usize,
    /// Number of requests from pools.
    clock: u64,
    /// The value of `clock` before which no registration is tried: one failed, and it is expensive.
    not_before: u64,
    /// The ring has a table of buffers.
    has_table: bool,
}

struct Entry {
    /// Keeps the memory mapped while it is registered.
    arena: Arc<Arena>,
    /// The value of `clock` at the last request from this arena.
    used: u64,
    /// Number of requests under way that name it.
    requests: u32,
}

impl Entry {
    fn is(&self, arena: &Arc<Arena>) -> bool {
        Arc::ptr_eq(&self.arena, arena)
    }

    /// Whether neither a pool nor a block refers to the arena.
    fn is_unreferenced(&self) -> bool {
        Arc::strong_count(&self.arena) == 1
    }
}

impl Arenas {
    /// Number of registered arenas.
    pub(super) fn count(&self) -> usize {
        self.entries.iter().flatten().count()
    }

    /// Whether a request from this arena would name the number 0.
    pub(super) fn is_first(&self, arena: &Arc<Arena>) -> bool {
        match self.entries.first() {
            Some(Some(entry)) => entry.is(arena),
            Some(None) | None => self.clock + 1 >= self.not_before,
        }
    }

    /// The number of an arena, which is registered if possible.
    pub(super) fn number(&mut self, ring: &IoUring, arena: &Arc<Arena>) -> Option<u16> {
        self.clock += 1;
        let found = self.find(arena);
        let index = found.or_else(|| self.register(ring, arena))?;
        self.last = index;
        let entry = self.entries.get_mut(index)?.as_mut()?;
        entry.used = self.clock;
        Some(index as u16)
    }

    /// Takes note that a request that names this number is under way.
    pub(super) fn begun(&mut self, number: u16) {
        if let Some(Some(entry)) = self.entries.get_mut(usize::from(number)) {
            entry.requests += 1;
        }
    }

    /// Takes note of the result of such a request.
    pub(super) fn ended(&mut self, number: u16) {
        if let Some(Some(entry)) = self.entries.get_mut(usize::from(number)) {
            entry.requests -= 1;
        }
    }

    fn find(&self, arena: &Arc<Arena>) -> Option<usize> {
        let is_it = |entry: &Option<Entry>| entry.as_ref().is_some_and(|entry| entry.is(arena));
        match self.entries.get(self.last).is_some_and(is_it) {
            true => Some(self.last),
            false => self.entries.iter().position(is_it),
        }
    }

    fn has_room(&self) -> bool {
        self.count() < ARENAS
    }

    /// A number without an arena.
    fn vacant(&mut self) -> Option<usize> {
        let vacant = self.entries.iter().position(Option::is_none);
        if vacant.is_none() && self.has_room() {
            self.entries.push(None);
            return Some(self.entries.len() - 1);
        }
        vacant
    }

    /// The arena to replace: one that nothing refers to, else the least recently used.
    fn unused(&self, now: u64) -> Option<usize> {
        let entries = self.entries.iter().enumerate();
        let unused = entries.filter_map(|(index, entry)| {
            let entry = entry.as_ref().filter(|entry| entry.requests == 0)?;
            let is_old = entry.is_unreferenced() || entry.used + PAUSE <= now;
            is_old.then_some((!entry.is_unreferenced(), entry.used, index))
        });
        unused.min().map(|(.., index)| index)
    }

    fn register(&mut self, ring: &IoUring, arena: &Arc<Arena>) -> Option<usize> {
        if self.clock < self.not_before {
            return None;
        }
        self.has_table = self.has_table
            || ring
                .submitter()
                .register_buffers_sparse(ARENAS as u32)
                .is_ok();
        if self.has_table {
            // Memory that no pool and no block refers to can no longer be sent.
            for index in 0..self.entries.len() {
                let entry = self.entries[index].as_ref();
                if entry.is_some_and(|entry| entry.is_unreferenced() && entry.requests == 0) {
                    self.clear(ring, index);
                }
            }
            if let Some(index) = self.vacant()
                && self.set(ring, index, arena)
            {
                return Some(index);
            }
            if let Some(index) = self.unused(self.clock) {
                self.clear(ring, index);
                if self.set(ring, index, arena) {
                    return Some(index);
                }
            }
        }
        self.not_before = self.clock + PAUSE;
        None
    }

    /// Unregisters the arena with this number.
    fn clear(&mut self, ring: &IoUring, index: usize) {
        let nothing = libc::iovec {
            iov_base: std::ptr::null_mut(),
            iov_len: 0,
        };
        // SAFETY: the vector is empty.
        let done = unsafe { update(ring, index, nothing) };
        if done {
            self.entries[index] = None;
        }
    }

    fn set(&mut self, ring: &IoUring, index: usize, arena: &Arc<Arena>) -> bool {
        if self.entries[index].is_some() {
            return false;
        }
        // SAFETY: the mapping of the arena is valid. The entry below keeps it until the arena is
        // unregistered or the ring is closed.
        let done = unsafe { update(ring, index, arena.vector()) };
        self.entries[index] = done.then(|| Entry {
            arena: Arc::clone(arena),
            used: self.clock,
            requests: 0,
        });
        done
    }
}

/// Registers memory under a number, and replaces what was registered there.
///
/// # Safety
/// The memory is mapped for as long as it is registered.
unsafe fn update(ring: &IoUring, index: usize, memory: libc::iovec) -> bool {
    let submitter = ring.submitter();
    // SAFETY: the caller keeps the memory mapped.
    unsafe { submitter.register_buffers_update(index as u32, &[memory], None) }.is_ok()
}

#[cfg(test)]
#[path = "arenas_tests.rs"]
mod tests;
