//! Buffers: bytes to send, at an address that does not change.
#![allow(unsafe_code)]

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use zerosock_ring::{Memory, Piece as Extent, SliceBuf};

use super::pool::Arena;
use super::{FilePart, Piece, PoolBuf, Stable};

// SAFETY: the bytes lie on the heap, where they stay when the vector is moved, and only its owner
// can write them or free them.
unsafe impl Stable for Vec<u8> {
    fn pieces(&self, each: &mut impl FnMut(Piece)) {
        each(self.as_slice().into());
    }
}

// SAFETY: as for a vector.
unsafe impl Stable for Box<[u8]> {
    fn pieces(&self, each: &mut impl FnMut(Piece)) {
        each((&**self).into());
    }
}

// SAFETY: `Bytes` are shared by handles that only read; they cannot be taken back for writing while
// this handle exists. Moving a handle does not move them.
unsafe impl Stable for Bytes {
    fn pieces(&self, each: &mut impl FnMut(Piece)) {
        each((&**self).into());
    }
}

// SAFETY: the bytes of an `Arc` can be written only through its only handle, and this is a handle.
unsafe impl Stable for Arc<[u8]> {
    fn pieces(&self, each: &mut impl FnMut(Piece)) {
        each((&**self).into());
    }
}

// SAFETY: static bytes are never written.
unsafe impl Stable for &'static [u8] {
    fn pieces(&self, each: &mut impl FnMut(Piece)) {
        each((*self).into());
    }
}

// SAFETY: a loan of a pool's block is the only handle to its bytes, and keeps the mapping.
unsafe impl Stable for PoolBuf {
    fn pieces(&self, each: &mut impl FnMut(Piece)) {
        each((&**self).into());
    }

    fn arena(&self) -> Option<&Arc<Arena>> {
        Some(self.arena())
    }
}

// SAFETY: each buffer is `Stable`. Nothing can write the vector while a `ZcSocket` owns it, so the
// order of the pieces does not change.
unsafe impl<B: Stable> Stable for Vec<B> {
    fn pieces(&self, each: &mut impl FnMut(Piece)) {
        for buffer in self {
            buffer.pieces(each);
        }
    }

    fn arena(&self) -> Option<&Arc<Arena>> {
        match self.as_slice() {
            [only] => only.arena(),
            _ => None,
        }
    }
}

/// The most slices of one [`Mapped`].
const EXTENTS: usize = 4;

/// Bytes in memory that a peer shares, with a value that keeps them available.
///
/// The peer may write them at any time, and the send then contains what it wrote. This crate makes
/// no reference to them; the kernel reads them, and the send fails with EFAULT where the memory is
/// gone.
pub struct Mapped {
    pieces: Vec<Piece>,
    // Dropped before the memory: it returns the bytes to the peer.
    _hold: Box<dyn Any + Send>,
    _memory: Arc<Memory>,
}

impl Mapped {
    /// `len` bytes of `extents` from `offset` on. `hold` is dropped when the bytes are no longer
    /// needed.
    ///
    /// # Errors
    /// `hold`, if the bytes are not within the memory, or consist of more than four slices.
    pub fn new<H: Send + 'static>(
        memory: &Arc<Memory>,
        extents: &[Extent],
        offset: usize,
        len: usize,
        hold: H,
    ) -> Result<Self, H> {
        let mut slices = SliceBuf::<EXTENTS>::new();
        if memory.slices(extents, offset, len, &mut slices) != len {
            return Err(hold);
        }
        let piece = |slice: &zerosock_ring::GuestSlice<'_>| Piece {
            address: slice.as_ptr().cast_const(),
            len: slice.len(),
        };
        Ok(Self {
            pieces: slices.iter().map(piece).collect(),
            _hold: Box::new(hold),
            _memory: Arc::clone(memory),
        })
    }
}

impl fmt::Debug for Mapped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Mapped").field(&self.total()).finish()
    }
}

// SAFETY: the addresses are only passed to the kernel, from any thread; see `Stable` below. All
// other fields are Send.
unsafe impl Send for Mapped {}

// SAFETY: through a shared reference only the addresses and their lengths can be read; `_hold` and
// `_memory` are not touched before the drop, which has the only reference.
unsafe impl Sync for Mapped {}

// SAFETY: the pieces were looked up in the memory; its mapping does not move while `_memory`
// exists. Peers that share the memory may write there; this process does not while `_hold` exists.
unsafe impl Stable for Mapped {
    fn pieces(&self, each: &mut impl FnMut(Piece)) {
        self.pieces.iter().copied().for_each(each);
    }
}

/// A buffer of any kind: the default buffer type of a sender.
#[non_exhaustive]
pub enum Buf {
    /// Reference-counted bytes of the crate `bytes`.
    Bytes(Bytes),
    /// A vector of bytes.
    Vec(Vec<u8>),
    /// Reference-counted bytes.
    Arc(Arc<[u8]>),
    /// Static bytes.
    Static(&'static [u8]),
    /// A block of a pool.
    Pool(PoolBuf),
    /// Memory that a peer shares.
    Mapped(Mapped),
    /// Part of a file.
    File(FilePart),
    /// Several buffers, sent as one.
    Many(Vec<Buf>),
}

impl fmt::Debug for Buf {
    /// Formats kind and length only: the bytes may be many.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self {
            Self::Bytes(_) => "Bytes",
            Self::Vec(_) => "Vec",
            Self::Arc(_) => "Arc",
            Self::Static(_) => "Static",
            Self::Pool(_) => "Pool",
            Self::Mapped(_) => "Mapped",
            Self::File(_) => "File",
            Self::Many(_) => "Many",
        };
        write!(f, "{kind}({} bytes)", self.total())
    }
}

// SAFETY: each variant is `Stable`.
unsafe impl Stable for Buf {
    fn pieces(&self, each: &mut impl FnMut(Piece)) {
        match self {
            Self::Bytes(bytes) => bytes.pieces(each),
            Self::Vec(bytes) => bytes.pieces(each),
            Self::Arc(bytes) => bytes.pieces(each),
            Self::Static(bytes) => bytes.pieces(each),
            Self::Pool(block) => block.pieces(each),
            Self::Mapped(bytes) => bytes.pieces(each),
            Self::File(part) => part.pieces(each),
            Self::Many(list) => list.pieces(each),
        }
    }

    fn arena(&self) -> Option<&Arc<Arena>> {
        match self {
            Self::Pool(block) => Some(block.arena()),
            Self::Many(list) => list.arena(),
            _ => None,
        }
    }
}

/// Converts the type of each variant to a [`Buf`].
macro_rules! buf_from {
    ($($variant:ident: $buffer:ty,)*) => {$(
        impl From<$buffer> for Buf {
            fn from(buffer: $buffer) -> Self {
                Self::$variant(buffer)
            }
        }
    )*};
}

buf_from! {
    Bytes: Bytes,
    Vec: Vec<u8>,
    Arc: Arc<[u8]>,
    Static: &'static [u8],
    Pool: PoolBuf,
    Mapped: Mapped,
    File: FilePart,
    Many: Vec<Buf>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn addresses(buffer: &impl Stable) -> Vec<(usize, usize)> {
        let mut found = Vec::new();
        buffer.pieces(&mut |piece| found.push((piece.address as usize, piece.len)));
        found
    }

    #[test]
    fn pieces_do_not_move_with_their_owner() {
        let buffers = vec![
            Buf::from(vec![1; 100]),
            Buf::from(Bytes::from(vec![2; 50])),
            Buf::from(Arc::<[u8]>::from(vec![3; 7])),
            Buf::from(&b"static"[..]),
        ];
        let many = Buf::from(buffers);
        let before = addresses(&many);
        let moved = Box::new(many);
        assert_eq!(addresses(&*moved), before);
        assert_eq!(
            before.iter().map(|piece| piece.1).collect::<Vec<_>>(),
            [100, 50, 7, 6]
        );
        assert_eq!(moved.total(), 163);
    }

    #[test]
    fn debug_output_contains_the_length_only() {
        let many = Buf::from(vec![Buf::from(vec![1; 100]), Buf::from(&b"static"[..])]);
        assert_eq!(format!("{many:?}"), "Many(106 bytes)");
    }
}
