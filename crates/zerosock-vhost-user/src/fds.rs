//! Classification of the descriptors that a front-end sends, on arrival and before any other use.
//!
//! A descriptor may lead to a file system served by the front-end itself (FUSE), or be the
//! front-end's own end of the connection.
//!
//! # Invariants
//!
//! - No call here, and no later call on a descriptor that is kept, waits for such a server. So the
//!   kernel's own tables (/proc) are read instead of calling fstat(2), and statx(2) is asked for
//!   what the kernel knows already.
//! - Only regular files are kept as memory: a FIFO or device node has no file system behind it, but
//!   a driver.
//! - A descriptor of a kind that no request accepts goes to the reaper at once.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use rustix::fs::{AtFlags, FileType, StatxFlags, statx};
use zerosock_ring::{RetiredRegion, Unmapper};
use zerosock_sys::account::{Account, Permit};
use zerosock_sys::notify::FdKind;
use zerosock_sys::{PeerFd, fd_passing, memfd, mounts, reaper};

/// A descriptor that came with a message.
#[derive(Debug)]
pub enum SentFd {
    /// For notifications in either direction.
    Eventfd(PeerFd),
    /// An end of a pipe.
    Pipe(PeerFd),
    /// A Unix socket that can only be written to: user-mode Linux uses these as pipes.
    Socket(PeerFd),
    /// A file to map guest memory from: in memory or on a local disk.
    Memory(PeerFd),
    /// Closed already, and why.
    Refused(String),
}

impl SentFd {
    /// Classifies a descriptor and counts it against the front-end's account.
    pub fn examine(fd: PeerFd, account: &Account) -> SentFd {
        // A refused descriptor counts too, until the reaper has closed it.
        let fd = match account.take_descriptors(1) {
            Ok(permit) => fd.with_permit(permit),
            Err(exceeded) => {
                drop(fd.owned_by(account));
                return SentFd::Refused(exceeded.to_string());
            }
        };
        let refuse = |reason: String| {
            account.count_refused();
            SentFd::Refused(reason)
        };
        if memfd::is_memory(&fd) {
            return SentFd::Memory(fd);
        }
        let target = match FdKind::of(&fd) {
            Ok(FdKind::Eventfd) => return SentFd::Eventfd(fd),
            Ok(FdKind::Pipe) => return SentFd::Pipe(fd),
            Ok(FdKind::Socket) if fd_passing::make_send_only(&fd) => return SentFd::Socket(fd),
            Ok(FdKind::Socket) => {
                return refuse("a socket that can hold objects of its sender".into());
            }
            Ok(FdKind::Other(target)) => target,
            Err(error) => {
                return refuse(format!("cannot examine the descriptor: {error}"));
            }
        };
        // Descriptors that are not files have no path.
        if !target.starts_with('/') {
            return refuse(format!("{target} is of a kind that no request accepts"));
        }
        let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
        let found = match statx(&fd, "", flags, StatxFlags::TYPE) {
            Ok(found) => found,
            Err(error) => return refuse(format!("cannot examine the file: {error}")),
        };
        if FileType::from_raw_mode(found.stx_mode.into()) != FileType::RegularFile {
            return refuse(format!("{target} is not a regular file"));
        }
        let device = [found.stx_dev_major, found.stx_dev_minor];
        let kind = file_system(&fd, device).unwrap_or_else(|| "unknown".into());
        match mounts::is_local_type(&kind) {
            true => SentFd::Memory(fd),
            false => refuse(format!(
                "a file of file system {kind}: guest memory has to be a memfd, or in a file of a \
                 tmpfs or local disk"
            )),
        }
    }

    /// The descriptor, if it is open.
    pub(super) fn as_fd(&self) -> Option<BorrowedFd<'_>> {
        match self {
            SentFd::Eventfd(fd) | SentFd::Pipe(fd) | SentFd::Socket(fd) | SentFd::Memory(fd) => {
                Some(fd.as_fd())
            }
            SentFd::Refused(_) => None,
        }
    }

    /// The file to map guest memory from; an error for any other kind.
    pub(super) fn memory(self) -> Result<PeerFd, String> {
        match self {
            SentFd::Memory(fd) => Ok(fd),
            other => Err(format!("{other} is not guest memory")),
        }
    }

    /// The eventfd; an error for any other kind.
    pub(super) fn eventfd(self) -> Result<PeerFd, String> {
        match self {
            SentFd::Eventfd(fd) => Ok(fd),
            other => Err(format!("{other} is not an eventfd")),
        }
    }

    /// A descriptor to notify the driver by; an error for a kind that cannot be one.
    pub(super) fn call(self) -> Result<PeerFd, String> {
        match self {
            SentFd::Eventfd(fd) | SentFd::Pipe(fd) | SentFd::Socket(fd) => Ok(fd),
            other => Err(format!(
                "{other} is neither an eventfd nor a pipe nor an empty Unix socket"
            )),
        }
    }
}

impl std::fmt::Display for SentFd {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            SentFd::Eventfd(_) => f.write_str("an eventfd"),
            SentFd::Pipe(_) => f.write_str("a pipe"),
            SentFd::Socket(_) => f.write_str("a socket"),
            SentFd::Memory(_) => f.write_str("a file"),
            SentFd::Refused(reason) => write!(f, "a descriptor that was refused ({reason})"),
        }
    }
}

/// The type of the file system that holds the file, if it is mounted in our mount namespace. Then
/// the mount is found by its number if the file was opened there, otherwise by the device: each
/// file system has its own. The files of btrfs, and of an overlay of several file systems, have
/// other device numbers than the mount, and are found by its number only.
fn file_system(fd: impl AsFd, [major, minor]: [u32; 2]) -> Option<String> {
    let number = mounts::number(fd).ok()??;
    let list = mounts::list_of_others().ok()?;
    let device = format!("{major}:{minor}");
    let mount = mounts::parse(&list).find(|it| it.id == number || it.device == device)?;
    Some(mount.kind.to_owned())
}

/// The account's share for one memory table. The reaper unmaps the table; the share is held until
/// then.
#[derive(Debug)]
pub(super) struct MappedShare {
    account: Account,
    permit: Arc<Permit>,
}

impl MappedShare {
    /// Reserves `bytes` of mapped memory.
    pub(super) fn take(account: &Account, bytes: u64) -> Result<Arc<MappedShare>, String> {
        let permit = account.take_mapped(bytes).map_err(|e| e.to_string())?;
        Ok(Arc::new(MappedShare {
            account: account.clone(),
            permit: Arc::new(permit),
        }))
    }
}

impl Unmapper for MappedShare {
    fn unmap(&self, region: RetiredRegion) {
        let permit = Arc::clone(&self.permit);
        let unmap = move || {
            drop(region);
            drop(permit);
        };
        reaper::run(unmap, Some(&self.account));
    }
}

#[cfg(test)]
#[path = "fds_tests.rs"]
mod tests;
