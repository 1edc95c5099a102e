//! What happens once, for all threads that wait for it.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rustix::event::PollFlags;
use rustix::pipe::{PipeFlags, pipe_with};
use zerosock_sys::wait_ready;

/// A pipe that hangs up when it happens.
#[derive(Debug)]
pub(super) struct Event {
    reader: OwnedFd,
    writer: Mutex<Option<OwnedFd>>,
}

impl Event {
    pub(super) fn new() -> io::Result<Event> {
        let (reader, writer) = pipe_with(PipeFlags::CLOEXEC)?;
        let writer = Mutex::new(Some(writer));
        Ok(Event { reader, writer })
    }

    /// It happens now, or has happened.
    pub(super) fn set(&self) {
        let mut writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        *writer = None;
    }

    /// Waits at most so long. Returns whether it has happened.
    pub(super) fn wait(&self, limit: Duration) -> bool {
        let events = wait_ready(&self.reader, PollFlags::IN, Some(limit));
        // What cannot be waited for is no reason to go on.
        events.map_or(true, |events| !events.is_empty())
    }
}

impl AsFd for Event {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.reader.as_fd()
    }
}
