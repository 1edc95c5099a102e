//! The numbers of completed sends, as ranges.

use std::collections::VecDeque;

/// The buffers of the sends numbered `lo` to `hi`, both included, are free.
///
/// Numbers count the sends of one sender that may go without a copy, from 0, and wrap; so may a
/// range: `u32::MAX..=1` are three sends.
#[derive(Copy, Clone, Debug, Default, Eq, PartialEq)]
pub struct Completion {
    /// The number of the first send.
    pub lo: u32,
    /// The number of the last send.
    pub hi: u32,
    /// The sends were copied, by this crate or by the kernel. Otherwise the device or receiver read
    /// the buffers. A range says that buffers are free, not whether the sends succeeded: a send
    /// that failed before any of it was taken in place counts as copied, and
    /// [`Sender::returned`](super::Sender::returned) reports the failure.
    pub copied: bool,
}

impl Completion {
    /// Number of sends in the range.
    #[must_use]
    pub fn count(self) -> u32 {
        self.hi.wrapping_sub(self.lo).wrapping_add(1)
    }
}

/// Ranges that the application has not taken, oldest first. Adjacent ranges of the same kind are
/// joined.
#[derive(Default)]
pub(super) struct Ranges {
    queue: VecDeque<Completion>,
}

impl Ranges {
    /// Adds the number of a completed send.
    pub(super) fn add(&mut self, number: u32, copied: bool) {
        let Some(last) = self.queue.back_mut().filter(|last| last.copied == copied) else {
            return self.push(number, copied);
        };
        if last.hi.wrapping_add(1) == number {
            last.hi = number;
        } else if last.lo.wrapping_sub(1) == number {
            last.lo = number;
        } else {
            return self.push(number, copied);
        }
        self.join();
    }

    fn push(&mut self, number: u32, copied: bool) {
        let (lo, hi) = (number, number);
        self.queue.push_back(Completion { lo, hi, copied });
    }

    /// Joins the last two ranges, if the number between them has just been added.
    fn join(&mut self) {
        let Some(before) = self.queue.len().checked_sub(2) else {
            return;
        };
        let (Some(&first), Some(&last)) = (self.queue.get(before), self.queue.back()) else {
            return;
        };
        if first.copied != last.copied {
            return;
        }
        let joined = if first.hi.wrapping_add(1) == last.lo {
            (first.lo, last.hi)
        } else if last.hi.wrapping_add(1) == first.lo {
            (last.lo, first.hi)
        } else {
            return;
        };
        self.queue.pop_back();
        if let Some(kept) = self.queue.back_mut() {
            (kept.lo, kept.hi) = joined;
        }
    }

    /// Moves as many ranges as there is room for into `room`. Returns how many.
    pub(super) fn take(&mut self, room: &mut [Completion]) -> usize {
        let count = room.len().min(self.queue.len());
        for (place, range) in room.iter_mut().zip(self.queue.drain(..count)) {
            *place = range;
        }
        count
    }

    /// Number of ranges that the application has not taken.
    pub(super) fn len(&self) -> usize {
        self.queue.len()
    }
}

#[cfg(test)]
#[path = "ranges_tests.rs"]
mod tests;
