//! For tests: sockets on which close(2) blocks.

use std::io::{ErrorKind, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::mpsc::channel;
use std::time::Duration;

use rustix::net::sockopt::{set_socket_linger, set_socket_recv_buffer_size};

/// Longer than any test runs.
const LINGER: Duration = Duration::from_secs(600);
const DEADLINE: Duration = Duration::from_secs(60);

/// A socket with unsent data. Its close waits until the other end is dropped.
pub(crate) fn lingering_socket() -> (OwnedFd, TcpStream) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    set_socket_recv_buffer_size(&listener, 4096).unwrap();
    let mut socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (receiver, _) = listener.accept().unwrap();
    set_socket_linger(&socket, Some(LINGER)).unwrap();
    socket.set_nonblocking(true).unwrap();
    loop {
        match socket.write(&[0; 1 << 16]) {
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
            Err(error) => panic!("{error}"),
        }
    }
    (socket.into(), receiver)
}

/// Runs `call` on a thread of its own and fails if it blocks, as on a [`lingering_socket`].
pub(crate) fn without_waiting<R: Send + 'static>(call: impl FnOnce() -> R + Send + 'static) -> R {
    let (done, result) = channel();
    std::thread::spawn(move || done.send(call()));
    result
        .recv_timeout(DEADLINE)
        .expect("the call waits for a peer's descriptor")
}
