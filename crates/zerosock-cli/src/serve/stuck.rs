//! Logs a warning when closing a peer's descriptor blocks.

use std::time::{Duration, Instant};

use tracing::warn;
use zerosock::daemon::{Daemon, Stats};
use zerosock_sys::reaper;

/// Duration of a call before the first warning, and interval of the checks.
pub(super) const LOOK: Duration = Duration::from_secs(5);
/// Time between two warnings.
const PAUSE: Duration = Duration::from_secs(60);

/// Time of the last warning.
#[derive(Debug, Default)]
pub(super) struct StuckCalls {
    said: Option<Instant>,
}

impl StuckCalls {
    /// Checks the daemon; logs at most one line a minute. Also starts a thread of the reaper that
    /// the system has refused.
    pub(super) fn check(&mut self, daemon: &Daemon) {
        reaper::retry();
        let stats = daemon.stats();
        if self.is_worth_a_line(&stats, Instant::now()) {
            warn!(
                seconds = stats.reaper_longest_ms / 1000,
                waiting = stats.reaper_pending,
                threads = stats.reaper_threads,
                "a descriptor of a peer does not close, or its memory is not unmapped: the peer, or the \
                 server of its file system (FUSE), holds a thread of this process; VMs and processes \
                 are served on"
            );
        }
    }

    fn is_worth_a_line(&mut self, stats: &Stats, now: Instant) -> bool {
        let stuck = u128::from(stats.reaper_longest_ms) >= LOOK.as_millis();
        let due = self.said.is_none_or(|said| now >= said + PAUSE);
        if stuck && due {
            self.said = Some(now);
        }
        stuck && due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_calls_are_logged_at_most_once_a_minute() {
        let mut calls = StuckCalls::default();
        let start = Instant::now();
        let mut look = |ms, seconds| {
            let stats = Stats {
                reaper_longest_ms: ms,
                ..Stats::default()
            };
            calls.is_worth_a_line(&stats, start + Duration::from_secs(seconds))
        };
        assert!(!look(4999, 0));
        assert!(look(5000, 0));
        assert!(!look(10_000, 5));
        assert!(!look(0, 61));
        assert!(look(70_000, 61));
    }
}
