//! Connections that carry messages: SOCK_SEQPACKET.
//!
//! A message arrives as it was sent: as a whole, once, in order, and told apart from those beside
//! it. One without a byte is a message too, and not the end. Two ways lead in and out, as for a
//! [`Stream`](super::Stream): by copying ([`SeqPacket::recv`], [`SeqPacket::send`]), or in place
//! ([`SeqPacket::recv_leases`], [`SeqPacket::loan`]).
//!
//! What must hold: a message that is sent is sent as a whole, or not at all; one that has not
//! arrived as a whole is shown to nobody.

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

use super::connection::{Connection, option_calls};
use super::hub::{Core, Interest};
use super::waiting::Wait;
use crate::table::backend::{Backend, ConnInfo};
use crate::table::sockets::{MessageRead, StreamId, StreamState};
pub use leases::MessageLeases;
pub use listener::{SeqPacketIncoming, SeqPacketListener};
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
/// // It is longer than the buffer: the rest is gone, and its length is told.
/// let three = host.recv(&mut out)?.expect("a message");
/// assert_eq!((three.len, three.copied, &out), (9, 3, b"and"));
/// assert!(three.is_truncated() && three.end_of_record);
/// assert_eq!(host.recv(&mut out)?, None);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # How long a message may be
/// As long as what the peer's buffer takes ([`window`](super::EndpointBuilder::window); 262144 bytes
/// unless somebody says otherwise), and our own, as Linux has it. What is longer could never arrive:
/// [`StreamError::TooLong`](super::StreamError::TooLong), before a byte of it is sent. A peer that
/// sends one above our buffer all the same is reset.
///
/// # Messages without a byte
/// Linux guests send none, and can receive them. They cost no credit, so no more than 512 of them
/// are kept unread: a peer that sends more is reset. One of ours waits before that.
///
/// A forked child must neither use nor drop its copy: see [forks](crate::vsock#forks).
pub struct SeqPacket {
    pub(super) conn: Connection,
}

/// What [`SeqPacket::recv`] has received.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct Received {
    /// The message's length in bytes, however many fitted: as recv(2) tells with MSG_TRUNC.
    pub len: usize,
    /// Bytes of it that were copied; the others are gone.
    pub copied: usize,
    /// Its sender said that a record ends with it: MSG_EOR.
    pub end_of_record: bool,
}

impl Received {
    /// Whether the buffer was too short.
    pub fn is_truncated(&self) -> bool {
        self.copied < self.len
    }
}

impl From<MessageRead> for Received {
    fn from(message: MessageRead) -> Received {
        Received {
            len: message.len,
            copied: message.copied,
            end_of_record: message.ends_record,
        }
    }
}

option_calls!(SeqPacket);

impl SeqPacket {
    pub(super) fn new(core: Arc<Core>, id: StreamId, info: &ConnInfo, wait: Wait) -> SeqPacket {
        SeqPacket {
            conn: Connection::new(core, id, info, wait),
        }
    }

    /// Our address.
    pub fn local_addr(&self) -> Address {
        self.conn.local
    }

    /// The peer's address.
    pub fn peer_addr(&self) -> Address {
        self.conn.peer
    }

    /// Whether plain slices of leased memory are to be had; see
    /// [`Stream::is_trusted`](super::Stream::is_trusted).
    pub fn is_trusted(&self) -> bool {
        self.conn.trust.is_some()
    }

    /// Calls answer `WouldBlock` instead of waiting; see
    /// [`Stream::set_nonblocking`](super::Stream::set_nonblocking).
    ///
    /// # Errors
    /// None; as in `std::net`, the result is there for the future.
    pub fn set_nonblocking(&self, nonblocking: bool) -> io::Result<()> {
        self.conn.blocking.set_nonblocking(nonblocking);
        Ok(())
    }

    /// Changes the receive buffer, and with it how long a message may be that we receive, and that
    /// we send; see [`Stream::set_buffer_size`](super::Stream::set_buffer_size). One that the peer
    /// was promised room for before still arrives.
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

    /// How its calls wait. At first as its endpoint was told.
    pub fn set_wait(&self, wait: Wait) {
        self.conn.set_wait(wait);
    }

    /// Waits until the answer to [`begin_connect_seqpacket`] is there.
    ///
    /// # Errors
    /// As [`Stream::wait_connected`](super::Stream::wait_connected).
    ///
    /// [`begin_connect_seqpacket`]: super::Endpoint::begin_connect_seqpacket
    pub fn wait_connected(&self) -> io::Result<()> {
        self.conn.wait_connected()
    }

    /// Waits until there is a message, or none will come any more, and takes nothing.
    ///
    /// # Errors
    /// `WouldBlock`, `TimedOut`; `ConnectionAborted` when the endpoint is over.
    pub fn wait_readable(&self) -> io::Result<()> {
        let attempt = |engine: &mut dyn Backend| is_ready(engine, self.conn.id).then_some(());
        let interest = Interest::Conn(self.conn.id);
        let budget = self.conn.read_patience();
        Ok(self.conn.core.wait(interest, budget, attempt)?)
    }

    /// Messages that could be received at once.
    pub fn unread(&self) -> usize {
        let mut locked = self.conn.core.lock();
        // What has come counts; an endpoint that is over still has what came before.
        let _ = locked.turn();
        let info = locked.engine().info(self.conn.id);
        info.and_then(|info| info.messages).unwrap_or(0) as usize
    }

    /// Bytes that have come and wait, as Linux counts them (SIOCINQ): also those of a message of which
    /// the end is under way.
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

    /// Receives the next message into `out`: as much of it as fits, the rest is gone. `None`: the
    /// peer sends no more.
    ///
    /// # Errors
    /// `WouldBlock`, `TimedOut`; else a [`StreamError`](super::StreamError) is the source. A peer
    /// that has broken off within a message has sent nothing of it.
    pub fn recv(&self, out: &mut [u8]) -> io::Result<Option<Received>> {
        let message = self
            .conn
            .receive(|engine| engine.read_message(self.conn.id, out, false))?;
        Ok(message.map(Received::from))
    }

    /// As [`recv`](Self::recv), and leaves the message to be received again.
    ///
    /// # Errors
    /// As [`recv`](Self::recv).
    pub fn peek(&self, out: &mut [u8]) -> io::Result<Option<Received>> {
        let message = self
            .conn
            .receive(|engine| engine.read_message(self.conn.id, out, true))?;
        Ok(message.map(Received::from))
    }

    /// Receives the next message where it lies: in one lease for each packet that it came in.
    /// `None`: the peer sends no more. Its sender gets credit for it when the last lease is dropped.
    ///
    /// # Errors
    /// As [`recv`](Self::recv).
    pub fn recv_leases(&self) -> io::Result<Option<MessageLeases<'_>>> {
        let got = self
            .conn
            .receive(|engine| engine.lease_message(self.conn.id))?;
        let trust = self.conn.trust;
        Ok(got.map(|(parts, ends_record)| {
            MessageLeases::new(&self.conn.core, parts, trust, ends_record)
        }))
    }

    /// Sends `message`, as a whole: waits until the peer has room for all of it, and its side
    /// buffers. Who does not wait ([`set_nonblocking`](Self::set_nonblocking)) may find room but no
    /// buffers for the end of a long one: it is sent all the same, with the endpoint's next calls.
    ///
    /// # Errors
    /// [`StreamError::TooLong`](super::StreamError::TooLong) inside for one that the peer can never
    /// take (EMSGSIZE). `WouldBlock`, `TimedOut`: nothing of it was sent. Else another
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

    /// As [`send`](Self::send), and says that a record ends with it: MSG_EOR.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    pub fn send_eor(&self, message: &[u8]) -> io::Result<()> {
        self.put(&[IoSlice::new(message)], true)
    }

    /// As [`send_vectored`](Self::send_vectored), and says that a record ends with it: MSG_EOR.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    pub fn send_vectored_eor(&self, slices: &[IoSlice<'_>]) -> io::Result<()> {
        self.put(slices, true)
    }

    fn put(&self, slices: &[IoSlice<'_>], ends_record: bool) -> io::Result<()> {
        if !self.begin(slices, ends_record)? {
            // It is sent, whatever comes of the wait.
            let _ = self.see_off();
        }
        Ok(())
    }

    /// Sends a message. False: what has found no buffer is kept, and to be seen off.
    pub(super) fn begin(&self, slices: &[IoSlice<'_>], ends_record: bool) -> io::Result<bool> {
        let id = self.conn.id;
        self.conn
            .transmit(|engine| engine.send_message(id, slices, ends_record))
    }

    /// Borrows room for one message of at most `len` bytes where the peer will read it: its own
    /// buffers at a [`Host`](super::Host), and those that it reads from at an
    /// [`Endpoint`](super::Endpoint). As many as the bounds on loans allow, one after the other; what
    /// is beyond is a private buffer. Waits until the peer has room for all of it, and its side a
    /// buffer; credit for it is taken then, so [`MessageLoan::send`] waits for none.
    ///
    /// # Errors
    /// As [`send`](Self::send): above all [`StreamError::TooLong`](super::StreamError::TooLong)
    /// inside for one that the peer can never take.
    /// [`StreamError::TooManyLeases`](super::StreamError::TooManyLeases).
    pub fn loan(&self, len: usize) -> io::Result<MessageLoan<'_>> {
        let parts = self
            .conn
            .transmit(|engine| engine.loan_message(self.conn.id, len))?;
        Ok(MessageLoan::new(self, parts))
    }

    /// Waits until the rest of a message that is sent has found buffers: nobody else may come to
    /// work for the endpoint. Who does not wait is to come again himself.
    #[cold]
    pub(super) fn see_off(&self) -> io::Result<()> {
        let attempt = |engine: &mut dyn Backend| {
            engine.flush();
            (!engine.is_sending(self.conn.id)).then_some(())
        };
        let interest = Interest::Conn(self.conn.id);
        let budget = self.conn.write_patience();
        Ok(self.conn.core.wait(interest, budget, attempt)?)
    }

    /// Ends one way, or both. What was sent before still arrives; the peer receives `None` behind it.
    /// After [`Shutdown::Read`] receives return `None` at once, and so do those that wait; messages
    /// that were not read are dropped, leases stay valid.
    ///
    /// # Errors
    /// `NotConnected` when the connection has ended already.
    pub fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        self.conn.shutdown(how)
    }

    /// Resets the connection: what is under way is lost, and the peer is told.
    pub fn reset(self) {
        self.conn.reset();
    }

    /// Whether the connection still stands, as far as is known without looking.
    pub fn state(&self) -> StreamState {
        self.conn.state()
    }
}

/// Whether a message could be received, or none will come any more.
fn is_ready(engine: &mut dyn Backend, id: StreamId) -> bool {
    engine.info(id).is_none_or(|info| {
        info.messages.is_none_or(|messages| messages > 0)
            || info.at_end
            || !matches!(info.state, StreamState::Connecting | StreamState::Connected)
    })
}

impl AsFd for SeqPacket {
    /// The endpoint's descriptor; see [`Stream::set_nonblocking`](super::Stream::set_nonblocking).
    fn as_fd(&self) -> BorrowedFd<'_> {
        (*self.conn.core).as_fd()
    }
}

impl AsRawFd for SeqPacket {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

impl fmt::Debug for SeqPacket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SeqPacket")
            .field("local", &self.conn.local)
            .field("peer", &self.conn.peer)
            .finish_non_exhaustive()
    }
}
