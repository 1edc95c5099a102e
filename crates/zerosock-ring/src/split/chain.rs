//! A descriptor chain as the device half sees it: copied, checked and translated.

use super::layout::Descriptor;
use crate::memory::{Memory, TranslateError};
use crate::slice::Piece;

/// A chain of buffers taken from a [`DeviceQueue`](crate::DeviceQueue): the readable pieces first,
/// then the writable ones (virtio 1.2, 2.7.4.2). One descriptor gives one piece, or several where
/// it runs over the border of two memory regions; where the peer put its header and its data is
/// not to be told from the pieces.
///
/// It is a token: it goes back to its queue through
/// [`complete`](crate::DeviceQueue::complete) or [`unpop`](crate::DeviceQueue::unpop). One that is
/// dropped is lost to the driver until the queue is set up again, and counts as outstanding.
#[must_use = "a chain goes back to its queue through complete() or unpop()"]
#[derive(Debug)]
pub struct Chain {
    pub(super) head: u16,
    /// Where in the available ring it was.
    pub(super) position: u16,
    /// Descriptors of the queue's own table in it.
    pub(super) descriptors: u16,
    pub(super) fault: Option<ChainFault>,
    pub(super) pieces: Vec<Piece>,
    /// Number of readable pieces.
    readable: usize,
    readable_len: u32,
    writable_len: u32,
}

/// What is wrong with a malformed chain. Always the peer's fault; only the chain suffers.
#[derive(Copy, Clone, Eq, PartialEq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ChainFault {
    /// More descriptors than the queue has, or than 1024 with an indirect table: a loop, or too
    /// long (2.7.5.2, 2.7.5.3.1).
    #[error("descriptor chain is a loop or too long")]
    TooLong,
    /// A `next` that is no descriptor of its table.
    #[error("descriptor chain leaves its table at {0}")]
    Next(u16),
    /// A buffer of no bytes.
    #[error("descriptor without length")]
    ZeroLength,
    /// A readable buffer behind a writable one (2.7.4.2).
    #[error("readable descriptor behind a writable one")]
    Order,
    /// More than 2^32 - 1 bytes in all (2.7.5.2).
    #[error("chain of more than 2^32 - 1 bytes")]
    TotalLength,
    /// A buffer that does not lie in memory.
    #[error("bad buffer address: {0}")]
    Address(TranslateError),
    /// An indirect table although VIRTIO_F_INDIRECT_DESC is not negotiated (2.7.5.3.1).
    #[error("indirect table without the feature")]
    IndirectRefused,
    /// An indirect table inside an indirect table (2.7.5.3.1).
    #[error("indirect table inside an indirect table")]
    IndirectNested,
    /// INDIRECT and NEXT in one descriptor (2.7.5.3.1).
    #[error("descriptor chain goes on behind an indirect table")]
    IndirectNext,
    /// An indirect table whose length is 0 or no multiple of 16 (2.7.5.3.2).
    #[error("indirect table of {0} bytes")]
    IndirectLength(u32),
    /// Descriptors that another chain, still outstanding, holds as well.
    #[error("more descriptors in outstanding chains than the queue has")]
    Shared,
}

impl Chain {
    pub(super) fn new(head: u16, position: u16, pieces: Vec<Piece>) -> Chain {
        Chain {
            head,
            position,
            descriptors: 0,
            fault: None,
            pieces,
            readable: 0,
            readable_len: 0,
            writable_len: 0,
        }
    }

    /// Adds the buffer of a descriptor's private copy.
    #[inline]
    pub(super) fn append(
        &mut self,
        mem: &Memory,
        hint: &mut u32,
        descriptor_copy: Descriptor,
        writable: bool,
    ) -> Result<(), ChainFault> {
        let Descriptor { addr, len, .. } = descriptor_copy;
        // Both sums fit: the lengths so far were checked to have a sum below 2^32.
        if (self.readable_len + self.writable_len)
            .checked_add(len)
            .is_none()
        {
            return Err(ChainFault::TotalLength);
        }
        if !writable && self.writable_len > 0 {
            return Err(ChainFault::Order);
        }
        mem.translate_near(hint, addr, len, &mut self.pieces)
            .map_err(|error| match error {
                TranslateError::ZeroLength => ChainFault::ZeroLength,
                other => ChainFault::Address(other),
            })?;
        if writable {
            self.writable_len += len;
        } else {
            self.readable_len += len;
            self.readable = self.pieces.len();
        }
        Ok(())
    }

    /// Turns into a malformed chain: nothing in it but the head.
    #[cold]
    pub(super) fn spoil(&mut self, fault: ChainFault) {
        self.fault = Some(fault);
        self.pieces.clear();
        (self.descriptors, self.readable) = (0, 0);
        (self.readable_len, self.writable_len) = (0, 0);
    }

    /// Index of the first descriptor.
    #[inline]
    pub fn head(&self) -> u16 {
        self.head
    }

    /// Pieces that the device may read.
    #[inline]
    pub fn readable(&self) -> &[Piece] {
        self.pieces.get(..self.readable).unwrap_or(&[])
    }

    /// Pieces that the device may write.
    #[inline]
    pub fn writable(&self) -> &[Piece] {
        self.pieces.get(self.readable..).unwrap_or(&[])
    }

    /// Sum of the readable pieces, in bytes. With `writable_len` it is below 2^32.
    #[inline]
    pub fn readable_len(&self) -> u32 {
        self.readable_len
    }

    /// Sum of the writable pieces, in bytes.
    #[inline]
    pub fn writable_len(&self) -> u32 {
        self.writable_len
    }

    /// Why the chain came as [`PopError::Malformed`](crate::PopError::Malformed), if it did; it has
    /// no pieces then.
    #[inline]
    pub fn fault(&self) -> Option<ChainFault> {
        self.fault
    }
}
