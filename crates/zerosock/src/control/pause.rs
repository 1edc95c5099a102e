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
use zerosock_virtio::device::WorkerDevice;
use zerosock_virtio::mailbox::Sender;

use crate::device::{Worker, WorkerMessage};

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
    paused.round(until, |worker| {
        worker.set_paused(true);
        for_each_device(worker, |device, cx| device.release(cx));
    })?;
    for _ in 0..ROUNDS {
        paused.round(until, |_| {})?;
    }
    let keep = Arc::clone(keep);
    paused.round(until, move |worker| {
        for_each_device(worker, |device, cx| {
            let (cid, pair) = (device.cid(), device.saved_pair());
            if let Some(pair) = pair {
                device.save(cx, |bytes, fds| keep(cid, pair, bytes, fds));
            }
        });
    })?;
    Ok(paused)
}

fn for_each_device(
    worker: &mut Worker,
    mut call: impl FnMut(&mut crate::device::Device, &mut crate::device::Context<'_>),
) {
    let now = worker.clock().now();
    for number in worker.devices.numbers() {
        let (device, mut cx) = worker.lend(number, now);
        if let Some(device) = device {
            device.begin_call(cx.shared);
            call(device, &mut cx);
            device.end_call(cx.shared);
        }
    }
}

fn wait<T>(answers: &mpsc::Receiver<T>, until: Instant) -> Result<T, PauseError> {
    let left = until.saturating_duration_since(Instant::now());
    answers.recv_timeout(left).map_err(|error| match error {
        mpsc::RecvTimeoutError::Timeout => PauseError::TimedOut,
        mpsc::RecvTimeoutError::Disconnected => PauseError::Ending,
    })
}

impl Paused {
    /// Lets each worker do something, and waits until all have.
    fn round(
        &self,
        until: Instant,
        call: impl FnOnce(&mut Worker) + Clone + Send + 'static,
    ) -> Result<(), PauseError> {
        let (done, is_done) = channel();
        for worker in &self.workers {
            let (call, done) = (call.clone(), done.clone());
            let task = move |worker: &mut Worker| {
                call(worker);
                // It may have been given up.
                let _ = done.send(());
            };
            let task = WorkerMessage::Task(Box::new(task));
            worker.send(task).map_err(|_| PauseError::Ending)?;
        }
        drop(done);
        self.workers.iter().try_for_each(|_| wait(&is_done, until))
    }
}

impl Drop for Paused {
    fn drop(&mut self) {
        for worker in &self.workers {
            let resume = |worker: &mut Worker| {
                worker.set_paused(false);
                for number in worker.devices.numbers() {
                    worker.activate(number);
                }
            };
            // A worker that has ended needs none.
            let _ = worker.send(WorkerMessage::Task(Box::new(resume)));
        }
    }
}
