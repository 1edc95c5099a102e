//! What the driver's connections hold their received bytes in: the receive slots of each queue_pair, and
//! the shard of the protocol core that gives credit for them.
//!
//! What must hold: a slot that a connection gives back is posted at once, to the place in the ring
//! that the device looks at next but for those that are posted already; credit is given for bytes
//! that have left our hands, not before.

use std::sync::Arc;

use zerosock_proto::vsock::FlowId;
use zerosock_ring::{AddError, Memory, Piece};

use super::arena::Arena;
use super::queue_pairs::{QueuePairId, QueuePairSet, RxSlot};
use crate::table::sockets::Store;

/// See the module. Apart from the connections, because they call it while they change.
#[derive(Debug)]
pub(crate) struct Buffers {
    pub(super) arena: Arena,
    pub(super) queue_pairs: QueuePairSet,
    /// Receive buffers are kept from the device: for tests of what it does then.
    withhold: bool,
    withheld: Vec<RxSlot>,
    /// A slot could not be posted, although it was free: told by the next turn.
    fault: Option<AddError>,
}

impl Buffers {
    pub(super) fn new(arena: Arena, queue_pairs: QueuePairSet) -> Buffers {
        Buffers {
            arena,
            queue_pairs,
            withhold: false,
            withheld: Vec::new(),
            fault: None,
        }
    }

    /// What went wrong in calls that cannot say so.
    pub(super) fn check(&self) -> Result<(), AddError> {
        self.fault.map_or(Ok(()), Err)
    }

    pub(super) fn withhold(&mut self, withhold: bool) {
        self.withhold = withhold;
        if !withhold {
            for slot in std::mem::take(&mut self.withheld) {
                self.release(slot);
            }
        }
    }

    pub(super) fn withheld(&self) -> usize {
        self.withheld.len()
    }
}

impl Store for Buffers {
    type Token = RxSlot;

    #[inline]
    fn memory(&self, _: &RxSlot) -> Option<&Arc<Memory>> {
        Some(&self.arena.memory)
    }

    #[inline]
    fn pieces<'a>(&'a self, token: &'a RxSlot) -> &'a [Piece] {
        self.queue_pairs[token.queue_pair]
            .slots
            .rx_data
            .pieces(token.slot)
    }

    #[inline]
    fn release(&mut self, token: RxSlot) {
        if self.withhold {
            self.withheld.push(token);
        } else if let Err(error) = self.queue_pairs[token.queue_pair].rx.post(token.slot) {
            self.fault = Some(error);
        }
    }

    #[inline]
    fn consumed(&mut self, pool: u32, flow: FlowId, bytes: u32) {
        // A flow that ended meanwhile wants no credit.
        let _ = self.queue_pairs[QueuePairId::of_pool(pool)]
            .shard
            .consume(flow, bytes);
    }

    fn consumed_empty(&mut self, pool: u32, flow: FlowId, messages: u16) {
        // As above.
        let shard = &mut self.queue_pairs[QueuePairId::of_pool(pool)].shard;
        let _ = shard.consume_empty(flow, messages);
    }
}
