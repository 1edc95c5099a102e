//! Blocks a call: it attempts, drives the backend, spins or sleeps, and attempts again.
//!
//! # Invariants
//! - A call keeps to its deadline, and a non-blocking call does not block, however much a peer
//!   sends.
//! - A call that spins with the lock yields it to threads that want it.

use std::thread;
use std::time::{Duration, Instant};

use super::lock::{Core, HubState, Locked};
use super::wait_budget::{WaitBudget, WaitFault, WaitMode};
use super::waiter::{Interest, WaiterKind};
use crate::fault::Fault;
use crate::table::backend::Backend;
use crate::table::over::EndpointEnded;
use crate::vsock::waiting::Wait;
use zerosock_sys::OwnerGuard;
use zerosock_virtio::deadline::earlier;
use zerosock_virtio::poller::wait_for_event;

/// Checks of the backend between two readings of the clock, while spinning.
const CHECKS_PER_CLOCK: u32 = 64;
/// Turns between two readings of the clock.
const TURNS_PER_CLOCK: u32 = 64;
/// Most consecutive calls that are served without a turn of the backend.
const MAX_SKIPPED_TURNS: u32 = 64;

/// The progress of one wait.
#[derive(Debug, Default)]
struct WaitProgress {
    /// Turn the backend next, even if it shows nothing to take in.
    turn_due: bool,
    began: Option<Instant>,
    slept: bool,
    timed_out: bool,
    /// Readings of the clock.
    clock_reads: u32,
    /// Turns that brought nothing for this call.
    turns: u32,
}

impl WaitProgress {
    fn record(&self, wait: Option<Wait>, state: &mut HubState) {
        if let (Some(wait @ Wait::Adaptive { .. }), Some(began), true) =
            (wait, self.began, self.slept)
        {
            let waited = Instant::now().saturating_duration_since(began);
            state.spin_time.record(wait, waited, true);
        }
    }
}

impl Core {
    /// Calls `attempt` until it returns `Some`; between two attempts drives the backend and waits
    /// within the budget, for which it asks when the first attempt has failed. `interest` names the
    /// socket of `attempt`. `attempt` publishes what it queues ([`Backend::flush`]).
    ///
    /// # Errors
    /// When `budget` does not allow more waiting, or the endpoint has failed.
    #[inline]
    pub(crate) fn wait<T>(
        &self,
        interest: Interest,
        budget: impl FnOnce() -> WaitBudget,
        attempt: impl FnMut(&mut dyn Backend) -> Option<T>,
    ) -> Result<T, WaitFault> {
        self.wait_and(false, interest, budget, attempt)
    }

    /// As [`wait`](Core::wait), for an attempt that returns received buffers to the backend: when it has
    /// succeeded, they are published together with those of dropped leases.
    ///
    /// # Errors
    /// As there.
    #[inline]
    pub(crate) fn wait_to_read<T>(
        &self,
        interest: Interest,
        budget: impl FnOnce() -> WaitBudget,
        attempt: impl FnMut(&mut dyn Backend) -> Option<T>,
    ) -> Result<T, WaitFault> {
        self.wait_and(true, interest, budget, attempt)
    }

    /// `returns`: an attempt that succeeds returns buffers and does not publish them.
    #[inline]
    fn wait_and<T>(
        &self,
        returns: bool,
        interest: Interest,
        budget: impl FnOnce() -> WaitBudget,
        mut attempt: impl FnMut(&mut dyn Backend) -> Option<T>,
    ) -> Result<T, WaitFault> {
        let mut locked = self.lock();
        let mut progress = WaitProgress::default();
        if locked.is_turn_due() {
            progress.turn_due = true;
        } else if let Some(found) = attempt(locked.backend()) {
            locked.has_returned |= returns;
            return Ok(found);
        }
        let mut held = Some(locked);
        let found = self.wait_on(&mut held, interest, budget(), progress, &mut attempt);
        if let (Ok(_), Some(locked)) = (&found, &mut held) {
            locked.has_returned |= returns;
        }
        found
    }

    /// As [`wait`](Core::wait), for a caller that holds the lock before and after. Its first attempt
    /// has failed.
    pub(crate) fn wait_with<'a, T>(
        &'a self,
        held: &mut Option<Locked<'a>>,
        interest: Interest,
        budget: WaitBudget,
        mut attempt: impl FnMut(&mut dyn Backend) -> Option<T>,
    ) -> Result<T, WaitFault> {
        let progress = WaitProgress::default();
        self.wait_on(held, interest, budget, progress, &mut attempt)
    }

    /// Turns the backend, or waits, until an attempt succeeds.
    #[inline(never)]
    fn wait_on<'a, T>(
        &'a self,
        held: &mut Option<Locked<'a>>,
        interest: Interest,
        budget: WaitBudget,
        mut progress: WaitProgress,
        attempt: &mut dyn FnMut(&mut dyn Backend) -> Option<T>,
    ) -> Result<T, WaitFault> {
        let spins = budget.wait().filter(|wait| *wait != Wait::Sleep);
        loop {
            let locked = held.get_or_insert_with(|| self.lock());
            if let Some(wait) = spins.filter(|_| !progress.turn_due) {
                // Spinning comes first: it is cheaper than a turn. The attempt may find what has
                // arrived without a turn.
                locked.backend().flush_before_spin();
                if !locked.spin(wait, budget.deadline, &mut progress) {
                    self.sleep(held, interest, budget.deadline, &mut progress);
                    continue;
                }
                if let Some(found) = attempt(locked.backend()) {
                    return Ok(found);
                }
            }
            progress.turn_due = false;
            let turned = locked.drive();
            if let Some(found) = attempt(locked.backend()) {
                progress.record(budget.wait(), locked.state());
                return Ok(found);
            }
            // Only now: data that arrived before the failure was offered to the attempt.
            let is_busy = turned?;
            progress.turns = progress.turns.wrapping_add(1);
            if progress.turns.is_multiple_of(TURNS_PER_CLOCK) {
                // A peer can give the backend work without end, for other sockets than this call's.
                if self.state.is_contended() {
                    locked.yield_lock();
                }
                if budget.mode == WaitMode::Poll {
                    // The application must call again: more may be there.
                    self.event_fd.signal();
                }
                if budget.wait().is_none() {
                    return Err(WaitFault::WouldBlock);
                }
                if budget.deadline.is_none_or(|at| at > Instant::now()) {
                    continue;
                }
                progress.timed_out = true;
            } else if is_busy {
                continue;
            }
            if progress.timed_out {
                return Err(WaitFault::TimedOut);
            }
            match budget.mode {
                WaitMode::Poll if locked.watch_descriptor() => {}
                WaitMode::Poll => return Err(WaitFault::WouldBlock),
                #[cfg(feature = "tokio")]
                WaitMode::Task => return Err(WaitFault::WouldBlock),
                WaitMode::Block(Wait::Sleep) => {
                    self.sleep(held, interest, budget.deadline, &mut progress);
                }
                WaitMode::Block(_) => {}
            }
        }
    }

    /// Sleeps until an event that may concern `interest`, a timer of the backend, or `deadline`.
    fn sleep<'a>(
        &'a self,
        held: &mut Option<Locked<'a>>,
        interest: Interest,
        deadline: Option<Instant>,
        progress: &mut WaitProgress,
    ) {
        let mut locked = held.take().unwrap_or_else(|| self.lock());
        progress.turn_due = true;
        progress.slept = true;
        progress.began.get_or_insert_with(Instant::now);
        // The attempt has just failed, with the lock held since: what has changed until now concerns
        // other waiters only.
        locked.wake_ready();
        let ticket = locked.register(interest, WaiterKind::Thread(thread::current()));
        if locked.state().sleeper.is_none() {
            if !locked.arm() {
                let until = earlier(deadline, locked.backend().next_timeout());
                locked.set_wake_time(ticket, until);
                let state = locked.state();
                state.sleeper = Some(ticket);
                state.sleeps += 1;
                let mut events = std::mem::take(&mut state.events);
                let takes_later = state.backend.reuses_names();
                drop(locked);
                let left = until.map(|at| at.saturating_duration_since(Instant::now()));
                // One system call sleeps and takes the events, unless they must be taken under the lock.
                let mut slept = match takes_later {
                    true => wait_for_event(&self.backend_fd, left),
                    false => events.wait(&self.backend_fd, left),
                };
                locked = self.lock();
                if takes_later && slept.is_ok() {
                    slept = events.wait(&self.backend_fd, Some(Duration::ZERO));
                }
                self.waker.clear();
                let state = locked.state();
                state.sleeper = None;
                state.backend.handle_events(&events);
                state.events = events;
                if let Err(error) = slept {
                    let why = format!("cannot wait: {error}");
                    locked.fail(EndpointEnded::new(Fault::System, why));
                }
            }
            locked.disarm();
        } else {
            drop(locked);
            match deadline {
                Some(at) => thread::park_timeout(at.saturating_duration_since(Instant::now())),
                None => thread::park(),
            }
            locked = self.lock();
        }
        locked.deregister(ticket);
        progress.timed_out = deadline.is_some_and(|at| at <= Instant::now());
        *held = Some(locked);
    }
}

impl Locked<'_> {
    /// Whether to drive the backend before the next attempt, for timers and for other sockets.
    #[inline]
    fn is_turn_due(&mut self) -> bool {
        let state = self.state();
        state.skipped += 1;
        state.skipped > MAX_SKIPPED_TURNS
    }

    /// Spins until the backend has something to take in or a turn is due. Returns false when the
    /// spin time is used up.
    #[inline]
    fn spin(&mut self, wait: Wait, deadline: Option<Instant>, progress: &mut WaitProgress) -> bool {
        let budget = self.state().spin_time.budget(wait);
        if budget.is_some_and(|budget| budget.is_zero()) {
            return false;
        }
        loop {
            for _ in 0..CHECKS_PER_CLOCK {
                if self.backend().pending() {
                    return true;
                }
                if self.core.leases.any_dropped() {
                    self.return_dropped();
                    self.publish_returned();
                }
                if self.core.state.is_contended() {
                    self.yield_lock();
                    return true;
                }
                std::hint::spin_loop();
            }
            // Reading the clock costs more than many checks: short waits never do.
            let now = Instant::now();
            let began = *progress.began.get_or_insert(now);
            progress.timed_out = deadline.is_some_and(|at| at <= now);
            // Only a turn finds what the check does not show, such as a device that has hung up.
            progress.clock_reads = progress.clock_reads.wrapping_add(1);
            progress.turn_due = progress.timed_out
                || progress.clock_reads.is_multiple_of(CHECKS_PER_CLOCK)
                || self.backend().next_timeout().is_some_and(|at| at <= now);
            if progress.turn_due {
                return true;
            }
            if budget.is_some_and(|budget| now.saturating_duration_since(began) >= budget) {
                return false;
            }
        }
    }

    /// Yields the lock to the threads that want it.
    #[cold]
    fn yield_lock(&mut self) {
        self.run_deferred_closes();
        self.notify_waiters();
        self.guard = self.guard.take().map(OwnerGuard::yield_to_waiters);
        self.return_dropped();
        self.run_deferred_closes();
    }
}
