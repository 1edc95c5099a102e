//! Durations as command-line values: seconds, with an optional fraction.

use std::time::Duration;

/// Longer than any useful limit, and far below the range of timers.
const LONGEST: Duration = Duration::from_secs(365 * 24 * 3600);

/// Parses `5` or `0.5`. The error is the fix; clap prints option and value in front.
pub(crate) fn parse(text: &str) -> Result<Duration, &'static str> {
    text.parse()
        .ok()
        .and_then(|seconds: f64| Duration::try_from_secs_f64(seconds).ok())
        .filter(|span| *span <= LONGEST)
        .ok_or("give a number of seconds up to a year, such as 5 or 0.5")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_may_have_a_fraction() {
        assert_eq!(parse("5"), Ok(Duration::from_secs(5)));
        assert_eq!(parse("0.25"), Ok(Duration::from_millis(250)));
        for text in ["", "-1", "x", "nan", "inf", "1e30"] {
            assert!(parse(text).is_err(), "{text:?}");
        }
    }
}
