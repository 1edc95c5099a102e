//! The bridges of connections that have ended before the host program has read all bytes.
//!
//! # Invariants
//! - A bridge is listed exactly while it exists and has no flow.
//! - While the list is not empty there is one timer, at `recheck_at`.

use std::collections::BTreeMap;
use std::time::Duration;

use zerosock_proto::Instant;

use super::timers::{Timer, Timers};

/// The lingering bridges: see the module.
#[derive(Debug, Default)]
pub(crate) struct Lingering {
    /// By bridge key: when the program last took bytes, or when the connection ended.
    last_progress: BTreeMap<u32, Instant>,
    recheck_at: Option<Instant>,
}

impl Lingering {
    pub(crate) fn len(&self) -> usize {
        self.last_progress.len()
    }

    /// Adds a bridge after its flow has ended.
    pub(crate) fn start(&mut self, key: u32, now: Instant, limit: Duration, timers: &mut Timers) {
        self.last_progress.insert(key, now);
        if self.recheck_at.is_none() {
            self.recheck(limit, timers);
        }
    }

    /// Records that the program has taken bytes of a lingering bridge.
    pub(crate) fn note_progress(&mut self, key: u32, now: Instant) {
        if let Some(last) = self.last_progress.get_mut(&key) {
            *last = now;
        }
    }

    /// Forgets a bridge that was removed.
    pub(crate) fn stop(&mut self, key: u32, timers: &mut Timers) {
        self.last_progress.remove(&key);
        if self.last_progress.is_empty()
            && let Some(at) = self.recheck_at.take()
        {
            timers.cancel(at, Timer::Linger);
        }
    }

    /// The bridges whose programs have taken nothing for `limit`. The timer has expired; after these
    /// bridges were removed, [`recheck`](Self::recheck) sets the next one.
    pub(crate) fn due(&mut self, now: Instant, limit: Duration) -> Vec<u32> {
        self.recheck_at = None;
        let due = |(&key, &last): (&u32, &Instant)| (last + limit <= now).then_some(key);
        self.last_progress.iter().filter_map(due).collect()
    }

    /// Sets the timer for the bridge that is due first.
    pub(crate) fn recheck(&mut self, limit: Duration, timers: &mut Timers) {
        if let Some(&oldest) = self.last_progress.values().min() {
            self.recheck_at = Some(oldest + limit);
            timers.set(oldest + limit, Timer::Linger);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_timer_is_set_while_bridges_linger() {
        let (mut all, mut timers) = (Lingering::default(), Timers::default());
        let limit = Duration::from_secs(2);
        let at = |secs| Instant::ZERO + Duration::from_secs(secs);
        all.start(7, at(0), limit, &mut timers);
        all.start(8, at(1), limit, &mut timers);
        assert_eq!((timers.len(), timers.next()), (1, Some(at(2))));
        all.note_progress(8, at(2));
        assert_eq!(timers.pop(at(2)), Some(Timer::Linger));
        assert_eq!(all.due(at(2), limit), [7]);
        all.stop(7, &mut timers);
        all.recheck(limit, &mut timers);
        assert_eq!((timers.len(), timers.next()), (1, Some(at(4))));
        all.stop(8, &mut timers);
        assert_eq!((all.len(), timers.len()), (0, 0));
    }
}
