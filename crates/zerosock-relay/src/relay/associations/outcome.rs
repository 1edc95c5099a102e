//! Why a sender has no association, or no longer.

use std::fmt;
use std::net::SocketAddr;

use rustix::io::Errno;

/// Why there is no association for a new sender.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(in crate::relay) enum OpenError {
    /// As many exist as are allowed, or as there are descriptors for.
    Full,
    /// The target cannot be reached.
    Unreachable,
}

/// Why an association has ended.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(in crate::relay) enum Ended {
    /// The target has ended its connection.
    Closed,
    /// The socket to the target has failed.
    Failed(Errno),
    /// This address of the target has refused a datagram, and its name has another one.
    Refused(SocketAddr),
    /// No datagram for the time-out.
    Idle,
    /// There was no room for a new sender, and nothing was relayed here for the longest time.
    Replaced,
}

impl fmt::Display for Ended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Ended::Closed => f.write_str("closed"),
            Ended::Failed(errno) => errno.fmt(f),
            Ended::Refused(address) => write!(f, "{address} has refused a datagram"),
            Ended::Idle => f.write_str("idle"),
            Ended::Replaced => f.write_str("a new sender has taken its place"),
        }
    }
}
