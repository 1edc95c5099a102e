//! Time, as an argument.
//!
//! The core has no clock. Callers count nanoseconds from an epoch of their
//! own (a monotonic clock's zero, the start of a test) and must not go back.

use core::fmt;
use core::num::NonZeroU64;
use core::ops::{Add, AddAssign};

pub use core::time::Duration;

/// A point in time: nanoseconds since an epoch that the caller chose.
///
/// An `Option` of it is no larger: a connection keeps several, most of them `None`.
#[derive(Copy, Clone, Eq, PartialEq, Ord, PartialOrd, Hash)]
pub struct Instant(
    /// One more than the nanoseconds.
    NonZeroU64,
);

impl Instant {
    /// The epoch.
    pub const ZERO: Instant = Instant(NonZeroU64::MIN);

    /// The point `nanos` nanoseconds after the epoch; 2^64 - 1 saturates to the nanosecond before.
    #[inline]
    pub const fn from_nanos(nanos: u64) -> Instant {
        Instant(NonZeroU64::MIN.saturating_add(nanos))
    }

    /// Nanoseconds since the epoch.
    #[inline]
    pub const fn as_nanos(self) -> u64 {
        self.0.get() - 1
    }

    /// The time from `earlier` to `self`; zero when `earlier` is later.
    pub const fn saturating_duration_since(self, earlier: Instant) -> Duration {
        Duration::from_nanos(self.0.get().saturating_sub(earlier.0.get()))
    }
}

/// Saturates at the largest value (584 years) instead of wrapping.
impl Add<Duration> for Instant {
    type Output = Instant;

    fn add(self, duration: Duration) -> Instant {
        let nanos = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        Instant(self.0.saturating_add(nanos))
    }
}

impl fmt::Debug for Instant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Instant").field(&self.as_nanos()).finish()
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
        for nanos in [0, 1, u64::MAX - 1] {
            assert_eq!(Instant::from_nanos(nanos).as_nanos(), nanos);
        }
        assert_eq!(size_of::<Option<Instant>>(), size_of::<u64>());
    }
}
