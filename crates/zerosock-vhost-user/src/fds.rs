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

use std::fs;
use std::os::fd::AsFd;
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
    let list = fs::read_to_string("/proc/self/mountinfo").ok()?;
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
    fn only_regular_files_are_memory() {
        use rustix::fs::{CWD, Mode, mknodat};
        let dir = tempfile::tempdir().unwrap();
        let fifo = dir.path().join("fifo");
        mknodat(CWD, &fifo, FileType::Fifo, Mode::RWXU, 0).unwrap();
        let fifo = fs::File::options().read(true).write(true).open(fifo);
        let dir = fs::File::open(dir.path());
        for fd in [fifo, dir] {
            match examine(fd.unwrap()) {
                SentFd::Refused(reason) => assert!(reason.contains("regular"), "{reason}"),
                other => panic!("kept as {other}"),
            }
        }
    }

    /// Those of a daemon in a mount namespace of its own look like this.
    #[test]
    fn file_opened_in_another_mount_namespace_is_memory() {
        use std::io::{BufRead, BufReader};
        use std::process::{Command, Stdio};
        let file = tempfile::NamedTempFile::new().unwrap();
        let found = statx(&file, "", AtFlags::EMPTY_PATH, StatxFlags::TYPE).unwrap();
        let device = format!(" {}:{} ", found.stx_dev_major, found.stx_dev_minor);
        if !fs::read_to_string("/proc/self/mountinfo")
            .unwrap()
            .contains(&device)
        {
            return println!("SKIPPED: files here have another device number than their mount");
        }
        let mut child = Command::new("unshare")
            .args(["-m", "sh", "-c", "echo ready; exec cat"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn();
        let mut line = String::new();
        if let Ok(child) = &mut child {
            let output = child.stdout.take().unwrap();
            BufReader::new(output).read_line(&mut line).unwrap();
        }
        let Some(mut child) = child.ok().filter(|_| line == "ready\n") else {
            return println!("SKIPPED: cannot make a mount namespace");
        };
        let path = format!("/proc/{}/root{}", child.id(), file.path().display());
        let inside = fs::File::options().read(true).write(true).open(path);
        drop(child.stdin.take());
        let result = examine(inside.unwrap()).memory();
        child.wait().unwrap();
        result.unwrap();
    }

    #[test]
    fn a_kept_descriptor_counts_until_it_is_closed() {
        let limits = zerosock_sys::account::Limits {
            descriptors: 2,
            numbers: u64::MAX,
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
