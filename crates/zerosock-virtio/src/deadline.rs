//! Deadlines that may be absent. An absent one is later than any other.

use rustix::event::Timespec;
use std::time::{Duration, Instant};

/// The end of `timeout`; `None` if the clock cannot represent it.
pub fn deadline_in(timeout: Duration) -> Option<Instant> {
    Instant::now().checked_add(timeout)
}

/// The earlier of two times.
#[inline]
pub fn earlier<T: Ord>(one: Option<T>, other: Option<T>) -> Option<T> {
    match (one, other) {
        (Some(one), Some(other)) => Some(one.min(other)),
        (one, other) => one.or(other),
    }
}

/// A duration in the type of `ppoll`.
pub fn timespec(span: Duration) -> Timespec {
    Timespec {
        tv_sec: i64::try_from(span.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: span.subsec_nanos().into(),
    }
}

#[cfg(test)]
mod tests {
    use super::earlier;

    #[test]
    fn an_absent_deadline_is_later_than_any() {
        assert_eq!(earlier(Some(2), Some(1)), Some(1));
        assert_eq!(earlier(Some(2), None), Some(2));
        assert_eq!(earlier(None, Some(3)), Some(3));
        assert_eq!(earlier::<u8>(None, None), None);
    }
}
