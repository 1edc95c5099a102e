//! A program as the host: the device in its own process.
//!
//! What must hold: sockets that were bound are removed at the end; the engine is driven by
//! whoever calls, as for an endpoint.

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

use super::endpoint::{begin_connect, connect, listen, turn};
use super::hub::Core;
use super::listener::Listener;
use super::seqpacket::{SeqPacket, SeqPacketListener};
use super::stream::Stream;
use super::waiting::Wait;
use crate::control::attach::directory::Directory;
use crate::control::attach::{AttachConfig, Process};
use crate::control::config::{HostSide, StartError, VmConfig};
use crate::control::socket_file::{self, SocketFile, SocketKind};
use crate::host::{HostConfig, HostEngine};
use crate::routing::access::AccessList;
use crate::routing::name::Name;
use crate::table::engine::EndpointStats;
use zerosock_vhost_user::{Fault, FaultCounts};

/// A program that is CID 2 to VMs and to processes: what it receives it reads in their memory, and
/// what it sends it writes there.
///
/// It has no thread but one for the control sockets, on which nothing that moves bytes waits:
/// whatever thread calls one of its sockets does the work for all of them, guests' connections to
/// each other included. A program that computes for long without calling lets its guests wait.
///
/// # Memory that can vanish
/// The bytes lie in files that a VMM or a process has made. Who can make such a file shorter takes
/// the pages away under us, and the next access would end the program with SIGBUS. So memory is
/// taken only if it is sealed against shrinking (F_SEAL_SHRINK, fcntl(2)): QEMU's
/// `memory-backend-memfd` is, and crosvm's memory and that of zerosock's own endpoints; files, such
/// as those of QEMU's `memory-backend-file` and of user-mode Linux, and a plain memfd are not. Who
/// brings them is refused at SET_MEM_TABLE, which is counted
/// ([`FrontendFault::Unsealed`](super::FrontendFault::Unsealed), see [`faults`](Host::faults)) and
/// logged; [`HostBuilder::allow_unsealed_memory`] lets VMs in all the same.
///
/// For those, and for pages that vanish for another reason, [`start`](HostBuilder::start) installs
/// a handler for SIGBUS, **for the whole process**, once: a fault in memory that was mapped from a
/// peer loses that peer's device and nothing else, and any other is passed on to whatever handler
/// was there before. A program that installs one of its own later has to pass on what it does not
/// know, or does without the guard.
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
/// let host = Host::builder().vm(Cid::guest(3)?, vm).attach(&path).start()?;
/// let listener = host.listen(Port::new(1024), 16)?;
/// # let process = thread::spawn(move || {
/// #     let process = Endpoint::attach(&path).unwrap();
/// #     let to = Address::new(Cid::HOST, Port::new(1024));
/// #     process.connect(to).unwrap().write_all(b"from a process").unwrap();
/// # });
/// let (stream, who) = listener.accept()?;
/// println!("{who} has connected");
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
    places: Arc<Directory>,
    faults: FaultCounts,
    _files: Vec<SocketFile>,
}

/// How a [`Host`] is to be.
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// use std::time::Duration;
/// use zerosock::Cid;
/// use zerosock::vsock::{FrontendFault, Host, Wait};
///
/// let host = Host::builder()
///     .vm(Cid::guest(3)?, dir.path().join("vm3.sock"))
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
    socket_mode: u32,
    /// Where processes attach, and which users may beside those who may anyway.
    attach: Option<Door>,
    attach_mode: u32,
    uids: Vec<u32>,
    config: HostConfig,
    window: Option<u32>,
    queue_size: u16,
    wait: Wait,
    trust: Option<Trust>,
}

/// Where processes come in.
#[derive(Debug)]
enum Door {
    At(PathBuf),
    With(Box<AttachConfig>),
}

/// Our own user's alone.
const PRIVATE: u32 = 0o600;
const WINDOW: u32 = 256 << 10;

impl Host {
    /// A host with the usual settings, and nobody to talk to yet.
    pub fn builder() -> HostBuilder {
        HostBuilder {
            paths: Vec::new(),
            socket_mode: PRIVATE,
            attach: None,
            attach_mode: PRIVATE,
            uids: Vec::new(),
            config: HostConfig::default(),
            window: None,
            queue_size: 1024,
            wait: Wait::default(),
            trust: None,
        }
    }

    /// Connects to a guest or process.
    ///
    /// # Errors
    /// With a [`ConnectError`](super::ConnectError) inside: `ConnectionRefused` when nobody listens
    /// there, `TimedOut` when nobody answers in
    /// [`connect_timeout`](HostBuilder::connect_timeout), `HostUnreachable` when there is no such
    /// CID or its guest has no driver yet, `AddrInUse` when no local port is left, `OutOfMemory`
    /// when the guest has as many connections as it may.
    pub fn connect(&self, peer: Address) -> io::Result<Stream> {
        connect(&self.core, peer, self.wait, self.connect_timeout)
    }

    /// Sends the request and waits for nothing; see
    /// [`Endpoint::begin_connect`](super::Endpoint::begin_connect).
    ///
    /// # Errors
    /// When the request cannot be sent, such as `HostUnreachable` when there is no such CID.
    pub fn begin_connect(&self, peer: Address) -> io::Result<Stream> {
        begin_connect(&self.core, peer, self.wait)
    }

    /// Listens on `port` of CID 2, or with [`Port::ANY`] on one that is free, which
    /// [`Listener::local_addr`] tells. As on Linux at most `backlog + 1` connections wait to be
    /// accepted; further ones are refused.
    ///
    /// # Errors
    /// With a [`ListenError`](super::ListenError) inside: `AddrInUse` when somebody listens there
    /// already, or has bound the port.
    pub fn listen(&self, port: Port, backlog: usize) -> io::Result<Listener> {
        self.listen_for(port, backlog, SocketType::Stream)
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

    /// As [`connect`](Self::connect), for messages.
    ///
    /// # Errors
    /// As [`connect`](Self::connect); `Unsupported` when the guest has none.
    pub fn connect_seqpacket(&self, peer: Address) -> io::Result<SeqPacket> {
        connect(&self.core, peer, self.wait, self.connect_timeout)
    }

    /// As [`begin_connect`](Self::begin_connect), for messages.
    ///
    /// # Errors
    /// As [`begin_connect`](Self::begin_connect); `Unsupported` when the guest has none.
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

    /// What a datagram socket needs of it.
    pub(super) fn home(&self) -> (&Arc<Core>, Wait) {
        (&self.core, self.wait)
    }

    /// The CID of the attached process of this name.
    ///
    /// # Errors
    /// `NotFound` when nobody has the name; `InvalidInput` for one that none can have.
    pub fn resolve(&self, name: &str) -> io::Result<Cid> {
        let invalid = |error| io::Error::new(io::ErrorKind::InvalidInput, error);
        let name: Name = name.parse().map_err(invalid)?;
        Ok(self.places.resolve(&name).ok_or(io::ErrorKind::NotFound)?)
    }

    /// Connects to `port` of the attached process called `name`.
    ///
    /// # Errors
    /// Those of [`resolve`](Self::resolve) and [`connect`](Self::connect).
    pub fn connect_name(&self, name: &str, port: Port) -> io::Result<Stream> {
        self.connect(Address::new(self.resolve(name)?, port))
    }

    /// The processes that are attached now.
    pub fn processes(&self) -> Vec<Process> {
        self.places.processes()
    }

    /// How often VMMs and processes have done something wrong on their control sockets since the
    /// beginning. Each time has cost nobody else anything, and is logged with its reason.
    pub fn faults(&self, fault: Fault) -> u64 {
        self.faults.of(fault)
    }

    /// Takes in what has come and acts on what is due, without waiting. Only for programs that do
    /// not call their sockets for long.
    ///
    /// # Errors
    /// `ConnectionAborted` when the engine has failed.
    pub fn turn(&self) -> io::Result<()> {
        turn(&self.core)
    }

    /// What was counted since the beginning.
    pub fn stats(&self) -> EndpointStats {
        self.core.lock().engine().stats()
    }
}

impl HostBuilder {
    /// Adds a VM with this CID, whose VMM connects to the vhost-user socket at `path`. Its queues
    /// may have 1024 entries ([`vm_with`](Self::vm_with) can say otherwise). A socket's file that a
    /// dead owner left at `path` is replaced. Who may connect is the VM, so the file is our own
    /// user's alone unless [`socket_mode`](Self::socket_mode) says otherwise.
    pub fn vm(mut self, cid: Cid, path: impl Into<PathBuf>) -> HostBuilder {
        self.paths.push((cid, path.into()));
        self
    }

    /// Adds a VM with settings of its own. What its guest asks of ports that the program does not
    /// listen on goes to its [`HostSide`].
    pub fn vm_with(mut self, vm: VmConfig) -> HostBuilder {
        self.config.vms.push(vm);
        self
    }

    /// The mode of the VMs' sockets; at first 600, our own user's alone. It is in force before
    /// anybody can connect. For a VMM of another user that is in a group of ours: 660, in a
    /// directory of that group.
    pub fn socket_mode(mut self, mode: u32) -> HostBuilder {
        self.socket_mode = mode & 0o777;
        self
    }

    /// Takes memory of VMs although it can shrink: that of VMMs which do not seal it. See
    /// [`Host`], "Memory that can vanish". That of processes is refused in any case.
    pub fn allow_unsealed_memory(mut self) -> HostBuilder {
        self.config.unsealed_memory = true;
        self
    }

    /// Lets processes attach at the Unix socket `path`: those of our own user, and of users that
    /// [`allow_uid`](Self::allow_uid) names. They may have queues of up to 32768 entries; 256 of
    /// them may be attached at once. A host has one attach socket: the last that it was told of,
    /// here or with [`attach_with`](Self::attach_with).
    pub fn attach(mut self, path: impl Into<PathBuf>) -> HostBuilder {
        self.attach = Some(Door::At(path.into()));
        self
    }

    /// The mode of the socket of [`attach`](Self::attach); at first 600, our own user's alone. It
    /// is in force before anybody can connect.
    pub fn attach_mode(mut self, mode: u32) -> HostBuilder {
        self.attach_mode = mode & 0o777;
        self
    }

    /// Lets processes of this user attach too; they need access to the socket's file as well: see
    /// [`attach_mode`](Self::attach_mode). Others are told
    /// [`NotPermitted`](crate::control::attach::AttachError::NotPermitted).
    pub fn allow_uid(mut self, uid: u32) -> HostBuilder {
        self.uids.push(uid);
        self
    }

    /// Lets processes attach on terms of the caller's, at a socket of the caller's, instead of the
    /// one of [`attach`](Self::attach). [`allow_uid`](Self::allow_uid) adds to its users, and a
    /// [`window`](Self::window) that is set replaces its own.
    pub fn attach_with(mut self, attach: AttachConfig) -> HostBuilder {
        self.attach = Some(Door::With(Box::new(attach)));
        self
    }

    /// Who may reach whom, the program itself included, beyond what groups say. At first groups
    /// decide alone.
    pub fn access(mut self, access: AccessList) -> HostBuilder {
        self.config.access = access;
        self
    }

    /// Bytes that a peer may have under way to us in one connection: for VMs added with
    /// [`vm`](Self::vm), and for processes; at least 1. At first 262144.
    pub fn window(mut self, bytes: u32) -> HostBuilder {
        self.window = Some(bytes);
        self
    }

    /// Most queue pairs that a driver may use which knows of them (docs/queue-pairs.md), 1 to 16. At
    /// first 1. One thread at a time drives them all: more of them serve to try things out here, and
    /// to share work out in [`Daemon`](crate::daemon::Daemon)s.
    pub fn queue_pairs(mut self, most: u16) -> HostBuilder {
        self.config.queue_pairs = most;
        self
    }

    /// How its sockets wait, until they are told otherwise. At first [`Wait::Sleep`].
    pub fn wait(mut self, wait: Wait) -> HostBuilder {
        self.wait = wait;
        self
    }

    /// How long unread and leased bytes stay where the guest wrote them before they are copied
    /// out and the guest gets its buffers back. At first 20 ms; at least 1 ms.
    pub fn hold(mut self, hold: Duration) -> HostBuilder {
        self.config.hold = hold;
        self
    }

    /// Bytes of one VM or process that are kept in copies because the program does not read them,
    /// over all its connections, those of each queue pair by themselves. Above it those with most are
    /// reset. At first 64 MiB.
    pub fn max_copied(mut self, bytes: usize) -> HostBuilder {
        self.config.max_overflow = bytes;
        self
    }

    /// Bytes of memory that one VM or process uses no more and that is kept alive for those who
    /// still read it ([`Reading::is_torn`](super::Reading::is_torn)); at least twice what it uses.
    /// Above it leases from that guest are copies, until some are dropped. At first 1 GiB.
    pub fn old_memory(mut self, bytes: u64) -> HostBuilder {
        self.config.old_memory = bytes;
        self
    }

    /// Bytes of memory that one VM, or all processes of one user together, may have mapped here, at
    /// first 1 TiB, and all of them, at first 64 TiB. A front-end that asks for more is refused.
    pub fn max_memory(mut self, each: u64, total: u64) -> HostBuilder {
        self.config.memory.each = each;
        self.config.memory.total = total;
        self
    }

    /// Connections of one VM or process at once; further requests of it are answered with a reset.
    /// At first 131072; where VMs or processes have sockets of the host, as many as the descriptors
    /// that one of them can have, if that is less.
    pub fn max_connections(mut self, connections: usize) -> HostBuilder {
        self.config.max_connections = Some(connections);
        self
    }

    /// How long a connect waits for an answer: some time. At first 2 s.
    pub fn connect_timeout(mut self, timeout: Duration) -> HostBuilder {
        self.config.connect_timeout = timeout;
        self
    }

    /// Trusts processes that attach, never VMs, to write nothing that we hold on lease and to read
    /// nothing that we hold on loan, as zerosock's own endpoints do not. Leases and loans then
    /// give plain slices. The token is had by the one `unsafe` declaration of [`Trust::declare`],
    /// which says what is promised.
    pub fn trust_processes(mut self, trust: Trust) -> HostBuilder {
        self.trust = Some(trust);
        self
    }

    /// Binds the sockets and starts. When this returns, VMMs may connect; they are answered while
    /// the host is driven.
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
            });
        }
        let attach = match self.attach {
            None => None,
            Some(Door::At(path)) => {
                let listener = bind(path, SocketKind::Packets, self.attach_mode)?;
                let mut attach = AttachConfig::new(listener);
                attach.buf_alloc = WINDOW;
                Some(attach)
            }
            Some(Door::With(attach)) => Some(*attach),
        };
        config.attach = attach.map(|mut attach| {
            attach.allowed_uids.extend(self.uids);
            attach.buf_alloc = self.window.unwrap_or(attach.buf_alloc);
            attach
        });
        config.trust_processes = self.trust.is_some();
        let connect_timeout = config.connect_timeout;
        let engine = HostEngine::start(config)?;
        let (places, faults) = (engine.directory(), engine.faults());
        let core =
            Core::new(Box::new(engine), self.trust, None).map_err(|source| StartError::System {
                what: "duplicate a descriptor",
                source,
            })?;
        core.set_window(self.window.unwrap_or(WINDOW));
        Ok(Host {
            core: Arc::new(core),
            wait: self.wait,
            connect_timeout,
            places,
            faults,
            _files: files,
        })
    }
}

impl AsFd for Host {
    /// Readable when something has happened after a call said that it would block.
    fn as_fd(&self) -> BorrowedFd<'_> {
        (*self.core).as_fd()
    }
}

impl AsRawFd for Host {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

impl fmt::Debug for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Host").finish_non_exhaustive()
    }
}
