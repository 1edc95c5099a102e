//! Finding a Unix socket by its path before connecting to it, and connecting within a time limit.
//!
//! A path can lead through links and file systems of other users. A lookup in a file system that a process
//! serves (FUSE) waits for that process, for ever if it likes.
//!
//! # Invariants
//! - [`find_cached`] waits for no file system but local ones, whatever other users have put on the way. It
//!   follows no link.
//! - [`find`] makes no call into a file system that another user serves, and follows a link only if root or
//!   our user owns it, and no other user can write to its directory. It may wait for a file system that
//!   root has mounted: no thread that serves peers calls it.
//! - Neither finds a socket that this process has [reserved](crate::socket_file::SocketFileOptions::reserved).
//! - connect(2) by [`FoundSocket::address`] waits no longer than the function that returned it.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use rustix::fs::{
    AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, Statx, StatxFlags, openat, openat2, statx,
};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect as connect_to, socket_with,
};

use crate::mounts;
pub use crate::mounts::{is_trusted_user, learn as learn_mounts};
use crate::socket_file;

pub(crate) mod walk;

/// The address of a socket file, valid while this exists.
#[derive(Debug)]
pub struct FoundSocket {
    address: SocketAddrUnix,
    /// Keeps the address from naming another file.
    _file: OwnedFd,
}

impl FoundSocket {
    /// `file` is open with O_PATH.
    fn new(file: OwnedFd, status: &Statx) -> io::Result<FoundSocket> {
        match FileType::from_raw_mode(status.stx_mode.into()) {
            FileType::Socket if socket_file::is_reserved(status) => {
                let text =
                    "a socket of this zerosock process, which no guest may reach by its path";
                Err(io::Error::new(io::ErrorKind::PermissionDenied, text))
            }
            FileType::Socket => Ok(FoundSocket {
                address: SocketAddrUnix::new(format!("/proc/self/fd/{}", file.as_raw_fd()))?,
                _file: file,
            }),
            _ => Err(io::ErrorKind::ConnectionRefused.into()),
        }
    }

    /// The address for connect(2).
    pub fn address(&self) -> &SocketAddrUnix {
        &self.address
    }
}

/// Opens the socket at `path` for connect(2), without opening any other kind of file. `None`: the path
/// leads through a link, or through a file system that is not known to be local, or the kernel is older
/// than Linux 5.12; [`find`] tells more, on a thread that may wait.
///
/// # Errors
/// `ConnectionRefused` if it is no socket, and those of openat2(2).
pub fn find_cached(path: &Path) -> io::Result<Option<FoundSocket>> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = match open_cached(path, flags) {
        // Not in the cache, as a file that does not exist: its directory may be, and be local.
        Err(Errno::AGAIN) => match open_in_local_directory(path, flags)? {
            Some(file) => file,
            None => return Ok(None),
        },
        // A link on the way; the kernel is too old, or something keeps programs from this call.
        Err(Errno::LOOP | Errno::NOSYS | Errno::INVAL | Errno::PERM) => return Ok(None),
        other => other?,
    };
    let (status, is_local) = examine(&file)?;
    let is_link = FileType::from_raw_mode(status.stx_mode.into()) == FileType::Symlink;
    match is_local && !is_link {
        true => FoundSocket::new(file, &status).map(Some),
        false => Ok(None),
    }
}

/// Opens what the kernel has in its cache. The cache has entries of file systems that processes serve too.
fn open_cached(path: &Path, flags: OFlags) -> Result<OwnedFd, Errno> {
    let resolve = ResolveFlags::CACHED | ResolveFlags::NO_SYMLINKS;
    openat2(CWD, path, flags, Mode::empty(), resolve)
}

/// Opens the last component of a path in its directory, if the kernel has that in its cache and it is on a
/// local file system.
fn open_in_local_directory(path: &Path, flags: OFlags) -> io::Result<Option<OwnedFd>> {
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return Ok(None);
    };
    let parent = match parent == Path::new("") {
        true => Path::new("."),
        false => parent,
    };
    match open_cached(parent, flags | OFlags::DIRECTORY) {
        Ok(directory) if examine(&directory)?.1 => {
            Ok(Some(openat(&directory, name, flags, Mode::empty())?))
        }
        _ => Ok(None),
    }
}

/// The status of a file in the kernel's cache, and whether it is known to be on a local file system. Asks no server.
fn examine(file: &OwnedFd) -> io::Result<(Statx, bool)> {
    let at = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let wanted = StatxFlags::TYPE | StatxFlags::INO | StatxFlags::MNT_ID;
    let status = statx(file, "", at, wanted)?;
    let has_mount = status.stx_mask & StatxFlags::MNT_ID.bits() != 0;
    let is_local = has_mount && mounts::is_local(status.stx_mnt_id);
    Ok((status, is_local))
}

/// Opens the socket at `path` for connect(2), step by step, without opening any other kind of file.
///
/// # Errors
/// `ConnectionRefused` if it is no socket; `PermissionDenied` where the path leads through a link or file
/// system of another user; those of openat(2). The text names the component.
pub fn find(path: &Path) -> io::Result<FoundSocket> {
    let walk::Entry { file, status, .. } = walk::open(path)?;
    FoundSocket::new(file, &status)
}

/// What tells a directory from all others: its device and inode.
///
/// # Errors
/// As [`find`]; `NotADirectory`.
pub fn directory_identity(path: &Path) -> io::Result<(u32, u32, u64)> {
    let entry = walk::open(path)?;
    match entry.kind() {
        FileType::Directory => Ok(socket_file::device_and_inode(&entry.status)),
        _ => Err(io::ErrorKind::NotADirectory.into()),
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

#[cfg(test)]
mod tests;
