//! The sender's side of the flow control: to whom nothing is to be sent for a while.
//!
//! What must hold: only the destination that asked for it is blocked; there are at most
//! [`PausedDestinations::MAX`] blocks, and of one endpoint at most [`PausedDestinations::MAX_PER_ENDPOINT`], so that one that
//! floods us with words about its own ports costs itself alone; beyond that a STOP is not heeded,
//! and what is sent may be lost. None lasts longer than it is repeated.

use hashbrown::HashMap;

use super::quota::EndpointQuota;
use super::{PauseSource, STOP_DURATION};
use crate::addr::{Address, Port};
use crate::time::Instant;

/// Why nothing is to be sent to a destination.
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
pub enum PauseReason {
    /// It has enough, and says when it has room; or a queue on the way does.
    Full(PauseSource),
    /// Nobody there takes datagrams.
    Unsupported,
}

/// See the module.
#[derive(Debug, Default)]
pub struct PausedDestinations {
    deadlines: HashMap<(Port, Address), PauseDeadlines>,
    quota: EndpointQuota,
    /// Not later than the first that ends.
    next: Option<Instant>,
}

/// When each kind of block ends.
#[derive(Copy, Clone, Debug, Default)]
struct PauseDeadlines {
    receiver: Option<Instant>,
    switch: Option<Instant>,
    unsupported: Option<Instant>,
}

impl PauseDeadlines {
    fn of(&mut self, reason: PauseReason) -> &mut Option<Instant> {
        match reason {
            PauseReason::Full(PauseSource::Receiver) => &mut self.receiver,
            PauseReason::Full(PauseSource::Switch) => &mut self.switch,
            PauseReason::Unsupported => &mut self.unsupported,
        }
    }

    fn all(&self) -> [(PauseReason, Option<Instant>); 3] {
        [
            (PauseReason::Unsupported, self.unsupported),
            (PauseReason::Full(PauseSource::Receiver), self.receiver),
            (PauseReason::Full(PauseSource::Switch), self.switch),
        ]
    }

    /// Forgets what is over; when the first of the rest is.
    fn expire(&mut self, now: Instant) -> Option<Instant> {
        for (reason, until) in self.all() {
            if until.is_some_and(|at| at <= now) {
                *self.of(reason) = None;
            }
        }
        self.all().into_iter().filter_map(|(_, until)| until).min()
    }
}

impl PausedDestinations {
    /// Most destinations that are blocked at once.
    pub const MAX: usize = 1024;
    /// Most of them that are of one endpoint.
    pub const MAX_PER_ENDPOINT: usize = 64;

    /// Nobody is blocked.
    pub fn new() -> PausedDestinations {
        PausedDestinations::default()
    }

    /// Whether nobody is: to be asked first, as it needs no clock.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.deadlines.is_empty()
    }

    /// How many are.
    pub fn len(&self) -> usize {
        self.deadlines.len()
    }

    /// Why nothing is to be sent from our port `from` to `source` now.
    pub fn reason(&self, now: Instant, from: Port, to: Address) -> Option<PauseReason> {
        let all = self.deadlines.get(&(from, to))?.all().into_iter();
        let mut in_force = all.filter(|(_, until)| until.is_some_and(|at| at > now));
        in_force.next().map(|(reason, _)| reason)
    }

    /// `by` has said STOP to our port `port`. False: it is not heeded. What is over takes up room
    /// until it is [ended](Self::expire), which alone names who waits for it.
    pub fn pause(&mut self, now: Instant, port: Port, by: Address, reason: PauseReason) -> bool {
        let until = now + STOP_DURATION;
        if let Some(known) = self.deadlines.get_mut(&(port, by)) {
            *known.of(reason) = Some(until);
            return true;
        }
        if self.deadlines.len() >= PausedDestinations::MAX
            || !self
                .quota
                .take(by.cid, PausedDestinations::MAX_PER_ENDPOINT)
        {
            return false;
        }
        let mut new = PauseDeadlines::default();
        *new.of(reason) = Some(until);
        self.deadlines.insert((port, by), new);
        self.next = Some(self.next.map_or(until, |next| next.min(until)));
        true
    }

    /// `by` has said START to our port `port`. True: nothing of it is blocked any more, and was.
    pub fn resume(&mut self, port: Port, by: Address, place: PauseSource) -> bool {
        let Some(known) = self.deadlines.get_mut(&(port, by)) else {
            return false;
        };
        *known.of(PauseReason::Full(place)) = None;
        let free = known.all().iter().all(|(_, until)| until.is_none());
        if free {
            self.deadlines.remove(&(port, by));
            self.quota.release(by.cid);
        }
        free
    }

    /// When the next block may end by itself.
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.next.filter(|_| !self.deadlines.is_empty())
    }

    /// Ends what has lasted long enough; names the ports of ours that may send again.
    pub fn expire(&mut self, now: Instant, mut ended: impl FnMut(Port)) {
        if self.next.is_none_or(|at| at > now) {
            return;
        }
        let mut next: Option<Instant> = None;
        self.deadlines.retain(|(port, by), until| {
            let first = until.expire(now);
            match (first, next) {
                (None, _) => {
                    self.quota.release(by.cid);
                    ended(*port);
                }
                (Some(first), Some(at)) => next = Some(at.min(first)),
                (first, None) => next = first,
            }
            first.is_some()
        });
        self.next = next;
    }

    /// Nobody of whom `gone` says so is blocked any more.
    pub fn forget(&mut self, gone: impl Fn(Port, Address) -> bool) {
        self.deadlines.retain(|(port, by), _| {
            let gone = gone(*port, *by);
            if gone {
                self.quota.release(by.cid);
            }
            !gone
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::addr::Cid;

    fn at(cid: u32, port: u32) -> Address {
        Address::new(Cid::new(cid), Port::new(port))
    }

    const OURS: Port = Port::new(7);
    const FULL: PauseReason = PauseReason::Full(PauseSource::Receiver);

    #[test]
    fn a_block_is_of_one_destination_and_ends_by_itself() {
        let mut paused = PausedDestinations::new();
        let now = Instant::ZERO;
        assert!(paused.pause(now, OURS, at(3, 1), FULL));
        assert_eq!(paused.reason(now, OURS, at(3, 1)), Some(FULL));
        assert_eq!(paused.reason(now, OURS, at(3, 2)), None);
        assert_eq!(paused.reason(now, OURS, at(4, 1)), None);
        assert_eq!(paused.reason(now, Port::new(8), at(3, 1)), None);
        let end = now + STOP_DURATION;
        assert_eq!(paused.poll_timeout(), Some(end));
        assert_eq!(
            paused.reason(end, OURS, at(3, 1)),
            None,
            "whoever looks or not"
        );
        let mut ended = Vec::new();
        paused.expire(end, |port| ended.push(port));
        assert_eq!((ended, paused.len()), (vec![OURS], 0));
    }

    #[test]
    fn a_repeated_stop_lasts_and_a_start_ends_it() {
        let mut paused = PausedDestinations::new();
        let (zero, later) = (Instant::ZERO, Instant::ZERO + STOP_DURATION / 2);
        paused.pause(zero, OURS, at(3, 1), FULL);
        paused.pause(later, OURS, at(3, 1), FULL);
        paused.expire(zero + STOP_DURATION, |_| panic!("too early"));
        assert!(
            paused.resume(OURS, at(3, 1), PauseSource::Receiver)
                && !paused.resume(OURS, at(3, 1), PauseSource::Receiver)
        );
        assert!(paused.is_empty() && paused.poll_timeout().is_none());
    }

    #[test]
    fn a_receiver_and_the_way_to_it_are_blocked_each_by_itself() {
        let mut paused = PausedDestinations::new();
        let (now, to) = (Instant::ZERO, at(3, 1));
        let way = PauseReason::Full(PauseSource::Switch);
        paused.pause(now, OURS, to, FULL);
        paused.pause(now, OURS, to, way);
        assert!(!paused.resume(OURS, to, PauseSource::Switch));
        assert_eq!(paused.reason(now, OURS, to), Some(FULL), "still");
        paused.pause(now, OURS, to, way);
        assert!(!paused.resume(OURS, to, PauseSource::Receiver));
        assert_eq!(paused.reason(now, OURS, to), Some(way));
        assert!(paused.resume(OURS, to, PauseSource::Switch));
        assert_eq!(paused.reason(now, OURS, to), None);
    }

    #[test]
    fn a_flood_costs_its_sender_alone() {
        let mut paused = PausedDestinations::new();
        let now = Instant::ZERO;
        for port in 0..10_000 {
            paused.pause(now, OURS, at(3, port), FULL);
        }
        assert_eq!(paused.len(), PausedDestinations::MAX_PER_ENDPOINT);
        assert!(paused.pause(now, OURS, at(4, 1), FULL));
        for cid in 5..100 {
            (0..100).for_each(|port| {
                paused.pause(now, OURS, at(cid, port), FULL);
            });
        }
        assert_eq!(paused.len(), PausedDestinations::MAX);
        let later = now + STOP_DURATION;
        let mut named = 0;
        paused.expire(later, |_| named += 1);
        assert_eq!(named, PausedDestinations::MAX);
        assert!(paused.pause(later, OURS, at(3, 70_000), FULL));
        assert_eq!(paused.len(), 1, "those that are over make room");
    }
}
