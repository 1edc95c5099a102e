//! How an endpoint comes about: its settings, the ways to its device, and why there is none.

use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use zerosock_proto::{Cid, Port};
use zerosock_ring::Trust;

use super::endpoint::Endpoint;
use super::hub::Core;
use super::waiting::Wait;
use crate::control::attach::{self, AttachRequest, Attached, Client};
use crate::driver::{self, Driver, DriverConfig};
use crate::fault::Fault;

/// Why there is no endpoint.
///
/// ```
/// # let dir = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/hub.rs"));
/// # let path = dir.path().join("attach.sock");
/// use std::io::ErrorKind;
/// use zerosock::attach::AttachError;
/// use zerosock::vsock::{Endpoint, Fault, OpenError};
///
/// let error = Endpoint::attach(dir.path().join("nobody.sock")).unwrap_err();
/// assert_eq!(error.fault(), Fault::System);
///
/// let _first = Endpoint::builder().name("db").attach(&path)?;
/// let error = Endpoint::builder().name("db").attach(&path).unwrap_err();
/// assert!(matches!(error, OpenError::Place(AttachError::NameTaken(_))));
/// assert_eq!(error.fault(), Fault::Caller);
/// assert_eq!(std::io::Error::from(error).kind(), ErrorKind::AddrInUse);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The attach socket did not give us a place. Whose fault it is, says
    /// [`fault`](attach::AttachError::fault).
    #[error(transparent)]
    Place(#[from] attach::AttachError),
    /// The caller: a name that none can have.
    #[error(transparent)]
    Name(#[from] attach::NameError),
    /// The device did not take us, or broke its protocol.
    #[error(transparent)]
    Device(#[from] driver::AttachError),
    /// The system had no descriptor to give.
    #[error("cannot share a descriptor: {0}")]
    System(#[from] io::Error),
}

impl OpenError {
    /// Who is to blame: the device or the one who keeps the attach socket, the caller, or the
    /// system.
    pub fn fault(&self) -> Fault {
        match self {
            OpenError::Place(error) => error.fault(),
            OpenError::Name(_) => Fault::Caller,
            OpenError::Device(error) => error.fault(),
            OpenError::System(_) => Fault::System,
        }
    }
}

impl From<OpenError> for io::Error {
    /// With the kind that says most: `AddrInUse` for a CID or name that is taken,
    /// `PermissionDenied` for a user who may not attach, `NotFound` or `ConnectionRefused` where
    /// nobody is at the socket, `TimedOut`, `InvalidInput` for what the caller should not have
    /// asked, `InvalidData` for who broke a protocol, `Unsupported` for another version.
    fn from(error: OpenError) -> io::Error {
        let kind = match &error {
            OpenError::Place(error) => error.kind(),
            OpenError::Name(_) => io::ErrorKind::InvalidInput,
            OpenError::Device(error) => error.kind(),
            OpenError::System(error) => error.kind(),
        };
        io::Error::new(kind, error)
    }
}

/// Bytes of a receive buffer: as many as the longest packet has. Only the pages that packets reach
/// are ever touched.
const RECEIVE_BUFFER: u32 = 64 << 10;

/// How an [`Endpoint`] is to be.
///
/// ```
/// # let dir = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/hub.rs"));
/// # let path = dir.path().join("attach.sock");
/// use zerosock::Port;
/// use zerosock::vsock::{Endpoint, Wait};
///
/// let endpoint = Endpoint::builder()
///     .name("loader")
///     .ports([Port::new(9000)])
///     // Packets of up to 1 MiB, and 8 MiB of them under way.
///     .receive_buffers(1 << 20)
///     .window(8 << 20)
///     .wait(Wait::ADAPTIVE)
///     .attach(&path)?;
/// let _listener = endpoint.listen(Port::new(9000), 16)?;
/// assert_eq!(endpoint.resolve("loader")?, endpoint.cid());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
#[must_use]
pub struct EndpointBuilder {
    pub(super) config: DriverConfig,
    pub(super) request: AttachRequest,
    pub(super) name: Option<String>,
    wait: Wait,
    trust: Option<Trust>,
}

impl Endpoint {
    /// An endpoint with the usual settings.
    pub fn builder() -> EndpointBuilder {
        EndpointBuilder {
            config: DriverConfig {
                rx_buffer_size: RECEIVE_BUFFER,
                ..DriverConfig::default()
            },
            request: AttachRequest::default(),
            name: None,
            wait: Wait::default(),
            trust: None,
        }
    }

    /// Attaches at an attach socket, with any CID and the usual settings.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn attach(path: impl AsRef<Path>) -> Result<Endpoint, OpenError> {
        Endpoint::builder().attach(path)
    }
}

impl EndpointBuilder {
    /// How its sockets wait, until they are told otherwise. At first [`Wait::Sleep`].
    pub fn wait(mut self, wait: Wait) -> EndpointBuilder {
        self.wait = wait;
        self
    }

    /// Whether to take memory from the system's pool of huge pages, if there is enough; at first,
    /// yes. With the usual settings that is nine pages of 2 MiB, taken at once and whole.
    pub fn huge_pages(mut self, huge_pages: bool) -> EndpointBuilder {
        self.config.huge_pages = huge_pages;
        self
    }

    /// Entries of each of its queues: a power of two, 8 to 32768; at first 256. A packet takes two.
    pub fn queue_size(mut self, entries: u16) -> EndpointBuilder {
        self.config.queue_size = entries;
        self
    }

    /// Bytes of a receive buffer, at most 1 MiB; at first 65536.
    ///
    /// A packet that is received is no longer, and a packet is no message: a stream has no messages
    /// of its own. A peer's `loan(65536)` gives it as many bytes as the buffer has that lies ready
    /// here, and it takes so many [`recv`](super::Stream::recv) here to get all of what it wrote. With
    /// the default, whatever a peer sends as one packet arrives as one: no packet of zerosock's
    /// is longer. There are half as many buffers as [`queue_size`](Self::queue_size) has entries,
    /// so with the defaults they are 8 MiB of address space, of which only the pages that bytes came
    /// into take memory; Linux guests have 4096, and memory can be saved so.
    pub fn receive_buffers(mut self, bytes: u32) -> EndpointBuilder {
        self.config.rx_buffer_size = bytes;
        self
    }

    /// Bytes of a transmit buffer, at most 65536, which is also the default: a packet that is sent
    /// is no longer.
    pub fn transmit_buffers(mut self, bytes: u32) -> EndpointBuilder {
        self.config.tx_buffer_size = bytes;
        self
    }

    /// Most queue pairs to use, 1 to 16, if the device offers as many (`zerosock serve
    /// --queue-pairs`, [`DaemonConfig::queue_pairs`](crate::daemon::DaemonConfig::queue_pairs); docs/queue-pairs.md). At
    /// first 1. Each belongs to another worker of the device and has buffers of its own;
    /// connections are spread over them by a hash of their addresses, and can be
    /// [moved](super::Stream::move_to_queue_pair).
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let path = dir.path().join("attach.sock");
    /// use zerosock::attach::{self, AttachConfig};
    /// use zerosock::daemon::{Daemon, DaemonConfig};
    /// use zerosock::vsock::Endpoint;
    /// use zerosock::{Address, Port};
    ///
    /// let daemon = Daemon::start(DaemonConfig {
    ///     workers: 2,
    ///     queue_pairs: 2,
    ///     attach: Some(AttachConfig::new(attach::listen(&path)?)),
    ///     ..DaemonConfig::default()
    /// })?;
    /// let endpoint = Endpoint::builder().queue_pairs(2).attach(&path)?;
    /// assert_eq!(endpoint.queue_pairs(), 2);
    /// # let server = Endpoint::attach(&path)?;
    /// # let listener = server.listen(Port::new(1), 1)?;
    /// # let to = Address::new(server.cid(), Port::new(1));
    /// # let accept = std::thread::spawn(move || (listener.accept().unwrap().0, server));
    /// let stream = endpoint.connect(to)?;
    /// # let (theirs, server) = accept.join().unwrap();
    /// let other = 1 - stream.queue_pair();
    /// stream.move_to_queue_pair(other)?;
    /// assert_eq!(stream.queue_pair(), other);
    /// # daemon.shutdown();
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn queue_pairs(mut self, most: u16) -> EndpointBuilder {
        self.config.queue_pairs = most;
        self
    }

    /// Bytes that a peer may have under way to us in one connection, at least 1; at first 262144.
    pub fn window(mut self, bytes: u32) -> EndpointBuilder {
        self.config.buf_alloc = bytes;
        self
    }

    /// Connections at once, at first 131072; a further connect fails, and further requests are
    /// answered with a reset. What lies ready for a connection that nothing passes through is a few
    /// hundred bytes, taken when it comes.
    pub fn max_connections(mut self, connections: usize) -> EndpointBuilder {
        self.config.max_connections = connections;
        self
    }

    /// Whether to negotiate datagrams ([`Datagram`](super::Datagram)); at first, yes. Without, it is
    /// as stock guests are.
    pub fn datagrams(mut self, datagrams: bool) -> EndpointBuilder {
        self.config.datagrams = datagrams;
        self
    }

    /// How long a connect waits for an answer: some time, at first 2 s.
    pub fn connect_timeout(mut self, timeout: Duration) -> EndpointBuilder {
        self.config.connect_timeout = timeout;
        self
    }

    /// Trusts the device's process, and through it the peers, to write nothing that we hold on
    /// lease and to read nothing that we hold on loan, as zerosock's own device does not. Leases
    /// and loans then give plain slices. The token is had by the one `unsafe` declaration of
    /// [`Trust::declare`], which says what is promised.
    pub fn trust_host(mut self, trust: Trust) -> EndpointBuilder {
        self.trust = Some(trust);
        self
    }

    /// The CID to ask for at the attach socket; without, any that is free.
    pub fn cid(mut self, cid: Cid) -> EndpointBuilder {
        self.request.cid = Some(cid);
        self
    }

    /// The name to ask for at the attach socket, by which others find us: at most 64 letters,
    /// digits, `.`, `_` or `-`.
    pub fn name(mut self, name: impl Into<String>) -> EndpointBuilder {
        self.name = Some(name.into());
        self
    }

    /// The ports at which we can be reached, at most 256; without, all that we listen on. Of a
    /// service, those that it claims; without, none. Only of effect with [`attach`](Self::attach)
    /// and [`attach_as_host`](Self::attach_as_host), as is the name.
    pub fn ports(mut self, ports: impl IntoIterator<Item = Port>) -> EndpointBuilder {
        self.request.ports = ports.into_iter().collect();
        self
    }

    /// Attaches at the attach socket of `zerosock serve`, or of a `Host`, which gives us a place:
    /// a CID and a device. Both, and the name, are free again when the endpoint is dropped, or its
    /// process dies.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn attach(mut self, path: impl AsRef<Path>) -> Result<Endpoint, OpenError> {
        if let Some(name) = &self.name {
            self.request.name = Some(name.parse()?);
        }
        let Attached {
            socket, control, ..
        } = Client::connect(path.as_ref(), &self.request)?;
        let driver = Driver::attach_over(socket, self.config.clone())?;
        self.open(driver, Some(control))
    }

    /// Attaches to a device by its vhost-user socket, as a VMM does for a guest. The CID is the
    /// one that the device has for its guest.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn attach_device(mut self, socket: impl AsRef<Path>) -> Result<Endpoint, OpenError> {
        self.request.ports.clear();
        self.config.socket = socket.as_ref().to_path_buf();
        let driver = Driver::attach(self.config.clone())?;
        self.open(driver, None)
    }

    pub(super) fn open(
        self,
        mut driver: Driver,
        place: Option<Client>,
    ) -> Result<Endpoint, OpenError> {
        driver.set_trusted(self.trust.is_some());
        let (cid, huge_pages) = (driver.cid(), driver.huge_pages());
        let queue_pairs = driver.queue_pairs();
        let core = Core::new(Box::new(driver), self.trust, place)?;
        core.set_window(self.config.buf_alloc);
        Ok(Endpoint {
            core: Arc::new(core),
            cid,
            ports: Arc::new(Mutex::new(self.request.ports)),
            wait: self.wait,
            connect_timeout: self.config.connect_timeout,
            huge_pages,
            queue_pairs,
        })
    }
}
