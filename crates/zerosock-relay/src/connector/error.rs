//! Why a connection could not be made.

use std::fmt;
use std::io;
use std::net::SocketAddr;

use crate::networks::Denied;
use crate::target::DomainName;

/// Why a connection could not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// As many requests as the connector takes are in flight.
    #[error("too many connections are being made at once: try again later")]
    Busy,
    /// The name servers answer that the name does not exist or has no address.
    #[error("no address for {0}: the name does not exist or has neither an A nor an AAAA record")]
    NoSuchName(DomainName),
    /// The name servers could not be asked, or failed.
    #[error("cannot resolve {name}: {reason}")]
    Resolve {
        /// The name.
        name: DomainName,
        /// What the resolver says.
        reason: String,
    },
    /// The policy denies the address, or all addresses of the name; the first of them is given.
    #[error(transparent)]
    Denied(#[from] Denied),
    /// The target refused the connection; for TCP, its address.
    #[error("connection refused{}", by(.0))]
    Refused(Option<SocketAddr>),
    /// The time-out of the request passed.
    #[error("timed out while {0}")]
    TimedOut(ConnectStage),
    /// Another error of the system.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The program was built without the resolver.
    #[error(
        "cannot resolve {0}: built without the feature `names`; give an address instead of a name"
    )]
    NamesNotSupported(DomainName),
    /// The request was cancelled, or the connector has ended.
    #[error("the connection was given up: it was cancelled, or the connector has ended")]
    Stopped,
}

/// What a request was doing when its time was over.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub enum ConnectStage {
    /// Waiting for name servers.
    Resolving,
    /// Waiting for a file system on the way to a socket.
    LookingUp,
    /// Waiting for the target to accept.
    Connecting,
    /// Writing the first bytes.
    Writing,
}

fn by(address: &Option<SocketAddr>) -> String {
    address.map_or_else(String::new, |address| format!(" by {address}"))
}

impl fmt::Display for ConnectStage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ConnectStage::Resolving => "resolving the name",
            ConnectStage::LookingUp => {
                "looking the path up: a file system on the way does not answer"
            }
            ConnectStage::Connecting => "connecting",
            ConnectStage::Writing => "writing the first bytes",
        })
    }
}
