//! The listening sockets of hosts and processes, made by [`zerosock_sys::socket_file`].

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

use rustix::fs::{Gid, Mode};
use rustix::net::SocketType;
use zerosock_sys::socket_file::{self, Options};

pub(crate) use zerosock_sys::socket_file::SocketFile;

/// Binds a listener at `path`, with this mode, if any, else by the umask. A socket there that
/// no process holds any more is replaced. It never waits.
///
/// # Errors
/// `AddrInUse` when a process listens there, or when something else than a socket is there.
pub(crate) fn bind(
    path: &Path,
    kind: SocketKind,
    mode: Option<u32>,
    group: Option<u32>,
) -> io::Result<(OwnedFd, SocketFile)> {
    let options = Options {
        kind: match kind {
            SocketKind::Frontend | SocketKind::Program => SocketType::STREAM,
            SocketKind::Packets => SocketType::SEQPACKET,
        },
        mode: mode.map(Mode::from_raw_mode),
        gid: group.map(Gid::from_raw),
        backlog: BACKLOG,
        refuse_rights: !matches!(kind, SocketKind::Frontend),
        lock_wait: Duration::ZERO,
    };
    Ok(socket_file::bind(path, options)?)
}

/// What is said on a socket.
#[derive(Copy, Clone, Debug)]
pub(crate) enum SocketKind {
    /// vhost-user messages, with descriptors.
    Frontend,
    /// A connection of the hybrid convention.
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
    fn a_dead_owner_is_replaced_and_a_living_one_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        drop(UnixListener::bind(&path).unwrap());
        assert!(path.exists(), "left behind");
        let (listener, file) = bind(&path).unwrap();
        let error = bind(&path).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "nobody else's");
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
    fn a_file_of_another_kind_or_owner_stays() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, "mine").unwrap();
        assert!(bind(&path).is_err());
        assert!(path.exists());
        let path = dir.path().join("socket");
        let (_listener, file) = bind(&path).unwrap();
        // There before the other goes, lest it be given the same inode.
        let other = dir.path().join("other");
        std::fs::write(&other, "somebody else's").unwrap();
        std::fs::rename(&other, &path).unwrap();
        drop(file);
        assert!(path.exists());
    }
}
