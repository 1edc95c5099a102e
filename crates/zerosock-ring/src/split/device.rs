//! The device half of a split virtqueue.

use std::sync::Arc;

use super::chain::Chain;
use super::layout::{QueueConfig, QueueError};
use crate::memory::Memory;

/// Why nothing was popped although something was posted: always the peer's fault.
#[derive(Debug, thiserror::Error)]
pub enum PopError {
    /// The chain cannot be used ([`Chain::fault`] says why); complete it with 0.
    #[error("malformed descriptor chain")]
    Malformed(Chain),
    /// The ring itself is nonsense: nothing more comes from this queue.
    #[error("broken queue: {0}")]
    Broken(BrokenReason),
}

/// What killed a queue.
#[derive(Copy, Clone, Eq, PartialEq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BrokenReason {
    /// The available index jumped by more than the queue size.
    #[error("available index jumped by more than the queue size")]
    IndexJump,
    /// A head is no descriptor of the table.
    #[error("head {0} lies outside the descriptor table")]
    Head(u16),
}

/// The device half of a split virtqueue.
#[derive(Debug)]
pub struct DeviceQueue {
    mem: Arc<Memory>,
    config: QueueConfig,
}

impl DeviceQueue {
    /// Checks the configuration and resolves the rings.
    pub fn new(mem: Arc<Memory>, config: &QueueConfig) -> Result<DeviceQueue, QueueError> {
        Ok(DeviceQueue {
            mem,
            config: *config,
        })
    }
    /// The memory that chains popped now point into.
    #[inline]
    pub fn memory(&self) -> &Arc<Memory> {
        &self.mem
    }
    /// Number of descriptors.
    #[inline]
    pub fn size(&self) -> u16 {
        self.config.size
    }
    /// Next available index to pop.
    #[inline]
    pub fn base(&self) -> u16 {
        self.config.base
    }
    /// Chains popped and not yet completed.
    #[inline]
    pub fn outstanding(&self) -> u16 {
        todo!()
    }
    /// Malformed chains seen so far.
    pub fn malformed(&self) -> u64 {
        todo!()
    }
    /// Chains posted and not yet popped.
    pub fn available(&mut self) -> u16 {
        todo!()
    }
    /// Takes the next chain.
    pub fn pop(&mut self) -> Result<Option<Chain>, PopError> {
        todo!()
    }
    /// Gives back the chain popped last, as if it had never been popped.
    pub fn unpop(&mut self, chain: Chain) {
        let _ = chain;
        todo!()
    }
    /// Puts the chain into the used ring with `written` bytes; not visible before `publish`.
    pub fn complete(&mut self, chain: Chain, written: u32) {
        let _ = (chain, written);
        todo!()
    }
    /// Makes all completed chains visible; true: the driver wants a notification.
    #[must_use = "the driver may wait for a notification"]
    pub fn publish(&mut self) -> bool {
        todo!()
    }
    /// Tells the driver that kicks are not needed.
    pub fn disable_notifications(&mut self) {
        todo!()
    }
    /// Asks for kicks again; true: buffers arrived meanwhile, go on popping.
    #[must_use = "buffers that arrived meanwhile bring no kick"]
    pub fn enable_notifications(&mut self) -> bool {
        todo!()
    }
    /// Moves to a new memory table with the same ring addresses and indices.
    pub fn remap(&mut self, mem: Arc<Memory>) -> Result<(), QueueError> {
        self.mem = mem;
        Ok(())
    }
}
