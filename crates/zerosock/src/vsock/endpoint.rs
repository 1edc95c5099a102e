//! The endpoint: a process that is attached to a host in another process, or to `zerosock serve`.
//!
//! # Invariants
//! - The endpoint's CID, name and ports stay reserved while the endpoint or one of its sockets
//!   lives, and are free when the last is dropped or the process dies.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use zerosock_proto::wire::vsock::SocketType;
use zerosock_proto::{Address, Cid, Port};

use super::connecting::{begin_connect, connect, listen};
use super::errors::BindError;
use super::hub::Core;
use super::listener::Listener;
use super::seqpacket::{SeqPacket, SeqPacketListener};
use super::socket::Socket;
use super::stream::Stream;
use super::waiting::Wait;
use crate::control::attach::{self};
#[cfg(test)]
use crate::driver::{self, Driver};
use crate::routing::name::Name;
use crate::table::backend::EndpointStats;

/// A process with a CID and vsock sockets, as a guest has, without a virtual machine.
///
/// It has no thread of its own: the thread that calls one of its sockets drives the queues for all
/// of them. A program that makes no calls for long stalls its peers.
///
/// ```
/// # let dir = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/hub.rs"));
/// # let path = dir.path().join("attach.sock");
/// use std::io::{BufRead, BufReader, Write};
/// use std::thread;
/// use zerosock::Port;
/// use zerosock::vsock::{Endpoint, Wait};
///
/// let db = Endpoint::builder().name("db").attach(&path)?;
/// let listener = db.listen(Port::new(5432), 128)?;
/// thread::spawn(move || -> std::io::Result<()> {
///     let (mut stream, peer) = listener.accept()?;
///     writeln!(stream, "hello, {}", peer.cid)
/// });
///
/// let web = Endpoint::builder().wait(Wait::ADAPTIVE).attach(&path)?;
/// let mut line = String::new();
/// let stream = web.connect_name("db", Port::new(5432))?;
/// BufReader::new(stream).read_line(&mut line)?;
/// assert_eq!(line, format!("hello, {}\n", web.cid()));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// A forked child must neither use nor drop its copy: see [forks](crate::vsock#forks).
pub struct Endpoint {
    pub(super) core: Arc<Core>,
    pub(super) cid: Cid,
    /// The reachable ports. Empty: all, or none for a service.
    pub(super) ports: Arc<Mutex<Vec<Port>>>,
    pub(super) wait: Wait,
    pub(super) connect_timeout: Duration,
    pub(super) huge_pages: bool,
    pub(super) queue_pairs: u16,
}

impl Endpoint {
    /// The CID of the attached process of this name.
    ///
    /// # Errors
    /// `NotFound` when no attached process has the name, or when the endpoint was not opened at an
    /// attach socket; `InvalidInput` for an invalid name.
    pub fn resolve(&self, name: &str) -> io::Result<Cid> {
        resolve(&self.core, name)
    }

    /// Connects to `port` of the attached process called `name`.
    ///
    /// # Errors
    /// Those of [`resolve`](Self::resolve) and [`connect`](Self::connect).
    pub fn connect_name(&self, name: &str, port: Port) -> io::Result<Stream> {
        self.connect(Address::new(self.resolve(name)?, port))
    }

    /// Whether the shared memory lies in huge pages.
    pub fn has_huge_pages(&self) -> bool {
        self.huge_pages
    }

    /// Queue pairs negotiated with the device; see
    /// [`EndpointBuilder::queue_pairs`](super::EndpointBuilder::queue_pairs).
    pub fn queue_pairs(&self) -> u16 {
        self.queue_pairs
    }

    /// The endpoint's CID.
    pub fn cid(&self) -> Cid {
        self.cid
    }

    /// A new socket of this endpoint.
    pub fn socket(&self) -> Socket {
        Socket::new(
            self.core.clone(),
            self.cid,
            self.ports.clone(),
            self.is_service(),
            self.wait,
            self.connect_timeout,
        )
    }

    /// What a datagram socket needs of the endpoint.
    pub(super) fn core_and_wait(&self) -> (&Arc<Core>, Wait) {
        (&self.core, self.wait)
    }

    /// Whether a datagram socket may bind this port. A service may bind only claimed ports; an
    /// endpoint with named ports only those, or a free one for sending.
    pub(super) fn may_bind(&self, port: Port) -> bool {
        let ports = self.named();
        let free = !self.is_service() && (ports.is_empty() || port == Port::ANY);
        free || ports.contains(&port)
    }

    /// Connects to `peer`.
    ///
    /// # Errors
    /// With a [`ConnectError`](super::ConnectError) inside: `ConnectionRefused` when no socket
    /// listens there or the CID does not exist (only a [`Host`](super::Host) can tell the two
    /// apart), `TimedOut` without an answer within
    /// [`connect_timeout`](super::EndpointBuilder::connect_timeout), `HostUnreachable` for an
    /// address that no peer can have or when the device has gone, `AddrInUse` when no local port is
    /// left, `OutOfMemory` beyond [`max_connections`](super::EndpointBuilder::max_connections).
    /// `ConnectionAborted` when the endpoint has failed.
    pub fn connect(&self, peer: Address) -> io::Result<Stream> {
        connect(&self.core, peer, self.wait, self.connect_timeout)
    }

    /// Sends the request and does not wait for the answer. While the stream is connecting, reads
    /// and writes block. On the answer [`Stream::wait_connected`] returns the result, and a
    /// [`Poller`](super::Poller) reports the stream as writable.
    ///
    /// # Errors
    /// When the request cannot be sent, such as `HostUnreachable` for an address that no peer can
    /// have.
    pub fn begin_connect(&self, peer: Address) -> io::Result<Stream> {
        begin_connect(&self.core, peer, self.wait)
    }

    /// Listens on `port` of the endpoint's CID, or with [`Port::ANY`] on a free one, which
    /// [`Listener::local_addr`] returns. As on Linux at most `backlog + 1` connections wait to be
    /// accepted; further ones are refused.
    ///
    /// # Errors
    /// With a [`BindError`] inside: `AddrInUse` when another socket listens on the port or has
    /// bound it; `InvalidInput` for a port that no peer could reach: one that is not among the
    /// endpoint's [`ports`](super::EndpointBuilder::ports) or that a service has not
    /// [claimed](Self::claim).
    pub fn listen(&self, port: Port, backlog: usize) -> io::Result<Listener> {
        self.listen_for(port, backlog, SocketType::Stream)
    }

    fn listen_for(
        &self,
        port: Port,
        backlog: usize,
        socket_type: SocketType,
    ) -> io::Result<Listener> {
        // A service may use only claimed ports, and listening claims none.
        if port == Port::ANY && !self.is_service() {
            return self.socket().listen_for(backlog, socket_type);
        }
        let ports = self.named();
        if !ports.contains(&port) && (self.is_service() || !ports.is_empty()) {
            return Err(BindError::NotNamed(port).into());
        }
        drop(ports);
        let local = Address::new(self.cid, port);
        listen(&self.core, local, backlog, socket_type, self.wait)
    }

    /// As [`connect`](Self::connect), for messages.
    ///
    /// # Errors
    /// As [`connect`](Self::connect); `Unsupported` when the device has none.
    pub fn connect_seqpacket(&self, peer: Address) -> io::Result<SeqPacket> {
        connect(&self.core, peer, self.wait, self.connect_timeout)
    }

    /// As [`begin_connect`](Self::begin_connect), for messages.
    ///
    /// # Errors
    /// As [`begin_connect`](Self::begin_connect); `Unsupported` when the device has none.
    pub fn begin_connect_seqpacket(&self, peer: Address) -> io::Result<SeqPacket> {
        begin_connect(&self.core, peer, self.wait)
    }

    /// As [`listen`](Self::listen), for connections that carry messages. Streams are refused there;
    /// a port is listened on for one kind.
    ///
    /// # Errors
    /// As [`listen`](Self::listen).
    pub fn listen_seqpacket(&self, port: Port, backlog: usize) -> io::Result<SeqPacketListener> {
        let listener = self.listen_for(port, backlog, SocketType::SeqPacket)?;
        Ok(SeqPacketListener::new(listener))
    }

    /// Takes in received packets and runs due timers, without blocking. Only for programs that do
    /// not call their sockets for long.
    ///
    /// # Errors
    /// `ConnectionAborted` when the endpoint has failed.
    pub fn drive(&self) -> io::Result<()> {
        self.core.lock().drive()?;
        Ok(())
    }

    /// Counters since the endpoint was opened.
    pub fn stats(&self) -> EndpointStats {
        self.core.lock().stats()
    }
}

/// Asks the attach socket for the CID of `name`.
pub(super) fn resolve(core: &Core, name: &str) -> io::Result<Cid> {
    let invalid = |error| io::Error::new(io::ErrorKind::InvalidInput, error);
    let name: Name = name.parse().map_err(invalid)?;
    let mut attach_client = core.attach_client().ok_or(io::ErrorKind::NotFound)?;
    attach_client.resolve(&name).map_err(|error| match error {
        attach::AttachError::UnknownName(_) => io::Error::new(io::ErrorKind::NotFound, error),
        other => io::Error::new(other.kind(), other),
    })
}

#[cfg(test)]
impl Endpoint {
    /// An endpoint of a driver that is attached to a test.
    pub(crate) fn of(driver: Driver) -> Endpoint {
        Endpoint::builder().open(driver, None).unwrap()
    }

    /// The stream of a connection that the driver has already.
    pub(crate) fn stream(&self, id: driver::StreamId) -> Stream {
        let info = self.core.lock().backend().info(id).unwrap();
        Stream::new(self.core.clone(), id, &info, self.wait)
    }
}

impl AsFd for Endpoint {
    /// Readable when an event has occurred since a call answered `WouldBlock`.
    fn as_fd(&self) -> BorrowedFd<'_> {
        (*self.core).as_fd()
    }
}

impl AsRawFd for Endpoint {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Endpoint")
            .field("cid", &self.cid)
            .finish_non_exhaustive()
    }
}
