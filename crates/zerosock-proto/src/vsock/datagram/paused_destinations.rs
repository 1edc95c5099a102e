//! The sending side of the flow control: the destinations that receive nothing for a while.
//!
//! # Invariants
//! - Only the destination that sent STOP is paused.
//! - There are at most [`PausedDestinations::MAX`] entries, and at most
//!   [`PausedDestinations::MAX_PER_ENDPOINT`] of one endpoint, so that an endpoint that floods us
//!   with STOP takes entries from no other. STOP beyond a limit is ignored; datagrams may then be
//!   lost.
//! - A pause ends by itself [`STOP_DURATION`] after the last STOP.

use hashbrown::HashMap;

use super::quota::EndpointQuota;
use super::{PauseSource, STOP_DURATION};
use crate::addr::{Address, Port};
use crate::time::Instant;

/// Why a destination is paused.
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
pub enum PauseReason {
    /// A queue is full; START follows when it has space.
    Full(PauseSource),
    /// The endpoint does not support datagrams.
    Unsupported,
}

/// The paused destinations of an endpoint's sockets.
#[derive(Debug, Default)]
pub struct PausedDestinations {
    deadlines: HashMap<(Port, Address), PauseDeadlines>,
    quota: EndpointQuota,
    /// At or before the first deadline; `None` when nothing was added since all were removed.
    next: Option<Instant>,
}

/// The deadline of each reason, when it is in force.
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

    /// Removes the deadlines that have passed; returns the first of the others.
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
    /// Most paused destinations at once.
    pub const MAX: usize = 1024;
    /// Most of them of one endpoint.
    pub const MAX_PER_ENDPOINT: usize = 64;

    /// No destination is paused.
    pub fn new() -> PausedDestinations {
        PausedDestinations::default()
    }

    /// Whether no destination is paused. Ask this first: it needs no clock.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.deadlines.is_empty()
    }

    /// Paused destinations.
    pub fn len(&self) -> usize {
        self.deadlines.len()
    }

    /// The reason why our port `from` must not send to `to` now, if there is one.
    pub fn reason(&self, now: Instant, from: Port, to: Address) -> Option<PauseReason> {
        let all = self.deadlines.get(&(from, to))?.all().into_iter();
        let mut in_force = all.filter(|(_, until)| until.is_some_and(|at| at > now));
        in_force.next().map(|(reason, _)| reason)
    }

    /// The destination `by` has sent STOP to our port `port`. False: a limit is reached and STOP is
    /// ignored. Expired entries count until [`expire`](Self::expire) removes them and names their
    /// ports.
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

    /// The destination `by` has sent START to our port `port`. True: it was paused and no reason is
    /// left.
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

    /// The time of the next call of [`expire`](Self::expire).
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.next.filter(|_| !self.deadlines.is_empty())
    }

    /// Removes the expired entries; calls `ended` with the ports that may send again.
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

    /// Removes every entry for which `gone` is true.
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
#[path = "paused_destinations_tests.rs"]
mod tests;
