//! Pauses a daemon, so that another process can continue what it has.
//!
//! # Steps
//! First no more zero-copy sends begin, and those in flight have [`SENDS`] to end; a connection with one that has
//! not ended is not passed on. Then the control thread stops, between two requests of front-ends, then the workers. Messages between
//! devices are handled in three rounds: a buffer that is recalled in the first comes back in the second, and
//! is returned to the guest before the third ends.
//!
//! # Invariants
//! - A paused daemon changes nothing that another process could see.
//! - Dropping [`Paused`] lets it go on.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, channel};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fd::BorrowedFd;
use zerosock_proto::Cid;
use zerosock_virtio::mailbox::Sender;
use zerosock_virtio::worker::PauseStep;

use crate::device::{Context, Device, WorkerMessage};

/// How long the threads may take to stop.
const LIMIT: Duration = Duration::from_secs(1);
/// How long zero-copy sends in flight may take to end.
const SENDS: Duration = Duration::from_millis(300);
/// Pause between two looks at them.
const LOOK: Duration = Duration::from_millis(2);
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
    /// Dropping it lets the control thread go on.
    control: Option<mpsc::Sender<()>>,
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
    let mut paused = end_sends(workers)?;
    let until = Instant::now() + LIMIT;
    let (stopped, has_stopped) = channel();
    let (control, resumed) = channel();
    if !order(PauseOrder { stopped, resumed }) {
        return Err(PauseError::Ending);
    }
    wait(&has_stopped, until)?;
    paused.control = Some(control);
    paused.round(true, until, |device, cx| device.release(cx))?;
    for _ in 0..ROUNDS {
        paused.round(true, until, |_, _| {})?;
    }
    let keep = Arc::clone(keep);
    paused.round(true, until, move |device, cx| {
        let cid = device.cid();
        if let Some(pair) = device.saved_pair() {
            device.save(cx, |bytes, fds| keep(cid, pair, bytes, fds));
        }
    })?;
    Ok(paused)
}

/// Lets the workers begin no more zero-copy sends, and waits for those in flight.
fn end_sends(workers: Vec<Sender<WorkerMessage>>) -> Result<Paused, PauseError> {
    let paused = Paused {
        workers,
        control: None,
    };
    let begin = Instant::now();
    loop {
        let in_flight = Arc::<AtomicBool>::default();
        let found = Arc::clone(&in_flight);
        paused.round(false, Instant::now() + LIMIT, move |device, _| {
            if device.set_ending(true) {
                found.store(true, Ordering::Relaxed);
            }
        })?;
        if !in_flight.load(Ordering::Relaxed) || begin.elapsed() > SENDS {
            return Ok(paused);
        }
        thread::sleep(LOOK);
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
    /// Lets each worker do something for each of its devices, and waits until all have.
    fn round(
        &self,
        is_paused: bool,
        until: Instant,
        call: impl FnMut(&mut Device, &mut Context<'_>) + Clone + Send + 'static,
    ) -> Result<(), PauseError> {
        let (done, is_done) = channel();
        for worker in &self.workers {
            let step = WorkerMessage::Pause(PauseStep {
                is_paused,
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
                call: Box::new(|device, _| {
                    device.set_ending(false);
                }),
                done: channel().0,
            });
            // A worker that has ended needs none.
            let _ = worker.send(resume);
        }
    }
}
