//! Where the bytes of leases and loans lie.

use std::ops::Deref;
use std::sync::Arc;

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
        /// The bytes, and the rest of the buffer behind them.
        pieces: Pieces,
    },
    /// In a copy.
    Copied(Copied),
}

impl BufferPlace {
    /// The bytes from `offset` of `pieces` on; `None` if they are in too many pieces.
    #[inline]
    pub(crate) fn new(
        memory: &Arc<Memory>,
        mut pieces: &[Piece],
        mut offset: usize,
    ) -> Option<BufferPlace> {
        // Skips pieces that contain only the header; the rest is then often one piece, and a
        // trusting reader gets one slice.
        while let [first, rest @ ..] = pieces
            && first.len() <= offset
            && !rest.is_empty()
        {
            offset -= first.len();
            pieces = rest;
        }
        let pieces = match pieces {
            [piece] => Pieces::One(piece.part(offset, piece.len())),
            pieces => Pieces::more(pieces, offset)?,
        };
        let memory = Arc::clone(memory);
        Some(BufferPlace::InPlace { memory, pieces })
    }
}

/// The pieces of a buffer: nearly always one, which takes no allocation.
#[derive(Clone, Debug)]
pub(crate) enum Pieces {
    One(Piece),
    /// At most [`PIECES`].
    More(Box<[Piece]>),
}

impl Pieces {
    /// The bytes from `offset` of the first piece on; `None` if there are too many pieces.
    #[cold]
    fn more(pieces: &[Piece], offset: usize) -> Option<Pieces> {
        if pieces.len() > PIECES {
            return None;
        }
        let mut pieces: Box<[Piece]> = pieces.into();
        let first = pieces.first_mut()?;
        *first = first.part(offset, first.len());
        Some(Pieces::More(pieces))
    }
}

impl Deref for Pieces {
    type Target = [Piece];

    #[inline]
    fn deref(&self) -> &[Piece] {
        match self {
            Pieces::One(piece) => std::slice::from_ref(piece),
            Pieces::More(pieces) => pieces,
        }
    }
}

/// A new lease, returned to the API.
#[derive(Debug)]
pub struct LeaseParts {
    /// The lease's index in the lease table; identifies it in later calls.
    pub(crate) index: u32,
    pub(crate) len: usize,
    pub(crate) place: BufferPlace,
    /// The lease may return with the endpoint's next call, while this is
    /// [`Leases::round`](super::leases::Leases::round).
    pub(crate) round: Option<u32>,
}

/// Why no lease was made.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(crate) enum NoLease {
    /// Nothing is unread.
    Empty,
    /// The connection has as many leases out as all others could still get.
    TooMany,
}
