//! The errors of datagram sockets; each names the side at fault.

use std::io::{Error, ErrorKind};

use crate::table::datagrams::DatagramFault;

/// Why a datagram cannot be sent, whatever the caller waits for. The source of the
/// [`std::io::Error`].
///
/// ```
/// # let (db, web) = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/two.rs"));
/// use std::io::ErrorKind;
/// use zerosock::vsock::{Datagram, DatagramError};
/// use zerosock::Port;
///
/// let ours = Datagram::bind(&db, Port::new(514))?;
/// let theirs = Datagram::bind(&web, Port::ANY)?;
/// let error = theirs.send_to(&[0; 65537], ours.local_addr()).unwrap_err();
/// assert_eq!(error.kind(), ErrorKind::InvalidInput);
/// let reason = error.get_ref().and_then(|inner| inner.downcast_ref::<DatagramError>());
/// assert_eq!(reason, Some(&DatagramError::TooLong(65537)));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Copy, Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum DatagramError {
    /// The caller: the datagram has more than 65536 bytes, or more than all buffers of its
    /// receiver's queue. `InvalidInput`; EMSGSIZE on a kernel socket.
    #[error("a datagram of {0} bytes is too long")]
    TooLong(usize),
    /// The system: the endpoint's device has not negotiated datagrams. `Unsupported`.
    #[error("the device does not take datagrams")]
    NoDatagrams,
    /// The peer: it has not negotiated datagrams; no stock kernel does. `Unsupported`.
    #[error("the destination does not take datagrams")]
    PeerUnsupported,
    /// The caller: the CID does not exist, its guest has no running driver yet, or access rules
    /// forbid it. `HostUnreachable`.
    #[error("no guest or process is reachable at that address")]
    Unreachable,
    /// The caller: the endpoint's limit of leases and loans is reached. `OutOfMemory`.
    #[error("too many leases and loans are out at once: drop some")]
    TooManyLoans,
    /// The peer: it has taken the memory of a loan back, or disconnected. `ConnectionReset`.
    #[error("the memory went back to the peer")]
    Revoked,
}

impl DatagramError {
    /// `None`: the call would block.
    pub(super) fn of(fault: DatagramFault) -> Option<DatagramError> {
        Some(match fault {
            DatagramFault::WouldBlock => return None,
            DatagramFault::TooLong(len) => DatagramError::TooLong(len),
            DatagramFault::NoDatagrams => DatagramError::NoDatagrams,
            DatagramFault::PeerUnsupported => DatagramError::PeerUnsupported,
            DatagramFault::Unreachable => DatagramError::Unreachable,
            DatagramFault::TooManyLoans => DatagramError::TooManyLoans,
            DatagramFault::Unknown => DatagramError::Revoked,
        })
    }
}

impl From<DatagramError> for Error {
    fn from(error: DatagramError) -> Error {
        let kind = match error {
            DatagramError::TooLong(_) => ErrorKind::InvalidInput,
            DatagramError::NoDatagrams | DatagramError::PeerUnsupported => ErrorKind::Unsupported,
            DatagramError::Unreachable => ErrorKind::HostUnreachable,
            DatagramError::TooManyLoans => ErrorKind::OutOfMemory,
            DatagramError::Revoked => ErrorKind::ConnectionReset,
        };
        Error::new(kind, error)
    }
}
