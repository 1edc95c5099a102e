//! Host sockets: how host programs reach a guest, and a guest host programs and, by rule, the network.
//!
//! # Invariants
//! - No call blocks, whatever a peer or a full backlog does.
//!
//! [`crate::device`] moves the bytes between guest memory and the sockets.

pub(crate) mod forward;
pub(crate) mod hybrid;
pub(crate) mod network;
mod socket;

use rustix::io::Errno;
use rustix::net::RecvFlags;
pub(crate) use socket::HostSocket;
use zerosock_proto::Port;
use zerosock_relay::connector::NO_PERMISSION;

use crate::stats::RefusalCause;

/// A host socket that guests connect to: its port, and whether it takes messages.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(crate) struct HostPort {
    pub(crate) port: Port,
    pub(crate) messages: bool,
}

/// Stops reading from a host socket: its program gets EPIPE from now on. Bytes that it has written
/// are read and dropped, because closing a socket with unread bytes resets its peer, which would
/// then see an error where the guest's stream ends in order.
pub(crate) fn stop_reading(socket: &HostSocket) {
    // Fails only if the program has gone.
    let _ = rustix::net::shutdown(socket, rustix::net::Shutdown::Read);
    let mut waste = [0u8; 16 << 10];
    // At most a send buffer of bytes: no more can be written.
    for _ in 0..4096 {
        match socket.recv(&mut waste) {
            Ok(n) if n > 0 => {}
            Err(Errno::INTR) => {}
            _ => return,
        }
    }
}

/// Drops unread bytes before a host socket is closed after its guest has closed in order: as
/// [`stop_reading`], but with one call in the usual case without such bytes. A later write of the
/// program fails as on any closed socket.
pub(crate) fn leave_nothing_unread(socket: &HostSocket) {
    match rustix::net::recv(
        socket,
        &mut [0u8; 1][..],
        RecvFlags::PEEK | RecvFlags::DONTWAIT,
    ) {
        Ok((_, n)) if n > 0 => stop_reading(socket),
        Err(Errno::INTR) => stop_reading(socket),
        // No bytes, end of file, or the program has gone.
        _ => {}
    }
}

/// The result of starting a connect to a host socket.
#[derive(Debug)]
pub(crate) enum Attempt {
    /// Connected.
    Ready(HostSocket),
    /// In progress: the socket becomes writable when the connect has succeeded or failed.
    InProgress(HostSocket),
    /// The listener's backlog is full: try again later. (A non-blocking connect to a Unix socket
    /// fails with EAGAIN, and no event reports room.)
    Later,
    /// The path may lead into a file system with a server: the connector resolves it.
    NeedsConnector,
    /// No host program accepts connections there.
    Refused(std::io::Error),
}

/// A refused connection of a guest to the host side: the cause, and the reason for the log.
#[derive(Debug)]
pub(crate) struct Refusal {
    pub(crate) cause: RefusalCause,
    pub(crate) reason: String,
}

impl Refusal {
    pub(crate) fn new(cause: RefusalCause, reason: impl Into<String>) -> Refusal {
        let reason = reason.into();
        Refusal { cause, reason }
    }

    /// Adds to the error of a connect to a Unix socket what to do about its permissions.
    pub(crate) fn by_unix_socket(error: std::io::Error) -> Refusal {
        let denied = error.raw_os_error() == Some(Errno::ACCESS.raw_os_error());
        let mut refusal = Refusal::from(error);
        if denied {
            refusal.reason = format!("{}: {NO_PERMISSION}", refusal.reason);
        }
        refusal
    }
}

impl From<std::io::Error> for Refusal {
    fn from(error: std::io::Error) -> Refusal {
        Refusal {
            cause: RefusalCause::of(&error),
            reason: error.to_string(),
        }
    }
}
