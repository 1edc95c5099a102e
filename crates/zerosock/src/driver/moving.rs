//! The queue pair of a new connection, and moves to another queue pair (docs/queue-pairs.md).
//!
//! # Invariants
//! While a move is in progress, nothing is sent on the connection. Unread bytes remain readable as
//! copies, and leases remain valid.

use zerosock_proto::vsock::{ConnectError, FlowId, MoveError, QueuePairs};
use zerosock_proto::wire::vsock::Repr;
use zerosock_proto::{Address, Port};

use super::queue_pairs::QueuePairId;
use super::{Driver, StreamId};
use crate::device::placing::SPARE_PORTS;
use crate::table::sockets::ReadyFlag;

impl Driver {
    /// The number of queue pairs in use.
    pub fn queue_pairs(&self) -> u16 {
        self.store.queue_pairs.len() as u16
    }

    /// The queue pair of a connection; `None` if it was closed.
    pub fn queue_pair(&self, stream: StreamId) -> Option<u16> {
        let conn = self.sockets.get(stream)?;
        Some(QueuePairId::of_pool(conn.pool).pair())
    }

    /// Asks the device to move a connection to queue pair `pair`. Nothing is sent until the device
    /// answers, one round trip later; bytes are still received. The device may refuse:
    /// [`queue_pair`](Driver::queue_pair) returns the result.
    ///
    /// # Errors
    /// [`MoveError::Busy`] while a loan is out, a message is partly sent, small sends are coalesced
    /// and wait for credit, or another move is in progress. [`MoveError::NotNegotiated`] for a pair
    /// that is not in use.
    pub fn move_to_pair(&mut self, stream: StreamId, pair: u16) -> Result<(), MoveError> {
        let (queue_pair, flow) = self.flow_of(stream).ok_or(MoveError::Stale)?;
        let there = self.store.queue_pairs.of_pair(pair.into());
        match there.ok_or(MoveError::NotNegotiated)? {
            there if there == queue_pair => Ok(()),
            _ if !self.try_flush_coalesced(queue_pair, flow) => Err(MoveError::Busy),
            _ => self.store.queue_pairs[queue_pair]
                .shard
                .request_move(flow, pair),
        }
    }

    /// Whether a move to another queue pair is in progress.
    pub fn is_moving(&self, stream: StreamId) -> bool {
        let flow = self.flow_of(stream);
        flow.is_some_and(|(queue_pair, flow)| {
            self.store.queue_pairs[queue_pair].shard.is_moving(flow)
        })
    }

    /// Chooses the queue pair and the local port of a connection to `peer`. With several pairs, the
    /// queue pair depends on the port. No other connection on any pair has the same two addresses.
    pub(super) fn choose_queue_pair(
        &self,
        port: Port,
        peer: Address,
    ) -> Result<(QueuePairId, Port), ConnectError> {
        let queue_pairs = &self.store.queue_pairs;
        let pairs = QueuePairs::new(self.queue_pairs()).unwrap_or(QueuePairs::ONE);
        if pairs == QueuePairs::ONE {
            return Ok((QueuePairId::FIRST, port));
        }
        for _ in 0..SPARE_PORTS {
            let from = match port {
                Port::ANY => queue_pairs[QueuePairId::FIRST].shard.spare_port(),
                port => port,
            };
            let local = Address::new(self.cid, from);
            if !queue_pairs
                .iter()
                .any(|queue_pair| queue_pair.shard.is_connected(local, peer))
            {
                let queue_pair = queue_pairs.of_pair(pairs.of_flow(from, peer).into());
                return Ok((queue_pair.unwrap_or(QueuePairId::FIRST), from));
            }
            if port != Port::ANY {
                break;
            }
        }
        Err(ConnectError::InUse)
    }

    /// The device has answered a move with `header`: the connection is at `pair`.
    #[cold]
    pub(super) fn moved(
        &mut self,
        queue_pair: QueuePairId,
        flow: FlowId,
        pair: u32,
        header: &Repr,
    ) {
        let there = self.store.queue_pairs.of_pair(pair);
        let (Some(there), Some(stream)) = (there, self.flow(queue_pair, flow)) else {
            // The pair is not in use, or this side closed the connection during the move. An event
            // follows.
            let _ = self.store.queue_pairs[queue_pair].shard.reset(flow);
            return self.reset_unknown_move(pair, header);
        };
        if there == queue_pair {
            // Fails only for a flow that has ended.
            let _ = self.store.queue_pairs[queue_pair].shard.resume(flow);
            return self.sockets.set_ready(stream, ReadyFlag::Writable);
        }
        // Its unread bytes and its credit refer to slots of the old pair.
        self.sockets.leave_pool(stream, &mut self.store);
        let inserted = match self.store.queue_pairs[queue_pair]
            .shard
            .extract(flow, there.pair())
        {
            Ok((snapshot, _)) => self.store.queue_pairs[there].shard.insert(snapshot).ok(),
            Err(_) => return,
        };
        let Some(now) = inserted else {
            // The new shard has no room: the device and the connection's owner are notified.
            self.reset_unknown_move(pair, header);
            return self.closed(queue_pair, flow, false);
        };
        self.store.queue_pairs[there].flows.insert(now, stream);
        self.sockets.enter_pool(stream, there.pool(), now);
        // A sender that waited for a slot of the old pair retries at the new one.
        if let Some(conn) = self.sockets.get_mut(stream) {
            conn.wants_room = false;
        }
        self.sockets.set_ready(stream, ReadyFlag::Writable);
    }

    /// Resets a connection that the device moved to `pair` and that does not exist here.
    #[cold]
    pub(super) fn reset_unknown_move(&mut self, pair: u32, header: &Repr) {
        if let Some(there) = self.store.queue_pairs.of_pair(pair) {
            self.store.queue_pairs[there].shard.reset_stray(header);
        }
    }
}
