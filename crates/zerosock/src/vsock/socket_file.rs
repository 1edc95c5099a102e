//! A Unix socket's file: bound although a dead owner left one behind, gone when its owner goes.

use std::fs::Permissions;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

/// The file of a socket that we have bound. Removed at the end, if it is still the same file.
#[derive(Debug)]
pub(crate) struct SocketFile {
    path: PathBuf,
    /// Device and inode.
    file: (u64, u64),
}

impl SocketFile {
    /// Binds a listener at `path`. A socket there that nobody listens on any more is replaced.
    ///
    /// # Errors
    /// `AddrInUse` when somebody listens there, or when something else than a socket is there.
    pub(crate) fn listen(path: &Path) -> io::Result<(UnixListener, SocketFile)> {
        let listener = match UnixListener::bind(path) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse && is_abandoned(path) => {
                std::fs::remove_file(path)?;
                UnixListener::bind(path)?
            }
            other => other?,
        };
        let file = SocketFile::of(path)?.private()?;
        Ok((listener, file))
    }

    /// Lets no other user in.
    pub(crate) fn private(self) -> io::Result<SocketFile> {
        std::fs::set_permissions(&self.path, Permissions::from_mode(0o600))?;
        Ok(self)
    }

    /// The file that was bound at `path` just now.
    pub(crate) fn of(path: &Path) -> io::Result<SocketFile> {
        let meta = std::fs::symlink_metadata(path)?;
        Ok(SocketFile {
            path: path.to_path_buf(),
            file: (meta.dev(), meta.ino()),
        })
    }
}

/// Whether a socket is there that nobody listens on. The probe is of another type than any socket
/// of ours, so that an owner who lives does not notice it: he is there if the type is wrong.
pub(crate) fn is_abandoned(path: &Path) -> bool {
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
    use super::*;

    #[test]
    fn a_dead_owner_is_replaced_and_a_living_one_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        drop(UnixListener::bind(&path).unwrap());
        assert!(path.exists(), "left behind");
        let (listener, file) = SocketFile::listen(&path).unwrap();
        let error = SocketFile::listen(&path).unwrap_err();
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
        assert!(SocketFile::listen(&path).is_err());
        assert!(path.exists());
        let path = dir.path().join("socket");
        let (_listener, file) = SocketFile::listen(&path).unwrap();
        // There before the other goes, lest it be given the same inode.
        let other = dir.path().join("other");
        std::fs::write(&other, "somebody else's").unwrap();
        std::fs::rename(&other, &path).unwrap();
        drop(file);
        assert!(path.exists());
    }
}
