//! The connections with changed readiness.

use super::{Sockets, StreamId};

impl<T> Sockets<T> {
    /// Reports a connection once more: bytes or an end of stream arrived, room became available, a
    /// connect completed or failed, or the connection has ended.
    #[inline]
    pub(crate) fn set_ready(&mut self, id: StreamId) {
        let Some(conn) = self.get_mut(id) else {
            return;
        };
        conn.ready = true;
        if !std::mem::replace(&mut conn.listed, true) {
            self.ready_list.push_back(id.index);
        }
    }

    /// Returns the next connection with changed readiness since it was last returned.
    pub(crate) fn next_ready(&mut self) -> Option<StreamId> {
        loop {
            let index = self.ready_list.pop_front()?;
            let conn = self.conns.get_mut(index as usize)?;
            conn.listed = false;
            if std::mem::take(&mut conn.ready) && conn.used {
                let generation = conn.generation;
                return Some(StreamId { index, generation });
            }
        }
    }
}
