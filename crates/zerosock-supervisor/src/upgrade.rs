//! An upgrade: another executable takes over from the worker process, which has stopped and written down
//! what that one needs.
//!
//! # Steps
//! 1. The new process is started, and says that it waits ([`Take`](Operation::Take)).
//! 2. The worker process gets SIGUSR2. It stops, and says so ([`HandedOver`](Operation::HandedOver)).
//! 3. The new process gets all entries, those below [`HANDOVER_PREFIX`](crate::HANDOVER_PREFIX) too, checks
//!    them and says that it serves ([`TakeOver`](Operation::TakeOver)). The other one is killed.
//!
//! # Invariants
//! - Until the last step the worker process can go on ([`Resume`](Operation::Resume)), and does if anything
//!   fails or takes too long.
//! - Nothing but these two messages is received from the new process before.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::net::RecvFlags;

use crate::Error;
use crate::message::{Operation, decode};
use crate::socket;
use crate::store::Store;
use crate::worker::Worker;

/// How long the new process may take until it waits for its entries.
const START_LIMIT: Duration = Duration::from_secs(10);
/// How long the worker process may be stopped.
const PAUSE_LIMIT: Duration = Duration::from_secs(2);

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct Upgrade {
    /// The new process.
    pub(crate) worker: Worker,
    stage: Stage,
    /// It fails at this time.
    pub(crate) until: Instant,
    pub(crate) executable: Executable,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Stage {
    Starting,
    /// The worker process was asked to stop.
    Stopping,
    /// The new process gets the entries.
    Given,
}

/// What the new process has said.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Said {
    Nothing,
    /// It waits for its entries: the worker process is to stop.
    Waits,
    /// It serves.
    TakesOver,
}

/// An open executable: the file at its path may be replaced.
#[derive(Debug)]
pub(crate) struct Executable(OwnedFd);

impl Executable {
    pub(crate) fn open(path: &Path) -> io::Result<Executable> {
        let file = File::open(path)?;
        match file.metadata()?.is_file() {
            true => Ok(Executable(file.into())),
            false => Err(io::ErrorKind::InvalidInput.into()),
        }
    }

    /// Its path in this process.
    pub(crate) fn path(&self) -> PathBuf {
        format!("/proc/self/fd/{}", self.0.as_raw_fd()).into()
    }
}

impl Upgrade {
    /// Begins with a process that has no entries yet.
    pub(crate) fn new(mut worker: Worker, executable: Executable) -> Upgrade {
        worker.unsent = None;
        Upgrade {
            worker,
            stage: Stage::Starting,
            until: Instant::now() + START_LIMIT,
            executable,
        }
    }

    /// Whether the worker process has stopped.
    pub(crate) fn has_given(&self) -> bool {
        self.stage == Stage::Given
    }

    /// The worker process has stopped: the new one gets all entries. Returns false if it was not asked to.
    pub(crate) fn give(&mut self, store: &Store<OwnedFd>) -> bool {
        let was_asked = self.stage == Stage::Stopping;
        if was_asked {
            self.stage = Stage::Given;
            self.worker.unsent = Some(store.entries().collect());
        }
        was_asked
    }

    /// Receives what the new process says, after it has all entries.
    pub(crate) fn receive(&mut self, buffer: &mut [u8]) -> Result<Said, Error> {
        let socket = self.worker.socket.as_ref().ok_or(Error::NoSupervisor)?;
        let mut fds = Vec::new();
        let length = socket::receive(socket, buffer, &mut fds, RecvFlags::DONTWAIT);
        let length = length.map_err(io::Error::from)?;
        let message = buffer.get(..length).unwrap_or_default();
        match (self.stage, &decode(message, fds.len())?[..]) {
            (Stage::Starting, [Operation::Take]) => {
                self.stage = Stage::Stopping;
                self.until = Instant::now() + PAUSE_LIMIT;
                Ok(Said::Waits)
            }
            (Stage::Given, [Operation::TakeOver]) => Ok(Said::TakesOver),
            (_, [Operation::Alive]) => Ok(Said::Nothing),
            _ => Err(Error::Invalid("not a message of a process that takes over")),
        }
    }
}
