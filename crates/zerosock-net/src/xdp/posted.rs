//! The chunks that the kernel has for frames to come, and the chains that they are for.
//!
//! # Invariants
//! - Each chain has one chunk in the kernel's hands. A chunk of the chain's own memory is for this chain alone. A
//!   private one is for no chain in particular: its frame is copied to the oldest chain.
//! - Chains are filled in their order, so that they can be completed in their order. A driver that reads and writes
//!   the memory itself may leave a chunk out and use it after later ones. For private chunks this makes no difference.
//!   The chain of a guest's chunk that was left out can be neither completed nor skipped, because the driver may
//!   still write there.

use std::collections::VecDeque;

/// Why a frame belongs to no chain. The socket is to be closed.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub(super) enum ChunkError {
    /// The kernel does not have the chunk: it was never posted, or comes back twice.
    #[error("a frame came in a chunk that was not posted, or came back before")]
    NotPosted,
    /// An older chunk of the guest's memory has no frame yet.
    #[error("the driver does not use the guest's buffers in their order")]
    OutOfOrder,
}

/// See the [module](self).
#[derive(Debug, Default)]
pub(super) struct Posted {
    /// For each chain, oldest first, the chunk of its own memory; `None`: a private one, whichever comes back.
    chains: VecDeque<Option<u64>>,
    /// By number of the private chunk: the kernel has it.
    private: Vec<bool>,
}

impl Posted {
    /// Nothing is posted. Private chunks have numbers below `chunk_numbers`.
    pub(super) fn new(chunk_numbers: usize) -> Posted {
        Posted {
            chains: VecDeque::new(),
            private: vec![false; chunk_numbers],
        }
    }

    /// How many chunks the kernel has.
    pub(super) fn len(&self) -> usize {
        self.chains.len()
    }

    /// Adds a chunk of the memory of the next chain.
    pub(super) fn push_own(&mut self, chunk: u64) {
        self.chains.push_back(Some(chunk));
    }

    /// Adds a private chunk for the next chain.
    pub(super) fn push_private(&mut self, number: usize) {
        if let Some(is_posted) = self.private.get_mut(number) {
            *is_posted = true;
        }
        self.chains.push_back(None);
    }

    /// Takes the chunk of a frame, which is for the oldest chain. `number`: that of the chunk, if it is private.
    ///
    /// # Errors
    /// The frame is for no chain; nothing has changed.
    pub(super) fn take(&mut self, chunk: u64, number: Option<usize>) -> Result<(), ChunkError> {
        let oldest = self.chains.front().copied();
        if let Some(number) = number {
            let is_posted = self.private.get_mut(number).filter(|is_posted| **is_posted);
            let is_posted = is_posted.ok_or(ChunkError::NotPosted)?;
            if oldest != Some(None) {
                return Err(ChunkError::OutOfOrder);
            }
            *is_posted = false;
        } else if oldest != Some(Some(chunk)) {
            // At most once for each socket: it is closed now.
            return Err(match self.chains.contains(&Some(chunk)) {
                true => ChunkError::OutOfOrder,
                false => ChunkError::NotPosted,
            });
        }
        self.chains.pop_front();
        Ok(())
    }
}

#[cfg(test)]
#[path = "posted_tests.rs"]
mod tests;
