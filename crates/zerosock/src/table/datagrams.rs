//! What the datagram sockets of an endpoint ask of its [`Engine`](crate::table::engine::Engine).
//!
//! What must hold: as there. No call sleeps, and what calls queue becomes visible with the next
//! flush or turn. A send that is refused for now makes the engine name the socket
//! ([`ReadySource::Datagram`](crate::table::engine::ReadySource)) when it is worth another try.

use zerosock_proto::vsock::datagram::{
    BindError, DatagramDrops, DatagramId, DatagramLimits, DatagramStats, Refusal,
};
use zerosock_proto::{Address, Port};

use crate::table::engine::{LoanParts, Payload, RecvFault};
use crate::table::inboxes::{Got, GotLease};

/// Why a datagram is not sent.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(crate) enum DatagramFault {
    /// No buffer now, or the destination has enough.
    WouldBlock,
    /// Longer than any may be, or than the receiver's queue can take.
    TooLong(usize),
    /// Our own device has not negotiated datagrams.
    NoDatagrams,
    /// The destination has not.
    Deaf,
    /// There is nobody with that CID, or he may not be reached.
    Unreachable,
    /// As many leases and loans are out as the endpoint can count.
    TooManyLoans,
    /// There is no such socket, or no such loan.
    Unknown,
}

impl From<Refusal> for DatagramFault {
    fn from(refusal: Refusal) -> DatagramFault {
        match refusal {
            Refusal::Unknown => DatagramFault::Unknown,
            Refusal::TooLong(len) => DatagramFault::TooLong(len),
            Refusal::Throttled | Refusal::Stopped => DatagramFault::WouldBlock,
            Refusal::Unsupported => DatagramFault::Deaf,
        }
    }
}

/// See the module.
pub(crate) trait DatagramEngine {
    /// A socket at `port`, or at one that nobody has; and its address.
    fn bind(
        &mut self,
        port: Port,
        limits: DatagramLimits,
    ) -> Result<(DatagramId, Address), BindError>;

    /// Ends a socket; what it has not read is dropped.
    fn close(&mut self, id: DatagramId);

    /// Receives from `peer` alone, or from everybody.
    fn connect(&mut self, id: DatagramId, peer: Option<Address>);

    /// How much of a socket's may wait.
    fn limits(&self, id: DatagramId) -> Option<DatagramLimits>;

    /// Changes it.
    fn set_limits(&mut self, id: DatagramId, limits: DatagramLimits);

    /// Copies a datagram to where the peer's side reads it.
    fn send(&mut self, id: DatagramId, to: Address, bytes: &[u8]) -> Result<(), DatagramFault>;

    /// Borrows a buffer that the peer's side will read, for a datagram of at most `len` bytes.
    fn loan(&mut self, id: DatagramId, to: Address, len: usize)
    -> Result<LoanParts, DatagramFault>;

    /// Sends the first `len` bytes of a loan; of `private` if it was not in place. Unless it says
    /// `WouldBlock`, the loan is over.
    fn send_loan(
        &mut self,
        index: u32,
        len: usize,
        private: Option<&[u8]>,
    ) -> Result<(), DatagramFault>;

    /// Whether the other side of the queue has taken all that was sent. If not, the socket is named
    /// when it is worth another look.
    fn is_flushed(&mut self, _id: DatagramId) -> bool {
        true
    }

    /// Whether a send would do something now: send, or fail. If not, the socket is named when it
    /// would.
    fn may_send(&mut self, id: DatagramId, to: Option<Address>) -> bool;

    /// Copies the next datagram to `out`, as far as it fits; `None`: there is none.
    fn recv(&mut self, id: DatagramId, out: &mut [u8], peek: bool) -> Option<Got>;

    /// Lends the next datagram out.
    fn lease(&mut self, id: DatagramId) -> Result<GotLease, RecvFault>;

    /// Whether the opener has declared that this peer writes nothing that is on lease.
    fn trusts(&self, pool: Option<u32>) -> bool;

    /// Shows up to `most` datagrams where they lie, and takes them, as long as `look` says so; how
    /// many. `look` hears whether the opener has declared that the peer writes nothing meanwhile.
    fn each(
        &mut self,
        id: DatagramId,
        most: usize,
        look: &mut dyn FnMut(Address, Payload<'_>, bool) -> bool,
    ) -> usize;

    /// Whether a datagram is there.
    fn has_some(&self, id: DatagramId) -> bool;

    /// What a socket has counted.
    fn stats(&self, id: DatagramId) -> Option<DatagramStats>;

    /// What was dropped, over all sockets.
    fn drops(&self) -> DatagramDrops;
}
