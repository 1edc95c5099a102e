//! What a new socket gets before it is handed over: options of TCP, and the first bytes.

use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{SendFlags, send, sockopt};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout_at};
use zerosock_sys::PeerFd;

use super::dial::refused_or;
use super::error::{ConnectError, ConnectStage};

/// The longest time of TCP_KEEPIDLE and TCP_KEEPINTVL that Linux takes.
const MAX_KEEPALIVE: Duration = Duration::from_secs(32767);

/// Sets TCP_NODELAY, because what is relayed is passed on when it comes, and keepalive probes if there is an
/// interval.
pub(crate) fn set_tcp_options(socket: impl AsFd, keepalive: Option<Duration>) -> io::Result<()> {
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
    socket: PeerFd,
    mut bytes: &[u8],
    address: Option<SocketAddr>,
    deadline: Instant,
) -> Result<PeerFd, ConnectError> {
    while !bytes.is_empty() {
        match send(&socket, bytes, SendFlags::NOSIGNAL) {
            Ok(sent) => bytes = bytes.get(sent..).unwrap_or_default(),
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => {
                // A duplicate, so that the close of `socket` is the last one. Of the type only the
                // registration with epoll is used, which is one for all sockets.
                let duplicate =
                    rustix::io::fcntl_dupfd_cloexec(&socket, 0).map_err(io::Error::from)?;
                let waiting = TcpStream::from_std(duplicate.into())?;
                match timeout_at(deadline, waiting.writable()).await {
                    Ok(ready) => ready?,
                    Err(_) => return Err(ConnectError::TimedOut(ConnectStage::Writing)),
                }
            }
            Err(error) => return Err(refused_or(error.into(), address)),
        }
    }
    Ok(socket)
}
