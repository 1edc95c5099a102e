//! Listeners for seqpacket connections.

use std::io;
use std::iter::FusedIterator;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::time::Duration;

use zerosock_proto::Address;

use super::SeqPacket;
use crate::vsock::listener::Listener;
use crate::vsock::waiting::Wait;
use zerosock_virtio::deadline::deadline_in;

/// A listening socket for seqpacket connections; stream connections to its port are refused.
/// Dropping it stops listening and resets connections that were not accepted.
///
/// ```
/// # let (db, web) = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/two.rs"));
/// use zerosock::{Address, Port};
///
/// let there = Address::new(db.cid(), Port::new(1024));
/// let listener = db.listen_seqpacket(Port::new(1024), 16)?;
/// let client = std::thread::spawn(move || -> std::io::Result<Vec<u8>> {
///     let connection = web.connect_seqpacket(there)?;
///     connection.send(b"louder")?;
///     Ok(connection.recv_leases()?.expect("an answer").to_vec())
/// });
/// let (connection, _peer) = listener.accept()?;
/// let question = connection.recv_leases()?.expect("a question").to_vec();
/// connection.send(&question.to_ascii_uppercase())?;
/// assert_eq!(client.join().unwrap()?, b"LOUDER");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// A forked child must neither use nor drop its copy: see [forks](crate::vsock#forks).
#[derive(Debug)]
pub struct SeqPacketListener(Listener);

impl SeqPacketListener {
    pub(in crate::vsock) fn new(listener: Listener) -> SeqPacketListener {
        SeqPacketListener(listener)
    }

    pub(in crate::vsock) fn port(&self) -> &Listener {
        &self.0
    }

    /// The local address.
    pub fn local_addr(&self) -> Address {
        self.0.local_addr()
    }

    /// [`accept`](Self::accept) answers `WouldBlock` instead of blocking; see
    /// [`Stream::set_nonblocking`](crate::vsock::Stream::set_nonblocking).
    ///
    /// # Errors
    /// None. The signature is that of `std::net`.
    pub fn set_nonblocking(&self, nonblocking: bool) -> io::Result<()> {
        self.0.set_nonblocking(nonblocking)
    }

    /// The wait mode of [`accept`](Self::accept) and, unless they are set otherwise, of accepted
    /// connections.
    pub fn set_wait(&self, wait: Wait) {
        self.0.set_wait(wait);
    }

    /// Accepts the oldest pending connection; returns it and the address of its peer.
    ///
    /// # Errors
    /// `WouldBlock` if the listener is non-blocking; `ConnectionAborted` when the endpoint has
    /// failed.
    pub fn accept(&self) -> io::Result<(SeqPacket, Address)> {
        self.0.accept_until(None)
    }

    /// As [`accept`](Self::accept), for at most `timeout`.
    ///
    /// # Errors
    /// `TimedOut` as well.
    pub fn accept_timeout(&self, timeout: Duration) -> io::Result<(SeqPacket, Address)> {
        self.0.accept_until(deadline_in(timeout))
    }

    /// An iterator over connections; it never ends.
    pub fn incoming(&self) -> impl FusedIterator<Item = io::Result<SeqPacket>> + '_ {
        std::iter::repeat_with(|| self.accept().map(|(connection, _)| connection))
    }
}

impl AsFd for SeqPacketListener {
    /// The endpoint's descriptor; see
    /// [`Stream::set_nonblocking`](crate::vsock::Stream::set_nonblocking).
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for SeqPacketListener {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}
