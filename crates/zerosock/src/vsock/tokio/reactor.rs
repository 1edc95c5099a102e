//! The reactor: the task that drives an endpoint's queues in a tokio runtime.
//!
//! # Invariants
//! - A task registers its waker, then checks that the reactor runs, then tries its call once more,
//!   and only then returns `Pending`.
//! - A socket has one slot for its reader and one for its writer. Each pending call has a slot of
//!   its own, freed when the future is dropped. So cancelled tasks leave no registrations behind.
//!
//! # Life cycle
//! An endpoint with async sockets has one reactor. It waits for the endpoint's descriptor and the
//! next timer, drives the backend, and wakes the tasks of sockets that have events. It ends with the
//! endpoint's last async socket. If its runtime ends earlier, it wakes all waiting tasks, and the
//! first that runs starts a new reactor in its own runtime.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll};

use ::tokio::io::Interest as IoInterest;
use ::tokio::io::unix::AsyncFd;
use ::tokio::runtime::Handle;

use crate::vsock::hub::{Core, DeferredClose, EventFd, Interest, Reactor, TimerFd, epoll_of};

/// Returns the endpoint's reactor, and starts it if none runs.
///
/// # Errors
/// When the system has no descriptor left.
fn reactor_of(core: &Arc<Core>) -> io::Result<Arc<Reactor>> {
    let mut place = locked(core.reactor());
    if let Some(running) = place.upgrade().filter(|it| it.is_running()) {
        return Ok(running);
    }
    let event_fd = Arc::new(EventFd::new()?);
    let timer_fd = TimerFd::new()?;
    let ended = Arc::new(AtomicBool::new(false));
    let fd = epoll_of([core.backend_fd(), event_fd.as_fd(), timer_fd.as_fd()])?;
    #[allow(
        deprecated,
        reason = "the replacement is unsafe and requires what an OwnedFd guarantees: that the \
                  descriptor stays open and the same"
    )]
    let fd = AsyncFd::with_interest(fd, IoInterest::READABLE)?;
    let reactor_state = ReactorState {
        core: Arc::downgrade(core),
        event_fd,
        timer_fd,
        ended: ended.clone(),
    };
    let task = ::tokio::spawn(work(reactor_state, fd));
    let reactor = Arc::new(Reactor::new(task, ended));
    *place = Arc::downgrade(&reactor);
    Ok(reactor)
}

/// What the reactor's task owns. Its drop reports the end of the task to the endpoint.
struct ReactorState {
    core: Weak<Core>,
    event_fd: Arc<EventFd>,
    /// Not the runtime's timer: the runtime may have none.
    timer_fd: TimerFd,
    ended: Arc<AtomicBool>,
}

impl Drop for ReactorState {
    fn drop(&mut self) {
        // Before `close_deferred` wakes the tasks, which check this.
        self.ended.store(true, Ordering::Release);
        if let Some(core) = self.core.upgrade() {
            core.close_deferred(DeferredClose::EventFd(self.event_fd.clone()));
        }
    }
}

async fn work(mut reactor_state: ReactorState, fd: AsyncFd<OwnedFd>) {
    loop {
        let watched = {
            let Some(core) = reactor_state.core.upgrade() else {
                return;
            };
            let mut locked = core.lock();
            if locked.drive().is_err() {
                // The failed turn has woken all waiters.
                return;
            }
            reactor_state.event_fd.clear();
            locked.register_poller(&reactor_state.event_fd, Interest::Anything)
        };
        let Ok(due) = watched else {
            ::tokio::task::yield_now().await;
            continue;
        };
        reactor_state.timer_fd.set(due);
        match fd.readable().await {
            Ok(mut guard) => guard.clear_ready(),
            Err(_) => return,
        }
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An async socket's registration at its endpoint. Dropping it deregisters the socket's tasks.
#[derive(Debug)]
pub(super) struct Watched {
    core: Arc<Core>,
    interest: Interest,
    reactor: Mutex<Arc<Reactor>>,
    /// The task that `poll_read` registered.
    pub(super) reader: TaskSlot,
    /// The task that `poll_write` registered.
    pub(super) writer: TaskSlot,
}

/// The ticket of the last task that was registered with this slot; 0 without one.
#[derive(Debug, Default)]
pub(super) struct TaskSlot(Mutex<u64>);

/// An awaited call, with a slot of its own.
struct PendingCall<'w> {
    watched: &'w Watched,
    slot: TaskSlot,
}

impl Watched {
    pub(super) fn new(core: &Arc<Core>, interest: Interest) -> io::Result<Watched> {
        Ok(Watched {
            reactor: Mutex::new(reactor_of(core)?),
            core: core.clone(),
            interest,
            reader: TaskSlot::default(),
            writer: TaskSlot::default(),
        })
    }

    /// Tries `attempt`, registers the task, and tries once more.
    pub(super) fn poll<T>(
        &self,
        slot: &TaskSlot,
        cx: &Context<'_>,
        mut attempt: impl FnMut() -> io::Result<T>,
    ) -> Poll<io::Result<T>> {
        match attempt() {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            result => return Poll::Ready(result),
        }
        self.core
            .register_task(&mut locked(&slot.0), self.interest, cx.waker());
        self.ensure_reactor()?;
        match attempt() {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Poll::Pending,
            result => Poll::Ready(result),
        }
    }

    /// Starts a new reactor if the old one ended with its runtime.
    fn ensure_reactor(&self) -> io::Result<()> {
        let mut reactor = locked(&self.reactor);
        if !reactor.is_running() {
            Handle::try_current().map_err(io::Error::other)?;
            *reactor = reactor_of(&self.core)?;
        }
        Ok(())
    }

    /// Awaits `attempt`.
    pub(super) async fn when<T>(
        &self,
        mut attempt: impl FnMut() -> io::Result<T>,
    ) -> io::Result<T> {
        let call = PendingCall {
            watched: self,
            slot: TaskSlot::default(),
        };
        std::future::poll_fn(|cx| self.poll(&call.slot, cx, &mut attempt)).await
    }

    fn deregister(&self, slot: &TaskSlot) {
        let ticket = std::mem::take(&mut *locked(&slot.0));
        if ticket != 0 {
            self.core.close_deferred(DeferredClose::Task(ticket));
        }
    }
}

impl Drop for PendingCall<'_> {
    fn drop(&mut self) {
        self.watched.deregister(&self.slot);
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.deregister(&self.reader);
        self.deregister(&self.writer);
    }
}
