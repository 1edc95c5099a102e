//! The event loop: kicks, readable sockets and messages in; work out.
//!
//! A [`worker`] owns devices and shares nothing with other workers: no lock and no hop between
//! cores lies on the way of a packet. It sleeps in one `epoll_wait` and is woken by a guest's
//! kick, a socket's edge, a timer or its [`mailbox`]; [`pulse`] tells whether it makes progress. Devices come and go by message; [`numbers`]
//! tells them apart. What must hold: nothing in here blocks,
//! and every device gets its turn ([`crate::device::Device::turn`] works to a budget).

pub(crate) mod host;
mod intake;
#[cfg(test)]
mod intake_tests;
pub(crate) mod mailbox;
pub(crate) mod messages;
pub(crate) mod numbers;
pub(crate) mod poller;
pub(crate) mod pulse;
pub(crate) mod spin;
#[cfg(test)]
mod turn_tests;
pub(crate) mod worker;

use std::time::{Duration, Instant as StdInstant};
use zerosock_proto::Instant;

/// The clock of a worker: nanoseconds since the worker was made, as the protocol core takes it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clock {
    start: StdInstant,
}

impl Clock {
    pub(crate) fn new() -> Clock {
        Clock {
            start: StdInstant::now(),
        }
    }

    pub(crate) fn now(&self) -> Instant {
        // 2^64 ns are 584 years.
        Instant::from_nanos(self.start.elapsed().as_nanos() as u64)
    }

    /// The system's name for a time of this clock.
    pub(crate) fn at(&self, at: Instant) -> StdInstant {
        self.start + Duration::from_nanos(at.as_nanos())
    }
}
