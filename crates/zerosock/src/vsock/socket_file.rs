//! A Unix socket's file: bound although a dead owner left one behind, gone when its owner goes.

use std::fs::Permissions;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with,
};

/// The file of a socket that we have bound. Removed at the end, if it is still the same file.
#[derive(Debug)]
pub(crate) struct SocketFile {
    path: PathBuf,
    /// Device and inode.
    file: (u64, u64),
}

impl SocketFile {
    /// Binds a listener at `path`, with this mode, if any, else by the umask. A socket there that
    /// nobody listens on any more is replaced. Nobody connects before the mode is set: until then
    /// it does not listen.
    ///
    /// # Errors
    /// `AddrInUse` when somebody listens there, or when something else than a socket is there.
    pub(crate) fn bind(
        path: &Path,
        kind: SocketKind,
        mode: Option<u32>,
        group: Option<u32>,
    ) -> io::Result<(OwnedFd, SocketFile)> {
        let socket = match bind_to(path, kind) {
            Err(Errno::ADDRINUSE) if is_abandoned(path) => {
                std::fs::remove_file(path)?;
                bind_to(path, kind)?
            }
            other => other?,
        };
        let file = SocketFile::of(path)?;
        if group.is_some() {
            std::os::unix::fs::chown(path, None, group)?;
        }
        if let Some(mode) = mode {
            std::fs::set_permissions(path, Permissions::from_mode(mode))?;
        }
        listen(&socket, BACKLOG)?;
        Ok((socket, file))
    }

    /// The file that was bound at `path` just now.
    fn of(path: &Path) -> io::Result<SocketFile> {
        let meta = std::fs::symlink_metadata(path)?;
        Ok(SocketFile {
            path: path.to_path_buf(),
            file: (meta.dev(), meta.ino()),
        })
    }
}

/// What is said on a socket.
#[derive(Copy, Clone, Debug)]
pub(crate) enum SocketKind {
    /// vhost-user messages, or a connection of the hybrid convention.
    Stream,
    /// Requests to attach (SOCK_SEQPACKET).
    Packets,
}

/// Connections that may wait to be accepted.
const BACKLOG: i32 = 128;

fn bind_to(path: &Path, kind: SocketKind) -> Result<OwnedFd, Errno> {
    let address = SocketAddrUnix::new(path)?;
    let kind = match kind {
        SocketKind::Stream => SocketType::STREAM,
        SocketKind::Packets => SocketType::SEQPACKET,
    };
    let socket = socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None)?;
    bind(&socket, &address)?;
    Ok(socket)
}

/// Whether a socket is there that nobody listens on. The probe is of another type than any socket
/// of ours, so that an owner who lives does not notice it: he is there if the type is wrong.
fn is_abandoned(path: &Path) -> bool {
    // A connect to a file of any other kind is refused too.
    if !std::fs::symlink_metadata(path).is_ok_and(|meta| meta.file_type().is_socket()) {
        return false;
    }
    let probe = || {
        let address = SocketAddrUnix::new(path)?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None)?;
        connect(&socket, &address)
    };
    probe() == Err(Errno::CONNREFUSED)
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let same = std::fs::symlink_metadata(&self.path)
            .is_ok_and(|meta| (meta.dev(), meta.ino()) == self.file);
        if same {
            // One that cannot be removed is found abandoned by the next owner.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    fn bind(path: &Path) -> io::Result<(UnixListener, SocketFile)> {
        let (socket, file) = SocketFile::bind(path, SocketKind::Stream, Some(0o600), None)?;
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
