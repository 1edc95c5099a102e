//! Which zero-copy request took which notification id.
//!
//! The kernel assigns consecutive ids to the zero-copy requests of a socket and reports ranges of ids
//! whose buffers it no longer reads. Ranges can be reported in any order, and ids wrap. A reported id that
//! this socket has not reached yet was taken by another sender. It is counted as well: otherwise each
//! later buffer would be freed when the request before it completes.
//!
//! The first id can be unknown (`first_id`). No reported id is then matched with a request until the first
//! can be derived. All ids are assumed to be those of this socket, so the first is known as soon as the
//! reported ids span as many ids as were assigned.

use std::collections::VecDeque;

use super::requests::RequestId;

/// The furthest that a name may be ahead of what was given.
const MAX_AHEAD: u32 = 1 << 16;

/// IdOwner a number is.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
enum IdOwner {
    Request(RequestId),
    /// Taken by a sender that is not known.
    Unknown,
}

#[derive(Default)]
pub(super) struct NotificationIds {
    /// Those that were given and have not been named, in their order. A number that is held for long
    /// keeps none of its followers here.
    outstanding: VecDeque<(u32, IdOwner)>,
    next: u32,
    /// How many of them are [`IdOwner::Unknown`].
    unknown: usize,
    /// Which number is the first is to be learnt.
    learning: bool,
    /// The first and the last that were named until then.
    reported: Option<(u32, u32)>,
}

impl NotificationIds {
    /// Begins with this number, or with one that is to be learnt.
    pub(super) fn start(&mut self, next: Option<u32>) {
        self.next = next.unwrap_or(0);
        self.learning = next.is_none();
    }

    /// Whether names mean something.
    pub(super) fn first_is_known(&self) -> bool {
        !self.learning
    }

    /// NotificationIds that were named while it was not known which was the first: that may tell. Whether it
    /// is known.
    pub(super) fn learn_first(&mut self, lo: u32, hi: u32) -> bool {
        // NotificationIds wrap: of two the one that is less than half the way behind is earlier.
        let behind = |a: u32, b: u32| b.wrapping_sub(a) < 1 << 31;
        let (first, last) = self.reported.unwrap_or((lo, hi));
        let first = if behind(lo, first) { lo } else { first };
        let last = if behind(last, hi) { hi } else { last };
        self.reported = Some((first, last));
        let outstanding = self.outstanding.len() as u32;
        if last.wrapping_sub(first).saturating_add(1) >= outstanding {
            // NotificationIds in front of ours belong to an earlier sender.
            let next = last.wrapping_add(1);
            let ahead = next.wrapping_sub(self.next);
            for (number, _) in &mut self.outstanding {
                *number = number.wrapping_add(ahead);
            }
            self.next = next;
            self.learning = false;
        }
        !self.learning
    }

    /// Whether every number that was given has been named.
    pub(super) fn is_empty(&self) -> bool {
        self.outstanding.is_empty()
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
    pub(super) fn assign(&mut self, request: RequestId) {
        self.push(IdOwner::Request(request));
    }

    fn push(&mut self, owner: IdOwner) {
        self.outstanding.push_back((self.next, owner));
        self.next = self.next.wrapping_add(1);
    }

    /// The first of what was given that is at most so far behind the next number.
    fn position(&self, behind: u64) -> usize {
        let next = self.next;
        self.outstanding
            .partition_point(|(id, _)| u64::from(next.wrapping_sub(*id)) > behind)
    }

    /// The numbers from `lo` to `hi` are free; `freed` is told whose they were. Those that have been
    /// named already are passed over. False if they are too far ahead to be true.
    pub(super) fn complete(&mut self, lo: u32, hi: u32, mut freed: impl FnMut(RequestId)) -> bool {
        if self.is_ahead(hi) {
            let ahead = hi.wrapping_sub(self.next);
            if ahead >= MAX_AHEAD {
                return false;
            }
            let named = hi.wrapping_sub(lo).min(ahead);
            for _ in named..ahead {
                self.push(IdOwner::Unknown);
                self.unknown += 1;
            }
            self.next = hi.wrapping_add(1);
        }
        let behind = u64::from(self.next.wrapping_sub(hi));
        let first = self.position(behind + u64::from(hi.wrapping_sub(lo)));
        let end = self.position(behind - 1);
        for (_, owner) in self.outstanding.drain(first..end.max(first)) {
            match owner {
                IdOwner::Request(request) => freed(request),
                IdOwner::Unknown => self.unknown -= 1,
            }
        }
        true
    }

    /// Gives unknown numbers from `from` on to `id`, which failed and took them nevertheless. How
    /// many.
    pub(super) fn assign_unknown(&mut self, from: u32, request: RequestId) -> u32 {
        let mut count = 0;
        let first = self.position(u64::from(self.next.wrapping_sub(from)));
        for (_, owner) in self.outstanding.iter_mut().skip(first) {
            if *owner == IdOwner::Unknown {
                *owner = IdOwner::Request(request);
                count += 1;
            }
        }
        self.unknown -= count as usize;
        count
    }

    /// Does not wait for unknown numbers.
    pub(super) fn forget_unknown(&mut self) {
        if self.unknown > 0 {
            self.outstanding
                .retain(|(_, owner)| *owner != IdOwner::Unknown);
            self.unknown = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn completed(ids: &mut NotificationIds, lo: u32, hi: u32) -> Vec<u32> {
        let mut freed = Vec::new();
        assert!(ids.complete(lo, hi, |id| freed.push(id.0)));
        freed.sort_unstable();
        freed
    }

    /// NotificationIds that begin shortly before they wrap.
    fn ids(first: u32, keys: &[u32]) -> NotificationIds {
        let mut ids = NotificationIds {
            next: first,
            ..NotificationIds::default()
        };
        keys.iter().for_each(|&key| ids.assign(RequestId(key)));
        ids
    }

    #[test]
    fn ranges_come_in_any_order_and_wrap() {
        let first = u32::MAX - 1;
        let mut ids = ids(first, &[10, 11, 12, 13]);
        assert_eq!(completed(&mut ids, 0, 0), [12]);
        assert_eq!(completed(&mut ids, first, u32::MAX), [10, 11]);
        assert_eq!(completed(&mut ids, first, 0), []);
        // One that begins behind what is known.
        assert_eq!(completed(&mut ids, u32::MAX - 9, 1), [13]);
        assert!(ids.is_empty());
        assert_eq!(ids.next(), 2);
    }

    #[test]
    fn a_number_of_nobody_keeps_its_place() {
        let mut ids = ids(0, &[10]);
        // 1 was taken by a send that failed, and comes before 0.
        assert_eq!(completed(&mut ids, 1, 1), []);
        ids.assign(RequestId(12));
        assert_eq!(completed(&mut ids, 0, 1), [10]);
        assert_eq!(completed(&mut ids, 2, 2), [12]);
    }

    #[test]
    fn what_was_skipped_can_be_claimed() {
        let mut ids = ids(5, &[]);
        // 6 is named, so that 5 was taken.
        assert_eq!(completed(&mut ids, 6, 6), []);
        assert_eq!(ids.assign_unknown(5, RequestId(1)), 1);
        assert_eq!(ids.assign_unknown(5, RequestId(1)), 0);
        ids.assign(RequestId(2));
        assert_eq!(completed(&mut ids, 5, 5), [1]);
        assert_eq!(completed(&mut ids, 7, 7), [2]);
        assert!(ids.is_empty());
    }

    #[test]
    fn what_has_been_passed_is_not_claimed_and_what_follows_is() {
        let mut ids = ids(5, &[10]);
        assert_eq!(completed(&mut ids, 5, 5), [10]);
        // Of 5 to 7 the first has been passed, and 7 is named.
        assert_eq!(completed(&mut ids, 7, 7), []);
        assert_eq!(ids.assign_unknown(5, RequestId(1)), 1);
        assert_eq!(completed(&mut ids, 6, 6), [1]);
        assert!(ids.is_empty());
    }

    #[test]
    fn what_nobody_claims_is_not_waited_for() {
        let mut ids = ids(0, &[]);
        assert_eq!(completed(&mut ids, 3, 3), []);
        ids.forget_unknown();
        assert!(ids.is_empty());
        assert_eq!(completed(&mut ids, 0, 2), []);
        assert_eq!(ids.next(), 4);
    }

    #[test]
    fn a_number_that_is_held_keeps_nothing_of_its_followers() {
        let mut ids = ids(u32::MAX - 500, &[7]);
        for _ in 0..100_000 {
            let number = ids.next();
            ids.assign(RequestId(8));
            ids.assign(RequestId(9));
            let after = number.wrapping_add(1);
            assert_eq!(completed(&mut ids, after, after), [9]);
            assert_eq!(completed(&mut ids, number, number), [8]);
        }
        assert_eq!(ids.outstanding.len(), 1);
        assert!(ids.outstanding.capacity() < 16);
        assert_eq!(completed(&mut ids, u32::MAX - 500, u32::MAX - 500), [7]);
        assert!(ids.is_empty());
    }

    #[test]
    fn the_first_number_is_learnt_from_names() {
        for start in [0, 7, u32::MAX - 1] {
            let at = |offset: u32| start.wrapping_add(offset);
            let mut ids = NotificationIds::default();
            ids.start(None);
            (10..14).for_each(|key| ids.assign(RequestId(key)));
            // IdOwner these are depends on where the others lie.
            assert!(!ids.learn_first(at(1), at(1)));
            assert!(!ids.learn_first(at(3), at(3)));
            assert!(!ids.first_is_known());
            assert!(ids.learn_first(at(0), at(0)));
            let freed = [1, 3, 0].map(|offset| completed(&mut ids, at(offset), at(offset)));
            assert_eq!(freed, [[11], [13], [10]]);
            assert_eq!(completed(&mut ids, at(2), at(2)), [12]);
            assert_eq!(ids.next(), at(4));
        }
    }

    #[test]
    fn what_was_named_together_with_older_ones_is_the_last_of_them() {
        let mut ids = NotificationIds::default();
        ids.start(None);
        ids.assign(RequestId(1));
        ids.assign(RequestId(2));
        assert!(ids.learn_first(90, 100));
        assert_eq!(completed(&mut ids, 90, 100), [1, 2]);
        assert_eq!(ids.next(), 101);
    }

    #[test]
    fn a_name_far_ahead_is_refused() {
        let mut ids = ids(0, &[10]);
        assert!(!ids.complete(MAX_AHEAD + 1, MAX_AHEAD + 1, |_| panic!("nobody's")));
        assert_eq!(ids.next(), 1);
    }
}
