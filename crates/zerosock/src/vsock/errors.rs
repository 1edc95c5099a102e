//! The errors of connections and listeners; each names the side at fault.
//!
//! Calls that mirror `std::net` return [`std::io::Error`]. Its source is one of these errors, its
//! kind the one that a TCP socket would give.

use std::io::{Error, ErrorKind};

use zerosock_proto::vsock::{
    ConnectError as Denied, ListenError as Occupied, RefuseReason, datagram,
};
use zerosock_proto::{Address, Cid, Port};

use crate::fault::Fault;
use crate::table::transfers::{RecvFault, SendFault};

/// A connect failed: to which address, and why.
///
/// The connecting calls return an [`std::io::Error`] with the kind that a TCP socket would give;
/// this is its source.
///
/// ```
/// # let dir = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/hub.rs"));
/// # let path = dir.path().join("attach.sock");
/// use std::io::ErrorKind;
/// use zerosock::vsock::{ConnectError, ConnectReason, Endpoint};
/// use zerosock::{Address, Cid, Port};
///
/// let process = Endpoint::attach(&path)?;
/// let unused = Address::new(Cid::HOST, Port::new(4711));
/// let error = process.connect(unused).unwrap_err();
/// assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
/// let reason = error.get_ref().and_then(|inner| inner.downcast_ref::<ConnectError>());
/// let error = reason.expect("typed");
/// assert_eq!((error.peer(), error.reason()), (unused, ConnectReason::Refused));
/// assert!(error.to_string().starts_with("vsock:2:4711: refused"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Copy, Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("{peer:#}: {reason}")]
pub struct ConnectError {
    peer: Address,
    reason: ConnectReason,
}

impl ConnectError {
    pub(super) fn new(peer: Address, reason: ConnectReason) -> ConnectError {
        ConnectError { peer, reason }
    }

    /// The address that was connected to.
    pub fn peer(&self) -> Address {
        self.peer
    }

    /// Why it failed.
    pub fn reason(&self) -> ConnectReason {
        self.reason
    }

    /// The side at fault.
    pub fn fault(&self) -> Fault {
        self.reason.fault()
    }
}

/// Why a connect failed, with the kind of the [`std::io::Error`].
#[derive(Copy, Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectReason {
    /// The peer: no socket listens there, its backlog is full or, seen from a process, the CID does
    /// not exist. `ConnectionRefused`.
    #[error("refused (no listener, its backlog is full, or access is denied)")]
    Refused,
    /// The peer: no answer in time. `TimedOut`.
    #[error("the peer has not answered in time")]
    TimedOut,
    /// The peer: its answer was invalid, and the connection was reset. `InvalidData`.
    #[error("the peer has broken the protocol")]
    Protocol,
    /// The peer, or the device in between: it disconnected or restarted before it answered.
    /// `ConnectionReset`.
    #[error("the peer has gone")]
    PeerGone,
    /// The caller: the CID does not exist, is not a guest's, or its guest has no running driver.
    /// `HostUnreachable`.
    #[error("no guest or process is reachable at that CID")]
    Unreachable,
    /// The peer, or the device in between: it has not negotiated this socket type. `Unsupported`.
    #[error("the peer has no sockets of that kind")]
    Unsupported,
    /// The system: every local port, or the bound one, has a connection with that address already.
    /// `AddrInUse`.
    #[error("no local port is left for that address")]
    NoPort,
    /// The caller: the limit of connections is reached. `OutOfMemory`.
    #[error("too many connections")]
    TooManyConnections,
    /// The caller: it closed the stream before the answer. `ConnectionAborted`.
    #[error("the stream was closed before the peer answered")]
    Aborted,
}

impl ConnectReason {
    /// The side at fault.
    pub fn fault(&self) -> Fault {
        match self {
            ConnectReason::Refused
            | ConnectReason::TimedOut
            | ConnectReason::Protocol
            | ConnectReason::Unsupported
            | ConnectReason::PeerGone => Fault::Peer,
            ConnectReason::Unreachable
            | ConnectReason::TooManyConnections
            | ConnectReason::Aborted => Fault::Caller,
            ConnectReason::NoPort => Fault::System,
        }
    }
}

impl From<ConnectError> for Error {
    fn from(error: ConnectError) -> Error {
        let kind = match error.reason {
            ConnectReason::Refused => ErrorKind::ConnectionRefused,
            ConnectReason::TimedOut => ErrorKind::TimedOut,
            ConnectReason::Protocol => ErrorKind::InvalidData,
            ConnectReason::PeerGone => ErrorKind::ConnectionReset,
            ConnectReason::Unreachable => ErrorKind::HostUnreachable,
            ConnectReason::Unsupported => ErrorKind::Unsupported,
            ConnectReason::NoPort => ErrorKind::AddrInUse,
            ConnectReason::TooManyConnections => ErrorKind::OutOfMemory,
            ConnectReason::Aborted => ErrorKind::ConnectionAborted,
        };
        Error::new(kind, error)
    }
}

/// Why a call of a connected socket failed.
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
    /// The peer: it reset the connection, violated the protocol, or disconnected.
    #[error("the peer has reset the connection")]
    Reset,
    /// The peer: it has shut receiving down.
    #[error("the peer has shut down receiving")]
    PeerShutdown,
    /// The caller: it has shut this direction down.
    #[error("this direction has been shut down")]
    ShutDown,
    /// The caller: the message is longer than the peer's receive buffer or the socket's own, and
    /// can never arrive: EMSGSIZE. Nothing of it was sent.
    #[error("the message is longer than the peer's buffer")]
    TooLong,
    /// The caller: this connection holds as many leases as the endpoint has left for all others.
    #[error("too many leases and loans are out at once: drop some")]
    TooManyLeases,
    /// The caller: the peer may write the memory at any time, so there is no plain slice of it;
    /// copy, or declare trust when opening the endpoint.
    #[error("the peer may write this memory: copy out of it, or declare trust")]
    Untrusted,
    /// No fault: the buffer lies in several pieces of the peer's memory, so there is no single
    /// slice of it; use the calls for pieces, or copy.
    #[error("the buffer lies in several pieces: no single slice has all of it")]
    Scattered,
    /// The peer has taken back the memory of a lease or a loan: its contents are undefined.
    #[error("the memory went back to the peer")]
    Revoked,
}

impl From<StreamError> for Error {
    fn from(error: StreamError) -> Error {
        let kind = match error {
            StreamError::Reset | StreamError::Revoked => ErrorKind::ConnectionReset,
            StreamError::PeerShutdown | StreamError::ShutDown => ErrorKind::BrokenPipe,
            StreamError::TooLong => ErrorKind::InvalidInput,
            StreamError::TooManyLeases => ErrorKind::OutOfMemory,
            StreamError::Untrusted => ErrorKind::PermissionDenied,
            StreamError::Scattered => ErrorKind::Unsupported,
        };
        Error::new(kind, error)
    }
}

/// `None`: the call would block.
pub(super) fn of_recv(fault: RecvFault) -> Option<StreamError> {
    match fault {
        RecvFault::WouldBlock | RecvFault::NotConnected => None,
        RecvFault::Reset | RecvFault::Unknown => Some(StreamError::Reset),
        RecvFault::TooManyLeases => Some(StreamError::TooManyLeases),
    }
}

/// `None`: the call would block.
pub(super) fn of_send(fault: SendFault) -> Option<StreamError> {
    match fault {
        SendFault::WouldBlock | SendFault::NotConnected => None,
        SendFault::ShutDown => Some(StreamError::ShutDown),
        SendFault::Reset | SendFault::Unknown => Some(StreamError::Reset),
        SendFault::TooLong => Some(StreamError::TooLong),
        SendFault::TooManyLoans => Some(StreamError::TooManyLeases),
    }
}

/// The error of a request that was not sent.
pub(super) fn of_connect(peer: Address, error: Denied) -> ConnectError {
    let reason = match error {
        Denied::InUse => ConnectReason::NoPort,
        Denied::TooManyConnections => ConnectReason::TooManyConnections,
        // `LocalCid` cannot happen: sockets connect from their endpoint's own CID.
        Denied::Unreachable | Denied::LocalCid => ConnectReason::Unreachable,
        Denied::SocketType => ConnectReason::Unsupported,
    };
    ConnectError::new(peer, reason)
}

/// The error of a request that was sent.
pub(super) fn of_refusal(peer: Address, reason: RefuseReason) -> ConnectError {
    let reason = match reason {
        RefuseReason::Reset => ConnectReason::Refused,
        RefuseReason::TimedOut => ConnectReason::TimedOut,
        RefuseReason::ProtocolError => ConnectReason::Protocol,
        RefuseReason::TransportReset => ConnectReason::PeerGone,
        RefuseReason::LocalReset => ConnectReason::Aborted,
    };
    ConnectError::new(peer, reason)
}

/// Why a port cannot be listened on or bound.
///
/// ```
/// # let dir = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/hub.rs"));
/// # let path = dir.path().join("attach.sock");
/// use std::io::ErrorKind;
/// use zerosock::Port;
/// use zerosock::vsock::{Endpoint, BindError};
///
/// let process = Endpoint::builder().ports([Port::new(80)]).attach(&path)?;
/// let listener = process.listen(Port::new(80), 16)?;
/// let error = process.listen(Port::new(80), 16).unwrap_err();
/// assert_eq!(error.kind(), ErrorKind::AddrInUse);
/// // No peer could reach that port.
/// let error = process.listen(Port::new(81), 16).unwrap_err();
/// assert_eq!(error.kind(), ErrorKind::InvalidInput);
/// let reason = error.get_ref().and_then(|inner| inner.downcast_ref::<BindError>());
/// assert_eq!(reason, Some(&BindError::NotNamed(Port::new(81))));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Copy, Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum BindError {
    /// Another socket listens on the port or uses it for a connection. `AddrInUse`.
    #[error("the port is in use")]
    InUse,
    /// The limit of datagram sockets is reached. `OutOfMemory`.
    #[error("too many datagram sockets")]
    TooMany,
    /// The wildcard is not a port to listen on. `InvalidInput`.
    #[error("a port is needed to listen on")]
    AnyPort,
    /// The CID is not the endpoint's own. `AddrNotAvailable`.
    #[error("{0} is not the CID of this endpoint")]
    ForeignCid(Cid),
    /// The socket is bound already. `InvalidInput`.
    #[error("the socket is bound already")]
    AlreadyBound,
    /// The endpoint was opened with [`ports`](super::EndpointBuilder::ports), and this one was not
    /// among them, or it is a service that has not claimed it: no peer could reach it. `InvalidInput`.
    #[error("port {0} is not among those that the endpoint was opened with")]
    NotNamed(Port),
}

impl From<BindError> for Error {
    fn from(error: BindError) -> Error {
        let kind = match error {
            BindError::InUse => ErrorKind::AddrInUse,
            BindError::TooMany => ErrorKind::OutOfMemory,
            BindError::ForeignCid(_) => ErrorKind::AddrNotAvailable,
            BindError::AnyPort | BindError::AlreadyBound | BindError::NotNamed(_) => {
                ErrorKind::InvalidInput
            }
        };
        Error::new(kind, error)
    }
}

pub(super) fn of_listen(error: Occupied) -> BindError {
    match error {
        // `NotListening` is an error of ending a listener, not of starting one.
        Occupied::InUse | Occupied::NotListening => BindError::InUse,
        Occupied::AnyPort => BindError::AnyPort,
    }
}

pub(super) fn of_bind(error: datagram::BindError) -> BindError {
    match error {
        datagram::BindError::InUse => BindError::InUse,
        datagram::BindError::TooMany => BindError::TooMany,
    }
}
