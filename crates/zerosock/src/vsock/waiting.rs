//! The wait modes of blocking calls, and the spin time of the adaptive one.
//!
//! Spinning sees an event after one cache line transfer between two cores. Sleeping uses no CPU but
//! costs two system calls and a wake-up. The adaptive mode spins for a time that it derives from
//! the length of recent waits, as KVM's halt polling does.

use std::time::Duration;

/// How a blocking call waits.
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
    /// Polls in a loop and never sleeps: uses a whole core while the call waits.
    Spin,
    /// Spins for a time that adapts to recent waits, at most `limit`; then sleeps. On an idle
    /// endpoint the spin time falls to zero.
    Adaptive {
        /// Longest spin time of one wait.
        limit: Duration,
    },
}

impl Wait {
    /// Spins for up to 200 microseconds: a few times the cost of a sleep and a wake-up.
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

/// The first nonzero spin time of the adaptive mode.
const FIRST: Duration = Duration::from_micros(5);

/// The adaptive spin time.
#[derive(Debug, Default)]
pub(crate) struct SpinTime(Duration);

impl SpinTime {
    /// How long to spin; `None`: without limit.
    pub(crate) fn budget(&self, wait: Wait) -> Option<Duration> {
        match wait {
            Wait::Sleep => Some(Duration::ZERO),
            Wait::Spin => None,
            Wait::Adaptive { limit } => Some(self.0.min(limit)),
        }
    }

    /// Adapts to a wait that lasted `waited`; `slept`: it outlasted the spin time.
    pub(crate) fn record(&mut self, wait: Wait, waited: Duration, slept: bool) {
        let Wait::Adaptive { limit } = wait else {
            return;
        };
        if !slept {
            return;
        }
        self.0 = if waited > limit {
            // Spinning up to the limit would not have helped: spin less next time.
            self.0 / 2
        } else {
            // A longer spin would have saved the sleep.
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
    fn adaptive_spin_time_grows_with_short_waits_and_falls_with_long_ones() {
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
            "no sleep: no change"
        );
        for _ in 0..10 {
            spin_time.record(wait, Duration::from_millis(5), true);
        }
        assert_eq!(spin_time.budget(wait), Some(Duration::ZERO), "idle: no CPU");
    }

    #[test]
    fn spin_time_of_sleep_and_spin_modes_is_constant() {
        let mut spin_time = SpinTime::default();
        spin_time.record(Wait::Sleep, MICRO, true);
        spin_time.record(Wait::Spin, MICRO, true);
        assert_eq!(spin_time.budget(Wait::Sleep), Some(Duration::ZERO));
        assert_eq!(spin_time.budget(Wait::Spin), None);
    }
}
