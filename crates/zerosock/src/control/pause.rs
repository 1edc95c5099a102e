//! Pauses a daemon, so that another process can continue what it has.
//!
//! # Steps
//! The control thread stops first, between two requests of front-ends, then the workers. Messages between
//! devices are handled in three rounds: a buffer that is recalled in the first comes back in the second, and
//! is returned to the guest before the third ends.
//!
//! # Invariants
//! - A paused daemon changes nothing that another process could see.
//! - Dropping [`Paused`] lets it go on.

use std::sync::Arc;
use std::sync::mpsc::{self, channel};
use std::time::{Duration, Instant};

use rustix::fd::BorrowedFd;
use zerosock_proto::Cid;
use zerosock_virtio::mailbox::Sender;
use zerosock_virtio::worker::PauseStep;

use crate::device::{Context, Device, WorkerMessage};

/// How long the threads may take to stop.
const LIMIT: Duration = Duration::from_secs(1);
/// Rounds of messages between the stop and the save.
const ROUNDS: usize = 2;

/// Passes on what another process needs: the CID and the number of the queue pair, the bytes, and the
/// descriptors that belong to them. Called by several threads.
pub type Keep = Arc<dyn Fn(Cid, u16, &[u8], &[BorrowedFd<'_>]) + Send + Sync>;

/// Why a daemon was not paused. It goes on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PauseError {
    /// A thread did not stop within a second.
    #[error("a thread does not stop in time")]
    TimedOut,
    /// The daemon is shutting down.
    #[error("the daemon is shutting down")]
    Ending,
}

/// A paused daemon. Dropping it lets the daemon go on.
#[derive(Debug)]
pub struct Paused {
    workers: Vec<Sender<WorkerMessage>>,
    _control: mpsc::Sender<()>,
}

/// An order to the control thread to stop.
#[derive(Debug)]
pub(super) struct PauseOrder {
    stopped: mpsc::Sender<()>,
    resumed: mpsc::Receiver<()>,
}

impl PauseOrder {
    /// Stops this thread.
    pub(super) fn wait(self) {
        // It may have been given up already.
        if self.stopped.send(()).is_ok() {
            let _ = self.resumed.recv();
        }
    }
}

/// Pauses a daemon with these workers; `order` reaches the control thread.
pub(super) fn pause(
    workers: Vec<Sender<WorkerMessage>>,
    order: impl FnOnce(PauseOrder) -> bool,
    keep: &Keep,
) -> Result<Paused, PauseError> {
    let until = Instant::now() + LIMIT;
    let (stopped, has_stopped) = channel();
    let (control, resumed) = channel();
    if !order(PauseOrder { stopped, resumed }) {
        return Err(PauseError::Ending);
    }
    wait(&has_stopped, until)?;
    let paused = Paused {
        workers,
        _control: control,
    };
    paused.round(until, |device, cx| device.release(cx))?;
    for _ in 0..ROUNDS {
        paused.round(until, |_, _| {})?;
    }
    let keep = Arc::clone(keep);
    paused.round(until, move |device, cx| {
        let cid = device.cid();
        if let Some(pair) = device.saved_pair() {
            device.save(cx, |bytes, fds| keep(cid, pair, bytes, fds));
        }
    })?;
    Ok(paused)
}

fn wait<T>(answers: &mpsc::Receiver<T>, until: Instant) -> Result<T, PauseError> {
    let left = until.saturating_duration_since(Instant::now());
    answers.recv_timeout(left).map_err(|error| match error {
        mpsc::RecvTimeoutError::Timeout => PauseError::TimedOut,
        mpsc::RecvTimeoutError::Disconnected => PauseError::Ending,
    })
}

impl Paused {
    /// Lets each worker do something for each of its devices, and waits until all have.
    fn round(
        &self,
        until: Instant,
        call: impl FnMut(&mut Device, &mut Context<'_>) + Clone + Send + 'static,
    ) -> Result<(), PauseError> {
        let (done, is_done) = channel();
        for worker in &self.workers {
            let step = WorkerMessage::Pause(PauseStep {
                is_paused: true,
                call: Box::new(call.clone()),
                done: done.clone(),
            });
            worker.send(step).map_err(|_| PauseError::Ending)?;
        }
        drop(done);
        let mut workers = self.workers.iter();
        workers.try_for_each(|_| wait(&is_done, until))
    }
}

impl Drop for Paused {
    fn drop(&mut self) {
        for worker in &self.workers {
            let resume = WorkerMessage::Pause(PauseStep {
                is_paused: false,
                call: Box::new(|_, _| {}),
                done: channel().0,
            });
            // A worker that has ended needs none.
            let _ = worker.send(resume);
        }
    }
}
