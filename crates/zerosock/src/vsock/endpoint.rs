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
use super::endpoint_calls::endpoint_calls;
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

endpoint_calls!(Endpoint);

impl Endpoint {
    /// The CID of the attached process of this name.
    ///
    /// # Errors
    /// `NotFound` when no attached process has the name, or when the endpoint was not opened at an
    /// attach socket; `InvalidInput` for an invalid name.
    pub fn resolve(&self, name: &str) -> io::Result<Cid> {
        resolve(&self.core, name)
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

    /// Whether a datagram socket may bind this port. A service may bind only claimed ports; an
    /// endpoint with named ports only those, or a free one for sending.
    pub(super) fn may_bind(&self, port: Port) -> bool {
        let ports = self.named();
        let free = !self.is_service() && (ports.is_empty() || port == Port::ANY);
        free || ports.contains(&port)
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
        crate::vsock::connection::Connected::new(self.core.clone(), id, &info, self.wait)
    }
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Endpoint")
            .field("cid", &self.cid)
            .finish_non_exhaustive()
    }
}
