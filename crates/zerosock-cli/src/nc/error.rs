//! Errors of [`establish`](super::connect::establish).

use std::io;

use rustix::io::Errno;

use crate::sockets;

/// Why no connection was established.
#[derive(Debug, thiserror::Error)]
pub(crate) enum EstablishError {
    #[error("connection refused: {0}")]
    Refused(String),
    #[error("timed out {0}")]
    TimedOut(String),
    #[error(transparent)]
    Bind(#[from] sockets::BindError),
    #[error("{0} (not a hybrid vsock socket?)")]
    Handshake(String),
    #[error(
        "this endpoint has no datagrams; give attach:PATH:CID:PORT, attach-listen:PATH:PORT, \
         service:PATH:CID:PORT or service-listen:PATH:PORT"
    )]
    NoDatagrams,
    #[error("the endpoint listens")]
    Listens,
    #[error("{operation}: {source}")]
    System {
        operation: String,
        source: io::Error,
    },
}

impl EstablishError {
    /// Whether the process or the system has too few descriptors, or too little memory, at the moment.
    pub(super) fn is_shortage(&self) -> bool {
        match self {
            EstablishError::System { source, .. } => matches!(
                Errno::from_io_error(source),
                Some(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM)
            ),
            _ => false,
        }
    }

    /// Whether a later attempt may succeed because the peer has not started yet.
    pub(super) fn is_transient(&self) -> bool {
        match self {
            EstablishError::Refused(_) => true,
            EstablishError::System { source, .. } => {
                matches!(
                    source.kind(),
                    io::ErrorKind::NotFound
                        | io::ErrorKind::ConnectionRefused
                        | io::ErrorKind::ConnectionReset
                        | io::ErrorKind::NetworkUnreachable
                        | io::ErrorKind::HostUnreachable
                        | io::ErrorKind::TimedOut
                        | io::ErrorKind::AddrNotAvailable
                        | io::ErrorKind::WouldBlock
                ) || Errno::from_io_error(source) == Some(Errno::NODEV)
            }
            _ => false,
        }
    }
}

/// The error of an operation of the system or of an attached endpoint.
pub(super) fn failed(operation: String) -> impl Fn(io::Error) -> EstablishError {
    move |source| EstablishError::System {
        operation: operation.clone(),
        source,
    }
}
