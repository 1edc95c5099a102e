//! Waits for one descriptor.

use std::io;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

/// Waits until one of `events`, an error or a hang-up is pending at `fd`, and returns what is; nothing once
/// `timeout` has passed (`None`: no limit). A signal does not end the wait.
///
/// # Errors
/// Errors of ppoll(2).
pub fn wait_ready(
    fd: impl AsFd,
    events: PollFlags,
    timeout: Option<Duration>,
) -> io::Result<PollFlags> {
    // A time that clock or kernel cannot represent is no limit in practice.
    let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
    let mut polled = [PollFd::new(&fd, events)];
    loop {
        let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
        let left = left.and_then(|left| Timespec::try_from(left).ok());
        match poll(&mut polled, left.as_ref()) {
            Ok(_) => return Ok(polled[0].revents()),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}
