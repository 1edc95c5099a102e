//! Waits for SIGTERM and SIGINT, which end the process, and for SIGHUP, which reloads the
//! configuration.

use std::io::{self, Read};
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

/// Why [`Signals::wait`] returned.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Wake {
    /// A signal to end, by name.
    Signal(&'static str),
    /// SIGHUP, at least once.
    Hangup,
    /// The other descriptor is readable.
    Other,
    /// The timeout.
    TimeIsUp,
}

/// Catches SIGTERM and SIGINT.
///
/// [`Signals::wait`] reports the first of them; a second one ends the process at once, in case the
/// orderly end takes too long.
#[derive(Debug)]
pub(crate) struct Signals {
    terminate: UnixStream,
    interrupt: UnixStream,
    /// Set when SIGHUP is caught; otherwise it has its default effect.
    hangup: Option<UnixStream>,
}

impl Signals {
    /// Catches the two signals from this call on.
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

    /// Waits for a signal, for `other` to become readable, or for the timeout.
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
            // A signal interrupted poll(2): the next call finds it in the pipe.
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        let mut came = watched.iter().map(|fd| !fd.revents().is_empty());
        let mut came = || came.next().unwrap_or(false);
        let (terminate, interrupt, other, hangup) = (came(), came(), came(), came());
        if hangup && let Some(mut socket) = self.hangup.as_ref() {
            // Several SIGHUPs are one request.
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
