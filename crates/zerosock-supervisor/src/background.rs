//! Threads for calls that can wait: closing descriptors, and notifying the service manager.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::Builder;
use std::time::{Duration, Instant};

use sd_notify::NotifyState;
use tracing::warn;

/// Threads that close descriptors: this many closes that never return still leave none for others.
const CLOSERS: usize = 16;
/// Most messages that wait for the service manager to take them. Further ones are lost.
const MAX_STATES: usize = 64;

/// Closes descriptors: a close frees the pages of a memfd, or waits for a file system of a peer.
#[derive(Debug)]
pub(crate) struct Closer {
    queue: Sender<OwnedFd>,
    backlog: Arc<AtomicUsize>,
}

impl Closer {
    pub(crate) fn start() -> io::Result<Closer> {
        let (queue, waiting) = channel::<OwnedFd>();
        let (waiting, backlog) = (Arc::new(Mutex::new(waiting)), Arc::<AtomicUsize>::default());
        for _ in 0..CLOSERS {
            let (waiting, backlog) = (waiting.clone(), backlog.clone());
            let next = move || {
                waiting
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .recv()
            };
            let close_all = move || {
                while let Ok(fd) = next() {
                    drop(fd);
                    backlog.fetch_sub(1, Ordering::Relaxed);
                }
            };
            Builder::new().name("closer".into()).spawn(close_all)?;
        }
        Ok(Closer { queue, backlog })
    }

    pub(crate) fn close(&self, fds: impl IntoIterator<Item = OwnedFd>) {
        for fd in fds {
            self.backlog.fetch_add(1, Ordering::Relaxed);
            // The threads run as long as this sender exists.
            let _ = self.queue.send(fd);
        }
    }

    /// Descriptors that are not closed yet.
    pub(crate) fn backlog(&self) -> usize {
        self.backlog.load(Ordering::Relaxed)
    }
}

/// The service manager, if the environment names one (sd_notify(3)). Its socket can be full.
#[derive(Debug)]
pub(crate) struct ServiceManager {
    states: SyncSender<String>,
    /// How often the watchdog is answered, and when next.
    watchdog: Option<(Duration, Instant)>,
}

impl ServiceManager {
    pub(crate) fn from_environment() -> io::Result<ServiceManager> {
        let (states, waiting) = sync_channel::<String>(MAX_STATES);
        let send_all = move || {
            for text in waiting {
                if let Err(error) = sd_notify::notify(&[NotifyState::Custom(&text)]) {
                    warn!("cannot notify the service manager: {error}");
                }
            }
        };
        Builder::new().name("notify".into()).spawn(send_all)?;
        let watchdog = sd_notify::watchdog_enabled().map(|time| (time / 4, Instant::now()));
        Ok(ServiceManager { states, watchdog })
    }

    pub(crate) fn notify(&self, text: &str) {
        if self.states.try_send(text.to_owned()).is_err() {
            warn!("{text:?} is lost: the service manager does not take messages");
        }
    }

    /// Answers the watchdog if it is time, and returns when it is time again. The loop calls it once a turn,
    /// so a loop that does not turn does not answer.
    pub(crate) fn answer_watchdog(&mut self, now: Instant) -> Option<Instant> {
        let (interval, next) = self.watchdog?;
        if now < next {
            return Some(next);
        }
        self.notify("WATCHDOG=1");
        self.watchdog = Some((interval, now + interval));
        Some(now + interval)
    }
}
