//! What the program that embeds the device holds of its transmit queue: where it lies, how much it
//! may be, and how all of it comes back.
//!
//! What must hold: before a queue or its memory goes, nothing of it is held; a token of an earlier
//! start of the queue is nothing.

use std::sync::Arc;

use zerosock_proto::vsock::{FlowId, Shard};
use zerosock_ring::{Memory, Piece};

use super::program::{App, HostToken};
use super::ring::Ring;
use super::{Context, Device};
use crate::table::sockets::{Store, Waiters};

/// No pool yet.
pub(super) const NONE: u32 = u32::MAX;

/// A device's transmit queue and shard, as the home of what the program holds of it. Without
/// either for a connection whose device is gone: of that only copies are left.
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
            // A flow that ended meanwhile wants no credit.
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

/// What the table needs of one device.
#[derive(Debug)]
pub(super) struct AppState {
    /// Its transmit buffers in the table.
    pub(super) pool: u32,
    /// The most descriptors that a chain of the guest's has had: as many fewer chains there are.
    descriptors: u16,
    /// Connections that found no buffer to send in.
    pub(super) waiters: Waiters,
    /// Loans of its receive buffers that are out.
    pub(super) loans: u16,
    /// Memory that it had before and that somebody still holds.
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
    /// A chain has so many descriptors: as many fewer of them are there.
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
    /// The home of what the program holds of this device.
    #[inline]
    pub(crate) fn store(&mut self) -> QueueStore<'_> {
        QueueStore {
            tx: self.tx.as_mut(),
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

    /// The transmit queue has started: as many buffers as it has may be held.
    pub(super) fn app_started(&mut self, cx: &mut Context<'_>) {
        let Some(app) = cx.app.as_deref_mut() else {
            return;
        };
        let pool = self.app_pool(app);
        let size = self.tx.as_ref().map_or(1, |tx| tx.queue.size());
        self.app.descriptors = 1;
        app.sockets.resize_pool(pool, u32::from(size));
    }

    /// Whether the program holds so much that nothing more may be taken from the guest now.
    #[inline]
    pub(super) fn app_is_full(&self, cx: &Context<'_>) -> bool {
        match &cx.app {
            Some(app) => self.is_full(app),
            None => false,
        }
    }

    /// Whether nothing more may be taken in before the program gives something back.
    pub(crate) fn is_full(&self, app: &App) -> bool {
        self.app.pool != NONE && !app.sockets.has_room(self.app.pool)
    }

    /// The memory in which a chain lies that the program holds.
    pub(crate) fn memory_of(&self, token: &HostToken) -> Option<&Arc<Memory>> {
        let tx = self.tx.as_ref().filter(|tx| tx.epoch == token.epoch)?;
        Some(tx.queue.memory())
    }

    /// Gets back every chain that the program holds, before the queue or its memory goes. False:
    /// some are read at this moment, by somebody who trusts that they stay as they are. With
    /// `force`, for a peer that is gone, that is no reason.
    pub(super) fn app_recall(&mut self, force: bool, cx: &mut Context<'_>) -> bool {
        let pool = self.app.pool;
        match cx.app.as_deref_mut().filter(|_| pool != NONE) {
            Some(app) => app.sockets.recall(pool, force, &mut self.store()),
            None => true,
        }
    }

    /// The guest's memory is gone: nothing in it means anything.
    pub(super) fn app_lose(&mut self, cx: &mut Context<'_>) {
        let pool = self.app.pool;
        if let Some(app) = cx.app.as_deref_mut().filter(|_| pool != NONE) {
            app.sockets.recall_lost(pool, &mut self.store());
        }
    }

    /// The device leaves for good.
    pub(super) fn app_retire(&mut self, cx: &mut Context<'_>) {
        let pool = std::mem::replace(&mut self.app.pool, NONE);
        if let Some(app) = cx.app.as_deref_mut().filter(|_| pool != NONE) {
            app.free_pool(pool);
        }
    }
}
