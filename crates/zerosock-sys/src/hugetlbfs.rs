//! Files of huge pages on a mount of hugetlbfs: memory that stays at its physical addresses, and that outlives the
//! processes that use it as long as the file has a name.
//!
//! # Invariants
//! - A file has all of its pages when it is created, so that later accesses do not fail for want of them.
//! - Nothing here reads or writes a page: another process may have made the file shorter.

use std::ffi::c_void;
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FallocateFlags, fallocate, statfs};
use rustix::io::Errno;
use rustix::mm::{Advice, madvise};
use rustix::mount::{MountFlags, mount};
use zerosock_ring::{Memory, Piece};

use crate::memfd;
pub use crate::memfd::HUGE_PAGE;

/// The type of the file system as statfs(2) gives it.
const MAGIC: u32 = 0x958458f6;
/// The inode of the initial PID namespace: PROC_PID_INIT_INO of Linux, the same on each system.
const INITIAL_PID_NAMESPACE: u64 = 0xEFFF_FFFC;

/// Why there are no huge pages to be had.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HugePageError {
    /// The pool of the system has too few.
    #[error(
        "{wanted} huge pages of 2 MiB are needed, and {free} of {all} are free: \
         run `echo {} > /proc/sys/vm/nr_hugepages`", all + wanted.saturating_sub(*free)
    )]
    TooFew {
        /// Pages of the file.
        wanted: u64,
        /// Free pages of the pool.
        free: u64,
        /// All pages of the pool.
        all: u64,
    },
    /// A length that is no multiple of [`HUGE_PAGE`], or 0.
    #[error("{0} bytes are not a number of huge pages of 2 MiB")]
    Length(u64),
    /// The mount has pages of another size.
    #[error("{0} is a mount of hugetlbfs with other pages than those of 2 MiB")]
    OtherPages(PathBuf),
    /// The mounts of this process are not those of the system, or are those of a container: their end would take the
    /// files with it.
    #[error(
        "this process has mounts or processes of its own, and {0} would go with them: run it outside of containers, in \
         the mount namespace of process 1 (for systemd, without PrivateMounts= and what implies it)"
    )]
    PrivateMounts(PathBuf),
    /// The mount cannot be made: ENODEV where the kernel has no huge pages, EPERM without CAP_SYS_ADMIN.
    #[error("cannot mount hugetlbfs at {0}: {1}")]
    Mount(PathBuf, io::Error),
    /// Another system call failed.
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl From<Errno> for HugePageError {
    fn from(errno: Errno) -> HugePageError {
        HugePageError::Io(errno.into())
    }
}

/// A mount of hugetlbfs for files of this user only.
#[derive(Debug)]
pub struct HugeDir(PathBuf);

impl HugeDir {
    /// Opens the mount at `path`. Makes directory and mount if `path` is none yet.
    ///
    /// # Errors
    /// See [`HugePageError`].
    pub fn open(path: &Path) -> Result<HugeDir, HugePageError> {
        let dir = path.to_owned();
        // In a container, even a privileged one, process 1 is that of the container.
        let initial = fs::metadata("/proc/self/ns/pid")?.ino() == INITIAL_PID_NAMESPACE;
        if !initial || fs::read_link("/proc/self/ns/mnt")? != fs::read_link("/proc/1/ns/mnt")? {
            return Err(HugePageError::PrivateMounts(dir));
        }
        DirBuilder::new().recursive(true).mode(0o700).create(path)?;
        let found = statfs(path)?;
        if found.f_type as u32 == MAGIC {
            return match found.f_bsize as u64 {
                HUGE_PAGE => Ok(HugeDir(dir)),
                _ => Err(HugePageError::OtherPages(dir)),
            };
        }
        let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
        let options = c"pagesize=2M,mode=0700";
        match mount("zerosock", path, "hugetlbfs", flags, options) {
            Ok(()) => Ok(HugeDir(dir)),
            Err(errno) => Err(HugePageError::Mount(dir, errno.into())),
        }
    }

    /// Creates a file of `len` bytes, which are zero and have their pages.
    ///
    /// # Errors
    /// See [`HugePageError`]; there is no file then.
    pub fn create(&self, name: &str, len: u64) -> Result<OwnedFd, HugePageError> {
        if len == 0 || !len.is_multiple_of(HUGE_PAGE) {
            return Err(HugePageError::Length(len));
        }
        let mut options = File::options();
        options.read(true).write(true).create_new(true).mode(0o600);
        let file = options.open(self.0.join(name))?;
        let Err(errno) = fallocate(&file, FallocateFlags::empty(), 0, len) else {
            return Ok(file.into());
        };
        self.remove(name)?;
        // It has the pages that there were: they are to be counted as free.
        drop(file);
        match errno {
            Errno::NOSPC | Errno::NOMEM => Err(too_few(len / HUGE_PAGE)),
            _ => Err(errno.into()),
        }
    }

    /// Removes a file. Its pages are free when it is not mapped, not open and not pinned.
    ///
    /// # Errors
    /// Errors of unlink(2).
    pub fn remove(&self, name: &str) -> io::Result<()> {
        fs::remove_file(self.0.join(name))
    }

    /// The names of the files.
    ///
    /// # Errors
    /// Errors of reading the directory.
    pub fn names(&self) -> io::Result<Vec<String>> {
        let names = fs::read_dir(&self.0)?.map(|entry| Ok(entry?.file_name()));
        let names = names.map(|name| name.map(|name| name.to_string_lossy().into_owned()));
        names.collect()
    }
}

/// The error for a pool that has too few pages.
fn too_few(wanted: u64) -> HugePageError {
    let count = |name| {
        let path = format!("/sys/kernel/mm/hugepages/hugepages-2048kB/{name}");
        let text = fs::read_to_string(path).unwrap_or_default();
        text.trim().parse::<u64>().unwrap_or(0)
    };
    // Pages that are promised to other mappings are not free.
    let free = count("free_hugepages").saturating_sub(count("resv_hugepages"));
    HugePageError::TooFew {
        wanted,
        free,
        all: count("nr_hugepages"),
    }
}

/// A mapping of a whole file of huge pages, which is never read or written: for calls that need addresses.
#[derive(Debug)]
pub struct HugeMapping {
    memory: Memory,
    /// The first byte.
    start: Vec<Piece>,
    len: usize,
}

impl HugeMapping {
    /// Maps the file, with all of its pages.
    ///
    /// # Errors
    /// [`HugePageError::Length`] if it has no whole huge pages; errors of fstat(2) and mmap(2); EFAULT if the file
    /// becomes shorter meanwhile, and ENOMEM if a page is missing that the pool does not have.
    pub fn new(file: impl AsFd) -> Result<HugeMapping, HugePageError> {
        // A descriptor that this process owns or has received from a trusted one.
        let len = memfd::len(&file)?;
        let bytes = usize::try_from(len).map_err(|_| HugePageError::Length(len))?;
        if len == 0 || !len.is_multiple_of(HUGE_PAGE) {
            return Err(HugePageError::Length(len));
        }
        let memory = Memory::of_file(file, len).map_err(io::Error::other)?;
        let mut start = Vec::new();
        let translated = memory.translate(0, 1, &mut start);
        translated.map_err(io::Error::other)?;
        let mapping = HugeMapping {
            memory,
            start,
            len: bytes,
        };
        // SAFETY: the range is the mapping made above. The call changes no byte, and no signal tells of a page that the
        // file does not have any more.
        unsafe { madvise(mapping.addr(), bytes, Advice::LinuxPopulateWrite)? };
        Ok(mapping)
    }

    /// The first address.
    pub(crate) fn addr(&self) -> *mut c_void {
        let start = self.start.first().and_then(|&it| self.memory.slice(it));
        start.map_or(std::ptr::null_mut(), |it| it.as_ptr().cast())
    }

    /// Bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }
}
