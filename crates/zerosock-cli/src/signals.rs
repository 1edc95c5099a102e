//! SIGTERM and SIGINT as something to wait for, so that an end can be orderly.

use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};
use signal_hook::consts::{SIGINT, SIGTERM};

/// What ended a [`Signals::wait`].
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Wake {
    /// The signal of this name.
    Signal(&'static str),
    /// The other descriptor.
    Other,
    /// Nothing.
    TimeIsUp,
}

/// The two signals that ask a process to end.
///
/// The first one of them is reported by [`Signals::wait`]; a second one ends the process at once,
/// should an orderly end take too long for somebody.
#[derive(Debug)]
pub(crate) struct Signals {
    terminate: UnixStream,
    interrupt: UnixStream,
}

impl Signals {
    /// Catches the signals from here on.
    pub(crate) fn catch() -> io::Result<Signals> {
        let asked_before = Arc::new(AtomicBool::new(false));
        let watch = |signal| {
            let (ours, handlers) = UnixStream::pair()?;
            // In this order: the first signal finds the flag unset, and sets it.
            signal_hook::flag::register_conditional_default(signal, asked_before.clone())?;
            signal_hook::flag::register(signal, asked_before.clone())?;
            signal_hook::low_level::pipe::register(signal, handlers)?;
            io::Result::Ok(ours)
        };
        Ok(Signals {
            terminate: watch(SIGTERM)?,
            interrupt: watch(SIGINT)?,
        })
    }

    /// Waits for a signal, for `other` to become readable, or for the time to be up.
    pub(crate) fn wait(
        &self,
        other: BorrowedFd<'_>,
        timeout: Option<Duration>,
    ) -> io::Result<Wake> {
        let timeout = timeout.map(|limit| {
            Timespec::try_from(limit).unwrap_or(Timespec {
                tv_sec: i64::MAX,
                tv_nsec: 0,
            })
        });
        let mut watched = [
            PollFd::new(&self.terminate, PollFlags::IN),
            PollFd::new(&self.interrupt, PollFlags::IN),
            PollFd::from_borrowed_fd(other, PollFlags::IN),
        ];
        match rustix::event::poll(&mut watched, timeout.as_ref()) {
            // Interrupted by the very signal: the next look finds it in the pipe.
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        let [terminate, interrupt, other] = watched.map(|fd| !fd.revents().is_empty());
        Ok(match (terminate, interrupt, other) {
            (true, _, _) => Wake::Signal("SIGTERM"),
            (_, true, _) => Wake::Signal("SIGINT"),
            (_, _, true) => Wake::Other,
            _ => Wake::TimeIsUp,
        })
    }
}
