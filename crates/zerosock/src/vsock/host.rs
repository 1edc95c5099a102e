//! A program as the host: the device in its own process.
//!
//! What must hold: sockets that were bound are removed at the end; the engine is driven by
//! whoever calls, as for an endpoint.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use zerosock_proto::{Address, Cid, Port};
use zerosock_ring::Trust;

use super::core::Core;
use super::endpoint::{connect, listen, turn};
use super::engine::EndpointStats;
use super::listener::Listener;
use super::socket_file::{SocketFile, is_abandoned};
use super::stream::Stream;
use super::waiting::Wait;
use crate::attach::directory::Directory;
use crate::attach::{self, AttachConfig, Name, Process};
use crate::daemon::{HostSide, StartError, VmConfig};
use crate::engine::host::{HostConfig, HostEngine};

/// A program that is CID 2 to VMs and to processes: what it receives it reads in their memory, and
/// what it sends it writes there.
///
/// It has no thread but one for the control sockets, on which nothing that moves bytes waits:
/// whatever thread calls one of its sockets does the work for all of them, guests' connections to
/// each other included. A program that computes for long without calling lets its guests wait.
///
/// ```no_run
/// use std::io::{Read, Write};
/// use zerosock::vsock::Host;
/// use zerosock::{Cid, Port};
///
/// let host = Host::builder().vm(Cid::guest(3)?, "/run/vm3.sock").start()?;
/// let listener = host.listen(Port::new(1024), 16)?;
/// let (stream, guest) = listener.accept()?;
/// println!("{guest} has connected");
/// while let Some(lease) = stream.recv()? {
///     // Straight from the guest's memory to the file.
///     lease.write_to(std::io::stdout())?;
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Host {
    pub(super) core: Arc<Core>,
    wait: Wait,
    connect_timeout: Duration,
    places: Arc<Directory>,
    _files: Vec<SocketFile>,
}

/// How a [`Host`] is to be.
#[derive(Debug)]
#[must_use]
pub struct HostBuilder {
    paths: Vec<(Cid, PathBuf)>,
    /// Where processes attach, and which users beside ours may.
    attach: Option<PathBuf>,
    uids: Vec<u32>,
    config: HostConfig,
    window: u32,
    queue_size: u16,
    wait: Wait,
    trust: Option<Trust>,
}

impl Host {
    /// A host with the usual settings, and nobody to talk to yet.
    pub fn builder() -> HostBuilder {
        HostBuilder {
            paths: Vec::new(),
            attach: None,
            uids: Vec::new(),
            config: HostConfig::default(),
            window: 256 << 10,
            queue_size: 1024,
            wait: Wait::default(),
            trust: None,
        }
    }

    /// Connects to a guest or process.
    ///
    /// # Errors
    /// `ConnectionRefused` when nobody listens there, `TimedOut` when nobody answers,
    /// `HostUnreachable` when there is no such CID.
    pub fn connect(&self, peer: Address) -> io::Result<Stream> {
        connect(&self.core, peer, self.wait, self.connect_timeout)
    }

    /// Listens on `port` of CID 2. At most `backlog` connections wait to be accepted; further
    /// ones are refused.
    ///
    /// # Errors
    /// `AddrInUse` when somebody listens there already.
    pub fn listen(&self, port: Port, backlog: usize) -> io::Result<Listener> {
        let local = Address::new(Cid::HOST, port);
        listen(&self.core, local, backlog, self.wait)
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
    /// Adds a VM with this CID, whose VMM connects to the vhost-user socket at `path`. The socket's
    /// file is our own user's alone (mode 600).
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

    /// Lets processes attach at the Unix socket `path`: those of our own user, and of users that
    /// [`allow_uid`](Self::allow_uid) names. The socket's file is our own user's alone (mode 600):
    /// to let others in, change that once the host has started.
    pub fn attach(mut self, path: impl Into<PathBuf>) -> HostBuilder {
        self.attach = Some(path.into());
        self
    }

    /// Lets processes of this user attach too; they need access to the socket's file as well.
    pub fn allow_uid(mut self, uid: u32) -> HostBuilder {
        self.uids.push(uid);
        self
    }

    /// Lets processes attach on terms of the caller's, at a socket of the caller's.
    pub fn attach_with(mut self, attach: AttachConfig) -> HostBuilder {
        self.config.attach = Some(attach);
        self
    }

    /// Bytes that a peer may have under way to us in one connection: for VMs added with
    /// [`vm`](Self::vm), and for processes.
    pub fn window(mut self, bytes: u32) -> HostBuilder {
        self.window = bytes;
        self
    }

    /// How its sockets wait, until they are told otherwise.
    pub fn wait(mut self, wait: Wait) -> HostBuilder {
        self.wait = wait;
        self
    }

    /// How long unread and leased bytes stay where the guest wrote them before they are copied
    /// out and the guest gets its buffers back.
    pub fn hold(mut self, hold: Duration) -> HostBuilder {
        self.config.hold = hold;
        self
    }

    /// How long a connect waits for an answer.
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
        for (cid, path) in self.paths {
            let (listener, file) =
                SocketFile::listen(&path).map_err(|source| StartError::Bind { path, source })?;
            files.push(file);
            config.vms.push(VmConfig {
                cid,
                listener,
                host: HostSide::None,
                buf_alloc: self.window,
                queue_size: self.queue_size,
                groups: vec!["default".into()],
            });
        }
        if let Some(path) = self.attach {
            let (listener, file) =
                listen_for_processes(&path).map_err(|source| StartError::Bind { path, source })?;
            files.push(file);
            let mut attach = AttachConfig::new(listener);
            attach.allowed_uids.extend(self.uids);
            attach.buf_alloc = self.window;
            config.attach = Some(attach);
        }
        config.trust_processes = self.trust.is_some();
        let connect_timeout = config.connect_timeout;
        let engine = HostEngine::start(config)?;
        let places = engine.places();
        let core =
            Core::new(Box::new(engine), self.trust, None).map_err(|source| StartError::System {
                what: "duplicate a descriptor",
                source,
            })?;
        Ok(Host {
            core: Arc::new(core),
            wait: self.wait,
            connect_timeout,
            places,
            _files: files,
        })
    }
}

/// Binds an attach socket, in place of one that a dead owner left behind.
fn listen_for_processes(path: &Path) -> io::Result<(OwnedFd, SocketFile)> {
    let listener = match attach::listen(path) {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse && is_abandoned(path) => {
            std::fs::remove_file(path)?;
            attach::listen(path)?
        }
        other => other?,
    };
    Ok((listener, SocketFile::of(path)?.private()?))
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
