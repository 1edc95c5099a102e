//! A sender that several threads use.
//!
//! The sender is behind a lock, which no thread holds while it waits. Of the waiting threads, one
//! waits for the kernel: the *kernel waiter*. The others wait on a condition variable until the
//! kernel waiter, or another thread that polls, has handled an event.
//!
//! # Invariants
//! A thread that causes an event that others wait for notifies them before it releases the lock.

use std::cell::Cell;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use super::readiness::Readiness;
use super::{
    Closed, Completion, NoSuchSlot, Notification, Outgoing, Refusal, Refused, Returned, Sender,
    SenderOpenError, SenderReport, SenderStats,
};
use crate::sys::{Buf, Stable};

/// A handle to a [`Sender`] that several threads share. Each clone has all functions of the sender.
///
/// Buffers, notifications and completions belong to the sender: the first thread that takes one has
/// it. Each thread should have a clone of its own: a handle remembers which events ended its last
/// [`wait`](Self::wait).
///
/// ```
/// use std::net::UdpSocket;
/// use std::thread;
/// use zerosock_zc::{Outgoing, Sender, SharedSender};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let (socket, peer) = (UdpSocket::bind("127.0.0.1:0")?, UdpSocket::bind("127.0.0.1:0")?);
/// socket.connect(peer.local_addr()?)?;
/// let sender: SharedSender = Sender::open(socket)?.into_shared()?;
/// thread::scope(|scope| {
///     for byte in 0..4 {
///         let sender = sender.clone();
///         scope.spawn(move || sender.send(Outgoing::new(vec![byte; 500])).map(drop));
///     }
/// });
/// sender.finish(None)?;
/// assert_eq!(sender.stats().bytes, 4 * 500);
/// # Ok(())
/// # }
/// ```
///
/// A forked child may drop its copies, which leaves the parent's as they are; it must not use them.
pub struct SharedSender<B: Stable = Buf> {
    shared: Arc<Shared<B>>,
    /// [`Sender::event_count`] at the end of the last wait on this handle.
    seen_events: AtomicU64,
}

struct Shared<B: Stable> {
    state: Mutex<State<B>>,
    /// Notified when the kernel waiter, or another thread that polls, has handled an event.
    event_handled: Condvar,
    readiness: Readiness,
    /// The descriptor for an event loop, created when one asks for it.
    events: OnceLock<Readiness>,
    /// A duplicate of the sender's socket, accessible without the lock.
    socket: OwnedFd,
}

struct State<B: Stable> {
    sender: Sender<B>,
    /// A thread waits for the kernel.
    has_kernel_waiter: bool,
    /// Number of threads that wait on `event_handled`.
    sleepers: usize,
}

impl<B: Stable> Clone for SharedSender<B> {
    fn clone(&self) -> Self {
        Self {
            shared: Arc::clone(&self.shared),
            seen_events: AtomicU64::new(self.seen_events.load(Relaxed)),
        }
    }
}

impl<B: Stable> Sender<B> {
    /// Makes the sender usable by several threads.
    ///
    /// # Errors
    /// If there are no more descriptors: three are needed. The sender is dropped then.
    pub fn into_shared(self) -> Result<SharedSender<B>, SenderOpenError> {
        let readiness = Readiness::of(self.as_fd()).map_err(SenderOpenError::Call)?;
        let socket = self
            .socket()
            .try_clone_to_owned()
            .map_err(SenderOpenError::Call)?;
        let state = State {
            sender: self,
            has_kernel_waiter: false,
            sleepers: 0,
        };
        Ok(SharedSender {
            shared: Arc::new(Shared {
                state: Mutex::new(state),
                event_handled: Condvar::new(),
                readiness,
                events: OnceLock::new(),
                socket,
            }),
            seen_events: AtomicU64::new(0),
        })
    }
}

impl<B: Stable> SharedSender<B> {
    /// As [`Sender::push`].
    ///
    /// # Errors
    /// As there.
    pub fn push(&self, outgoing: Outgoing<B>) -> Result<Option<u32>, Refused<B>> {
        self.with(|sender| sender.push(outgoing))
    }

    /// As [`Sender::submit`].
    ///
    /// # Errors
    /// As there.
    pub fn submit(&self) -> io::Result<()> {
        self.with(Sender::submit)
    }

    /// As [`Sender::send`]. Other threads can use the sender while this one waits for a place.
    ///
    /// # Errors
    /// As there.
    pub fn send(&self, outgoing: Outgoing<B>) -> Result<Option<u32>, Refused<B>> {
        let mut outgoing = outgoing;
        loop {
            let sent = self.with(|sender| {
                let number = sender.push(outgoing)?;
                // The send is accepted even if the call fails: the next submission repeats it.
                let _ = sender.submit();
                Ok(number)
            });
            match sent {
                Err(Refused {
                    outgoing: back,
                    why: Refusal::Full,
                }) => {
                    outgoing = back;
                    let may_retry = |sender: &Sender<B>| {
                        sender.room() > 0 || sender.is_closed() || sender.is_broken()
                    };
                    if let Err(error) = self.sleep(None, may_retry) {
                        let why = Refusal::Call(error);
                        return Err(Refused { outgoing, why });
                    }
                }
                result => return result,
            }
        }
    }

    /// As [`Sender::send_with`].
    ///
    /// # Errors
    /// As there.
    pub fn send_with(
        &self,
        outgoing: Outgoing<B>,
        room: &mut [Completion],
    ) -> Result<usize, Refused<B>> {
        if let Err(why) = self.with(|sender| sender.check_room(room)) {
            return Err(Refused { outgoing, why });
        }
        self.send(outgoing)?;
        Ok(self.with(|sender| sender.take_completions(room)))
    }

    /// As [`Sender::completions`].
    ///
    /// # Errors
    /// As there.
    pub fn completions(&self, room: &mut [Completion]) -> io::Result<usize> {
        self.with(|sender| sender.completions(room))
    }

    /// As [`Sender::poll`].
    ///
    /// # Errors
    /// As there.
    pub fn poll(&self) -> io::Result<()> {
        if let Some(events) = self.shared.events.get() {
            // Clears earlier events: later ones wake the event loop again.
            events.wait(Some(Duration::ZERO))?;
        }
        self.with(|sender| {
            sender.poll()?;
            match (sender.next_timeout(), self.shared.events.get()) {
                (Some(timeout), Some(events)) => events.wake_after(timeout),
                _ => Ok(()),
            }
        })
    }

    /// As [`Sender::returned`].
    #[must_use]
    pub fn returned(&self) -> Option<Returned<B>> {
        self.with(Sender::returned)
    }

    /// As [`Sender::notification`].
    #[must_use]
    pub fn notification(&self) -> Option<Notification> {
        self.with(Sender::notification)
    }

    /// As [`Sender::flush`].
    ///
    /// # Errors
    /// As there.
    pub fn flush(&self, slots: Range<u32>) -> Result<(), NoSuchSlot> {
        self.with(|sender| sender.flush(slots))
    }

    /// As [`Sender::set_tag`].
    ///
    /// # Errors
    /// As there.
    pub fn set_tag(&self, slot: u32, tag: u64) -> Result<(), NoSuchSlot> {
        self.with(|sender| sender.set_tag(slot, tag))
    }

    /// As [`Sender::wait`], for events since the last wait on this handle. Other threads can use
    /// the sender meanwhile.
    ///
    /// # Errors
    /// As there.
    pub fn wait(&self, timeout: Option<Duration>) -> io::Result<()> {
        let seen_events = self.seen_events.load(Relaxed);
        let events = Cell::new(seen_events);
        self.sleep(timeout, |sender| {
            events.set(sender.event_count());
            events.get() != seen_events || sender.is_quiet()
        })?;
        self.seen_events.store(events.get(), Relaxed);
        Ok(())
    }

    /// As [`Sender::finish`]. Other threads can use the sender meanwhile; their sends must finish
    /// as well.
    ///
    /// # Errors
    /// As there.
    pub fn finish(&self, timeout: Option<Duration>) -> io::Result<bool> {
        self.with(|sender| sender.flush_all());
        let holds_buffer = Cell::new(true);
        let quiet = self.sleep(timeout, |sender| {
            holds_buffer.set(sender.holds_buffer());
            sender.is_quiet()
        })?;
        Ok(quiet && !holds_buffer.get())
    }

    /// As [`Sender::cancel`].
    ///
    /// # Errors
    /// As there.
    pub fn cancel(&self) -> io::Result<()> {
        self.with(Sender::cancel)
    }

    /// As [`Sender::close`]. From now on no handle accepts sends ([`Refusal::Closed`]). The sends
    /// of all handles must finish within the timeout. The first call returns the buffers,
    /// notifications and completions. The connection ends now; the descriptor is closed with the
    /// last handle.
    pub fn close(&self, timeout: Option<Duration>) -> Closed<B> {
        {
            let mut state = self.lock();
            state.sender.begin_close();
            self.wake_sleepers(&state);
        }
        let waited = self.sleep(timeout, Sender::may_end);
        let mut state = self.lock();
        let closed = state.sender.end(waited);
        self.wake_sleepers(&state);
        closed
    }

    /// As [`Sender::is_quiet`].
    #[must_use]
    pub fn is_quiet(&self) -> bool {
        self.with(|sender| sender.is_quiet())
    }

    /// As [`Sender::room`]. Another thread can take the places before this one sends.
    #[must_use]
    pub fn room(&self) -> usize {
        self.with(|sender| sender.room())
    }

    /// As [`Sender::socket`].
    #[must_use]
    pub fn socket(&self) -> BorrowedFd<'_> {
        self.shared.socket.as_fd()
    }

    /// A descriptor for an event loop, shared by all handles. It is readable (EPOLLIN) when there
    /// may be an event, also one that another thread handled. The event loop then calls
    /// [`poll`](Self::poll) before it takes buffers and notifications.
    ///
    /// # Errors
    /// If there are no more descriptors, at the first call: two are needed.
    pub fn events(&self) -> io::Result<BorrowedFd<'_>> {
        let state = self.lock();
        let events = match self.shared.events.get() {
            Some(events) => events,
            None => {
                let made = Readiness::of(state.sender.as_fd())?;
                self.shared.events.get_or_init(|| made)
            }
        };
        // The event loop has not seen earlier events.
        events.wake();
        Ok(events.as_fd())
    }

    /// As [`Sender::report`].
    #[must_use]
    pub fn report(&self) -> SenderReport {
        self.with(|sender| sender.report())
    }

    /// As [`Sender::stats`].
    #[must_use]
    pub fn stats(&self) -> SenderStats {
        self.with(|sender| sender.stats())
    }

    /// Returns the sender, if this is the last handle to it.
    ///
    /// # Errors
    /// The handle, if there are others.
    pub fn into_inner(self) -> Result<Sender<B>, Self> {
        match Arc::try_unwrap(self.shared) {
            Ok(shared) => {
                let state = shared.state.into_inner();
                Ok(state.unwrap_or_else(PoisonError::into_inner).sender)
            }
            Err(shared) => Err(Self {
                shared,
                seen_events: self.seen_events,
            }),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State<B>> {
        // Use after a panic is sound: the sender still owns each buffer that the kernel reads.
        let state = self.shared.state.lock();
        state.unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls `act` with the lock held, and wakes the waiting threads if it caused an event.
    fn with<T>(&self, act: impl FnOnce(&mut Sender<B>) -> T) -> T {
        let mut state = self.lock();
        let before = state.sender.wake_state();
        let result = act(&mut state.sender);
        if state.sender.wake_state() != before {
            self.wake_sleepers(&state);
        }
        result
    }

    /// Wakes all waiting threads and the event loop.
    fn wake_sleepers(&self, state: &State<B>) {
        if state.sleepers > 0 {
            self.shared.event_handled.notify_all();
        }
        if state.has_kernel_waiter {
            self.shared.readiness.wake();
        }
        if let Some(events) = self.shared.events.get() {
            events.wake();
        }
    }

    /// Submits, polls and waits until `done`, or for `timeout`. Returns whether it is done.
    fn sleep(
        &self,
        timeout: Option<Duration>,
        done: impl Fn(&Sender<B>) -> bool,
    ) -> io::Result<bool> {
        let until = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let mut state = self.lock();
        loop {
            let before = state.sender.wake_state();
            let polled = state.sender.submit().and_then(|()| state.sender.poll());
            if state.sender.wake_state() != before {
                self.wake_sleepers(&state);
            }
            polled?;
            if done(&state.sender) {
                return Ok(true);
            }
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            if left == Some(Duration::ZERO) {
                return Ok(false);
            }
            state = match state.has_kernel_waiter {
                true => self.wait_for_handled_event(state, left),
                false => self.wait_for_kernel(state, left)?,
            };
        }
    }

    /// Waits until another thread has handled an event.
    fn wait_for_handled_event<'a>(
        &'a self,
        mut state: MutexGuard<'a, State<B>>,
        left: Option<Duration>,
    ) -> MutexGuard<'a, State<B>> {
        state.sleepers += 1;
        let event_handled = &self.shared.event_handled;
        let mut state = match left {
            Some(left) => match event_handled.wait_timeout(state, left) {
                Ok((state, _)) => state,
                Err(poisoned) => poisoned.into_inner().0,
            },
            None => event_handled
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner),
        };
        state.sleepers -= 1;
        state
    }

    /// Waits for an event of the kernel, on behalf of all waiting threads.
    fn wait_for_kernel<'a>(
        &'a self,
        mut state: MutexGuard<'a, State<B>>,
        left: Option<Duration>,
    ) -> io::Result<MutexGuard<'a, State<B>>> {
        state.has_kernel_waiter = true;
        let left = state.sender.next_timeout().into_iter().chain(left).min();
        drop(state);
        let waited = self.shared.readiness.wait(left);
        let mut state = self.lock();
        state.has_kernel_waiter = false;
        if state.sleepers > 0 {
            // One of them waits for the kernel next, unless this thread does so again.
            self.shared.event_handled.notify_all();
        }
        waited.map(|()| state)
    }
}

impl<B: Stable> std::fmt::Debug for SharedSender<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("SharedSender")
            .field(&self.lock().sender)
            .finish()
    }
}
