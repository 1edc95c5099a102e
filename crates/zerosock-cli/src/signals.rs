//! Waits for SIGTERM and SIGINT, which end the process, for SIGHUP, which reloads the configuration, and
//! for SIGUSR1, which reports.
//!
//! # Invariants
//! - Signals that mean nothing to a daemon and would end it by default ([`IGNORED`], [`REAL_TIME`]) have
//!   no effect.
//! - SIGQUIT, SIGABRT and the signals of faults keep their default effect, an end with a core dump, which `--sandbox on` prevents.

use std::io::{self, Read};
use std::ops::RangeInclusive;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::Signal;
use signal_hook::consts::{
    SIGALRM, SIGHUP, SIGINT, SIGIO, SIGPROF, SIGTERM, SIGUSR1, SIGUSR2, SIGVTALRM,
};

use crate::failure::Failure;

/// Signals that end a process by default and are not for a daemon: a mistyped `kill` must not cost all
/// VMs their connections.
const IGNORED: [i32; 7] = [
    SIGUSR2,
    SIGALRM,
    SIGVTALRM,
    SIGPROF,
    SIGIO,
    Signal::POWER.as_raw(),
    Signal::STKFLT.as_raw(),
];

/// SIGRTMIN to SIGRTMAX, which end a process by default, too.
const REAL_TIME: RangeInclusive<i32> = 34..=64;

/// Why [`Signals::wait`] returned.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Wake {
    /// A signal to end, by name.
    Signal(&'static str),
    /// SIGHUP, at least once.
    Hangup,
    /// SIGUSR1, at least once.
    User,
    /// SIGUSR2, at least once, if it is caught.
    Upgrade,
    /// The other descriptor is readable.
    Other,
    /// The timeout.
    TimeIsUp,
}

/// Catches SIGTERM, SIGINT and SIGUSR1.
///
/// [`Signals::wait`] reports the first SIGTERM or SIGINT; a second one ends the process at once, in case the
/// orderly end takes too long.
#[derive(Debug)]
pub(crate) struct Signals {
    terminate: UnixStream,
    interrupt: UnixStream,
    /// Set when SIGHUP is caught; otherwise it has its default effect.
    hangup: Option<UnixStream>,
    user: UnixStream,
    /// Set when SIGUSR2 is caught; otherwise it has no effect.
    upgrade: Option<UnixStream>,
    /// Set while SIGTERM and SIGINT have their default effect, as after the first of them.
    asked_before: Arc<AtomicBool>,
}

/// The failure of a command that cannot catch signals or wait for them.
pub(crate) fn signals_failed(error: io::Error) -> Failure {
    Failure::runtime(format_args!("cannot catch signals: {error}"))
}

impl Signals {
    /// Catches the three signals from this call on, and ignores those that mean nothing.
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
        for signal in IGNORED {
            // A handler without effect, not SIG_IGN, which programs that are executed would inherit.
            signal_hook::flag::register(signal, Arc::default())?;
        }
        for signal in REAL_TIME {
            // A C library refuses those that it uses itself.
            let _ = signal_hook::flag::register(signal, Arc::default());
        }
        Ok(Signals {
            terminate: watch(SIGTERM)?,
            interrupt: watch(SIGINT)?,
            hangup: None,
            user: catch_repeated(SIGUSR1)?,
            upgrade: None,
            asked_before,
        })
    }

    /// Gives SIGTERM and SIGINT their default effect, or catches them again.
    pub(crate) fn restore(&self, default: bool) {
        self.asked_before.store(default, Ordering::SeqCst);
    }

    /// Catches SIGHUP as well.
    pub(crate) fn catch_hangup(&mut self) -> io::Result<()> {
        self.hangup = Some(catch_repeated(SIGHUP)?);
        Ok(())
    }

    /// Catches SIGUSR2 as well.
    pub(crate) fn catch_upgrade(&mut self) -> io::Result<()> {
        self.upgrade = Some(catch_repeated(SIGUSR2)?);
        Ok(())
    }

    /// Waits for a signal that ends the process, and returns its name, or for `over` to become readable.
    /// Calls `report` at each SIGUSR1.
    pub(crate) fn wait_for_end(
        &self,
        over: BorrowedFd<'_>,
        report: impl Fn(),
    ) -> io::Result<Option<&'static str>> {
        loop {
            match self.wait(over, None)? {
                Wake::Signal(name) => return Ok(Some(name)),
                Wake::Other => return Ok(None),
                Wake::User => report(),
                Wake::Hangup | Wake::Upgrade | Wake::TimeIsUp => {}
            }
        }
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
        let repeated = [
            self.hangup.as_ref(),
            Some(&self.user),
            self.upgrade.as_ref(),
        ];
        for socket in repeated.into_iter().flatten() {
            watched.push(PollFd::new(socket, PollFlags::IN));
        }
        match rustix::event::poll(&mut watched, timeout.as_ref()) {
            // A signal interrupted poll(2): the next call finds it in the pipe.
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        let mut came = watched.iter().map(|fd| !fd.revents().is_empty());
        let mut came = || came.next().unwrap_or(false);
        let (terminate, interrupt, other) = (came(), came(), came());
        let [hangup, user, upgrade] = repeated.map(|socket| {
            let caught = socket.filter(|_| came());
            // Several signals are one request.
            caught.is_some_and(|mut socket| {
                while matches!(socket.read(&mut [0; 64]), Ok(1..)) {}
                true
            })
        });
        Ok(match () {
            _ if terminate => Wake::Signal("SIGTERM"),
            _ if interrupt => Wake::Signal("SIGINT"),
            _ if other => Wake::Other,
            _ if hangup => Wake::Hangup,
            _ if user => Wake::User,
            _ if upgrade => Wake::Upgrade,
            _ => Wake::TimeIsUp,
        })
    }
}

/// Catches a signal that does not end the process.
fn catch_repeated(signal: i32) -> io::Result<UnixStream> {
    let (ours, handlers) = UnixStream::pair()?;
    ours.set_nonblocking(true)?;
    signal_hook::low_level::pipe::register(signal, handlers)?;
    Ok(ours)
}
