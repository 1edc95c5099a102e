//! The driver half of a split virtqueue.

use std::sync::Arc;

use super::layout::{DriverLayout, QueueError};
use crate::memory::Memory;

/// A buffer to post.
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
pub struct Buffer {
    /// Guest address.
    pub addr: u64,
    /// Length in bytes, not 0.
    pub len: u32,
    /// The device writes it (else it reads it).
    pub writable: bool,
}

/// A chain that came back.
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
pub struct Used {
    /// As given to `add`.
    pub token: u64,
    /// Bytes that the device says it wrote, at most the chain's writable length.
    pub len: u32,
}

/// Why a chain was not added: no room, or the caller's fault.
#[derive(Copy, Clone, Eq, PartialEq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AddError {
    /// Not enough free descriptors now.
    #[error("not enough free descriptors")]
    Full,
    /// More buffers than the queue has descriptors.
    #[error("more buffers than the queue has descriptors")]
    TooLong,
    /// No buffers, or one without length.
    #[error("no buffers, or a buffer without length")]
    Empty,
    /// A readable buffer behind a writable one.
    #[error("readable buffer behind a writable one")]
    Order,
    /// More than 2^32 - 1 bytes.
    #[error("chain of more than 2^32 - 1 bytes")]
    TotalLength,
    /// The indirect table does not lie in memory.
    #[error("indirect table does not lie in memory")]
    Table,
}

/// What the device did wrong: the queue is dead.
#[derive(Copy, Clone, Eq, PartialEq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DriverError {
    /// The used index ran ahead of what was posted.
    #[error("used index ran ahead of what was posted")]
    IndexJump,
    /// A used element names no chain that the device holds.
    #[error("used element names {0}, which is no posted chain")]
    Id(u32),
}

/// The driver half of a split virtqueue.
#[derive(Debug)]
pub struct DriverQueue {
    mem: Arc<Memory>,
}

impl DriverQueue {
    /// Zeroes the rings.
    pub fn new(
        mem: Arc<Memory>,
        layout: DriverLayout,
        event_idx: bool,
    ) -> Result<DriverQueue, QueueError> {
        Self::with_base(mem, layout, event_idx, 0)
    }
    /// As `new`, with both indices starting at `base`.
    pub fn with_base(
        mem: Arc<Memory>,
        layout: DriverLayout,
        event_idx: bool,
        base: u16,
    ) -> Result<DriverQueue, QueueError> {
        let _ = (layout, event_idx, base);
        Ok(DriverQueue { mem })
    }
    /// The memory the queue lies in.
    pub fn memory(&self) -> &Arc<Memory> {
        &self.mem
    }
    /// Number of descriptors.
    pub fn size(&self) -> u16 {
        todo!()
    }
    /// Free descriptors.
    pub fn free(&self) -> u16 {
        todo!()
    }
    /// Posts a chain; not visible before `publish`. Returns its head.
    pub fn add(&mut self, buffers: &[Buffer], token: u64) -> Result<u16, AddError> {
        let _ = (buffers, token);
        todo!()
    }
    /// As `add`, through an indirect table of `16 * buffers.len()` bytes at `table_guest_addr`.
    pub fn add_indirect(
        &mut self,
        table_guest_addr: u64,
        buffers: &[Buffer],
        token: u64,
    ) -> Result<u16, AddError> {
        let _ = (table_guest_addr, buffers, token);
        todo!()
    }
    /// Makes all added chains visible; true: the device wants a kick.
    #[must_use = "the device may wait for a kick"]
    pub fn publish(&mut self) -> bool {
        todo!()
    }
    /// Takes the next chain that came back.
    pub fn poll(&mut self) -> Result<Option<Used>, DriverError> {
        todo!()
    }
    /// Tells the device that calls are not needed.
    pub fn disable_notifications(&mut self) {
        todo!()
    }
    /// Asks for calls again; true: chains came back meanwhile, go on polling.
    #[must_use = "chains that came back meanwhile bring no call"]
    pub fn enable_notifications(&mut self) -> bool {
        todo!()
    }
}
