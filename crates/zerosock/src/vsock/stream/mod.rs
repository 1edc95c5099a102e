//! Stream connections.
//!
//! # Invariants
//! - A call that returns `WouldBlock` has armed the endpoint's descriptor.
//! - Bytes sent before a shutdown or a close still arrive.
//!
//! # Use
//! Calls that copy are those of `std::net`: [`Read`], [`Write`] and [`BufRead`](io::BufRead), safe
//! with any peer. In-place calls are [`Stream::recv`] (a [`Lease`] of received bytes) and
//! [`Stream::loan`] (a [`Loan`] of a buffer to send). They may be mixed: bytes that
//! [`BufRead`](io::BufRead) has returned but its user has not consumed can be read by any other
//! call.

mod batch;
mod buffered;
mod options;

use std::fmt;
use std::io::{self, BufRead, IoSlice, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use zerosock_proto::Address;
use zerosock_proto::wire::vsock::SocketType;

use super::blocking::waiting_calls;
use super::bound::Bound;
use super::connection::{Connected, Connection, ConnectionStats, connection_calls};
use super::hub::{Core, Interest};
use super::lease::Lease;
use super::loan::Loan;
use super::message::Message;
use super::options::Options;
use super::waiting::Wait;
use crate::table::sockets::{StreamId, StreamState};
use crate::table::{
    backend::{Backend, ConnInfo},
    transfers::{Publish, RecvFault},
};
pub use batch::Batch;
use buffered::ReadAhead;

/// A connection between two endpoints.
///
/// May be used by several threads at once: `&Stream` is [`Read`] and [`Write`] as well. Dropping
/// it closes the connection; sent data still arrives.
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
/// // Or in place: written where the peer reads, read where the peer wrote:
/// let mut loan = host.loan(9)?;
/// loan.write_all(b"and hello")?;
/// loan.send()?;
/// let lease = process.recv()?.expect("a packet");
/// assert_eq!(lease.to_vec(), b"and hello");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// A process that ends without dropping its streams, as by `process::exit`, resets them: the peer reads what was
/// sent, and then a reset instead of the end.
///
/// A forked child must neither use nor drop its copy: see [forks](crate::vsock#forks).
pub struct Stream {
    pub(super) conn: Connection,
    /// Whether it may have receive maps.
    pub(super) rx_map: bool,
    low_water: AtomicU32,
    coalesces: AtomicBool,
    read_ahead: ReadAhead,
}

connection_calls!(Stream);

impl Stream {
    /// Waits, as a read would, until at least low-water mark bytes, end of file or an error can be
    /// read; reads nothing. For programs that would use `poll(2)`.
    ///
    /// # Errors
    /// `WouldBlock`, `TimedOut`; `ConnectionAborted` when the endpoint has failed.
    pub fn wait_readable(&self) -> io::Result<()> {
        let low_water = self.low_water();
        let budget = || self.conn.waits.read_budget();
        let attempt = |backend: &mut dyn Backend| {
            let there = backend
                .ahead(self.conn.id)
                .is_none_or(|ahead| ahead.closed || ahead.unread >= low_water as usize);
            there.then_some(())
        };
        Ok(self
            .conn
            .core
            .wait(Interest::Conn(self.conn.id), budget, attempt)?)
    }

    /// Receives the bytes of the next packet in place; `None` at the end of the stream.
    ///
    /// # Errors
    /// `WouldBlock`, `TimedOut`; else a [`StreamError`](super::StreamError) is the source.
    pub fn recv(&self) -> io::Result<Option<Lease<'_>>> {
        let got = self.receive(|backend| {
            let got = backend.lease(self.conn.id)?;
            if let Some(parts) = &got {
                self.conn.counts.add_lease(parts);
            }
            Ok(got)
        })?;
        Ok(got.map(|parts| Lease::new(&self.conn.core, parts, self.conn.trust)))
    }

    /// Receives up to `most` packets: calls `look` with each, in place. Returns how many; 0 is the
    /// end of the stream. Made for many small packets: with one lock and without leases. `look` may
    /// drop sockets and leases, but must not call this endpoint.
    ///
    /// # Errors
    /// As [`recv`](Self::recv).
    ///
    /// # Panics
    /// When `look` makes a call of this endpoint.
    pub fn recv_each(&self, most: usize, mut look: impl FnMut(Message<'_>)) -> io::Result<usize> {
        let trust = self.conn.trust;
        self.receive(|backend| {
            backend.consume_in_place(self.conn.id, most, &mut |payload| {
                let message = Message::new(payload, trust);
                let counts = &self.conn.counts;
                counts.add_read(message.len(), message.is_in_place());
                look(message);
                true
            })
        })
    }

    /// Copies unread bytes to `out` and leaves them in the receive buffer; returns how many.
    ///
    /// # Errors
    /// As [`recv`](Self::recv).
    pub fn peek(&self, out: &mut [u8]) -> io::Result<usize> {
        self.receive(|backend| backend.read(self.conn.id, out, true))
    }

    /// Lends a buffer for one packet of at most `max` bytes, in memory that the peer reads. It may
    /// be smaller ([`Loan::capacity`]): the peer's buffer and its credit limit it.
    ///
    /// The receiver's buffers limit a loan: 4096 bytes for a Linux guest, by default 65536 for an
    /// [`Endpoint`](super::Endpoint)
    /// ([`receive_buffers`](super::EndpointBuilder::receive_buffers)), and never more than 65536.
    /// Longer data takes several loans, and several [`recv`](Self::recv) at the peer. A stream has
    /// no message boundaries: a protocol that needs them sends a length first.
    ///
    /// # Errors
    /// `WouldBlock`, `TimedOut`; else a [`StreamError`](super::StreamError) is the source.
    pub fn loan(&self, max: usize) -> io::Result<Loan<'_>> {
        let parts = self
            .conn
            .wait_for_room(|backend| backend.loan(self.conn.id, max))?;
        Ok(Loan::new(&self.conn, parts))
    }

    /// Sends a loan: the same as [`Loan::send`].
    ///
    /// # Errors
    /// As [`Loan::send`].
    pub fn send(&self, loan: Loan<'_>) -> io::Result<usize> {
        loan.send()
    }

    /// Sends many packets with one lock and one notification: packets written to the batch become
    /// visible to the peer when the batch is dropped, or has to wait for room. Until it is dropped,
    /// any other call of the endpoint by this thread panics.
    pub fn batch(&self) -> Batch<'_> {
        Batch {
            conn: &self.conn,
            locked: Some(self.conn.core.lock()),
        }
    }

    /// Calls `get` until it returns data, end of file or an error, and not before the low-water
    /// mark is reached.
    #[inline]
    fn receive<T>(
        &self,
        mut get: impl FnMut(&mut dyn Backend) -> Result<T, RecvFault>,
    ) -> io::Result<T> {
        let low_water = self.low_water.load(Ordering::Relaxed);
        self.conn.receive(|backend| {
            if low_water > 1 && !is_filled(backend, self.conn.id, low_water) {
                return Err(RecvFault::WouldBlock);
            }
            get(backend)
        })
    }
}

/// Whether a read that waits for `low_water` bytes may return.
fn is_filled(backend: &mut dyn Backend, id: StreamId, low_water: u32) -> bool {
    backend.info(id).is_none_or(|info| {
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
        self.receive(|backend| {
            let got = backend.read(self.conn.id, out, false)?;
            self.conn.counts.add_read_copied(got);
            Ok(got)
        })
    }
}

impl Read for Stream {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        (&*self).read(out)
    }
}

impl Write for &Stream {
    /// Copies as much as there is room for into buffers that the peer reads, in packets as long as
    /// those. The peer can see them when the call returns, unless
    /// [`set_coalesce`](Stream::set_coalesce) delays small writes.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if bytes.is_empty() {
            return Ok(0);
        }
        self.conn.wait_for_room(|backend| {
            let sent = backend.write(self.conn.id, bytes, Publish::Now)?;
            self.conn.counts.add_sent_copied(sent);
            Ok(sent)
        })
    }

    /// Writes one slice after the other, as much as there is room for, with one lock and one
    /// notification; each slice starts a new packet.
    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        if slices.iter().all(|slice| slice.is_empty()) {
            return Ok(0);
        }
        self.conn.transmit(|backend| {
            let mut done = 0;
            for slice in slices.iter().filter(|slice| !slice.is_empty()) {
                match backend.write(self.conn.id, slice, Publish::Later) {
                    Ok(written) => {
                        done += written;
                        self.conn.counts.add_sent_copied(written);
                        if written < slice.len() {
                            break;
                        }
                    }
                    Err(fault) if done == 0 => return Err(fault),
                    // The next write returns the error.
                    Err(_) => break,
                }
            }
            Ok(done)
        })
    }

    /// Sends small writes that [`set_coalesce`](Stream::set_coalesce) has delayed. All other
    /// written bytes are visible to the peer already.
    fn flush(&mut self) -> io::Result<()> {
        if self.coalesces.load(Ordering::Relaxed) {
            let mut locked = self.conn.core.lock();
            locked.backend().flush_coalesced(self.conn.id);
            locked.backend().flush();
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

impl Connected for Stream {
    const TYPE: SocketType = SocketType::Stream;

    fn new(core: Arc<Core>, id: StreamId, info: &ConnInfo, wait: Wait) -> Stream {
        Stream {
            rx_map: core.rx_map(),
            conn: Connection::new(core, id, info, wait),
            low_water: AtomicU32::new(1),
            coalesces: AtomicBool::new(false),
            read_ahead: ReadAhead::default(),
        }
    }

    fn conn(&self) -> &Connection {
        &self.conn
    }

    fn apply_options(&mut self, options: Options, bound: Option<Bound>) {
        self.conn.apply_options(options, bound);
        if options.low_water > 1 {
            // Cannot fail: the mark was validated against the same buffer size.
            let _ = self.set_low_water(options.low_water);
        }
    }

    fn unbind(&mut self) -> Option<Bound> {
        self.conn.unbind()
    }
}

impl BufRead for Stream {
    /// Returns a copy of unread bytes, since peer memory has no plain slice. The bytes stay in the
    /// receive buffer, visible to reads, leases and polls, until they are consumed.
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        if !self.read_ahead.is_current(&self.conn) {
            let mut bytes = self.read_ahead.take_buffer();
            let got = self.receive(|backend| {
                let got = backend.read(self.conn.id, &mut bytes, true)?;
                Ok((got, backend.info(self.conn.id).map_or(0, |info| info.taken)))
            });
            let (len, at) = *got.as_ref().unwrap_or(&(0, 0));
            self.read_ahead.store(bytes, len, at);
            got?;
        }
        Ok(self.read_ahead.unconsumed())
    }

    /// Consumes bytes of the copy, except those that another call has read since.
    fn consume(&mut self, len: usize) {
        self.read_ahead.consume(&self.conn, len);
    }
}
