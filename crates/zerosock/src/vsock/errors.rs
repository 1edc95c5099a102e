//! What can go wrong with a connection, by whose fault it is.
//!
//! Calls that look like those of `std::net` return [`std::io::Error`]; its source is one of these,
//! and its kind the one that a TCP socket would give.

use std::io::{Error, ErrorKind};

use zerosock_proto::vsock::{ConnectError as Refusal, ListenError as Occupied};

use super::engine::{RecvFault, SendFault};

/// Why a connection does not do what was asked.
#[derive(Copy, Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum StreamError {
    /// The peer: it reset the connection, broke the protocol, or is gone.
    #[error("the peer has reset the connection")]
    Reset,
    /// The peer: it will read no more.
    #[error("the peer reads no more")]
    PeerDeaf,
    /// The caller: it has shut this direction down.
    #[error("this direction has been shut down")]
    ShutDown,
    /// The caller: it holds more leases and loans than an endpoint can count.
    #[error("too many leases and loans are out at once: drop some")]
    TooManyLeases,
    /// The caller: the bytes lie in memory that the peer may write at any time, so there is no
    /// plain slice of them; copy, or declare trust when opening the endpoint.
    #[error("the peer may write this memory: copy out of it, or declare trust")]
    Untrusted,
    /// The memory of a loan went back to the peer before it was sent.
    #[error("the memory of the loan went back to the peer")]
    Torn,
}

impl From<StreamError> for Error {
    fn from(error: StreamError) -> Error {
        let kind = match error {
            StreamError::Reset | StreamError::Torn => ErrorKind::ConnectionReset,
            StreamError::PeerDeaf | StreamError::ShutDown => ErrorKind::BrokenPipe,
            StreamError::TooManyLeases => ErrorKind::OutOfMemory,
            StreamError::Untrusted => ErrorKind::PermissionDenied,
        };
        Error::new(kind, error)
    }
}

/// `None`: not now.
pub(super) fn of_recv(fault: RecvFault) -> Option<StreamError> {
    match fault {
        RecvFault::WouldBlock | RecvFault::NotConnected => None,
        RecvFault::Reset | RecvFault::Unknown => Some(StreamError::Reset),
        RecvFault::TooManyLeases => Some(StreamError::TooManyLeases),
    }
}

/// `None`: not now.
pub(super) fn of_send(fault: SendFault) -> Option<StreamError> {
    match fault {
        SendFault::WouldBlock | SendFault::NotConnected => None,
        SendFault::ShutDown => Some(StreamError::ShutDown),
        SendFault::Reset | SendFault::Unknown => Some(StreamError::Reset),
        SendFault::TooManyLoans => Some(StreamError::TooManyLeases),
    }
}

pub(super) fn of_connect(error: Refusal) -> Error {
    let kind = match error {
        Refusal::InUse => ErrorKind::AddrInUse,
        Refusal::LocalCid => ErrorKind::AddrNotAvailable,
        Refusal::Unreachable => ErrorKind::HostUnreachable,
        Refusal::SocketType => ErrorKind::Unsupported,
        Refusal::TooManyConnections => ErrorKind::OutOfMemory,
    };
    Error::new(kind, error)
}

pub(super) fn of_listen(error: Occupied) -> Error {
    let kind = match error {
        Occupied::InUse => ErrorKind::AddrInUse,
        _ => ErrorKind::InvalidInput,
    };
    Error::new(kind, error)
}
