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

/// The order of addresses that earlier connects have shown.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub(super) struct Order {
    /// Tried before all others, without a delay.
    pub(super) first: Option<IpAddr>,
    /// Tried after all others, in this order.
    pub(super) last: Vec<IpAddr>,
}

/// The addresses that are left to try, and when to try the next.
#[derive(Debug)]
pub(super) struct Schedule {
    order: Order,
    /// The first of `order`, if an answer has it.
    first: Option<IpAddr>,
    v4: Queue,
    v6: Queue,
    /// Those of the last in `order` that an answer has.
    last: VecDeque<IpAddr>,
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
    pub(super) fn new(order: Order) -> Self {
        Schedule {
            order,
            first: None,
            last: VecDeque::new(),
            v4: Queue::default(),
            v6: Queue::default(),
            next: Family::V6,
            not_before: None,
            started: 0,
        }
    }

    /// The permitted addresses of a family are known; none, if the lookup failed.
    pub(super) fn on_answer(&mut self, now: Instant, family: Family, mut addresses: Vec<IpAddr>) {
        let known = |address: &IpAddr| addresses.contains(address);
        let first = self.order.first.filter(known);
        let of_last = self.order.last.iter().copied();
        self.last.extend(of_last.filter(known));
        // Again in the given order, whichever family was answered first.
        let rank = |address: &IpAddr| self.order.last.iter().position(|other| other == address);
        self.last.make_contiguous().sort_by_key(rank);
        addresses.retain(|address| Some(*address) != first && rank(address).is_none());
        self.first = self.first.or(first);
        let queue = self.queue(family);
        queue.answered = true;
        queue.addresses.extend(addresses);
        if first.is_some() {
            self.not_before = None;
        } else if self.started == 0 && self.first.is_none() {
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
        let any = self.has_untried() || !self.last.is_empty() && self.is_answered();
        let more = any && self.started < MAX_ATTEMPTS;
        more.then(|| self.not_before.map_or(now, |time| time.max(now)))
    }

    /// Takes the address of the next attempt; the families take turns, IPv6 first.
    pub(super) fn start(&mut self, now: Instant) -> Option<IpAddr> {
        let (next, then) = match self.next {
            Family::V6 => (&mut self.v6, &mut self.v4),
            Family::V4 => (&mut self.v4, &mut self.v6),
        };
        let address = if let Some(address) = self.first.take() {
            self.next = other(Family::of(address));
            address
        } else if let Some(address) = next.addresses.pop_front() {
            self.next = other(self.next);
            address
        } else {
            let address = then.addresses.pop_front();
            address.or_else(|| self.last.pop_front())?
        };
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
        let empty = !self.has_untried() && self.last.is_empty();
        self.started >= MAX_ATTEMPTS || empty && self.is_answered()
    }

    /// Whether an address is left that is none of the last.
    fn has_untried(&self) -> bool {
        self.first.is_some() || !self.v4.addresses.is_empty() || !self.v6.addresses.is_empty()
    }

    /// Whether there is, or may be, an address to prefer to those that were tried.
    pub(super) fn has_alternative(&self) -> bool {
        self.has_untried() || !self.is_answered()
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
