//! The buffers of the driver's connections: the receive slots of each queue pair, and the shard of
//! the protocol core that gives credit for them.
//!
//! # Invariants
//! - A released slot is posted at once, to the ring position that the device uses next after those
//!   already posted.
//! - Credit is given only for bytes that the reader is done with.

use std::sync::Arc;

use zerosock_proto::vsock::FlowId;
use zerosock_ring::{AddError, Memory, Piece};

use super::arena::Arena;
use super::queue_pairs::{QueuePairId, QueuePairSet, RxSlot};
use crate::table::sockets::Store;

/// The slots and shards; separate from the connections, which call it while they borrow
/// themselves.
#[derive(Debug)]
pub(crate) struct Buffers {
    pub(super) arena: Arena,
    pub(super) queue_pairs: QueuePairSet,
    /// Returned receive buffers are kept from the device, for tests.
    withhold: bool,
    withheld: Vec<RxSlot>,
    /// The error of posting a free slot; the next turn reports it.
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

    /// The error of calls that cannot return one.
    pub(super) fn check(&self) -> Result<(), AddError> {
        self.fault.map_or(Ok(()), Err)
    }

    /// Keeps the error of a call that cannot return it, for the next turn.
    #[cold]
    pub(super) fn fail(&mut self, error: AddError) {
        self.fault = Some(error);
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

    #[inline(always)] // every packet
    fn release(&mut self, token: RxSlot) {
        if self.withhold {
            self.withheld.push(token);
        } else if let Err(error) = self.queue_pairs[token.queue_pair].rx.post(token.slot) {
            self.fail(error);
        }
    }

    #[inline]
    fn may_return_later(&self, pool: u32, flow: FlowId) -> bool {
        let queue_pair = &self.queue_pairs[QueuePairId::of_pool(pool)];
        !queue_pair.blocked && queue_pair.shard.may_consume_later(flow)
    }

    #[inline(always)] // every packet
    fn consumed(&mut self, pool: u32, flow: FlowId, bytes: u32) {
        // Fails only for a flow that has ended.
        let _ = self.queue_pairs[QueuePairId::of_pool(pool)]
            .shard
            .consume(flow, bytes);
    }

    fn consumed_empty(&mut self, pool: u32, flow: FlowId, messages: u16) {
        // Fails only for a flow that has ended.
        let shard = &mut self.queue_pairs[QueuePairId::of_pool(pool)].shard;
        let _ = shard.consume_empty(flow, messages);
    }
}
