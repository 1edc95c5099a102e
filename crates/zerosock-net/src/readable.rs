//! Whether a back-end may have a frame.
//!
//! Back-ends report new frames by edges: after an event there may be frames until a call of
//! [`receive`](crate::backend::Backend::receive) finds none. After an error there may be frames as well, for which no
//! event comes any more, so reading is tried again after [`RETRY`].

use std::time::Duration;

use zerosock_proto::Instant;

/// How long nothing is read after an error.
const RETRY: Duration = Duration::from_millis(10);

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct Readable {
    is_set: bool,
    retry_at: Option<Instant>,
}

impl Default for Readable {
    /// There may be a frame.
    fn default() -> Readable {
        Readable {
            is_set: true,
            retry_at: None,
        }
    }
}

impl Readable {
    /// There may be a frame.
    pub(crate) fn set(&mut self) {
        *self = Readable::default();
    }

    /// There is none until the next event.
    pub(crate) fn clear(&mut self) {
        *self = Readable {
            is_set: false,
            retry_at: None,
        };
    }

    /// Reading has failed.
    pub(crate) fn fail(&mut self, now: Instant) {
        *self = Readable {
            is_set: false,
            retry_at: Some(now + RETRY),
        };
    }

    /// Whether to read.
    pub(crate) fn check(&mut self, now: Instant) -> bool {
        if self.retry_at.is_some_and(|at| now >= at) {
            self.set();
        }
        self.is_set
    }

    /// When reading is tried again.
    pub(crate) fn next_timeout(&self) -> Option<Instant> {
        self.retry_at
    }
}
