//! The ready flags of connections: which changes of readiness are not reported yet.

use super::{Sockets, StreamId};

/// A change of readiness.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(crate) enum ReadyFlag {
    Connected = 0,
    Readable = 1,
    PeerShutdown = 2,
    Writable = 3,
    Refused = 4,
    Closed = 5,
}

impl<T> Sockets<T> {
    /// Sets a ready flag of a connection.
    #[inline]
    pub(crate) fn set_ready(&mut self, id: StreamId, flag: ReadyFlag) {
        let Some(conn) = self.get_mut(id) else {
            return;
        };
        conn.ready_flags |= 1 << flag as u8;
        if !std::mem::replace(&mut conn.listed, true) {
            self.ready_list.push_back(id.index);
        }
    }

    /// Returns the next connection with ready flags and clears all of them.
    pub(crate) fn next_ready(&mut self) -> Option<StreamId> {
        loop {
            let index = self.ready_list.pop_front()?;
            let conn = self.conns.get_mut(index as usize)?;
            conn.listed = false;
            if std::mem::take(&mut conn.ready_flags) != 0 && conn.used {
                let generation = conn.generation;
                return Some(StreamId { index, generation });
            }
        }
    }
}
