//! Those who wait, and how each is told.
//!
//! Some sleep on the engine's descriptor, which the rings have to be armed for: one thread at most
//! (the sleeper), those who poll with a [`EventFd`] of their own, and whoever polls the endpoint's
//! descriptor. The others, parked threads and tasks, hear only what they are told. Threads and those
//! who poll are few, and are looked at one by one; tasks may be very many, and are not (`tasks`).
//!
//! What must hold: whoever gives the lock back tells all that concerns others, leaves the rings
//! armed for those who sleep on them, and leaves no timer that none of them wakes for.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::thread::Thread;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, timerfd_create, timerfd_settime,
};
use zerosock_proto::Port;
use zerosock_proto::vsock::datagram::DatagramId;

use super::{Core, Locked, State};
use crate::io::deadline::timespec;
use crate::table::backend::ReadySource;
use crate::table::sockets::StreamId;

/// The shortest time that a timer can be set to.
const TICK: Duration = Duration::from_nanos(1);

/// What a waiter waits for.
#[derive(Copy, Clone, Debug, Eq, Hash, PartialEq)]
pub(crate) enum Interest {
    Conn(StreamId),
    Port(Port),
    Datagram(DatagramId),
    Anything,
}

impl From<ReadySource> for Interest {
    fn from(stirred: ReadySource) -> Interest {
        match stirred {
            ReadySource::Conn(conn) => Interest::Conn(conn),
            ReadySource::Port(port) => Interest::Port(port),
            ReadySource::Datagram(socket) => Interest::Datagram(socket),
        }
    }
}

/// Somebody to be told.
#[derive(Debug)]
pub(super) struct Waiter {
    pub(super) ticket: u64,
    interest: Interest,
    pub(super) kind: WaiterKind,
    /// When he comes of himself and lets the engine work.
    until: Option<Instant>,
}

/// What one who polls many things at once is told by, beside the engine's own descriptor.
#[derive(Debug)]
pub(crate) struct EventFd(OwnedFd);

/// A descriptor that is readable once a time has come.
#[derive(Debug)]
pub(crate) struct Alarm {
    fd: OwnedFd,
    /// When it goes off.
    at: Option<Instant>,
}

#[derive(Debug)]
pub(super) enum WaiterKind {
    /// Sleeps in [`Core::wait`].
    Thread(Thread),
    /// Polls the engine's descriptor, and a event_fd that nobody else silences; told once.
    EventFd(Arc<EventFd>),
    /// Polls the descriptor, by [`AsFd`]; told once.
    Descriptor,
}

/// Something has come: there is no sleeping over it.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(crate) struct AlreadyReady;

impl Core {
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
        let state = locked.state();
        // What the rings were armed for may not be what this one waits for.
        state.armed = false;
        if state.tasks.renew(*ticket, task) {
            return;
        }
        state.tickets += 1;
        *ticket = state.tickets;
        state.tasks.add(*ticket, interest, task.clone());
    }

    /// Those who are to be told of something.
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
    /// Before a call says that it would block: the descriptor is to tell. True: something has come
    /// meanwhile.
    pub(crate) fn watch(&mut self) -> bool {
        let state = self.state();
        let known = state
            .waiters
            .iter()
            .find(|waiter| matches!(waiter.kind, WaiterKind::Descriptor));
        let ticket = match known {
            Some(waiter) => waiter.ticket,
            None => self.enlist(Interest::Anything, WaiterKind::Descriptor),
        };
        // What was told before is forgotten, lest the descriptor stay readable.
        self.core.event_fd.silence();
        if self.is_come() {
            return true;
        }
        let until = self.engine().next_timeout();
        self.state().alarm.set(until);
        self.comes(ticket, until);
        false
    }

    /// For one who is about to sleep on [`Core::engine_fd`] and `event_fd`, which he has silenced
    /// before. Answers when he has to
    /// come of himself.
    ///
    /// # Errors
    /// When something has come meanwhile.
    pub(crate) fn watch_by(
        &mut self,
        event_fd: &Arc<EventFd>,
    ) -> Result<Option<Instant>, AlreadyReady> {
        self.unwatch(event_fd);
        if self.is_over() {
            return Ok(None);
        }
        let ticket = self.enlist(Interest::Anything, WaiterKind::EventFd(event_fd.clone()));
        if self.is_come() {
            return Err(AlreadyReady);
        }
        let until = self.engine().next_timeout();
        self.comes(ticket, until);
        Ok(until)
    }

    /// Rings `event_fd` no more.
    pub(crate) fn unwatch(&mut self, event_fd: &Arc<EventFd>) {
        let other = |waiter: &Waiter| !matches!(&waiter.kind, WaiterKind::EventFd(it) if Arc::ptr_eq(it, event_fd));
        self.state().waiters.retain(other);
    }

    /// As [`unwatch`](Self::unwatch), for one who worked for tasks: each is told, so that it sees
    /// to another, which it may do in a runtime that is not his.
    #[cfg(feature = "tokio")]
    pub(super) fn desert(&mut self, event_fd: &Arc<EventFd>) {
        self.unwatch(event_fd);
        self.state().tasks.tell_all();
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
    pub(super) fn arm(&mut self) -> bool {
        let state = self.state();
        state.armed = !state.engine.arm();
        !state.armed
    }

    pub(super) fn disarm(&mut self) {
        let state = self.state();
        state.armed = false;
        state.engine.disarm();
    }

    /// Notes when one who waits comes of himself.
    pub(super) fn comes(&mut self, ticket: u64, until: Option<Instant>) {
        let waiters = &mut self.state().waiters;
        if let Some(waiter) = waiters.iter_mut().find(|waiter| waiter.ticket == ticket) {
            waiter.until = until;
        }
    }

    pub(super) fn enlist(&mut self, interest: Interest, kind: WaiterKind) -> u64 {
        let state = self.state();
        // What the rings were armed for may not be what this one waits for.
        state.armed = false;
        state.tickets += 1;
        let ticket = state.tickets;
        state.waiters.push(Waiter {
            ticket,
            interest,
            kind,
            until: None,
        });
        ticket
    }

    /// A task waits no longer.
    #[cfg(feature = "tokio")]
    pub(super) fn delist_task(&mut self, ticket: u64) {
        self.state().tasks.remove(ticket);
    }

    pub(super) fn delist(&mut self, ticket: u64) {
        let waiters = &mut self.state().waiters;
        if let Some(at) = waiters.iter().position(|waiter| waiter.ticket == ticket) {
            waiters.swap_remove(at);
        }
    }

    /// Tells those who wait what has happened to their sockets, and arms the rings again for the
    /// one who sleeps on them.
    pub(super) fn settle_waiters(&mut self) {
        let core = self.core;
        if self
            .guard
            .as_ref()
            .is_none_or(|state| !state.is_waited_for())
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
                waiter.kind.tell(core, sleeper == Some(waiter.ticket));
            }
        }
    }

    /// Tells those who wait what has happened to their sockets.
    fn tell(&mut self) {
        let core = self.core;
        let state = self.state();
        while let Some(stirred) = state.engine.next_ready() {
            let sleeper = state.sleeper;
            let stirred = Interest::from(stirred);
            #[cfg(feature = "tokio")]
            for interest in [stirred, Interest::Anything] {
                state.tasks.tell(interest);
            }
            state.waiters.retain(|waiter| {
                let told = waiter.interest == stirred || waiter.interest == Interest::Anything;
                if told {
                    waiter.kind.tell(core, sleeper == Some(waiter.ticket));
                }
                !told || matches!(waiter.kind, WaiterKind::Thread(_))
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
            // WaiterKind polls from outside may not come back for long: his word counts for himself.
            let certain = !matches!(waiter.kind, WaiterKind::Descriptor);
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
            Some(waiter) if matches!(waiter.kind, WaiterKind::Descriptor) => {
                waiter.until = Some(due);
                self.state().alarm.set(Some(due));
            }
            Some(waiter) => {
                // He sees for himself until when he may sleep.
                waiter.until = Some(due);
                waiter.kind.tell(core, sleeper == Some(waiter.ticket));
            }
            None => {}
        }
        false
    }

    /// Whoever leaves without sleeping makes another one the sleeper.
    pub(super) fn hand_over(&mut self) {
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

impl State {
    /// Whether anybody is to be told of anything.
    #[inline]
    pub(super) fn is_waited_for(&self) -> bool {
        #[cfg(feature = "tokio")]
        if !self.tasks.is_empty() {
            return true;
        }
        !self.waiters.is_empty()
    }

    /// Whether anybody sleeps on the rings.
    fn is_watched(&self) -> bool {
        let sleeper = self.sleeper;
        self.waiters.iter().any(|waiter| waiter.watches(sleeper))
    }
}

impl Waiter {
    /// Whether he sleeps on the rings, not only until he is told.
    fn watches(&self, sleeper: Option<u64>) -> bool {
        match self.kind {
            WaiterKind::Thread(_) => sleeper == Some(self.ticket),
            WaiterKind::EventFd(_) | WaiterKind::Descriptor => true,
        }
    }
}

impl WaiterKind {
    pub(super) fn tell(&self, core: &Core, asleep_on_descriptor: bool) {
        match self {
            WaiterKind::Thread(_) if asleep_on_descriptor => core.waker.ring(),
            WaiterKind::Thread(thread) => thread.unpark(),
            WaiterKind::EventFd(event_fd) => event_fd.ring(),
            WaiterKind::Descriptor => core.event_fd.ring(),
        }
    }
}

impl EventFd {
    pub(crate) fn new() -> io::Result<EventFd> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(EventFd(eventfd(0, flags)?))
    }

    pub(super) fn ring(&self) {
        // Non-blocking; a full counter is as readable as any.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    pub(crate) fn silence(&self) {
        // Non-blocking; one that did not ring has nothing to give.
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }
}

impl AsFd for EventFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Alarm {
    pub(crate) fn new() -> io::Result<Alarm> {
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let fd = timerfd_create(TimerfdClockId::Monotonic, flags)?;
        Ok(Alarm { fd, at: None })
    }

    /// Goes off at `until`, or earlier.
    pub(crate) fn set(&mut self, until: Option<Instant>) {
        if self.at.is_none() && until.is_none() {
            return;
        }
        let now = Instant::now();
        let soon = |at| at > now && until.is_none_or(|until| at <= until);
        if self.at.is_some_and(soon) {
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
        let _ = timerfd_settime(&self.fd, TimerfdTimerFlags::empty(), &once);
        self.at = until;
    }
}

impl AsFd for Alarm {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
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
