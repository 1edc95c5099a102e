//! A rate limit for log lines that a peer can cause.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Admits a number of lines in each 10 s, by default 20. Devices that are added and
/// removed at run time share one limit, so that reconnecting yields no further lines.
#[derive(Debug)]
pub struct LogLimit {
    most: u32,
    lines: Mutex<Lines>,
}

impl Default for LogLimit {
    fn default() -> LogLimit {
        LogLimit::new(20)
    }
}

#[derive(Debug, Default)]
struct Lines {
    since: Option<Instant>,
    written: u32,
    suppressed: u64,
}

impl LogLimit {
    const PERIOD: Duration = Duration::from_secs(10);

    /// Admits so many lines in each 10 s.
    pub fn new(most: u32) -> LogLimit {
        LogLimit {
            most,
            lines: Mutex::default(),
        }
    }

    /// `Some` if a line may be written, with the number of lines suppressed since the last one, if
    /// any.
    pub fn admit(&self, now: Instant) -> Option<Option<u64>> {
        // Every update is a single assignment, so a poisoned lock guards a consistent value.
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        if lines
            .since
            .is_none_or(|since| now.duration_since(since) >= Self::PERIOD)
        {
            lines.since = Some(now);
            lines.written = 0;
        }
        if lines.written >= self.most {
            lines.suppressed += 1;
            return None;
        }
        lines.written += 1;
        let suppressed = std::mem::take(&mut lines.suppressed);
        Some((suppressed > 0).then_some(suppressed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_lines_are_limited_and_the_rest_counted() {
        let limit = LogLimit::default();
        let start = Instant::now();
        let admitted = (0..1000).filter_map(|_| limit.admit(start)).count();
        assert_eq!(admitted, 20);
        assert_eq!(limit.admit(start + LogLimit::PERIOD), Some(Some(980)));
        assert_eq!(limit.admit(start + LogLimit::PERIOD), Some(None));
    }
}
