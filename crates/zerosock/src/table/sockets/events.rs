//! What the events of the protocol core change in a connection.

use zerosock_proto::vsock::RefuseReason;

use super::{Sockets, Store, StreamId, StreamState};

impl<T> Sockets<T> {
    /// The peer has accepted a connection.
    pub(crate) fn connected(&mut self, id: StreamId) {
        if let Some(conn) = self.get_mut(id) {
            conn.state = StreamState::Connected;
            self.set_ready(id);
        }
    }

    /// The peer has refused a connection; [`ended`](Self::ended) follows.
    pub(crate) fn refused(&mut self, id: StreamId, reason: RefuseReason) {
        if let Some(conn) = self.get_mut(id) {
            conn.refused = Some(reason);
        }
    }

    /// The peer has shut down receiving, sending, or both.
    pub(crate) fn peer_shut_down(
        &mut self,
        id: StreamId,
        receive: bool,
        send: bool,
        store: &mut impl Store<Token = T>,
    ) {
        let Some(conn) = self.get_mut(id) else {
            return;
        };
        conn.peer_send_shutdown |= send;
        conn.peer_recv_shutdown |= receive;
        if send {
            self.discard_incomplete_message(id, store);
        }
        self.set_ready(id);
    }

    /// The flow of a connection has ended; received bytes can still be read.
    pub(crate) fn ended(&mut self, id: StreamId, orderly: bool, store: &mut impl Store<Token = T>) {
        self.discard_incomplete_message(id, store);
        let Some(conn) = self.get_mut(id) else {
            return;
        };
        conn.flow = None;
        if conn.state == StreamState::Connecting {
            // Without an RST: the peer has gone.
            conn.refused.get_or_insert(RefuseReason::TransportReset);
        }
        conn.state = if orderly {
            StreamState::Finished
        } else {
            StreamState::Reset
        };
        self.set_ready(id);
    }
}
