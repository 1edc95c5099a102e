//! SIGTERM and SIGINT as something to wait for, so that an end can be orderly; and SIGHUP, which
//! asks for a new look at the configuration.

use std::io::{self, Read};
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

/// What ended a [`Signals::wait`].
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Wake {
    /// The signal of this name.
    Signal(&'static str),
    /// SIGHUP, once or several times.
    Hangup,
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
    /// Only if it is caught: else it does what it always did.
    hangup: Option<UnixStream>,
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
            hangup: None,
        })
    }

    /// Catches SIGHUP as well.
    pub(crate) fn catch_hangup(&mut self) -> io::Result<()> {
        let (ours, handlers) = UnixStream::pair()?;
        ours.set_nonblocking(true)?;
        signal_hook::low_level::pipe::register(SIGHUP, handlers)?;
        self.hangup = Some(ours);
        Ok(())
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
        let mut watched = vec![
            PollFd::new(&self.terminate, PollFlags::IN),
            PollFd::new(&self.interrupt, PollFlags::IN),
            PollFd::from_borrowed_fd(other, PollFlags::IN),
        ];
        if let Some(hangup) = &self.hangup {
            watched.push(PollFd::new(hangup, PollFlags::IN));
        }
        match rustix::event::poll(&mut watched, timeout.as_ref()) {
            // Interrupted by the very signal: the next look finds it in the pipe.
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        let mut came = watched.iter().map(|fd| !fd.revents().is_empty());
        let mut came = || came.next().unwrap_or(false);
        let (terminate, interrupt, other, hangup) = (came(), came(), came(), came());
        if hangup && let Some(mut socket) = self.hangup.as_ref() {
            // All that have come so far ask for the same.
            while matches!(socket.read(&mut [0; 64]), Ok(1..)) {}
        }
        Ok(match (terminate, interrupt, other, hangup) {
            (true, _, _, _) => Wake::Signal("SIGTERM"),
            (_, true, _, _) => Wake::Signal("SIGINT"),
            (_, _, true, _) => Wake::Other,
            (_, _, _, true) => Wake::Hangup,
            _ => Wake::TimeIsUp,
        })
    }
}
