//! Tells all threads of the agent to end.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::PollFlags;
use rustix::pipe::{PipeFlags, pipe_with};
use zerosock_sys::wait_ready;

/// Hangs up when its [`Running`] is dropped.
#[derive(Debug)]
pub(super) struct Stop(OwnedFd);

/// The agent runs as long as this exists.
#[derive(Debug)]
pub(super) struct Running(#[expect(dead_code)] OwnedFd);

impl Stop {
    pub(super) fn new() -> io::Result<(Running, Stop)> {
        let (reader, writer) = pipe_with(PipeFlags::CLOEXEC)?;
        Ok((Running(writer), Stop(reader)))
    }

    /// Waits at most so long. Returns whether the agent stops.
    pub(super) fn wait(&self, limit: Duration) -> bool {
        let events = wait_ready(&self.0, PollFlags::IN, Some(limit));
        // What cannot be waited for is no reason to go on.
        events.map_or(true, |events| !events.is_empty())
    }
}

impl AsFd for Stop {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
