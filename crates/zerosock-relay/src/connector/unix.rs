//! Connecting to a Unix socket.
//!
//! # Invariants
//! - The socket refuses descriptors before it is connected, if the kernel can do that: closing it then
//!   never waits for an object of the server.

use std::path::Path;
use std::time::Duration;

use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, socket_with,
};
use tokio::time::{Instant, sleep_until};
use zerosock_sys::fd_passing;

use super::dial::refused_or;
use super::error::{ConnectError, Stage};

/// The first and the longest pause while the backlog of the listener is full. The kernel reports room
/// in it to blocked callers only, not by epoll.
const PAUSES: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(50));

/// Connects a socket of some type to a path. While the backlog of the listener is full it tries again,
/// until `deadline`.
pub(super) async fn dial(
    path: &Path,
    kind: SocketType,
    deadline: Instant,
) -> Result<OwnedFd, ConnectError> {
    let failed = |error: Errno| refused_or(error.into(), None);
    let address = SocketAddrUnix::new(path).map_err(failed)?;
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, kind, flags, None).map_err(failed)?;
    fd_passing::refuse_rights(&socket)?;
    if kind == SocketType::DGRAM {
        // An address that the kernel chooses, so that the other end can answer.
        bind(&socket, &SocketAddrUnix::new_unnamed()).map_err(failed)?;
    }
    let (mut pause, longest) = PAUSES;
    loop {
        match connect(&socket, &address) {
            Ok(()) => return Ok(socket),
            Err(Errno::AGAIN) => {}
            Err(error) => return Err(failed(error)),
        }
        let now = Instant::now();
        if now >= deadline {
            return Err(ConnectError::TimedOut(Stage::Connecting));
        }
        sleep_until(deadline.min(now + pause)).await;
        pause = longest.min(pause * 2);
    }
}
