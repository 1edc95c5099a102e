//! Blocking reads and writes that also work on non-blocking descriptors.

use std::io;
use std::os::fd::BorrowedFd;

use rustix::event::PollFlags;
use rustix::io::Errno;
use zerosock_sys::wait_ready;

/// A blocking read, also when another process has made the descriptor non-blocking.
pub(super) fn read(fd: BorrowedFd<'_>, buffer: &mut [u8]) -> io::Result<usize> {
    loop {
        match rustix::io::read(fd, &mut *buffer) {
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => {
                wait_ready(fd, PollFlags::IN, None)?;
            }
            result => return Ok(result?),
        }
    }
}

/// A blocking write, also when another process has made the descriptor non-blocking.
pub(super) fn write(fd: BorrowedFd<'_>, bytes: &[u8]) -> io::Result<usize> {
    loop {
        match rustix::io::write(fd, bytes) {
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => {
                wait_ready(fd, PollFlags::OUT, None)?;
            }
            result => return Ok(result?),
        }
    }
}
