//! The event loop: kicks, readable sockets and messages come in, and devices get their turns.
//!
//! A [`Worker`] is one thread. It owns devices and shares nothing with other workers: no lock and no
//! hop between cores lies on the data path. It sleeps in one `epoll_wait` and is woken by a guest's
//! kick, a socket's edge, a timer or its mailbox. Devices come and go by message ([`messages`]).
//!
//! # Invariants
//! - Nothing in here blocks but the one wait.
//! - A device with work left gets another turn before the loop sleeps, and each turn works to a
//!   budget ([`Device::turn`]).
//! - Messages sent before the sleep wake it.
//!
//! # How to drive it
//!
//! [`Worker::run`] is the loop, for a thread that does nothing else. A caller with a loop of its own
//! calls [`Worker::start`] once and then [`Worker::step`] whenever the worker's descriptor is
//! readable or [`Worker::next_timeout`] is over.

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

/// Devices whose rings a worker looks at while it looks for work: more would take as long as a kick.
const UNARMED: usize = 8;

/// See the module.
pub(crate) struct Worker {
    pub(super) devices: Table<Device>,
    /// The program that embeds the devices, if one does.
    pub(super) app: Option<Box<App>>,
    pub(crate) poller: Poller,
    pub(crate) mailbox: Mailbox<WorkerMessage>,
    pub(crate) outbox: Outbox,
    /// The mailboxes of all workers.
    workers: Vec<Sender<WorkerMessage>>,
    pub(crate) routes: Arc<Routes>,
    pub(crate) counters: Arc<Counters>,
    pub(crate) limits: Limits,
    pub(crate) clock: Clock,
    notifier: Notifier,
    /// Of a worker that [runs](Worker::run) by itself.
    spin: Spin,
    /// Devices whose drivers were not asked for kicks, because their rings are looked at.
    unarmed: Vec<u32>,
    /// When it was last looked for edges.
    looked_at: Instant,
    /// The mailbox may have more than was taken.
    pub(super) more_messages: bool,
    pub(super) active: VecDeque<u32>,
    pub(super) deadlines: BTreeSet<(Instant, u32)>,
    /// Kept for its memory.
    events: Vec<(Source, Readiness)>,
}

impl Worker {
    /// The worker with this number, whose mailbox is fed by the sender in that place of `workers`.
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
            unarmed: Vec::new(),
            looked_at: Instant::ZERO,
            more_messages: false,
            active: VecDeque::new(),
            deadlines: BTreeSet::new(),
            events: Vec::new(),
        })
    }

    /// Takes a device in before the start.
    pub(crate) fn add(&mut self, device: Device) {
        self.devices.insert(device.addr().vm, device);
    }

    /// Runs until it is told to stop. Before it sleeps it looks for work for at most `spin`, while
    /// that pays.
    pub(crate) fn run(mut self, spin: Duration) -> io::Result<()> {
        self.spin = Spin::new(spin);
        self.start()?;
        loop {
            if !self.round()? {
                return Ok(());
            }
        }
    }

    /// Looks for work, or sleeps, and does what there is. False: the worker was told to end.
    fn round(&mut self) -> io::Result<bool> {
        let idle = self.is_idle() && self.spin.is_on() && !self.look_around()?;
        let before = if idle {
            self.clock.now()
        } else {
            Instant::ZERO
        };
        // What was found may make no device active: nobody sleeps while kicks are not asked for.
        let wait = (!self.unarmed.is_empty()).then_some(Duration::ZERO);
        if !self.step(wait)? {
            return Ok(false);
        }
        if idle {
            let slept = self.looked_at.saturating_duration_since(before);
            self.spin.slept(slept);
        }
        Ok(true)
    }

    /// Looks for work if that pays, and if there is none asks for kicks. Whether there is some.
    fn look_around(&mut self) -> io::Result<bool> {
        if let Some(most) = self.spin.pays() {
            let from = self.clock.now();
            let until = match self.next_deadline() {
                Some(at) => at.min(from + most),
                None => from + most,
            };
            loop {
                if self.look_at_rings() || self.has_messages() {
                    self.spin.hit();
                    return Ok(true);
                }
                let (now, any) = self.look(Some(Duration::ZERO))?;
                if any {
                    self.spin.hit();
                    return Ok(true);
                }
                if now >= until {
                    break;
                }
                std::hint::spin_loop();
            }
            if until == from + most {
                self.spin.missed();
            }
        }
        let mut more = false;
        for vm in std::mem::take(&mut self.unarmed) {
            if self.devices.get_mut(vm).is_some_and(Device::ask_for_kicks) {
                self.activate(vm);
                more = true;
            }
        }
        Ok(more)
    }

    /// Whether a device has something whose driver was not asked for kicks; it is active then.
    fn look_at_rings(&mut self) -> bool {
        let mut any = false;
        for at in 0..self.unarmed.len() {
            let vm = self.unarmed[at];
            if self.devices.get_mut(vm).is_some_and(Device::has_come) {
                self.activate(vm);
                any = true;
            }
        }
        any
    }

    /// Watches the listeners of the devices that were added. To be called once, before the first
    /// step, on any thread.
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

    /// Does what there is to do: messages, edges, deadlines, one turn of each device that has
    /// something. Before, it sleeps for at most `wait` (`None`: until there is something) if there
    /// is nothing to do. False: the worker was told to end, its connections are ended, and it is
    /// not to be stepped again.
    ///
    /// # Errors
    /// When the system cannot wait any more; no device can cause it.
    pub(crate) fn step(&mut self, wait: Option<Duration>) -> io::Result<bool> {
        if !self.take_messages() {
            return Ok(false);
        }
        let timeout = match (self.next_timeout(), wait) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        };
        let (now, _) = self.look(timeout)?;
        self.fire(now);
        self.turn_devices(now);
        self.notifier.retry();
        Ok(true)
    }

    /// Waits for edges, for at most `timeout`, and tells the devices of them. Returns when that was,
    /// and whether there were any.
    ///
    /// # Errors
    /// When the system cannot wait any more.
    pub(crate) fn look(&mut self, timeout: Option<Duration>) -> io::Result<(Instant, bool)> {
        let mut events = std::mem::take(&mut self.events);
        let waited = self.poller.wait(timeout, &mut events);
        let now = self.clock.now();
        self.looked_at = now;
        let any = !events.is_empty();
        for (source, readiness) in events.drain(..) {
            self.dispatch(source, readiness, now);
        }
        self.events = events;
        waited?;
        Ok((now, any))
    }

    /// Makes the devices active whose time has come.
    pub(crate) fn fire(&mut self, now: Instant) {
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

    /// When a device has something to do of itself.
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        self.deadlines.first().map(|&(at, _)| at)
    }

    /// How long a step may be put off if the worker's descriptor does not become readable: no time
    /// when there is work left, `None` when nothing will happen of itself.
    pub(crate) fn next_timeout(&self) -> Option<Duration> {
        if !self.is_idle() {
            return Some(Duration::ZERO);
        }
        let until = |&(at, _): &(Instant, u32)| at.saturating_duration_since(self.clock.now());
        let of_devices = self.deadlines.first().map(until);
        of_devices.into_iter().chain(self.notifier.retry_in()).min()
    }

    /// Nothing is left to do until something happens or a time has come.
    pub(crate) fn is_idle(&self) -> bool {
        self.active.is_empty() && !self.more_messages && self.outbox.is_empty()
    }

    /// Whether other threads have said something that was not taken yet.
    #[inline]
    pub(crate) fn has_messages(&self) -> bool {
        self.more_messages || self.mailbox.is_pending()
    }

    /// Tells a device what an edge was about and gives it a turn.
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
            let spins = self.spin.pays().is_some() && self.may_leave_unarmed(vm);
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

    /// Sends what devices have for devices of other workers.
    pub(crate) fn send_remote(&mut self) {
        while let Some((to, message)) = self.outbox.pop_remote() {
            if let Some(worker) = self.workers.get(to.worker as usize) {
                // A worker that is gone is shutting down with the rest of the daemon.
                let _ = worker.send(WorkerMessage::Sibling { vm: to.vm, message });
            }
        }
    }

    /// Notes that a device's rings will be looked at before the next sleep; no, if there are many.
    fn may_leave_unarmed(&mut self, vm: u32) -> bool {
        let known = self.unarmed.contains(&vm);
        if !known && self.unarmed.len() < UNARMED {
            self.unarmed.push(vm);
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

    /// A device and what it needs for its turn.
    #[inline]
    pub(crate) fn lend(&mut self, vm: u32, now: Instant) -> (Option<&mut Device>, Context<'_>) {
        let (device, cx) = self.lend_late(vm, now);
        (device, Context { clock: None, ..cx })
    }

    /// As `lend`, for an act that needs the time only in few cases: `then` is an old time.
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
    /// Readable when a step has something to do that it did not have at the end of the last one.
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

    fn worker() -> (Sender<WorkerMessage>, Worker) {
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
    fn a_worker_is_stepped_by_whoever_has_a_loop_of_his_own() {
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

    /// There are as many threads as one peer may have, and they wait in a pipe.
    #[test]
    fn a_worker_sleeps_until_it_is_to_ask_for_a_thread_again() {
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
        // Each step sleeps until then.
        while worker.next_timeout().is_some() {
            assert!(worker.step(None).unwrap());
        }
        rustix::io::read(&event, &mut [0; 8]).unwrap();
    }

    #[test]
    fn devices_come_and_go_by_message() {
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
