//! Listeners for seqpacket connections.

use std::io;
use std::iter::FusedIterator;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::time::Duration;

use zerosock_proto::Address;

use super::SeqPacket;
use crate::vsock::blocking::waiting_calls;
use crate::vsock::listener::{Listener, listener_calls};
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

listener_calls!(SeqPacketListener, SeqPacket);
waiting_calls!(SeqPacketListener, 0);

impl SeqPacketListener {
    pub(in crate::vsock) fn new(listener: Listener) -> SeqPacketListener {
        SeqPacketListener(listener)
    }

    pub(in crate::vsock) fn port(&self) -> &Listener {
        &self.0
    }

    /// An iterator over connections; it never ends.
    pub fn incoming(&self) -> impl FusedIterator<Item = io::Result<SeqPacket>> + '_ {
        std::iter::repeat_with(|| self.accept().map(|(connection, _)| connection))
    }
}
