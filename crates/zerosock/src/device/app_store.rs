//! Chains of the transmit queue that the embedding program holds: their memory, their bounds, and
//! their recall.
//!
//! # Invariants
//! - Before a queue stops or its memory is replaced, the program holds no chain of it.
//! - A token of an earlier epoch is ignored.

use std::sync::Arc;

use zerosock_ring::Memory;

use super::state::program::{App, HostToken};
use super::{Context, Device, DriverKind};
use crate::device::half::DeviceHalf;
use crate::device::state::app::{AppState, NONE, QueueStore};
use zerosock_virtio::ring::Ring;

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
            self.app.pool = app.take_pool(self.addr.number);
            let trusted = self.driver == DriverKind::Process && app.trust_processes;
            app.sockets.trust_pool(self.app.pool, trusted);
        }
        self.app.pool
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
}

impl DeviceHalf<'_, '_> {
    /// Sizes the pool when the transmit queue has started: one buffer per descriptor.
    pub(super) fn started(&mut self) {
        let Some(app) = self.cx.shared.app.as_deref_mut() else {
            return;
        };
        let pool = self.device.app_pool(app);
        let size = self
            .device
            .queues
            .rings
            .tx
            .as_ref()
            .map_or(1, |tx| tx.queue.size());
        self.device.app.descriptors = 1;
        app.sockets.resize_pool(pool, u32::from(size));
    }

    /// Recalls every chain that the program holds, before the queue stops or its memory is
    /// replaced. Returns false if some are under a read guard. With `force`, for a guest that has
    /// gone, these are taken back as well.
    pub(super) fn recall(&mut self, force: bool) -> bool {
        let pool = self.device.app.pool;
        match self.cx.shared.app.as_deref_mut().filter(|_| pool != NONE) {
            Some(app) => app.sockets.recall(pool, force, &mut self.device.store()),
            None => true,
        }
    }

    /// Marks held chains as lost: the guest's memory has vanished.
    pub(super) fn lose(&mut self) {
        let pool = self.device.app.pool;
        if let Some(app) = self.cx.shared.app.as_deref_mut().filter(|_| pool != NONE) {
            app.sockets.recall_lost(pool, &mut self.device.store());
        }
    }

    /// Frees the pool: the device is removed.
    pub(super) fn retire(&mut self) {
        let pool = std::mem::replace(&mut self.device.app.pool, NONE);
        if let Some(app) = self.cx.shared.app.as_deref_mut().filter(|_| pool != NONE) {
            app.free_pool(pool);
        }
    }
}
