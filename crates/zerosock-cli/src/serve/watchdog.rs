//! The service manager's watchdog: notified only while every thread that serves VMs makes progress.
//!
//! At least every quarter of the manager's interval this thread asks all workers and the control
//! thread for an answer, and notifies the manager if all have answered the question before. So a
//! stuck thread is noticed within one and a quarter intervals, although this thread continues.

use std::time::Duration;

use sd_notify::NotifyState;
use tracing::{error, info, warn};
use zerosock::daemon::Daemon;

use crate::service_manager::notify;
use crate::supervised::supervisor;

/// How often progress is reported to a supervisor.
const ALIVE: Duration = Duration::from_secs(1);

/// State of the watchdog; see the module.
pub(super) struct Watchdog {
    /// `None`: the service manager has no watchdog for this service.
    interval: Option<Duration>,
    /// Threads that had not answered at the last check.
    stalled: Vec<String>,
}

impl Watchdog {
    /// Configured by the service manager's environment.
    pub(super) fn new() -> Watchdog {
        Watchdog {
            interval: match supervisor() {
                Some(_) => Some(ALIVE),
                None => sd_notify::watchdog_enabled().map(|interval| interval / 4),
            },
            stalled: Vec::new(),
        }
    }

    /// Interval of the checks.
    pub(super) fn interval(&self) -> Option<Duration> {
        self.interval
    }

    /// Asks all threads, and notifies the service manager if all have answered.
    pub(super) fn check(&mut self, daemon: &Daemon) {
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
                warn!("watchdog notification withheld: no progress of {names}");
                format!("no progress of {names}")
            };
            notify(&[NotifyState::Status(&text)]);
        }
        if stalled.is_empty() {
            match supervisor() {
                Some(client) if client.alive().is_err() => {
                    error!("the supervisor has ended: this process ends, too");
                    std::process::exit(1);
                }
                Some(_) => {}
                None => notify(&[NotifyState::Watchdog]),
            }
        }
        self.stalled = stalled;
    }
}
