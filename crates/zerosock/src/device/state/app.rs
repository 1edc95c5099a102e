//! A device's part of the embedding program's state.

use std::sync::{Arc, Weak};

use zerosock_proto::vsock::{FlowId, Shard};
use zerosock_ring::{Memory, Piece};
use zerosock_virtio::ring::Ring;

use super::program::HostToken;
use crate::table::flows::Flows;
use crate::table::sockets::{Store, Waiters};

/// No pool assigned yet.
pub(in crate::device) const NONE: u32 = u32::MAX;

/// The transmit queue and shard to which held chains and credit are returned. Both are `None` for
/// a connection that has outlived its device, of which only copies are left.
#[derive(Default)]
pub(crate) struct QueueStore<'a> {
    pub(in crate::device) tx: Option<&'a mut Ring>,
    pub(in crate::device) shard: Option<&'a mut Shard>,
}

impl<'a> QueueStore<'a> {
    #[inline]
    pub(in crate::device) fn new(tx: &'a mut Ring, shard: &'a mut Shard) -> QueueStore<'a> {
        QueueStore {
            tx: Some(tx),
            shard: Some(shard),
        }
    }
}

impl Store for QueueStore<'_> {
    type Token = HostToken;

    #[inline]
    fn memory(&self, token: &HostToken) -> Option<&Arc<Memory>> {
        let tx = self.tx.as_ref().filter(|tx| tx.epoch == token.epoch)?;
        Some(tx.queue.memory())
    }

    #[inline]
    fn pieces<'a>(&'a self, token: &'a HostToken) -> &'a [Piece] {
        token.chain.readable()
    }

    #[inline]
    fn release(&mut self, token: HostToken) {
        if let Some(tx) = &mut self.tx
            && tx.epoch == token.epoch
        {
            tx.complete(token.chain, 0);
        }
    }

    #[inline]
    fn may_return_later(&self, _pool: u32, flow: FlowId) -> bool {
        let shard = self.shard.as_ref();
        let tx = self.tx.as_ref();
        // A driver that asks to be notified of any chain in use may wait for it.
        shard.is_some_and(|shard| shard.may_consume_later(flow))
            && tx.is_some_and(|tx| !tx.queue.would_notify(tx.queue.outstanding()))
    }

    #[inline]
    fn consumed(&mut self, _pool: u32, flow: FlowId, bytes: u32) {
        if let Some(shard) = &mut self.shard {
            // Fails if the flow has ended.
            let _ = shard.consume(flow, bytes);
        }
    }

    fn consumed_empty(&mut self, _pool: u32, flow: FlowId, messages: u16) {
        if let Some(shard) = &mut self.shard {
            // As above.
            let _ = shard.consume_empty(flow, messages);
        }
    }
}

/// Replaced memory tables, with the mapping that each keeps, by its number, and the bytes of it.
#[derive(Debug, Default)]
pub(in crate::device) struct OldMemory(Vec<(Weak<Memory>, u64, u64)>);

impl OldMemory {
    pub(in crate::device) fn track(&mut self, memory: &Arc<Memory>) {
        let (mapping, size) = (memory.mapping().id(), memory.mapping().size());
        self.0.push((Arc::downgrade(memory), mapping, size));
        // Memories of extents can share a mapping, which counts once.
        self.0.sort_unstable_by_key(|&(_, mapping, _)| mapping);
    }

    pub(in crate::device) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Bytes of the tables that are still mapped.
    pub(in crate::device) fn alive(&mut self) -> u64 {
        self.0.retain(|(memory, ..)| memory.strong_count() > 0);
        let mappings = self.0.chunk_by(|(_, a, _), (_, b, _)| a == b);
        let sizes = mappings.filter_map(|of_one| of_one.first().map(|(.., size)| *size));
        sizes.sum()
    }
}

/// A device's state for the embedding program.
#[derive(Debug)]
pub(in crate::device) struct AppState {
    /// The device's pool in the table.
    pub(in crate::device) pool: u32,
    /// The most descriptors that one chain of the guest has had; limits the chains in the queue.
    pub(in crate::device) descriptors: u16,
    pub(in crate::device) flows: Flows,
    /// Connections that found no buffer to send in.
    pub(in crate::device) waiters: Waiters,
    /// Receive buffers on loan.
    pub(in crate::device) loans: u16,
    /// Replaced memory that leases may keep mapped.
    pub(in crate::device) old: OldMemory,
}

impl Default for AppState {
    fn default() -> AppState {
        AppState {
            pool: NONE,
            descriptors: 1,
            flows: Flows::default(),
            waiters: Waiters::default(),
            loans: 0,
            old: Default::default(),
        }
    }
}

#[cfg(test)]
#[path = "app_tests.rs"]
mod tests;
