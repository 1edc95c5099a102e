//! The clock of an event loop.

use std::time::{Duration, Instant as StdInstant};
use zerosock_proto::Instant;

/// The clock of a worker: nanoseconds since it was made, in the type of the protocol core.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    start: StdInstant,
}

impl Default for Clock {
    fn default() -> Clock {
        Clock::new()
    }
}

impl Clock {
    /// A clock that starts at zero.
    pub fn new() -> Clock {
        Clock {
            start: StdInstant::now(),
        }
    }

    /// The time now.
    #[inline]
    pub fn now(&self) -> Instant {
        // 2^64 ns are 584 years.
        Instant::from_nanos(self.start.elapsed().as_nanos() as u64)
    }

    /// Converts a time of this clock to the system's type.
    pub fn at(&self, at: Instant) -> StdInstant {
        self.start + Duration::from_nanos(at.as_nanos())
    }
}
