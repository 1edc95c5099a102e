//! Zero-copy sends of one TCP connection: when they are used, and what they hold until the kernel
//! reports them.
//!
//! # Invariants
//! - A chain of which the kernel may read bytes is completed only after the sends that took them were
//!   reported, or after a reset has made the kernel drop them.
//! - No send begins without a copy while the oldest one in flight is older than half of the hold limit.

use std::collections::VecDeque;
use std::time::Duration;

use zerosock_proto::Instant;
use zerosock_ring::Chain;
use zerosock_zc::Completion;
use zerosock_zc::notifications::CopyFeedback;

use crate::routing::forward::ZeroCopy;

/// Most sends in flight of one connection.
const MAX_SENDS: usize = 64;

/// A send that the kernel has taken.
#[derive(Debug)]
struct Sent {
    since: Instant,
    reported: bool,
}

/// See the [module](self).
#[derive(Debug)]
pub(in crate::device) struct ZeroCopySends {
    feedback: CopyFeedback,
    /// Copies of the kernel change nothing.
    always: bool,
    /// Sends from the oldest one that was not reported.
    sends: VecDeque<Sent>,
    /// Number of the first of `sends`.
    first: u32,
    /// Chains that the guest's bytes are used up of, with the number of the last send that took some.
    chains: VecDeque<(u32, Chain)>,
    /// Whether the socket can send without a copy; `None`: it was not asked yet.
    pub(in crate::device) permitted: Option<bool>,
    /// The kernel has numbered a send.
    pub(in crate::device) numbered: bool,
    /// The socket resets the connection when it is closed, also by the end of the process.
    pub(in crate::device) aborts: bool,
    /// When the connection is reset if sends are in flight still: their ring is gone.
    pub(in crate::device) ends_by: Option<Instant>,
}

impl ZeroCopySends {
    /// `None`: the connection never sends without a copy.
    pub(in crate::device) fn new(option: ZeroCopy) -> Option<ZeroCopySends> {
        let (feedback, always) = match option {
            ZeroCopy::Never => return None,
            ZeroCopy::Auto => (CopyFeedback::beginning_with_a_pause(), false),
            ZeroCopy::Always => (CopyFeedback::beginning_in_place(), true),
        };
        Some(ZeroCopySends {
            feedback,
            always,
            sends: VecDeque::new(),
            first: 0,
            chains: VecDeque::new(),
            permitted: None,
            numbered: false,
            aborts: false,
            ends_by: None,
        })
    }

    /// Whether the kernel may still read bytes of the guest.
    pub(in crate::device) fn in_flight(&self) -> bool {
        !self.sends.is_empty()
    }

    /// Chains that wait for reports.
    pub(in crate::device) fn chains(&self) -> impl Iterator<Item = &Chain> {
        self.chains.iter().map(|(_, chain)| chain)
    }

    /// Whether the next send, of this many chains, may be one without a copy. `limit`: the age from
    /// which on a send is slow.
    pub(in crate::device) fn may_send(
        &mut self,
        chains: usize,
        now: Instant,
        limit: Duration,
    ) -> bool {
        let oldest = self.sends.front();
        if oldest.is_some_and(|oldest| oldest.since + limit <= now) {
            self.feedback.back_off();
        }
        self.permitted != Some(false)
            && self.sends.len() < self.feedback.most_in_flight(MAX_SENDS)
            && self.chains.try_reserve(chains).is_ok()
            && self.sends.try_reserve(1).is_ok()
    }

    /// The kernel has taken bytes of a send without a copy.
    pub(in crate::device) fn sent(&mut self, now: Instant) {
        self.numbered = true;
        self.sends.push_back(Sent {
            since: now,
            reported: false,
        });
    }

    /// Bytes were sent by copy.
    pub(in crate::device) fn copied(&mut self, bytes: usize) {
        self.feedback.copied(bytes);
    }

    /// The kernel has refused a send without a copy.
    pub(in crate::device) fn refused(&mut self) {
        self.feedback.refused();
    }

    /// Keeps a chain that is used up, until all sends so far were reported.
    pub(in crate::device) fn keep(&mut self, chain: Chain) {
        let last = self.first.wrapping_add(self.sends.len() as u32);
        self.chains.push_back((last.wrapping_sub(1), chain));
    }

    /// Notes a report of the kernel. [`pop`](Self::pop) returns the chains that are free then.
    pub(in crate::device) fn reported(&mut self, range: Completion, now: Instant, limit: Duration) {
        let (mut known, mut slow) = (0, false);
        for (index, sent) in self.sends.iter_mut().enumerate() {
            let number = self.first.wrapping_add(index as u32);
            if number.wrapping_sub(range.lo) < range.count() {
                sent.reported = true;
                known += 1;
                slow |= sent.since + limit <= now;
            }
        }
        if slow {
            self.feedback.back_off();
        } else if known > 0 {
            self.feedback.reported(known, range.copied && !self.always);
        }
        while self.sends.front().is_some_and(|sent| sent.reported) {
            self.sends.pop_front();
            self.first = self.first.wrapping_add(1);
        }
    }

    /// Removes the oldest chain if the kernel does not read it any more.
    pub(in crate::device) fn pop(&mut self) -> Option<Chain> {
        let &(last, _) = self.chains.front()?;
        // Sends in flight have numbers from `first` on.
        let in_flight = last.wrapping_sub(self.first) < self.sends.len() as u32;
        match in_flight {
            true => None,
            false => self.chains.pop_front().map(|(_, chain)| chain),
        }
    }

    /// Forgets the chains, because their ring is gone.
    pub(in crate::device) fn forget_chains(&mut self) {
        self.chains.clear();
    }

    /// Forgets all sends, of a socket that is reset. [`pop`](Self::pop) returns all chains then.
    pub(in crate::device) fn forget(&mut self) {
        self.first = self.first.wrapping_add(self.sends.len() as u32);
        self.sends.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::outbound::tests::chains;

    const LIMIT: Duration = Duration::from_millis(10);

    fn at(ms: u64) -> Instant {
        Instant::ZERO + Duration::from_millis(ms)
    }

    fn range(lo: u32, hi: u32, copied: bool) -> Completion {
        Completion { lo, hi, copied }
    }

    fn sends(option: ZeroCopy) -> ZeroCopySends {
        ZeroCopySends::new(option).unwrap()
    }

    /// Copies until a send without a copy may be made; returns how many MiB.
    fn copy_until_probe(sends: &mut ZeroCopySends, now: Instant) -> usize {
        let mut copied = 0;
        while !sends.may_send(1, now, LIMIT) {
            sends.copied(1 << 20);
            copied += 1;
            assert!(copied <= 1024);
        }
        copied
    }

    #[test]
    fn auto_probes_one_send_and_goes_on_if_it_pays() {
        let mut sends = sends(ZeroCopy::Auto);
        assert_eq!(copy_until_probe(&mut sends, at(0)), 1);
        sends.sent(at(0));
        assert!(!sends.may_send(1, at(1), LIMIT), "a second probe");
        sends.reported(range(0, 0, false), at(9), LIMIT);
        for _ in 0..MAX_SENDS {
            assert!(sends.may_send(1, at(9), LIMIT));
            sends.sent(at(9));
        }
        assert!(!sends.may_send(1, at(9), LIMIT), "too many in flight");
    }

    #[test]
    fn each_report_that_is_bad_doubles_the_pause() {
        for slow in [false, true] {
            let mut sends = sends(ZeroCopy::Auto);
            let mut now = 0;
            let mut pauses = Vec::new();
            for number in 0..13 {
                pauses.push(copy_until_probe(&mut sends, at(now)));
                sends.sent(at(now));
                now += if slow { 10 } else { 1 };
                sends.reported(range(number, number, !slow), at(now), LIMIT);
            }
            assert_eq!(pauses[..4], [1, 2, 4, 8]);
            assert_eq!(pauses[10..], [1024; 3]);
        }
    }

    #[test]
    fn no_send_is_made_while_the_oldest_is_slow() {
        let mut sends = sends(ZeroCopy::Always);
        sends.sent(at(0));
        assert!(sends.may_send(1, at(9), LIMIT));
        assert!(!sends.may_send(1, at(10), LIMIT));
        // The pause is over, and the send is still in flight.
        sends.copied(1 << 20);
        assert!(!sends.may_send(1, at(11), LIMIT));
        sends.reported(range(0, 0, true), at(12), LIMIT);
        assert_eq!(copy_until_probe(&mut sends, at(12)), 2);
        // `always` takes no notice of copies of the kernel.
        sends.sent(at(12));
        sends.reported(range(1, 1, true), at(13), LIMIT);
        assert!(sends.may_send(1, at(13), LIMIT));
    }

    #[test]
    fn chains_are_free_when_all_sends_up_to_theirs_were_reported() {
        let (_memory, _queue, chains) = chains(4);
        let mut sends = sends(ZeroCopy::Always);
        // Ids wrap.
        sends.first = u32::MAX;
        for chain in chains {
            sends.sent(at(0));
            sends.keep(chain);
        }
        let free = |sends: &mut ZeroCopySends, lo, hi| {
            sends.reported(range(lo, hi, false), at(1), LIMIT);
            std::iter::from_fn(|| sends.pop()).count()
        };
        // Ids that are not in flight.
        assert_eq!(free(&mut sends, 3, u32::MAX - 1), 0);
        // The second and third, before the first.
        assert_eq!(free(&mut sends, 0, 1), 0);
        assert_eq!((sends.chains().count(), sends.in_flight()), (4, true));
        assert_eq!(free(&mut sends, u32::MAX, u32::MAX), 3);
        assert_eq!(free(&mut sends, u32::MAX, 1), 0, "reported before");
        assert_eq!(free(&mut sends, 2, 2), 1);
        assert_eq!((sends.chains().count(), sends.in_flight()), (0, false));
    }

    #[test]
    fn all_chains_are_free_after_a_reset() {
        let (_memory, _queue, chains) = chains(2);
        let mut sends = sends(ZeroCopy::Always);
        for chain in chains {
            sends.sent(at(0));
            sends.keep(chain);
        }
        assert!(sends.pop().is_none());
        sends.forget();
        assert_eq!(std::iter::from_fn(|| sends.pop()).count(), 2);
        assert!(!sends.in_flight());
    }
}
