//! Which connections may send, and which wait for a buffer because a send found none.
//!
//! # Invariants
//! - Every waiting connection is made writable when buffers return.
//! - The list is bounded by about twice the table, however many connections wait and end.
//! - The order rotates, because the first connection woken may take all buffers.

use zerosock_proto::vsock::FlowId;

use super::{Sockets, StreamId, StreamState};
use crate::table::transfers::SendFault;

/// Entries of closed connections that may stay in the list before it is searched for them.
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
    /// The pool and the flow of a connection that may send.
    #[inline(always)] // every packet: the errors stay out of its way
    pub(crate) fn sender(&self, id: StreamId) -> Result<(u32, FlowId), SendFault> {
        if let Some(conn) = self.get(id)
            && conn.state == StreamState::Connected
            && !(conn.send_shutdown || conn.peer_recv_shutdown)
            && let Some(flow) = conn.flow
        {
            return Ok((conn.pool, flow));
        }
        Err(self.why_not_sender(id))
    }

    #[cold]
    fn why_not_sender(&self, id: StreamId) -> SendFault {
        match self.get(id) {
            None => SendFault::Unknown,
            Some(conn) if conn.send_shutdown || conn.peer_recv_shutdown => SendFault::ShutDown,
            Some(conn) => match conn.state {
                StreamState::Connecting => SendFault::NotConnected,
                StreamState::Finished => SendFault::ShutDown,
                StreamState::Connected | StreamState::Reset => SendFault::Reset,
            },
        }
    }

    /// Makes a connection writable.
    pub(crate) fn set_writable(&mut self, id: StreamId) {
        if let Some(conn) = self.get_mut(id) {
            conn.wants_room = false;
            self.set_ready(id);
        }
    }

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
            self.set_writable(id);
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
