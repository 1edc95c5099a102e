//! Datagrams in place of a connection, for a process that has attached.
//!
//! A datagram socket has no connection that could begin or end. So the one that listens takes the
//! source of the first datagram for its peer; and an empty datagram, which standard input cannot
//! give, is the end of what its sender has to say.
//!
//! What must hold: only what comes from the peer is received; what was sent was taken by the device
//! before the end is reported.

use std::io;
use std::time::Duration;

use zerosock::vsock::{Datagram, Endpoint};
use zerosock::{Address, Port};

/// Bytes that may wait for standard output: more than a queue has buffers for, all of which a sender
/// can fill before it hears that it should stop.
const RECEIVE: u32 = 32 << 20;

/// A datagram socket, and whom it talks with.
pub(crate) struct Datagrams {
    socket: Datagram,
    peer: Address,
}

impl Datagrams {
    /// Talks with `peer`, from `from`. Nobody hears of it.
    pub(super) fn to(endpoint: &Endpoint, from: Port, peer: Address) -> io::Result<Datagrams> {
        let socket = Datagram::bind(endpoint, from)?;
        socket.set_receive_buffer(RECEIVE);
        socket.connect(peer);
        Ok(Datagrams { socket, peer })
    }

    /// Says so by `listening`, and waits for the first datagram to `port`.
    pub(super) fn listen(
        endpoint: &Endpoint,
        port: Port,
        left: Duration,
        listening: &impl Fn(),
    ) -> io::Result<Datagrams> {
        let socket = Datagram::bind(endpoint, port)?;
        socket.set_receive_buffer(RECEIVE);
        // Zero would be no time-out but an error.
        socket.set_read_timeout(Some(left.max(Duration::from_millis(1))))?;
        listening();
        let (_, peer) = socket.peek_from(&mut [])?;
        socket.set_read_timeout(None)?;
        socket.connect(peer);
        Ok(Datagrams { socket, peer })
    }

    /// Sends `bytes` as one datagram.
    pub(super) fn send(&self, bytes: &[u8]) -> io::Result<usize> {
        self.socket.send(bytes)
    }

    /// Says that this was all.
    pub(super) fn finish(&self) -> io::Result<()> {
        self.socket.send(&[]).map(drop)
    }

    /// Waits until the device has all that was sent.
    pub(super) fn flush(&self) -> io::Result<()> {
        self.socket.flush()
    }

    /// Receives a datagram of the peer's; 0 at the end.
    pub(super) fn receive(&self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            let (len, from) = self.socket.recv_from(buffer)?;
            // Others' may have come before there was a peer.
            if from == self.peer {
                return Ok(len.min(buffer.len()));
            }
        }
    }
}
