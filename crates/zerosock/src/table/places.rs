//! Where the bytes of leases and loans lie.

use std::sync::Arc;

use arrayvec::ArrayVec;
use zerosock_ring::{Memory, Piece};

/// Limit on the pieces of a lease in place; bytes in more pieces are copied.
pub(crate) const PIECES: usize = 4;

/// A copy and the offset of the lease's bytes in it.
pub(crate) type Copied = (Arc<Vec<u8>>, usize);

/// Where the bytes of a lease or loan lie.
#[derive(Clone, Debug)]
pub(crate) enum BufferPlace {
    /// In the peer's buffer, until the lease's state word says otherwise.
    InPlace {
        memory: Arc<Memory>,
        pieces: ArrayVec<Piece, PIECES>,
        /// Offset of the first byte from the beginning of the pieces.
        offset: usize,
    },
    /// In a copy.
    Copied(Copied),
}

/// A new lease, returned to the API.
#[derive(Debug)]
pub(crate) struct LeaseParts {
    /// The lease's index in the lease table; identifies it in later calls.
    pub(crate) index: u32,
    pub(crate) len: usize,
    pub(crate) place: BufferPlace,
}

/// Why no lease was made.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(crate) enum NoLease {
    /// Nothing is unread.
    Empty,
    /// The connection has as many leases out as all others could still get.
    TooMany,
}
