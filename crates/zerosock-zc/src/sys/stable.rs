//! The trait of buffers that the kernel can read while their owner does nothing with them.
#![allow(unsafe_code)]

use std::sync::Arc;

use super::pool::Arena;

/// Contiguous bytes, as passed to the kernel.
#[derive(Copy, Clone, Debug)]
pub struct Piece {
    pub(super) address: *const u8,
    pub(super) len: usize,
}

impl Piece {
    pub(super) const EMPTY: Self = Self {
        address: std::ptr::dangling(),
        len: 0,
    };

    pub(super) fn vector(self) -> libc::iovec {
        libc::iovec {
            iov_base: self.address.cast_mut().cast(),
            iov_len: self.len,
        }
    }

    /// The rest of the piece after `skip` bytes, or none if it is empty. Reduces `skip` by the
    /// bytes skipped.
    pub(super) fn behind(self, skip: &mut usize) -> Option<Self> {
        let passed = self.len.min(*skip);
        *skip -= passed;
        (passed < self.len).then(|| Self {
            address: self.address.wrapping_add(passed),
            len: self.len - passed,
        })
    }
}

impl From<&libc::iovec> for Piece {
    fn from(vector: &libc::iovec) -> Self {
        Self {
            address: vector.iov_base.cast_const().cast(),
            len: vector.iov_len,
        }
    }
}

impl From<&[u8]> for Piece {
    fn from(bytes: &[u8]) -> Self {
        Self {
            address: bytes.as_ptr(),
            len: bytes.len(),
        }
    }
}

/// A buffer that the kernel can read while its owner does nothing with it.
///
/// # Safety
/// The pieces are the same at every call, and readable memory for as long as the value exists,
/// wherever it is moved. Safe code of this process cannot write there meanwhile. A guest or peer
/// that shares the memory, and a writer of a file that is mapped, can: the kernel tolerates that.
pub unsafe trait Stable: Send + 'static {
    /// Calls `each` with the pieces in order.
    fn pieces(&self, each: &mut impl FnMut(Piece));

    /// The pool arena that contains the buffer, if it is a single piece of one: a ring registers
    /// the arena.
    #[doc(hidden)]
    fn arena(&self) -> Option<&Arc<Arena>> {
        None
    }

    /// Length in bytes.
    fn total(&self) -> usize {
        let mut total = 0usize;
        self.pieces(&mut |piece| total = total.saturating_add(piece.len));
        total
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_that_were_sent_are_skipped() {
        let piece = Piece::from(&b"abcdef"[..]);
        let mut skip = 8;
        assert!(piece.behind(&mut skip).is_none());
        assert_eq!(skip, 2);
        let rest = piece.behind(&mut skip).expect("four are left");
        assert_eq!(
            (
                rest.address as usize - piece.address as usize,
                rest.len,
                skip
            ),
            (2, 4, 0)
        );
    }
}
