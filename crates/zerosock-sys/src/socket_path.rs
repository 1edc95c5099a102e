//! Finding a Unix socket by its path before connecting to it, and connecting within a time limit.
//!
//! # Invariants
//! - A symbolic link of another user is not followed: it could lead to a file system with a server that
//!   does not answer.
//! - [`find`] does not ask the server of the file that it finds.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, StatxFlags, openat, statx};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect as connect_to, socket_with,
};

/// The address of a socket file, valid while this exists.
#[derive(Debug)]
pub struct Found {
    address: SocketAddrUnix,
    /// Keeps the address from naming another file.
    _file: Option<OwnedFd>,
}

impl Found {
    /// The address for connect(2).
    pub fn address(&self) -> &SocketAddrUnix {
        &self.address
    }
}

/// Whether a user may decide where a path leads: root, or our own user.
pub fn is_trusted_user(uid: u32) -> bool {
    uid == 0 || uid == rustix::process::geteuid().as_raw()
}

/// Opens the socket at `path` for connect(2) without opening any other kind of file. A symbolic link of
/// root or of our own user is followed.
///
/// # Errors
/// `ConnectionRefused` if it is no socket, `PermissionDenied` for a symbolic link of another user, and
/// those of openat(2).
pub fn find(path: &Path) -> io::Result<Found> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = openat(CWD, path, flags, Mode::empty())?;
    // Answered without asking the file system's server.
    let at = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let status = statx(&file, "", at, StatxFlags::TYPE | StatxFlags::UID)?;
    match FileType::from_raw_mode(status.stx_mode.into()) {
        FileType::Socket => Ok(Found {
            address: SocketAddrUnix::new(format!("/proc/self/fd/{}", file.as_raw_fd()))?,
            _file: Some(file),
        }),
        FileType::Symlink => {
            if is_trusted_user(status.stx_uid) {
                return Ok(Found {
                    address: SocketAddrUnix::new(path)?,
                    _file: None,
                });
            }
            let text = format!("a symbolic link of user {} is not followed", status.stx_uid);
            Err(io::Error::new(io::ErrorKind::PermissionDenied, text))
        }
        _ => Err(io::ErrorKind::ConnectionRefused.into()),
    }
}

/// Connects a new socket to the server at `path`, which is trusted, within `timeout`.
///
/// # Errors
/// `TimedOut` if the server accepts no connection, and those of socket(2) and connect(2).
pub fn connect(path: &Path, kind: SocketType, timeout: Duration) -> io::Result<OwnedFd> {
    let address = SocketAddrUnix::new(path)?;
    let socket = socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None)?;
    // Bounds connect(2) to a server with a full backlog. Zero would mean no limit to the kernel.
    let timeout = timeout.max(Duration::from_millis(1));
    set_socket_timeout(&socket, Timeout::Send, Some(timeout))?;
    match connect_to(&socket, &address) {
        Ok(()) => Ok(socket),
        Err(Errno::AGAIN) => {
            let text = "the server accepts no connection: its backlog is full";
            Err(io::Error::new(io::ErrorKind::TimedOut, text))
        }
        Err(error) => Err(error.into()),
    }
}
