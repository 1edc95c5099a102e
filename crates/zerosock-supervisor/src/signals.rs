//! Catches the signals of a daemon and wakes the loop.

use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::process::Signal;
use signal_hook::{consts, flag, low_level};

/// Signals that the loop gets: USR2 begins an upgrade, the others are passed on to the worker process.
const CAUGHT: [Signal; 5] = [
    Signal::TERM,
    Signal::INT,
    Signal::HUP,
    Signal::USR1,
    Signal::USR2,
];
/// Signals that would end a process by default and are not for a daemon, beside the real-time ones.
const IGNORED: [i32; 6] = [
    consts::SIGALRM,
    consts::SIGVTALRM,
    consts::SIGPROF,
    consts::SIGIO,
    Signal::POWER.as_raw(),
    Signal::STKFLT.as_raw(),
];

#[derive(Debug)]
pub(crate) struct Signals {
    /// Readable after a signal.
    wake: UnixStream,
    caught: [(Signal, Arc<AtomicBool>); CAUGHT.len()],
}

impl Signals {
    /// Catches signals from this call on.
    pub(crate) fn catch() -> io::Result<Signals> {
        let (wake, handlers) = UnixStream::pair()?;
        wake.set_nonblocking(true)?;
        let caught = CAUGHT.map(|signal| (signal, Arc::default()));
        for (signal, caught) in &caught {
            // In this order: the loop that wakes finds the flag set.
            flag::register(signal.as_raw(), Arc::clone(caught))?;
            low_level::pipe::register(signal.as_raw(), handlers.try_clone()?)?;
        }
        for signal in IGNORED.into_iter().chain(34..=64) {
            // A handler without effect, not SIG_IGN, which the worker process would inherit. A C library
            // refuses the real-time signals that it uses itself.
            let _ = flag::register(signal, Arc::default());
        }
        Ok(Signals { wake, caught })
    }

    /// The signals that came since the last call, several of a kind as one.
    pub(crate) fn take(&mut self) -> Vec<Signal> {
        while matches!(self.wake.read(&mut [0; 64]), Ok(1..)) {}
        let came = self
            .caught
            .iter()
            .filter(|(_, caught)| caught.swap(false, Ordering::SeqCst));
        came.map(|(signal, _)| *signal).collect()
    }
}

impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}
