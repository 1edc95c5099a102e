//! Which zero-copy request took which notification id.
//!
//! The kernel assigns consecutive ids to the zero-copy requests of a socket and reports ranges of
//! ids when it no longer reads their buffers. Ranges can be reported in any order, and ids wrap. A
//! reported id that was not assigned was taken by another sender.
//!
//! The first id can be unknown (`first_id`). No reported id is then matched with a request until
//! the first can be derived. All ids are assumed to be those of this socket, so the first is known
//! as soon as the reported ids span as many ids as were assigned.

use std::collections::VecDeque;

use super::requests::RequestId;

#[derive(Default)]
pub(super) struct NotificationIds {
    /// Ids that were assigned and not reported, in their order. Later ids are removed when they are
    /// reported, also if an earlier one stays for long.
    outstanding: VecDeque<(u32, RequestId)>,
    /// The id that the next request takes.
    next: u32,
    /// The first id is not known yet.
    learning: bool,
    /// The first and the last id that were reported while the first id was not known.
    reported: Option<(u32, u32)>,
}

impl NotificationIds {
    /// Starts with this id, or with one to be learnt.
    pub(super) fn start(&mut self, next: Option<u32>) {
        self.next = next.unwrap_or(0);
        self.learning = next.is_none();
    }

    /// Whether reported ids can be matched with requests.
    pub(super) fn is_first_id_known(&self) -> bool {
        !self.learning
    }

    /// Takes note of a range that was reported while the first id is not known. Returns whether it
    /// is known now.
    pub(super) fn infer_first_id(&mut self, lo: u32, hi: u32) -> bool {
        // Ids wrap: of two, the one that is less than 2^31 behind is earlier.
        let behind = |a: u32, b: u32| b.wrapping_sub(a) < 1 << 31;
        let (first, last) = self.reported.unwrap_or((lo, hi));
        let first = if behind(lo, first) { lo } else { first };
        let last = if behind(last, hi) { hi } else { last };
        self.reported = Some((first, last));
        let outstanding = self.outstanding.len() as u32;
        if last.wrapping_sub(first).saturating_add(1) >= outstanding {
            // Ids before ours belong to an earlier sender.
            let next = last.wrapping_add(1);
            let ahead = next.wrapping_sub(self.next);
            for (id, _) in &mut self.outstanding {
                *id = id.wrapping_add(ahead);
            }
            self.next = next;
            self.learning = false;
        }
        !self.learning
    }

    /// Whether every id that was assigned has been reported.
    pub(super) fn is_empty(&self) -> bool {
        self.outstanding.is_empty()
    }

    /// Assigns the next id to a request.
    pub(super) fn assign(&mut self, request: RequestId) {
        self.outstanding.push_back((self.next, request));
        self.next = self.next.wrapping_add(1);
    }

    /// Whether the last id that was assigned has not been reported.
    pub(super) fn is_last_outstanding(&self) -> bool {
        let last = self.outstanding.back();
        last.is_some_and(|&(id, _)| id == self.next.wrapping_sub(1))
    }

    /// Whether the last id that was assigned is the only one that has not been reported.
    pub(super) fn is_only_last_outstanding(&self) -> bool {
        self.outstanding.len() == 1 && self.is_last_outstanding()
    }

    /// Withdraws the last id, which is outstanding: its request did not take it.
    pub(super) fn withdraw_last(&mut self) {
        if self.outstanding.pop_back().is_some() {
            self.next = self.next.wrapping_sub(1);
        }
    }

    /// Index of the first outstanding id that is at most `behind` before the next id.
    fn position(&self, behind: u64) -> usize {
        let next = self.next;
        self.outstanding
            .partition_point(|(id, _)| u64::from(next.wrapping_sub(*id)) > behind)
    }

    /// Removes the ids from `lo` to `hi`, which the kernel reported, and calls `freed` with the
    /// request of each. Skips ids that were reported before. Returns false if some of them were never
    /// assigned.
    pub(super) fn complete(&mut self, lo: u32, hi: u32, mut freed: impl FnMut(RequestId)) -> bool {
        // Of two ids, the one that is less than 2^31 behind is earlier.
        let is_assigned = |id: u32| id.wrapping_sub(self.next) >= 1 << 31;
        if !is_assigned(lo) {
            return false;
        }
        let all = is_assigned(hi);
        let last = if all { hi } else { self.next.wrapping_sub(1) };
        let behind = u64::from(self.next.wrapping_sub(last));
        let first = self.position(behind + u64::from(last.wrapping_sub(lo)));
        let end = self.position(behind - 1);
        for (_, request) in self.outstanding.drain(first..end.max(first)) {
            freed(request);
        }
        all
    }
}

#[cfg(test)]
#[path = "notification_ids_tests.rs"]
mod tests;
