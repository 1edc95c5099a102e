//! What a new socket gets before it is handed over: options of TCP, and the first bytes.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{SendFlags, send, sockopt};
use tokio::time::{Instant, timeout_at};

use super::dial::refused_or;
use super::error::{ConnectError, Stage};

/// The longest time of TCP_KEEPIDLE and TCP_KEEPINTVL that Linux takes.
const MAX_KEEPALIVE: Duration = Duration::from_secs(32767);

/// Sets TCP_NODELAY, and keepalive probes if there is an interval.
pub(super) fn set_tcp_options(socket: impl AsFd, keepalive: Option<Duration>) -> io::Result<()> {
    let socket = socket.as_fd();
    sockopt::set_tcp_nodelay(socket, true)?;
    if let Some(interval) = keepalive {
        let interval = interval.clamp(Duration::from_secs(1), MAX_KEEPALIVE);
        sockopt::set_tcp_keepidle(socket, interval)?;
        sockopt::set_tcp_keepintvl(socket, interval)?;
        sockopt::set_socket_keepalive(socket, true)?;
    }
    Ok(())
}

/// Writes bytes to a non-blocking socket; on one that keeps message bounds, as one message.
pub(super) async fn write_first(
    mut socket: OwnedFd,
    mut bytes: &[u8],
    address: Option<SocketAddr>,
    deadline: Instant,
) -> Result<OwnedFd, ConnectError> {
    while !bytes.is_empty() {
        match send(&socket, bytes, SendFlags::NOSIGNAL) {
            Ok(sent) => bytes = bytes.get(sent..).unwrap_or_default(),
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => {
                // Of the type only the registration with epoll is used, which is one for all sockets.
                let waiting = tokio::net::TcpStream::from_std(std::net::TcpStream::from(socket))?;
                match timeout_at(deadline, waiting.writable()).await {
                    Ok(ready) => ready?,
                    Err(_) => return Err(ConnectError::TimedOut(Stage::Writing)),
                }
                socket = waiting.into_std()?.into();
            }
            Err(error) => return Err(refused_or(error.into(), address)),
        }
    }
    Ok(socket)
}
