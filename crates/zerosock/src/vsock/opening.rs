//! Opening an endpoint: settings, the ways to attach to a device, and errors.

use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use zerosock_proto::{Cid, Port};
use zerosock_ring::Trust;

use super::background;
use super::endpoint::Endpoint;
use super::hub::Core;
use super::waiting::Wait;
use crate::control::attach::client::TIMEOUT;
use crate::control::attach::{self, AttachRequest, AttachedDevice, Client, Start};
use crate::control::guest::agent::{Agent, AgentError};
use crate::driver::guest_device::GuestDevice;
use crate::driver::{self, Driver, DriverConfig};
use crate::fault::Fault;

/// Why an endpoint could not be opened.
///
/// ```
/// # let dir = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/hub.rs"));
/// # let path = dir.path().join("attach.sock");
/// use std::io::ErrorKind;
/// use zerosock::attach::AttachError;
/// use zerosock::vsock::{Endpoint, Fault, OpenError};
///
/// let error = Endpoint::attach(dir.path().join("missing.sock")).unwrap_err();
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
#[non_exhaustive]
pub enum OpenError {
    /// The attach socket refused the endpoint. [`fault`](attach::AttachError::fault) names the side
    /// at fault.
    #[error(transparent)]
    Place(#[from] attach::AttachError),
    /// The caller: an invalid name.
    #[error(transparent)]
    Name(#[from] attach::NameError),
    /// The device refused the driver, did not answer in time, or violated the protocol; or a setting is out of
    /// its range.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The agent of this program has no endpoint. [`fault`](AgentError::fault) names the side at fault.
    #[error(transparent)]
    Guest(#[from] AgentError),
    /// The system had no descriptor or thread left.
    #[error("cannot share a descriptor or start a thread: {0}")]
    System(#[from] io::Error),
}

impl OpenError {
    /// The side at fault: the peer (the device or the server of the attach socket), the caller, or
    /// the system.
    pub fn fault(&self) -> Fault {
        match self {
            OpenError::Place(error) => error.fault(),
            OpenError::Name(_) => Fault::Caller,
            OpenError::Device(error) => error.fault(),
            OpenError::Guest(error) => error.fault(),
            OpenError::System(_) => Fault::System,
        }
    }
}

impl From<OpenError> for io::Error {
    /// The kind is `AddrInUse` for a CID or name that is taken, `PermissionDenied` for a user that
    /// may not attach, `NotFound` or `ConnectionRefused` when no server is at the socket,
    /// `TimedOut`, `InvalidInput` for invalid settings, `InvalidData` for a protocol violation,
    /// `Unsupported` for another version.
    fn from(error: OpenError) -> io::Error {
        let kind = match &error {
            OpenError::Place(error) => error.kind(),
            OpenError::Name(_) => io::ErrorKind::InvalidInput,
            OpenError::Device(DeviceError(error)) => error.kind(),
            OpenError::System(error) | OpenError::Guest(AgentError::System(error)) => error.kind(),
            OpenError::Guest(_) => io::ErrorKind::Other,
        };
        io::Error::new(kind, error)
    }
}

/// Why an endpoint does not work with its device, after the attach socket has accepted it.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub struct DeviceError(driver::DriverAttachError);

impl DeviceError {
    /// The side at fault: the caller for a setting out of its range, else the device or the system.
    pub fn fault(&self) -> Fault {
        self.0.fault()
    }
}

impl From<driver::DriverAttachError> for OpenError {
    fn from(error: driver::DriverAttachError) -> OpenError {
        OpenError::Device(DeviceError(error))
    }
}

/// Bytes of a receive buffer: the length of the longest packet. Only pages that packets reach use
/// memory.
const RECEIVE_BUFFER: u32 = 64 << 10;
/// How much later than others a host answers a wrong key.
const LATE_REFUSAL: Duration = Duration::from_secs(11);

/// The settings of an [`Endpoint`].
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
///     // Packets of up to 1 MiB, and 8 MiB of them in flight.
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
    background: bool,
    trust: Option<Trust>,
    /// Time limit of attaching, and of later requests at the attach socket.
    pub(super) attach_timeout: Duration,
}

impl Endpoint {
    /// The default settings.
    pub fn builder() -> EndpointBuilder {
        EndpointBuilder {
            config: DriverConfig {
                rx_buffer_size: RECEIVE_BUFFER,
                ..DriverConfig::default()
            },
            request: AttachRequest::default(),
            name: None,
            wait: Wait::default(),
            background: false,
            trust: None,
            attach_timeout: TIMEOUT,
        }
    }

    /// Attaches at an attach socket, with any CID and the default settings.
    ///
    /// Waits for the host to answer, at most 10 s ([`attach_timeout`](EndpointBuilder::attach_timeout)). A `Host`
    /// answers only while it is driven: attach in another thread than the one that is to drive it.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn attach(path: impl AsRef<Path>) -> Result<Endpoint, OpenError> {
        Endpoint::builder().attach(path)
    }
}

impl EndpointBuilder {
    /// How its sockets wait, unless they are set otherwise. Default: [`Wait::Sleep`].
    pub fn wait(mut self, wait: Wait) -> EndpointBuilder {
        self.wait = wait;
        self
    }

    /// Starts a thread that drives the endpoint until its last socket is dropped. Without it connections move
    /// only during calls of their endpoint. Each packet that arrives while a call waits wakes the thread too, so
    /// a program with a thread in a call that waits is faster without it.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let path = dir.path().join("attach.sock");
    /// use std::io::Read;
    /// use zerosock::vsock::{Endpoint, Host};
    /// use zerosock::{Address, Cid, Port};
    ///
    /// let host = Host::builder().attach(&path).background().start()?;
    /// let listener = host.listen(Port::new(1024), 16)?;
    /// let process = Endpoint::builder().background().attach(&path)?;
    /// // Both in one thread: the host answers while this call waits.
    /// let mut stream = process.connect(Address::new(Cid::HOST, Port::new(1024)))?;
    /// drop(listener.accept()?);
    /// assert_eq!(stream.read(&mut [0; 8])?, 0);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn background(mut self) -> EndpointBuilder {
        self.background = true;
        self
    }

    /// Whether to use the system's pool of huge pages, if it has enough; default true. With the
    /// default settings the endpoint uses nine pages of 2 MiB, allocated when it is opened.
    pub fn huge_pages(mut self, huge_pages: bool) -> EndpointBuilder {
        self.config.huge_pages = huge_pages;
        self
    }

    /// Entries of each queue: a power of two, 8 to 32768; default 256. A packet uses two.
    pub fn queue_size(mut self, entries: u16) -> EndpointBuilder {
        self.config.queue_size = entries;
        self
    }

    /// Bytes of a receive buffer, at most 1 MiB; default 65536.
    ///
    /// It limits the length of a received packet, and with it the capacity of a peer's
    /// [`loan`](super::Stream::loan). Packet boundaries mean nothing to a stream: longer data takes
    /// several [`recv`](super::Stream::recv). With the default, every packet that a zerosock peer
    /// sends arrives as one. There are half as many buffers as [`queue_size`](Self::queue_size) has
    /// entries: 8 MiB of address space with the defaults, of which only touched pages use memory.
    /// Linux guests use buffers of 4096 bytes; smaller buffers save memory.
    pub fn receive_buffers(mut self, bytes: u32) -> EndpointBuilder {
        self.config.rx_buffer_size = bytes;
        self
    }

    /// Bytes of a transmit buffer, at most 65536, which is also the default. It limits the length
    /// of a sent packet.
    pub fn transmit_buffers(mut self, bytes: u32) -> EndpointBuilder {
        self.config.tx_buffer_size = bytes;
        self
    }

    /// Most queue pairs to use, 1 to 16, default 1, as far as the device offers them (`zerosock
    /// serve --queue-pairs`,
    /// [`DaemonConfig::queue_pairs`](crate::daemon::DaemonConfig::queue_pairs);
    /// docs/queue-pairs.md). Each pair belongs to another worker of the device and has buffers of
    /// its own. A hash of the addresses assigns connections to pairs.
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
    /// assert!(stream.queue_pair() < 2);
    /// # daemon.shutdown();
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn queue_pairs(mut self, most: u16) -> EndpointBuilder {
        self.config.queue_pairs = most;
        self
    }

    /// Receive window of a connection in bytes, at least 1; default 262144.
    pub fn window(mut self, bytes: u32) -> EndpointBuilder {
        self.config.buf_alloc = bytes;
        self
    }

    /// Most connections, default 131072; a further connect fails, and further requests are answered
    /// with a reset. An idle connection uses a few hundred bytes, allocated when it is made.
    pub fn max_connections(mut self, connections: usize) -> EndpointBuilder {
        self.config.max_connections = connections;
        self
    }

    /// Whether to negotiate datagrams ([`Datagram`](super::Datagram)); default true. Stock guests
    /// do not.
    pub fn datagrams(mut self, datagrams: bool) -> EndpointBuilder {
        self.config.datagrams = datagrams;
        self
    }

    /// How long a connect waits for an answer; not zero, default 2 s.
    pub fn connect_timeout(mut self, timeout: Duration) -> EndpointBuilder {
        self.config.connect_timeout = timeout;
        self
    }

    /// How long attaching may take as a whole; default 10 s. Later requests at the attach socket
    /// ([`resolve`](Endpoint::resolve), [`claim`](Endpoint::claim)) have as long each.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let path = dir.path().join("attach.sock");
    /// use std::io::ErrorKind;
    /// use std::time::Duration;
    /// use zerosock::vsock::{Endpoint, Host};
    ///
    /// // A host that is not driven does not answer.
    /// let host = Host::builder().attach(&path).start()?;
    /// let error = Endpoint::builder()
    ///     .attach_timeout(Duration::from_millis(100))
    ///     .attach(&path)
    ///     .unwrap_err();
    /// assert_eq!(std::io::Error::from(error).kind(), ErrorKind::TimedOut);
    /// # drop(host);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn attach_timeout(mut self, timeout: Duration) -> EndpointBuilder {
        self.attach_timeout = timeout;
        self
    }

    /// Trusts the device's process, and through it the peers, not to write leased memory and not to
    /// read lent memory; zerosock's own device does neither. Leases and loans then give plain
    /// slices. The token comes from the `unsafe` [`Trust::declare`], which states the promise, also for an endpoint
    /// in a guest.
    pub fn trust_host(mut self, trust: Trust) -> EndpointBuilder {
        self.trust = Some(trust);
        self
    }

    /// The CID to request at the attach socket, not a reserved one. Default: any free one.
    pub fn cid(mut self, cid: Cid) -> EndpointBuilder {
        self.request.cid = Some(cid);
        self
    }

    /// The name to request at the attach socket, by which other processes find this one: at most 64
    /// letters, digits, `.`, `_` or `-`.
    pub fn name(mut self, name: impl Into<String>) -> EndpointBuilder {
        self.name = Some(name.into());
        self
    }

    /// The ports at which peers can reach the endpoint, at most 256; default all that it listens
    /// on. For a service: the ports to claim; default none. Ports and name take effect only with
    /// [`attach`](Self::attach) and [`attach_as_host`](Self::attach_as_host).
    pub fn ports(mut self, ports: impl IntoIterator<Item = Port>) -> EndpointBuilder {
        self.request.ports = ports.into_iter().collect();
        self
    }

    /// Attaches at the attach socket of `zerosock serve`, or of a `Host`, which assigns a CID and a
    /// device; in a guest, at that of the agent, which gives memory for one in whole huge pages of 2 MiB:
    /// [`huge_pages`](Self::huge_pages) and [`queue_pairs`](Self::queue_pairs) have no effect there. CID, device and
    /// name are free again when the endpoint and its sockets are dropped or the process dies.
    ///
    /// Waits for the host to answer, at most [`attach_timeout`](Self::attach_timeout). A `Host` answers only while
    /// it is driven: attach in another thread than the one that is to drive it.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn attach(mut self, path: impl AsRef<Path>) -> Result<Endpoint, OpenError> {
        let begin = Instant::now();
        let memory_len = self.prepare()?;
        let (path, limit) = (path.as_ref(), self.attach_timeout);
        let (device, control) = Client::connect_for_memory(path, &self.request, memory_len, limit)?;
        match device {
            AttachedDevice::VhostUser(socket) => {
                let driver = Driver::attach_over(socket, self.device_config(begin))?;
                self.open(driver, Some(control))
            }
            AttachedDevice::Memory(device) => self.open_on_memory(device, control, begin),
        }
    }

    /// In a privileged program of a guest: makes an endpoint without the process `zerosock guest`, as
    /// [`attach`](Self::attach) does with it. `agent` does the same work in this process.
    ///
    /// Waits until earlier endpoints have left their pages, and for the host, at most
    /// [`attach_timeout`](Self::attach_timeout), and ten seconds longer: a host that is shown a wrong key answers late.
    ///
    /// ```no_run
    /// use zerosock::daemon::GuestKey;
    /// use zerosock::vsock::{Endpoint, GuestAgent, KeeperEntry};
    ///
    /// // First of all: this program is started again as the keeper, which pins pages.
    /// let keeper = KeeperEntry::enter();
    /// let key = GuestKey::new(&std::fs::read("/etc/zerosock/3.key")?)?;
    /// let agent = GuestAgent::start(keeper, key)?;
    /// let endpoint = Endpoint::builder().attach_guest(&agent)?;
    /// # drop(endpoint);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn attach_guest(mut self, agent: &Agent) -> Result<Endpoint, OpenError> {
        let memory_len = self.prepare()?;
        let limit = self.attach_timeout + LATE_REFUSAL;
        let (device, socket) = agent.attach(self.request.clone(), memory_len, limit)?;
        let control = Client::over(socket, "of this process".to_owned(), self.attach_timeout);
        self.open_on_memory(device, control, Instant::now())
    }

    /// Completes the request. Returns the bytes of memory that the driver needs if it is given memory.
    fn prepare(&mut self) -> Result<u64, OpenError> {
        if let Some(name) = &self.name {
            self.request.name = Some(name.parse()?);
        }
        let memory_len = self.config.memory_len();
        Ok(memory_len.map_err(driver::DriverAttachError::Config)?)
    }

    fn open_on_memory(
        self,
        device: GuestDevice,
        mut control: Client,
        begin: Instant,
    ) -> Result<Endpoint, OpenError> {
        let config = self.device_config(begin);
        let left = config.control_timeout;
        let start =
            |start: &Start| -> Result<u64, OpenError> { Ok(control.start_within(start, left)?) };
        let driver = Driver::attach_guest(device, config, start)?;
        self.open(driver, Some(control))
    }

    /// Attaches to a device by its vhost-user socket, as a VMM does for a guest. The device's
    /// configuration sets the CID.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn attach_device(mut self, socket: impl AsRef<Path>) -> Result<Endpoint, OpenError> {
        self.request.ports.clear();
        self.config.socket = socket.as_ref().to_path_buf();
        let driver = Driver::attach(self.device_config(Instant::now()))?;
        self.open(driver, None)
    }

    /// The driver's settings, with what is left of the time to attach that began at `begin`;
    /// [`open`](Self::open) restores the time limit of later requests.
    pub(super) fn device_config(&self, begin: Instant) -> DriverConfig {
        DriverConfig {
            control_timeout: self.attach_timeout.saturating_sub(begin.elapsed()),
            ..self.config.clone()
        }
    }

    pub(super) fn open(
        self,
        mut driver: Driver,
        attach_client: Option<Client>,
    ) -> Result<Endpoint, OpenError> {
        driver.set_trusted(self.trust.is_some());
        driver.set_control_timeout(self.attach_timeout);
        let (cid, huge_pages) = (driver.cid(), driver.huge_pages());
        let queue_pairs = driver.queue_pairs();
        let core = Core::new(Box::new(driver), self.trust, attach_client)?;
        core.set_window(self.config.buf_alloc);
        let core = Arc::new(core);
        if self.background {
            background::start(&core)?;
        }
        Ok(Endpoint {
            core,
            cid,
            ports: Arc::new(Mutex::new(self.request.ports)),
            wait: self.wait,
            connect_timeout: self.config.connect_timeout,
            huge_pages,
            queue_pairs,
        })
    }
}
