//! What `nc` is connected by: a socket of the kernel's, or a stream of ours as a process that has
//! attached.
//!
//! What must hold: calls block, and both directions may be used at once.

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::SendFlags;
use zerosock::vsock::{Stream, StreamState};

/// See the module.
pub(crate) enum Wire {
    Socket(OwnedFd),
    Stream(Stream),
}

impl Wire {
    /// Sends some of `bytes`.
    pub(super) fn send(&self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Wire::Socket(socket) => Ok(rustix::net::send(socket, bytes, SendFlags::NOSIGNAL)?),
            Wire::Stream(stream) => (&mut &*stream).write(bytes),
        }
    }

    /// Ends the sending half.
    pub(super) fn finish(&self) -> io::Result<()> {
        match self {
            Wire::Socket(socket) => {
                match rustix::net::shutdown(socket, rustix::net::Shutdown::Write) {
                    // The peer was faster: it has closed, and nothing is left to be delivered.
                    Ok(()) | Err(Errno::NOTCONN) => Ok(()),
                    Err(errno) => Err(errno.into()),
                }
            }
            Wire::Stream(stream) if stream.state() == StreamState::Connected => {
                stream.shutdown(Shutdown::Write)
            }
            Wire::Stream(_) => Ok(()),
        }
    }

    /// Receives; 0 at the end.
    pub(super) fn receive(&self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Wire::Socket(socket) => super::pump::read(socket.as_fd(), buffer),
            Wire::Stream(stream) => (&mut &*stream).read(buffer),
        }
    }

    /// Whether the peer takes nothing more. Sending no bytes sends no packet, but asks the
    /// question; poll() would not tell for AF_VSOCK.
    pub(super) fn is_deaf(&self) -> bool {
        match self {
            Wire::Socket(socket) => matches!(
                rustix::net::send(socket, &[], SendFlags::NOSIGNAL | SendFlags::DONTWAIT),
                Err(Errno::PIPE | Errno::NOTCONN | Errno::CONNRESET)
            ),
            Wire::Stream(stream) => stream.state() != StreamState::Connected,
        }
    }
}

impl From<OwnedFd> for Wire {
    fn from(socket: OwnedFd) -> Wire {
        Wire::Socket(socket)
    }
}
