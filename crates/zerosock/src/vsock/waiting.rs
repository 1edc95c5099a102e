//! The three ways to wait, and how long the adaptive one spins.
//!
//! Spinning sees ready_flags within a cache line's way between two cores; sleeping costs no CPU but two
//! system calls and a wake-up. The adaptive way spins as long as that has lately paid: it learns
//! from how long waits were, as the polling of halted virtual CPUs in KVM does.

use std::time::Duration;

/// How a call that has to wait does so.
///
/// ```
/// use std::io::Write;
/// use std::time::Duration;
/// use zerosock::vsock::Wait;
///
/// # let (host, process) = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/pair.rs"));
/// process.set_wait(Wait::Spin);
/// host.set_wait(Wait::Adaptive { limit: Duration::from_micros(50) });
/// (&process).write_all(b"ping")?;
/// host.recv()?;
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub enum Wait {
    /// Sleeps until the peer notifies.
    Sleep,
    /// Looks again and again, and never sleeps: takes a core for as long as the call waits.
    Spin,
    /// Spins for a time that it learns, at most `limit`; then sleeps. An endpoint that nothing
    /// happens to comes to spin for no time at all.
    Adaptive {
        /// The longest that it spins in one wait.
        limit: Duration,
    },
}

impl Wait {
    /// Spins for up to 200 microseconds: a few times what a sleep and a wake-up cost.
    pub const ADAPTIVE: Wait = Wait::Adaptive {
        limit: Duration::from_micros(200),
    };
}

impl Default for Wait {
    /// [`Wait::Sleep`].
    fn default() -> Wait {
        Wait::Sleep
    }
}

/// What the adaptive way begins with, once it has seen that spinning would have paid.
const FIRST: Duration = Duration::from_micros(5);

/// The time that has lately been worth spinning.
#[derive(Debug, Default)]
pub(crate) struct SpinTime(Duration);

impl SpinTime {
    /// How long to spin now; `None`: for ever.
    pub(crate) fn budget(&self, wait: Wait) -> Option<Duration> {
        match wait {
            Wait::Sleep => Some(Duration::ZERO),
            Wait::Spin => None,
            Wait::Adaptive { limit } => Some(self.0.min(limit)),
        }
    }

    /// A wait has lasted `waited`, and was longer than the time to spin if `slept`.
    pub(crate) fn record(&mut self, wait: Wait, waited: Duration, slept: bool) {
        let Wait::Adaptive { limit } = wait else {
            return;
        };
        if !slept {
            return;
        }
        self.0 = if waited > limit {
            // No spinning within the limit would have helped. Less is spent on the next wait.
            self.0 / 2
        } else {
            // A longer look would have saved the sleep.
            (self.0 * 2).max(FIRST).min(limit)
        };
        if self.0 < FIRST / 2 {
            self.0 = Duration::ZERO;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MICRO: Duration = Duration::from_micros(1);

    #[test]
    fn short_waits_teach_to_spin_and_long_ones_not_to() {
        let mut spin_time = SpinTime::default();
        let wait = Wait::ADAPTIVE;
        assert_eq!(spin_time.budget(wait), Some(Duration::ZERO));
        for _ in 0..10 {
            spin_time.record(wait, 20 * MICRO, true);
        }
        assert_eq!(spin_time.budget(wait), Some(200 * MICRO));
        spin_time.record(wait, 10 * MICRO, false);
        assert_eq!(
            spin_time.budget(wait),
            Some(200 * MICRO),
            "it pays: no change"
        );
        for _ in 0..10 {
            spin_time.record(wait, Duration::from_millis(5), true);
        }
        assert_eq!(spin_time.budget(wait), Some(Duration::ZERO), "idle: no CPU");
    }

    #[test]
    fn the_other_two_do_not_learn() {
        let mut spin_time = SpinTime::default();
        spin_time.record(Wait::Sleep, MICRO, true);
        spin_time.record(Wait::Spin, MICRO, true);
        assert_eq!(spin_time.budget(Wait::Sleep), Some(Duration::ZERO));
        assert_eq!(spin_time.budget(Wait::Spin), None);
    }
}
