//! What all sockets of an endpoint share: its engine behind a lock, and those who wait.
//!
//! There is no thread here. The thread that calls does the work, for itself and for whoever else
//! waits:
//!
//! - every call takes the lock once, however many packets it moves;
//! - a call that has to wait spins, if it is told to, with the lock but giving way to whoever
//!   knocks; then it sleeps. The first sleeper sleeps on the engine's descriptor; the others, on
//!   nothing but being woken by whoever learns that something happened to their socket;
//! - a lease that is dropped needs no lock: it goes onto a stack ([`Leases`]) which whoever has the
//!   lock empties, and which whoever gives the lock back looks at once more.
//!
//! What must hold: nobody sleeps over news. A sleeper is enlisted, then the rings are armed, then
//! it sleeps; and whoever takes anything in meanwhile tells those that it concerns, and arms the
//! rings again for the one who sleeps on them.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::{self, Thread};
use std::time::Instant;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, epoll, eventfd, poll};
use zerosock_proto::Port;
use zerosock_ring::Trust;

use super::engine::{Engine, Fault, Stirred};
use super::leases::{Leases, NONE};
use super::sockets::StreamId;
use super::waiting::{Learned, Wait};
use crate::attach::Client;

/// Looks between two looks at the clock, while spinning.
const LOOKS: u32 = 64;
/// Calls in a row that find what they want without a turn of the engine.
const MOST_SKIPPED: u32 = 64;

/// What a waiter waits for.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(crate) enum Interest {
    Conn(StreamId),
    Port(Port),
    Anything,
}

impl Interest {
    fn covers(self, stirred: Stirred) -> bool {
        match (self, stirred) {
            (Interest::Conn(one), Stirred::Conn(other)) => one == other,
            (Interest::Port(one), Stirred::Port(other)) => one == other,
            (Interest::Anything, _) => true,
            _ => false,
        }
    }
}

/// How a wait goes on that finds nothing.
#[derive(Copy, Clone, Debug)]
pub(crate) struct Patience {
    /// `None`: it does not wait at all.
    pub(crate) wait: Option<Wait>,
    /// `None`: for ever.
    pub(crate) deadline: Option<Instant>,
}

/// Why a wait ended without what it waited for.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WaitFault {
    #[error("nothing there yet")]
    WouldBlock,
    #[error("nothing came in time")]
    TimedOut,
    #[error("the endpoint has failed: {0}")]
    Fault(String),
}

impl From<WaitFault> for io::Error {
    fn from(fault: WaitFault) -> io::Error {
        let kind = match fault {
            WaitFault::WouldBlock => io::ErrorKind::WouldBlock,
            WaitFault::TimedOut => io::ErrorKind::TimedOut,
            WaitFault::Fault(_) => io::ErrorKind::ConnectionAborted,
        };
        io::Error::new(kind, fault)
    }
}

/// Somebody to be told.
#[derive(Debug)]
struct Waiter {
    ticket: u64,
    interest: Interest,
    who: Who,
}

#[derive(Debug)]
enum Who {
    /// Sleeps in [`Core::wait`].
    Thread(Thread),
    /// A task of an executor; told once.
    #[cfg(feature = "tokio")]
    Task(std::task::Waker),
    /// Polls the descriptor, by [`AsFd`]; told once.
    Descriptor,
}

/// What the lock is about.
pub(crate) struct State {
    pub(crate) engine: Box<dyn Engine>,
    /// Whoever sleeps on the engine's descriptor, by ticket.
    sleeper: Option<u64>,
    waiters: Vec<Waiter>,
    tickets: u64,
    learned: Learned,
    /// Calls since the last turn that needed none.
    skipped: u32,
    /// The rings have been armed, and nothing was taken in since.
    armed: bool,
    /// The endpoint is over, and why.
    fault: Option<String>,
}

/// See the module.
pub(crate) struct Core {
    state: Mutex<State>,
    /// Threads that want the lock while somebody may be spinning with it.
    knocking: AtomicU32,
    leases: Arc<Leases>,
    /// Wakes the sleeper. Read by him alone: the engine's descriptor may be emptied by whoever
    /// turns the engine meanwhile.
    waker: OwnedFd,
    /// Tells those who poll from outside.
    bell: OwnedFd,
    /// What they poll: the engine's descriptor, and the bell.
    outside: OwnedFd,
    /// The engine's descriptor, once more: to be slept on without the lock.
    fd: OwnedFd,
    trust: Option<Trust>,
    /// Our place at an attach socket, if we have one: held as long as any of our sockets is.
    place: Option<Mutex<Client>>,
    /// The task that works for async sockets, while there are any.
    #[cfg(feature = "tokio")]
    reactor: Mutex<std::sync::Weak<super::tokio::Reactor>>,
    /// Connections from now on may have receive maps.
    rx_map: AtomicBool,
}

/// How a wait has gone so far.
#[derive(Debug, Default)]
struct Watch {
    /// The next turn is due even if nothing has come.
    look: bool,
    began: Option<Instant>,
    slept: bool,
    timed_out: bool,
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

/// The lock, taken. What was dropped before is given back at the beginning, and what was dropped
/// meanwhile at the end.
pub(crate) struct Locked<'a> {
    core: &'a Core,
    guard: Option<MutexGuard<'a, State>>,
}

impl Core {
    /// `trust`: the opener has declared it.
    pub(crate) fn new(
        engine: Box<dyn Engine>,
        trust: Option<Trust>,
        place: Option<Client>,
    ) -> io::Result<Core> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let bell = eventfd(0, flags)?;
        let outside = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let nothing = epoll::EventData::new_u64(0);
        epoll::add(&outside, &bell, nothing, epoll::EventFlags::IN)?;
        epoll::add(&outside, engine.fd(), nothing, epoll::EventFlags::IN)?;
        Ok(Core {
            waker: eventfd(0, flags)?,
            bell,
            outside,
            fd: engine.fd().try_clone_to_owned()?,
            leases: engine.words(),
            knocking: AtomicU32::new(0),
            trust,
            place: place.map(Mutex::new),
            #[cfg(feature = "tokio")]
            reactor: Mutex::default(),
            rx_map: AtomicBool::new(false),
            state: Mutex::new(State {
                engine,
                sleeper: None,
                waiters: Vec::new(),
                tickets: 0,
                learned: Learned::default(),
                skipped: 0,
                armed: false,
                fault: None,
            }),
        })
    }

    /// Our place at an attach socket, if we have one.
    pub(crate) fn place(&self) -> Option<MutexGuard<'_, Client>> {
        let place = self.place.as_ref()?;
        Some(place.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(crate) fn leases(&self) -> &Leases {
        &self.leases
    }

    pub(crate) fn trust(&self) -> Option<Trust> {
        self.trust
    }

    /// Whether connections from now on may have receive maps.
    pub(crate) fn set_rx_map(&self, enabled: bool) {
        self.rx_map.store(enabled, Ordering::Relaxed);
    }

    /// See [`set_rx_map`](Self::set_rx_map).
    pub(crate) fn rx_map(&self) -> bool {
        self.rx_map.load(Ordering::Relaxed)
    }

    /// Takes the lock.
    #[inline]
    pub(crate) fn lock(&self) -> Locked<'_> {
        let guard = match self.state.try_lock() {
            Ok(guard) => guard,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => self.knock(),
        };
        let mut locked = Locked {
            core: self,
            guard: Some(guard),
        };
        locked.collect();
        locked
    }

    #[cold]
    fn knock(&self) -> MutexGuard<'_, State> {
        self.knocking.fetch_add(1, Ordering::Relaxed);
        let guard = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        self.knocking.fetch_sub(1, Ordering::Relaxed);
        guard
    }

    /// A lease or a loan was dropped. Waits for nobody: if somebody has the lock, he sees to it.
    pub(crate) fn give_back(&self, index: u32) {
        self.leases.drop_one(index);
        self.collect();
    }

    /// Gives back what was dropped, unless somebody has the lock, who will.
    fn collect(&self) {
        while self.leases.any_dropped() {
            let guard = match self.state.try_lock() {
                Ok(guard) => guard,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                Err(TryLockError::WouldBlock) => return,
            };
            let mut locked = Locked {
                core: self,
                guard: Some(guard),
            };
            locked.collect();
            // A few buffers may wait until there are more; what the peer waits for may not.
            locked.engine().settle();
            locked.settle_waiters();
            // Without what `drop` does: this loop does it.
            locked.guard = None;
        }
    }

    /// Calls `attempt` until it has something, or fails; between two calls takes in what has come,
    /// and waits as `patience` says. `interest` is what `attempt` looks at. What `attempt` queues,
    /// it shows itself ([`Engine::flush`], [`Engine::settle`]).
    #[inline]
    pub(crate) fn wait<T>(
        &self,
        interest: Interest,
        patience: Patience,
        attempt: impl FnMut(&mut dyn Engine) -> Option<T>,
    ) -> Result<T, WaitFault> {
        let mut locked = Some(self.lock());
        self.wait_with(&mut locked, interest, patience, attempt)
    }

    /// As [`wait`](Core::wait), for one who has the lock already, and has it afterwards.
    #[inline]
    pub(crate) fn wait_with<'a, T>(
        &'a self,
        held: &mut Option<Locked<'a>>,
        interest: Interest,
        patience: Patience,
        mut attempt: impl FnMut(&mut dyn Engine) -> Option<T>,
    ) -> Result<T, WaitFault> {
        let locked = held.get_or_insert_with(|| self.lock());
        let mut watch = Watch::default();
        if locked.is_turn_due() {
            watch.look = true;
        } else if let Some(found) = attempt(locked.engine()) {
            return Ok(found);
        }
        let spins = patience.wait.filter(|wait| *wait != Wait::Sleep);
        loop {
            let locked = held.get_or_insert_with(|| self.lock());
            if let Some(wait) = spins.filter(|_| !watch.look) {
                // Who spins does so before anything dearer than a look, and first sees whether
                // the attempt finds what has come by itself.
                if !locked.spin(wait, patience.deadline, &mut watch) {
                    self.sleep(held, interest, patience.deadline, &mut watch);
                    continue;
                }
                if let Some(found) = attempt(locked.engine()) {
                    return Ok(found);
                }
            }
            watch.look = false;
            let busy = locked.turn()?;
            if let Some(found) = attempt(locked.engine()) {
                watch.learn(patience.wait, locked.state());
                return Ok(found);
            }
            if busy {
                // A peer can keep us busy with what is nothing to this call.
                watch.busy += 1;
                if !watch.busy.is_multiple_of(MOST_SKIPPED) {
                    continue;
                }
                if self.knocking.load(Ordering::Relaxed) > 0 {
                    locked.give_way();
                }
                if patience.wait.is_none() {
                    // Whoever polls is to come back.
                    ring(&self.bell);
                    return Err(WaitFault::WouldBlock);
                }
                if patience.deadline.is_none_or(|at| at > Instant::now()) {
                    continue;
                }
                watch.timed_out = true;
            }
            if watch.timed_out {
                return Err(WaitFault::TimedOut);
            }
            match patience.wait {
                None if locked.watch() => {}
                None => return Err(WaitFault::WouldBlock),
                Some(Wait::Sleep) => {
                    self.sleep(held, interest, patience.deadline, &mut watch);
                }
                Some(_) => {}
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
        let ticket = locked.enlist(interest, Who::Thread(thread::current()));
        if locked.state().sleeper.is_none() {
            if !locked.arm() {
                let until = match (deadline, locked.engine().next_timeout()) {
                    (Some(one), Some(other)) => Some(one.min(other)),
                    (one, other) => one.or(other),
                };
                locked.state().sleeper = Some(ticket);
                drop(locked);
                let slept = sleep_on([self.fd.as_fd(), self.waker.as_fd()], until);
                silence(&self.waker);
                locked = self.lock();
                locked.state().sleeper = None;
                if let Err(error) = slept {
                    locked.state().fault = Some(format!("cannot wait: {error}"));
                }
            }
            locked.state().armed = false;
            locked.engine().disarm();
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

    /// Where the task of async sockets is known.
    #[cfg(feature = "tokio")]
    pub(crate) fn reactor(&self) -> &Mutex<std::sync::Weak<super::tokio::Reactor>> {
        &self.reactor
    }

    /// Tells nobody of `interest` any more: its socket goes.
    #[cfg(feature = "tokio")]
    pub(crate) fn forget_tasks(&self, interest: Interest) {
        self.lock()
            .state()
            .waiters
            .retain(|waiter| waiter.interest != interest || !matches!(waiter.who, Who::Task(_)));
    }

    /// Tells `task` when something happens to `interest`. To be called before the last look.
    #[cfg(feature = "tokio")]
    pub(crate) fn enlist_task(&self, interest: Interest, task: &std::task::Waker) {
        let mut locked = self.lock();
        let state = locked.state();
        let known = state.waiters.iter().any(|waiter| {
            waiter.interest == interest
                && matches!(&waiter.who, Who::Task(known) if known.will_wake(task))
        });
        if !known {
            locked.enlist(interest, Who::Task(task.clone()));
        }
    }
}

impl Locked<'_> {
    fn state(&mut self) -> &mut State {
        // The guard is there until the drop.
        self.guard.as_mut().expect("the lock is held")
    }

    #[inline]
    pub(crate) fn engine(&mut self) -> &mut dyn Engine {
        &mut *self.state().engine
    }

    /// Gives back what was dropped.
    #[inline]
    fn collect(&mut self) {
        if !self.core.leases.any_dropped() {
            return;
        }
        let mut index = self.core.leases.take_dropped();
        while index != NONE {
            let next = self.core.leases.after(index);
            self.engine().give_back(index);
            index = next;
        }
    }

    /// Whether the engine is to work before the next attempt, although that may not need it: for
    /// what is due, and for everybody else.
    #[inline]
    fn is_turn_due(&mut self) -> bool {
        let state = self.state();
        state.skipped += 1;
        state.skipped > MOST_SKIPPED
    }

    /// Lets the engine work. True: something was taken in.
    pub(crate) fn turn(&mut self) -> Result<bool, WaitFault> {
        if let Some(fault) = &self.state().fault {
            return Err(WaitFault::Fault(fault.clone()));
        }
        self.state().skipped = 0;
        match self.engine().turn() {
            Ok(busy) => {
                // What was taken in was the news that the rings were armed for.
                self.state().armed &= !busy;
                Ok(busy)
            }
            Err(Fault(fault)) => {
                let core = self.core;
                let state = self.state();
                state.fault = Some(fault.clone());
                // Nobody else can hope for anything either.
                let sleeper = state.sleeper;
                for waiter in state.waiters.drain(..) {
                    waiter.who.tell(core, sleeper == Some(waiter.ticket));
                }
                Err(WaitFault::Fault(fault))
            }
        }
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
                    self.engine().settle();
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
            watch.look =
                watch.timed_out || self.engine().next_timeout().is_some_and(|at| at <= now);
            if watch.look {
                return true;
            }
            if budget.is_some_and(|budget| now.saturating_duration_since(began) >= budget) {
                return false;
            }
        }
    }

    /// Lets those who knock have the lock.
    #[cold]
    fn give_way(&mut self) {
        self.settle_waiters();
        self.guard = None;
        while self.core.knocking.load(Ordering::Relaxed) > 0 {
            thread::yield_now();
        }
        self.guard = Some(self.core.knock());
        self.collect();
    }

    /// Before a call says that it would block: the descriptor is to tell. True: something has come
    /// meanwhile.
    pub(crate) fn watch(&mut self) -> bool {
        let state = self.state();
        let watched = state
            .waiters
            .iter()
            .any(|waiter| matches!(waiter.who, Who::Descriptor));
        if !watched {
            self.enlist(Interest::Anything, Who::Descriptor);
        }
        // What was told before is forgotten, lest the descriptor stay readable.
        silence(&self.core.bell);
        if self.state().sleeper.is_none() {
            self.engine().disarm();
        }
        self.arm()
    }

    /// Asks to be told of what comes. True: something is there already.
    fn arm(&mut self) -> bool {
        let state = self.state();
        state.armed = !state.engine.arm();
        !state.armed
    }

    fn enlist(&mut self, interest: Interest, who: Who) -> u64 {
        let state = self.state();
        // What the rings were armed for may not be what this one waits for.
        state.armed = false;
        state.tickets += 1;
        let ticket = state.tickets;
        state.waiters.push(Waiter {
            ticket,
            interest,
            who,
        });
        ticket
    }

    fn delist(&mut self, ticket: u64) {
        let waiters = &mut self.state().waiters;
        if let Some(at) = waiters.iter().position(|waiter| waiter.ticket == ticket) {
            waiters.swap_remove(at);
        }
    }

    /// Tells those who wait what has happened to their sockets, and arms the rings again for the
    /// one who sleeps on them.
    fn settle_waiters(&mut self) {
        let core = self.core;
        if self
            .guard
            .as_ref()
            .is_none_or(|state| state.waiters.is_empty())
        {
            return;
        }
        for _ in 0..4 {
            let state = self.state();
            while let Some(stirred) = state.engine.next_stirred() {
                let sleeper = state.sleeper;
                state.waiters.retain(|waiter| {
                    let told = waiter.interest.covers(stirred);
                    if told {
                        waiter.who.tell(core, sleeper == Some(waiter.ticket));
                    }
                    !told || matches!(waiter.who, Who::Thread(_))
                });
            }
            let watched = state.sleeper.is_some()
                || state
                    .waiters
                    .iter()
                    .any(|waiter| matches!(waiter.who, Who::Descriptor));
            if !watched || state.armed || !self.arm() {
                return;
            }
            // Something has come: whoever it is for has to hear of it.
            if self.turn().is_err() {
                return;
            }
        }
        // There is no end to it: the sleeper may as well work too.
        ring(&core.waker);
        ring(&core.bell);
    }

    /// Whoever leaves without sleeping makes another one the sleeper.
    fn hand_over(&mut self) {
        let state = self.state();
        if state.sleeper.is_none()
            && let Some(Waiter {
                who: Who::Thread(thread),
                ..
            }) = state
                .waiters
                .iter()
                .find(|waiter| matches!(waiter.who, Who::Thread(_)))
        {
            thread.unpark();
        }
    }
}

impl Drop for Locked<'_> {
    #[inline]
    fn drop(&mut self) {
        let Some(state) = self.guard.as_mut() else {
            return;
        };
        if !state.waiters.is_empty() {
            self.settle_waiters();
            self.hand_over();
        }
        self.guard = None;
        if self.core.leases.any_dropped() {
            self.core.collect();
        }
    }
}

impl Who {
    fn tell(&self, core: &Core, asleep_on_descriptor: bool) {
        match self {
            Who::Thread(_) if asleep_on_descriptor => ring(&core.waker),
            Who::Thread(thread) => thread.unpark(),
            #[cfg(feature = "tokio")]
            Who::Task(task) => task.wake_by_ref(),
            Who::Descriptor => ring(&core.bell),
        }
    }
}

fn ring(waker: &OwnedFd) {
    // Non-blocking; a full counter is as readable as any.
    let _ = rustix::io::write(waker, &1u64.to_ne_bytes());
}

fn silence(bell: &OwnedFd) {
    // Non-blocking; one that did not ring has nothing to give.
    let _ = rustix::io::read(bell, &mut [0; 8]);
}

fn sleep_on(fds: [BorrowedFd<'_>; 2], until: Option<Instant>) -> io::Result<()> {
    let timeout = until.map(|at| {
        let left = at.saturating_duration_since(Instant::now());
        Timespec {
            tv_sec: left.as_secs() as i64,
            tv_nsec: left.subsec_nanos().into(),
        }
    });
    let mut fds = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
    match poll(&mut fds, timeout.as_ref()) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

impl std::fmt::Debug for Core {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Core").finish_non_exhaustive()
    }
}

impl AsFd for Core {
    /// Readable when something has happened after a call said that it would block.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.outside.as_fd()
    }
}
