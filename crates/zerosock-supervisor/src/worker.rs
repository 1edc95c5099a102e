//! One worker process, from its start to its end.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::thread::Builder;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::SendFlags;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::background::Closer;
use crate::message::{Operation, encode};
use crate::socket;
use crate::store::{Store, Value};

/// What only the supervisor uses of the service manager's environment.
const REMOVED: [&str; 6] = [
    "NOTIFY_SOCKET",
    "WATCHDOG_PID",
    "WATCHDOG_USEC",
    "LISTEN_PID",
    "LISTEN_FDS",
    "LISTEN_FDNAMES",
];
/// Most entries sent in one turn of the loop.
const ENTRIES_PER_TURN: usize = 256;

/// A worker process. Dropping it kills the process, if it still runs.
#[derive(Debug)]
pub(crate) struct Worker {
    pub(crate) child: Child,
    /// Readable when the process has ended.
    pub(crate) process: OwnedFd,
    /// `None` after an end of file or a violation.
    pub(crate) socket: Option<OwnedFd>,
    /// Entries that it has not been sent; `None` after `End`.
    pub(crate) unsent: Option<VecDeque<(String, Arc<Value<OwnedFd>>)>>,
    started: Instant,
    /// When its last `Alive` was received.
    pub(crate) last_alive: Option<Instant>,
    /// It was told to end, or has said that it does.
    pub(crate) ending: bool,
    killed: bool,
    /// It has notified READY=1.
    pub(crate) ready: bool,
    /// Signals that came before that.
    held_signals: Vec<Signal>,
}

impl Worker {
    /// Starts a program that gets the entries of a store.
    pub(crate) fn start(mut program: Command, store: &Store<OwnedFd>) -> io::Result<Worker> {
        let (ours, theirs) = socket::pair()?;
        for name in REMOVED {
            program.env_remove(name);
        }
        // In a process group of its own it gets a terminal's signals once, from the supervisor.
        program.env(crate::client::SUPERVISED, "1").process_group(0);
        let mut child = program.stdin(Stdio::from(theirs)).spawn()?;
        let process = pidfd_open(Pid::from_child(&child), PidfdFlags::empty());
        Ok(Worker {
            process: process.inspect_err(|_| drop(child.kill()))?,
            child,
            socket: Some(ours),
            unsent: Some(store.entries().collect()),
            started: Instant::now(),
            last_alive: None,
            ending: false,
            ready: false,
            held_signals: Vec::new(),
            killed: false,
        })
    }

    /// Sends entries, then `End`, as far as the socket takes them.
    pub(crate) fn send_entries(&mut self, store: &Store<OwnedFd>) -> io::Result<()> {
        for _ in 0..ENTRIES_PER_TURN {
            let (Some(socket), Some(unsent)) = (&self.socket, &mut self.unsent) else {
                break;
            };
            let (operation, fds) = match unsent.front() {
                Some((key, value)) => {
                    let fds: Vec<_> = value.fds.iter().map(OwnedFd::as_fd).collect();
                    (Operation::Put(key, &value.bytes, fds.len()), fds)
                }
                None => (Operation::End(store.limits), Vec::new()),
            };
            let datagram = encode(&[operation]).map_err(io::Error::other)?;
            match socket::send(socket, &datagram, &fds, SendFlags::DONTWAIT) {
                Ok(()) if unsent.pop_front().is_some() => {}
                // All is sent, or the process has ended, and its messages are to be received.
                Ok(()) | Err(Errno::PIPE | Errno::CONNRESET) => self.unsent = None,
                Err(Errno::AGAIN) => break,
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }

    /// The time from which on it counts as hanging if no `Alive` is received.
    pub(crate) fn deadline(&self, start: Duration, alive: Duration) -> Option<Instant> {
        let deadline = self
            .last_alive
            .map_or(self.started + start, |last| last + alive);
        (!self.ending && !self.killed).then_some(deadline)
    }

    /// Passes a signal on.
    pub(crate) fn signal(&mut self, signal: Signal) {
        self.ending |= signal == Signal::TERM || signal == Signal::INT;
        // A process that is not ready may not have caught the others yet.
        if self.ready || self.ending {
            // Fails only if the process has ended.
            let _ = pidfd_send_signal(&self.process, signal);
        } else {
            self.held_signals.push(signal);
        }
    }

    /// It serves now: passes on what was held until then.
    pub(crate) fn set_ready(&mut self) {
        self.ready = true;
        for signal in std::mem::take(&mut self.held_signals) {
            self.signal(signal);
        }
    }

    /// Whether this status says nothing against the entries: something else has killed it, or it ended by
    /// itself before it served, for want of a descriptor or because of a mistake in a file.
    pub(crate) fn ended_for_other_reasons(&self, status: ExitStatus) -> bool {
        let is_killed = !self.killed && status.signal() == Some(Signal::KILL.as_raw());
        is_killed || (!self.ready && status.code().is_some())
    }

    /// Tells it to go on, after it has stopped for another process.
    pub(crate) fn resume(&self) -> io::Result<()> {
        let datagram = encode(&[Operation::Resume]).map_err(io::Error::other)?;
        let socket = self.socket.as_ref().ok_or(io::ErrorKind::NotConnected)?;
        Ok(socket::send(socket, &datagram, &[], SendFlags::DONTWAIT)?)
    }

    /// Kills it, and lets a thread wait for its end: freeing the memory of guests takes time. Nothing of it
    /// runs any more when this returns, so it does not see the end of its connection to this process.
    pub(crate) fn retire(mut self, closer: &Closer) {
        self.kill();
        closer.close(self.socket.take());
        let wait = move || drop(self.child.wait());
        // Without a thread a process that has ended stays in the list of processes.
        let _ = Builder::new().name("reaper".into()).spawn(wait);
    }

    pub(crate) fn kill(&mut self) {
        self.killed = true;
        // Fails only if the process has ended.
        let _ = self.child.kill();
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.kill();
    }
}
