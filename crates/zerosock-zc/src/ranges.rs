//! The numbers of the sends that are over, as ranges.

use std::collections::VecDeque;

/// The buffers of the sends numbered `lo` to `hi`, both included, are free.
///
/// Numbers count the sends of one sender that may go without a copy, from 0, and wrap; so may a
/// range: `u32::MAX..=1` are three sends.
#[derive(Copy, Clone, Debug, Default, Eq, PartialEq)]
pub struct Completion {
    /// The first.
    pub lo: u32,
    /// The last.
    pub hi: u32,
    /// They were copied: by us, or by the kernel after all. Otherwise the buffers themselves went
    /// to the device. A range says that buffers are free, not how it went: a send that failed before
    /// any of it was taken in place is named as copied. [`Sender::returned`](super::Sender::returned)
    /// tells of the failure.
    pub copied: bool,
}

impl Completion {
    /// How many sends it names.
    #[must_use]
    pub fn count(self) -> u32 {
        self.hi.wrapping_sub(self.lo).wrapping_add(1)
    }
}

/// Ranges that are to be told, oldest first. Neighbours of the same kind are told as one.
#[derive(Default)]
pub(super) struct Ranges {
    queue: VecDeque<Completion>,
}

impl Ranges {
    /// The send of this number is over.
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

    /// Makes one of the last two, if what was between them has just come.
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

    /// Moves as many as there is room for into `room`. How many.
    pub(super) fn take(&mut self, room: &mut [Completion]) -> usize {
        let count = room.len().min(self.queue.len());
        for (place, range) in room.iter_mut().zip(self.queue.drain(..count)) {
            *place = range;
        }
        count
    }

    /// How many are to be told.
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
    fn neighbours_are_one() {
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
    fn what_finds_no_room_is_told_later() {
        let mut ranges = Ranges::default();
        [1, 3, 5]
            .iter()
            .for_each(|&number| ranges.add(number, false));
        let mut room = [Completion::default(); 2];
        assert_eq!(ranges.take(&mut room), 2);
        assert_eq!(all(&mut ranges), [(5, 5, false)]);
    }

    proptest! {
        /// Every number comes out once, as what it went in as, whatever the order.
        #[test]
        fn every_number_is_told_once(
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
