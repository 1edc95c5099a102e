//! The error of calls on an endpoint that has ended.

use std::io::{Error, ErrorKind};

use crate::fault::Fault;

/// The endpoint has ended: its peer violated the virtio protocol, or a system call failed. All its
/// sockets return an [`std::io::Error`] of the kind `ConnectionAborted` that contains this error.
/// Other endpoints of the process are not affected.
///
/// ```
/// use std::io::{Error, ErrorKind};
/// use zerosock::vsock::{EndpointEnded, Fault};
///
/// /// Whether to attach again.
/// fn should_reattach(error: &Error) -> bool {
///     let inside = error.get_ref().and_then(|inner| inner.downcast_ref::<EndpointEnded>());
///     inside.is_some_and(|over| over.fault() == Fault::Peer)
/// }
/// assert!(!should_reattach(&ErrorKind::ConnectionReset.into()));
/// ```
#[derive(Clone, Debug, thiserror::Error)]
#[error("the endpoint has ended: {why}")]
pub struct EndpointEnded {
    fault: Fault,
    why: String,
}

impl EndpointEnded {
    pub(crate) fn new(fault: Fault, why: impl ToString) -> EndpointEnded {
        EndpointEnded {
            fault,
            why: why.to_string(),
        }
    }

    /// Which side caused the end.
    pub fn fault(&self) -> Fault {
        self.fault
    }
}

impl From<EndpointEnded> for Error {
    fn from(over: EndpointEnded) -> Error {
        Error::new(ErrorKind::ConnectionAborted, over)
    }
}
