//! What a map hears of its stream: the poll value.
//!
//! The kernel of the document changes the word behind the reader's back. Here nobody runs but the
//! caller, so it is the look itself that works for it: an index in memory that the peer writes,
//! and only when that has moved, a turn of the engine.

use std::time::Instant;

use super::{CLOSED, DATA, EMPTY, RxMapError};
use crate::table::backend::{Ahead, Backend};
use crate::vsock::stream::Stream;

/// Looks between two looks at the clock: a timer of the engine may be due. The clock is no system
/// call (vDSO), but dearer than a look.
const CLOCK: u32 = 64;
/// Looks between two turns without a reason: what an index does not show, such as a peer's process
/// that died, is found by turns now and then.
const TURN: u32 = 4096;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct RxPoll {
    looks: u32,
}

impl RxPoll {
    /// The poll value now. No system call as long as nothing has come.
    pub(super) fn poll(&mut self, stream: &Stream) -> Result<u32, RxMapError> {
        let mut locked = stream.conn.core.lock();
        let found = value(locked.engine(), stream);
        if found != EMPTY {
            return Ok(found);
        }
        if self.is_due(locked.engine()) {
            locked.turn()?;
            return Ok(value(locked.engine(), stream));
        }
        Ok(found)
    }

    fn is_due(&mut self, engine: &mut dyn Backend) -> bool {
        self.looks = self.looks.wrapping_add(1);
        engine.pending()
            || self.looks.is_multiple_of(TURN)
            || (self.looks.is_multiple_of(CLOCK)
                && engine.next_timeout().is_some_and(|at| at <= Instant::now()))
    }
}

/// What the engine knows already. A low-water mark above one byte makes less than that "nothing",
/// as SO_RCVLOWAT does for `poll(2)`.
pub(super) fn value(engine: &mut dyn Backend, stream: &Stream) -> u32 {
    match engine.ahead(stream.conn.id) {
        None | Some(Ahead { closed: true, .. }) => CLOSED,
        Some(ahead) if ahead.unread >= stream.low_water() as usize => DATA,
        Some(_) => EMPTY,
    }
}
