//! The event loop that runs devices on kicks, ready sockets, timers and messages.
//!
//! A [`Worker`] is one thread. It owns devices and shares nothing with other workers: no lock and
//! no hop between cores lies on the data path. It sleeps in one `epoll_wait`; a guest's kick, an
//! edge of a socket, a timer or the mailbox wakes it. Devices are added and removed by message
//! ([`WorkerMessage`]).
//!
//! # Invariants
//!
//! - No call blocks except the one wait.
//! - A device with work left has another turn before the loop sleeps, and each turn keeps to a
//!   budget ([`WorkerDevice::turn`]).
//! - A message sent before the sleep ends it.
//!
//! # How to drive it
//!
//! [`Worker::run`] is the loop, for a thread that does nothing else. A caller with an event loop of
//! its own calls [`Worker::start`] once, and then [`Worker::step`] whenever the worker's descriptor
//! is readable or [`Worker::next_timeout`] has passed.

mod intake;
mod message;
mod messages;
#[cfg(test)]
mod tests;

pub use self::message::{DeviceCall, PauseStep, Update, WorkerMessage, WorkerPort};
use crate::clock::Clock;
use crate::device::{Context, Event, WorkerDevice};
use crate::mailbox::{Mailbox, Sender};
use crate::numbers::Table;
use crate::outbox::Outbox;
use crate::poller::{EventKind, Events, Interest, Poller, Readiness, Token};
use crate::spin::Spin;
use rustix::fd::{AsFd, BorrowedFd};
use std::collections::{BTreeSet, VecDeque};
use std::io;
use std::time::Duration;
use zerosock_proto::Instant;
use zerosock_sys::notify::Notifier;

/// Limit of devices with rings that a worker polls. Polling more would take as long as a kick.
const MAX_POLLED_DEVICES: usize = 8;

/// The devices of a worker, by their numbers.
#[derive(Debug)]
pub struct Devices<D>(Table<Slot<D>>);

/// A device, and what the worker knows about it.
#[derive(Debug)]
struct Slot<D> {
    device: D,
    /// On the list of devices that need a turn.
    active: bool,
    /// The deadline that is recorded for the device.
    armed: Option<Instant>,
}

impl<D> Devices<D> {
    /// The device with this number.
    #[inline]
    pub fn get(&self, number: u32) -> Option<&D> {
        self.0.get(number).map(|slot| &slot.device)
    }

    /// The device with this number.
    #[inline]
    pub fn get_mut(&mut self, number: u32) -> Option<&mut D> {
        self.0.get_mut(number).map(|slot| &mut slot.device)
    }

    /// All devices with their numbers.
    #[inline]
    pub fn iter(&self) -> impl Iterator<Item = (u32, &D)> {
        self.0.iter().map(|(number, slot)| (number, &slot.device))
    }

    /// All devices with their numbers.
    #[inline]
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (u32, &mut D)> {
        self.0
            .iter_mut()
            .map(|(number, slot)| (number, &mut slot.device))
    }

    /// The numbers of all devices.
    pub fn numbers(&self) -> Vec<u32> {
        self.0.numbers()
    }

    /// The number of slots: as [`Table::slots`].
    pub fn slots(&self) -> usize {
        self.0.slots()
    }

    /// The number of the device in this slot: as [`Table::at_slot`].
    #[inline]
    pub fn at_slot(&self, slot: usize) -> Option<u32> {
        self.0.at_slot(slot)
    }
}

/// See the [module](self).
pub struct Worker<D: WorkerDevice> {
    /// The devices.
    pub devices: Devices<D>,
    /// State that all devices share.
    pub shared: D::Shared,
    poller: Poller,
    mailbox: Mailbox<WorkerMessage<D>>,
    outbox: Outbox<D::Message>,
    /// Senders to the mailboxes of all workers.
    workers: Vec<Sender<WorkerMessage<D>>>,
    clock: Clock,
    notifier: Notifier,
    /// Decides on polling; used by [`run`](Worker::run) only.
    spin: Spin,
    /// Devices with kicks disabled, because the worker polls their rings.
    kicks_disabled: Vec<u32>,
    /// When the poller was last checked.
    last_poll: Instant,
    /// The mailbox may have messages left.
    more_messages: bool,
    is_paused: bool,
    active: VecDeque<u32>,
    deadlines: BTreeSet<(Instant, u32)>,
    /// Of the last wait; kept to reuse its allocation.
    events: Events,
}

impl<D: WorkerDevice> Worker<D> {
    /// The worker with this number; its mailbox belongs to the sender at that index of `workers`.
    ///
    /// # Errors
    /// No epoll instance is to be had.
    pub fn new(
        number: u32,
        workers: Vec<Sender<WorkerMessage<D>>>,
        mailbox: Mailbox<WorkerMessage<D>>,
        shared: D::Shared,
    ) -> io::Result<Worker<D>> {
        let poller = Poller::new()?;
        // A context of asynchronous I/O takes 30 ms to destroy, of each input of the fuzzer.
        let notifier = match cfg!(fuzzing) {
            true => Notifier::without_aio(),
            false => Notifier::new(),
        };
        if !notifier.is_direct() {
            tracing::warn!(
                "the system refuses asynchronous I/O (io_setup): guests are notified by a thread of \
                 their own, which is slower, until it is to be had; allow io_setup and io_submit, \
                 or raise fs.aio-max-nr"
            );
        }
        poller.add(mailbox.fd(), Token::MAILBOX, Interest::Read)?;
        Ok(Worker {
            devices: Devices(Table::default()),
            shared,
            poller,
            mailbox,
            workers,
            outbox: Outbox::new(number),
            clock: Clock::new(),
            notifier,
            spin: Spin::new(Duration::ZERO),
            kicks_disabled: Vec::new(),
            last_poll: Instant::ZERO,
            more_messages: false,
            is_paused: false,
            active: VecDeque::new(),
            deadlines: BTreeSet::new(),
            events: Events::default(),
        })
    }

    /// Adds a device.
    pub fn add(&mut self, device: D) {
        let number = device.addr().number;
        let slot = Slot {
            device,
            active: false,
            armed: None,
        };
        self.devices.0.insert(number, slot);
    }

    /// The clock of the worker and its devices.
    pub fn clock(&self) -> Clock {
        self.clock
    }

    /// Runs until shutdown. Before it sleeps it polls for at most `spin`, while that pays.
    pub fn run(mut self, spin: Duration) -> io::Result<()> {
        self.spin = Spin::new(spin);
        self.start()?;
        loop {
            if !self.poll_and_step()? {
                return Ok(());
            }
        }
    }

    /// Polls or sleeps, then handles the work. Returns false on shutdown.
    fn poll_and_step(&mut self) -> io::Result<bool> {
        let idle = self.is_idle() && self.spin.is_enabled() && !self.poll_before_sleep()?;
        let before = if idle {
            self.clock.now()
        } else {
            Instant::ZERO
        };
        // Polling may have found only events that make no device active. While kicks are disabled
        // the worker must not sleep.
        let wait = (!self.kicks_disabled.is_empty()).then_some(Duration::ZERO);
        if !self.step(wait)? {
            return Ok(false);
        }
        if idle {
            let slept = self.last_poll.saturating_duration_since(before);
            self.spin.slept(slept);
        }
        Ok(true)
    }

    /// Polls for work if that pays. If there is none, enables kicks. Returns whether there is work.
    fn poll_before_sleep(&mut self) -> io::Result<bool> {
        if let Some(most) = self.spin.poll_time() {
            let from = self.clock.now();
            let until = match self.next_deadline() {
                Some(at) => at.min(from + most),
                None => from + most,
            };
            loop {
                if self.poll_rings() || self.has_messages() {
                    self.spin.found_work();
                    return Ok(true);
                }
                let (now, any) = self.poll_events(Some(Duration::ZERO))?;
                if any {
                    self.spin.found_work();
                    return Ok(true);
                }
                if now >= until {
                    break;
                }
                std::hint::spin_loop();
            }
            if until == from + most {
                self.spin.found_nothing();
            }
        }
        let mut more = false;
        for number in std::mem::take(&mut self.kicks_disabled) {
            if self.devices.get_mut(number).is_some_and(D::enable_kicks) {
                self.activate(number);
                more = true;
            }
        }
        Ok(more)
    }

    /// Polls the rings of devices with disabled kicks, and activates those that have buffers.
    /// Returns whether there are any.
    fn poll_rings(&mut self) -> bool {
        let mut any = false;
        for at in 0..self.kicks_disabled.len() {
            let number = self.kicks_disabled[at];
            if self
                .devices
                .get_mut(number)
                .is_some_and(D::has_available_chains)
            {
                self.activate(number);
                any = true;
            }
        }
        any
    }

    /// Starts all devices. Called once, before the first step, on any thread.
    ///
    /// # Errors
    /// A device cannot register a descriptor.
    pub fn start(&mut self) -> io::Result<()> {
        let now = self.clock.now();
        for number in self.devices.numbers() {
            let (device, mut cx) = self.lend(number, now);
            if let Some(device) = device {
                device.start(&mut cx)?;
            }
        }
        Ok(())
    }

    /// Handles messages, events and deadlines, and gives each active device one turn; then another one,
    /// if there were messages between devices. If there is no work, first sleeps for at most `wait`
    /// (`None`: no limit). Returns false on shutdown: all connections are ended, and the worker must
    /// not be stepped again.
    ///
    /// # Errors
    /// The system cannot wait; no device can cause it.
    pub fn step(&mut self, wait: Option<Duration>) -> io::Result<bool> {
        if !self.take_messages() {
            return Ok(false);
        }
        let timeout = match (self.next_timeout(), wait) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        };
        let (now, _) = self.poll_events(timeout)?;
        self.run_deadlines(now);
        if self.turn_devices(now) {
            // The receivers of messages need no other events for their turns.
            self.turn_devices(now);
        }
        self.notifier.retry();
        Ok(true)
    }

    /// Waits for events for at most `timeout` and passes them to the devices. Returns the time
    /// after the wait, and whether there were events.
    ///
    /// # Errors
    /// The system cannot wait.
    pub fn poll_events(&mut self, timeout: Option<Duration>) -> io::Result<(Instant, bool)> {
        let mut events = std::mem::take(&mut self.events);
        let waited = events.wait(&self.poller, timeout);
        let now = self.handle_events(&events);
        let any = !events.is_empty();
        self.events = events;
        waited?;
        Ok((now, any))
    }

    /// Passes the events of a wait on the worker's descriptor to the devices. Returns the time.
    pub fn handle_events(&mut self, events: &Events) -> Instant {
        let now = self.clock.now();
        self.last_poll = now;
        for (token, readiness) in Poller::interpret(events) {
            self.dispatch(token, readiness, now);
        }
        now
    }

    /// Activates the devices with a deadline that has passed.
    pub fn run_deadlines(&mut self, now: Instant) {
        while let Some(&(at, number)) = self.deadlines.first() {
            if at > now {
                break;
            }
            self.deadlines.pop_first();
            if let Some(slot) = self.devices.0.get_mut(number) {
                slot.armed = None;
            }
            self.activate(number);
        }
    }

    /// The earliest deadline of a device.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.deadlines.first().map(|&(at, _)| at)
    }

    /// How long the caller may wait before the next step if the worker's descriptor does not become
    /// readable: zero if there is work left, `None` if there is no deadline.
    pub fn next_timeout(&self) -> Option<Duration> {
        if !self.is_idle() {
            return Some(Duration::ZERO);
        }
        let until = |&(at, _): &(Instant, u32)| at.saturating_duration_since(self.clock.now());
        let of_devices = self.deadlines.first().map(until);
        of_devices.into_iter().chain(self.notifier.retry_in()).min()
    }

    /// Whether there is no work until an event or a deadline.
    pub fn is_idle(&self) -> bool {
        self.active.is_empty() && !self.more_messages && self.outbox.is_empty()
    }

    /// Whether there are messages of other threads.
    #[inline]
    pub fn has_messages(&self) -> bool {
        self.more_messages || self.mailbox.is_pending()
    }

    /// Passes an event to its device and activates the device.
    fn dispatch(&mut self, token: Token, readiness: Readiness, now: Instant) {
        let Token { device, kind, key } = token;
        if kind == EventKind::MAILBOX {
            return;
        }
        let number = device;
        let (Some(device), mut cx) = self.lend(number, now) else {
            return;
        };
        let event = Event {
            kind,
            key,
            readiness,
        };
        device.begin_call(cx.shared);
        device.on_event(event, &mut cx);
        device.end_call(cx.shared);
        self.activate(number);
    }

    /// Gives every active device one turn, and delivers their messages. Returns whether there were any.
    pub fn turn_devices(&mut self, now: Instant) -> bool {
        for _ in 0..self.active.len() {
            let Some(number) = self.active.pop_front() else {
                break;
            };
            let spins = self.spin.poll_time().is_some() && self.may_disable_kicks(number);
            let (device, mut cx) = self.lend(number, now);
            let Some(device) = device else { continue };
            cx.spins = spins;
            device.begin_call(cx.shared);
            let more = device.turn(&mut cx);
            device.end_call(cx.shared);
            if let Some(slot) = self.devices.0.get_mut(number) {
                slot.active = more;
            }
            if more {
                self.active.push_back(number);
            }
            self.note_deadline(number);
        }
        self.deliver(now)
    }

    /// Sends messages of devices to devices of other workers.
    pub fn send_remote(&mut self) {
        while let Some((to, message)) = self.outbox.pop_remote() {
            if let Some(worker) = self.workers.get(to.worker as usize) {
                // A worker that has ended is shutting down with the rest of the daemon.
                let _ = worker.send(WorkerMessage::Device {
                    number: to.number,
                    message,
                });
            }
        }
    }

    /// Adds a device to those with rings that are polled before the next sleep. Returns whether it
    /// is among them; false if there are too many.
    fn may_disable_kicks(&mut self, number: u32) -> bool {
        let known = self.kicks_disabled.contains(&number);
        if !known && self.kicks_disabled.len() < MAX_POLLED_DEVICES {
            self.kicks_disabled.push(number);
            return true;
        }
        known
    }

    /// Notes when the device wants its next turn, after a call that may have changed this outside of a turn.
    pub fn note_deadline(&mut self, number: u32) {
        let Some(slot) = self.devices.0.get_mut(number) else {
            return;
        };
        let next = slot.device.next_timeout();
        if next != slot.armed {
            if let Some(at) = slot.armed.take() {
                self.deadlines.remove(&(at, number));
            }
            if let Some(at) = next {
                self.deadlines.insert((at, number));
            }
            slot.armed = next;
        }
    }

    /// Gives the device a turn in this step.
    pub fn activate(&mut self, number: u32) {
        if let Some(slot) = self.devices.0.get_mut(number)
            && !std::mem::replace(&mut slot.active, true)
        {
            self.active.push_back(number);
        }
    }

    /// Activates the devices for which `has_work` returns true. Returns whether there are any.
    #[inline]
    pub fn activate_where(
        &mut self,
        mut has_work: impl FnMut(&mut D, &mut D::Shared) -> bool,
    ) -> bool {
        let mut any = false;
        for (number, slot) in self.devices.0.iter_mut() {
            if has_work(&mut slot.device, &mut self.shared) {
                any = true;
                if !std::mem::replace(&mut slot.active, true) {
                    self.active.push_back(number);
                }
            }
        }
        any
    }

    /// A device and the context for its turn.
    #[inline]
    pub fn lend(&mut self, number: u32, now: Instant) -> (Option<&mut D>, Context<'_, D>) {
        let (device, cx) = self.lend_late(number, now);
        (device, Context { clock: None, ..cx })
    }

    /// As `lend`, for calls that seldom need the time: `then` is an earlier time, and the context
    /// reads the clock on demand.
    #[inline]
    pub fn lend_late(&mut self, number: u32, then: Instant) -> (Option<&mut D>, Context<'_, D>) {
        let cx = Context {
            now: then,
            clock: Some(&self.clock),
            poller: &self.poller,
            outbox: &mut self.outbox,
            notifier: &self.notifier,
            spins: false,
            shared: &mut self.shared,
        };
        (self.devices.get_mut(number), cx)
    }
}

impl<D: WorkerDevice> AsFd for Worker<D> {
    /// Readable if a step has new work since the end of the last one.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.poller.as_fd()
    }
}
