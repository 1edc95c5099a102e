//! The lock of an endpoint: what it protects, and what happens when it is taken and released.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use zerosock_proto::Port;
use zerosock_proto::vsock::datagram::DatagramId;
use zerosock_ring::Trust;
use zerosock_sys::{OwnerGuard, OwnerLock};

use super::background::Background;
use super::descriptors::{EventFd, SleepWaker, TimerFd, epoll_of};
#[cfg(test)]
use super::hook;
#[cfg(feature = "tokio")]
use super::reactor::Reactor;
#[cfg(feature = "tokio")]
use super::tasks;
use super::wait_budget::WaitFault;
use super::waiter::Waiter;
use crate::control::attach::Client;
use crate::table::backend::{Backend, EndpointStats};
use crate::table::leases::{Leases, NONE};
use crate::table::over::EndpointEnded;
use crate::table::sockets::StreamId;
use crate::vsock::options::DEFAULT_BUFFER;
use crate::vsock::waiting::SpinTime;
use zerosock_virtio::poller::Events;

/// What the lock protects.
pub(crate) struct HubState {
    pub(crate) backend: Box<dyn Backend>,
    /// Ticket of the thread that sleeps on the backend's descriptor.
    pub(super) sleeper: Option<u64>,
    pub(super) waiters: Vec<Waiter>,
    #[cfg(feature = "tokio")]
    pub(super) tasks: tasks::Tasks,
    /// The last ticket given to a waiter; 0 is never given.
    pub(super) tickets: u64,
    pub(super) spin_time: SpinTime,
    /// Consecutive calls that found what they wanted without a turn of the backend.
    pub(super) skipped: u32,
    /// The rings are armed, and the backend has taken nothing in since.
    pub(super) armed: bool,
    /// Events of the last wait; kept to reuse its allocation.
    pub(super) events: Events,
    /// Times that a thread slept on the backend's descriptor.
    pub(super) sleeps: u64,
    /// Makes `poll_fd` readable when a backend timer is due.
    pub(super) timer_fd: TimerFd,
    /// Why the endpoint has failed.
    pub(super) fault: Option<EndpointEnded>,
}

/// An endpoint's shared state; see the module.
pub(crate) struct Core {
    pub(super) state: OwnerLock<HubState>,
    /// What the lock holder has dropped, to be closed when it releases the lock.
    pub(super) deferred_closes: Mutex<Vec<DeferredClose>>,
    /// `deferred_closes` is not empty.
    pub(super) has_deferred_closes: AtomicBool,
    pub(super) leases: Arc<Leases>,
    /// Wakes the sleeper. Only the sleeper clears it; a notification would not do, because any
    /// thread that drives the backend may clear it.
    pub(super) waker: SleepWaker,
    /// Makes `poll_fd` readable when a socket has an event.
    pub(super) event_fd: EventFd,
    /// The descriptor that an application polls: an epoll instance of the backend's descriptor,
    /// `event_fd` and `timer_fd`.
    pub(super) poll_fd: OwnedFd,
    /// A duplicate of the backend's descriptor, to be waited on without the lock.
    pub(super) backend_fd: OwnedFd,
    pub(super) trust: Option<Trust>,
    /// The connection to the attach socket, if the endpoint has one. The attachment ends when the
    /// last socket of the endpoint is dropped.
    pub(super) attach_client: Option<Mutex<Client>>,
    /// The task that drives the endpoint for async sockets, while there are any.
    #[cfg(feature = "tokio")]
    pub(super) reactor: Mutex<std::sync::Weak<Reactor>>,
    /// The thread that drives the endpoint, if it was asked for.
    pub(super) background: OnceLock<Background>,
    /// Later connections may have receive maps.
    pub(super) rx_map: AtomicBool,
    /// Default receive buffer of a connection, in bytes.
    pub(super) window: AtomicU32,
    /// Called once, before the lock is released the next time.
    #[cfg(test)]
    pub(super) before_release: hook::Hook,
}

/// The held lock. Taking it returns leases dropped before; releasing it returns those dropped
/// since.
pub(crate) struct Locked<'a> {
    pub(super) core: &'a Core,
    pub(super) guard: Option<OwnerGuard<'a, HubState>>,
    /// Buffers were returned to the backend and may not have been published to the peer.
    pub(super) has_returned: bool,
}

/// What is to be closed because its owner was dropped.
#[derive(Debug)]
pub(crate) enum DeferredClose {
    Stream(StreamId),
    /// Reset a connection.
    Reset(StreamId),
    Listener(Port),
    /// Release a bound port.
    Port(Port),
    Datagram(DatagramId),
    /// Deregister the task with this ticket.
    #[cfg(feature = "tokio")]
    Task(u64),
    /// Deregister the reactor that polls this eventfd: its task has ended.
    #[cfg(feature = "tokio")]
    EventFd(Arc<EventFd>),
}

impl Core {
    /// `trust`: what the application has declared. `attach_client`: its attach connection, if any.
    ///
    /// # Errors
    /// When the system has no descriptor left.
    pub(crate) fn new(
        backend: Box<dyn Backend>,
        trust: Option<Trust>,
        attach_client: Option<Client>,
    ) -> io::Result<Core> {
        let event_fd = EventFd::new()?;
        let timer_fd = TimerFd::new()?;
        let poll_fd = epoll_of([event_fd.as_fd(), timer_fd.as_fd(), backend.fd()])?;
        Ok(Core {
            waker: SleepWaker::new(backend.fd())?,
            event_fd,
            poll_fd,
            backend_fd: backend.fd().try_clone_to_owned()?,
            leases: backend.lease_table(),
            deferred_closes: Mutex::default(),
            has_deferred_closes: AtomicBool::new(false),
            trust,
            attach_client: attach_client.map(Mutex::new),
            #[cfg(feature = "tokio")]
            reactor: Mutex::default(),
            background: OnceLock::new(),
            rx_map: AtomicBool::new(false),
            window: AtomicU32::new(DEFAULT_BUFFER),
            #[cfg(test)]
            before_release: hook::Hook::default(),
            state: OwnerLock::new(HubState {
                backend,
                sleeper: None,
                waiters: Vec::new(),
                #[cfg(feature = "tokio")]
                tasks: tasks::Tasks::default(),
                tickets: 0,
                spin_time: SpinTime::default(),
                skipped: 0,
                armed: false,
                events: Events::default(),
                sleeps: 0,
                timer_fd,
                fault: None,
            }),
        })
    }

    /// The connection to the attach socket, if the endpoint has one.
    pub(crate) fn attach_client(&self) -> Option<MutexGuard<'_, Client>> {
        let attach_client = self.attach_client.as_ref()?;
        Some(attach_client.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(crate) fn leases(&self) -> &Leases {
        &self.leases
    }

    pub(crate) fn trust(&self) -> Option<Trust> {
        self.trust
    }

    /// Sets whether later connections may have receive maps.
    pub(crate) fn set_rx_map(&self, enabled: bool) {
        self.rx_map.store(enabled, Ordering::Relaxed);
    }

    /// See [`set_rx_map`](Self::set_rx_map).
    pub(crate) fn rx_map(&self) -> bool {
        self.rx_map.load(Ordering::Relaxed)
    }

    /// Default receive buffer of a connection, in bytes.
    pub(crate) fn window(&self) -> u32 {
        self.window.load(Ordering::Relaxed)
    }

    /// See [`window`](Self::window).
    pub(crate) fn set_window(&self, bytes: u32) {
        self.window.store(bytes, Ordering::Relaxed);
    }

    /// Keeps the handle of the thread that drives the endpoint.
    pub(crate) fn set_background(&self, background: Background) {
        // An endpoint starts at most one.
        let _ = self.background.set(background);
    }

    /// Takes the lock. Panics if this thread holds it already.
    #[inline(always)] // saves a copy of the guard
    pub(crate) fn lock(&self) -> Locked<'_> {
        let mut locked = self.try_lock().unwrap_or_else(|| self.lock_contended());
        locked.return_dropped();
        locked
    }

    #[cold]
    fn lock_contended(&self) -> Locked<'_> {
        assert!(
            !self.is_held_by_this_thread(),
            "a thread called an endpoint from inside another call of it: from its recv_each \
             callback, or while its Batch is alive"
        );
        Locked::new(self, self.state.lock_contended())
    }

    /// Whether this thread holds the lock.
    pub(crate) fn is_held_by_this_thread(&self) -> bool {
        self.state.is_held_by_this_thread()
    }

    /// Closes what a dropped value owned: now, or if this thread holds the lock, when it releases
    /// the lock.
    pub(crate) fn close_deferred(&self, close: DeferredClose) {
        if self.is_held_by_this_thread() {
            let deferred_closes = self.deferred_closes.lock();
            deferred_closes
                .unwrap_or_else(PoisonError::into_inner)
                .push(close);
            self.has_deferred_closes.store(true, Ordering::Relaxed);
        } else {
            self.lock().close_deferred(&close);
        }
    }

    /// Returns the buffer of a dropped lease or loan to the backend. Does not block: if another
    /// thread holds the lock, that thread returns it.
    pub(crate) fn return_buffer(&self, index: u32) {
        if index == NONE {
            return;
        }
        let Some(mut locked) = self.try_lock() else {
            self.leases.push_dropped(index);
            return self.return_dropped();
        };
        // Last lent first, as `return_buffers`; the stack is for threads that find the lock taken.
        locked.has_returned = true;
        locked.backend().handle_dropped(index);
        locked.return_dropped();
    }

    /// Returns a dropped lease: at once, or if it is of the present round
    /// ([`Leases::round`]), with the next call of the endpoint.
    #[inline]
    pub(crate) fn return_lease(&self, index: u32, round: Option<u32>) {
        match round {
            None => self.return_buffer(index),
            Some(round) => {
                if self.leases.push_of_round(index, round) {
                    self.return_dropped();
                }
            }
        }
    }

    /// Takes the lock if no thread holds it.
    #[inline(always)] // as `lock`
    fn try_lock(&self) -> Option<Locked<'_>> {
        Some(Locked::new(self, self.state.try_lock()?))
    }

    /// As [`return_buffer`](Self::return_buffer), for several buffers in the order they were lent.
    pub(crate) fn return_buffers(&self, indices: impl Iterator<Item = u32>) {
        // The stack reverses them: last lent first, the order in which the backend can un-pop them.
        self.leases.push_all_dropped(indices);
        self.return_dropped();
    }

    /// A reader or writer of leased memory has finished its access.
    #[inline]
    pub(crate) fn end_access(&self, index: u32) {
        if self.leases.leave(index) {
            self.return_dropped();
        }
    }

    /// Returns dropped leases, unless another thread holds the lock: that thread returns them when
    /// it releases the lock.
    pub(super) fn return_dropped(&self) {
        if self.leases.any_dropped()
            && let Some(mut locked) = self.try_lock()
        {
            locked.return_dropped();
        }
    }

    /// Whether leases were dropped, or sockets by this thread, while this thread held the lock.
    #[inline]
    fn has_work_after_unlock(&self) -> bool {
        self.leases.any_dropped_after_unlock() || self.has_deferred_closes.load(Ordering::Relaxed)
    }

    /// The task that drives the endpoint for async sockets.
    #[cfg(feature = "tokio")]
    pub(crate) fn reactor(&self) -> &Mutex<std::sync::Weak<Reactor>> {
        &self.reactor
    }

    /// Readable when the backend has work. Polled by waiters that have an [`EventFd`] of their own.
    pub(crate) fn backend_fd(&self) -> BorrowedFd<'_> {
        self.backend_fd.as_fd()
    }
}

impl<'a> Locked<'a> {
    #[inline]
    fn new(core: &'a Core, guard: OwnerGuard<'a, HubState>) -> Locked<'a> {
        Locked {
            core,
            guard: Some(guard),
            has_returned: false,
        }
    }

    pub(super) fn state(&mut self) -> &mut HubState {
        // `yield_lock` and `drop` alone take the guard.
        self.guard.as_mut().expect("the lock is held")
    }

    #[inline]
    pub(crate) fn backend(&mut self) -> &mut dyn Backend {
        &mut *self.state().backend
    }

    /// Returns the buffers of dropped leases to the backend.
    #[inline]
    pub(super) fn return_dropped(&mut self) {
        if self.core.leases.any_dropped() {
            self.return_all_dropped();
        }
    }

    #[inline(never)]
    fn return_all_dropped(&mut self) {
        self.has_returned = true;
        let mut index = self.core.leases.take_dropped();
        while index != NONE {
            let next = self.core.leases.next_dropped(index);
            self.backend().handle_dropped(index);
            index = next;
        }
    }

    /// What is due before the lock is released.
    #[inline]
    fn finish(&mut self) {
        self.run_deferred_closes();
        if self.has_returned {
            self.publish_returned();
        }
        if self.state().has_waiters() {
            self.notify_waiters();
            self.wake_next_sleeper();
        }
        #[cfg(test)]
        self.core.before_release.call();
    }

    /// Takes the lock again for what was dropped while it was held, unless another thread has it:
    /// that thread sees to it.
    #[cold]
    fn finish_again(&mut self) {
        while self.core.has_work_after_unlock() {
            self.guard = self.core.state.try_lock();
            if self.guard.is_none() {
                return;
            }
            self.return_dropped();
            self.finish();
            self.guard = None;
        }
    }

    /// Publishes returned buffers to the peer: at once if the peer may be waiting for them,
    /// otherwise in batches.
    #[inline]
    pub(super) fn publish_returned(&mut self) {
        self.has_returned = false;
        self.backend().flush_after_read();
    }

    /// Closes what this thread dropped while it held the lock.
    #[inline]
    pub(super) fn run_deferred_closes(&mut self) {
        if self.core.has_deferred_closes.load(Ordering::Relaxed) {
            self.close_all_deferred();
        }
    }

    #[cold]
    fn close_all_deferred(&mut self) {
        self.core
            .has_deferred_closes
            .store(false, Ordering::Relaxed);
        let deferred_closes = self.core.deferred_closes.lock();
        let deferred_closes =
            std::mem::take(&mut *deferred_closes.unwrap_or_else(PoisonError::into_inner));
        for close in &deferred_closes {
            self.close_deferred(close);
        }
    }

    fn close_deferred(&mut self, close: &DeferredClose) {
        match close {
            DeferredClose::Stream(id) => self.backend().close(*id),
            DeferredClose::Reset(id) => self.backend().abort(*id),
            DeferredClose::Listener(port) => self.backend().unlisten(*port),
            DeferredClose::Port(port) => return self.backend().unbind(*port),
            DeferredClose::Datagram(id) => {
                if let Some(datagrams) = self.backend().datagrams() {
                    datagrams.close(*id);
                }
            }
            #[cfg(feature = "tokio")]
            DeferredClose::Task(ticket) => return self.deregister_task(*ticket),
            #[cfg(feature = "tokio")]
            DeferredClose::EventFd(event_fd) => return self.remove_reactor(event_fd),
        }
        self.backend().flush();
    }

    /// Drives the backend once. Returns whether it took anything in.
    pub(crate) fn drive(&mut self) -> Result<bool, WaitFault> {
        if let Some(fault) = &self.state().fault {
            return Err(WaitFault::Fault(fault.clone()));
        }
        self.state().skipped = 0;
        match self.backend().drive() {
            Ok(busy) => {
                // Taking something in uses up the notification that the rings were armed for.
                self.state().armed &= !busy;
                Ok(busy)
            }
            Err(fault) => {
                self.fail(fault.clone());
                Err(WaitFault::Fault(fault))
            }
        }
    }

    /// Marks the endpoint as failed and wakes all waiters.
    pub(super) fn fail(&mut self, fault: EndpointEnded) {
        let core = self.core;
        let state = self.state();
        state.fault = Some(fault);
        let sleeper = state.sleeper;
        for waiter in state.waiters.drain(..) {
            core.wake(&waiter, sleeper);
        }
        #[cfg(feature = "tokio")]
        state.tasks.wake_all();
    }

    /// Counters since the endpoint was opened.
    pub(crate) fn stats(&mut self) -> EndpointStats {
        let state = self.state();
        EndpointStats {
            sleeps: state.sleeps,
            ..state.backend.stats()
        }
    }

    /// Whether the endpoint has failed: received data can still be read, no more will arrive.
    pub(crate) fn is_over(&mut self) -> bool {
        self.state().fault.is_some()
    }
}

impl Drop for Locked<'_> {
    #[inline]
    fn drop(&mut self) {
        self.finish();
        self.guard = None;
        if self.core.has_work_after_unlock() {
            self.finish_again();
        }
    }
}

impl std::fmt::Debug for Core {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Core").finish_non_exhaustive()
    }
}

impl AsFd for Core {
    /// Readable when an event has occurred since a call answered `WouldBlock`.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.poll_fd.as_fd()
    }
}
