//! The datagram calls of a [`Backend`](crate::table::backend::Backend).
//!
//! # Invariants
//! - No call sleeps.
//! - Queued packets become visible to the peer with the next flush or turn.
//! - After [`DatagramFault::WouldBlock`] the backend reports the socket as
//!   [`ReadySource::Datagram`](crate::table::backend::ReadySource) when a retry may succeed.

use zerosock_proto::Address;
use zerosock_proto::vsock::datagram::{DatagramId, DatagramRefusal};

use super::calls::InboxCalls;
use super::transfers::LoanParts;

/// Why a datagram was not sent.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub enum DatagramFault {
    /// No free buffer, or the destination's receive limit is reached.
    WouldBlock,
    /// Longer than the largest datagram, or than the receiver's queue can take.
    TooLong(usize),
    /// The device of this endpoint did not negotiate datagrams.
    NoDatagrams,
    /// The destination did not negotiate datagrams.
    PeerUnsupported,
    /// No endpoint has that CID, or the access rules forbid to reach it.
    Unreachable,
    /// All entries of the endpoint's lease table are in use.
    TooManyLoans,
    /// No such socket or loan.
    Unknown,
}

impl From<DatagramRefusal> for DatagramFault {
    fn from(refusal: DatagramRefusal) -> DatagramFault {
        match refusal {
            DatagramRefusal::Unknown => DatagramFault::Unknown,
            DatagramRefusal::TooLong(len) => DatagramFault::TooLong(len),
            DatagramRefusal::Throttled | DatagramRefusal::Stopped => DatagramFault::WouldBlock,
            DatagramRefusal::Unsupported => DatagramFault::PeerUnsupported,
        }
    }
}

/// Datagram sockets as seen by the API. See the module documentation; the calls that both halves
/// implement alike are in [`InboxCalls`].
pub trait DatagramBackend: InboxCalls {
    /// Copies a datagram into buffers that the peer reads.
    fn send(&mut self, id: DatagramId, to: Address, bytes: &[u8]) -> Result<(), DatagramFault>;

    /// Borrows a buffer that the peer will read, for a datagram of at most `len` bytes.
    fn loan(&mut self, id: DatagramId, to: Address, len: usize)
    -> Result<LoanParts, DatagramFault>;

    /// Sends the first `len` bytes of a loan; `private` holds them if the loan was not in place.
    /// Ends the loan unless it returns `WouldBlock`.
    fn send_loan(
        &mut self,
        index: u32,
        len: usize,
        private: Option<&[u8]>,
    ) -> Result<(), DatagramFault>;

    /// Whether the peer has consumed all sent buffers. If not, the socket becomes ready when they
    /// return.
    fn is_flushed(&mut self, _id: DatagramId) -> bool {
        true
    }

    /// Whether a send would succeed or fail now instead of blocking. If not, the socket becomes
    /// ready when it would.
    fn may_send(&mut self, id: DatagramId, to: Option<Address>) -> bool;
}
