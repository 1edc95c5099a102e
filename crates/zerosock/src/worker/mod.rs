//! The event loop that runs devices on kicks, ready sockets, timers and messages.
//!
//! A [`Worker`] is one thread. It owns devices and shares nothing with other workers: no lock and no
//! hop between cores lies on the data path. It sleeps in one `epoll_wait`; a guest's kick, an edge of a
//! socket, a timer or the mailbox wakes it. Devices are added and removed by message ([`messages`]).
//!
//! # Invariants
//!
//! - No call blocks except the one wait.
//! - A device with work left has another turn before the loop sleeps, and each turn keeps to a
//!   budget ([`Device::turn`]).
//! - A message sent before the sleep ends it.
//!
//! # How to drive it
//!
//! [`Worker::run`] is the loop, for a thread that does nothing else. A caller with an event loop of its
//! own calls [`Worker::start`] once, and then [`Worker::step`] whenever the worker's descriptor is
//! readable or [`Worker::next_timeout`] has passed.

mod intake;
#[cfg(test)]
mod intake_tests;
pub(crate) mod messages;
#[cfg(test)]
mod turn_tests;

use self::messages::WorkerMessage;
use crate::device::outbox::Outbox;
use crate::device::program::App;
use crate::device::{Context, Device, Limits};
use crate::io::clock::Clock;
use crate::io::mailbox::{Mailbox, Sender};
use crate::io::numbers::Table;
use crate::io::poller::{Poller, Readiness, Source};
use crate::io::spin::Spin;
use crate::routing::Routes;
use crate::stats::Counters;
use rustix::fd::{AsFd, BorrowedFd};
use std::collections::{BTreeSet, VecDeque};
use std::io;
use std::sync::Arc;
use std::time::Duration;
use zerosock_proto::Instant;
use zerosock_sys::notify::Notifier;

/// Limit of devices with rings that a worker polls. Polling more would take as long as a kick.
const MAX_POLLED_DEVICES: usize = 8;

/// See the [module](self).
pub(crate) struct Worker {
    pub(super) devices: Table<Device>,
    /// The embedding program, if there is one.
    pub(super) app: Option<Box<App>>,
    pub(crate) poller: Poller,
    pub(crate) mailbox: Mailbox<WorkerMessage>,
    pub(crate) outbox: Outbox,
    /// Senders to the mailboxes of all workers.
    workers: Vec<Sender<WorkerMessage>>,
    pub(crate) routes: Arc<Routes>,
    pub(crate) counters: Arc<Counters>,
    pub(crate) limits: Limits,
    pub(crate) clock: Clock,
    notifier: Notifier,
    /// Decides on polling; used by [`run`](Worker::run) only.
    spin: Spin,
    /// Devices with kicks disabled, because the worker polls their rings.
    kicks_disabled: Vec<u32>,
    /// When the poller was last checked.
    last_poll: Instant,
    /// The mailbox may have messages left.
    pub(super) more_messages: bool,
    pub(super) active: VecDeque<u32>,
    pub(super) deadlines: BTreeSet<(Instant, u32)>,
    /// Empty between calls; kept to reuse its allocation.
    events: Vec<(Source, Readiness)>,
}

impl Worker {
    /// The worker with this number; its mailbox belongs to the sender at that index of `workers`.
    pub(crate) fn new(
        number: u32,
        workers: Vec<Sender<WorkerMessage>>,
        mailbox: Mailbox<WorkerMessage>,
        routes: Arc<Routes>,
        counters: Arc<Counters>,
        limits: Limits,
    ) -> io::Result<Worker> {
        let poller = Poller::new()?;
        let notifier = Notifier::new();
        if !notifier.is_direct() {
            tracing::warn!(
                "the system refuses asynchronous I/O (io_setup): guests are notified by a thread of \
                 their own, which is slower, until it is to be had; allow io_setup and io_submit, \
                 or raise fs.aio-max-nr"
            );
        }
        poller.add(mailbox.fd(), Source::Mailbox)?;
        Ok(Worker {
            devices: Table::new(),
            app: None,
            poller,
            mailbox,
            workers,
            outbox: Outbox::new(number),
            routes,
            counters,
            limits,
            clock: Clock::new(),
            notifier,
            spin: Spin::new(Duration::ZERO),
            kicks_disabled: Vec::new(),
            last_poll: Instant::ZERO,
            more_messages: false,
            active: VecDeque::new(),
            deadlines: BTreeSet::new(),
            events: Vec::new(),
        })
    }

    /// Adds a device.
    pub(crate) fn add(&mut self, device: Device) {
        self.devices.insert(device.addr().vm, device);
    }

    /// Runs until shutdown. Before it sleeps it polls for at most `spin`, while that pays.
    pub(crate) fn run(mut self, spin: Duration) -> io::Result<()> {
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
        // Polling may have found only events that make no device active. While kicks are disabled the
        // worker must not sleep.
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
        for vm in std::mem::take(&mut self.kicks_disabled) {
            if self.devices.get_mut(vm).is_some_and(Device::enable_kicks) {
                self.activate(vm);
                more = true;
            }
        }
        Ok(more)
    }

    /// Polls the rings of devices with disabled kicks, and activates those that have buffers. Returns
    /// whether there are any.
    fn poll_rings(&mut self) -> bool {
        let mut any = false;
        for at in 0..self.kicks_disabled.len() {
            let vm = self.kicks_disabled[at];
            if self
                .devices
                .get_mut(vm)
                .is_some_and(Device::has_available_chains)
            {
                self.activate(vm);
                any = true;
            }
        }
        any
    }

    /// Watches the listeners of all devices. Called once, before the first step, on any thread.
    pub(crate) fn start(&mut self) -> io::Result<()> {
        let now = self.clock.now();
        for vm in self.devices.numbers() {
            let (device, cx) = self.lend(vm, now);
            if let Some(device) = device {
                device.listen(&cx)?;
            }
        }
        Ok(())
    }

    /// Handles messages, events and deadlines, and gives each active device one turn. If there is no
    /// work, first sleeps for at most `wait` (`None`: no limit). Returns false on shutdown: all
    /// connections are ended, and the worker must not be stepped again.
    ///
    /// # Errors
    /// The system cannot wait; no device can cause it.
    pub(crate) fn step(&mut self, wait: Option<Duration>) -> io::Result<bool> {
        if !self.take_messages() {
            return Ok(false);
        }
        let timeout = match (self.next_timeout(), wait) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        };
        let (now, _) = self.poll_events(timeout)?;
        self.run_deadlines(now);
        self.turn_devices(now);
        self.notifier.retry();
        Ok(true)
    }

    /// Waits for events for at most `timeout` and passes them to the devices. Returns the time after the
    /// wait, and whether there were events.
    ///
    /// # Errors
    /// The system cannot wait.
    pub(crate) fn poll_events(&mut self, timeout: Option<Duration>) -> io::Result<(Instant, bool)> {
        let mut events = std::mem::take(&mut self.events);
        let waited = self.poller.wait(timeout, &mut events);
        let now = self.clock.now();
        self.last_poll = now;
        let any = !events.is_empty();
        for (source, readiness) in events.drain(..) {
            self.dispatch(source, readiness, now);
        }
        self.events = events;
        waited?;
        Ok((now, any))
    }

    /// Activates the devices with a deadline that has passed.
    pub(crate) fn run_deadlines(&mut self, now: Instant) {
        while let Some(&(at, vm)) = self.deadlines.first() {
            if at > now {
                break;
            }
            self.deadlines.pop_first();
            if let Some(device) = self.devices.get_mut(vm) {
                device.armed = None;
            }
            self.activate(vm);
        }
    }

    /// The earliest deadline of a device.
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        self.deadlines.first().map(|&(at, _)| at)
    }

    /// How long the caller may wait before the next step if the worker's descriptor does not become
    /// readable: zero if there is work left, `None` if there is no deadline.
    pub(crate) fn next_timeout(&self) -> Option<Duration> {
        if !self.is_idle() {
            return Some(Duration::ZERO);
        }
        let until = |&(at, _): &(Instant, u32)| at.saturating_duration_since(self.clock.now());
        let of_devices = self.deadlines.first().map(until);
        of_devices.into_iter().chain(self.notifier.retry_in()).min()
    }

    /// Whether there is no work until an event or a deadline.
    pub(crate) fn is_idle(&self) -> bool {
        self.active.is_empty() && !self.more_messages && self.outbox.is_empty()
    }

    /// Whether there are messages of other threads.
    #[inline]
    pub(crate) fn has_messages(&self) -> bool {
        self.more_messages || self.mailbox.is_pending()
    }

    /// Passes an event to its device and activates the device.
    fn dispatch(&mut self, source: Source, readiness: Readiness, now: Instant) {
        let vm = match source {
            Source::Mailbox => return,
            Source::Kick { vm }
            | Source::Listener { vm, .. }
            | Source::Handshake { vm, .. }
            | Source::Bridge { vm, .. } => vm,
        };
        let (Some(device), mut cx) = self.lend(vm, now) else {
            return;
        };
        match source {
            Source::Mailbox => {}
            Source::Kick { .. } => cx.counters.kicks.add(1),
            Source::Listener { key, .. } => device.accept(key, &mut cx),
            Source::Handshake { key, .. } => device.handshake_ready(key, &mut cx),
            Source::Bridge { key, .. } => device.bridge_ready(key, readiness, &mut cx),
        }
        self.activate(vm);
    }

    /// Gives every active device one turn.
    pub(crate) fn turn_devices(&mut self, now: Instant) {
        for _ in 0..self.active.len() {
            let Some(vm) = self.active.pop_front() else {
                break;
            };
            let spins = self.spin.poll_time().is_some() && self.may_disable_kicks(vm);
            let (device, mut cx) = self.lend(vm, now);
            let Some(device) = device else { continue };
            cx.spins = spins;
            let more = device.turn(&mut cx);
            device.active = more;
            if more {
                self.active.push_back(vm);
            }
            self.note_deadline(vm);
        }
        self.deliver(now);
    }

    /// Sends messages of devices to devices of other workers.
    pub(crate) fn send_remote(&mut self) {
        while let Some((to, message)) = self.outbox.pop_remote() {
            if let Some(worker) = self.workers.get(to.worker as usize) {
                // A worker that has ended is shutting down with the rest of the daemon.
                let _ = worker.send(WorkerMessage::Sibling { vm: to.vm, message });
            }
        }
    }

    /// Adds a device to those with rings that are polled before the next sleep. Returns whether it is among
    /// them; false if there are too many.
    fn may_disable_kicks(&mut self, vm: u32) -> bool {
        let known = self.kicks_disabled.contains(&vm);
        if !known && self.kicks_disabled.len() < MAX_POLLED_DEVICES {
            self.kicks_disabled.push(vm);
            return true;
        }
        known
    }

    fn note_deadline(&mut self, vm: u32) {
        let Some(device) = self.devices.get_mut(vm) else {
            return;
        };
        let next = device.next_timeout();
        if next != device.armed {
            if let Some(at) = device.armed.take() {
                self.deadlines.remove(&(at, vm));
            }
            if let Some(at) = next {
                self.deadlines.insert((at, vm));
            }
            device.armed = next;
        }
    }

    pub(crate) fn activate(&mut self, vm: u32) {
        if let Some(device) = self.devices.get_mut(vm)
            && !device.active
        {
            device.active = true;
            self.active.push_back(vm);
        }
    }

    /// A device and the context for its turn.
    #[inline]
    pub(crate) fn lend(&mut self, vm: u32, now: Instant) -> (Option<&mut Device>, Context<'_>) {
        let (device, cx) = self.lend_late(vm, now);
        (device, Context { clock: None, ..cx })
    }

    /// As `lend`, for calls that seldom need the time: `then` is an earlier time, and the context reads
    /// the clock on demand.
    #[inline]
    pub(crate) fn lend_late(
        &mut self,
        vm: u32,
        then: Instant,
    ) -> (Option<&mut Device>, Context<'_>) {
        let cx = Context {
            now: then,
            clock: Some(&self.clock),
            poller: &self.poller,
            routes: &self.routes,
            outbox: &mut self.outbox,
            counters: &self.counters,
            notifier: &self.notifier,
            limits: &self.limits,
            spins: false,
            app: self.app.as_deref_mut(),
        };
        (self.devices.get_mut(vm), cx)
    }
}

impl AsFd for Worker {
    /// Readable if a step has new work since the end of the last one.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.poller.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::registry::{DeviceRegistry, Entry, Member, Terms};
    use crate::device::host_sockets::hybrid::OkConvention;
    use crate::io::mailbox::Sender;
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use rustix::fd::OwnedFd;
    use zerosock_proto::Cid;
    use zerosock_sys::account::Budget;

    pub(super) fn worker() -> (Sender<WorkerMessage>, Worker) {
        let (sender, mailbox) = Mailbox::new().unwrap();
        let second = Duration::from_secs(1);
        let limits = Limits {
            handshake: second,
            connect: second,
            hold: second,
            overflow: 1 << 20,
            old_memory: 0,
            handshakes: 1,
            lingering: 1,
            linger: second,
            ok: OkConvention::GuestPort,
        };
        let workers = vec![sender.clone()];
        let worker = Worker::new(0, workers, mailbox, Arc::default(), Arc::default(), limits);
        (sender, worker.unwrap())
    }

    fn readable(worker: &Worker) -> bool {
        let mut fds = [PollFd::new(worker, PollFlags::IN)];
        poll(&mut fds, Some(&Timespec::default())).unwrap() > 0
    }

    #[test]
    fn a_caller_with_its_own_loop_can_step_a_worker() {
        let (sender, mut worker) = worker();
        worker.start().unwrap();
        assert!(worker.step(Some(Duration::ZERO)).unwrap());
        assert!(worker.is_idle() && worker.next_timeout().is_none() && !readable(&worker));
        sender.send(WorkerMessage::RemoveDevice { vm: 9 }).unwrap();
        assert!(readable(&worker), "a message makes the descriptor readable");
        assert!(worker.step(None).unwrap());
        assert!(worker.is_idle() && !readable(&worker));
        sender.send(WorkerMessage::Shutdown).unwrap();
        assert!(!worker.step(None).unwrap());
    }

    /// The peer has as many threads as it may have, and all of them are blocked on a pipe.
    #[test]
    fn a_worker_sleeps_until_the_retry_for_a_notifier_thread() {
        use rustix::pipe::{PipeFlags, pipe_with};
        use zerosock_sys::notify::{CallFd, CallThread, ThreadCount};
        let threads = ThreadCount::default();
        let call = |fd: OwnedFd| CallFd::new(fd.into(), CallThread::new(&threads)).unwrap();
        let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).unwrap();
        rustix::io::ioctl_fionbio(&writer, true).unwrap();
        while rustix::io::write(&writer, &[0; 4096]).is_ok() {}
        rustix::io::ioctl_fionbio(&writer, false).unwrap();
        for _ in 0..4 {
            Notifier::new().notify(&call(writer.try_clone().unwrap()));
        }
        let flags = rustix::event::EventfdFlags::CLOEXEC;
        let event = rustix::event::eventfd(0, flags).unwrap();
        let late = call(event.try_clone().unwrap());

        let (_sender, mut worker) = worker();
        worker.start().unwrap();
        worker.notifier = Notifier::without_aio();
        worker.notifier.notify(&late);
        assert!(worker.next_timeout().is_some());
        drop(reader);
        // Each step sleeps until the retry.
        while worker.next_timeout().is_some() {
            assert!(worker.step(None).unwrap());
        }
        rustix::io::read(&event, &mut [0; 8]).unwrap();
    }

    #[test]
    fn devices_are_added_and_removed_by_message() {
        let (sender, mut worker) = worker();
        let terms = Terms {
            max_connections: 8,
            connect_timeout: Duration::from_secs(1),
            queue_pairs: zerosock_proto::vsock::QueuePairs::ONE,
        };
        let mut registry = DeviceRegistry::new(vec![sender.clone()], terms, Budget::unlimited());
        worker.start().unwrap();
        let cid = Cid::guest(3).unwrap();
        let mut numbers = Vec::new();
        for _ in 0..2 {
            let addr = registry.assign(cid, Entry::default()).unwrap();
            let member = Member {
                cid,
                host: crate::device::HostEnd::None,
                buf_alloc: 1 << 16,
                service: None,
                process: true,
                account: registry.budget().account(),
            };
            let [device] = registry.devices(addr, member).try_into().unwrap();
            let device = Box::new(device);
            sender.send(WorkerMessage::AddDevice(device)).unwrap();
            assert!(worker.step(None).unwrap());
            assert_eq!(worker.devices.numbers(), [addr.vm]);
            let vm = addr.vm;
            sender.send(WorkerMessage::RemoveDevice { vm }).unwrap();
            assert!(worker.step(None).unwrap());
            assert!(worker.devices.numbers().is_empty() && worker.deadlines.is_empty());
            registry.release(addr);
            numbers.push(vm);
        }
        assert_ne!(numbers[0], numbers[1], "another generation");
    }
}
