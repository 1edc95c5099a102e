//! What can go wrong with a connection, by whose fault it is.
//!
//! Calls that look like those of `std::net` return [`std::io::Error`]; its source is one of these,
//! and its kind the one that a TCP socket would give.

use std::io::{Error, ErrorKind};

use zerosock_proto::vsock::{ConnectError as Denied, ListenError as Occupied, RefuseReason};
use zerosock_proto::{Cid, Port};

use crate::fault::Fault;
use crate::table::backend::{RecvFault, SendFault};

/// Why a connection did not come about.
///
/// The calls that connect return an [`std::io::Error`] with the kind that a TCP socket would give;
/// this is inside.
///
/// ```
/// # let dir = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/hub.rs"));
/// # let path = dir.path().join("attach.sock");
/// use std::io::ErrorKind;
/// use zerosock::vsock::{ConnectError, Endpoint};
/// use zerosock::{Address, Cid, Port};
///
/// let process = Endpoint::attach(&path)?;
/// let nobody = Address::new(Cid::HOST, Port::new(4711));
/// let error = process.connect(nobody).unwrap_err();
/// assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
/// let reason = error.get_ref().and_then(|inner| inner.downcast_ref::<ConnectError>());
/// assert_eq!(reason, Some(&ConnectError::Refused));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Copy, Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// The peer: nobody listens there, as many wait there as may, or, seen from a process, there
    /// is nobody with that CID. `ConnectionRefused`.
    #[error("the peer refuses the connection")]
    Refused,
    /// The peer: nobody has answered in time. `TimedOut`.
    #[error("the peer has not answered in time")]
    TimedOut,
    /// The peer: it answered with what makes no sense, and was reset. `InvalidData`.
    #[error("the peer has broken the protocol")]
    Protocol,
    /// The peer, or the device between: it went away, or was started anew, before the answer.
    /// `ConnectionReset`.
    #[error("the peer has gone")]
    Gone,
    /// The caller: nobody has that CID, it is no guest's, or its guest has no driver that runs.
    /// `HostUnreachable`.
    #[error("nobody can be reached at that CID")]
    Unreachable,
    /// The peer, or the device between: it has no sockets of that kind (it did not accept the
    /// feature). `Unsupported`.
    #[error("the peer has no sockets of that kind")]
    Unsupported,
    /// The system: all local ports have a connection with that address, or the one that was chosen
    /// has. `AddrInUse`.
    #[error("no local port is left for that address")]
    NoPort,
    /// The caller: it has as many connections as it may. `OutOfMemory`.
    #[error("too many connections")]
    TooManyConnections,
    /// The caller: it gave the stream up before the answer. `ConnectionAborted`.
    #[error("the connection was given up")]
    GivenUp,
}

impl ConnectError {
    /// Who is to blame.
    pub fn fault(&self) -> Fault {
        match self {
            ConnectError::Refused
            | ConnectError::TimedOut
            | ConnectError::Protocol
            | ConnectError::Unsupported
            | ConnectError::Gone => Fault::Peer,
            ConnectError::Unreachable
            | ConnectError::TooManyConnections
            | ConnectError::GivenUp => Fault::Caller,
            ConnectError::NoPort => Fault::System,
        }
    }
}

impl From<ConnectError> for Error {
    fn from(error: ConnectError) -> Error {
        let kind = match error {
            ConnectError::Refused => ErrorKind::ConnectionRefused,
            ConnectError::TimedOut => ErrorKind::TimedOut,
            ConnectError::Protocol => ErrorKind::InvalidData,
            ConnectError::Gone => ErrorKind::ConnectionReset,
            ConnectError::Unreachable => ErrorKind::HostUnreachable,
            ConnectError::Unsupported => ErrorKind::Unsupported,
            ConnectError::NoPort => ErrorKind::AddrInUse,
            ConnectError::TooManyConnections => ErrorKind::OutOfMemory,
            ConnectError::GivenUp => ErrorKind::ConnectionAborted,
        };
        Error::new(kind, error)
    }
}

/// Why a connection does not do what was asked.
///
/// ```
/// # let (host, process) = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/pair.rs"));
/// use std::io::{ErrorKind, Write};
/// use std::net::Shutdown;
/// use zerosock::vsock::StreamError;
///
/// process.shutdown(Shutdown::Write)?;
/// let error = (&process).write(b"late").unwrap_err();
/// assert_eq!(error.kind(), ErrorKind::BrokenPipe);
/// let reason = error.get_ref().and_then(|inner| inner.downcast_ref::<StreamError>());
/// assert_eq!(reason, Some(&StreamError::ShutDown));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
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
    /// The caller: a message longer than the peer's buffer, or our own, can never arrive: EMSGSIZE.
    /// Nothing of it was sent.
    #[error("the message is longer than the peer's buffer")]
    TooLong,
    /// The caller: this connection has as many leases out as are left for all others of its
    /// endpoint.
    #[error("too many leases and loans are out at once: drop some")]
    TooManyLeases,
    /// The caller: the bytes lie in memory that the peer may write at any time, so there is no
    /// plain slice of them; copy, or declare trust when opening the endpoint.
    #[error("the peer may write this memory: copy out of it, or declare trust")]
    Untrusted,
    /// Nobody: the buffer lies in several pieces of the peer's memory, so there is no one slice of
    /// it; use the calls that take pieces, or copy.
    #[error("the buffer lies in several pieces: there is no one slice of it")]
    Scattered,
    /// The memory of a lease or a loan went back to the peer: what it holds means nothing.
    #[error("the memory went back to the peer")]
    Torn,
}

impl From<StreamError> for Error {
    fn from(error: StreamError) -> Error {
        let kind = match error {
            StreamError::Reset | StreamError::Torn => ErrorKind::ConnectionReset,
            StreamError::PeerDeaf | StreamError::ShutDown => ErrorKind::BrokenPipe,
            StreamError::TooLong => ErrorKind::InvalidInput,
            StreamError::TooManyLeases => ErrorKind::OutOfMemory,
            StreamError::Untrusted => ErrorKind::PermissionDenied,
            StreamError::Scattered => ErrorKind::Unsupported,
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
        SendFault::TooLong => Some(StreamError::TooLong),
        SendFault::TooManyLoans => Some(StreamError::TooManyLeases),
    }
}

/// The request was not even sent.
pub(super) fn of_connect(error: Denied) -> ConnectError {
    match error {
        Denied::InUse => ConnectError::NoPort,
        Denied::TooManyConnections => ConnectError::TooManyConnections,
        // The other two are never asked for: our own CID, and streams.
        Denied::Unreachable | Denied::LocalCid => ConnectError::Unreachable,
        Denied::SocketType => ConnectError::Unsupported,
    }
}

/// The request was sent.
pub(super) fn of_refusal(reason: RefuseReason) -> ConnectError {
    match reason {
        RefuseReason::Reset => ConnectError::Refused,
        RefuseReason::TimedOut => ConnectError::TimedOut,
        RefuseReason::ProtocolError => ConnectError::Protocol,
        RefuseReason::TransportReset => ConnectError::Gone,
        RefuseReason::LocalReset => ConnectError::GivenUp,
    }
}

/// Why a port cannot be listened on, or bound; always the caller's fault.
///
/// ```
/// # let dir = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/hub.rs"));
/// # let path = dir.path().join("attach.sock");
/// use std::io::ErrorKind;
/// use zerosock::Port;
/// use zerosock::vsock::{Endpoint, ListenError};
///
/// let process = Endpoint::builder().ports([Port::new(80)]).attach(&path)?;
/// let listener = process.listen(Port::new(80), 16)?;
/// let error = process.listen(Port::new(80), 16).unwrap_err();
/// assert_eq!(error.kind(), ErrorKind::AddrInUse);
/// // Nobody could reach it there.
/// let error = process.listen(Port::new(81), 16).unwrap_err();
/// assert_eq!(error.kind(), ErrorKind::InvalidInput);
/// let reason = error.get_ref().and_then(|inner| inner.downcast_ref::<ListenError>());
/// assert_eq!(reason, Some(&ListenError::NotNamed(Port::new(81))));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Copy, Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ListenError {
    /// Somebody listens there, or has the port for a connection. `AddrInUse`.
    #[error("the port is in use")]
    InUse,
    /// The wildcard is no port to listen on. `InvalidInput`.
    #[error("a port is needed to listen on")]
    AnyPort,
    /// The CID is not the endpoint's own. `AddrNotAvailable`.
    #[error("{0} is not the CID of this endpoint")]
    ForeignCid(Cid),
    /// The socket has a port already. `InvalidInput`.
    #[error("the socket is bound already")]
    AlreadyBound,
    /// The endpoint was opened with [`ports`](super::EndpointBuilder::ports), and this one was not
    /// among them: nobody would reach it. `InvalidInput`.
    #[error("port {0} is not among those that the endpoint was opened with")]
    NotNamed(Port),
}

impl From<ListenError> for Error {
    fn from(error: ListenError) -> Error {
        let kind = match error {
            ListenError::InUse => ErrorKind::AddrInUse,
            ListenError::ForeignCid(_) => ErrorKind::AddrNotAvailable,
            ListenError::AnyPort | ListenError::AlreadyBound | ListenError::NotNamed(_) => {
                ErrorKind::InvalidInput
            }
        };
        Error::new(kind, error)
    }
}

pub(super) fn of_listen(error: Occupied) -> ListenError {
    match error {
        // The last one is about ending it.
        Occupied::InUse | Occupied::NotListening => ListenError::InUse,
        Occupied::AnyPort => ListenError::AnyPort,
    }
}
