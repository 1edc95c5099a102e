//! Registers the waiters of an endpoint and wakes them when their sockets have events.
//!
//! # Invariants
//! When a thread releases the lock:
//! - each waiter of a socket that has an event was woken;
//! - the rings are armed if a waiter sleeps on them;
//! - a waiter on the rings wakes in time for the backend's next timer.
//!
//! # Kinds of waiters
//! Waiters on the rings sleep on the backend's descriptor: at most one thread (the sleeper),
//! pollers with an [`EventFd`] of their own, and an application that polls the endpoint's
//! descriptor. All other waiters, parked threads and tasks, sleep until the lock holder wakes them.
//! Threads and pollers are few: a linear search finds them. Tasks may be many: `tasks` has a map of
//! them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::descriptors::EventFd;
use super::lock::{Core, HubState, Locked};
use super::waiter::{Interest, Waiter, WaiterKind};

/// The backend has something to take in already: the caller must not sleep.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(crate) struct AlreadyReady;

impl Core {
    /// Wakes a waiter. `sleeper` is the ticket of the thread that sleeps on the backend's
    /// descriptor.
    pub(super) fn wake(&self, waiter: &Waiter, sleeper: Option<u64>) {
        match &waiter.kind {
            WaiterKind::Thread(_) if sleeper == Some(waiter.ticket) => self.waker.signal(),
            WaiterKind::Thread(thread) => thread.unpark(),
            WaiterKind::EventFd(event_fd) => event_fd.signal(),
            WaiterKind::Descriptor => self.event_fd.signal(),
        }
    }

    /// Wakes `task` once, at the next event of `interest`. The caller registers, then checks its
    /// socket, then returns `Pending`. `ticket` is the previous registration of the same future,
    /// 0 without one; the new ticket replaces it.
    #[cfg(feature = "tokio")]
    pub(crate) fn register_task(
        &self,
        ticket: &mut u64,
        interest: Interest,
        task: &std::task::Waker,
    ) {
        let mut locked = self.lock();
        let state = locked.state();
        // The rings may be armed for less than this waiter needs.
        state.armed = false;
        if state.tasks.update_waker(*ticket, task) {
            return;
        }
        state.tickets += 1;
        *ticket = state.tickets;
        state.tasks.add(*ticket, interest, task.clone());
    }

    /// Number of registered waiters.
    #[cfg(test)]
    pub(crate) fn waiters(&self) -> usize {
        let mut locked = self.lock();
        let state = locked.state();
        #[cfg(feature = "tokio")]
        let tasks = state.tasks.len();
        #[cfg(not(feature = "tokio"))]
        let tasks = 0;
        state.waiters.len() + tasks
    }
}

impl Locked<'_> {
    /// Registers the application's polling of the descriptor before a call answers `WouldBlock`.
    /// Returns whether the backend has something to take in already.
    pub(crate) fn watch_descriptor(&mut self) -> bool {
        let state = self.state();
        let known = state
            .waiters
            .iter()
            .find(|waiter| matches!(waiter.kind, WaiterKind::Descriptor));
        let ticket = match known {
            Some(waiter) => waiter.ticket,
            None => self.register(Interest::Anything, WaiterKind::Descriptor),
        };
        // An earlier event must not keep the descriptor readable.
        self.core.event_fd.clear();
        if self.rearm() {
            return true;
        }
        let until = self.backend().next_timeout();
        self.state().timer_fd.set(until);
        self.set_wake_time(ticket, until);
        false
    }

    /// As [`watch_descriptor`](Self::watch_descriptor); the descriptor is readable at once if the backend has
    /// something to take in already. Nothing more is to be had from an endpoint that has ended.
    pub(crate) fn arm_descriptor(&mut self) {
        if !self.is_over() && self.watch_descriptor() {
            self.core.event_fd.signal();
        }
    }

    /// Registers a poller that is about to sleep on [`Core::backend_fd`] and on `event_fd`, which
    /// it has cleared before, until an event of `interest`. Returns when the poller must drive the backend at the latest.
    ///
    /// # Errors
    /// When the backend has something to take in already.
    pub(crate) fn register_poller(
        &mut self,
        event_fd: &Arc<EventFd>,
        interest: Interest,
    ) -> Result<Option<Instant>, AlreadyReady> {
        self.deregister_poller(event_fd);
        if self.is_over() {
            return Ok(None);
        }
        let ticket = self.register(interest, WaiterKind::EventFd(event_fd.clone()));
        if self.rearm() {
            return Err(AlreadyReady);
        }
        let until = self.backend().next_timeout();
        self.set_wake_time(ticket, until);
        Ok(until)
    }

    /// Removes the poller that waits with `event_fd`.
    pub(crate) fn deregister_poller(&mut self, event_fd: &Arc<EventFd>) {
        let other = |waiter: &Waiter| !matches!(&waiter.kind, WaiterKind::EventFd(it) if Arc::ptr_eq(it, event_fd));
        self.state().waiters.retain(other);
    }

    /// Removes a reactor that polled with `event_fd`, and wakes all tasks: the first that runs
    /// starts another reactor, perhaps in another runtime.
    #[cfg(feature = "tokio")]
    pub(super) fn remove_reactor(&mut self, event_fd: &Arc<EventFd>) {
        self.deregister_poller(event_fd);
        self.state().tasks.wake_all();
    }

    /// Arms the rings again for a waiter that is about to sleep. Returns whether the backend has
    /// something to take in already.
    fn rearm(&mut self) -> bool {
        // Clears old notifications, unless the sleeper may not have seen them: it clears them.
        if self.state().sleeper.is_none() {
            self.disarm();
            let HubState {
                backend, events, ..
            } = self.state();
            // Waiting on an owned epoll descriptor cannot fail; if it does, the rings have the same
            // information.
            if events.wait(backend.fd(), Some(Duration::ZERO)).is_ok() {
                backend.handle_events(events);
            }
        }
        self.arm()
    }

    /// Arms the rings. Returns whether the backend has something to take in already.
    pub(super) fn arm(&mut self) -> bool {
        // No call may follow that takes dropped leases, and they may be what the thread waits for.
        self.core.leases.end_round();
        let state = self.state();
        state.armed = !state.backend.arm();
        !state.armed
    }

    pub(super) fn disarm(&mut self) {
        let state = self.state();
        state.armed = false;
        state.backend.disarm();
    }

    /// Records when a waiter wakes by itself.
    pub(super) fn set_wake_time(&mut self, ticket: u64, wakes_at: Option<Instant>) {
        let waiters = &mut self.state().waiters;
        if let Some(waiter) = waiters.iter_mut().find(|waiter| waiter.ticket == ticket) {
            waiter.wakes_at = wakes_at;
        }
    }

    pub(super) fn register(&mut self, interest: Interest, kind: WaiterKind) -> u64 {
        let state = self.state();
        // The rings may be armed for less than this waiter needs.
        state.armed = false;
        state.tickets += 1;
        let ticket = state.tickets;
        state.waiters.push(Waiter {
            ticket,
            interest,
            kind,
            wakes_at: None,
        });
        ticket
    }

    /// Removes a task.
    #[cfg(feature = "tokio")]
    pub(super) fn deregister_task(&mut self, ticket: u64) {
        self.state().tasks.remove(ticket);
    }

    pub(super) fn deregister(&mut self, ticket: u64) {
        let waiters = &mut self.state().waiters;
        if let Some(at) = waiters.iter().position(|waiter| waiter.ticket == ticket) {
            waiters.swap_remove(at);
        }
    }

    /// Wakes the waiters of all sockets that have events, and arms the rings again for the waiters
    /// that sleep on them.
    pub(super) fn notify_waiters(&mut self) {
        let core = self.core;
        if self.guard.as_ref().is_none_or(|state| !state.has_waiters()) {
            return;
        }
        for _ in 0..4 {
            self.wake_ready();
            let state = self.state();
            if !state.has_ring_waiter() {
                return;
            }
            let armed = state.armed && !state.backend.is_stale();
            if (armed || !self.arm()) && !self.ensure_timer_wakeup() {
                return;
            }
            // More has arrived: take it in, and wake its waiters too.
            if self.drive().is_err() {
                return;
            }
        }
        // The peer sends faster than this loop ends: the sleeping waiters take over.
        let state = self.state();
        let sleeper = state.sleeper;
        for waiter in &state.waiters {
            if waiter.waits_on_rings(sleeper) {
                core.wake(waiter, sleeper);
            }
        }
    }

    /// Wakes the waiters of all sockets that have events.
    pub(super) fn wake_ready(&mut self) {
        let core = self.core;
        let state = self.state();
        while let Some(ready) = state.backend.next_ready() {
            let sleeper = state.sleeper;
            let ready = Interest::from(ready);
            #[cfg(feature = "tokio")]
            for interest in [ready, Interest::Anything] {
                state.tasks.wake(interest);
            }
            state.waiters.retain(|waiter| {
                let woken = waiter.interest == ready || waiter.interest == Interest::Anything;
                if woken {
                    core.wake(waiter, sleeper);
                }
                !woken || matches!(waiter.kind, WaiterKind::Thread(_))
            });
        }
    }

    /// Returns whether a timer of the backend is due now. If it is due later, makes sure that one
    /// waiter on the rings wakes in time; the timer may have been set after that waiter slept.
    fn ensure_timer_wakeup(&mut self) -> bool {
        let core = self.core;
        let state = self.state();
        let Some(due) = state.backend.next_timeout() else {
            return false;
        };
        let sleeper = state.sleeper;
        let mut candidate: Option<&mut Waiter> = None;
        for waiter in &mut state.waiters {
            // An application that polls the descriptor may not call again: its time does not count.
            let is_reliable = !matches!(waiter.kind, WaiterKind::Descriptor);
            if !waiter.waits_on_rings(sleeper) {
                continue;
            }
            if is_reliable && waiter.wakes_at.is_some_and(|at| at <= due) {
                return false;
            }
            if candidate.is_none() || is_reliable {
                candidate = Some(waiter);
            }
        }
        if due <= Instant::now() {
            return true;
        }
        match candidate {
            Some(waiter) if matches!(waiter.kind, WaiterKind::Descriptor) => {
                waiter.wakes_at = Some(due);
                self.state().timer_fd.set(Some(due));
            }
            Some(waiter) => {
                // Once awake, it reads the new timer before it sleeps again.
                waiter.wakes_at = Some(due);
                core.wake(waiter, sleeper);
            }
            None => {}
        }
        false
    }

    /// Unparks one thread to become the sleeper, if there is none.
    pub(super) fn wake_next_sleeper(&mut self) {
        let state = self.state();
        if state.sleeper.is_none()
            && let Some(Waiter {
                kind: WaiterKind::Thread(thread),
                ..
            }) = state
                .waiters
                .iter()
                .find(|waiter| matches!(waiter.kind, WaiterKind::Thread(_)))
        {
            thread.unpark();
        }
    }
}

impl HubState {
    /// Whether any waiter is registered.
    #[inline]
    pub(super) fn has_waiters(&self) -> bool {
        #[cfg(feature = "tokio")]
        if !self.tasks.is_empty() {
            return true;
        }
        !self.waiters.is_empty()
    }

    /// Whether a waiter sleeps on the rings.
    fn has_ring_waiter(&self) -> bool {
        let sleeper = self.sleeper;
        self.waiters
            .iter()
            .any(|waiter| waiter.waits_on_rings(sleeper))
    }
}
