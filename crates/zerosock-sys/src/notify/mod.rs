//! Notifying a peer through a descriptor that the peer controls, without waiting for it.
//!
//! A vhost-user front-end hands over the descriptor on which it wants to be notified of used
//! buffers. It shares the open file, and with it the O_NONBLOCK flag, and it can hold the lock of a
//! pipe for as long as it likes (by writing from a page that userfaultfd or FUSE provides): a
//! write(2) would then hold its caller, even with RWF_NOWAIT.
//!
//! # Invariants
//! - [`Notifier::notify`] never waits for a peer.
//! - An eventfd is signalled by asynchronous I/O (module `aio`). Where the system refuses that
//!   (seccomp, fs.aio-max-nr is used up, or a request fails), and for pipes, a [`CallThread`] of the
//!   one peer makes the write, and only that peer's notifications wait when it waits.
//! - A socket, such as user-mode Linux hands over, is sent to with MSG_DONTWAIT. It is a connected
//!   Unix stream socket: sending takes no lock that is held while a process's memory is read. Before
//!   Linux 6.8, any sender may have to wait for the garbage collection of Unix sockets, so the thread of
//!   the peer writes there as well.
//! - No notification is lost. One for which the system has no thread waits until it has one, for
//!   which [`Notifier::retry`] asks.
//! - A descriptor of any other kind is refused when it arrives.

mod aio;
mod call_thread;

use std::cell::{Cell, RefCell};
use std::fmt;
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::SendFlags;

use crate::kernel_release::release;
use crate::peer_fd::PeerFd;
use aio::Queue;
pub use call_thread::{CallThread, ThreadCount, TooManyThreads};
use call_thread::{Target, WeakCallThread};

/// How long until asynchronous I/O is asked for again where it was refused.
const RETRY: Duration = Duration::from_secs(1);

/// How long until a thread is asked for again that the system refused.
const THREAD_RETRY: Duration = Duration::from_millis(100);

/// What a descriptor is, as far as notifications go.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum FdKind {
    /// eventfd(2).
    Eventfd,
    /// An end of a pipe(2). Not a FIFO with a name.
    Pipe,
    /// A socket of any kind.
    Socket,
    /// Anything else, as `/proc/self/fd` shows it.
    Other(String),
}

impl FdKind {
    /// The kind of a descriptor. The kernel answers from its own tables: unlike fstat(2), which
    /// would ask the server of a file on FUSE, readlink(2) does not wait.
    ///
    /// # Errors
    /// What readlink(2) answers for the entry in `/proc/self/fd`.
    pub fn of(fd: impl AsFd) -> io::Result<FdKind> {
        let target = fs::read_link(format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd()))?;
        let target = target.as_os_str().to_string_lossy();
        // A file has a path, which begins with "/" or "(unreachable)": it cannot look like these.
        Ok(match &*target {
            "anon_inode:[eventfd]" => FdKind::Eventfd,
            pipe if pipe.starts_with("pipe:[") => FdKind::Pipe,
            socket if socket.starts_with("socket:[") => FdKind::Socket,
            other => FdKind::Other(other.to_owned()),
        })
    }
}

impl fmt::Display for FdKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            FdKind::Eventfd => "an eventfd",
            FdKind::Pipe => "a pipe",
            FdKind::Socket => "a socket",
            FdKind::Other(target) => target,
        })
    }
}

/// A descriptor to notify a peer on. Clones share it.
#[derive(Clone, Debug)]
pub struct CallFd {
    target: Target,
    thread: CallThread,
    way: Way,
}

/// How a descriptor is notified.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
enum Way {
    Eventfd,
    Socket,
    /// By the thread: a write to a pipe can wait, and so can one to a socket of an older kernel
    /// ([`sending_can_collect`]).
    Thread,
}

impl CallFd {
    /// Takes an eventfd, the writing end of a pipe, or a socket that has been [made
    /// send-only](crate::fd_passing::make_send_only). `thread` makes the writes that could wait,
    /// and is the one of the peer that sent the descriptor.
    ///
    /// # Errors
    /// `InvalidInput` for a descriptor of another kind; [`TooManyThreads`] for a pipe, and before Linux
    /// 6.8 for a socket, when the peer's earlier threads still wait.
    pub fn new(fd: PeerFd, thread: CallThread) -> io::Result<CallFd> {
        let way = match FdKind::of(&fd)? {
            FdKind::Eventfd => Way::Eventfd,
            FdKind::Socket if sending_can_collect() => Way::Thread,
            FdKind::Socket => Way::Socket,
            FdKind::Pipe => Way::Thread,
            other => {
                let text = format!("{other} is neither an eventfd nor a pipe nor a socket");
                return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
            }
        };
        if way == Way::Thread {
            thread.start()?;
        }
        let target = Target::new(fd);
        Ok(CallFd {
            target,
            thread,
            way,
        })
    }
}

/// Notifies peers. One for each thread that does.
#[derive(Debug)]
pub struct Notifier {
    /// None while the system refuses asynchronous I/O.
    queue: RefCell<Option<Queue>>,
    /// When it was asked for last.
    asked: Cell<Instant>,
    /// Threads that the system refused, with something to write.
    refused: RefCell<Vec<WeakCallThread>>,
    /// When they are asked for again.
    retry_at: Cell<Option<Instant>>,
}

impl Notifier {
    /// Asks the kernel for asynchronous I/O. Where that is refused, [`is_direct`](Self::is_direct)
    /// is false, and it is asked for again at most once a second.
    pub fn new() -> Notifier {
        let notifier = Notifier::without_aio();
        notifier.queue.replace(Queue::new().ok());
        notifier
    }

    /// As where the system refuses asynchronous I/O, for tests.
    #[doc(hidden)]
    pub fn without_aio() -> Notifier {
        Notifier {
            queue: RefCell::new(None),
            asked: Cell::new(Instant::now()),
            refused: RefCell::default(),
            retry_at: Cell::new(None),
        }
    }

    /// Whether eventfds are signalled without the help of a thread.
    pub fn is_direct(&self) -> bool {
        self.queue.borrow().is_some()
    }

    /// Adds one to an eventfd, or writes eight bytes to a pipe or socket. A peer with a full
    /// descriptor is about to wake, and one with a broken descriptor is gone: neither is an error.
    #[inline]
    pub fn notify(&self, call: &CallFd) {
        let is_done = match call.way {
            Way::Eventfd => {
                let queue = self.queue.borrow();
                queue
                    .as_ref()
                    .is_some_and(|queue| queue.signal(call.target.as_fd()).is_ok())
            }
            Way::Socket => send(call.target.as_fd()),
            Way::Thread => false,
        };
        if !is_done {
            self.notify_by_thread(call);
        }
    }

    #[cold]
    fn notify_by_thread(&self, call: &CallFd) {
        if call.way == Way::Eventfd && self.asked.get().elapsed() >= RETRY {
            self.asked.set(Instant::now());
            if let Ok(queue) = Queue::new() {
                let signalled = queue.signal(call.target.as_fd());
                self.queue.replace(Some(queue));
                if signalled.is_ok() {
                    return;
                }
            }
        }
        if call.thread.write(&call.target).is_err() {
            self.refused.borrow_mut().push(call.thread.downgrade());
            self.retry_later();
        }
    }

    /// How long until [`retry`](Self::retry) is to be called, if it is.
    pub fn retry_in(&self) -> Option<Duration> {
        let at = self.retry_at.get()?;
        Some(at.saturating_duration_since(Instant::now()))
    }

    /// Asks again for the threads that the system refused, if it is time to.
    #[inline]
    pub fn retry(&self) {
        if self.retry_at.get().is_some() {
            self.retry_threads();
        }
    }

    #[cold]
    fn retry_threads(&self) {
        if self.retry_in().is_some_and(|left| !left.is_zero()) {
            return;
        }
        self.retry_at.set(None);
        let mut refused = self.refused.borrow_mut();
        refused.retain(|thread| thread.start().is_err());
        if !refused.is_empty() {
            self.retry_later();
        }
    }

    fn retry_later(&self) {
        if self.retry_at.get().is_none() {
            self.retry_at.set(Some(Instant::now() + THREAD_RETRY));
        }
    }
}

/// Whether each send on a Unix socket may run the garbage collection of Unix sockets, or wait for it, also
/// with MSG_DONTWAIT (`wait_for_unix_gc`): before Linux 6.8, in which only senders of descriptors do.
fn sending_can_collect() -> bool {
    release() < (6, 8)
}

/// Sends eight bytes to a socket. Returns false if the system had no memory for it.
fn send(socket: BorrowedFd<'_>) -> bool {
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    let sent = rustix::net::send(socket, &1u64.to_ne_bytes(), flags);
    !matches!(sent, Err(Errno::NOBUFS | Errno::NOMEM | Errno::INTR))
}

impl Default for Notifier {
    fn default() -> Self {
        Notifier::new()
    }
}

#[cfg(test)]
mod tests;
