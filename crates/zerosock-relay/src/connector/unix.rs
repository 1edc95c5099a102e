//! Connecting to a Unix socket.
//!
//! # Invariants
//! - The socket refuses descriptors before it is connected, if the kernel can do that (Linux 6.16).
//!   Elsewhere closing it may wait for an object of the server: the reaper does that.
//! - A symbolic link of another user is not followed ([`socket_path`]).

use std::net::SocketAddr;
use std::path::Path;
use std::sync::LazyLock;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, socket_with,
};
use tokio::time::{Instant, sleep_until};
use zerosock_sys::PeerFd;
use zerosock_sys::account::{Account, Budget};
use zerosock_sys::{fd_passing, socket_path};

use super::dial::refused_or;
use super::error::{ConnectError, Stage};

/// The first and the longest pause while the backlog of the listener is full. The kernel reports room
/// in it to blocked callers only, not by epoll.
const PAUSES: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(50));

/// The account of descriptors that peers of relays and servers of targets have sent, and of sockets into
/// which they can send some. They are closed as soon as they are received.
pub(crate) static RIGHTS: LazyLock<Account> = LazyLock::new(|| Budget::unlimited().account());

/// Connects a socket of some type to a path. While the backlog of the listener is full it tries again,
/// until `deadline`.
pub(super) async fn dial(
    path: &Path,
    kind: SocketType,
    deadline: Instant,
) -> Result<(PeerFd, Option<SocketAddr>), ConnectError> {
    let failed = |error: Errno| refused_or(error.into(), None);
    // A path that is too long for an address is an error of its own.
    SocketAddrUnix::new(path).map_err(failed)?;
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, kind, flags, None).map_err(failed)?;
    let socket = PeerFd::from(socket).owned_by(&RIGHTS);
    fd_passing::refuse_rights(&socket)?;
    if kind == SocketType::DGRAM {
        // An address that the kernel chooses, so that the other end can answer.
        bind(&socket, &SocketAddrUnix::new_unnamed()).map_err(failed)?;
    }
    let (mut pause, longest) = PAUSES;
    loop {
        let found = socket_path::find(path).map_err(|error| refused_or(error, None))?;
        match connect(&socket, found.address()) {
            Ok(()) => return Ok((socket, None)),
            Err(Errno::AGAIN) => {}
            Err(error) => return Err(failed(error)),
        }
        drop(found);
        let now = Instant::now();
        if now >= deadline {
            return Err(ConnectError::TimedOut(Stage::Connecting));
        }
        sleep_until(deadline.min(now + pause)).await;
        pause = longest.min(pause * 2);
    }
}
