//! Listening sockets: TCP, and Unix sockets with a path, whose errors name it; and the limit on
//! sockets.
//!
//! [`zerosock_sys::socket_file`] makes the sockets: it never replaces a path on which a live
//! process listens, removes nothing but sockets, and follows no symbolic link.

use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::time::Duration;

use rustix::fs::{Gid, Mode};
use rustix::net::{self, AddressFamily, SocketFlags, SocketType};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use zerosock_sys::socket_file::{self, SocketFileOptions};

pub(crate) use zerosock_sys::socket_file::SocketFile;

/// Longest path of a socket address: sun_path has 108 bytes, one is for the closing NUL.
pub(crate) const MAX_PATH: usize = 107;

/// Backlog; the kernel lowers it to net.core.somaxconn.
const BACKLOG: i32 = 4096;

/// Longest wait for another process that makes a socket in the same directory.
const LOCK_WAIT: Duration = Duration::from_secs(1);

/// Why a path is not usable for a socket.
#[derive(Debug, Eq, PartialEq, thiserror::Error)]
pub(crate) enum PathError {
    #[error("the path is empty; name a file to be made")]
    Empty,
    #[error(
        "the path has {0} bytes, and a Unix socket address holds 108 with its closing NUL: \
         shorten it to {MAX_PATH}, or give it relative to the working directory"
    )]
    TooLong(usize),
    #[error("the path contains a NUL byte; remove it")]
    Nul,
    #[error(
        "a name that begins with `@` is an abstract socket, which has no owner or mode: give a path \
         (./@ for a file of this name)"
    )]
    Abstract,
}

/// Checks a path without accessing the file system.
pub(crate) fn check_path(path: &Path) -> Result<(), PathError> {
    let bytes = path.as_os_str().as_bytes();
    match bytes.len() {
        0 => Err(PathError::Empty),
        length if length > MAX_PATH => Err(PathError::TooLong(length)),
        _ if bytes.contains(&0) => Err(PathError::Nul),
        _ if bytes.starts_with(b"@") => Err(PathError::Abstract),
        _ => Ok(()),
    }
}

/// Permissions of a socket made here.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Access {
    /// Permission bits; `None`: 0600, or 0660 with a group.
    pub(crate) mode: Option<Mode>,
    /// The group; `None`: chosen by the kernel.
    pub(crate) gid: Option<Gid>,
}

/// Why no socket could be made at a path.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BindError {
    #[error("{0}: {1}")]
    Path(String, PathError),
    #[error("{path}: {source}{}", remedy(source))]
    Make {
        path: String,
        source: socket_file::BindError,
    },
}

/// What to do about a socket that could not be made.
fn remedy(error: &socket_file::BindError) -> &'static str {
    match error {
        socket_file::BindError::InUse => "; stop that one, or choose another path",
        socket_file::BindError::NotASocket => "; it was left alone, choose another path",
        socket_file::BindError::Group(_) => {
            "; run as a member of the group of --socket-group, or as root"
        }
        socket_file::BindError::Mode(_) => "; see --socket-mode",
        _ => "",
    }
}

/// Listens on a path for the host programs of a guest: refuses one in use, replaces a stale one. When the
/// socket appears at the path, its permissions are set and it accepts connections.
///
/// This and the next two are reserved: no guest reaches them by their path.
pub(crate) fn bind(path: &Path, access: Access) -> Result<(UnixListener, SocketFile), BindError> {
    let (socket, file) = bind_socket(path, access, SocketType::STREAM, Peers::PROGRAMS)?;
    Ok((UnixListener::from(socket), file))
}

/// As [`bind`], for vhost-user front-ends, which send descriptors.
pub(crate) fn bind_for_frontends(
    path: &Path,
    access: Access,
) -> Result<(UnixListener, SocketFile), BindError> {
    let (socket, file) = bind_socket(path, access, SocketType::STREAM, Peers::FRONTENDS)?;
    Ok((UnixListener::from(socket), file))
}

/// As [`bind`], a socket of type SOCK_SEQPACKET.
pub(crate) fn bind_packets(
    path: &Path,
    access: Access,
) -> Result<(OwnedFd, SocketFile), BindError> {
    bind_socket(path, access, SocketType::SEQPACKET, Peers::PROGRAMS)
}

/// As [`bind`], a socket of type `kind` for any clients.
pub(crate) fn bind_type(
    path: &Path,
    access: Access,
    kind: SocketType,
) -> Result<(OwnedFd, SocketFile), BindError> {
    bind_socket(path, access, kind, Peers::CLIENTS)
}

/// The file of a socket that a predecessor of this process has made; `None` if it is not there.
/// `reserved` as for [`bind`].
pub(crate) fn adopt(path: &Path, reserved: bool) -> Option<SocketFile> {
    SocketFile::adopt(path, reserved, LOCK_WAIT).ok()
}

/// Listens on a TCP address.
pub(crate) fn bind_tcp(address: SocketAddr) -> io::Result<OwnedFd> {
    let family = match address {
        SocketAddr::V4(_) => AddressFamily::INET,
        SocketAddr::V6(_) => AddressFamily::INET6,
    };
    let flags = SocketFlags::CLOEXEC;
    let socket = net::socket_with(family, SocketType::STREAM, flags, None)?;
    // Connections of an earlier process in TIME_WAIT do not keep the address.
    net::sockopt::set_socket_reuseaddr(&socket, true)?;
    net::bind(&socket, &address)?;
    net::listen(&socket, BACKLOG)?;
    Ok(socket)
}

/// What connects to a socket.
struct Peers {
    refuse_rights: bool,
    reserved: bool,
}

impl Peers {
    const FRONTENDS: Peers = Peers {
        refuse_rights: false,
        reserved: true,
    };
    const PROGRAMS: Peers = Peers {
        refuse_rights: true,
        reserved: true,
    };
    const CLIENTS: Peers = Peers {
        refuse_rights: true,
        reserved: false,
    };
}

fn bind_socket(
    path: &Path,
    access: Access,
    kind: SocketType,
    peers: Peers,
) -> Result<(OwnedFd, SocketFile), BindError> {
    let name = || path.display().to_string();
    check_path(path).map_err(|reason| BindError::Path(name(), reason))?;
    let options = SocketFileOptions {
        kind,
        mode: access.mode,
        gid: access.gid,
        backlog: BACKLOG,
        refuse_rights: peers.refuse_rights,
        reserved: peers.reserved,
        lock_wait: LOCK_WAIT,
    };
    socket_file::bind(path, options).map_err(|source| BindError::Make {
        path: name(),
        source,
    })
}

/// Raises the soft limit of descriptors to the hard one: every connection uses one or two, and the
/// usual limit of 1024 exists for programs that use select(2).
///
/// # Errors
/// Why it stays, for the log.
pub(crate) fn raise_descriptor_limit() -> Result<(), String> {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        maximum: limit.maximum,
    };
    setrlimit(Resource::Nofile, raised).map_err(|errno| {
        let now = limit.current;
        format!("cannot raise the limit of open files (RLIMIT_NOFILE) above {now:?}: {errno}")
    })
}

#[cfg(test)]
#[path = "sockets_tests.rs"]
mod tests;
