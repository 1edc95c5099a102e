//! Connections whose sends found no buffer, until there are some.
//!
//! What must hold: whoever waits is told; the list is no longer than twice the table and a bit,
//! however many connections come, find no room and go; and nobody is always told first, because who
//! is told first may take all.

use super::{ReadyFlags, Sockets, StreamId};

/// Entries of those who have gone that are not worth a sweep.
const STALE: usize = 64;

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Waiters {
    list: Vec<StreamId>,
    /// Turns the list before it is told, a little further each time.
    told: usize,
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
    /// A send has found no buffer: its connection is told when there are some.
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
            self.sweep(waiters);
        }
    }

    /// There are buffers: tells all who wait for them.
    pub(crate) fn tell_of_room(&mut self, waiters: &mut Waiters) {
        let count = waiters.list.len();
        waiters.told = waiters.told.wrapping_add(1);
        waiters.list.rotate_left(waiters.told % count.max(1));
        for id in waiters.list.drain(..) {
            if let Some(conn) = self.get_mut(id) {
                conn.wants_room = false;
                self.announce(id, ReadyFlags::Writable);
            }
        }
    }

    /// Drops those who have gone, and all but one entry of each who waits.
    fn sweep(&mut self, waiters: &mut Waiters) {
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
