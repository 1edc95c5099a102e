//! TCP sockets on which close(2) blocks.

use std::io::{ErrorKind, IoSlice, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::net::sockopt::{
    set_socket_linger, set_socket_recv_buffer_size, set_socket_send_buffer_size,
};
use zerosock_sys::fd_passing;

/// Longer than any test runs.
const LINGER: Duration = Duration::from_secs(600);

/// A socket with unsent data, and the peer that does not read. Dropping the peer ends a blocked
/// close of the socket.
pub(crate) fn lingering_socket() -> (OwnedFd, TcpStream) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    set_socket_recv_buffer_size(&listener, 4096).unwrap();
    let mut socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (receiver, _) = listener.accept().unwrap();
    set_socket_linger(&socket, Some(LINGER)).unwrap();
    set_socket_send_buffer_size(&socket, 4096).unwrap();
    socket.set_nonblocking(true).unwrap();
    let block = [0; 1 << 16];
    loop {
        match socket.write(&block) {
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
            Err(error) => panic!("{error}"),
        }
    }
    // With O_NONBLOCK, close(2) would not block.
    socket.set_nonblocking(false).unwrap();
    (socket.into(), receiver)
}

/// A Unix socket with such a socket in its queue: the kernel closes both together.
pub(crate) fn queued_lingering_socket() -> (OwnedFd, (TcpStream, UnixStream)) {
    let (socket, receiver) = lingering_socket();
    let (outer, sender) = UnixStream::pair().unwrap();
    fd_passing::send(&sender, &[IoSlice::new(b"x")], &[socket.as_fd()]).unwrap();
    (outer.into(), (receiver, sender))
}
