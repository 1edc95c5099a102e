//! The thread that drives an endpoint on request, so that its connections move without further calls.
//!
//! # Invariants
//! - The thread keeps no endpoint alive: it ends when the last socket is dropped, or when the endpoint
//!   has failed.
//! - It waits on the rings and for timers only; no event of a socket wakes it.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Weak};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use zerosock_virtio::poller::wait_for_event;

use super::hub::{Background, Core, EventFd, Interest, epoll_of};

/// Starts the thread.
///
/// # Errors
/// When the system has no descriptor or thread left.
pub(super) fn start(core: &Arc<Core>) -> io::Result<JoinHandle<()>> {
    let event_fd = Arc::new(EventFd::new()?);
    let fd = epoll_of([core.backend_fd(), event_fd.as_fd()])?;
    let (weak, signal) = (Arc::downgrade(core), Arc::clone(&event_fd));
    let thread = thread::Builder::new()
        .name("zerosock-drive".to_owned())
        .spawn(move || drive_until_dropped(&weak, &signal, &fd))?;
    core.set_background(Background(event_fd));
    Ok(thread)
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
        let thread = start(&core).unwrap();
        let locked = core.lock();
        script.lock().unwrap().due = Some(Instant::now() + Duration::from_millis(1));
        drop(locked);
        eventually("the timer fires", || script.lock().unwrap().fired > 0);
        drop(core);
        eventually("the thread ends", || thread.is_finished());
    }
}
