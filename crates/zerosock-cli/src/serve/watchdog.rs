//! The service manager's watchdog: it hears from this process only while every thread that serves
//! VMs makes progress.
//!
//! A quarter of the manager's interval apart, or less, all workers and the control thread are asked, and
//! the manager is told if all of them have answered the question before. So a thread that is stuck
//! is noticed within one and a quarter intervals, although this thread goes on.

use std::time::Duration;

use sd_notify::NotifyState;
use tracing::{info, warn};
use zerosock::daemon::Daemon;

use super::notify;

/// See the module.
pub(super) struct Watchdog {
    /// `None`: the service manager does not ask for it.
    interval: Option<Duration>,
    /// The threads that had not answered at the last look.
    stalled: Vec<String>,
}

impl Watchdog {
    /// As the service manager wants it.
    pub(super) fn new() -> Watchdog {
        Watchdog {
            interval: sd_notify::watchdog_enabled().map(|interval| interval / 4),
            stalled: Vec::new(),
        }
    }

    /// The time between two looks.
    pub(super) fn interval(&self) -> Option<Duration> {
        self.interval
    }

    /// Asks all threads, and tells the service manager if all have answered.
    pub(super) fn look(&mut self, daemon: &Daemon) {
        if self.interval.is_none() {
            return;
        }
        let stalled = daemon.stalled_threads();
        if stalled != self.stalled {
            let text = if stalled.is_empty() {
                info!("all threads make progress again");
                "all threads make progress again".to_owned()
            } else {
                let names = stalled.join(", ");
                warn!("the watchdog is not served: no progress of {names}");
                format!("no progress of {names}")
            };
            notify(&[NotifyState::Status(&text)]);
        }
        if stalled.is_empty() {
            notify(&[NotifyState::Watchdog]);
        }
        self.stalled = stalled;
    }
}
