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
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn all(ranges: &mut Ranges) -> Vec<(u32, u32, bool)> {
        let mut room = [Completion::default(); 64];
        let count = ranges.take(&mut room);
        room[..count]
            .iter()
            .map(|range| (range.lo, range.hi, range.copied))
            .collect()
    }

    fn ranges(numbers: &[u32]) -> Vec<(u32, u32, bool)> {
        let mut ranges = Ranges::default();
        numbers.iter().for_each(|&number| ranges.add(number, false));
        all(&mut ranges)
    }

    #[test]
    fn adjacent_numbers_form_one_range() {
        assert_eq!(ranges(&[0, 1, 2, 3]), [(0, 3, false)]);
        assert_eq!(ranges(&[3, 2, 1, 0]), [(0, 3, false)]);
        assert_eq!(ranges(&[0, 2, 1]), [(0, 2, false)]);
        assert_eq!(ranges(&[2, 0, 1]), [(0, 2, false)]);
        assert_eq!(ranges(&[5, 9]), [(5, 5, false), (9, 9, false)]);
        assert_eq!(ranges(&[u32::MAX, 0, 1]), [(u32::MAX, 1, false)]);
    }

    #[test]
    fn copied_and_not_copied_stay_apart() {
        let mut ranges = Ranges::default();
        for (number, copied) in [(0, false), (1, true), (2, true), (3, false)] {
            ranges.add(number, copied);
        }
        assert_eq!(
            all(&mut ranges),
            [(0, 0, false), (1, 2, true), (3, 3, false)]
        );
    }

    #[test]
    fn ranges_that_find_no_room_are_taken_later() {
        let mut ranges = Ranges::default();
        [1, 3, 5]
            .iter()
            .for_each(|&number| ranges.add(number, false));
        let mut room = [Completion::default(); 2];
        assert_eq!(ranges.take(&mut room), 2);
        assert_eq!(all(&mut ranges), [(5, 5, false)]);
    }

    proptest! {
        /// Every number is in one range, with the kind it was added with, in any order of adding.
        #[test]
        fn every_number_is_in_one_range(
            start in any::<u32>(),
            order in Just((0..100u32).collect::<Vec<_>>()).prop_shuffle(),
            copied in any::<u128>(),
            room in 1..8usize,
        ) {
            let mut ranges = Ranges::default();
            let mut told = [0; 100];
            let mut buffer = vec![Completion::default(); room];
            let mut tell = |ranges: &mut Ranges| {
                let count = ranges.take(&mut buffer);
                for range in &buffer[..count] {
                    for step in 0..range.count() {
                        let index = range.lo.wrapping_add(step).wrapping_sub(start);
                        told[index as usize] += 1;
                        assert_eq!(copied >> index & 1 == 1, range.copied);
                    }
                }
                count
            };
            for (turn, index) in order.iter().enumerate() {
                ranges.add(start.wrapping_add(*index), copied >> index & 1 == 1);
                if turn % 16 == 15 {
                    tell(&mut ranges);
                }
            }
            while tell(&mut ranges) > 0 {}
            prop_assert!(told.iter().all(|&count| count == 1));
        }
    }
}
