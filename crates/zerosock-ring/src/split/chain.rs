//! A descriptor chain as the device half sees it.

use crate::slice::Piece;

/// A chain of buffers taken from a [`DeviceQueue`](crate::DeviceQueue): the readable pieces first,
/// then the writable ones. It goes back through `complete` or `unpop`.
#[must_use = "a chain goes back to its queue through complete() or unpop()"]
#[derive(Debug)]
pub struct Chain {
    pub(crate) head: u16,
    pub(crate) pieces: Vec<Piece>,
    pub(crate) split: u32,
    pub(crate) readable_len: u32,
    pub(crate) writable_len: u32,
    pub(crate) fault: Option<ChainFault>,
}

/// What is wrong with a malformed chain.
#[derive(Copy, Clone, Eq, PartialEq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ChainFault {
    /// More descriptors than the queue has: a loop.
    #[error("descriptor chain is a loop or too long")]
    TooLong,
}

impl Chain {
    /// Index of the first descriptor.
    #[inline]
    pub fn head(&self) -> u16 {
        self.head
    }
    /// Pieces that the device may read.
    #[inline]
    pub fn readable(&self) -> &[Piece] {
        self.pieces.get(..self.split as usize).unwrap_or(&[])
    }
    /// Pieces that the device may write.
    #[inline]
    pub fn writable(&self) -> &[Piece] {
        self.pieces.get(self.split as usize..).unwrap_or(&[])
    }
    /// Sum of the readable pieces, in bytes.
    #[inline]
    pub fn readable_len(&self) -> u32 {
        self.readable_len
    }
    /// Sum of the writable pieces, in bytes.
    #[inline]
    pub fn writable_len(&self) -> u32 {
        self.writable_len
    }
    /// Why the chain came as [`PopError::Malformed`](crate::PopError::Malformed), if it did.
    pub fn fault(&self) -> Option<ChainFault> {
        self.fault
    }
}
