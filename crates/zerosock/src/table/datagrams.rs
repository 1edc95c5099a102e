//! The datagram calls of a [`Backend`](crate::table::backend::Backend).
//!
//! # Invariants
//! - No call sleeps.
//! - Queued packets become visible to the peer with the next flush or turn.
//! - After [`DatagramFault::WouldBlock`] the backend reports the socket as
//!   [`ReadySource::Datagram`](crate::table::backend::ReadySource) when a retry may succeed.

use zerosock_proto::vsock::datagram::{
    BindError, DatagramDrops, DatagramId, DatagramLimits, DatagramStats, Refusal,
};
use zerosock_proto::{Address, Port};

use crate::table::inboxes::{LeasedDatagram, ReceivedDatagram};
use crate::table::transfers::{LoanParts, Payload, RecvFault};

/// Why a datagram was not sent.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(crate) enum DatagramFault {
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

impl From<Refusal> for DatagramFault {
    fn from(refusal: Refusal) -> DatagramFault {
        match refusal {
            Refusal::Unknown => DatagramFault::Unknown,
            Refusal::TooLong(len) => DatagramFault::TooLong(len),
            Refusal::Throttled | Refusal::Stopped => DatagramFault::WouldBlock,
            Refusal::Unsupported => DatagramFault::PeerUnsupported,
        }
    }
}

/// Datagram sockets as seen by the API. See the module documentation.
pub(crate) trait DatagramBackend {
    /// Opens a socket at `port`, or at a free port for [`Port::ANY`]. Returns its id and address.
    fn bind(
        &mut self,
        port: Port,
        limits: DatagramLimits,
    ) -> Result<(DatagramId, Address), BindError>;

    /// Closes a socket and drops its unread datagrams.
    fn close(&mut self, id: DatagramId);

    /// Restricts reception to datagrams from `peer`; `None` accepts all senders.
    fn connect(&mut self, id: DatagramId, peer: Option<Address>);

    /// The limits on unread and unsent bytes of a socket.
    fn limits(&self, id: DatagramId) -> Option<DatagramLimits>;

    /// Changes the limits.
    fn set_limits(&mut self, id: DatagramId, limits: DatagramLimits);

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

    /// Copies the next datagram to `out`, truncated to its length. `None`: the socket is empty.
    fn recv(&mut self, id: DatagramId, out: &mut [u8], peek: bool) -> Option<ReceivedDatagram>;

    /// Leases the next datagram.
    fn lease(&mut self, id: DatagramId) -> Result<LeasedDatagram, RecvFault>;

    /// Whether the application declared the peer of `pool` trusted: it does not write leased bytes.
    fn trusts(&self, pool: Option<u32>) -> bool;

    /// Passes up to `most` datagrams to `look` in place and consumes them, until `look` returns
    /// false. Returns their number. The last argument of `look` tells whether the peer is trusted
    /// not to write the bytes meanwhile.
    fn consume_in_place(
        &mut self,
        id: DatagramId,
        most: usize,
        look: &mut dyn FnMut(Address, Payload<'_>, bool) -> bool,
    ) -> usize;

    /// Whether a datagram is unread.
    fn has_some(&self, id: DatagramId) -> bool;

    /// The counters of a socket.
    fn stats(&self, id: DatagramId) -> Option<DatagramStats>;

    /// Dropped datagrams over all sockets.
    fn drops(&self) -> DatagramDrops;
}
