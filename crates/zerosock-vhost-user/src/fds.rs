//! Classification of the descriptors that a front-end sends, on arrival and before any other use.
//!
//! A descriptor may lead to a file system served by the front-end itself (FUSE), or be the
//! front-end's own end of the connection.
//!
//! # Invariants
//!
//! - No call here, and no later call on a descriptor that is kept, waits for such a server. So the
//!   kernel's own tables (/proc) are read instead of calling fstat(2).
//! - A descriptor of a kind that no request accepts goes to the reaper at once.

use std::fs;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;

use zerosock_ring::{RetiredRegion, Unmapper};
use zerosock_sys::account::{Account, Permit};
use zerosock_sys::notify::FdKind;
use zerosock_sys::{PeerFd, fd_passing, memfd, reaper};

/// File systems, besides those in memory, whose page faults end without help of a peer. The layers of
/// an overlay may be on others, which its mount does not tell; but only root makes such a mount where
/// this process sees it, and those of other mount namespaces are refused as unknown.
const LOCAL_FILE_SYSTEMS: [&str; 9] = [
    "tmpfs",
    "hugetlbfs",
    "ext4",
    "xfs",
    "btrfs",
    "overlay",
    "f2fs",
    "zfs",
    "bcachefs",
];

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
        let kind = file_system(&fd).unwrap_or_else(|| "unknown".into());
        match LOCAL_FILE_SYSTEMS.contains(&kind.as_str()) {
            true => SentFd::Memory(fd),
            false => refuse(format!(
                "a file of file system {kind}: guest memory has to be a memfd, or in a file of a \
                 tmpfs or local disk"
            )),
        }
    }

    /// The file to map guest memory from; an error for any other kind.
    pub(super) fn memory(self) -> Result<PeerFd, String> {
        match self {
            SentFd::Memory(fd) => Ok(fd),
            other => Err(format!("{other} is no guest memory")),
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

/// The type of the file system that holds the file, if it is mounted in our mount namespace.
fn file_system(fd: impl AsFd) -> Option<String> {
    let info = fs::read_to_string(format!("/proc/self/fdinfo/{}", fd.as_fd().as_raw_fd())).ok()?;
    let mount = info
        .lines()
        .find_map(|line| line.strip_prefix("mnt_id:"))?
        .trim();
    let mounts = fs::read_to_string("/proc/self/mountinfo").ok()?;
    let line = mounts
        .lines()
        .find(|line| line.split(' ').next() == Some(mount))?;
    // proc(5): "... - type source options"; spaces within fields are escaped.
    Some(line.split_once(" - ")?.1.split(' ').next()?.to_owned())
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
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, epoll, eventfd};
    use rustix::fd::OwnedFd;
    use rustix::pipe::{PipeFlags, pipe_with};
    use zerosock_sys::account::Budget;

    fn examine(fd: impl Into<OwnedFd>) -> SentFd {
        SentFd::examine(fd.into().into(), &Budget::unlimited().account())
    }

    #[test]
    fn each_kind_is_recognised() {
        let event = || eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let pipe = || pipe_with(PipeFlags::CLOEXEC).unwrap().1;
        let memory = || memfd::create("x", 4096, false).unwrap();
        let disk = || OwnedFd::from(tempfile::tempfile().unwrap());
        examine(event()).eventfd().unwrap();
        examine(event()).call().unwrap();
        examine(pipe()).call().unwrap();
        examine(memory()).memory().unwrap();
        examine(disk()).memory().unwrap();

        examine(event()).memory().unwrap_err();
        examine(pipe()).eventfd().unwrap_err();
        examine(memory()).call().unwrap_err();
    }

    /// An epoll instance has the same inode as eventfds. A socket can be the front-end's own end.
    #[test]
    fn descriptors_of_unusable_kinds_are_refused() {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
        let socket = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let proc = fs::File::open("/proc/self/status").unwrap();
        let null = fs::File::open("/dev/null").unwrap();
        let reasons =
            [epoll, socket.into(), proc.into(), null.into()].map(|fd| match examine(fd) {
                SentFd::Refused(reason) => reason,
                other => panic!("kept as {other}"),
            });
        assert!(reasons[0].contains("eventpoll"), "{reasons:?}");
        assert!(reasons[2].contains("proc"), "{reasons:?}");
    }

    #[test]
    fn a_kept_descriptor_counts_until_it_is_closed() {
        let limits = zerosock_sys::account::Limits {
            descriptors: 2,
            mapped: 0,
            mapped_each: 0,
        };
        let account = Budget::new(limits, 1).account();
        let fds: Vec<_> = (0..3)
            .map(|_| eventfd(0, EventfdFlags::CLOEXEC).unwrap())
            .map(|fd| SentFd::examine(fd.into(), &account))
            .collect();
        assert!(matches!(fds[2], SentFd::Refused(_)));
        assert_eq!(account.descriptors(), 2);
        drop(fds);
        assert!(reaper::drain(std::time::Duration::from_secs(60)));
        assert_eq!(account.descriptors(), 0);
    }
}
