//! When a successor is started, and with which entries. Time is an argument.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// How the supervisor answers deaths of the worker process: so many within so much time. A SIGKILL from
/// elsewhere does not count, nor does an exit before it served.
#[derive(Clone, Copy, Debug)]
pub struct RestartPolicy {
    /// Deaths that reduce the store to the listening sockets, as a successor may die of what it gets.
    pub reduce: (usize, Duration),
    /// Deaths that delay the start of the successor.
    pub delay: (usize, Duration),
    /// How long it is delayed.
    pub pause: Duration,
}

impl Default for RestartPolicy {
    fn default() -> RestartPolicy {
        let seconds = Duration::from_secs;
        RestartPolicy {
            reduce: (3, seconds(10)),
            delay: (10, seconds(60)),
            pause: seconds(1),
        }
    }
}

/// The times of the latest deaths, the newest last.
#[derive(Debug, Default)]
pub(crate) struct Restarts(VecDeque<Instant>);

impl Restarts {
    /// Counts a death. Returns whether the store is reduced, and after which pause a successor starts.
    pub(crate) fn record_death(
        &mut self,
        policy: &RestartPolicy,
        now: Instant,
    ) -> (bool, Duration) {
        self.0.push_back(now);
        if self.0.len() > policy.reduce.0.max(policy.delay.0) {
            self.0.pop_front();
        }
        let within = |(count, time): (usize, Duration)| {
            let first = self
                .0
                .len()
                .checked_sub(count)
                .and_then(|first| self.0.get(first));
            first.is_some_and(|first| now.saturating_duration_since(*first) <= time)
        };
        let pause = if within(policy.delay) {
            policy.pause
        } else {
            Duration::ZERO
        };
        (within(policy.reduce), pause)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: &[u64]) -> Vec<(bool, u64)> {
        let (mut restarts, policy) = (Restarts::default(), RestartPolicy::default());
        let start = Instant::now();
        let record = |second: &u64| {
            let now = start + Duration::from_secs(*second);
            let (reduce, pause) = restarts.record_death(&policy, now);
            (reduce, pause.as_secs())
        };
        seconds.iter().map(record).collect()
    }

    #[test]
    fn third_death_within_ten_seconds_reduces_the_store() {
        let (keep, reduce) = ((false, 0), (true, 0));
        assert_eq!(at(&[0, 5, 10, 15, 21]), [keep, keep, reduce, reduce, keep]);
        assert_eq!(at(&[0, 5, 11, 16, 22]), [keep; 5]);
    }

    #[test]
    fn tenth_death_within_a_minute_delays_the_start() {
        let deaths: Vec<_> = (0..12).map(|death| death * 6).collect();
        let pauses: Vec<_> = at(&deaths).iter().map(|death| death.1).collect();
        assert_eq!(pauses, [0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1]);
        let deaths: Vec<_> = (0..12).map(|death| death * 7).collect();
        assert!(at(&deaths).iter().all(|death| death.1 == 0));
    }
}
