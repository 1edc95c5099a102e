//! What calls that send and receive exchange with a backend.

use zerosock_proto::vsock::{CommitError, ReserveError};
use zerosock_ring::GuestSlice;

use super::places::BufferPlace;

/// Why a receive returned nothing.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub enum RecvFault {
    /// No bytes are available.
    WouldBlock,
    /// The connection was reset or refused.
    Reset,
    /// The connection is not established yet.
    NotConnected,
    /// All entries of the endpoint's lease table are in use.
    TooManyLeases,
    /// No such connection.
    Unknown,
}

/// Why a send was refused.
#[derive(Copy, Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SendFault {
    /// No credit or no free buffer: the connection becomes writable later.
    #[error("no credit or transmit buffer is available")]
    WouldBlock,
    /// This side shut down sending, or the peer shut down receiving (EPIPE).
    #[error("the connection is shut down for sending")]
    ShutDown,
    /// The connection was reset or refused.
    #[error("the connection was reset")]
    Reset,
    /// The connection is not established yet.
    #[error("the connection is not established yet")]
    NotConnected,
    /// The message exceeds the peer's receive buffer (EMSGSIZE).
    #[error("the message is larger than the peer's buffer")]
    TooLong,
    /// All entries of the endpoint's lease table are in use.
    #[error("too many leases and loans are out")]
    TooManyLoans,
    /// No such connection or loan.
    #[error("no such connection")]
    Unknown,
}

impl From<ReserveError> for SendFault {
    fn from(error: ReserveError) -> SendFault {
        match error {
            ReserveError::NoCredit | ReserveError::ShouldCoalesce => SendFault::WouldBlock,
            ReserveError::NotConnected => SendFault::NotConnected,
            ReserveError::Shutdown | ReserveError::PeerShutdown => SendFault::ShutDown,
            ReserveError::TooLong => SendFault::TooLong,
            ReserveError::Stale | ReserveError::Empty | ReserveError::SocketType => {
                SendFault::Reset
            }
        }
    }
}

impl From<CommitError> for SendFault {
    fn from(error: CommitError) -> SendFault {
        match error {
            CommitError::Interleaved | CommitError::ManyEmpty => SendFault::WouldBlock,
            CommitError::Shutdown | CommitError::PeerShutdown => SendFault::ShutDown,
            _ => SendFault::Reset,
        }
    }
}

/// When the peer can see what a call has sent.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub enum Publish {
    /// When the call returns, except for writes that are coalesced.
    Now,
    /// After the next flush or turn: many packets cost one notification.
    Later,
}

/// What the reader of a connection would find.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct Ahead {
    /// Received bytes not read yet.
    pub(crate) unread: usize,
    /// No more bytes will arrive.
    pub(crate) closed: bool,
    /// The part that the next lease would cover.
    pub(crate) next: Option<Next>,
}

/// The first unread part of a connection.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(crate) struct Next {
    pub(crate) len: usize,
    pub(crate) kind: NextKind,
}

/// How a lease on the first unread part would be made.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(crate) enum NextKind {
    /// In place, in the peer's buffer.
    InPlace,
    /// As a new copy, because the lease limits are reached.
    Bounded,
    /// As a copy that exists already or is unavoidable.
    Copied,
}

/// A new loan, returned to the API.
#[derive(Debug)]
pub struct LoanParts {
    /// The loan's index in the lease table; identifies it in later calls.
    pub(crate) index: u32,
    /// Writable bytes.
    pub(crate) len: usize,
    /// Location of the buffer. `None`: the loan limits are reached; the holder allocates a private
    /// buffer of `len` bytes, which is copied when it is sent.
    pub(crate) place: Option<BufferPlace>,
}

/// One buffer of a message loan, ready to send.
#[derive(Copy, Clone, Debug)]
pub struct LoanedPart<'p> {
    /// Index in the lease table; [`NONE`](super::leases::NONE) if the part has no entry.
    pub(crate) index: u32,
    /// Bytes to send.
    pub(crate) len: usize,
    /// The bytes, if the buffer is private.
    pub(crate) private: Option<&'p [u8]>,
}

/// A received part, passed to a callback.
#[derive(Copy, Clone, Debug)]
pub enum Payload<'m> {
    InPlace(&'m [GuestSlice<'m>]),
    Copied(&'m [u8]),
}

/// Limits on what one call may pass to a callback.
#[derive(Copy, Clone, Debug)]
pub(crate) struct ShowBounds {
    pub(crate) packets: usize,
    pub(crate) bytes: usize,
}

impl ShowBounds {
    /// No bytes: the next packet is held.
    pub(crate) const HOLD: ShowBounds = ShowBounds {
        packets: 1,
        bytes: 0,
    };
}

impl<'m> Payload<'m> {
    /// Length in bytes.
    #[inline]
    pub(crate) fn len(self) -> usize {
        match self {
            Payload::Copied(bytes) => bytes.len(),
            Payload::InPlace(slices) => slices.iter().map(|slice| slice.len()).sum(),
        }
    }

    pub(crate) fn in_place(slices: &'m [GuestSlice<'m>]) -> Payload<'m> {
        Payload::InPlace(slices)
    }

    pub(crate) fn copied(bytes: &'m [u8]) -> Payload<'m> {
        Payload::Copied(bytes)
    }

    /// Copies bytes from `offset` on to `out`; returns how many.
    #[inline]
    pub(crate) fn copy_to(self, offset: usize, out: &mut [u8]) -> usize {
        match self {
            Payload::Copied(bytes) => {
                let rest = bytes.get(offset..).unwrap_or(&[]);
                let len = rest.len().min(out.len());
                out[..len].copy_from_slice(&rest[..len]);
                len
            }
            Payload::InPlace([slice]) => slice.read(offset, out),
            Payload::InPlace(slices) => {
                let (mut skip, mut done) = (offset, 0);
                for slice in slices {
                    let Some(rest) = out.get_mut(done..).filter(|rest| !rest.is_empty()) else {
                        break;
                    };
                    done += slice.read(skip, rest);
                    skip = skip.saturating_sub(slice.len());
                }
                done
            }
        }
    }
}
