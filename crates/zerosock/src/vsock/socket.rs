//! Sockets that neither connect nor listen yet: binding and options.
//!
//! # Invariants
//! - A bound port is reserved for its socket, and for the connection or listener made of it, until
//!   the last of them is dropped.

use std::fmt;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use zerosock_proto::wire::vsock::SocketType;
use zerosock_proto::{Address, Cid, Port};

use super::bound::Bound;
use super::connecting::await_connected;
use super::connection::Connected;
use super::errors::{BindError, of_connect, of_listen};
use super::hub::Core;
use super::listener::Listener;
use super::options::{Options, timeout};
use super::seqpacket::{SeqPacket, SeqPacketListener};
use super::stream::Stream;
use super::waiting::Wait;

/// A socket that is neither connected nor listening: for binding a port and setting options first.
///
/// Without either, [`Endpoint::connect`](super::Endpoint::connect) and
/// [`Endpoint::listen`](super::Endpoint::listen) suffice. The socket keeps its options and can be
/// used again. A bound port passes to the connection or the listener; a failed connect returns it.
///
/// ```
/// # let (db, web) = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/two.rs"));
/// use std::time::Duration;
/// use zerosock::{Address, Cid, Port};
///
/// let mut socket = db.socket();
/// // Any free port.
/// socket.bind(Address::new(Cid::ANY, Port::ANY))?;
/// // Accepted sockets have the same.
/// socket.set_buffer_bounds(128, 1 << 20)?;
/// socket.set_buffer_size(1 << 20)?;
/// let listener = socket.listen(16)?;
///
/// let mut socket = web.socket();
/// socket.bind(Address::new(Cid::ANY, Port::new(1023)))?;
/// socket.set_connect_timeout(Duration::from_millis(500))?;
/// let client = socket.begin_connect(listener.local_addr())?;
/// let (served, from) = listener.accept()?;
/// client.wait_connected()?;
/// assert_eq!(from, Address::new(web.cid(), Port::new(1023)));
/// assert_eq!(served.buffer_size(), 1 << 20);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// A forked child must neither use nor drop its copy: see [forks](crate::vsock#forks).
pub struct Socket {
    core: Arc<Core>,
    cid: Cid,
    /// The reachable ports. Empty: all, or none for a service.
    ports: Arc<Mutex<Vec<Port>>>,
    service: bool,
    wait: Wait,
    connect_timeout: Duration,
    options: Options,
    bound: Option<Bound>,
}

impl Socket {
    /// A socket of the endpoint behind `core`. `ports` are its reachable ports; empty: all, or none
    /// for a service.
    pub(super) fn new(
        core: Arc<Core>,
        cid: Cid,
        ports: Arc<Mutex<Vec<Port>>>,
        service: bool,
        wait: Wait,
        connect_timeout: Duration,
    ) -> Socket {
        let options = Options::new(core.window());
        Socket {
            core,
            cid,
            ports,
            service,
            wait,
            connect_timeout,
            options,
            bound: None,
        }
    }

    /// Binds a port to connect from or to listen on. [`Port::ANY`] takes a free one, [`Cid::ANY`]
    /// is the endpoint's own CID. Until the socket listens, requests to the port are refused. The
    /// port is free again when the socket, or the connection or listener made of it, is dropped.
    ///
    /// # Errors
    /// With a [`BindError`] inside: `AddrInUse` when another socket listens on the port, has
    /// bound it, or has connected from it; `AddrNotAvailable` for a foreign CID; `InvalidInput` for
    /// a socket that is bound already, and for a port that a service has not
    /// [claimed](super::Endpoint::claim).
    pub fn bind(&mut self, local: Address) -> io::Result<()> {
        if self.bound.is_some() {
            return Err(BindError::AlreadyBound.into());
        }
        if local.cid != Cid::ANY && local.cid != self.cid {
            return Err(BindError::ForeignCid(local.cid).into());
        }
        if self.service && local.port != Port::ANY {
            self.check_named(local.port)?;
        }
        let mut locked = self.core.lock();
        let port = locked.backend().bind(local.port).map_err(of_listen)?;
        drop(locked);
        let core = self.core.clone();
        let owns_port = true;
        self.bound = Some(Bound {
            core,
            port,
            owns_port,
        });
        Ok(())
    }

    /// The bound address.
    pub fn local_addr(&self) -> Option<Address> {
        let bound = self.bound.as_ref()?;
        Some(Address::new(self.cid, bound.port))
    }

    /// See [`Stream::set_buffer_size`]. The first packet announces it to the peer. Sockets that a
    /// listener accepts inherit this and all other options.
    ///
    /// # Errors
    /// With an [`OptionError`](super::OptionError) inside: `InvalidInput` for 0.
    pub fn set_buffer_size(&mut self, bytes: u32) -> io::Result<()> {
        self.options.set_buffer(bytes)?;
        Ok(())
    }

    /// The receive buffer in bytes.
    pub fn buffer_size(&self) -> u32 {
        self.options.buffer.unwrap_or(self.core.window())
    }

    /// See [`Stream::set_buffer_bounds`].
    ///
    /// # Errors
    /// As there.
    pub fn set_buffer_bounds(&mut self, min: u32, max: u32) -> io::Result<()> {
        self.options.set_bounds(min, max, self.buffer_size())?;
        Ok(())
    }

    /// The smallest and the largest receive buffer, in bytes.
    pub fn buffer_bounds(&self) -> (u32, u32) {
        self.options.bounds()
    }

    /// How long a connect waits for an answer (SO_VM_SOCKETS_CONNECT_TIMEOUT). Default: as the
    /// endpoint is set.
    ///
    /// # Errors
    /// With an [`OptionError`](super::OptionError) inside: `InvalidInput` for a time of zero.
    pub fn set_connect_timeout(&mut self, time: Duration) -> io::Result<()> {
        self.options.connect_timeout = timeout(Some(time))?;
        Ok(())
    }

    /// How long a connect waits for an answer.
    pub fn connect_timeout(&self) -> Duration {
        self.options.connect_timeout.unwrap_or(self.connect_timeout)
    }

    /// See [`Stream::set_linger`].
    pub fn set_linger(&mut self, linger: Option<Duration>) {
        self.options.linger = linger;
    }

    /// See [`Stream::set_low_water`].
    ///
    /// # Errors
    /// As there.
    pub fn set_low_water(&mut self, bytes: u32) -> io::Result<()> {
        let buffer = self.buffer_size();
        self.options.set_low_water(bytes, buffer)?;
        Ok(())
    }

    /// See [`Stream::set_read_timeout`].
    ///
    /// # Errors
    /// As there.
    pub fn set_read_timeout(&mut self, time: Option<Duration>) -> io::Result<()> {
        self.options.read_timeout = timeout(time)?;
        Ok(())
    }

    /// See [`Stream::set_write_timeout`].
    ///
    /// # Errors
    /// As there.
    pub fn set_write_timeout(&mut self, time: Option<Duration>) -> io::Result<()> {
        self.options.write_timeout = timeout(time)?;
        Ok(())
    }

    /// Connects to `peer`.
    ///
    /// # Errors
    /// As [`Endpoint::connect`](super::Endpoint::connect); `AddrInUse` also when the socket is
    /// bound to a port that has a connection to `peer` already. A closed connection counts until
    /// the peer has acknowledged the close, which [`Stream::set_linger`] can wait for.
    pub fn connect(&mut self, peer: Address) -> io::Result<Stream> {
        self.connect_as(peer)
    }

    /// As [`connect`](Self::connect), for messages.
    ///
    /// # Errors
    /// As there; `Unsupported` when the peer, or the device in between, has no seqpacket sockets.
    pub fn connect_seqpacket(&mut self, peer: Address) -> io::Result<SeqPacket> {
        self.connect_as(peer)
    }

    fn connect_as<S: Connected>(&mut self, peer: Address) -> io::Result<S> {
        let mut socket: S = self.begin_connect_as(peer)?;
        match await_connected(socket.conn(), self.wait, self.connect_timeout()) {
            Ok(()) => Ok(socket),
            Err(error) => {
                // For another try.
                self.bound = socket.unbind();
                socket.conn().reset();
                Err(error)
            }
        }
    }

    /// Sends the request and does not wait for the answer; see
    /// [`Endpoint::begin_connect`](super::Endpoint::begin_connect).
    ///
    /// # Errors
    /// Those of [`connect`](Self::connect) that are known at once.
    pub fn begin_connect(&mut self, peer: Address) -> io::Result<Stream> {
        self.begin_connect_as(peer)
    }

    /// As [`begin_connect`](Self::begin_connect), for messages.
    ///
    /// # Errors
    /// Those of [`connect_seqpacket`](Self::connect_seqpacket) that are known at once.
    pub fn begin_connect_seqpacket(&mut self, peer: Address) -> io::Result<SeqPacket> {
        self.begin_connect_as(peer)
    }

    fn begin_connect_as<S: Connected>(&mut self, peer: Address) -> io::Result<S> {
        let from = self.bound.as_ref().map_or(Port::ANY, |bound| bound.port);
        let mut locked = self.core.lock();
        let backend = locked.backend();
        let id = backend
            .connect(from, peer, S::TYPE)
            .map_err(|error| of_connect(peer, error))?;
        // Before the request is sent, which announces the buffer.
        if let Some(bytes) = self.options.buffer {
            backend.set_buffer(id, bytes);
        }
        if let Some(time) = self.options.connect_timeout {
            backend.set_connect_timeout(id, time);
        }
        backend.flush();
        let info = backend.info(id).ok_or(io::ErrorKind::NotConnected)?;
        drop(locked);
        let mut socket = S::new(self.core.clone(), id, &info, self.wait);
        socket.apply_options(self.options, self.bound.take());
        Ok(socket)
    }

    /// Listens, on a free port if the socket is not bound. As on Linux at most
    /// `backlog + 1` connections wait to be accepted; further ones are refused.
    ///
    /// # Errors
    /// As [`Endpoint::listen`](super::Endpoint::listen).
    pub fn listen(&mut self, backlog: usize) -> io::Result<Listener> {
        self.listen_for(backlog, SocketType::Stream)
    }

    /// As [`listen`](Self::listen), for connections that carry messages.
    ///
    /// # Errors
    /// As there.
    pub fn listen_seqpacket(&mut self, backlog: usize) -> io::Result<SeqPacketListener> {
        let listener = self.listen_for(backlog, SocketType::SeqPacket)?;
        Ok(SeqPacketListener::new(listener))
    }

    pub(super) fn listen_for(
        &mut self,
        backlog: usize,
        socket_type: SocketType,
    ) -> io::Result<Listener> {
        if self.bound.is_none() {
            self.bind_any()?;
        }
        let port = self.bound.as_ref().map_or(Port::ANY, |bound| bound.port);
        self.check_named(port)?;
        let mut locked = self.core.lock();
        let backend = locked.backend();
        backend.unbind(port);
        if let Err(error) = backend.listen(port, backlog, socket_type) {
            // Cannot fail: the port was bound to this socket before, under the same lock.
            let _ = backend.bind(port);
            return Err(of_listen(error).into());
        }
        if let Some(bytes) = self.options.buffer {
            backend.set_accept_buffer(port, bytes);
        }
        drop(locked);
        // The listener releases the port from now on.
        if let Some(mut bound) = self.bound.take() {
            bound.owns_port = false;
        }
        let local = Address::new(self.cid, port);
        let listener = Listener::new(self.core.clone(), local, self.wait);
        listener.apply_options(self.options);
        Ok(listener)
    }

    fn named(&self) -> MutexGuard<'_, Vec<Port>> {
        // Each update leaves the value consistent, even where a panic has poisoned the lock.
        self.ports.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Checks that peers can reach `port`.
    fn check_named(&self, port: Port) -> Result<(), BindError> {
        let ports = self.named();
        if ports.contains(&port) || (ports.is_empty() && !self.service) {
            Ok(())
        } else {
            Err(BindError::NotNamed(port))
        }
    }

    /// Binds a free port that peers can reach.
    fn bind_any(&mut self) -> io::Result<()> {
        let any = Address::new(Cid::ANY, Port::ANY);
        let ports = self.named().clone();
        if ports.is_empty() && !self.service {
            return self.bind(any);
        }
        let free = |port: &Port| self.bind(Address::new(Cid::ANY, *port)).is_ok();
        match ports.iter().any(free) {
            true => Ok(()),
            false => Err(BindError::InUse.into()),
        }
    }
}

impl fmt::Debug for Socket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Socket")
            .field("local", &self.local_addr())
            .finish_non_exhaustive()
    }
}
