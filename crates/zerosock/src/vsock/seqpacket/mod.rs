//! Seqpacket connections (SOCK_SEQPACKET): reliable messages.
//!
//! # Invariants
//! - A message is sent as a whole, or not at all.
//! - A receiver sees a message only when all of it has arrived.
//!
//! # Use
//! Messages arrive whole, once and in order, with their boundaries. An empty message is not the
//! end. As with a [`Stream`](super::Stream), bytes are copied ([`SeqPacket::recv`],
//! [`SeqPacket::send`]) or read and written in place ([`SeqPacket::recv_leases`],
//! [`SeqPacket::loan`]).

mod leases;
mod listener;
mod loan;

use std::fmt;
use std::io::{self, IoSlice};
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use zerosock_proto::Address;
use zerosock_proto::wire::vsock::SocketType;

use super::blocking::waiting_calls;
use super::bound::Bound;
use super::connection::{Connected, Connection, ConnectionStats, connection_calls};
use super::hub::{Core, Interest};
use super::options::Options;
use super::waiting::Wait;
use crate::table::backend::{Backend, ConnInfo};
use crate::table::outgoing::len_of;
pub use crate::table::sockets::Received;
use crate::table::sockets::{StreamId, StreamState};
pub use leases::MessageLeases;
pub use listener::SeqPacketListener;
pub use loan::MessageLoan;

/// A connection between two endpoints that carries messages.
///
/// May be used by several threads at once. Dropping it closes the connection; what was sent still
/// arrives.
///
/// ```
/// # let (host, process) = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/messages.rs"));
/// process.send(b"one")?;
/// process.send(b"")?;
/// process.send_eor(b"and three")?;
/// drop(process);
///
/// let mut out = [0; 3];
/// let one = host.recv(&mut out)?.expect("a message");
/// assert_eq!((one.len, &out), (3, b"one"));
/// assert_eq!(host.recv(&mut out)?.expect("not the end").len, 0);
/// // The message is longer than the buffer: the rest is discarded, the full length is returned.
/// let three = host.recv(&mut out)?.expect("a message");
/// assert_eq!((three.len, three.copied, &out), (9, 3, b"and"));
/// assert!(three.is_truncated() && three.end_of_record);
/// assert_eq!(host.recv(&mut out)?, None);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Length of a message
/// At most the receive buffer of the peer ([`window`](super::EndpointBuilder::window), default
/// 262144 bytes) and that of this socket, as on Linux. A longer message could never arrive: the
/// send fails with [`StreamError::TooLong`](super::StreamError::TooLong) before it sends a byte. A
/// peer that sends a message longer than this socket's buffer is reset.
///
/// # Empty messages
/// Linux guests send none, but receive them. They cost no credit, so at most 512 are kept unread: a
/// peer that sends more is reset. A zerosock sender blocks before that.
///
/// A forked child must neither use nor drop its copy: see [forks](crate::vsock#forks).
pub struct SeqPacket {
    pub(super) conn: Connection,
}

connection_calls!(SeqPacket);

impl SeqPacket {
    /// Changes the receive buffer, and with it the maximum length of received and sent messages;
    /// see [`Stream::set_buffer_size`](super::Stream::set_buffer_size). Messages that the peer has
    /// credit for already still arrive.
    ///
    /// # Errors
    /// As there.
    pub fn set_buffer_size(&self, bytes: u32) -> io::Result<()> {
        self.conn.set_buffer_size(bytes)?;
        Ok(())
    }

    /// See [`Stream::set_buffer_bounds`](super::Stream::set_buffer_bounds).
    ///
    /// # Errors
    /// As there.
    pub fn set_buffer_bounds(&self, min: u32, max: u32) -> io::Result<()> {
        self.conn.set_buffer_bounds(min, max)?;
        Ok(())
    }

    /// Waits until a message, or the end of the connection, can be received; receives nothing.
    ///
    /// # Errors
    /// `WouldBlock`, `TimedOut`; `ConnectionAborted` when the endpoint has failed.
    pub fn wait_readable(&self) -> io::Result<()> {
        let attempt = |backend: &mut dyn Backend| is_ready(backend, self.conn.id).then_some(());
        let interest = Interest::Conn(self.conn.id);
        let budget = || self.conn.waits.read_budget();
        Ok(self.conn.core.wait(interest, budget, attempt)?)
    }

    /// Number of messages that can be received without blocking.
    pub fn unread(&self) -> usize {
        let mut locked = self.conn.core.lock();
        // Counts packets not yet taken in. A failed endpoint still has what it received before.
        let _ = locked.drive();
        let info = locked.backend().info(self.conn.id);
        info.and_then(|info| info.messages).unwrap_or(0) as usize
    }

    /// Received bytes that were not read, as Linux counts them (SIOCINQ): including those of a
    /// message whose end has not arrived.
    ///
    /// ```
    /// # let (host, process) = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/messages.rs"));
    /// process.send(b"five!")?;
    /// process.send(b"and seven")?;
    /// host.wait_readable()?;
    /// while host.unread() < 2 {}
    /// assert_eq!(host.unread_bytes(), 14);
    /// host.recv(&mut [0; 2])?;
    /// assert_eq!(host.unread_bytes(), 9);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn unread_bytes(&self) -> usize {
        self.conn.unread()
    }

    /// Receives the next message into `out`; discards bytes that do not fit. `None`: the peer has
    /// shut sending down.
    ///
    /// # Errors
    /// `WouldBlock`, `TimedOut`; else a [`StreamError`](super::StreamError) is the source. An
    /// incomplete last message is not received.
    pub fn recv(&self, out: &mut [u8]) -> io::Result<Option<Received>> {
        self.conn.receive(|backend| {
            let got = backend.read_message(self.conn.id, out, false)?;
            if let Some(message) = &got {
                self.conn.counts.add_read_copied(message.len);
            }
            Ok(got)
        })
    }

    /// As [`recv`](Self::recv), but leaves the message in the receive buffer.
    ///
    /// # Errors
    /// As [`recv`](Self::recv).
    pub fn peek(&self, out: &mut [u8]) -> io::Result<Option<Received>> {
        self.conn
            .receive(|backend| backend.read_message(self.conn.id, out, true))
    }

    /// Receives the next message in place: one lease for each of its packets. `None`: the peer has
    /// shut sending down. The sender gets the credit back when the last lease is dropped.
    ///
    /// # Errors
    /// As [`recv`](Self::recv).
    pub fn recv_leases(&self) -> io::Result<Option<MessageLeases<'_>>> {
        let got = self.conn.receive(|backend| {
            let got = backend.lease_message(self.conn.id)?;
            for parts in got.iter().flat_map(|(parts, _)| parts) {
                self.conn.counts.add_lease(parts);
            }
            Ok(got)
        })?;
        let trust = self.conn.trust;
        Ok(got.map(|(parts, ends_record)| {
            MessageLeases::new(&self.conn.core, parts, trust, ends_record)
        }))
    }

    /// Sends `message` as a whole: blocks until the peer has credit for all of it, and there are
    /// buffers. On a [non-blocking](Self::set_nonblocking) socket, buffers may run out within a
    /// long message: the endpoint's next calls send the rest.
    ///
    /// # Errors
    /// [`StreamError::TooLong`](super::StreamError::TooLong) inside for a message that the peer can
    /// never receive (EMSGSIZE). `WouldBlock`, `TimedOut`: nothing of it was sent. Else another
    /// [`StreamError`](super::StreamError).
    pub fn send(&self, message: &[u8]) -> io::Result<()> {
        self.put(&[IoSlice::new(message)], false)
    }

    /// Sends the bytes of all slices, one after the other, as one message.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    pub fn send_vectored(&self, slices: &[IoSlice<'_>]) -> io::Result<()> {
        self.put(slices, false)
    }

    /// As [`send`](Self::send), and ends a record: MSG_EOR.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    pub fn send_eor(&self, message: &[u8]) -> io::Result<()> {
        self.put(&[IoSlice::new(message)], true)
    }

    /// As [`send_vectored`](Self::send_vectored), and ends a record: MSG_EOR.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    pub fn send_vectored_eor(&self, slices: &[IoSlice<'_>]) -> io::Result<()> {
        self.put(slices, true)
    }

    fn put(&self, slices: &[IoSlice<'_>], ends_record: bool) -> io::Result<()> {
        if !self.begin(slices, ends_record)? {
            // The message is sent in any case.
            let _ = self.conn.wait_queued_sent();
        }
        Ok(())
    }

    /// Sends a message. False: a part is queued for lack of buffers; the caller waits until it is
    /// sent.
    pub(super) fn begin(&self, slices: &[IoSlice<'_>], ends_record: bool) -> io::Result<bool> {
        let id = self.conn.id;
        self.conn.wait_for_room(|backend| {
            let all = backend.send_message(id, slices, ends_record)?;
            self.conn.counts.add_sent_copied(len_of(slices));
            Ok(all)
        })
    }

    /// Lends buffers for one message of at most `len` bytes, in memory that the peer reads: the
    /// peer's receive buffers at a [`Host`](super::Host), transmit buffers at an
    /// [`Endpoint`](super::Endpoint). Beyond the limit on loans the rest is a private buffer.
    /// Blocks until there is credit for all of it, and a buffer. The credit is reserved, so
    /// [`MessageLoan::send`] does not wait for any.
    ///
    /// # Errors
    /// As [`send`](Self::send), such as [`StreamError::TooLong`](super::StreamError::TooLong)
    /// inside for a message that the peer can never receive.
    /// [`StreamError::TooManyLeases`](super::StreamError::TooManyLeases).
    pub fn loan(&self, len: usize) -> io::Result<MessageLoan<'_>> {
        let parts = self
            .conn
            .transmit(|backend| backend.loan_message(self.conn.id, len))?;
        Ok(MessageLoan::new(&self.conn, parts))
    }
}

/// Whether a receive would return a message, the end or an error.
fn is_ready(backend: &mut dyn Backend, id: StreamId) -> bool {
    backend.info(id).is_none_or(|info| {
        info.messages.is_none_or(|messages| messages > 0)
            || info.at_end
            || !matches!(info.state, StreamState::Connecting | StreamState::Connected)
    })
}

impl Connected for SeqPacket {
    const TYPE: SocketType = SocketType::SeqPacket;

    fn new(core: Arc<Core>, id: StreamId, info: &ConnInfo, wait: Wait) -> SeqPacket {
        SeqPacket {
            conn: Connection::new(core, id, info, wait),
        }
    }

    fn conn(&self) -> &Connection {
        &self.conn
    }

    fn apply_options(&mut self, options: Options, bound: Option<Bound>) {
        self.conn.apply_options(options, bound);
    }

    fn unbind(&mut self) -> Option<Bound> {
        self.conn.unbind()
    }
}
