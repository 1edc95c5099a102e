//! Relays: a vsock connection joined to a socket of another kind.
//!
//! Here are only the sockets: how a host program reaches a guest and a guest a host program.
//! The bytes never pass through this room: [`crate::device`] moves them between guest memory and
//! the socket. What must hold: no call blocks, whatever a peer or a full backlog does.

pub(crate) mod forward;
pub(crate) mod hybrid;
mod socket;

use rustix::io::Errno;
use rustix::net::RecvFlags;
pub(crate) use socket::HostSocket;

/// Stops reading from a host socket: its program gets EPIPE from now on. What it had written before
/// is thrown away here, because a socket that is closed with unread bytes resets its peer, which
/// would then see an error where the guest's stream ends in order.
pub(crate) fn stop_reading(socket: &HostSocket) {
    // Errors mean that the program has gone: there is nobody to tell.
    let _ = rustix::net::shutdown(socket, rustix::net::Shutdown::Read);
    let mut waste = [0u8; 16 << 10];
    // A send buffer's worth at most, as nothing is let in any more.
    for _ in 0..4096 {
        match socket.recv(&mut waste) {
            Ok(n) if n > 0 => {}
            Err(Errno::INTR) => {}
            _ => return,
        }
    }
}

/// Before a host socket is closed whose guest has closed in order: as [`stop_reading`], which costs
/// one call more, for what was written before. Who writes only now is told as any other that writes
/// to somebody who has gone.
pub(crate) fn leave_nothing_unread(socket: &HostSocket) {
    match rustix::net::recv(
        socket,
        &mut [0u8; 1][..],
        RecvFlags::PEEK | RecvFlags::DONTWAIT,
    ) {
        Ok((_, n)) if n > 0 => stop_reading(socket),
        Err(Errno::INTR) => stop_reading(socket),
        // Nothing, the end, or an error: the program has gone.
        _ => {}
    }
}

/// How far a connect to a host socket has come.
#[derive(Debug)]
pub(crate) enum Attempt {
    /// Connected.
    Ready(HostSocket),
    /// Under way: the socket becomes writable when it is decided.
    InProgress(HostSocket),
    /// The listener's backlog is full: try again a little later. (A non-blocking Unix connect
    /// says EAGAIN and leaves nothing to wait on.)
    Later,
    /// Nobody is there.
    Refused(std::io::Error),
}
