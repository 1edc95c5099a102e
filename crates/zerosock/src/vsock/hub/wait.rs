//! How a call waits: it tries, lets the engine work, spins or sleeps, and tries again.
//!
//! What must hold: a call that was told to wait a certain time, or not at all, keeps to it, however
//! busy a peer keeps the engine; who spins with the lock gives it to whoever knocks.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, poll};

use super::waiters::{Interest, WaiterKind};
use super::{Core, Locked, State, me};
use crate::fault::Fault as Blame;
use crate::io::deadline::earlier;
use crate::io::deadline::timespec;
use crate::table::backend::Backend;
use crate::table::over::EndpointOver;
use crate::vsock::waiting::Wait;

/// Looks between two looks at the clock, while spinning.
const LOOKS: u32 = 64;
/// Calls in a row that find what they want without a turn of the engine.
const MOST_SKIPPED: u32 = 64;

/// What a call does that finds nothing.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(crate) enum WaitMode {
    /// It waits.
    Waits(Wait),
    /// It says so; the descriptor tells when it is worth another try.
    Polls,
    /// It says so; its task is enlisted, or will be before it tries again.
    #[cfg(feature = "tokio")]
    Told,
}

/// How a wait goes on that finds nothing.
#[derive(Copy, Clone, Debug)]
pub(crate) struct WaitBudget {
    pub(crate) mode: WaitMode,
    /// `None`: for ever.
    pub(crate) deadline: Option<Instant>,
}

impl WaitBudget {
    fn wait(self) -> Option<Wait> {
        match self.mode {
            WaitMode::Waits(wait) => Some(wait),
            _ => None,
        }
    }
}

/// Why a wait ended without what it waited for.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WaitFault {
    #[error("nothing there yet")]
    WouldBlock,
    #[error("nothing came in time")]
    TimedOut,
    #[error(transparent)]
    Fault(EndpointOver),
}

impl From<WaitFault> for io::Error {
    fn from(fault: WaitFault) -> io::Error {
        let kind = match fault {
            WaitFault::WouldBlock => io::ErrorKind::WouldBlock,
            WaitFault::TimedOut => io::ErrorKind::TimedOut,
            WaitFault::Fault(over) => return over.into(),
        };
        io::Error::new(kind, fault)
    }
}

/// How a wait has gone so far.
#[derive(Debug, Default)]
struct Watch {
    /// The next turn is due even if nothing has come.
    look: bool,
    began: Option<Instant>,
    slept: bool,
    timed_out: bool,
    /// Looks at the clock.
    clocks: u32,
    /// Turns that took something in, but nothing for this call.
    busy: u32,
}

impl Watch {
    fn learn(&self, wait: Option<Wait>, state: &mut State) {
        if let (Some(wait @ Wait::Adaptive { .. }), Some(began), true) =
            (wait, self.began, self.slept)
        {
            let waited = Instant::now().saturating_duration_since(began);
            state.learned.learn(wait, waited, true);
        }
    }
}

impl Core {
    /// Calls `attempt` until it has something, or fails; between two calls takes in what has come,
    /// and waits as `budget` says. `interest` is what `attempt` looks at. What `attempt` queues,
    /// it shows itself ([`Backend::flush`], [`Backend::flush_after_read`]).
    #[inline]
    pub(crate) fn wait<T>(
        &self,
        interest: Interest,
        budget: WaitBudget,
        attempt: impl FnMut(&mut dyn Backend) -> Option<T>,
    ) -> Result<T, WaitFault> {
        let mut locked = Some(self.lock());
        self.wait_with(&mut locked, interest, budget, attempt)
    }

    /// As [`wait`](Core::wait), for one who has the lock already, and has it afterwards.
    #[inline]
    pub(crate) fn wait_with<'a, T>(
        &'a self,
        held: &mut Option<Locked<'a>>,
        interest: Interest,
        budget: WaitBudget,
        mut attempt: impl FnMut(&mut dyn Backend) -> Option<T>,
    ) -> Result<T, WaitFault> {
        let locked = held.get_or_insert_with(|| self.lock());
        let mut watch = Watch::default();
        if locked.is_turn_due() {
            watch.look = true;
        } else if let Some(found) = attempt(locked.engine()) {
            return Ok(found);
        }
        let spins = budget.wait().filter(|wait| *wait != Wait::Sleep);
        loop {
            let locked = held.get_or_insert_with(|| self.lock());
            if let Some(wait) = spins.filter(|_| !watch.look) {
                // WaiterKind spins does so before anything dearer than a look, and first sees whether
                // the attempt finds what has come by itself.
                if !locked.spin(wait, budget.deadline, &mut watch) {
                    self.sleep(held, interest, budget.deadline, &mut watch);
                    continue;
                }
                if let Some(found) = attempt(locked.engine()) {
                    return Ok(found);
                }
            }
            watch.look = false;
            let turned = locked.turn();
            if let Some(found) = attempt(locked.engine()) {
                watch.learn(budget.wait(), locked.state());
                return Ok(found);
            }
            // What had come before the end was there to be found.
            if turned? {
                // A peer can keep us busy with what is nothing to this call.
                watch.busy = watch.busy.wrapping_add(1);
                if !watch.busy.is_multiple_of(MOST_SKIPPED) {
                    continue;
                }
                if self.knocking.load(Ordering::Relaxed) > 0 {
                    locked.give_way();
                }
                if budget.mode == WaitMode::Polls {
                    // Whoever polls is to come back.
                    self.event_fd.ring();
                }
                if budget.wait().is_none() {
                    return Err(WaitFault::WouldBlock);
                }
                if budget.deadline.is_none_or(|at| at > Instant::now()) {
                    continue;
                }
                watch.timed_out = true;
            }
            if watch.timed_out {
                return Err(WaitFault::TimedOut);
            }
            match budget.mode {
                WaitMode::Polls if locked.watch() => {}
                WaitMode::Polls => return Err(WaitFault::WouldBlock),
                #[cfg(feature = "tokio")]
                WaitMode::Told => return Err(WaitFault::WouldBlock),
                WaitMode::Waits(Wait::Sleep) => {
                    self.sleep(held, interest, budget.deadline, &mut watch);
                }
                WaitMode::Waits(_) => {}
            }
        }
    }

    /// Sleeps until something happens that may concern `interest`.
    fn sleep<'a>(
        &'a self,
        held: &mut Option<Locked<'a>>,
        interest: Interest,
        deadline: Option<Instant>,
        watch: &mut Watch,
    ) {
        let mut locked = held.take().unwrap_or_else(|| self.lock());
        watch.look = true;
        watch.slept = true;
        watch.began.get_or_insert_with(Instant::now);
        let ticket = locked.enlist(interest, WaiterKind::Thread(thread::current()));
        if locked.state().sleeper.is_none() {
            if !locked.arm() {
                let until = earlier(deadline, locked.engine().next_timeout());
                locked.state().sleeper = Some(ticket);
                locked.comes(ticket, until);
                drop(locked);
                let slept = sleep_on([self.fd.as_fd(), self.waker.as_fd()], until);
                self.waker.silence();
                locked = self.lock();
                locked.state().sleeper = None;
                if let Err(error) = slept {
                    let why = format!("cannot wait: {error}");
                    locked.fail(EndpointOver::new(Blame::System, why));
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
        locked.delist(ticket);
        watch.timed_out = deadline.is_some_and(|at| at <= Instant::now());
        *held = Some(locked);
    }
}

impl Locked<'_> {
    /// Whether the engine is to work before the next attempt, although that may not need it: for
    /// what is due, and for everybody else.
    #[inline]
    fn is_turn_due(&mut self) -> bool {
        let state = self.state();
        state.skipped += 1;
        state.skipped > MOST_SKIPPED
    }

    /// Looks for something to take in, until the time to spin is over. False: it is.
    #[inline]
    fn spin(&mut self, wait: Wait, deadline: Option<Instant>, watch: &mut Watch) -> bool {
        let budget = self.state().learned.budget(wait);
        if budget.is_some_and(|budget| budget.is_zero()) {
            return false;
        }
        loop {
            for _ in 0..LOOKS {
                if self.engine().pending() {
                    return true;
                }
                if self.core.leases.any_dropped() {
                    self.collect();
                    self.settle();
                }
                if self.core.knocking.load(Ordering::Relaxed) > 0 {
                    self.give_way();
                    return true;
                }
                std::hint::spin_loop();
            }
            // The clock is dearer than many looks: short waits never see it.
            let now = Instant::now();
            let began = *watch.began.get_or_insert(now);
            watch.timed_out = deadline.is_some_and(|at| at <= now);
            // What no look shows, such as a device that has hung up, turns find now and then.
            watch.clocks = watch.clocks.wrapping_add(1);
            watch.look = watch.timed_out
                || watch.clocks.is_multiple_of(LOOKS)
                || self.engine().next_timeout().is_some_and(|at| at <= now);
            if watch.look {
                return true;
            }
            if budget.is_some_and(|budget| now.saturating_duration_since(began) >= budget) {
                return false;
            }
        }
    }

    /// Lets those who lock_contended have the lock.
    #[cold]
    fn give_way(&mut self) {
        self.end_all();
        self.settle_waiters();
        self.release();
        while self.core.knocking.load(Ordering::Relaxed) > 0 {
            thread::yield_now();
        }
        self.guard = Some(self.core.lock_contended());
        self.core.owner.store(me(), Ordering::Relaxed);
        self.collect();
        self.end_all();
    }
}

fn sleep_on(fds: [BorrowedFd<'_>; 2], until: Option<Instant>) -> io::Result<()> {
    let timeout = until.map(|at| timespec(at.saturating_duration_since(Instant::now())));
    let mut fds = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
    match poll(&mut fds, timeout.as_ref()) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}
