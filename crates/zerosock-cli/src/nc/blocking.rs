//! Blocking reads and writes that also work on non-blocking descriptors.

use std::io;
use std::os::fd::BorrowedFd;

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;

/// A blocking read, also when another process has made the descriptor non-blocking.
pub(super) fn read(fd: BorrowedFd<'_>, buffer: &mut [u8]) -> io::Result<usize> {
    loop {
        match rustix::io::read(fd, &mut *buffer) {
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => wait_for(fd, PollFlags::IN)?,
            result => return Ok(result?),
        }
    }
}

/// A blocking write, also when another process has made the descriptor non-blocking.
pub(super) fn write(fd: BorrowedFd<'_>, bytes: &[u8]) -> io::Result<usize> {
    loop {
        match rustix::io::write(fd, bytes) {
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => wait_for(fd, PollFlags::OUT)?,
            result => return Ok(result?),
        }
    }
}

fn wait_for(fd: BorrowedFd<'_>, events: PollFlags) -> io::Result<()> {
    match rustix::event::poll(&mut [PollFd::from_borrowed_fd(fd, events)], None) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}
