//! Which zero-copy request of a socket has which number.
//!
//! The kernel numbers requests in the order in which they are made, and reports ranges of numbers whose
//! buffers are free. A range may be reported before an earlier one. Numbers wrap. A number that is reported
//! before this `ZcSocket` has reached it was taken by another sender. It is counted all the same: otherwise
//! each later buffer would be free when its predecessor is.
//!
//! The first number may be unknown (`counter`). Then no reported number belongs to a request until the
//! first can be derived: all numbers are those of this `ZcSocket`, so that they lie among as many numbers as
//! were given, and the first is known when the reported ones reach from the first of those to the last.

use std::collections::VecDeque;

use super::requests::Id;

/// The furthest that a name may be ahead of what was given.
const AHEAD: u32 = 1 << 16;

/// Whose a number is.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
enum Whose {
    Of(Id),
    /// Taken by a sender that is not known.
    Unknown,
}

#[derive(Default)]
pub(super) struct Numbers {
    /// Those that were given and have not been named, in their order. A number that is held for long
    /// keeps none of its followers here.
    given: VecDeque<(u32, Whose)>,
    next: u32,
    /// How many of them are [`Whose::Unknown`].
    unknown: usize,
    /// Which number is the first is to be learnt.
    learning: bool,
    /// The first and the last that were named until then.
    reach: Option<(u32, u32)>,
}

impl Numbers {
    /// Begins with this number, or with one that is to be learnt.
    pub(super) fn begin(&mut self, next: Option<u32>) {
        self.next = next.unwrap_or(0);
        self.learning = next.is_none();
    }

    /// Whether names mean something.
    pub(super) fn are_known(&self) -> bool {
        !self.learning
    }

    /// Numbers that were named while it was not known which was the first: that may tell. Whether it
    /// is known.
    pub(super) fn learn(&mut self, lo: u32, hi: u32) -> bool {
        // Numbers wrap: of two the one that is less than half the way behind is earlier.
        let behind = |a: u32, b: u32| b.wrapping_sub(a) < 1 << 31;
        let (first, last) = self.reach.unwrap_or((lo, hi));
        let first = if behind(lo, first) { lo } else { first };
        let last = if behind(last, hi) { hi } else { last };
        self.reach = Some((first, last));
        let given = self.given.len() as u32;
        if last.wrapping_sub(first).saturating_add(1) >= given {
            // Numbers in front of ours belong to an earlier sender.
            let next = last.wrapping_add(1);
            let ahead = next.wrapping_sub(self.next);
            for (number, _) in &mut self.given {
                *number = number.wrapping_add(ahead);
            }
            self.next = next;
            self.learning = false;
        }
        !self.learning
    }

    /// Whether every number that was given has been named.
    pub(super) fn is_empty(&self) -> bool {
        self.given.is_empty()
    }

    /// The number that the next send has.
    pub(super) fn next(&self) -> u32 {
        self.next
    }

    /// Whether this number is one that was not given yet.
    pub(super) fn is_ahead(&self, number: u32) -> bool {
        number.wrapping_sub(self.next) < 1 << 31
    }

    /// A send has taken it.
    pub(super) fn give(&mut self, id: Id) {
        self.push(Whose::Of(id));
    }

    fn push(&mut self, whose: Whose) {
        self.given.push_back((self.next, whose));
        self.next = self.next.wrapping_add(1);
    }

    /// The first of what was given that is at most so far behind the next number.
    fn position(&self, behind: u64) -> usize {
        let next = self.next;
        self.given
            .partition_point(|(number, _)| u64::from(next.wrapping_sub(*number)) > behind)
    }

    /// The numbers from `lo` to `hi` are free; `freed` is told whose they were. Those that have been
    /// named already are passed over. False if they are too far ahead to be true.
    pub(super) fn name(&mut self, lo: u32, hi: u32, mut freed: impl FnMut(Id)) -> bool {
        if self.is_ahead(hi) {
            let ahead = hi.wrapping_sub(self.next);
            if ahead >= AHEAD {
                return false;
            }
            let named = hi.wrapping_sub(lo).min(ahead);
            for _ in named..ahead {
                self.push(Whose::Unknown);
                self.unknown += 1;
            }
            self.next = hi.wrapping_add(1);
        }
        let behind = u64::from(self.next.wrapping_sub(hi));
        let first = self.position(behind + u64::from(hi.wrapping_sub(lo)));
        let end = self.position(behind - 1);
        for (_, whose) in self.given.drain(first..end.max(first)) {
            match whose {
                Whose::Of(id) => freed(id),
                Whose::Unknown => self.unknown -= 1,
            }
        }
        true
    }

    /// Gives unknown numbers from `from` on to `id`, which failed and took them nevertheless. How
    /// many.
    pub(super) fn claim(&mut self, from: u32, id: Id) -> u32 {
        let mut count = 0;
        let first = self.position(u64::from(self.next.wrapping_sub(from)));
        for (_, whose) in self.given.iter_mut().skip(first) {
            if *whose == Whose::Unknown {
                *whose = Whose::Of(id);
                count += 1;
            }
        }
        self.unknown -= count as usize;
        count
    }

    /// Does not wait for unknown numbers.
    pub(super) fn disown(&mut self) {
        if self.unknown > 0 {
            self.given.retain(|(_, whose)| *whose != Whose::Unknown);
            self.unknown = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(numbers: &mut Numbers, lo: u32, hi: u32) -> Vec<u32> {
        let mut freed = Vec::new();
        assert!(numbers.name(lo, hi, |id| freed.push(id.0)));
        freed.sort_unstable();
        freed
    }

    /// Numbers that begin shortly before they wrap.
    fn numbers(first: u32, keys: &[u32]) -> Numbers {
        let mut numbers = Numbers {
            next: first,
            ..Numbers::default()
        };
        keys.iter().for_each(|&key| numbers.give(Id(key)));
        numbers
    }

    #[test]
    fn ranges_come_in_any_order_and_wrap() {
        let first = u32::MAX - 1;
        let mut numbers = numbers(first, &[10, 11, 12, 13]);
        assert_eq!(named(&mut numbers, 0, 0), [12]);
        assert_eq!(named(&mut numbers, first, u32::MAX), [10, 11]);
        assert_eq!(named(&mut numbers, first, 0), []);
        // One that begins behind what is known.
        assert_eq!(named(&mut numbers, u32::MAX - 9, 1), [13]);
        assert!(numbers.is_empty());
        assert_eq!(numbers.next(), 2);
    }

    #[test]
    fn a_number_of_nobody_keeps_its_place() {
        let mut numbers = numbers(0, &[10]);
        // 1 was taken by a send that failed, and comes before 0.
        assert_eq!(named(&mut numbers, 1, 1), []);
        numbers.give(Id(12));
        assert_eq!(named(&mut numbers, 0, 1), [10]);
        assert_eq!(named(&mut numbers, 2, 2), [12]);
    }

    #[test]
    fn what_was_skipped_can_be_claimed() {
        let mut numbers = numbers(5, &[]);
        // 6 is named, so that 5 was taken.
        assert_eq!(named(&mut numbers, 6, 6), []);
        assert_eq!(numbers.claim(5, Id(1)), 1);
        assert_eq!(numbers.claim(5, Id(1)), 0);
        numbers.give(Id(2));
        assert_eq!(named(&mut numbers, 5, 5), [1]);
        assert_eq!(named(&mut numbers, 7, 7), [2]);
        assert!(numbers.is_empty());
    }

    #[test]
    fn what_has_been_passed_is_not_claimed_and_what_follows_is() {
        let mut numbers = numbers(5, &[10]);
        assert_eq!(named(&mut numbers, 5, 5), [10]);
        // Of 5 to 7 the first has been passed, and 7 is named.
        assert_eq!(named(&mut numbers, 7, 7), []);
        assert_eq!(numbers.claim(5, Id(1)), 1);
        assert_eq!(named(&mut numbers, 6, 6), [1]);
        assert!(numbers.is_empty());
    }

    #[test]
    fn what_nobody_claims_is_not_waited_for() {
        let mut numbers = numbers(0, &[]);
        assert_eq!(named(&mut numbers, 3, 3), []);
        numbers.disown();
        assert!(numbers.is_empty());
        assert_eq!(named(&mut numbers, 0, 2), []);
        assert_eq!(numbers.next(), 4);
    }

    #[test]
    fn a_number_that_is_held_keeps_nothing_of_its_followers() {
        let mut numbers = numbers(u32::MAX - 500, &[7]);
        for _ in 0..100_000 {
            let number = numbers.next();
            numbers.give(Id(8));
            numbers.give(Id(9));
            let after = number.wrapping_add(1);
            assert_eq!(named(&mut numbers, after, after), [9]);
            assert_eq!(named(&mut numbers, number, number), [8]);
        }
        assert_eq!(numbers.given.len(), 1);
        assert!(numbers.given.capacity() < 16);
        assert_eq!(named(&mut numbers, u32::MAX - 500, u32::MAX - 500), [7]);
        assert!(numbers.is_empty());
    }

    #[test]
    fn the_first_number_is_learnt_from_names() {
        for start in [0, 7, u32::MAX - 1] {
            let at = |offset: u32| start.wrapping_add(offset);
            let mut numbers = Numbers::default();
            numbers.begin(None);
            (10..14).for_each(|key| numbers.give(Id(key)));
            // Whose these are depends on where the others lie.
            assert!(!numbers.learn(at(1), at(1)));
            assert!(!numbers.learn(at(3), at(3)));
            assert!(!numbers.are_known());
            assert!(numbers.learn(at(0), at(0)));
            let freed = [1, 3, 0].map(|offset| named(&mut numbers, at(offset), at(offset)));
            assert_eq!(freed, [[11], [13], [10]]);
            assert_eq!(named(&mut numbers, at(2), at(2)), [12]);
            assert_eq!(numbers.next(), at(4));
        }
    }

    #[test]
    fn what_was_named_together_with_older_ones_is_the_last_of_them() {
        let mut numbers = Numbers::default();
        numbers.begin(None);
        numbers.give(Id(1));
        numbers.give(Id(2));
        assert!(numbers.learn(90, 100));
        assert_eq!(named(&mut numbers, 90, 100), [1, 2]);
        assert_eq!(numbers.next(), 101);
    }

    #[test]
    fn a_name_far_ahead_is_refused() {
        let mut numbers = numbers(0, &[10]);
        assert!(!numbers.name(AHEAD + 1, AHEAD + 1, |_| panic!("nobody's")));
        assert_eq!(numbers.next(), 1);
    }
}
