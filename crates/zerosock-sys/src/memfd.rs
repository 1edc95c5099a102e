//! Anonymous memory files, and whether a mapped file can shrink.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{
    FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, fcntl_get_seals, fstat,
    fstatfs, ftruncate, memfd_create,
};

/// Size of a huge page for [`create_huge`], in bytes.
pub const HUGE_PAGE: u64 = 2 << 20;

/// Creates a memory file of `len` zero bytes, close-on-exec. `name` appears in `/proc`.
///
/// With `seal` the length of the file can never change, so an access to a mapping of it raises no
/// SIGBUS.
///
/// # Errors
/// Errors of memfd_create(2), ftruncate(2) and fcntl(2) F_ADD_SEALS.
pub fn create(name: &str, len: u64, seal: bool) -> io::Result<OwnedFd> {
    let fd = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    ftruncate(&fd, len)?;
    if seal {
        fix_length(&fd)?;
    }
    Ok(fd)
}

/// As [`create`], sealed, with pages of [`HUGE_PAGE`] bytes from the pool of the system. All pages
/// are allocated here, so later accesses cannot fail for want of pages.
///
/// # Errors
/// `InvalidInput` when `len` is no multiple of [`HUGE_PAGE`]; what fallocate(2) says when the pool
/// has not that many, and memfd_create(2) when the kernel knows no such pages.
pub fn create_huge(name: &str, len: u64) -> io::Result<OwnedFd> {
    if !len.is_multiple_of(HUGE_PAGE) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = memfd_create(name, flags | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB)?;
    fallocate(&fd, FallocateFlags::empty(), 0, len)?;
    fix_length(&fd)?;
    Ok(fd)
}

/// Seals the length for good: the seals cannot be removed.
fn fix_length(fd: &OwnedFd) -> io::Result<()> {
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    Ok(fcntl_add_seals(fd, seals)?)
}

/// Whether the file can never become shorter. False for a file that does not support seals, such as
/// one on a disk.
pub fn is_shrink_sealed(fd: impl AsFd) -> bool {
    fcntl_get_seals(fd).is_ok_and(|seals| seals.contains(SealFlags::SHRINK))
}

/// Whether the file is in memory (memfd, tmpfs, hugetlbfs): a page fault waits for no server and no
/// disk. The kernel determines this from the descriptor alone, without a call to the file system.
pub fn is_memory(fd: impl AsFd) -> bool {
    fcntl_get_seals(fd).is_ok()
}

/// Whether the file lies on hugetlbfs, as a memfd of huge pages does. Ask only of a file that [is in memory](is_memory).
pub fn has_huge_pages(fd: impl AsFd) -> bool {
    /// HUGETLBFS_MAGIC of linux/magic.h.
    const HUGETLBFS: u32 = 0x9584_58f6;
    // The type of `f_type` depends on the platform; the magic has 32 bits.
    fstatfs(fd).is_ok_and(|stat| stat.f_type as u32 == HUGETLBFS)
}

/// The length of the file in bytes. Ask only of a file that [is in memory](is_memory).
///
/// # Errors
/// Errors of fstat(2).
pub fn len(fd: impl AsFd) -> io::Result<u64> {
    Ok(u64::try_from(fstat(fd)?.st_size).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::io::Errno;

    #[test]
    fn sealed_file_cannot_shrink() {
        let fd = create("sealed", 8192, true).unwrap();
        assert!(is_shrink_sealed(&fd));
        assert!(is_memory(&fd) && !has_huge_pages(&fd));
        assert_eq!(len(&fd).unwrap(), 8192);
        assert_eq!(ftruncate(&fd, 4096), Err(Errno::PERM));
        assert_eq!(ftruncate(&fd, 16384), Err(Errno::PERM));
        assert_eq!(fcntl_add_seals(&fd, SealFlags::WRITE), Err(Errno::PERM));
    }

    #[test]
    fn huge_file_is_sealed() {
        create_huge("odd", HUGE_PAGE + 4096).unwrap_err();
        match create_huge("huge", HUGE_PAGE) {
            Ok(fd) => {
                assert!(is_shrink_sealed(&fd));
                assert!(is_memory(&fd) && has_huge_pages(&fd));
                assert_eq!(len(&fd).unwrap(), HUGE_PAGE);
                assert_eq!(ftruncate(&fd, 0), Err(Errno::PERM));
            }
            Err(error) => eprintln!("no huge pages here: {error}"),
        }
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
