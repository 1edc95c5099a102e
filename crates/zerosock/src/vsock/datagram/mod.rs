//! Datagram sockets (docs/datagrams.md).
//!
//! # Invariants
//! - A call that returns `WouldBlock` has armed the endpoint's descriptor.
//! - A datagram is received whole or truncated, never in two parts.
//!
//! # Use
//! As with streams, bytes are copied, as in `std::net`, or read and written in place
//! ([`Datagram::recv_lease`] in `lease`, [`Datagram::loan`] in `loan`). `batch` moves many with one
//! call.

mod batch;
mod errors;
mod lease;
mod loan;

use std::fmt;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use zerosock_proto::vsock::datagram::{DatagramId, DatagramLimits};
use zerosock_proto::{Address, Cid, Port};

use super::blocking::{CallWaits, waiting_calls};
use super::endpoint_ref::EndpointRef;
use super::errors::{BindError, StreamError, of_bind};
use super::hub::{Core, DeferredClose, Interest};
use super::options::timeout;
use super::waiting::Wait;
use crate::table::datagrams::{DatagramBackend, DatagramFault};
use crate::table::{backend::Backend, transfers::RecvFault};
pub use errors::DatagramError;
pub use lease::DatagramLease;
pub use loan::DatagramLoan;
pub use zerosock_proto::vsock::datagram::{DatagramDrops, DatagramStats, MAX_DATAGRAM};

/// A socket for unreliable datagrams, without a connection.
///
/// A datagram has 0 to 65536 bytes. It is silently dropped when no socket has its port, and when
/// the receiver's buffer is full ([`set_receive_buffer`](Self::set_receive_buffer)). A zerosock
/// receiver with a filling buffer asks its senders to stop, and later to go on: a send to it blocks
/// (or returns `WouldBlock`), sends to other destinations go on. So endpoints lose no datagrams as
/// long as their buffers are in proportion; see docs/datagrams.md.
///
/// Guests with a stock kernel do not take datagrams: a send to one fails with
/// [`DatagramError::PeerUnsupported`].
///
/// ```
/// # let (db, web) = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/two.rs"));
/// use zerosock::vsock::Datagram;
/// use zerosock::{Address, Port};
///
/// let ours = Datagram::bind(&db, Port::new(514))?;
/// let theirs = Datagram::bind(&web, Port::ANY)?;
/// theirs.send_to(b"one", ours.local_addr())?;
/// theirs.connect(ours.local_addr());
/// theirs.send(b"another")?;
///
/// let mut bytes = [0; 4];
/// assert_eq!(ours.recv_from(&mut bytes)?, (3, theirs.local_addr()));
/// // The full length of the datagram, although the buffer is shorter.
/// assert_eq!(ours.recv_from(&mut bytes)?, (7, theirs.local_addr()));
/// assert_eq!(&bytes, b"anot");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// A forked child must neither use nor drop its copy: see [forks](crate::vsock#forks).
pub struct Datagram {
    core: Arc<Core>,
    id: DatagramId,
    local: Address,
    /// The connected peer, encoded by [`pack`], or `NO_PEER`.
    peer: AtomicU64,
    waits: CallWaits,
}

/// No peer.
const NO_PEER: u64 = u64::MAX;

fn pack(address: Address) -> u64 {
    u64::from(address.cid.get()) << 32 | u64::from(address.port.get())
}

waiting_calls!(Datagram);

impl Datagram {
    /// Binds a socket to `port` of the endpoint's CID, or with [`Port::ANY`] to a free one.
    /// Datagram ports are separate from stream ports.
    ///
    /// # Errors
    /// With a [`BindError`] inside: `AddrInUse` when another socket has the port; `InvalidInput`
    /// for a port that is not among the endpoint's [`ports`](super::EndpointBuilder::ports) or that
    /// a service has not claimed; `OutOfMemory` beyond 65536 sockets. An endpoint with named ports
    /// can send from [`Port::ANY`], but receives nothing there.
    pub fn bind<'a>(at: impl Into<EndpointRef<'a>>, port: Port) -> io::Result<Datagram> {
        let at = at.into();
        let (core, wait) = at.core_and_wait();
        if at
            .endpoint()
            .is_some_and(|endpoint| !endpoint.may_bind(port))
        {
            return Err(BindError::NotNamed(port).into());
        }
        let mut locked = core.lock();
        let backend = locked.backend().datagrams().ok_or(BindError::TooMany)?;
        let (id, local) = backend
            .bind(port, DatagramLimits::default())
            .map_err(of_bind)?;
        drop(locked);
        Ok(Datagram {
            core: core.clone(),
            id,
            local,
            peer: AtomicU64::new(NO_PEER),
            waits: CallWaits::new(wait),
        })
    }

    /// The local address.
    pub fn local_addr(&self) -> Address {
        self.local
    }

    /// The connected peer, if any.
    pub fn peer_addr(&self) -> Option<Address> {
        match self.peer.load(Ordering::Relaxed) {
            NO_PEER => None,
            packed => Some(Address::new(
                Cid::new((packed >> 32) as u32),
                Port::new(packed as u32),
            )),
        }
    }

    /// Makes [`send`](Self::send) send to `peer`, and receives only datagrams from it; datagrams
    /// that arrived before stay. Sends nothing itself.
    pub fn connect(&self, peer: Address) {
        self.set_peer(Some(peer));
    }

    /// Undoes [`connect`](Self::connect).
    pub fn disconnect(&self) {
        self.set_peer(None);
    }

    fn set_peer(&self, peer: Option<Address>) {
        let mut locked = self.core.lock();
        if let Some(backend) = locked.backend().datagrams() {
            backend.connect(self.id, peer);
        }
        self.peer
            .store(peer.map_or(NO_PEER, pack), Ordering::Relaxed);
    }

    /// How long a receive may wait; `None`: without limit.
    ///
    /// # Errors
    /// `InvalidInput` for a time of zero, as in `std::net`.
    pub fn set_read_timeout(&self, time: Option<Duration>) -> io::Result<()> {
        self.waits.set_read_timeout(timeout(time)?);
        Ok(())
    }

    /// How long a send or loan may wait; `None`: without limit.
    ///
    /// # Errors
    /// `InvalidInput` for a time of zero, as in `std::net`.
    pub fn set_write_timeout(&self, time: Option<Duration>) -> io::Result<()> {
        self.waits.set_write_timeout(timeout(time)?);
        Ok(())
    }

    /// The receive buffer in bytes, 128 per datagram included; default 2 MiB. A datagram that
    /// arrives while more is unread is dropped; so the last one may exceed the limit. Flow control
    /// asks senders to stop at a quarter of it, and to go on at an eighth.
    pub fn set_receive_buffer(&self, bytes: u32) {
        self.change_limits(|limits| limits.receive = bytes);
    }

    /// The send buffer: bytes that may be in flight, 128 per datagram included; default 425984. At
    /// the limit a send blocks. A [`Host`](super::Host) has none in flight: it writes into the receiver's
    /// buffers at once.
    pub fn set_send_buffer(&self, bytes: u32) {
        self.change_limits(|limits| limits.send = bytes);
    }

    /// See [`set_receive_buffer`](Self::set_receive_buffer).
    pub fn receive_buffer(&self) -> u32 {
        self.limits().receive
    }

    /// See [`set_send_buffer`](Self::set_send_buffer).
    pub fn send_buffer(&self) -> u32 {
        self.limits().send
    }

    fn limits(&self) -> DatagramLimits {
        let mut locked = self.core.lock();
        let backend = locked.backend().datagrams();
        backend
            .and_then(|backend| backend.limits(self.id))
            .unwrap_or_default()
    }

    fn change_limits(&self, change: impl FnOnce(&mut DatagramLimits)) {
        let mut locked = self.core.lock();
        if let Some(backend) = locked.backend().datagrams()
            && let Some(mut limits) = backend.limits(self.id)
        {
            change(&mut limits);
            backend.set_limits(self.id, limits);
        }
    }

    /// The socket's counters.
    pub fn stats(&self) -> DatagramStats {
        let mut locked = self.core.lock();
        let backend = locked.backend().datagrams();
        backend
            .and_then(|backend| backend.stats(self.id))
            .unwrap_or_default()
    }

    /// Datagrams that the endpoint has dropped, for all its sockets and for unbound ports.
    pub fn drops(&self) -> DatagramDrops {
        let mut locked = self.core.lock();
        let backend = locked.backend().datagrams();
        backend.map(|backend| backend.drops()).unwrap_or_default()
    }

    /// Sends a datagram to `to`; returns its length.
    ///
    /// # Errors
    /// With a [`DatagramError`] inside: `InvalidInput` for one that is too long (EMSGSIZE),
    /// `Unsupported` for a destination that takes no datagrams, `HostUnreachable` for a CID that is
    /// known not to exist. `WouldBlock` and `TimedOut` when there is no room, or the destination
    /// has asked its senders to stop. `ConnectionAborted` when the endpoint has failed.
    pub fn send_to(&self, bytes: &[u8], to: Address) -> io::Result<usize> {
        self.transmit(|backend| backend.send(self.id, to, bytes))?;
        Ok(bytes.len())
    }

    /// As [`send_to`](Self::send_to), to the [connected](Self::connect) peer.
    ///
    /// # Errors
    /// As there; `NotConnected`.
    pub fn send(&self, bytes: &[u8]) -> io::Result<usize> {
        self.send_to(bytes, self.peer()?)
    }

    /// Waits until the device has consumed all sent datagrams. Then they are delivered or dropped,
    /// even if this program ends; datagrams that it has not flushed may be lost. A [`Host`](super::Host)
    /// consumes a datagram when its program reads it, or when the hold time ends.
    ///
    /// ```
    /// # let (db, web) = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/two.rs"));
    /// use zerosock::vsock::Datagram;
    /// use zerosock::Port;
    ///
    /// let log = Datagram::bind(&db, Port::new(514))?;
    /// let ours = Datagram::bind(&web, Port::ANY)?;
    /// ours.send_to(b"the last words", log.local_addr())?;
    /// ours.flush()?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// `WouldBlock` and `TimedOut`; `ConnectionAborted` when the endpoint has failed.
    pub fn flush(&self) -> io::Result<()> {
        self.transmit(|backend| match backend.is_flushed(self.id) {
            true => Ok(()),
            false => Err(DatagramFault::WouldBlock),
        })
    }

    fn peer(&self) -> io::Result<Address> {
        Ok(self.peer_addr().ok_or(io::ErrorKind::NotConnected)?)
    }

    /// Copies the next datagram to `out`; returns its full length and its source. Bytes that do not
    /// fit are lost.
    ///
    /// # Errors
    /// `WouldBlock` and `TimedOut`; `ConnectionAborted` when the endpoint has failed.
    pub fn recv_from(&self, out: &mut [u8]) -> io::Result<(usize, Address)> {
        self.read(out, false)
    }

    #[inline]
    fn read(&self, out: &mut [u8], peek: bool) -> io::Result<(usize, Address)> {
        self.receive(|backend| {
            let got = backend.recv(self.id, out, peek);
            let got = got.ok_or(RecvFault::WouldBlock)?;
            Ok((got.len, got.source))
        })
    }

    /// As [`recv_from`](Self::recv_from), without the source.
    ///
    /// # Errors
    /// As there.
    pub fn recv(&self, out: &mut [u8]) -> io::Result<usize> {
        Ok(self.recv_from(out)?.0)
    }

    /// As [`recv_from`](Self::recv_from), but leaves the datagram in the receive buffer.
    ///
    /// # Errors
    /// As there.
    pub fn peek_from(&self, out: &mut [u8]) -> io::Result<(usize, Address)> {
        self.read(out, true)
    }

    /// Calls are made by registered tasks.
    #[cfg(feature = "tokio")]
    pub(super) fn set_async(&self) {
        self.waits.blocking.set_async();
    }

    /// The endpoint and the socket's id, for pollers.
    pub(super) fn core_and_id(&self) -> (&Arc<Core>, DatagramId) {
        (&self.core, self.id)
    }

    /// Calls `get` until it returns a datagram or an error.
    #[inline]
    fn receive<T>(
        &self,
        mut get: impl FnMut(&mut dyn DatagramBackend) -> Result<T, RecvFault>,
    ) -> io::Result<T> {
        let attempt = |backend: &mut dyn Backend| match get(backend.datagrams()?) {
            Ok(got) => Some(Ok(got)),
            Err(RecvFault::TooManyLeases) => Some(Err(StreamError::TooManyLeases)),
            Err(_) => None,
        };
        let interest = Interest::Datagram(self.id);
        let budget = || self.waits.read_budget();
        Ok(self.core.wait_to_read(interest, budget, attempt)??)
    }

    /// Calls `put` until it has room, or returns an error.
    #[inline]
    fn transmit<T>(
        &self,
        mut put: impl FnMut(&mut dyn DatagramBackend) -> Result<T, DatagramFault>,
    ) -> io::Result<T> {
        let attempt = |backend: &mut dyn Backend| match put(backend.datagrams()?) {
            Ok(done) => {
                backend.flush();
                Some(Ok(done))
            }
            Err(fault) => DatagramError::of(fault).map(Err),
        };
        let interest = Interest::Datagram(self.id);
        let budget = || self.waits.write_budget();
        Ok(self.core.wait(interest, budget, attempt)??)
    }
}

impl Drop for Datagram {
    fn drop(&mut self) {
        self.core.close_deferred(DeferredClose::Datagram(self.id));
    }
}

impl fmt::Debug for Datagram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Datagram")
            .field("local", &self.local)
            .field("peer", &self.peer_addr())
            .finish_non_exhaustive()
    }
}
