//! The deadline of an attempt to connect.

use std::time::{Duration, Instant};

/// The time at which an attempt to connect fails; `None`: never.
#[derive(Clone, Copy, Debug)]
pub(super) struct Deadline(Option<Instant>);

impl Deadline {
    pub(super) fn after(limit: Option<Duration>) -> Deadline {
        Deadline(limit.map(|limit| Instant::now() + limit))
    }

    pub(super) fn left(self) -> Option<Duration> {
        self.0
            .map(|at| at.saturating_duration_since(Instant::now()))
    }

    pub(super) fn is_over(self) -> bool {
        self.left() == Some(Duration::ZERO)
    }
}
