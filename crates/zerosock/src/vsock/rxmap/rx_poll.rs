//! The poll value of a map.
//!
//! The document's kernel updates the poll value asynchronously. An endpoint has no thread, so
//! reading the poll value does the work: it checks a ring index that the peer writes, and drives the
//! backend only when the index has moved.

use std::time::Instant;

use super::{CLOSED, DATA, EMPTY, RxMapError};
use crate::table::backend::{Ahead, Backend};
use crate::vsock::stream::Stream;

/// Polls between two readings of the clock, for the backend's timers. Reading the clock is no
/// system call (vDSO), but costs more than a poll.
const CLOCK: u32 = 64;
/// Polls between two unconditional turns, which find what the index does not show, such as the
/// death of the peer's process.
const TURN: u32 = 4096;

/// The counters of polling; see the module.
#[derive(Debug, Default)]
pub(super) struct RxPoll {
    looks: u32,
}

impl RxPoll {
    /// The current poll value. Makes no system call while no packet arrives.
    pub(super) fn poll(&mut self, stream: &Stream) -> Result<u32, RxMapError> {
        let mut locked = stream.conn.core.lock();
        let found = value(locked.backend(), stream);
        if found != EMPTY {
            return Ok(found);
        }
        if self.is_due(locked.backend()) {
            locked.drive()?;
            return Ok(value(locked.backend(), stream));
        }
        Ok(found)
    }

    fn is_due(&mut self, backend: &mut dyn Backend) -> bool {
        self.looks = self.looks.wrapping_add(1);
        backend.pending()
            || self.looks.is_multiple_of(TURN)
            || (self.looks.is_multiple_of(CLOCK)
                && backend
                    .next_timeout()
                    .is_some_and(|at| at <= Instant::now()))
    }
}

/// The poll value without a turn. Fewer unread bytes than the low-water mark count as none, as
/// SO_RCVLOWAT does for `poll(2)`.
pub(super) fn value(backend: &mut dyn Backend, stream: &Stream) -> u32 {
    match backend.ahead(stream.conn.id) {
        None | Some(Ahead { closed: true, .. }) => CLOSED,
        Some(ahead) if ahead.unread >= stream.low_water() as usize => DATA,
        Some(_) => EMPTY,
    }
}
