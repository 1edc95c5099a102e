//! The deadline of an attempt to connect, and waiting until then.

use std::io;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

/// The time at which an attempt to connect fails; `None`: never.
#[derive(Clone, Copy, Debug)]
pub(super) struct Deadline(Option<Instant>);

impl Deadline {
    pub(super) fn after(limit: Option<Duration>) -> Deadline {
        Deadline(limit.map(|limit| Instant::now() + limit))
    }

    pub(super) fn left(self) -> Option<Duration> {
        self.0
            .map(|at| at.saturating_duration_since(Instant::now()))
    }

    pub(super) fn is_over(self) -> bool {
        self.left() == Some(Duration::ZERO)
    }
}

fn timespec(left: Option<Duration>) -> Option<Timespec> {
    // The limits of `--timeout` are far below the range of a timespec.
    left.and_then(|left| Timespec::try_from(left).ok())
}

/// Waits until one of `events` or an error is pending, and returns those that are: none at the deadline.
pub(super) fn wait_for(
    fd: impl AsFd,
    events: PollFlags,
    deadline: Deadline,
) -> io::Result<PollFlags> {
    let mut polled = [PollFd::new(&fd, events)];
    loop {
        match poll(&mut polled, timespec(deadline.left()).as_ref()) {
            Ok(_) => return Ok(polled[0].revents()),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}
