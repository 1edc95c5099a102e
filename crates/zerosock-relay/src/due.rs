//! Lists of slots of a slab in the order in which their time comes.
//!
//! All entries of a list wait for the same time, so that a new one is always the last: adding, removing
//! and finding the next one cost the same however many there are, and nothing scans them.
//!
//! # Invariants
//! - A slot is in at most one list; it is removed from it before it leaves the slab.

use std::time::Duration;

use slab::Slab;
use zerosock_proto::Instant;

const NONE: u32 = u32::MAX;

/// The place of a slot in a list.
#[derive(Debug)]
pub(super) struct Link {
    previous: u32,
    next: u32,
    /// When the time of the slot comes; `None`: it is in no list.
    at: Option<Instant>,
}

impl Default for Link {
    fn default() -> Link {
        Link {
            previous: NONE,
            next: NONE,
            at: None,
        }
    }
}

/// A value with a place in a list.
pub(super) trait Linked {
    fn link(&mut self) -> &mut Link;
}

/// See the [module](self).
#[derive(Debug)]
pub(super) struct DueList {
    first: u32,
    last: u32,
    /// When the time of the first slot comes.
    next: Option<Instant>,
    /// How long the entries wait; `None`: for ever, they are not listed.
    period: Option<Duration>,
}

impl DueList {
    pub(super) fn new(period: Option<Duration>) -> DueList {
        DueList {
            first: NONE,
            last: NONE,
            next: None,
            period,
        }
    }

    /// When the time of the first entry comes.
    pub(super) fn next(&self) -> Option<Instant> {
        self.next
    }

    /// The slot with the earliest time.
    pub(super) fn first(&self) -> Option<u32> {
        (self.first != NONE).then_some(self.first)
    }

    /// Adds the slot `key`, which is in no list.
    pub(super) fn add<T: Linked>(&mut self, slab: &mut Slab<T>, key: u32, now: Instant) {
        let Some(period) = self.period else { return };
        let previous = self.last;
        let Some(entry) = slab.get_mut(key as usize) else {
            return;
        };
        let at = now + period;
        *entry.link() = Link {
            previous,
            next: NONE,
            at: Some(at),
        };
        self.last = key;
        match slab.get_mut(previous as usize) {
            Some(entry) if previous != NONE => entry.link().next = key,
            _ => {
                self.first = key;
                self.next = Some(at);
            }
        }
    }

    /// Removes the slot `key` if it is in this list.
    pub(super) fn remove<T: Linked>(&mut self, slab: &mut Slab<T>, key: u32) {
        let Some(entry) = slab.get_mut(key as usize) else {
            return;
        };
        let Link { previous, next, at } = std::mem::take(entry.link());
        if at.is_none() {
            return;
        }
        match slab.get_mut(previous as usize) {
            Some(entry) => entry.link().next = next,
            None => self.first = next,
        }
        match slab.get_mut(next as usize) {
            Some(entry) => entry.link().previous = previous,
            None => self.last = previous,
        }
        self.next = slab
            .get_mut(self.first as usize)
            .and_then(|entry| entry.link().at);
    }

    /// Removes the first slot and returns it, if its time has come.
    pub(super) fn pop<T: Linked>(&mut self, slab: &mut Slab<T>, now: Instant) -> Option<u32> {
        if self.next? > now {
            return None;
        }
        let key = self.first;
        self.remove(slab, key);
        Some(key)
    }
}

#[cfg(test)]
#[path = "due_tests.rs"]
mod tests;
