//! Connections that go on with buffers of another pool: at another queue pair.
//!
//! What must hold: nothing of the old pool's is held when the connection has left it; what its user
//! has not read is still there, in copies.

use zerosock_proto::vsock::FlowId;

use super::{Sockets, Store, StreamId};

impl<T> Sockets<T> {
    /// Copies out what a connection has unread, and parts it from its leases: those that nobody
    /// reads are moved, the others give their buffers back when they are dropped. Credit for them is
    /// given now. Its flow is to be there still.
    pub(crate) fn leave_pool(&mut self, id: StreamId, store: &mut impl Store<Token = T>) {
        self.spill(id, store);
        self.orphan_leases(id, store);
    }

    /// A connection that has left its pool goes on with that one, under this name.
    pub(crate) fn enter_pool(&mut self, id: StreamId, pool: u32, flow: FlowId) {
        let Some(copied) = self.get(id).map(|conn| conn.copied) else {
            return;
        };
        self.uncopy(id.index, copied);
        if let Some(conn) = self.get_mut(id) {
            conn.pool = pool;
            conn.flow = Some(flow);
        }
        self.copied(id.index, copied);
    }
}
