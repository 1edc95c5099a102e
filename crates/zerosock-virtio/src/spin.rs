//! Decides whether a worker polls for work before it sleeps.
//!
//! Sleeping and waking costs some microseconds on both sides: the driver's kick, the wake-up, and
//! the delay of a packet. Polling for that time avoids the cost but uses the processor. So a worker
//! polls only while most pauses between work are shorter than the polling time.
//!
//! # Invariants
//!
//! - With a polling time of zero the worker never polls.
//! - A worker without work sleeps.

use std::time::Duration;

/// Largest credit.
const MAX_CREDIT: u8 = 8;
/// Credit that a pause longer than the polling time costs.
const MISS_COST: u8 = 3;

/// Whether polling pays, by the lengths of recent pauses.
#[derive(Debug)]
pub struct Spin {
    most: Duration,
    /// Short pauses counted, less [`MISS_COST`] for each long one; 0 to [`MAX_CREDIT`].
    credit: u8,
}

impl Spin {
    /// Polls for at most `most`.
    pub fn new(most: Duration) -> Spin {
        Spin { most, credit: 0 }
    }

    /// How long to poll before the next sleep; `None`: do not poll.
    #[inline]
    pub fn poll_time(&self) -> Option<Duration> {
        (self.credit > 0).then_some(self.most)
    }

    /// Whether polling is enabled, so that [`slept`](Self::slept) is to be called.
    #[inline]
    pub fn is_enabled(&self) -> bool {
        !self.most.is_zero()
    }

    /// Polling found work.
    pub fn found_work(&mut self) {
        self.credit = (self.credit + 1).min(MAX_CREDIT);
    }

    /// Polling found no work.
    pub fn found_nothing(&mut self) {
        self.credit = self.credit.saturating_sub(MISS_COST);
    }

    /// The worker slept for `time` without polling.
    pub fn slept(&mut self, time: Duration) {
        if time < self.most {
            self.found_work();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MICRO: Duration = Duration::from_micros(1);

    #[test]
    fn polling_is_used_only_while_pauses_are_short() {
        let mut spin = Spin::new(50 * MICRO);
        assert_eq!(spin.poll_time(), None, "not before it is known");
        spin.slept(200 * MICRO);
        assert_eq!(spin.poll_time(), None);
        spin.slept(20 * MICRO);
        assert_eq!(spin.poll_time(), Some(50 * MICRO));
        (0..100).for_each(|_| spin.found_work());
        // One long pause does not stop polling, three do.
        spin.found_nothing();
        spin.found_nothing();
        assert!(spin.poll_time().is_some());
        spin.found_nothing();
        assert_eq!(spin.poll_time(), None);
    }

    #[test]
    fn a_polling_time_of_zero_disables_polling() {
        let mut spin = Spin::new(Duration::ZERO);
        assert!(!spin.is_enabled());
        spin.slept(Duration::ZERO);
        assert_eq!(spin.poll_time(), None);
    }
}
