//! The thread that drives an endpoint on request, so that its connections move without further calls.
//!
//! # Invariants
//! - The thread keeps no endpoint alive: it ends when the last socket is dropped, or when the endpoint
//!   has failed.
//! - It waits on the rings and for timers only; no event of a socket wakes it.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Instant;

use zerosock_virtio::poller::wait_for_event;

use super::descriptors::{EventFd, epoll_of};
use super::lock::Core;
use super::waiter::Interest;

/// Ends the thread when it is dropped, with the endpoint.
#[derive(Debug)]
pub(super) struct Background {
    event_fd: Arc<EventFd>,
}

impl Drop for Background {
    fn drop(&mut self) {
        self.event_fd.signal();
    }
}

impl Core {
    /// Starts the thread, once.
    ///
    /// # Errors
    /// When the system has no descriptor or thread left.
    pub(crate) fn start_background(self: &Arc<Core>) -> io::Result<()> {
        let event_fd = Arc::new(EventFd::new()?);
        let fd = epoll_of([self.backend_fd(), event_fd.as_fd()])?;
        let (core, signal) = (Arc::downgrade(self), Arc::clone(&event_fd));
        thread::Builder::new()
            .name("zerosock-drive".to_owned())
            .spawn(move || drive_until_dropped(&core, &signal, &fd))?;
        // A second call ends the thread that it has started.
        let _ = self.background.set(Background { event_fd });
        Ok(())
    }
}

fn drive_until_dropped(core: &Weak<Core>, event_fd: &Arc<EventFd>, fd: &OwnedFd) {
    loop {
        let watched = {
            let Some(core) = core.upgrade() else { return };
            let mut locked = core.lock();
            if locked.drive().is_err() {
                // The failed turn has woken all waiters.
                return;
            }
            event_fd.clear();
            locked.register_poller(event_fd, Interest::Rings)
        };
        let Ok(due) = watched else {
            thread::yield_now();
            continue;
        };
        let left = due.map(|at| at.saturating_duration_since(Instant::now()));
        if let Err(error) = wait_for_event(fd, left) {
            return tracing::error!(%error, "an endpoint is no longer driven by its thread: it cannot wait");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::vsock::fake;

    const DEADLINE: Duration = Duration::from_secs(30);

    fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
        let deadline = Instant::now() + DEADLINE;
        while !holds() {
            assert!(Instant::now() < deadline, "{what}");
            thread::yield_now();
        }
    }

    #[test]
    fn thread_serves_timers_without_a_call_and_ends_with_the_endpoint() {
        let (core, script) = fake::core();
        core.start_background().unwrap();
        let thread_has = Arc::downgrade(&core.background.get().unwrap().event_fd);
        let locked = core.lock();
        script.lock().unwrap().due = Some(Instant::now() + Duration::from_millis(1));
        drop(locked);
        eventually("the timer fires", || script.lock().unwrap().fired > 0);
        drop(core);
        // The thread has let go of its eventfd.
        eventually("the thread ends", || thread_has.upgrade().is_none());
    }
}
