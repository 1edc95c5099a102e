//! The host: an application that has the device in its own process.
//!
//! # Invariants
//! - The socket files that the host has bound are removed when it is dropped.
//! - The calling thread drives the backend, as for an endpoint.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use zerosock_proto::wire::vsock::SocketType;
use zerosock_proto::{Address, Cid, Port};
use zerosock_ring::Trust;

use super::background;
use super::connecting::{begin_connect, connect, listen};
use super::endpoint_calls::endpoint_calls;
use super::hub::Core;
use super::listener::Listener;
use super::seqpacket::{SeqPacket, SeqPacketListener};
use super::socket::Socket;
use super::stream::Stream;
use super::waiting::Wait;
use crate::control::attach::directory::{Directory, RegisteredEndpoint};
use crate::control::attach::{AttachConfig, Process};
use crate::control::config::{HostSide, STOPPED_TIMEOUT, StartError, VmConfig, system};
use crate::control::guest::options::GuestEndpoints;
use crate::control::socket_file::{self, SocketFile, SocketKind};
use crate::host::{HostBackend, HostConfig};
use crate::routing::access::AccessList;
use crate::routing::name::Name;
use crate::table::backend::EndpointStats;
use zerosock_vhost_user::{FaultCounts, FrontendFault};

/// CID 2 for VMs and processes: it reads received bytes in their memory and writes sent bytes
/// there.
///
/// Its only thread serves the control sockets. The thread that calls one of its sockets drives the
/// queues of all of them, connections between guests included. A program that makes no calls for
/// long stalls its guests.
///
/// # Memory that can vanish
/// The bytes lie in files that a VMM or a process has created. Shrinking such a file removes pages
/// from the host's mapping, and the next access would end the program with SIGBUS. So the host maps
/// only memory that is sealed against shrinking (F_SEAL_SHRINK, fcntl(2)). QEMU's
/// `memory-backend-memfd`, crosvm's memory and that of zerosock's own endpoints are sealed; a plain
/// memfd and files, such as those of QEMU's `memory-backend-file` and of user-mode Linux, are not.
/// A front-end with unsealed memory is refused at SET_MEM_TABLE, counted
/// ([`FrontendFault::Unsealed`](super::FrontendFault::Unsealed), see [`faults`](Host::faults)) and
/// logged; [`HostBuilder::allow_unsealed_memory`] admits VMs with such memory.
///
/// For them, and for pages that vanish for another reason, [`start`](HostBuilder::start) installs
/// a SIGBUS handler **for the whole process**, once: a fault in memory mapped from a peer stops
/// that peer's device and nothing else; any other fault goes to the handler installed before. A
/// handler that the program installs later must forward faults that are not its own, or the guard
/// is lost.
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// # let path = dir.path().join("attach.sock");
/// use std::fs::File;
/// use std::io::Write;
/// use std::thread;
/// use zerosock::vsock::{Endpoint, Host};
/// use zerosock::{Address, Cid, Port};
///
/// let vm = dir.path().join("vm3.sock");
/// let host = Host::builder().vm(Cid::new(3), vm).attach(&path).start()?;
/// let listener = host.listen(Port::new(1024), 16)?;
/// # let process = thread::spawn(move || {
/// #     let process = Endpoint::attach(&path).unwrap();
/// #     let to = Address::new(Cid::HOST, Port::new(1024));
/// #     process.connect(to).unwrap().write_all(b"from a process").unwrap();
/// # });
/// let (stream, peer) = listener.accept()?;
/// println!("{peer} has connected");
/// let copy = File::create(dir.path().join("copy"))?;
/// while let Some(lease) = stream.recv()? {
///     // Straight from the memory of the guest, or the process, to the file.
///     lease.write_to(&copy)?;
/// }
/// assert_eq!(std::fs::read(dir.path().join("copy"))?, b"from a process");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// A forked child must neither use nor drop its copy: see [forks](crate::vsock#forks).
pub struct Host {
    pub(super) core: Arc<Core>,
    pub(super) wait: Wait,
    pub(super) connect_timeout: Duration,
    directory: Arc<Directory>,
    faults: FaultCounts,
    _files: Vec<SocketFile>,
}

/// The settings of a [`Host`].
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// use std::time::Duration;
/// use zerosock::Cid;
/// use zerosock::vsock::{FrontendFault, Host, Wait};
///
/// let host = Host::builder()
///     .vm(Cid::new(3), dir.path().join("vm3.sock"))
///     // For a VMM that does not seal its memory.
///     .allow_unsealed_memory()
///     .attach(dir.path().join("attach.sock"))
///     .attach_mode(0o660)
///     .allow_uid(1000)
///     .hold(Duration::from_millis(5))
///     .wait(Wait::ADAPTIVE)
///     .start()?;
/// assert_eq!(host.faults(FrontendFault::Payload), 0);
/// assert!(host.processes().is_empty());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
#[must_use]
pub struct HostBuilder {
    paths: Vec<(Cid, PathBuf)>,
    guest_endpoints: Vec<(Cid, GuestEndpoints)>,
    socket_mode: u32,
    /// Where processes attach.
    attach: Option<AttachSocket>,
    attach_mode: u32,
    /// Users that may attach, beside those of the attach settings.
    uids: Vec<u32>,
    config: HostConfig,
    window: Option<u32>,
    queue_size: u16,
    wait: Wait,
    background: bool,
    stopped_timeout: Option<Duration>,
    trust: Option<Trust>,
}

/// The attach socket: a path to bind, or complete settings with a socket.
#[derive(Debug)]
enum AttachSocket {
    Path(PathBuf),
    Config(Box<AttachConfig>),
}

/// The mode of a socket file that only the host's own user may connect to.
const PRIVATE: u32 = 0o600;
const WINDOW: u32 = 256 << 10;

endpoint_calls!(Host);

impl Host {
    /// The default settings, without VMs or an attach socket.
    pub fn builder() -> HostBuilder {
        HostBuilder {
            paths: Vec::new(),
            guest_endpoints: Vec::new(),
            socket_mode: PRIVATE,
            attach: None,
            attach_mode: PRIVATE,
            uids: Vec::new(),
            config: HostConfig::default(),
            window: None,
            queue_size: 1024,
            wait: Wait::default(),
            background: false,
            stopped_timeout: Some(STOPPED_TIMEOUT),
            trust: None,
        }
    }

    fn listen_for(
        &self,
        port: Port,
        backlog: usize,
        socket_type: SocketType,
    ) -> io::Result<Listener> {
        if port == Port::ANY {
            return self.socket().listen_for(backlog, socket_type);
        }
        let local = Address::new(Cid::HOST, port);
        listen(&self.core, local, backlog, socket_type, self.wait)
    }

    /// A new socket of the host, CID 2.
    pub fn socket(&self) -> Socket {
        Socket::new(
            self.core.clone(),
            Cid::HOST,
            Arc::default(),
            false,
            self.wait,
            self.connect_timeout,
        )
    }

    /// The CID of the attached process or guest endpoint of this name.
    ///
    /// # Errors
    /// `NotFound` when none has the name; `InvalidInput` for an invalid name.
    pub fn resolve(&self, name: &str) -> io::Result<Cid> {
        let invalid = |error| io::Error::new(io::ErrorKind::InvalidInput, error);
        let name: Name = name.parse().map_err(invalid)?;
        Ok(self
            .directory
            .resolve(&name)
            .ok_or(io::ErrorKind::NotFound)?)
    }

    /// The processes that are attached now.
    pub fn processes(&self) -> Vec<Process> {
        self.directory.processes()
    }

    /// The endpoints that guests have registered now.
    pub fn guest_endpoints(&self) -> Vec<RegisteredEndpoint> {
        self.directory.guests.endpoints()
    }

    /// Number of faults of this kind that VMMs and processes have committed on their control
    /// sockets since the start. Each affected only that front-end, and is logged with its reason.
    pub fn faults(&self, fault: FrontendFault) -> u64 {
        self.faults.of(fault)
    }
}

impl HostBuilder {
    /// Adds a VM with this CID. Its VMM connects to the vhost-user socket at `path`. Its queues
    /// may have 1024 entries ([`vm_with`](Self::vm_with) can say otherwise). A socket's file that a
    /// dead owner left at `path` is replaced. Any process that can connect becomes the VM, so only
    /// the host's own user can, unless [`socket_mode`](Self::socket_mode) is set otherwise.
    pub fn vm(mut self, cid: Cid, path: impl Into<PathBuf>) -> HostBuilder {
        self.paths.push((cid, path.into()));
        self
    }

    /// Lets the guest of the VM with this CID, which is added before or later, have endpoints on its pages.
    pub fn guest_endpoints(mut self, vm: Cid, endpoints: GuestEndpoints) -> HostBuilder {
        self.guest_endpoints.push((vm, endpoints));
        self
    }

    /// Starts a thread that drives the host until its last socket is dropped: see
    /// [`EndpointBuilder::background`](super::EndpointBuilder::background). Processes can attach, and guests
    /// reach each other, while the program does something else.
    pub fn background(mut self) -> HostBuilder {
        self.background = true;
        self
    }

    /// Adds a VM with settings of its own. Connections of its guest to ports that the program does
    /// not listen on go to its [`HostSide`].
    pub fn vm_with(mut self, vm: VmConfig) -> HostBuilder {
        self.config.vms.push(vm);
        self
    }

    /// The mode of the VMs' sockets; default 600, the host's own user. It is set before the socket
    /// accepts connections. For a VMM of another user that shares a group: 660, in a directory of
    /// that group.
    pub fn socket_mode(mut self, mode: u32) -> HostBuilder {
        self.socket_mode = mode & 0o777;
        self
    }

    /// Accepts memory of VMs that is not sealed against shrinking. See [`Host`], "Memory that can
    /// vanish". Unsealed memory of processes is always refused.
    pub fn allow_unsealed_memory(mut self) -> HostBuilder {
        self.config.unsealed_memory = true;
        self
    }

    /// Lets processes attach at the Unix socket `path`: those of the host's own user, and of users
    /// that [`allow_uid`](Self::allow_uid) names. Their queues may have up to 32768 entries; 256
    /// processes may be attached at once. A host has one attach socket: the last one set here or
    /// with [`attach_with`](Self::attach_with).
    pub fn attach(mut self, path: impl Into<PathBuf>) -> HostBuilder {
        self.attach = Some(AttachSocket::Path(path.into()));
        self
    }

    /// The mode of the socket of [`attach`](Self::attach); default 600, the host's own user. It is
    /// set before the socket accepts connections.
    pub fn attach_mode(mut self, mode: u32) -> HostBuilder {
        self.attach_mode = mode & 0o777;
        self
    }

    /// Lets processes of this user attach too; they need access to the socket's file as well: see
    /// [`attach_mode`](Self::attach_mode). Other users get
    /// [`NotPermitted`](crate::control::attach::AttachError::NotPermitted).
    pub fn allow_uid(mut self, uid: u32) -> HostBuilder {
        self.uids.push(uid);
        self
    }

    /// Lets processes attach with the settings and at the socket of `attach`, instead of the one of
    /// [`attach`](Self::attach). [`allow_uid`](Self::allow_uid) adds to its users;
    /// [`window`](Self::window), if set, replaces its window.
    pub fn attach_with(mut self, attach: AttachConfig) -> HostBuilder {
        self.attach = Some(AttachSocket::Config(Box::new(attach)));
        self
    }

    /// Access rules between CIDs, the host included, in addition to groups. Default: groups alone
    /// decide.
    pub fn access(mut self, access: AccessList) -> HostBuilder {
        self.config.access = access;
        self
    }

    /// Receive window of a connection in bytes, for VMs added with [`vm`](Self::vm) and for
    /// processes; at least 1, default 262144.
    pub fn window(mut self, bytes: u32) -> HostBuilder {
        self.window = Some(bytes);
        self
    }

    /// Most queue pairs that a driver may negotiate (docs/queue-pairs.md), 1 to 16, default 1. One
    /// thread at a time drives them all, so more pairs are useful here only for tests; in a
    /// [`Daemon`](crate::daemon::Daemon) they spread load over workers.
    pub fn queue_pairs(mut self, most: u16) -> HostBuilder {
        self.config.queue_pairs = most;
        self
    }

    /// How its sockets wait, unless they are set otherwise. Default: [`Wait::Sleep`].
    pub fn wait(mut self, wait: Wait) -> HostBuilder {
        self.wait = wait;
        self
    }

    /// How long unread and leased bytes stay where the guest wrote them before the host copies them
    /// out and returns the buffers to the guest. Default 20 ms; at least 1 ms.
    pub fn hold(mut self, hold: Duration) -> HostBuilder {
        self.config.hold = hold;
        self
    }

    /// Most unread bytes of one VM or process that the host keeps in copies, over all its
    /// connections, counted for each queue pair. Above it the connections with most copied bytes
    /// are reset. Default 64 MiB.
    pub fn max_copied(mut self, bytes: usize) -> HostBuilder {
        self.config.max_overflow = bytes;
        self
    }

    /// Bytes of former memory of one VM or process that leases may keep mapped
    /// ([`LeaseReader::is_revoked`](super::LeaseReader::is_revoked)); at least twice its current memory. Above it
    /// leases from that guest are copies, until some are dropped. Default 1 GiB.
    pub fn old_memory(mut self, bytes: u64) -> HostBuilder {
        self.config.old_memory = bytes;
        self
    }

    /// Bytes of memory that the host maps of one VM, or of all processes of one user (`each`,
    /// default 1 TiB), and of all together (`total`, default 64 TiB). A front-end that exceeds it
    /// is refused.
    pub fn max_memory(mut self, each: u64, total: u64) -> HostBuilder {
        self.config.memory.each = each;
        self.config.memory.total = total;
        self
    }

    /// Most connections of one VM or process; further requests are answered with a reset. Default
    /// 131072, or the number of descriptors that one VM or process may use for host sockets, if
    /// that is less.
    pub fn max_connections(mut self, connections: usize) -> HostBuilder {
        self.config.max_connections = Some(connections);
        self
    }

    /// How long a connect waits for an answer; not zero, default 1.5 s: guests give up after 2 s.
    pub fn connect_timeout(mut self, timeout: Duration) -> HostBuilder {
        self.config.connect_timeout = timeout;
        self
    }

    /// The longest pause of a VM that connections outlast; `None`: any. Default 5 minutes. A VMM that does not
    /// tell a reset of the guest from a pause leaves connections open until the next driver starts, or so
    /// long.
    pub fn stopped_timeout(mut self, timeout: Option<Duration>) -> HostBuilder {
        self.stopped_timeout = timeout;
        self
    }

    /// Trusts attached processes, never VMs, not to write leased memory and not to read lent
    /// memory; zerosock's own endpoints do neither. Leases and loans then give plain slices. The
    /// token comes from the `unsafe` [`Trust::declare`], which states the promise.
    pub fn trust_processes(mut self, trust: Trust) -> HostBuilder {
        self.trust = Some(trust);
        self
    }

    /// Binds the sockets and starts. When this returns, VMMs and processes may connect; they are
    /// answered while the host is driven.
    ///
    /// # Errors
    /// [`StartError`].
    pub fn start(self) -> Result<Host, StartError> {
        let mut config = self.config;
        let mut files = Vec::new();
        let mut bind =
            |path: PathBuf, kind, mode| match socket_file::bind(&path, kind, Some(mode), None) {
                Ok((listener, file)) => {
                    files.push(file);
                    Ok(listener)
                }
                Err(source) => Err(StartError::Bind { path, source }),
            };
        for (cid, path) in self.paths {
            let listener = bind(path, SocketKind::Frontend, self.socket_mode)?;
            config.vms.push(VmConfig {
                cid,
                listener: UnixListener::from(listener),
                host: HostSide::None,
                buf_alloc: self.window.unwrap_or(WINDOW),
                queue_size: self.queue_size,
                groups: vec!["default".into()],
                require_sealed_memory: false,
                stopped_timeout: self.stopped_timeout,
                guest_endpoints: None,
                succession: None,
            });
        }
        for (cid, endpoints) in self.guest_endpoints {
            let Some(vm) = config.vms.iter_mut().find(|vm| vm.cid == cid) else {
                return Err(StartError::UnknownVm(cid));
            };
            vm.guest_endpoints = Some(endpoints);
        }
        let attach = match self.attach {
            None => None,
            Some(AttachSocket::Path(path)) => {
                let listener = bind(path, SocketKind::Packets, self.attach_mode)?;
                let mut attach = AttachConfig::new(listener);
                attach.buf_alloc = WINDOW;
                Some(attach)
            }
            Some(AttachSocket::Config(attach)) => Some(*attach),
        };
        config.attach = attach.map(|mut attach| {
            attach.allowed_uids.extend(self.uids);
            attach.buf_alloc = self.window.unwrap_or(attach.buf_alloc);
            attach
        });
        config.trust_processes = self.trust.is_some();
        let connect_timeout = config.connect_timeout;
        let backend = HostBackend::start(config)?;
        let (directory, faults) = (backend.directory(), backend.faults());
        let core = Core::new(Box::new(backend), self.trust, None).map_err(|source| {
            StartError::System {
                what: "duplicate a descriptor",
                source,
            }
        })?;
        core.set_window(self.window.unwrap_or(WINDOW));
        let core = Arc::new(core);
        if self.background {
            background::start(&core).map_err(system("start the thread of the host"))?;
        }
        Ok(Host {
            core,
            wait: self.wait,
            connect_timeout,
            directory,
            faults,
            _files: files,
        })
    }
}

impl fmt::Debug for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Host").finish_non_exhaustive()
    }
}
