//! When a worker looks for work before it sleeps, and when it does not.
//!
//! To sleep and be woken takes some microseconds of both sides: a kick, a wake-up, and with it a
//! packet waits. Whoever looks for work for that long instead has it at once, but burns the processor
//! meanwhile. So it is done only while it pays: as long as most pauses end within the time that is
//! spent on looking. What must hold: with a time of zero nothing is ever looked for, and a worker that
//! has nothing to do sleeps.

use std::time::Duration;

/// Pauses that are remembered.
const MOST: u8 = 8;
/// What a pause that was too long takes of them.
const MISS: u8 = 3;

/// Whether looking pays.
#[derive(Debug)]
pub(crate) struct Spin {
    most: Duration,
    /// Pauses in a row that were short enough, but for those that were not.
    credit: u8,
}

impl Spin {
    /// Looks for at most `most`.
    pub(crate) fn new(most: Duration) -> Spin {
        Spin { most, credit: 0 }
    }

    /// How long to look before the next sleep, if at all.
    #[inline]
    pub(crate) fn pays(&self) -> Option<Duration> {
        (self.credit > 0).then_some(self.most)
    }

    /// Whether it is worth knowing how long the worker sleeps.
    #[inline]
    pub(crate) fn is_on(&self) -> bool {
        !self.most.is_zero()
    }

    /// Something came while it was looked for.
    pub(crate) fn hit(&mut self) {
        self.credit = (self.credit + 1).min(MOST);
    }

    /// Nothing came.
    pub(crate) fn missed(&mut self) {
        self.credit = self.credit.saturating_sub(MISS);
    }

    /// The worker slept for `time` instead of looking.
    pub(crate) fn slept(&mut self, time: Duration) {
        if time < self.most {
            self.hit();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MICRO: Duration = Duration::from_micros(1);

    #[test]
    fn it_is_looked_for_work_only_while_work_comes_soon() {
        let mut spin = Spin::new(50 * MICRO);
        assert_eq!(spin.pays(), None, "not before it is known");
        spin.slept(200 * MICRO);
        assert_eq!(spin.pays(), None);
        spin.slept(20 * MICRO);
        assert_eq!(spin.pays(), Some(50 * MICRO));
        (0..100).for_each(|_| spin.hit());
        // Not for one pause that is longer; but for three.
        spin.missed();
        spin.missed();
        assert!(spin.pays().is_some());
        spin.missed();
        assert_eq!(spin.pays(), None);
    }

    #[test]
    fn who_is_not_told_to_never_looks() {
        let mut spin = Spin::new(Duration::ZERO);
        assert!(!spin.is_on());
        spin.slept(Duration::ZERO);
        assert_eq!(spin.pays(), None);
    }
}
