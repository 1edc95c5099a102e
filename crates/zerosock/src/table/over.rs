//! The end of an endpoint.

use crate::fault::Fault;
use std::io::{Error, ErrorKind};

/// An endpoint or a host is over: its device broke the rings, or the system failed it. All of its
/// sockets answer with an [`std::io::Error`] of the kind `ConnectionAborted`; this is inside. Other
/// endpoints of the process are not concerned.
///
/// ```
/// use std::io::{Error, ErrorKind};
/// use zerosock::vsock::{EndpointOver, Fault};
///
/// /// Whether to attach once more.
/// fn again(error: &Error) -> bool {
///     let inside = error.get_ref().and_then(|inner| inner.downcast_ref::<EndpointOver>());
///     inside.is_some_and(|over| over.fault() == Fault::Peer)
/// }
/// assert!(!again(&ErrorKind::ConnectionReset.into()));
/// ```
#[derive(Clone, Debug, thiserror::Error)]
#[error("the endpoint is over: {why}")]
pub struct EndpointOver {
    fault: Fault,
    why: String,
}

impl EndpointOver {
    pub(crate) fn new(fault: Fault, why: impl ToString) -> EndpointOver {
        EndpointOver {
            fault,
            why: why.to_string(),
        }
    }

    /// Who is to blame.
    pub fn fault(&self) -> Fault {
        self.fault
    }
}

impl From<EndpointOver> for Error {
    fn from(over: EndpointOver) -> Error {
        Error::new(ErrorKind::ConnectionAborted, over)
    }
}
