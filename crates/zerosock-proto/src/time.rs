//! Time, as an argument.
//!
//! The core has no clock. Callers count nanoseconds from an epoch of their
//! own (a monotonic clock's zero, the start of a test) and must not go back.

use core::ops::{Add, AddAssign};

pub use core::time::Duration;

/// A point in time: nanoseconds since an epoch that the caller chose.
#[derive(Copy, Clone, Eq, PartialEq, Ord, PartialOrd, Hash, Debug)]
pub struct Instant(u64);

impl Instant {
    /// The epoch.
    pub const ZERO: Instant = Instant(0);

    /// `nanos` nanoseconds after the epoch.
    pub const fn from_nanos(nanos: u64) -> Instant {
        Instant(nanos)
    }

    /// Nanoseconds since the epoch.
    pub const fn as_nanos(self) -> u64 {
        self.0
    }

    /// The time from `earlier` to `self`; zero when `earlier` is later.
    pub const fn saturating_duration_since(self, earlier: Instant) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

/// Stays at the end of time (584 years) instead of going round.
impl Add<Duration> for Instant {
    type Output = Instant;

    fn add(self, duration: Duration) -> Instant {
        let nanos = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        Instant(self.0.saturating_add(nanos))
    }
}

impl AddAssign<Duration> for Instant {
    fn add_assign(&mut self, duration: Duration) {
        *self = *self + duration;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_and_differences_saturate() {
        let second = Instant::ZERO + Duration::from_secs(1);
        assert_eq!(second.as_nanos(), 1_000_000_000);
        assert_eq!(
            second.saturating_duration_since(Instant::ZERO),
            Duration::from_secs(1)
        );
        assert_eq!(
            Instant::ZERO.saturating_duration_since(second),
            Duration::ZERO
        );
        assert_eq!(second + Duration::MAX, Instant::from_nanos(u64::MAX));
    }
}
