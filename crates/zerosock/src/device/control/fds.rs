//! What kind of descriptor a front-end has sent, before anything is done with it.
//!
//! A descriptor may lead to a file system whose server is the front-end itself (FUSE). What must
//! hold: nothing here, and nothing that is done later with an accepted descriptor, waits for such
//! a server. So fstat(2) is not asked: the kernel answers these questions from its own tables.

use std::fs;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use zerosock_sys::memfd;

/// File systems, besides those in memory, whose page faults end without help of a peer.
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

/// Accepts a descriptor to signal with (eventfd, pipe or socket) and makes it non-blocking. The
/// front-end shares the flag and can take it back.
pub(super) fn check_notifier(fd: BorrowedFd<'_>) -> Result<(), String> {
    let target = fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()))
        .map_err(|error| format!("cannot examine the descriptor: {error}"))?;
    let target = target.as_os_str().to_string_lossy();
    let known = ["anon_inode:[eventfd]", "pipe:[", "socket:["];
    if !known.iter().any(|prefix| target.starts_with(prefix)) {
        return Err(format!(
            "{target} is neither an eventfd nor a pipe nor a socket"
        ));
    }
    let flags = fcntl_getfl(fd).map_err(|error| error.to_string())?;
    if !flags.contains(OFlags::NONBLOCK) {
        fcntl_setfl(fd, flags | OFlags::NONBLOCK).map_err(|error| error.to_string())?;
    }
    Ok(())
}

/// Accepts a file to map guest memory from: one in memory, or on a local disk.
pub(super) fn check_memory_file(fd: BorrowedFd<'_>) -> Result<(), String> {
    if memfd::is_memory(fd) {
        return Ok(());
    }
    let kind = file_system(fd).unwrap_or_else(|| "unknown".into());
    if LOCAL_FILE_SYSTEMS.contains(&kind.as_str()) {
        return Ok(());
    }
    Err(format!(
        "guest memory in a file of file system {kind}: use a memfd, a tmpfs or a local disk"
    ))
}

/// The name of the file system that the file is on, if it is mounted where we can see it.
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

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};
    use rustix::pipe::{PipeFlags, pipe_with};

    #[test]
    fn notifiers_are_eventfds_pipes_and_sockets_and_do_not_block() {
        let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let (_reader, writer) = pipe_with(PipeFlags::CLOEXEC).unwrap();
        let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        for fd in [event.as_fd(), writer.as_fd(), socket.as_fd()] {
            check_notifier(fd).unwrap();
            assert!(fcntl_getfl(fd).unwrap().contains(OFlags::NONBLOCK));
        }
        let memory = memfd::create("x", 4096, false).unwrap();
        let file = tempfile::tempfile().unwrap();
        let null = fs::File::open("/dev/null").unwrap();
        for fd in [memory.as_fd(), file.as_fd(), null.as_fd()] {
            assert!(check_notifier(fd).unwrap_err().contains("neither"));
        }
    }

    #[test]
    fn memory_comes_from_memory_and_not_from_odd_places() {
        let memory = memfd::create("x", 4096, false).unwrap();
        check_memory_file(memory.as_fd()).unwrap();
        let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let proc = fs::File::open("/proc/self/status").unwrap();
        for fd in [event.as_fd(), proc.as_fd()] {
            check_memory_file(fd).unwrap_err();
        }
        let message = check_memory_file(proc.as_fd()).unwrap_err();
        assert!(message.contains("proc"), "{message}");
    }
}
