//! Attaching: a process without a VM becomes an endpoint at run time.
//!
//! A process connects to the attach socket and requests a CID, a name and ports
//! ([`Endpoint::attach`](crate::vsock::Endpoint::attach)). It gets one end of a vhost-user connection, over which it
//! acts as a driver. The socket of the request stays open as its control connection: when that closes, the CID and the
//! name become free. To the workers such a process is a VM like any other, except that its memory has to be sealed
//! against shrinking. docs/attach.md describes the protocol; `Daemon` and `Host` are its servers ([`AttachConfig`]).
//!
//! # Invariants
//!
//! - A process that sends half a message, no message or garbage delays no other process or VM.
//! - A user that is not allowed gets a refusal and nothing else.
//! - When the sockets of a process close, everything that it had becomes free; other endpoints are
//!   not affected.

// - `codec`: the messages, pure functions;
// - `client`: the side of the process;
// - `server`: the other side, on the control thread;
// - `directory`: the attached processes, for other threads;
// - `places`: how users share the places of processes.

#[doc(hidden)]
pub mod client;
#[doc(hidden)]
pub mod codec;
pub(crate) mod directory;
pub(crate) mod places;
pub(crate) mod server;

use std::io;
use std::ops::RangeInclusive;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::net::SocketType;
use zerosock_proto::{Cid, Port};
use zerosock_sys::PeerFd;
use zerosock_sys::account::Account;
use zerosock_sys::socket_file::SocketFileOptions;

use crate::control::socket_file::{self, SocketFile, SocketKind};
use crate::device::HostAccess;

pub use crate::routing::name::{Name, NameError};
pub use client::AttachError;
#[doc(hidden)]
pub use client::{Attached, AttachedDevice, Client, Serving};
#[doc(hidden)]
pub use codec::{AttachRequest, ServiceRequest, Start, Status, Version};
pub use directory::Process;

/// The CIDs for processes that request any: 0x40000000 to 0x7fffffff. VMMs use small numbers or
/// random ones; a CID that a VM of the same daemon has is skipped.
pub const DEFAULT_CIDS: RangeInclusive<u32> = 0x4000_0000..=0x7fff_ffff;

/// How an attached process and programs on the host connect to each other.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub enum AttachHost {
    /// Not at all: the process reaches only endpoints that share a group with it.
    #[default]
    None,
    /// The process's connections to port P of the host go to the Unix socket `path_P`. Programs on
    /// the host cannot connect to the process.
    Hybrid {
        /// The common part of the sockets' paths.
        path: PathBuf,
    },
    /// As for a VM with hybrid sockets: the process's connections to port P of the host go to the
    /// Unix socket `path_P`, and programs that connect to `path` and send `CONNECT P` reach its
    /// port P. The socket at `path` exists as long as the process is attached.
    HybridEach {
        /// The path. It must contain `{cid}`, which stands for the process's CID.
        path: PathBuf,
        /// The socket's permission bits; `None`: 0600, or 0660 with a group.
        mode: Option<u32>,
        /// The socket's group; `None`: the effective group.
        group: Option<u32>,
    },
}

/// Placeholder for the CID in a path.
const CID_IN_PATH: &str = "{cid}";

impl AttachHost {
    /// The host end for the process with this CID, and the file of the socket that was bound for
    /// it.
    fn host_end(
        &self,
        cid: Cid,
        account: &Account,
    ) -> io::Result<(HostAccess, Option<SocketFile>)> {
        let (path, mode, group) = match self {
            AttachHost::None => return Ok((HostAccess::None, None)),
            AttachHost::Hybrid { path } => {
                let end = HostAccess::Hybrid {
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
        let end = HostAccess::Hybrid {
            services: path.into(),
            listener: Some(PeerFd::from(listener).owned_by(account)),
            messages: None,
        };
        Ok((end, Some(file)))
    }
}

/// The configuration of the attach server.
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
    /// The users (SO_PEERCRED) that may attach: exactly these, without an exception for root.
    pub allowed_uids: Vec<u32>,
    /// The CIDs for processes that request any.
    pub cids: RangeInclusive<u32>,
    /// Processes reach, and are reached by, endpoints with a common group.
    pub groups: Vec<String>,
    /// How processes and programs on the host connect to each other.
    pub host: AttachHost,
    /// Limit of attached processes, not counting services. Half of it is guaranteed to the users
    /// that may attach, in equal parts; the other half is for the first that request it.
    pub max_processes: usize,
    /// The users (SO_PEERCRED) that may attach services, which claim ports of CID 2.
    /// Exactly these; none by default. A service is trusted with guests' connections to the host: a
    /// claimed port takes precedence over the host side of every VM.
    pub service_uids: Vec<u32>,
    /// Limit of attached services, shared by their users as `max_processes` is.
    pub max_services: usize,
    /// As [`VmConfig::buf_alloc`](crate::daemon::VmConfig::buf_alloc).
    pub buf_alloc: u32,
    /// As [`VmConfig::queue_size`](crate::daemon::VmConfig::queue_size).
    pub queue_size: u16,
}

impl AttachConfig {
    /// A configuration for processes of our own effective user, in the group "default". `listener`
    /// is a bound and listening Unix socket of type SOCK_SEQPACKET.
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

/// The part of an [`AttachConfig`] that can change while processes are attached. The fields have
/// the same meaning.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct AttachTerms {
    /// See [`AttachConfig::allowed_uids`]. Attached processes stay.
    pub allowed_uids: Vec<u32>,
    /// See [`AttachConfig::groups`]. Applies to attached processes too.
    pub groups: Vec<String>,
    /// See [`AttachConfig::max_processes`]. If more are attached, they stay.
    pub max_processes: usize,
    /// See [`AttachConfig::service_uids`]. Attached services stay and keep their claims, but cannot
    /// claim more if their user is no longer listed.
    pub service_uids: Vec<u32>,
    /// See [`AttachConfig::max_services`]. If more are attached, they stay.
    pub max_services: usize,
}

impl AttachConfig {
    /// The part that can change later.
    pub fn terms(&self) -> AttachTerms {
        AttachTerms {
            allowed_uids: self.allowed_uids.clone(),
            groups: self.groups.clone(),
            max_processes: self.max_processes,
            service_uids: self.service_uids.clone(),
            max_services: self.max_services,
        }
    }

    /// Replaces the part that can change.
    pub fn set_terms(&mut self, terms: AttachTerms) {
        self.allowed_uids = terms.allowed_uids;
        self.groups = terms.groups;
        self.max_processes = terms.max_processes;
        self.service_uids = terms.service_uids;
        self.max_services = terms.max_services;
    }
}

/// Binds an attach socket at `path`, and listens. Only our own user can connect (mode 0600, whatever the
/// umask is): change the mode of the file for other users. A socket file at `path` that no process listens
/// on is replaced. The file stays when the socket is closed.
///
/// # Errors
/// `AddrInUse` if a process listens there, or if the file is not a socket; otherwise those of socket(2),
/// bind(2) and listen(2).
pub fn listen(path: &Path) -> io::Result<OwnedFd> {
    let options = SocketFileOptions {
        kind: SocketType::SEQPACKET,
        mode: None,
        gid: None,
        backlog: BACKLOG,
        refuse_rights: true,
        // The file may go before the process, which a reservation would not notice.
        reserved: false,
        lock_wait: Duration::ZERO,
    };
    let (socket, file) = zerosock_sys::socket_file::bind(path, options)?;
    rustix::io::ioctl_fionbio(&socket, true)?;
    // Dropping it would remove the file.
    std::mem::forget(file);
    Ok(socket)
}

/// The highest port that a service may claim. Above it are the source ports of connections:
/// 0x40000000 to 0x7fffffff for the host itself, then a block for each service.
pub const LAST_CLAIMABLE: Port = Port::new(0x3fff_ffff);
/// Limit of claimed ports of one service.
pub const MAX_CLAIMS: usize = 256;

/// Connections that may wait to be accepted.
const BACKLOG: i32 = 128;

/// The CID at which attached processes reach the host.
const HOST: Cid = Cid::HOST;

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    /// The umask of the tests gives others more.
    #[test]
    fn only_our_own_user_may_connect_to_an_attach_socket() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("attach");
        let socket = listen(&path).unwrap();
        let mode = || std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode() & 0o7777, 0o600);
        let error = listen(&path).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
        drop(socket);
        assert_eq!(mode() & 0o7777, 0o600, "it stays");
        listen(&path).unwrap();
    }
}
