//! A descriptor chain in the device half: copied, checked and translated.

use super::layout::Descriptor;
use crate::memory::{Memory, TranslateError};
use crate::slice::Piece;

/// A chain of buffers popped from a [`DeviceQueue`](crate::DeviceQueue): the readable pieces first,
/// then the writable ones (virtio 1.2, 2.7.4.2). One descriptor gives one piece, or several where
/// it crosses the border of two memory regions; the pieces do not show how the peer divided header
/// and data.
///
/// It is a token: return it to its queue by [`complete`](crate::DeviceQueue::complete) or
/// [`unpop`](crate::DeviceQueue::unpop). One that is dropped is lost to the driver until the queue
/// is set up again, and counts as outstanding.
#[must_use = "a chain goes back to its queue through complete() or unpop()"]
#[derive(Debug)]
pub struct Chain {
    pub(super) head: u16,
    /// Its position in the available ring.
    pub(super) position: u16,
    /// Descriptors that it takes in the queue's own table.
    pub(super) descriptors: u16,
    /// Pieces in `inline_pieces`.
    inline_len: u8,
    inline_readable: u8,
    readable_len: u32,
    writable_len: u32,
    /// The pieces of a short chain, which nearly all are.
    inline_pieces: [Piece; 2],
    /// All pieces of any other chain.
    pub(super) long: Option<Box<LongChain>>,
}

// Every packet moves a chain in and out of lists.
const _: () = assert!(size_of::<Chain>() <= 56);

/// The contents of a chain that is not short, or malformed: pieces and sums while it is walked, and
/// the fault. It comes from a pool, so that none is allocated once warm.
#[derive(Debug, Default)]
pub(super) struct LongChain {
    pub(super) pieces: Vec<Piece>,
    pub(super) descriptors: u16,
    /// Number of readable pieces.
    readable: usize,
    readable_len: u32,
    writable_len: u32,
    fault: Option<ChainFault>,
}

/// Most pieces of a vector that is kept for reuse: larger ones (above 4 KiB) are freed, so that a
/// burst of long chains does not stay allocated.
const MAX_KEPT_PIECES: usize = 256;

/// Emptied [`LongChain`]s.
#[derive(Debug, Default)]
#[allow(clippy::vec_box)] // boxed once, and handed over as they are
pub(super) struct Pool(Vec<Box<LongChain>>);

impl Pool {
    pub(super) fn take(&mut self) -> Box<LongChain> {
        self.0.pop().unwrap_or_default()
    }

    pub(super) fn put(&mut self, mut many: Box<LongChain>) {
        if many.pieces.capacity() <= MAX_KEPT_PIECES {
            many.clear();
            self.0.push(many);
        }
    }

    #[cfg(test)]
    pub(super) fn capacity(&self) -> usize {
        self.0.iter().map(|many| many.pieces.capacity()).sum()
    }
}

/// The fault of a malformed chain: the peer's, except for [`NoMemory`](Self::NoMemory). No other chain
/// is affected.
#[derive(Copy, Clone, Eq, PartialEq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ChainFault {
    /// More descriptors than the queue has, or than 1024 with an indirect table: a loop, or too
    /// long (2.7.5.2, 2.7.5.3.1).
    #[error("descriptor chain is a loop or too long")]
    TooLong,
    /// A `next` outside its table.
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
    #[error("descriptor chain continues behind an indirect table")]
    IndirectNext,
    /// An indirect table with a length of 0 or no multiple of 16 (2.7.5.3.2).
    #[error("indirect table of {0} bytes")]
    IndirectLength(u32),
    /// Descriptors that another outstanding chain takes as well.
    #[error("more descriptors in outstanding chains than the queue has")]
    Shared,
    /// No memory for its pieces. The queue is broken.
    #[error("no memory for the pieces of the chain")]
    NoMemory,
}

impl LongChain {
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
        // Both sums fit: the sum of the lengths so far is below 2^32.
        if (self.readable_len + self.writable_len)
            .checked_add(len)
            .is_none()
        {
            return Err(ChainFault::TotalLength);
        }
        if !writable && self.writable_len > 0 {
            return Err(ChainFault::Order);
        }
        let (pieces, mut is_complete) = (&mut self.pieces, true);
        mem.translate_near(hint, addr, len, |piece| {
            if pieces.len() < pieces.capacity() || pieces.try_reserve(1).is_ok() {
                pieces.push(piece);
            } else {
                is_complete = false;
            }
        })
        .map_err(|error| match error {
            TranslateError::ZeroLength => ChainFault::ZeroLength,
            other => ChainFault::Address(other),
        })?;
        if !is_complete {
            return Err(ChainFault::NoMemory);
        }
        if writable {
            self.writable_len += len;
        } else {
            self.readable_len += len;
            self.readable = self.pieces.len();
        }
        Ok(())
    }

    /// Clears it, but keeps its allocation.
    fn clear(&mut self) {
        let mut pieces = core::mem::take(&mut self.pieces);
        pieces.clear();
        *self = LongChain {
            pieces,
            ..LongChain::default()
        };
    }

    /// Makes it a malformed chain without pieces.
    #[cold]
    pub(super) fn set_fault(&mut self, fault: ChainFault) {
        self.clear();
        self.fault = Some(fault);
    }
}

impl Chain {
    /// A chain with the contents of `long`.
    #[inline(always)] // as those below: saves a move
    pub(super) fn from_long(head: u16, position: u16, many: Box<LongChain>) -> Chain {
        Chain {
            head,
            position,
            descriptors: many.descriptors,
            inline_len: 0,
            inline_readable: 0,
            readable_len: many.readable_len,
            writable_len: many.writable_len,
            inline_pieces: [Piece::NONE; 2],
            long: Some(many),
        }
    }

    /// A chain of one or two descriptors of one kind, of one piece each, with `len` bytes in all.
    /// Without a second descriptor the second piece is empty.
    #[inline(always)]
    pub(super) fn from_uniform(
        head: u16,
        position: u16,
        pieces: [Piece; 2],
        len: u32,
        writable: bool,
    ) -> Chain {
        let count = if pieces[1].is_empty() { 1 } else { 2 };
        Chain {
            head,
            position,
            descriptors: u16::from(count),
            inline_len: count,
            inline_readable: if writable { 0 } else { count },
            readable_len: if writable { 0 } else { len },
            writable_len: if writable { len } else { 0 },
            inline_pieces: pieces,
            long: None,
        }
    }

    /// A chain of two descriptors, of one piece each; None if their order or length is invalid.
    #[inline(always)]
    pub(super) fn from_two(
        head: u16,
        position: u16,
        [(first, first_writable), (second, second_writable)]: [(Piece, bool); 2],
    ) -> Option<Chain> {
        let total = first.len.checked_add(second.len)?;
        let (few_readable, readable_len) = match (first_writable, second_writable) {
            (false, false) => (2, total),
            (false, true) => (1, first.len),
            (true, true) => (0, 0),
            (true, false) => return None,
        };
        Some(Chain {
            head,
            position,
            descriptors: 2,
            inline_len: 2,
            inline_readable: few_readable,
            readable_len,
            writable_len: total - readable_len,
            inline_pieces: [first, second],
            long: None,
        })
    }

    /// Index of the first descriptor.
    #[inline]
    pub fn head(&self) -> u16 {
        self.head
    }

    /// Descriptors that it takes in the queue's own table; those of an indirect table do not count.
    #[inline]
    pub fn descriptors(&self) -> u16 {
        self.descriptors
    }

    /// Pieces that the device may read.
    #[inline]
    pub fn readable(&self) -> &[Piece] {
        match &self.long {
            None => self.inline_pieces.get(..usize::from(self.inline_readable)),
            Some(many) => many.pieces.get(..many.readable),
        }
        .unwrap_or(&[])
    }

    /// Pieces that the device may write.
    #[inline]
    pub fn writable(&self) -> &[Piece] {
        match &self.long {
            None => self
                .inline_pieces
                .get(usize::from(self.inline_readable)..usize::from(self.inline_len)),
            Some(many) => many.pieces.get(many.readable..),
        }
        .unwrap_or(&[])
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

    /// Why the chain came as [`PopError::Malformed`](crate::PopError::Malformed), if it did; then
    /// it has no pieces.
    #[inline]
    pub fn fault(&self) -> Option<ChainFault> {
        self.long.as_ref().and_then(|many| many.fault)
    }
}
