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
//! What must hold: nobody sleeps over ready_flags. A sleeper is enlisted, then the rings are armed, then
//! it sleeps; and whoever takes anything in meanwhile tells those that it concerns, and arms the
//! rings again for those who sleep on them. Nor does anybody sleep over a timer: it is known when
//! each of them wakes of himself, and whoever leaves a timer that is due earlier wakes one. A
//! thread that has the lock does not wait for it: such a call panics, and what it drops ends later.
//!
//! Here are the lock and what is done with it; `wait` is how a call waits, `waiters` who is told and
//! how.

#[cfg(test)]
mod hook;
#[cfg(test)]
mod lost_wakeup_tests;
#[cfg(feature = "tokio")]
mod tasks;
mod wait;
mod waiters;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use zerosock_proto::Port;
use zerosock_proto::vsock::datagram::DatagramId;
use zerosock_ring::Trust;

use super::options::DEFAULT_BUFFER;
use super::waiting::Learned;
use crate::control::attach::Client;
use crate::table::backend::Backend;
use crate::table::leases::{Leases, NONE};
use crate::table::over::EndpointOver;
use crate::table::sockets::StreamId;
pub(crate) use wait::{WaitBudget, WaitFault, WaitMode};
use waiters::Waiter;
pub(crate) use waiters::{Alarm, AlreadyReady, EventFd, Interest, any_of};

/// What the lock is about.
pub(crate) struct State {
    pub(crate) engine: Box<dyn Backend>,
    /// Whoever sleeps on the engine's descriptor, by ticket.
    sleeper: Option<u64>,
    waiters: Vec<Waiter>,
    #[cfg(feature = "tokio")]
    tasks: tasks::Tasks,
    tickets: u64,
    learned: Learned,
    /// Calls since the last turn that needed none.
    skipped: u32,
    /// The rings have been armed, and nothing was taken in since.
    armed: bool,
    /// Goes off when the engine has something to do of itself and nobody else comes for it.
    alarm: Alarm,
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
    endings: Mutex<Vec<DeferredClose>>,
    has_endings: AtomicBool,
    leases: Arc<Leases>,
    /// Wakes the sleeper. Read by him alone: the engine's descriptor may be emptied by whoever
    /// turns the engine meanwhile.
    waker: EventFd,
    /// Tells who polls from outside.
    event_fd: EventFd,
    /// What is polled from outside: the engine's descriptor, the event_fd, the alarm.
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
    /// Bytes of a connection's receive buffer, unless it is told otherwise.
    window: AtomicU32,
    /// Called once, before the lock is released the next time.
    #[cfg(test)]
    before_release: hook::Hook,
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
pub(crate) enum DeferredClose {
    Stream(StreamId),
    /// It is reset.
    Reset(StreamId),
    Listener(Port),
    /// It was bound.
    Port(Port),
    Datagram(DatagramId),
    /// Whoever was enlisted by this ticket is told no more.
    #[cfg(feature = "tokio")]
    Task(u64),
    /// Whoever polls with this event_fd works for tasks no more.
    #[cfg(feature = "tokio")]
    EventFd(Arc<EventFd>),
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
        engine: Box<dyn Backend>,
        trust: Option<Trust>,
        place: Option<Client>,
    ) -> io::Result<Core> {
        let event_fd = EventFd::new()?;
        let alarm = Alarm::new()?;
        let outside = any_of([event_fd.as_fd(), alarm.as_fd(), engine.fd()])?;
        Ok(Core {
            waker: EventFd::new()?,
            event_fd,
            outside,
            fd: engine.fd().try_clone_to_owned()?,
            leases: engine.lease_table(),
            owner: AtomicUsize::new(0),
            knocking: AtomicU32::new(0),
            endings: Mutex::default(),
            has_endings: AtomicBool::new(false),
            trust,
            place: place.map(Mutex::new),
            #[cfg(feature = "tokio")]
            reactor: Mutex::default(),
            rx_map: AtomicBool::new(false),
            window: AtomicU32::new(DEFAULT_BUFFER),
            #[cfg(test)]
            before_release: hook::Hook::default(),
            state: Mutex::new(State {
                engine,
                sleeper: None,
                waiters: Vec::new(),
                #[cfg(feature = "tokio")]
                tasks: tasks::Tasks::default(),
                tickets: 0,
                learned: Learned::default(),
                skipped: 0,
                armed: false,
                alarm,
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

    /// Bytes of a connection's receive buffer, unless it is told otherwise.
    pub(crate) fn window(&self) -> u32 {
        self.window.load(Ordering::Relaxed)
    }

    /// See [`window`](Self::window).
    pub(crate) fn set_window(&self, bytes: u32) {
        self.window.store(bytes, Ordering::Relaxed);
    }

    /// Takes the lock.
    #[inline]
    pub(crate) fn lock(&self) -> Locked<'_> {
        let guard = match self.state.try_lock() {
            Ok(guard) => guard,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => self.lock_contended(),
        };
        let mut locked = Locked::new(self, guard);
        locked.collect();
        locked
    }

    #[cold]
    fn lock_contended(&self) -> MutexGuard<'_, State> {
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
    pub(crate) fn is_mine(&self) -> bool {
        self.owner.load(Ordering::Relaxed) == me()
    }

    /// The owner of a socket was dropped. If this thread has the lock, the socket ends when that
    /// is given back.
    pub(crate) fn end(&self, ending: DeferredClose) {
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
        self.leases.push_dropped(index);
        self.collect();
    }

    /// As [`give_back`](Self::give_back), of several: buffers that were lent one after the other.
    pub(crate) fn give_all_back(&self, indices: impl Iterator<Item = u32>) {
        // They come off the stack last first, which is the order in which they can be un-popped.
        self.leases.push_all_dropped(indices);
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
        let mut more = self.leases.any_dropped() || self.has_endings.load(Ordering::Relaxed);
        while more {
            let guard = match self.state.try_lock() {
                Ok(guard) => guard,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                Err(TryLockError::WouldBlock) => return,
            };
            let mut locked = Locked::new(self, guard);
            locked.collect();
            locked.end_all();
            locked.settle();
            locked.settle_waiters();
            // Without what `drop` does: this loop does it.
            locked.release();
            more =
                self.leases.any_dropped_after_unlock() || self.has_endings.load(Ordering::Relaxed);
        }
    }

    /// Where the task of async sockets is known.
    #[cfg(feature = "tokio")]
    pub(crate) fn reactor(&self) -> &Mutex<std::sync::Weak<super::tokio::Reactor>> {
        &self.reactor
    }

    /// Readable when the engine has something: what those poll who have a [`EventFd`].
    pub(crate) fn engine_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
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
            #[cfg(test)]
            self.core.before_release.call();
            self.core.owner.store(0, Ordering::Relaxed);
            drop(guard);
        }
    }

    fn state(&mut self) -> &mut State {
        // The guard is there until the drop.
        self.guard.as_mut().expect("the lock is held")
    }

    #[inline]
    pub(crate) fn engine(&mut self) -> &mut dyn Backend {
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
            let next = self.core.leases.next_dropped(index);
            self.engine().handle_dropped(index);
            index = next;
        }
    }

    /// Shows what was given back: a few buffers may wait until there are more, what the peer waits
    /// for may not.
    fn settle(&mut self) {
        self.collected = false;
        self.engine().flush_after_read();
    }

    /// Ends what was dropped while this thread had the lock.
    #[inline]
    fn end_all(&mut self) {
        if self.core.has_endings.load(Ordering::Relaxed) {
            self.end_them();
        }
    }

    #[cold]
    fn end_them(&mut self) {
        self.core.has_endings.store(false, Ordering::Relaxed);
        let endings = self.core.endings.lock();
        let endings = std::mem::take(&mut *endings.unwrap_or_else(PoisonError::into_inner));
        for ending in &endings {
            self.end(ending);
        }
    }

    fn end(&mut self, ending: &DeferredClose) {
        match ending {
            DeferredClose::Stream(id) => self.engine().close(*id),
            DeferredClose::Reset(id) => self.engine().abort(*id),
            DeferredClose::Listener(port) => self.engine().unlisten(*port),
            DeferredClose::Port(port) => return self.engine().unbind(*port),
            DeferredClose::Datagram(id) => {
                if let Some(datagrams) = self.engine().datagrams() {
                    datagrams.close(*id);
                }
            }
            #[cfg(feature = "tokio")]
            DeferredClose::Task(ticket) => return self.delist_task(*ticket),
            #[cfg(feature = "tokio")]
            DeferredClose::EventFd(event_fd) => return self.desert(event_fd),
        }
        self.engine().flush();
    }

    /// Lets the engine work. True: something was taken in.
    pub(crate) fn turn(&mut self) -> Result<bool, WaitFault> {
        if let Some(fault) = &self.state().fault {
            return Err(WaitFault::Fault(fault.clone()));
        }
        self.state().skipped = 0;
        match self.engine().turn() {
            Ok(busy) => {
                // What was taken in was the ready_flags that the rings were armed for.
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
            waiter.kind.tell(core, sleeper == Some(waiter.ticket));
        }
        #[cfg(feature = "tokio")]
        state.tasks.tell_all();
    }

    /// Whether the endpoint is over: what is there can be read, and nothing will come.
    pub(crate) fn is_over(&mut self) -> bool {
        self.state().fault.is_some()
    }
}

impl Drop for Locked<'_> {
    #[inline]
    fn drop(&mut self) {
        if self.guard.is_none() {
            return;
        }
        self.end_all();
        if self.collected {
            self.settle();
        }
        if self.state().is_waited_for() {
            self.settle_waiters();
            self.hand_over();
        }
        self.release();
        // A task that was told may have been the last to have a socket.
        if self.core.leases.any_dropped_after_unlock()
            || self.core.has_endings.load(Ordering::Relaxed)
        {
            self.core.collect();
        }
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
mod tests;
