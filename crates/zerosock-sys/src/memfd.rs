//! Anonymous memory files, and whether a file can shrink under us.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{
    MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, ftruncate, memfd_create,
};

/// Makes a memory file of `len` zero bytes, closed on exec. `name` shows up in `/proc`.
///
/// With `seal` the file can no longer shrink, and that seal cannot be lifted: whoever maps it
/// need not fear SIGBUS.
///
/// # Errors
/// What memfd_create(2), ftruncate(2) and fcntl(2) F_ADD_SEALS answer.
pub fn create(name: &str, len: u64, seal: bool) -> io::Result<OwnedFd> {
    let fd = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    ftruncate(&fd, len)?;
    if seal {
        fcntl_add_seals(&fd, SealFlags::SHRINK)?;
    }
    Ok(fd)
}

/// Whether the file can never become shorter. Files without seals (those on a disk), and those on
/// which none can be asked for, can.
pub fn is_shrink_sealed(fd: impl AsFd) -> bool {
    fcntl_get_seals(fd).is_ok_and(|seals| seals.contains(SealFlags::SHRINK))
}

/// Whether the file lives in memory (memfd, tmpfs, hugetlbfs): no server or disk stands behind it
/// whose answer a page fault would have to wait for. The kernel answers this from the descriptor
/// alone, without asking the file system.
pub fn is_memory(fd: impl AsFd) -> bool {
    fcntl_get_seals(fd).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::io::Errno;

    #[test]
    fn sealed_file_cannot_shrink() {
        let fd = create("sealed", 8192, true).unwrap();
        assert!(is_shrink_sealed(&fd));
        assert!(is_memory(&fd));
        assert_eq!(ftruncate(&fd, 4096), Err(Errno::PERM));
        ftruncate(&fd, 16384).unwrap();
    }

    #[test]
    fn unsealed_and_ordinary_files_can_shrink() {
        let fd = create("unsealed", 8192, false).unwrap();
        assert!(!is_shrink_sealed(&fd));
        assert!(is_memory(&fd));
        ftruncate(&fd, 0).unwrap();

        let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        assert!(!is_shrink_sealed(&socket));
        assert!(!is_memory(&socket));
    }
}
