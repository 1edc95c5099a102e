//! When to connect to which address of a name: Happy Eyeballs (RFC 8305), without I/O or a clock.
//!
//! Drive it so: [`Schedule::on_answer`] when a family has an answer, [`Schedule::start`] at the time that
//! [`Schedule::next_attempt`] gives, and [`Schedule::on_failure`] when an attempt fails. The attempts are
//! over when [`Schedule::is_exhausted`].

use std::collections::VecDeque;
use std::net::IpAddr;
use std::time::Duration;

use tokio::time::Instant;

use crate::resolve::Family;

/// How long an IPv4 answer waits for an IPv6 one (RFC 8305, 8: Resolution Delay).
pub(super) const RESOLUTION_DELAY: Duration = Duration::from_millis(50);
/// Time from one attempt to the next (RFC 8305, 8: Connection Attempt Delay).
pub(super) const ATTEMPT_DELAY: Duration = Duration::from_millis(250);
/// Attempts of one request.
pub(super) const MAX_ATTEMPTS: usize = 16;

/// The addresses that are left to try, and when to try the next.
#[derive(Debug)]
pub(super) struct Schedule {
    v4: Queue,
    v6: Queue,
    /// The family of the next attempt, if it has an address.
    next: Family,
    /// The time before which no attempt starts.
    not_before: Option<Instant>,
    started: usize,
}

#[derive(Debug, Default)]
struct Queue {
    addresses: VecDeque<IpAddr>,
    answered: bool,
}

impl Schedule {
    pub(super) fn new() -> Self {
        Schedule {
            v4: Queue::default(),
            v6: Queue::default(),
            next: Family::V6,
            not_before: None,
            started: 0,
        }
    }

    /// The permitted addresses of a family are known; none, if the lookup failed.
    pub(super) fn on_answer(&mut self, now: Instant, family: Family, addresses: Vec<IpAddr>) {
        let queue = self.queue(family);
        queue.answered = true;
        queue.addresses.extend(addresses);
        if self.started == 0 {
            self.not_before = match family {
                Family::V4 if !self.v6.answered => Some(now + RESOLUTION_DELAY),
                _ => None,
            };
        }
    }

    /// An attempt failed: the next one does not wait (RFC 8305, 5).
    pub(super) fn on_failure(&mut self) {
        self.not_before = None;
    }

    /// When to start the next attempt: `now` or later. None if there is no address to try now.
    pub(super) fn next_attempt(&self, now: Instant) -> Option<Instant> {
        let any = !self.v4.addresses.is_empty() || !self.v6.addresses.is_empty();
        let more = any && self.started < MAX_ATTEMPTS;
        more.then(|| self.not_before.map_or(now, |time| time.max(now)))
    }

    /// Takes the address of the next attempt; the families take turns, IPv6 first.
    pub(super) fn start(&mut self, now: Instant) -> Option<IpAddr> {
        let (first, second) = match self.next {
            Family::V6 => (&mut self.v6, &mut self.v4),
            Family::V4 => (&mut self.v4, &mut self.v6),
        };
        let (address, next) = match first.addresses.pop_front() {
            Some(address) => (address, other(self.next)),
            None => (second.addresses.pop_front()?, self.next),
        };
        self.next = next;
        self.started += 1;
        self.not_before = Some(now + ATTEMPT_DELAY);
        Some(address)
    }

    /// Whether an answer of the family is known.
    pub(super) fn has_answer(&self, family: Family) -> bool {
        match family {
            Family::V4 => self.v4.answered,
            Family::V6 => self.v6.answered,
        }
    }

    /// Whether no answer is missing.
    pub(super) fn is_answered(&self) -> bool {
        self.v4.answered && self.v6.answered
    }

    /// Whether no attempt is left to start.
    pub(super) fn is_exhausted(&self) -> bool {
        let empty = self.v4.addresses.is_empty() && self.v6.addresses.is_empty();
        self.started >= MAX_ATTEMPTS || empty && self.is_answered()
    }

    /// Whether an attempt was started.
    pub(super) fn has_started(&self) -> bool {
        self.started > 0
    }

    fn queue(&mut self, family: Family) -> &mut Queue {
        match family {
            Family::V4 => &mut self.v4,
            Family::V6 => &mut self.v6,
        }
    }
}

fn other(family: Family) -> Family {
    match family {
        Family::V4 => Family::V6,
        Family::V6 => Family::V4,
    }
}

#[cfg(test)]
#[path = "schedule_tests.rs"]
mod tests;
