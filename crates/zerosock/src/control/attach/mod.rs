//! Attaching: a process without a VM becomes an endpoint, while the daemon or the program that
//! embeds the device runs.
//!
//! A process connects to the attach socket and asks for a CID, a name and ports
//! ([`client::Client::connect`]); it gets one end of a vhost-user connection, over which it is a
//! guest like any other ([`Driver::attach_over`](crate::driver::Driver::attach_over)). The socket
//! on which it asked stays open as its lease: when it closes, for whatever reason, the CID and the
//! name are free again. The bytes are described in docs/attach.md.
//!
//! - `codec`: the messages, pure functions;
//! - `client`: the side of the process;
//! - `server`: the other side, on the control thread;
//! - `directory`: who is attached, for other threads.
//!
//! What must hold: a process that says half a message, or nothing, or rubbish, delays nobody; one
//! whose user is not allowed to gets no further than a refusal; everything that a process had is
//! free again when its sockets close, and nothing of the others is touched.

pub mod client;
pub mod codec;
pub(crate) mod directory;
pub(crate) mod server;

use std::io;
use std::ops::RangeInclusive;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, socket_with};
use zerosock_proto::{Cid, Port};
use zerosock_sys::PeerFd;
use zerosock_sys::account::Account;

use crate::control::socket_file::{self, SocketFile, SocketKind};
use crate::device::HostEnd;

pub use crate::fault::Fault;
pub use crate::routing::name::{Name, NameError};
pub use client::{AttachError, Attached, Client, Serving};
pub use codec::{AttachRequest, ServiceRequest, Status, Version};
pub use directory::Process;

/// The CIDs that processes get who want any: 0x40000000 to 0x7fffffff. VMMs are given small
/// numbers by hand, or random ones; one that a VM of the same daemon has is passed over.
pub const DEFAULT_CIDS: RangeInclusive<u32> = 0x4000_0000..=0x7fff_ffff;

/// How an attached process meets the host.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub enum AttachHost {
    /// Not at all: it reaches those who share a group with it.
    #[default]
    None,
    /// Its connects to port P of the host go to the Unix socket `path_P`. Programs of the host
    /// cannot call it.
    Hybrid {
        /// The first part of the sockets' paths.
        path: PathBuf,
    },
    /// By hybrid sockets of its own, as a VM does: its connects to port P of the host go to the
    /// Unix socket `path_P`, and programs of the host that connect to `path` and say `CONNECT P`
    /// come to its port P. The socket at `path` is there as long as the process is attached.
    HybridEach {
        /// The path; `{cid}` in it, which must be there, stands for the process's CID.
        path: PathBuf,
        /// The socket's permission bits; `None`: by the umask.
        mode: Option<u32>,
        /// The socket's group; `None`: our own.
        group: Option<u32>,
    },
}

/// What stands for a CID in a path.
const CID_IN_PATH: &str = "{cid}";

impl AttachHost {
    /// How the process with this CID meets the host; with the file of the socket that was made
    /// for it.
    fn end_of(&self, cid: Cid, account: &Account) -> io::Result<(HostEnd, Option<SocketFile>)> {
        let (path, mode, group) = match self {
            AttachHost::None => return Ok((HostEnd::None, None)),
            AttachHost::Hybrid { path } => {
                let end = HostEnd::Hybrid {
                    services: path.clone().into(),
                    listener: None,
                    messages: None,
                };
                return Ok((end, None));
            }
            AttachHost::HybridEach { path, mode, group } => (path, *mode, *group),
        };
        let text = path.to_str().filter(|text| text.contains(CID_IN_PATH));
        let none = || io::Error::new(io::ErrorKind::InvalidInput, "no {cid} in the path");
        let path = text.ok_or_else(none)?;
        let path = PathBuf::from(path.replace(CID_IN_PATH, &cid.to_string()));
        let (listener, file) = socket_file::bind(&path, SocketKind::Program, mode, group)?;
        rustix::io::ioctl_fionbio(&listener, true)?;
        let end = HostEnd::Hybrid {
            services: path.into(),
            listener: Some(PeerFd::from(listener).owned_by(account)),
            messages: None,
        };
        Ok((end, Some(file)))
    }
}

/// On what terms processes may attach.
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// # let path = dir.path().join("attach.sock");
/// use zerosock::attach::{self, AttachConfig};
/// use zerosock::vsock::Host;
///
/// let mut config = AttachConfig::new(attach::listen(&path)?);
/// config.max_processes = 8;
/// let host = Host::builder().attach_with(config).start()?;
/// assert!(host.processes().is_empty());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct AttachConfig {
    /// See [`AttachConfig::new`].
    pub(crate) listener: PeerFd,
    /// The users (SO_PEERCRED) who may attach: exactly these, root is no exception.
    pub allowed_uids: Vec<u32>,
    /// The CIDs for those who want any.
    pub cids: RangeInclusive<u32>,
    /// Processes reach, and are reached by, those with a common group.
    pub groups: Vec<String>,
    /// How they meet the host.
    pub host: AttachHost,
    /// Processes that may be attached at once, services apart.
    pub max_processes: usize,
    /// The users (SO_PEERCRED) whose processes may be the host: attach as services, which claim
    /// ports of CID 2. Exactly these; at first nobody. Who may is trusted with what guests ask of
    /// the host: a claimed port goes before the host's own side of every VM.
    pub service_uids: Vec<u32>,
    /// Services that may be attached at once.
    pub max_services: usize,
    /// As [`VmConfig::buf_alloc`](crate::daemon::VmConfig::buf_alloc).
    pub buf_alloc: u32,
    /// As [`VmConfig::queue_size`](crate::daemon::VmConfig::queue_size).
    pub queue_size: u16,
}

impl AttachConfig {
    /// For processes of our own effective user, in the group "default". `listener` is the bound and
    /// listening Unix socket of type SOCK_SEQPACKET.
    pub fn new(listener: OwnedFd) -> AttachConfig {
        AttachConfig {
            listener: listener.into(),
            allowed_uids: vec![rustix::process::geteuid().as_raw()],
            cids: DEFAULT_CIDS,
            groups: vec!["default".to_owned()],
            host: AttachHost::None,
            max_processes: 256,
            service_uids: Vec::new(),
            max_services: 64,
            buf_alloc: 1 << 20,
            queue_size: 32768,
        }
    }
}

/// What of an [`AttachConfig`] may change while processes are attached; the fields are those of
/// that.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct AttachTerms {
    /// See [`AttachConfig::allowed_uids`]. Who is attached stays.
    pub allowed_uids: Vec<u32>,
    /// See [`AttachConfig::groups`]: of all processes, those included that are attached.
    pub groups: Vec<String>,
    /// See [`AttachConfig::max_processes`]. If more are attached, they stay.
    pub max_processes: usize,
    /// See [`AttachConfig::service_uids`]. Who is a service stays one, and may claim on.
    pub service_uids: Vec<u32>,
    /// See [`AttachConfig::max_services`]. If more are attached, they stay.
    pub max_services: usize,
}

impl AttachConfig {
    /// What of it may change later.
    pub fn terms(&self) -> AttachTerms {
        AttachTerms {
            allowed_uids: self.allowed_uids.clone(),
            groups: self.groups.clone(),
            max_processes: self.max_processes,
            service_uids: self.service_uids.clone(),
            max_services: self.max_services,
        }
    }

    /// Goes by other terms.
    pub fn set_terms(&mut self, terms: AttachTerms) {
        self.allowed_uids = terms.allowed_uids;
        self.groups = terms.groups;
        self.max_processes = terms.max_processes;
        self.service_uids = terms.service_uids;
        self.max_services = terms.max_services;
    }
}

/// Binds an attach socket at `path`, where nothing may be, and listens. Who may connect is a matter
/// of the file's mode, which is the umask's.
///
/// # Errors
/// What socket(2), bind(2) and listen(2) say.
pub fn listen(path: &Path) -> io::Result<OwnedFd> {
    let address = SocketAddrUnix::new(path)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    bind(&socket, &address)?;
    zerosock_sys::fd_passing::refuse_rights(&socket)?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket)
}

/// Ports that a service may claim: 0 to this. Above are those from which connections come:
/// 0x40000000 to 0x7fffffff the host's own, then a block for each service.
pub const LAST_CLAIMABLE: Port = Port::new(0x3fff_ffff);
/// Ports that one service may have claimed.
pub const MAX_CLAIMS: usize = 256;

/// Processes that may wait to be accepted.
const BACKLOG: i32 = 128;

/// The CID at which attached processes reach the host.
const HOST: Cid = Cid::HOST;
