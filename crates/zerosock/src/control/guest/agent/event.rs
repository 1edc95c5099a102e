//! A condition that is set once, and for which threads wait.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFlags, eventfd};
use zerosock_sys::wait_ready;

/// An eventfd, which is readable when the condition is set.
#[derive(Debug)]
pub(super) struct Event(OwnedFd);

impl Event {
    pub(super) fn new() -> io::Result<Event> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(Event(eventfd(0, flags)?))
    }

    /// Sets the condition. Later calls have no effect.
    pub(super) fn set(&self) {
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Waits at most so long. Returns whether the condition is set.
    pub(super) fn wait(&self, limit: Duration) -> bool {
        let events = wait_ready(&self.0, PollFlags::IN, Some(limit));
        // What cannot be waited for is no reason to go on.
        events.map_or(true, |events| !events.is_empty())
    }
}

impl AsFd for Event {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
