//! Chains of the transmit queue that the embedding program holds: their memory, their bounds, and
//! their recall.
//!
//! # Invariants
//! - Before a queue stops or its memory is replaced, the program holds no chain of it.
//! - A token of an earlier epoch is ignored.

use std::sync::Arc;

use zerosock_proto::vsock::{FlowId, Shard};
use zerosock_ring::{Memory, Piece};

use super::program::{App, HostToken};
use super::{Context, Device};
use crate::table::sockets::{Store, Waiters};
use zerosock_virtio::ring::Ring;

/// No pool assigned yet.
pub(super) const NONE: u32 = u32::MAX;

/// The transmit queue and shard to which held chains and credit are returned. Both are `None` for
/// a connection that has outlived its device, of which only copies are left.
#[derive(Default)]
pub(crate) struct QueueStore<'a> {
    tx: Option<&'a mut Ring>,
    shard: Option<&'a mut Shard>,
}

impl<'a> QueueStore<'a> {
    #[inline]
    pub(super) fn new(tx: &'a mut Ring, shard: &'a mut Shard) -> QueueStore<'a> {
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

/// A device's state for the embedding program.
#[derive(Debug)]
pub(super) struct AppState {
    /// The device's pool in the table.
    pub(super) pool: u32,
    /// The most descriptors that one chain of the guest has had; limits the chains in the queue.
    descriptors: u16,
    /// Connections that found no buffer to send in.
    pub(super) waiters: Waiters,
    /// Receive buffers on loan.
    pub(super) loans: u16,
    /// Replaced memory that leases may keep mapped.
    pub(super) old: super::lending::OldMemory,
}

impl Default for AppState {
    fn default() -> AppState {
        AppState {
            pool: NONE,
            descriptors: 1,
            waiters: Waiters::default(),
            loans: 0,
            old: Default::default(),
        }
    }
}

impl AppState {
    /// Records the descriptors of a chain; more per chain mean fewer chains in the pool.
    #[inline]
    pub(super) fn note_descriptors(&mut self, descriptors: u16, tx: &Ring, app: &mut App) {
        if descriptors > self.descriptors {
            self.descriptors = descriptors;
            let chains = u32::from(tx.queue.size() / descriptors).max(1);
            app.sockets.resize_pool(self.pool, chains);
        }
    }
}

impl Device {
    /// The store for chains and credit of this device.
    #[inline]
    pub(crate) fn store(&mut self) -> QueueStore<'_> {
        QueueStore {
            tx: self.queues.rings.tx.as_mut(),
            shard: Some(&mut self.shard),
        }
    }

    pub(super) fn app_pool(&mut self, app: &mut App) -> u32 {
        if self.app.pool == NONE {
            self.app.pool = app.take_pool(self.addr.vm);
            let trusted = self.process && app.trust_processes;
            app.sockets.trust_pool(self.app.pool, trusted);
        }
        self.app.pool
    }

    /// Sizes the pool when the transmit queue has started: one buffer per descriptor.
    pub(super) fn app_started(&mut self, cx: &mut Context<'_>) {
        let Some(app) = cx.shared.app.as_deref_mut() else {
            return;
        };
        let pool = self.app_pool(app);
        let size = self
            .queues
            .rings
            .tx
            .as_ref()
            .map_or(1, |tx| tx.queue.size());
        self.app.descriptors = 1;
        app.sockets.resize_pool(pool, u32::from(size));
    }

    /// Whether the program holds so much that no more packets may be taken from the guest.
    #[inline]
    pub(super) fn app_is_full(&self, cx: &Context<'_>) -> bool {
        match &cx.shared.app {
            Some(app) => self.is_full(app),
            None => false,
        }
    }

    /// Whether packets must wait until the program returns chains.
    pub(crate) fn is_full(&self, app: &App) -> bool {
        self.app.pool != NONE && !app.sockets.has_room(self.app.pool)
    }

    /// The memory of a chain that the program holds.
    pub(crate) fn memory_of(&self, token: &HostToken) -> Option<&Arc<Memory>> {
        let tx = self
            .queues
            .rings
            .tx
            .as_ref()
            .filter(|tx| tx.epoch == token.epoch)?;
        Some(tx.queue.memory())
    }

    /// Recalls every chain that the program holds, before the queue stops or its memory is
    /// replaced. Returns false if some are under a read guard. With `force`, for a guest that has
    /// gone, these are taken back as well.
    pub(super) fn app_recall(&mut self, force: bool, cx: &mut Context<'_>) -> bool {
        let pool = self.app.pool;
        match cx.shared.app.as_deref_mut().filter(|_| pool != NONE) {
            Some(app) => app.sockets.recall(pool, force, &mut self.store()),
            None => true,
        }
    }

    /// Marks held chains as lost: the guest's memory has vanished.
    pub(super) fn app_lose(&mut self, cx: &mut Context<'_>) {
        let pool = self.app.pool;
        if let Some(app) = cx.shared.app.as_deref_mut().filter(|_| pool != NONE) {
            app.sockets.recall_lost(pool, &mut self.store());
        }
    }

    /// Frees the pool: the device is removed.
    pub(super) fn app_retire(&mut self, cx: &mut Context<'_>) {
        let pool = std::mem::replace(&mut self.app.pool, NONE);
        if let Some(app) = cx.shared.app.as_deref_mut().filter(|_| pool != NONE) {
            app.free_pool(pool);
        }
    }
}
