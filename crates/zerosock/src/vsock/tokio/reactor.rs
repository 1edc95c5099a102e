//! The task of an endpoint in a runtime, and a socket's part in it.
//!
//! Each endpoint that is used here has one task in the runtime that does for all its sockets what
//! a blocked call does otherwise: it waits for the endpoint's descriptor and the next time-out,
//! lets the engine work, and wakes the tasks whose sockets have ready_flags. It ends with the last async
//! socket of the endpoint; if its runtime ends before, every task that waits is told, and the first
//! of them that comes starts another, in its own runtime.
//!
//! What must hold: a task that is told to wait was enlisted before the last look, and before it saw
//! that the endpoint's task runs. A socket has a
//! place for its reader and one for its writer, and each call that is awaited has one of its own as
//! long as it is awaited: so nobody's list grows with tasks that have given up.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll};

use ::tokio::io::Interest as IoInterest;
use ::tokio::io::unix::AsyncFd;
use ::tokio::runtime::Handle;
use ::tokio::task::JoinHandle;

use crate::vsock::hub::{Core, DeferredClose, EventFd, Interest, TimerFd, epoll_of};

/// The task of an endpoint.
#[derive(Debug)]
pub(crate) struct Reactor {
    task: JoinHandle<()>,
    /// The runtime says that a task is finished only after it has dropped what that had, which is
    /// when it tells the others.
    ended: Arc<AtomicBool>,
}

impl Reactor {
    /// The endpoint's task, started if it does not run.
    fn of(core: &Arc<Core>) -> io::Result<Arc<Reactor>> {
        let mut place = locked(core.reactor());
        if let Some(running) = place.upgrade().filter(|it| it.is_running()) {
            return Ok(running);
        }
        let event_fd = Arc::new(EventFd::new()?);
        let timer_fd = TimerFd::new()?;
        let ended = Arc::new(AtomicBool::new(false));
        let fd = epoll_of([core.engine_fd(), event_fd.as_fd(), timer_fd.as_fd()])?;
        #[allow(
            deprecated,
            reason = "the newer way is unsafe, to have promised what an OwnedFd does by itself: \
                      that it stays open and the same"
        )]
        let fd = AsyncFd::with_interest(fd, IoInterest::READABLE)?;
        let post = Post {
            core: Arc::downgrade(core),
            event_fd,
            timer_fd,
            ended: ended.clone(),
        };
        let task = ::tokio::spawn(work(post, fd));
        let reactor = Arc::new(Reactor { task, ended });
        *place = Arc::downgrade(&reactor);
        Ok(reactor)
    }

    fn is_running(&self) -> bool {
        !self.ended.load(Ordering::Acquire)
    }
}

impl Drop for Reactor {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Where the task is told. When it ends, nobody relies on it any more.
struct Post {
    core: Weak<Core>,
    event_fd: Arc<EventFd>,
    /// Not the runtime's timer: it need not have one.
    timer_fd: TimerFd,
    ended: Arc<AtomicBool>,
}

impl Drop for Post {
    fn drop(&mut self) {
        // Before anybody is told: who comes looks at this.
        self.ended.store(true, Ordering::Release);
        if let Some(core) = self.core.upgrade() {
            core.close_deferred(DeferredClose::EventFd(self.event_fd.clone()));
        }
    }
}

async fn work(mut post: Post, fd: AsyncFd<OwnedFd>) {
    loop {
        let watched = {
            let Some(core) = post.core.upgrade() else {
                return;
            };
            let mut locked = core.lock();
            if locked.turn().is_err() {
                // Everybody was told.
                return;
            }
            post.event_fd.clear();
            locked.register_poller(&post.event_fd)
        };
        let Ok(due) = watched else {
            ::tokio::task::yield_now().await;
            continue;
        };
        post.timer_fd.set(due);
        match fd.readable().await {
            Ok(mut guard) => guard.clear_ready(),
            Err(_) => return,
        }
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A socket's part in the task of its endpoint. When it goes, nobody is told of the socket any
/// more.
#[derive(Debug)]
pub(super) struct Watched {
    core: Arc<Core>,
    interest: Interest,
    reactor: Mutex<Arc<Reactor>>,
    /// Those who were told to wait by `poll_read` and by `poll_write`.
    pub(super) reader: Seat,
    pub(super) writer: Seat,
}

/// A place among those who are told: the ticket of who had it last.
#[derive(Debug, Default)]
pub(super) struct Seat(Mutex<u64>);

/// A call that is awaited, with a seat of its own.
struct Visit<'w> {
    watched: &'w Watched,
    seat: Seat,
}

impl Watched {
    pub(super) fn new(core: &Arc<Core>, interest: Interest) -> io::Result<Watched> {
        Ok(Watched {
            reactor: Mutex::new(Reactor::of(core)?),
            core: core.clone(),
            interest,
            reader: Seat::default(),
            writer: Seat::default(),
        })
    }

    /// Tries, is enlisted, and tries once more.
    pub(super) fn poll<T>(
        &self,
        seat: &Seat,
        cx: &Context<'_>,
        mut attempt: impl FnMut() -> io::Result<T>,
    ) -> Poll<io::Result<T>> {
        match attempt() {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            result => return Poll::Ready(result),
        }
        self.core
            .register_task(&mut locked(&seat.0), self.interest, cx.waker());
        self.see_to_reactor()?;
        match attempt() {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Poll::Pending,
            result => Poll::Ready(result),
        }
    }

    /// A runtime that has ended takes the endpoint's task with it, but not its sockets.
    fn see_to_reactor(&self) -> io::Result<()> {
        let mut reactor = locked(&self.reactor);
        if !reactor.is_running() {
            Handle::try_current().map_err(io::Error::other)?;
            *reactor = Reactor::of(&self.core)?;
        }
        Ok(())
    }

    /// Awaits `attempt`.
    pub(super) async fn when<T>(
        &self,
        mut attempt: impl FnMut() -> io::Result<T>,
    ) -> io::Result<T> {
        let visit = Visit {
            watched: self,
            seat: Seat::default(),
        };
        std::future::poll_fn(|cx| self.poll(&visit.seat, cx, &mut attempt)).await
    }

    fn leave(&self, seat: &Seat) {
        let ticket = std::mem::take(&mut *locked(&seat.0));
        if ticket != 0 {
            self.core.close_deferred(DeferredClose::Task(ticket));
        }
    }
}

impl Drop for Visit<'_> {
    fn drop(&mut self) {
        self.watched.leave(&self.seat);
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.leave(&self.reader);
        self.leave(&self.writer);
    }
}
