//! Relays: a vsock connection joined to a socket of another kind.
//!
//! Here are only the sockets: how a host program reaches a guest and a guest a host program.
//! The bytes never pass through this room: [`crate::device`] moves them between guest memory and
//! the socket. What must hold: no call blocks, whatever a peer or a full backlog does.

pub(crate) mod forward;
pub(crate) mod hybrid;

use rustix::fd::OwnedFd;

/// How far a connect to a host socket has come.
#[derive(Debug)]
pub(crate) enum Attempt {
    /// Connected.
    Ready(OwnedFd),
    /// Under way: the socket becomes writable when it is decided.
    InProgress(OwnedFd),
    /// The listener's backlog is full: try again a little later. (A non-blocking Unix connect
    /// says EAGAIN and leaves nothing to wait on.)
    Later,
    /// Nobody is there.
    Refused(std::io::Error),
}
