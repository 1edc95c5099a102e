//! Connections that change to another pool, because they move to another queue pair.
//!
//! # Invariants
//! A connection that has left a pool holds none of its buffers; its unread bytes are in copies.

use zerosock_proto::vsock::FlowId;

use super::{Sockets, Store, StreamId};

impl<T> Sockets<T> {
    /// Copies a connection's unread bytes and detaches its leases: those without readers are moved,
    /// the others return their buffers when they are dropped. Gives credit for the leased bytes
    /// now, so the flow must still exist.
    pub(crate) fn leave_pool(&mut self, id: StreamId, store: &mut impl Store<Token = T>) {
        self.copy_unread(id, store);
        self.detach_leases(id, store);
    }

    /// Continues a connection that has left its pool in `pool`, with the flow `flow`.
    pub(crate) fn enter_pool(&mut self, id: StreamId, pool: u32, flow: FlowId) {
        let Some(copied) = self.get(id).map(|conn| conn.copied) else {
            return;
        };
        self.remove_copied(id.index, copied);
        if let Some(conn) = self.get_mut(id) {
            conn.pool = pool;
            conn.flow = Some(flow);
        }
        self.add_copied(id.index, copied);
    }
}
