//! A connection as its user has it.
//!
//! Two ways lead in and out. The copying way is that of `std::net`: [`Read`], [`Write`] and
//! [`BufRead`](io::BufRead), safe with any peer. The in-place way is [`Stream::recv`] (a [`Lease`] on what came)
//! and [`Stream::loan`] (a [`Loan`] of what will be read). They may be mixed freely: what
//! [`BufRead`](io::BufRead) has shown and its user has not consumed is still there for everybody.
//!
//! What must hold: a call that says that it would block has armed the endpoint's descriptor; bytes
//! sent before a shutdown or a close still arrive.

mod batch;
mod buffered;
mod options;

use std::fmt;
use std::io::{self, IoSlice, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use zerosock_proto::Address;

use super::connection::Connection;
use super::hub::{Core, Interest};
use super::lease::Lease;
use super::loan::Loan;
use super::message::Message;
use super::waiting::Wait;
use crate::table::backend::{Backend, ConnInfo, RecvFault};
use crate::table::sockets::{StreamId, StreamState};
pub use batch::Batch;
use buffered::Shown;

/// A connection between two endpoints.
///
/// May be used by several threads at once: `&Stream` is [`Read`] and [`Write`] as well. Dropping
/// it closes the connection; what was sent still arrives.
///
/// ```
/// # let (host, process) = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/pair.rs"));
/// use std::io::{Read, Write};
///
/// // As with any socket:
/// (&process).write_all(b"hello")?;
/// let mut hello = [0; 5];
/// (&host).read_exact(&mut hello)?;
///
/// // Or where the peer will read it, and where the peer has written it:
/// let mut loan = host.loan(9)?;
/// loan.write_all(b"and hello")?;
/// loan.send()?;
/// let lease = process.recv()?.expect("a packet");
/// assert_eq!(lease.to_vec(), b"and hello");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// A forked child must neither use nor drop its copy: see [forks](crate::vsock#forks).
pub struct Stream {
    pub(super) conn: Connection,
    /// It may have receive maps.
    pub(super) rx_map: bool,
    low_water: AtomicU32,
    coalesces: AtomicBool,
    shown: Shown,
}

impl Stream {
    pub(super) fn new(core: Arc<Core>, id: StreamId, info: &ConnInfo, wait: Wait) -> Stream {
        Stream {
            rx_map: core.rx_map(),
            conn: Connection::new(core, id, info, wait),
            low_water: AtomicU32::new(1),
            coalesces: AtomicBool::new(false),
            shown: Shown::default(),
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

    /// Whether plain slices of leased and lent memory are to be had: the opener of the endpoint
    /// has declared trust in such peers.
    pub fn is_trusted(&self) -> bool {
        self.conn.trust.is_some()
    }

    /// Calls answer [`io::ErrorKind::WouldBlock`] instead of waiting. The descriptor
    /// ([`AsFd`]) becomes readable when it is worth trying again: when something has happened to
    /// any socket of the endpoint since the last call that said so, or when a call is due for a
    /// timer. It is the same for all sockets of an endpoint, and is to be polled by one only: what
    /// it told is forgotten with the next call that would block. Each [`Poller`](super::Poller)
    /// beside it has its own way to be told.
    ///
    /// # Errors
    /// None; as in `std::net`, the result is there for the future.
    pub fn set_nonblocking(&self, nonblocking: bool) -> io::Result<()> {
        self.conn.blocking.set_nonblocking(nonblocking);
        Ok(())
    }

    /// How the calls of this stream wait. At first as its endpoint was told.
    pub fn set_wait(&self, wait: Wait) {
        self.conn.set_wait(wait);
    }

    /// Waits, as a read would, until the answer to
    /// [`begin_connect`](super::Endpoint::begin_connect) is there.
    ///
    /// # Errors
    /// `WouldBlock` before that, `TimedOut` by the stream's own time-out. Else a
    /// [`ConnectError`](super::ConnectError) is the source.
    pub fn wait_connected(&self) -> io::Result<()> {
        self.conn.wait_connected()
    }

    /// Waits, as a read would, until there is something to read (as much as the low-water mark
    /// asks for) or nothing will come any more, and takes nothing: what `poll(2)` is for.
    ///
    /// # Errors
    /// `WouldBlock`, `TimedOut`; `ConnectionAborted` when the endpoint is over.
    pub fn wait_readable(&self) -> io::Result<()> {
        let low_water = self.low_water();
        let budget = self.conn.read_patience();
        let attempt = |engine: &mut dyn Backend| {
            let there = engine
                .ahead(self.conn.id)
                .is_none_or(|ahead| ahead.closed || ahead.unread >= low_water as usize);
            there.then_some(())
        };
        Ok(self
            .conn
            .core
            .wait(Interest::Conn(self.conn.id), budget, attempt)?)
    }

    /// Receives the bytes of the next packet where they lie; `None` at the end of the stream.
    ///
    /// # Errors
    /// `WouldBlock`, `TimedOut`; else a [`StreamError`](super::StreamError) is the source.
    pub fn recv(&self) -> io::Result<Option<Lease<'_>>> {
        let got = self.receive(|engine| engine.lease(self.conn.id))?;
        Ok(got.map(|parts| Lease::new(&self.conn.core, parts, self.conn.trust)))
    }

    /// Shows up to `most` packets' bytes to `look`, each where it lies, and takes them; how many.
    /// 0 is the end of the stream. The way for many small packets: the endpoint is locked once for
    /// all of them, and no lease is kept. `look` may drop what it likes, but not use this endpoint.
    ///
    /// # Errors
    /// As [`recv`](Self::recv).
    ///
    /// # Panics
    /// When `look` makes a call of this endpoint.
    pub fn recv_each(&self, most: usize, mut look: impl FnMut(Message<'_>)) -> io::Result<usize> {
        let trust = self.conn.trust;
        self.receive(|engine| {
            engine.each(self.conn.id, most, &mut |payload| {
                look(Message::new(payload, trust));
                true
            })
        })
    }

    /// Copies what has come to `out` and leaves it to be read again; how many bytes.
    ///
    /// # Errors
    /// As [`recv`](Self::recv).
    pub fn peek(&self, out: &mut [u8]) -> io::Result<usize> {
        self.receive(|engine| engine.read(self.conn.id, out, true))
    }

    /// Borrows a buffer for one packet of at most `max` bytes, to be written where the peer will
    /// read it. It may be smaller ([`Loan::capacity`]): as large as the peer's buffer and its
    /// credit allow.
    ///
    /// A packet is no message. The receiver's buffers say how much of what is to be sent one loan
    /// takes: those of a Linux guest have 4096 bytes, those of an [`Endpoint`](super::Endpoint)
    /// 65536 unless it was [told](super::EndpointBuilder::receive_buffers) otherwise, and no packet
    /// is longer than that. What is longer takes several loans here and several
    /// [`recv`](Self::recv) there, and the boundaries mean nothing to the stream: who needs them
    /// sends a length first.
    ///
    /// # Errors
    /// `WouldBlock`, `TimedOut`; else a [`StreamError`](super::StreamError) is the source.
    pub fn loan(&self, max: usize) -> io::Result<Loan<'_>> {
        let parts = self
            .conn
            .transmit(|engine| engine.loan(self.conn.id, max))?;
        Ok(Loan::new(self, parts))
    }

    /// Sends a loan: the same as [`Loan::send`].
    ///
    /// # Errors
    /// As [`Loan::send`].
    pub fn send(&self, loan: Loan<'_>) -> io::Result<usize> {
        loan.send()
    }

    /// Sends many packets with one lock and one notification: what is written to the batch
    /// becomes visible to the peer when the batch is dropped, or has to wait for room. Until then
    /// this thread must make no other call of the endpoint: it would panic.
    pub fn batch(&self) -> Batch<'_> {
        Batch {
            stream: self,
            locked: Some(self.conn.core.lock()),
        }
    }

    /// Ends one way, or both. What was sent before still arrives; the peer reads end of file.
    /// After [`Shutdown::Read`] reads return end of file at once, and calls that wait for bytes
    /// return it; bytes that were not read are dropped, leases stay valid.
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

    /// Calls `get` until there is something to have, and as much as the low-water mark asks for.
    #[inline]
    fn receive<T>(
        &self,
        mut get: impl FnMut(&mut dyn Backend) -> Result<T, RecvFault>,
    ) -> io::Result<T> {
        let low_water = self.low_water.load(Ordering::Relaxed);
        self.conn.receive(|engine| {
            if low_water > 1 && !is_filled(engine, self.conn.id, low_water) {
                return Err(RecvFault::WouldBlock);
            }
            get(engine)
        })
    }
}

/// Whether a read for at least `low_water` bytes is to go on now.
fn is_filled(engine: &mut dyn Backend, id: StreamId, low_water: u32) -> bool {
    engine.info(id).is_none_or(|info| {
        info.unread >= low_water as usize
            || info.at_end
            || !matches!(info.state, StreamState::Connecting | StreamState::Connected)
    })
}

impl Read for &Stream {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        if out.is_empty() {
            return Ok(0);
        }
        self.receive(|engine| engine.read(self.conn.id, out, false))
    }
}

impl Read for Stream {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        (&*self).read(out)
    }
}

impl Write for &Stream {
    /// Copies as much as there is room for into buffers that the peer will read, in packets as
    /// long as those are. The peer can see them when the call returns, unless
    /// [`set_coalesce`](Stream::set_coalesce) has few of them wait.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if bytes.is_empty() {
            return Ok(0);
        }
        self.conn
            .transmit(|engine| engine.write(self.conn.id, bytes))
    }

    /// One slice after the other, as much as there is room for: with one lock and one
    /// notification, but in packets of their own.
    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        if slices.iter().all(|slice| slice.is_empty()) {
            return Ok(0);
        }
        self.conn.transmit(|engine| {
            let mut done = 0;
            for slice in slices.iter().filter(|slice| !slice.is_empty()) {
                match engine.write(self.conn.id, slice) {
                    Ok(written) => {
                        done += written;
                        if written < slice.len() {
                            break;
                        }
                    }
                    Err(fault) if done == 0 => return Err(fault),
                    // It says so again when the rest is written.
                    Err(_) => break,
                }
            }
            Ok(done)
        })
    }

    /// Small writes that wait for each other ([`set_coalesce`](Stream::set_coalesce)) wait no longer.
    /// Else there is nothing to do: what was written is visible to the peer.
    fn flush(&mut self) -> io::Result<()> {
        if self.coalesces.load(Ordering::Relaxed) {
            let mut locked = self.conn.core.lock();
            locked.engine().flush_coalesced(self.conn.id);
            locked.engine().flush();
        }
        Ok(())
    }
}

impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        (&*self).write(bytes)
    }

    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        (&*self).write_vectored(slices)
    }

    /// As for `&Stream`.
    fn flush(&mut self) -> io::Result<()> {
        (&*self).flush()
    }
}

impl AsFd for Stream {
    /// The endpoint's descriptor; see [`Stream::set_nonblocking`].
    fn as_fd(&self) -> BorrowedFd<'_> {
        (*self.conn.core).as_fd()
    }
}

impl AsRawFd for Stream {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stream")
            .field("local", &self.conn.local)
            .field("peer", &self.conn.peer)
            .finish_non_exhaustive()
    }
}
