//! What the programs of a long run share.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use zerosock_cli::vm::pattern::Pattern;

/// The name of the subcommand.
pub const NAME: &str = "soak";
/// Guests that are always there, and all of them: a reload adds and removes the last one.
pub(super) const STEADY: [u32; 3] = [3, 4, 5];
pub(super) const GUESTS: [u32; 4] = [3, 4, 5, 6];
/// Longer than any call takes on a busy machine.
pub(super) const HANG: Duration = Duration::from_secs(60);
/// How long after an event's end connections may still end because of it, in seconds.
pub(super) const AFTER: f64 = 1.0;

/// Random numbers that a seed repeats.
pub(super) struct Random(Pattern);

impl Random {
    pub(super) fn new(seed: u64) -> Random {
        Random(Pattern::new(seed))
    }

    pub(super) fn next(&mut self) -> u64 {
        let mut bytes = [0; 8];
        self.0.fill(&mut bytes);
        u64::from_le_bytes(bytes)
    }

    /// A number below `limit`; 0 for none.
    pub(super) fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit.max(1)
    }

    pub(super) fn guest(&mut self) -> u32 {
        GUESTS[self.below(GUESTS.len() as u64) as usize]
    }
}

/// Seconds of a clock that all processes share.
pub(super) fn now() -> f64 {
    let time = clock_gettime(ClockId::Monotonic);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}
