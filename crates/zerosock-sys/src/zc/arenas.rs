//! The memory of pools that a ring has registered.

use std::sync::Arc;

use io_uring::IoUring;

use super::pool::Arena;

/// How many arenas a ring registers at most; blocks of more are sent like other memory.
const ARENAS: u32 = 64;
/// Sends after which an arena that could not be registered is tried again.
const PAUSE: u32 = 1024;

/// The arenas that the ring has registered, in the places that they have among its buffers.
#[derive(Default)]
pub(super) struct Arenas {
    pub(super) registered: Vec<Registered>,
    /// The ring has room for them.
    has_table: bool,
    /// So many sends are not to try to register anything: it failed, and it is not cheap.
    pause: u32,
}

pub(super) struct Registered {
    id: u64,
    /// The memory lives at least as long as the ring that has it registered.
    _arena: Arc<Arena>,
}

impl Arenas {
    /// Under which number the ring has an arena registered; the first block of it registers it. If
    /// that fails, mostly for want of memory that may be locked, a later one does.
    pub(super) fn number(&mut self, ring: &IoUring, arena: &Arc<Arena>) -> Option<u16> {
        let mut known = self.registered.iter();
        if let Some(found) = known.position(|known| known.id == arena.id()) {
            return Some(found as u16);
        }
        let index = self.registered.len() as u32;
        if index >= ARENAS || self.pause > 0 {
            self.pause = self.pause.saturating_sub(1);
            return None;
        }
        let submitter = ring.submitter();
        self.has_table = self.has_table || submitter.register_buffers_sparse(ARENAS).is_ok();
        // SAFETY: the arena's mapping is valid; it is kept, below, for as long as the ring is.
        let done = self.has_table
            && unsafe {
                submitter
                    .register_buffers_update(index, &[arena.vector()], None)
                    .is_ok()
            };
        if !done {
            self.pause = PAUSE;
            return None;
        }
        self.registered.push(Registered {
            id: arena.id(),
            _arena: Arc::clone(arena),
        });
        Some(index as u16)
    }
}
