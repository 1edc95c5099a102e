//! Connections that wait for a buffer because a send found none.
//!
//! # Invariants
//! - Every waiting connection is made writable when buffers return.
//! - The list is bounded by about twice the table, however many connections wait and end.
//! - The order rotates, because the first connection woken may take all buffers.

use super::{ReadyFlag, Sockets, StreamId};

/// Entries of removed connections that are tolerated before a remove_stale_waiters.
const STALE: usize = 64;

/// The waiting connections. See the module documentation.
#[derive(Debug, Default)]
pub(crate) struct Waiters {
    list: Vec<StreamId>,
    /// Rotation of the list before the next wake-up; grows each time.
    rotation: usize,
}

impl Waiters {
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.list.len()
    }
}

impl<T> Sockets<T> {
    /// Makes a connection wait for a buffer after a send found none.
    #[cold]
    pub(crate) fn wait_for_room(&mut self, id: StreamId, waiters: &mut Waiters) {
        let Some(conn) = self.get_mut(id) else {
            return;
        };
        if std::mem::replace(&mut conn.wants_room, true) {
            return;
        }
        waiters.list.push(id);
        if waiters.list.len() > 2 * self.len() + STALE {
            self.remove_stale_waiters(waiters);
        }
    }

    /// Makes all waiting connections writable.
    pub(crate) fn wake_waiters(&mut self, waiters: &mut Waiters) {
        let count = waiters.list.len();
        waiters.rotation = waiters.rotation.wrapping_add(1);
        waiters.list.rotate_left(waiters.rotation % count.max(1));
        for id in waiters.list.drain(..) {
            if let Some(conn) = self.get_mut(id) {
                conn.wants_room = false;
                self.set_ready(id, ReadyFlag::Writable);
            }
        }
    }

    /// Removes entries of removed connections and duplicates.
    fn remove_stale_waiters(&mut self, waiters: &mut Waiters) {
        waiters.list.retain(|&id| {
            let conn = self.get_mut(id);
            conn.is_some_and(|conn| std::mem::take(&mut conn.wants_room))
        });
        for &id in &waiters.list {
            if let Some(conn) = self.get_mut(id) {
                conn.wants_room = true;
            }
        }
    }
}
