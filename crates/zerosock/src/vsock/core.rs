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
//! rings again for those who sleep on them. Nor does anybody sleep over a timer: it is known when
//! each of them wakes of himself, and whoever leaves a timer that is due earlier wakes one. A
//! thread that has the lock does not wait for it: such a call panics, and what it drops ends later.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, epoll, eventfd, poll};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, timerfd_create, timerfd_settime,
};
use zerosock_proto::Port;
use zerosock_ring::Trust;

use super::engine::{Engine, Stirred};
use super::errors::EndpointOver;
use super::leases::{Leases, NONE};
use super::sockets::StreamId;
use super::waiting::{Learned, Wait};
use crate::attach::{Client, Fault as Blame};
use crate::driver::timespec;

/// Looks between two looks at the clock, while spinning.
const LOOKS: u32 = 64;
/// The shortest time that a timer can be set to.
const TICK: Duration = Duration::from_nanos(1);
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

/// What a call does that finds nothing.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(crate) enum Manner {
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
pub(crate) struct Patience {
    pub(crate) manner: Manner,
    /// `None`: for ever.
    pub(crate) deadline: Option<Instant>,
}

impl Patience {
    fn wait(self) -> Option<Wait> {
        match self.manner {
            Manner::Waits(wait) => Some(wait),
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

/// Somebody to be told.
#[derive(Debug)]
struct Waiter {
    ticket: u64,
    interest: Interest,
    who: Who,
    /// When he comes of himself and lets the engine work.
    until: Option<Instant>,
}

/// What one who polls many things at once is told by, beside the engine's own descriptor.
#[derive(Debug)]
pub(crate) struct Bell(OwnedFd);

#[derive(Debug)]
enum Who {
    /// Sleeps in [`Core::wait`].
    Thread(Thread),
    /// A task of an executor; told once.
    #[cfg(feature = "tokio")]
    Task(std::task::Waker),
    /// Polls the engine's descriptor, and a bell that nobody else silences; told once.
    Bell(Arc<Bell>),
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
    /// When the alarm goes off.
    alarm: Option<Instant>,
    /// The endpoint is over, and why.
    fault: Option<EndpointOver>,
}

/// See the module.
pub(crate) struct Core {
    state: Mutex<State>,
    /// The thread that has the lock, by [`me`]; 0: none. A thread finds itself here only if it
    /// has the lock: it alone writes its own number, and takes it away before it gives the lock
    /// back.
    owner: AtomicUsize,
    /// Threads that want the lock while somebody may be spinning with it.
    knocking: AtomicU32,
    /// What the thread that has the lock has dropped meanwhile, and whether there is any.
    endings: Mutex<Vec<Ending>>,
    has_endings: AtomicBool,
    leases: Arc<Leases>,
    /// Wakes the sleeper. Read by him alone: the engine's descriptor may be emptied by whoever
    /// turns the engine meanwhile.
    waker: Bell,
    /// Tells who polls from outside.
    bell: Bell,
    /// Goes off when the engine has something to do of itself and nobody else comes for it.
    alarm: OwnedFd,
    /// What is polled from outside: the engine's descriptor, the bell, the alarm.
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

/// Something has come: there is no sleeping over it.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(crate) struct Come;

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

/// The lock, taken. What was dropped before is given back at the beginning, and what was dropped
/// meanwhile at the end.
pub(crate) struct Locked<'a> {
    core: &'a Core,
    guard: Option<MutexGuard<'a, State>>,
    /// Something was given back, and may not have been shown.
    collected: bool,
}

/// What is to end, because its owner was dropped.
#[derive(Debug)]
pub(crate) enum Ending {
    Stream(StreamId),
    Listener(Port),
    /// Whoever was enlisted by this ticket is told no more.
    #[cfg(feature = "tokio")]
    Task(u64),
    #[cfg(feature = "tokio")]
    Bell(Arc<Bell>),
}

/// A number that no other living thread has; never 0.
#[inline]
fn me() -> usize {
    thread_local! {
        static HERE: u8 = const { 0 };
    }
    HERE.with(|here| std::ptr::from_ref(here).addr())
}

impl Core {
    /// `trust`: the opener has declared it.
    pub(crate) fn new(
        engine: Box<dyn Engine>,
        trust: Option<Trust>,
        place: Option<Client>,
    ) -> io::Result<Core> {
        let bell = Bell::new()?;
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let alarm = timerfd_create(TimerfdClockId::Monotonic, flags)?;
        let outside = any_of([bell.0.as_fd(), alarm.as_fd(), engine.fd()])?;
        Ok(Core {
            waker: Bell::new()?,
            bell,
            alarm,
            outside,
            fd: engine.fd().try_clone_to_owned()?,
            leases: engine.words(),
            owner: AtomicUsize::new(0),
            knocking: AtomicU32::new(0),
            endings: Mutex::default(),
            has_endings: AtomicBool::new(false),
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
                alarm: None,
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
        let mut locked = Locked::new(self, guard);
        locked.collect();
        locked
    }

    #[cold]
    fn knock(&self) -> MutexGuard<'_, State> {
        assert!(
            !self.is_mine(),
            "a call of an endpoint by a thread that is in one already: its recv_each is still \
             showing packets, or its Batch is still alive"
        );
        self.knocking.fetch_add(1, Ordering::Relaxed);
        let guard = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        self.knocking.fetch_sub(1, Ordering::Relaxed);
        guard
    }

    /// Whether this thread has the lock.
    fn is_mine(&self) -> bool {
        self.owner.load(Ordering::Relaxed) == me()
    }

    /// The owner of a socket was dropped. If this thread has the lock, the socket ends when that
    /// is given back.
    pub(crate) fn end(&self, ending: Ending) {
        if self.is_mine() {
            let endings = self.endings.lock();
            endings.unwrap_or_else(PoisonError::into_inner).push(ending);
            self.has_endings.store(true, Ordering::Relaxed);
        } else {
            self.lock().end(&ending);
        }
    }

    /// A lease or a loan was dropped. Waits for nobody: if somebody has the lock, he sees to it.
    pub(crate) fn give_back(&self, index: u32) {
        self.leases.drop_one(index);
        self.collect();
    }

    /// Whoever read or wrote leased memory does so no more.
    #[inline]
    pub(crate) fn leave(&self, index: u32) {
        if self.leases.leave(index) {
            self.collect();
        }
    }

    /// Gives back what was dropped, unless somebody has the lock, who will.
    fn collect(&self) {
        let mut more = self.leases.any_dropped();
        while more {
            let guard = match self.state.try_lock() {
                Ok(guard) => guard,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                Err(TryLockError::WouldBlock) => return,
            };
            let mut locked = Locked::new(self, guard);
            locked.collect();
            locked.settle();
            locked.settle_waiters();
            // Without what `drop` does: this loop does it.
            locked.release();
            more = self.leases.any_dropped_meanwhile();
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
        let spins = patience.wait().filter(|wait| *wait != Wait::Sleep);
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
            let turned = locked.turn();
            if let Some(found) = attempt(locked.engine()) {
                watch.learn(patience.wait(), locked.state());
                return Ok(found);
            }
            // What had come before the end was there to be found.
            if turned? {
                // A peer can keep us busy with what is nothing to this call.
                watch.busy += 1;
                if !watch.busy.is_multiple_of(MOST_SKIPPED) {
                    continue;
                }
                if self.knocking.load(Ordering::Relaxed) > 0 {
                    locked.give_way();
                }
                if patience.manner == Manner::Polls {
                    // Whoever polls is to come back.
                    self.bell.ring();
                }
                if patience.wait().is_none() {
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
            match patience.manner {
                Manner::Polls if locked.watch() => {}
                Manner::Polls => return Err(WaitFault::WouldBlock),
                #[cfg(feature = "tokio")]
                Manner::Told => return Err(WaitFault::WouldBlock),
                Manner::Waits(Wait::Sleep) => {
                    self.sleep(held, interest, patience.deadline, &mut watch);
                }
                Manner::Waits(_) => {}
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
                let until = earlier(deadline, locked.engine().next_timeout());
                locked.state().sleeper = Some(ticket);
                locked.comes(ticket, until);
                drop(locked);
                let slept = sleep_on([self.fd.as_fd(), self.waker.0.as_fd()], until);
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

    /// Where the task of async sockets is known.
    #[cfg(feature = "tokio")]
    pub(crate) fn reactor(&self) -> &Mutex<std::sync::Weak<super::tokio::Reactor>> {
        &self.reactor
    }

    /// Readable when the engine has something: what those poll who have a [`Bell`].
    pub(crate) fn engine_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Tells `task` when something happens to `interest`, once. To be called before the last look.
    /// `ticket` is what the same place was enlisted by before, 0 for never, and is replaced.
    #[cfg(feature = "tokio")]
    pub(crate) fn enlist_task(
        &self,
        ticket: &mut u64,
        interest: Interest,
        task: &std::task::Waker,
    ) {
        let mut locked = self.lock();
        let waiters = &mut locked.state().waiters;
        let known = waiters.iter_mut().find(|waiter| waiter.ticket == *ticket);
        if let Some(Waiter {
            who: Who::Task(known),
            ..
        }) = known
        {
            known.clone_from(task);
            return;
        }
        *ticket = locked.enlist(interest, Who::Task(task.clone()));
    }

    /// Those who are to be told of something.
    #[cfg(test)]
    pub(crate) fn waiters(&self) -> usize {
        self.lock().state().waiters.len()
    }
}

impl<'a> Locked<'a> {
    #[inline]
    fn new(core: &'a Core, guard: MutexGuard<'a, State>) -> Locked<'a> {
        core.owner.store(me(), Ordering::Relaxed);
        Locked {
            core,
            guard: Some(guard),
            collected: false,
        }
    }

    /// Gives the lock back as it is.
    #[inline]
    fn release(&mut self) {
        if let Some(guard) = self.guard.take() {
            self.core.owner.store(0, Ordering::Relaxed);
            drop(guard);
        }
    }

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
        self.collected = true;
        let mut index = self.core.leases.take_dropped();
        while index != NONE {
            let next = self.core.leases.after(index);
            self.engine().give_back(index);
            index = next;
        }
    }

    /// Shows what was given back: a few buffers may wait until there are more, what the peer waits
    /// for may not.
    fn settle(&mut self) {
        self.collected = false;
        self.engine().settle();
    }

    /// Ends what was dropped while this thread had the lock.
    #[cold]
    fn end_all(&mut self) {
        self.core.has_endings.store(false, Ordering::Relaxed);
        let endings = self.core.endings.lock();
        let endings = std::mem::take(&mut *endings.unwrap_or_else(PoisonError::into_inner));
        for ending in &endings {
            self.end(ending);
        }
    }

    fn end(&mut self, ending: &Ending) {
        match ending {
            Ending::Stream(id) => self.engine().close(*id),
            Ending::Listener(port) => self.engine().unlisten(*port),
            #[cfg(feature = "tokio")]
            Ending::Task(ticket) => return self.delist(*ticket),
            #[cfg(feature = "tokio")]
            Ending::Bell(bell) => return self.unwatch(bell),
        }
        self.engine().flush();
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
            Err(fault) => {
                self.fail(fault.clone());
                Err(WaitFault::Fault(fault))
            }
        }
    }

    /// The endpoint is over. Nobody can hope for anything any more.
    fn fail(&mut self, fault: EndpointOver) {
        let core = self.core;
        let state = self.state();
        state.fault = Some(fault);
        let sleeper = state.sleeper;
        for waiter in state.waiters.drain(..) {
            waiter.who.tell(core, sleeper == Some(waiter.ticket));
        }
    }

    /// Whether the endpoint is over: what is there can be read, and nothing will come.
    pub(crate) fn is_over(&mut self) -> bool {
        self.state().fault.is_some()
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
            watch.clocks += 1;
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

    /// Lets those who knock have the lock.
    #[cold]
    fn give_way(&mut self) {
        self.settle_waiters();
        self.release();
        while self.core.knocking.load(Ordering::Relaxed) > 0 {
            thread::yield_now();
        }
        self.guard = Some(self.core.knock());
        self.core.owner.store(me(), Ordering::Relaxed);
        self.collect();
    }

    /// Before a call says that it would block: the descriptor is to tell. True: something has come
    /// meanwhile.
    pub(crate) fn watch(&mut self) -> bool {
        let state = self.state();
        let known = state
            .waiters
            .iter()
            .find(|waiter| matches!(waiter.who, Who::Descriptor));
        let ticket = match known {
            Some(waiter) => waiter.ticket,
            None => self.enlist(Interest::Anything, Who::Descriptor),
        };
        // What was told before is forgotten, lest the descriptor stay readable.
        self.core.bell.silence();
        if self.is_come() {
            return true;
        }
        let until = self.engine().next_timeout();
        self.set_alarm(until);
        self.comes(ticket, until);
        false
    }

    /// For one who is about to sleep on [`Core::engine_fd`] and `bell`, which he has silenced
    /// before. Answers when he has to
    /// come of himself.
    ///
    /// # Errors
    /// When something has come meanwhile.
    pub(crate) fn watch_by(&mut self, bell: &Arc<Bell>) -> Result<Option<Instant>, Come> {
        self.unwatch(bell);
        if self.is_over() {
            return Ok(None);
        }
        let ticket = self.enlist(Interest::Anything, Who::Bell(bell.clone()));
        if self.is_come() {
            return Err(Come);
        }
        let until = self.engine().next_timeout();
        self.comes(ticket, until);
        Ok(until)
    }

    /// Rings `bell` no more.
    pub(crate) fn unwatch(&mut self, bell: &Arc<Bell>) {
        let other =
            |waiter: &Waiter| !matches!(&waiter.who, Who::Bell(it) if Arc::ptr_eq(it, bell));
        self.state().waiters.retain(other);
    }

    /// Arms the rings anew for one who is about to sleep. True: something has come meanwhile.
    fn is_come(&mut self) -> bool {
        // What was told before is forgotten, too. Not what the sleeper was told: he forgets it.
        if self.state().sleeper.is_none() {
            self.disarm();
        }
        self.arm()
    }

    /// Asks to be told of what comes. True: something is there already.
    fn arm(&mut self) -> bool {
        let state = self.state();
        state.armed = !state.engine.arm();
        !state.armed
    }

    fn disarm(&mut self) {
        let state = self.state();
        state.armed = false;
        state.engine.disarm();
    }

    /// Notes when one who waits comes of himself.
    fn comes(&mut self, ticket: u64, until: Option<Instant>) {
        let waiters = &mut self.state().waiters;
        if let Some(waiter) = waiters.iter_mut().find(|waiter| waiter.ticket == ticket) {
            waiter.until = until;
        }
    }

    /// Makes the descriptor readable at `until`, or earlier.
    fn set_alarm(&mut self, until: Option<Instant>) {
        let alarm = self.state().alarm;
        if alarm.is_none() && until.is_none() {
            return;
        }
        let now = Instant::now();
        if alarm.is_some_and(|at| at > now && until.is_none_or(|until| at <= until)) {
            return;
        }
        // 0 is no time at all for the system; to set it anew also forgets that it went off.
        let left = until.map(|at| at.saturating_duration_since(now).max(TICK));
        let value = left.map_or_else(Timespec::default, timespec);
        let once = Itimerspec {
            it_interval: Timespec::default(),
            it_value: value,
        };
        // A timer of our own, and a time that is one: it does not fail.
        let _ = timerfd_settime(&self.core.alarm, TimerfdTimerFlags::empty(), &once);
        self.state().alarm = until;
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
            until: None,
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
            self.tell();
            let state = self.state();
            if !state.is_watched() {
                return;
            }
            let armed = state.armed && !state.engine.is_stale();
            if (armed || !self.arm()) && !self.is_due() {
                return;
            }
            // Something has come: whoever it is for has to hear of it.
            if self.turn().is_err() {
                return;
            }
        }
        // There is no end to it: those who sleep may as well work too.
        let state = self.state();
        let sleeper = state.sleeper;
        for waiter in &state.waiters {
            if waiter.watches(sleeper) {
                waiter.who.tell(core, sleeper == Some(waiter.ticket));
            }
        }
    }

    /// Tells those who wait what has happened to their sockets.
    fn tell(&mut self) {
        let core = self.core;
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
    }

    /// Whether the engine has something to do of itself now. If it has later, one of those who
    /// sleep on the rings is made to come in time: nobody told them of a timer that was set since.
    fn is_due(&mut self) -> bool {
        let core = self.core;
        let state = self.state();
        let Some(due) = state.engine.next_timeout() else {
            return false;
        };
        let sleeper = state.sleeper;
        let mut one: Option<&mut Waiter> = None;
        for waiter in &mut state.waiters {
            // Who polls from outside may not come back for long: his word counts for himself.
            let certain = !matches!(waiter.who, Who::Descriptor);
            if !waiter.watches(sleeper) {
                continue;
            }
            if certain && waiter.until.is_some_and(|at| at <= due) {
                return false;
            }
            if one.is_none() || certain {
                one = Some(waiter);
            }
        }
        if due <= Instant::now() {
            return true;
        }
        match one {
            Some(waiter) if matches!(waiter.who, Who::Descriptor) => {
                waiter.until = Some(due);
                self.set_alarm(Some(due));
            }
            Some(waiter) => {
                // He sees for himself until when he may sleep.
                waiter.until = Some(due);
                waiter.who.tell(core, sleeper == Some(waiter.ticket));
            }
            None => {}
        }
        false
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
        if self.guard.is_none() {
            return;
        }
        if self.core.has_endings.load(Ordering::Relaxed) {
            self.end_all();
        }
        if self.collected {
            self.settle();
        }
        if !self.state().waiters.is_empty() {
            self.settle_waiters();
            self.hand_over();
        }
        self.release();
        if self.core.leases.any_dropped_meanwhile() {
            self.core.collect();
        }
    }
}

impl State {
    /// Whether anybody sleeps on the rings.
    fn is_watched(&self) -> bool {
        let sleeper = self.sleeper;
        self.waiters.iter().any(|waiter| waiter.watches(sleeper))
    }
}

impl Waiter {
    /// Whether he sleeps on the rings, not only until he is told.
    fn watches(&self, sleeper: Option<u64>) -> bool {
        match self.who {
            Who::Thread(_) => sleeper == Some(self.ticket),
            Who::Bell(_) | Who::Descriptor => true,
            #[cfg(feature = "tokio")]
            Who::Task(_) => false,
        }
    }
}

impl Who {
    fn tell(&self, core: &Core, asleep_on_descriptor: bool) {
        match self {
            Who::Thread(_) if asleep_on_descriptor => core.waker.ring(),
            Who::Thread(thread) => thread.unpark(),
            #[cfg(feature = "tokio")]
            Who::Task(task) => task.wake_by_ref(),
            Who::Bell(bell) => bell.ring(),
            Who::Descriptor => core.bell.ring(),
        }
    }
}

impl Bell {
    pub(crate) fn new() -> io::Result<Bell> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(Bell(eventfd(0, flags)?))
    }

    fn ring(&self) {
        // Non-blocking; a full counter is as readable as any.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    pub(crate) fn silence(&self) {
        // Non-blocking; one that did not ring has nothing to give.
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }
}

impl AsFd for Bell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A descriptor that is readable when any of `fds` is.
pub(crate) fn any_of<'a>(fds: impl IntoIterator<Item = BorrowedFd<'a>>) -> io::Result<OwnedFd> {
    let any = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    for fd in fds {
        epoll::add(
            &any,
            fd,
            epoll::EventData::new_u64(0),
            epoll::EventFlags::IN,
        )?;
    }
    Ok(any)
}

/// The earlier of two times, of which there may be none.
pub(crate) fn earlier(one: Option<Instant>, other: Option<Instant>) -> Option<Instant> {
    match (one, other) {
        (Some(one), Some(other)) => Some(one.min(other)),
        (one, other) => one.or(other),
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

#[cfg(test)]
#[path = "core_tests.rs"]
mod tests;
