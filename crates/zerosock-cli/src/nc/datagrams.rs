//! Datagrams instead of a connection, for an attached process.
//!
//! A datagram socket has no connection that begins or ends. So a listener takes the source of the
//! first datagram as its peer, and an empty datagram, which no read of standard input produces,
//! marks the end.
//!
//! # Invariants
//! - Only datagrams of the peer are received.
//! - The end is reported after the device has taken everything that was sent.

use std::io;
use std::time::Duration;

use zerosock::vsock::{Datagram, Endpoint};
use zerosock::{Address, Port};

/// Receive buffer, in bytes, for datagrams that wait for standard output: larger than all buffers
/// of a queue, which a sender can fill before STOP reaches it.
const RECEIVE: u32 = 32 << 20;

/// A datagram socket and its peer.
pub(crate) struct Datagrams {
    socket: Datagram,
    peer: Address,
}

impl Datagrams {
    /// Sends to `peer` from port `from`. No packet is sent yet.
    pub(super) fn to(endpoint: &Endpoint, from: Port, peer: Address) -> io::Result<Datagrams> {
        let socket = Datagram::bind(endpoint, from)?;
        socket.set_receive_buffer(RECEIVE);
        socket.connect(peer);
        Ok(Datagrams { socket, peer })
    }

    /// Calls `listening`, and waits for the first datagram to `port`.
    pub(super) fn listen(
        endpoint: &Endpoint,
        port: Port,
        left: Duration,
        listening: &impl Fn(),
    ) -> io::Result<Datagrams> {
        let socket = Datagram::bind(endpoint, port)?;
        socket.set_receive_buffer(RECEIVE);
        // A time-out of zero would be an error.
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

    /// Sends the datagram that marks the end.
    pub(super) fn finish(&self) -> io::Result<()> {
        self.socket.send(&[]).map(drop)
    }

    /// Waits until the device has taken everything that was sent.
    pub(super) fn flush(&self) -> io::Result<()> {
        self.socket.flush()
    }

    /// Receives a datagram of the peer; 0 at the end.
    pub(super) fn receive(&self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            let (len, from) = self.socket.recv_from(buffer)?;
            // Datagrams of other senders may have arrived before the peer was known.
            if from == self.peer {
                return Ok(len.min(buffer.len()));
            }
        }
    }
}
