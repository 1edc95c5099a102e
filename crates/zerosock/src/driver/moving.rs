//! Where a connection begins, and how it goes on at another queue pair (docs/queue-pairs.md).
//!
//! What must hold: while it is on its way nothing is sent for it; what was received stays to be
//! read, in copies, and leases stay with their holders.

use zerosock_proto::vsock::{ConnectError, FlowId, MoveError, QueuePairs};
use zerosock_proto::wire::vsock::Repr;
use zerosock_proto::{Address, Port};

use super::queue_pairs::QueuePairId;
use super::{Driver, StreamId};
use crate::device::placing::SPARE_PORTS;
use crate::table::sockets::ReadyFlags;

impl Driver {
    /// Queue pairs that are used.
    pub fn queue_pairs(&self) -> u16 {
        self.store.queue_pairs.len() as u16
    }

    /// The queue pair at which a connection is; `None` for one that was closed.
    pub fn queue_pair(&self, stream: StreamId) -> Option<u16> {
        let conn = self.sockets.get(stream)?;
        Some(QueuePairId::of_pool(conn.pool).pair())
    }

    /// Asks the device that a connection go on at queue pair `pair`. Until it has answered, which takes
    /// a round trip, nothing is sent; what comes is received. The device may refuse:
    /// [`queue_pair`](Driver::queue_pair) tells.
    ///
    /// # Errors
    /// [`MoveError::Busy`] while a loan is out or a message half sent, while small sends wait for each
    /// other and for credit, and while it is on its way.
    /// [`MoveError::NotNegotiated`] for a pair that is not used.
    pub fn move_to_pair(&mut self, stream: StreamId, pair: u16) -> Result<(), MoveError> {
        let (queue_pair, flow) = self.flow_of(stream).ok_or(MoveError::Stale)?;
        let there = self.store.queue_pairs.of_pair(pair.into());
        match there.ok_or(MoveError::NotNegotiated)? {
            there if there == queue_pair => Ok(()),
            _ if !self.hurry(queue_pair, flow) => Err(MoveError::Busy),
            _ => self.store.queue_pairs[queue_pair]
                .shard
                .request_move(flow, pair),
        }
    }

    /// Whether a connection is on its way to another queue pair.
    pub fn is_moving(&self, stream: StreamId) -> bool {
        let flow = self.flow_of(stream);
        flow.is_some_and(|(queue_pair, flow)| {
            self.store.queue_pairs[queue_pair].shard.is_moving(flow)
        })
    }

    /// The queue_pair where a connection to `peer` begins, and the port that it is from: which queue_pair it is
    /// depends on that, if there are several. Nobody else has both addresses, at whichever pair.
    pub(super) fn place(
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

    /// The device has answered: the connection is at `pair`. `header`: the answer.
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
            // At a pair that is not used, or closed by us while it was on its way. An event tells.
            let _ = self.store.queue_pairs[queue_pair].shard.reset(flow);
            return self.moved_stray(pair, header);
        };
        if there == queue_pair {
            // A flow that ended meanwhile goes on nowhere.
            let _ = self.store.queue_pairs[queue_pair].shard.resume(flow);
            return self.sockets.announce(stream, ReadyFlags::Writable);
        }
        // Its unread bytes and its credit are of the slots that it leaves.
        self.sockets.leave_pool(stream, &mut self.store);
        let adopted = match self.store.queue_pairs[queue_pair]
            .shard
            .extract(flow, there.pair())
        {
            Ok((snapshot, _)) => self.store.queue_pairs[there].shard.insert(snapshot).ok(),
            Err(_) => return,
        };
        let Some(now) = adopted else {
            // There is no place for it there: the device is told, and so is its user.
            self.moved_stray(pair, header);
            return self.closed(queue_pair, flow, false);
        };
        self.store.queue_pairs[there].flows.insert(now, stream);
        self.sockets.enter_pool(stream, there.pool(), now);
        // A sender that waits for a slot waits for one of another queue_pair from now on.
        if let Some(conn) = self.sockets.get_mut(stream) {
            conn.wants_room = false;
        }
        self.sockets.announce(stream, ReadyFlags::Writable);
    }

    /// The device has moved a connection to `pair` that we have not: it is to give it up.
    #[cold]
    pub(super) fn moved_stray(&mut self, pair: u32, header: &Repr) {
        if let Some(there) = self.store.queue_pairs.of_pair(pair) {
            self.store.queue_pairs[there].shard.reset_stray(header);
        }
    }
}
