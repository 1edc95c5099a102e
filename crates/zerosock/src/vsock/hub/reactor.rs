//! The handle of the task that drives an endpoint in a tokio runtime.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ::tokio::task::JoinHandle;

/// The handle of an endpoint's reactor. Dropping it stops the task.
#[derive(Debug)]
pub(crate) struct Reactor {
    task: JoinHandle<()>,
    /// The task has ended. `JoinHandle::is_finished` would be too late: it turns true only after
    /// the task's state was dropped, and that drop wakes the tasks that check here.
    ended: Arc<AtomicBool>,
}

impl Reactor {
    /// The handle of `task`, which sets `ended` when it ends.
    pub(crate) fn new(task: JoinHandle<()>, ended: Arc<AtomicBool>) -> Reactor {
        Reactor { task, ended }
    }

    pub(crate) fn is_running(&self) -> bool {
        !self.ended.load(Ordering::Acquire)
    }
}

impl Drop for Reactor {
    fn drop(&mut self) {
        self.task.abort();
    }
}
