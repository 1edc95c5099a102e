//! A thread of one peer, which writes to its descriptors and may wait there.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::Builder;

use crate::peer_fd::PeerFd;

/// Threads of one peer at a time: the one of its session, and those of earlier sessions that still
/// wait in a write.
const MAX_THREADS: usize = 4;
/// Bytes of stack.
const STACK: usize = 128 << 10;

/// The peer has as many threads as it may.
#[derive(Copy, Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("{MAX_THREADS} threads of this peer still wait to write to its earlier descriptors")]
pub struct TooManyThreads;

/// What a [`CallThread`] writes to.
#[derive(Clone, Debug)]
pub(super) struct Target(Arc<TargetState>);

#[derive(Debug)]
struct TargetState {
    fd: PeerFd,
    /// It waits to be written to.
    queued: AtomicBool,
}

impl Target {
    pub(super) fn new(fd: PeerFd) -> Target {
        Target(Arc::new(TargetState {
            fd,
            queued: AtomicBool::new(false),
        }))
    }
}

impl AsFd for Target {
    #[inline]
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.fd.as_fd()
    }
}

/// A thread that writes to the descriptors of one peer's session, started when it is needed. Clones
/// are the same one. It ends when the last clone is dropped, as soon as its write returns.
#[derive(Clone)]
pub struct CallThread(Arc<Handle>);

/// Dropped with the last clone; the thread itself holds the work only.
struct Handle {
    work: Arc<Work>,
    /// Threads of this peer, of all its sessions.
    threads: Arc<AtomicUsize>,
}

#[derive(Default)]
struct Work {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Target>,
    running: bool,
    ended: bool,
}

/// Counts the threads of one peer, of all its sessions.
#[derive(Clone, Debug, Default)]
pub struct ThreadCount(Arc<AtomicUsize>);

impl CallThread {
    /// A thread for one session of the peer that `count` belongs to. It does not run yet.
    pub fn new(count: &ThreadCount) -> CallThread {
        CallThread(Arc::new(Handle {
            work: Arc::default(),
            threads: Arc::clone(&count.0),
        }))
    }

    /// Makes sure that the thread runs.
    ///
    /// # Errors
    /// [`TooManyThreads`], or what the system says when it has no thread to give.
    pub(super) fn start(&self) -> io::Result<()> {
        let mut state = self.0.work.lock();
        if state.running {
            return Ok(());
        }
        if self.0.threads.fetch_add(1, Ordering::Relaxed) >= MAX_THREADS {
            self.0.threads.fetch_sub(1, Ordering::Relaxed);
            return Err(io::Error::other(TooManyThreads));
        }
        let (work, threads) = (Arc::clone(&self.0.work), Arc::clone(&self.0.threads));
        let thread = Builder::new().name("zerosock-call".into());
        let started = thread.stack_size(STACK).spawn(move || {
            block_sigpipe();
            work.run();
            threads.fetch_sub(1, Ordering::Relaxed);
        });
        if let Err(error) = started {
            self.0.threads.fetch_sub(1, Ordering::Relaxed);
            return Err(error);
        }
        state.running = true;
        Ok(())
    }

    /// Has the thread write to `target`. One that waits already is written to once for both.
    ///
    /// # Errors
    /// As [`start`](Self::start). The target then waits until the thread is started.
    pub(super) fn write(&self, target: &Target) -> io::Result<()> {
        if target.0.queued.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        let work = &self.0.work;
        work.lock().queue.push_back(target.clone());
        self.start()?;
        work.changed.notify_one();
        Ok(())
    }

    pub(super) fn downgrade(&self) -> WeakCallThread {
        WeakCallThread(Arc::downgrade(&self.0))
    }
}

/// A [`CallThread`] that ends all the same.
#[derive(Clone)]
pub(super) struct WeakCallThread(Weak<Handle>);

impl WeakCallThread {
    /// As [`CallThread::start`]. One that has ended needs no start.
    pub(super) fn start(&self) -> io::Result<()> {
        match self.0.upgrade() {
            Some(handle) => CallThread(handle).start(),
            None => Ok(()),
        }
    }
}

impl fmt::Debug for WeakCallThread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("WeakCallThread")
    }
}

impl fmt::Debug for CallThread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let running = self.0.work.lock().running;
        f.debug_struct("CallThread")
            .field("running", &running)
            .finish()
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.work.lock().ended = true;
        self.work.changed.notify_one();
    }
}

/// Keeps a write to a pipe or socket without a reader from ending a process with the default disposition
/// of SIGPIPE. The signal of such a write goes to the thread that makes it: it stays pending there.
fn block_sigpipe() {
    // SAFETY: the set is initialized by sigemptyset(3) before it is used, and lives during all three
    // calls. Only the mask of this thread changes.
    unsafe {
        let mut signals = std::mem::zeroed();
        libc::sigemptyset(&mut signals);
        libc::sigaddset(&mut signals, libc::SIGPIPE);
        libc::pthread_sigmask(libc::SIG_BLOCK, &signals, std::ptr::null_mut());
    }
}

impl Work {
    fn lock(&self) -> MutexGuard<'_, State> {
        // No write is made under the lock; the state is whole at every step.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        let mut state = self.lock();
        loop {
            if let Some(target) = state.queue.pop_front() {
                drop(state);
                // Before the write, so that what happens during it leads to another one.
                target.0.queued.store(false, Ordering::Release);
                let _ = rustix::io::write(&target, &1u64.to_ne_bytes());
                drop(target);
                state = self.lock();
            } else if state.ended {
                return;
            } else {
                let woken = self.changed.wait(state);
                state = woken.unwrap_or_else(PoisonError::into_inner);
            }
        }
    }
}
