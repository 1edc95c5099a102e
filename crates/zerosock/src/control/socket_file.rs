//! The listening sockets of hosts and processes, made by [`zerosock_sys::socket_file`].

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

use rustix::fs::{Gid, Mode};
use rustix::net::SocketType;
use zerosock_sys::socket_file::{self, SocketFileOptions};

pub(crate) use zerosock_sys::socket_file::SocketFile;

/// Binds a listener at `path`, with this mode; `None`: 0600, or 0660 with a group. Replaces a socket file
/// that no process listens on. Never blocks.
///
/// # Errors
/// `AddrInUse` if a process listens there, or if the file is not a socket.
pub(crate) fn bind(
    path: &Path,
    kind: SocketKind,
    mode: Option<u32>,
    group: Option<u32>,
) -> io::Result<(OwnedFd, SocketFile)> {
    let options = SocketFileOptions {
        kind: match kind {
            SocketKind::Frontend | SocketKind::Program => SocketType::STREAM,
            SocketKind::Packets => SocketType::SEQPACKET,
        },
        mode: mode.map(Mode::from_raw_mode),
        gid: group.map(Gid::from_raw),
        backlog: BACKLOG,
        refuse_rights: !matches!(kind, SocketKind::Frontend),
        reserved: true,
        lock_wait: Duration::ZERO,
    };
    Ok(socket_file::bind(path, options)?)
}

/// The protocol of a listening socket.
#[derive(Copy, Clone, Debug)]
pub(crate) enum SocketKind {
    /// vhost-user messages, with descriptors.
    Frontend,
    /// Connections of the hybrid vsock convention.
    Program,
    /// Requests to attach (SOCK_SEQPACKET).
    Packets,
}

/// Connections that may wait to be accepted.
const BACKLOG: i32 = 128;

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::UnixListener;

    use super::*;

    fn bind(path: &Path) -> io::Result<(UnixListener, SocketFile)> {
        let (socket, file) = super::bind(path, SocketKind::Frontend, Some(0o600), None)?;
        Ok((UnixListener::from(socket), file))
    }

    #[test]
    fn a_socket_file_is_replaced_only_if_no_process_listens() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        drop(UnixListener::bind(&path).unwrap());
        assert!(path.exists(), "left behind");
        let (listener, file) = bind(&path).unwrap();
        let error = bind(&path).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "only the owner may connect");
        listener.set_nonblocking(true).unwrap();
        let error = listener.accept().unwrap_err();
        assert_eq!(
            error.kind(),
            io::ErrorKind::WouldBlock,
            "the probe is not noticed"
        );
        drop(file);
        assert!(!path.exists());
    }

    #[test]
    fn a_file_of_another_kind_or_owner_is_not_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, "mine").unwrap();
        assert!(bind(&path).is_err());
        assert!(path.exists());
        let path = dir.path().join("socket");
        let (_listener, file) = bind(&path).unwrap();
        // Created before the other is removed, so that it gets another inode.
        let other = dir.path().join("other");
        std::fs::write(&other, "another process's").unwrap();
        std::fs::rename(&other, &path).unwrap();
        drop(file);
        assert!(path.exists());
    }
}
