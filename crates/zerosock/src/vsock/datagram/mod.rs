//! Datagrams as their user has them (docs/datagrams.md).
//!
//! Two ways lead in and out, as with streams: by copying, as in `std::net`, and in place
//! ([`Datagram::recv_lease`], [`Datagram::loan`]). `batch` moves many with one call, `lease` and `loan` are in place.
//!
//! What must hold: a call that says that it would block has armed the endpoint's descriptor; a
//! datagram is received whole or cut, and never in two.

mod batch;
mod errors;
mod lease;
mod loan;

use std::fmt;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use zerosock_proto::vsock::datagram::{DatagramId, DatagramLimits};
use zerosock_proto::{Address, Cid, Port};

use super::connection::{Blocking, decode, encode, encode_timeout};
use super::endpoint::Endpoint;
use super::errors::StreamError;
use super::host::Host;
use super::hub::{Core, DeferredClose, Interest, WaitBudget};
use super::waiting::Wait;
use crate::table::backend::{Backend, RecvFault};
use crate::table::datagrams::{DatagramBackend, DatagramFault};
pub use errors::{BindError, DatagramError};
pub use lease::DatagramLease;
pub use loan::DatagramLoan;
pub use zerosock_proto::vsock::datagram::{DatagramDrops, DatagramStats, MAX_DATAGRAM};

/// A socket that sends and receives datagrams: each by itself, without a connection, and perhaps
/// in vain.
///
/// A datagram has 0 to 65536 bytes. It is dropped, silently, when nobody has its port, and when its
/// receiver has as much unread as it keeps ([`set_receive_buffer`](Self::set_receive_buffer)). But
/// a receiver of zerosock's that fills up asks those who send to it to stop, and later to go on: a
/// send to such a destination waits (or says `WouldBlock`), and sends to others go on. So nothing is
/// lost between endpoints as long as their buffers are in proportion; see docs/datagrams.md.
///
/// Guests with a stock kernel do not take datagrams: a send to one fails with
/// [`DatagramError::Deaf`].
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
/// // The length is the datagram's, however much of it was wanted.
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
    /// As [`pack`] has it.
    peer: AtomicU64,
    blocking: Blocking,
    /// Nanoseconds; 0: none.
    read_timeout: AtomicU64,
    write_timeout: AtomicU64,
    /// As [`encode`] has it.
    wait: AtomicU64,
}

/// Where a [`Datagram`] can be bound: at an [`Endpoint`] or a [`Host`].
///
/// ```
/// # let (db, _web) = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/two.rs"));
/// use zerosock::Port;
/// use zerosock::vsock::{Datagram, DatagramHome};
///
/// /// For endpoints and hosts alike.
/// fn log<'a>(at: impl Into<DatagramHome<'a>>) -> std::io::Result<Datagram> {
///     Datagram::bind(at, Port::new(514))
/// }
/// assert_eq!(log(&db)?.local_addr().cid, db.cid());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct DatagramHome<'a> {
    core: &'a Arc<Core>,
    wait: Wait,
    /// Whose ports may be limited.
    endpoint: Option<&'a Endpoint>,
}

impl<'a> From<&'a Endpoint> for DatagramHome<'a> {
    fn from(endpoint: &'a Endpoint) -> DatagramHome<'a> {
        let (core, wait) = endpoint.home();
        DatagramHome {
            core,
            wait,
            endpoint: Some(endpoint),
        }
    }
}

impl<'a> From<&'a Host> for DatagramHome<'a> {
    fn from(host: &'a Host) -> DatagramHome<'a> {
        let (core, wait) = host.home();
        DatagramHome {
            core,
            wait,
            endpoint: None,
        }
    }
}

/// No peer.
const NOBODY: u64 = u64::MAX;

fn pack(address: Address) -> u64 {
    u64::from(address.cid.get()) << 32 | u64::from(address.port.get())
}

impl Datagram {
    /// A socket at `port` of an endpoint's CID, or, for [`Port::ANY`], at one that nobody has.
    /// Ports of datagrams are not those of streams.
    ///
    /// # Errors
    /// With a [`BindError`] inside: `AddrInUse` when another socket has the port; `InvalidInput`
    /// for one that is not among the [`ports`](super::EndpointBuilder::ports) that the endpoint was
    /// opened with, or that a service has claimed; `OutOfMemory` beyond 65536 sockets. An endpoint
    /// with named ports can send from [`Port::ANY`], but nobody reaches it there.
    pub fn bind<'a>(at: impl Into<DatagramHome<'a>>, port: Port) -> io::Result<Datagram> {
        let DatagramHome {
            core,
            wait,
            endpoint,
        } = at.into();
        if endpoint.is_some_and(|endpoint| !endpoint.may_bind(port)) {
            return Err(BindError::NotNamed(port).into());
        }
        let mut locked = core.lock();
        let engine = locked.engine().datagrams().ok_or(BindError::TooMany)?;
        let (id, local) = engine
            .bind(port, DatagramLimits::default())
            .map_err(BindError::from)?;
        drop(locked);
        Ok(Datagram {
            core: core.clone(),
            id,
            local,
            peer: AtomicU64::new(NOBODY),
            blocking: Blocking::new(),
            read_timeout: AtomicU64::new(0),
            write_timeout: AtomicU64::new(0),
            wait: AtomicU64::new(encode(wait)),
        })
    }

    /// Our address.
    pub fn local_addr(&self) -> Address {
        self.local
    }

    /// Whom we are connected to.
    pub fn peer_addr(&self) -> Option<Address> {
        match self.peer.load(Ordering::Relaxed) {
            NOBODY => None,
            packed => Some(Address::new(
                Cid::new((packed >> 32) as u32),
                Port::new(packed as u32),
            )),
        }
    }

    /// From now on [`send`](Self::send) sends to `peer`, and only what comes from there is received;
    /// what has come before stays. Nobody hears of it.
    pub fn connect(&self, peer: Address) {
        self.set_peer(Some(peer));
    }

    /// Undoes [`connect`](Self::connect).
    pub fn disconnect(&self) {
        self.set_peer(None);
    }

    fn set_peer(&self, peer: Option<Address>) {
        let mut locked = self.core.lock();
        if let Some(engine) = locked.engine().datagrams() {
            engine.connect(self.id, peer);
        }
        self.peer
            .store(peer.map_or(NOBODY, pack), Ordering::Relaxed);
    }

    /// Calls answer `WouldBlock` instead of waiting; see
    /// [`Stream::set_nonblocking`](super::Stream::set_nonblocking).
    ///
    /// # Errors
    /// None; as in `std::net`, the result is there for the future.
    pub fn set_nonblocking(&self, nonblocking: bool) -> io::Result<()> {
        self.blocking.set_nonblocking(nonblocking);
        Ok(())
    }

    /// How long a receive may wait; `None`: for ever.
    ///
    /// # Errors
    /// `InvalidInput` for a time of zero, as in `std::net`.
    pub fn set_read_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        Self::set_timeout(&self.read_timeout, timeout)
    }

    /// How long a send or loan may wait; `None`: for ever.
    ///
    /// # Errors
    /// `InvalidInput` for a time of zero, as in `std::net`.
    pub fn set_write_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        Self::set_timeout(&self.write_timeout, timeout)
    }

    /// How the calls of this socket wait. At first as its endpoint was told.
    pub fn set_wait(&self, wait: Wait) {
        self.wait.store(encode(wait), Ordering::Relaxed);
    }

    /// Bytes that may be received and not read, 128 for each datagram included; at first 1 MiB. What
    /// comes while there is more is dropped; so one may overshoot. From a quarter on senders are
    /// asked to stop, down to an eighth.
    pub fn set_receive_buffer(&self, bytes: u32) {
        self.change_limits(|limits| limits.receive = bytes);
    }

    /// Bytes that may be under way, 128 for each datagram included; at first 212992. While there
    /// are as many, a send waits. Those of a [`Host`] are never under way: they lie in the
    /// receiver's buffers at once.
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
        let engine = locked.engine().datagrams();
        engine
            .and_then(|engine| engine.limits(self.id))
            .unwrap_or_default()
    }

    fn change_limits(&self, change: impl FnOnce(&mut DatagramLimits)) {
        let mut locked = self.core.lock();
        if let Some(engine) = locked.engine().datagrams()
            && let Some(mut limits) = engine.limits(self.id)
        {
            change(&mut limits);
            engine.set_limits(self.id, limits);
        }
    }

    /// What this socket has counted.
    pub fn stats(&self) -> DatagramStats {
        let mut locked = self.core.lock();
        let engine = locked.engine().datagrams();
        engine
            .and_then(|engine| engine.stats(self.id))
            .unwrap_or_default()
    }

    /// What the endpoint has dropped, for all its sockets and for those that there are not.
    pub fn drops(&self) -> DatagramDrops {
        let mut locked = self.core.lock();
        let engine = locked.engine().datagrams();
        engine.map(|engine| engine.drops()).unwrap_or_default()
    }

    /// Sends a datagram to `to`; how many bytes, which are all.
    ///
    /// # Errors
    /// With a [`DatagramError`] inside: `InvalidInput` for one that is too long (EMSGSIZE),
    /// `Unsupported` for a destination that takes no datagrams, `HostUnreachable` for one that is
    /// nobody's as far as is known here. `WouldBlock` and `TimedOut` when there is no room, or the
    /// destination has asked us to stop. `ConnectionAborted` when the endpoint is over.
    pub fn send_to(&self, bytes: &[u8], to: Address) -> io::Result<usize> {
        self.transmit(|engine| engine.send(self.id, to, bytes))?;
        Ok(bytes.len())
    }

    /// As [`send_to`](Self::send_to), to whom we are [connected](Self::connect) to.
    ///
    /// # Errors
    /// As there; `NotConnected`.
    pub fn send(&self, bytes: &[u8]) -> io::Result<usize> {
        self.send_to(bytes, self.peer()?)
    }

    /// Waits until the other side of the queue has taken all that was sent: then it arrives, or is
    /// dropped, whether or not this program is still there. What is sent, and not waited for,
    /// before the program ends may be lost. A receiver that is a [`Host`] takes a datagram when it
    /// is read, or copied aside, which is soon.
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
    /// `WouldBlock` and `TimedOut`; `ConnectionAborted` when the endpoint is over.
    pub fn flush(&self) -> io::Result<()> {
        self.transmit(|engine| match engine.is_flushed(self.id) {
            true => Ok(()),
            false => Err(DatagramFault::WouldBlock),
        })
    }

    fn peer(&self) -> io::Result<Address> {
        Ok(self.peer_addr().ok_or(io::ErrorKind::NotConnected)?)
    }

    /// Copies the next datagram to `out`, as far as it fits; the length of all of it, and who it is
    /// from. What did not fit is lost.
    ///
    /// # Errors
    /// `WouldBlock` and `TimedOut`; `ConnectionAborted` when the endpoint is over.
    pub fn recv_from(&self, out: &mut [u8]) -> io::Result<(usize, Address)> {
        self.receive(|engine| {
            let got = engine
                .recv(self.id, out, false)
                .ok_or(RecvFault::WouldBlock)?;
            Ok((got.len, got.source))
        })
    }

    /// As [`recv_from`](Self::recv_from), without saying who it is from.
    ///
    /// # Errors
    /// As there.
    pub fn recv(&self, out: &mut [u8]) -> io::Result<usize> {
        Ok(self.recv_from(out)?.0)
    }

    /// As [`recv_from`](Self::recv_from), and leaves the datagram to be received again, whole.
    ///
    /// # Errors
    /// As there.
    pub fn peek_from(&self, out: &mut [u8]) -> io::Result<(usize, Address)> {
        self.receive(|engine| {
            let got = engine
                .recv(self.id, out, true)
                .ok_or(RecvFault::WouldBlock)?;
            Ok((got.len, got.source))
        })
    }

    /// Calls are made by tasks that are enlisted.
    #[cfg(feature = "tokio")]
    pub(super) fn set_told(&self) {
        self.blocking.set_told();
    }

    /// What a poller asks about it.
    pub(super) fn polled(&self) -> (&Arc<Core>, DatagramId) {
        (&self.core, self.id)
    }

    fn set_timeout(place: &AtomicU64, timeout: Option<Duration>) -> io::Result<()> {
        if timeout == Some(Duration::ZERO) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        place.store(encode_timeout(timeout), Ordering::Relaxed);
        Ok(())
    }

    fn budget(&self, timeout: &AtomicU64) -> WaitBudget {
        let nanos = timeout.load(Ordering::Relaxed);
        let wait = decode(self.wait.load(Ordering::Relaxed));
        WaitBudget {
            mode: self.blocking.mode(wait),
            deadline: (nanos > 0).then(|| Instant::now() + Duration::from_nanos(nanos)),
        }
    }

    /// Calls `get` until there is something to have.
    #[inline]
    fn receive<T>(
        &self,
        mut get: impl FnMut(&mut dyn DatagramBackend) -> Result<T, RecvFault>,
    ) -> io::Result<T> {
        let attempt = |engine: &mut dyn Backend| match get(engine.datagrams()?) {
            Ok(got) => {
                engine.flush_after_read();
                Some(Ok(got))
            }
            Err(RecvFault::TooManyLeases) => Some(Err(StreamError::TooManyLeases)),
            Err(_) => None,
        };
        let interest = Interest::Datagram(self.id);
        let budget = self.budget(&self.read_timeout);
        Ok(self.core.wait(interest, budget, attempt)??)
    }

    /// Calls `put` until there is room.
    #[inline]
    fn transmit<T>(
        &self,
        mut put: impl FnMut(&mut dyn DatagramBackend) -> Result<T, DatagramFault>,
    ) -> io::Result<T> {
        let attempt = |engine: &mut dyn Backend| match put(engine.datagrams()?) {
            Ok(done) => {
                engine.flush();
                Some(Ok(done))
            }
            Err(fault) => DatagramError::of(fault).map(Err),
        };
        let interest = Interest::Datagram(self.id);
        let budget = self.budget(&self.write_timeout);
        Ok(self.core.wait(interest, budget, attempt)??)
    }
}

impl Drop for Datagram {
    fn drop(&mut self) {
        self.core.end(DeferredClose::Datagram(self.id));
    }
}

impl AsFd for Datagram {
    /// The endpoint's descriptor; see
    /// [`Stream::set_nonblocking`](super::Stream::set_nonblocking).
    fn as_fd(&self) -> BorrowedFd<'_> {
        (*self.core).as_fd()
    }
}

impl AsRawFd for Datagram {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
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

impl fmt::Debug for DatagramHome<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DatagramHome").finish_non_exhaustive()
    }
}
