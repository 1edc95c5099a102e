//! A worker: one thread, some devices, one loop.
//!
//! What must hold: nothing here blocks but the one wait; a device with work left is turned again
//! before the loop sleeps; messages sent before the sleep wake it.

use super::Clock;
use super::mailbox::Mailbox;
use super::poller::{Poller, Readiness, Source};
use crate::device::control::{DeviceCommand, Reply};
use crate::device::{Context, Device, Limits};
use crate::stats::Counters;
use crate::switch::{Message, Outbox, Routes};
use std::collections::{BTreeSet, VecDeque};
use std::io;
use std::sync::Arc;
use std::time::Duration;
use zerosock_proto::Instant;
use zerosock_sys::bell::Ringer;

/// Messages taken before devices have their turn.
const MESSAGES: usize = 1024;

/// What other threads say to a worker.
#[derive(Debug)]
pub(crate) enum WorkerMessage {
    /// The VMM of `vm` wants something.
    Command {
        vm: u32,
        command: DeviceCommand,
        reply: Reply,
    },
    /// A sibling in another worker has something for `vm`.
    Sibling { vm: u32, message: Message },
    /// End all connections and the thread.
    Shutdown,
}

/// See the module.
pub(crate) struct Worker {
    pub(crate) devices: Vec<Device>,
    pub(crate) poller: Poller,
    pub(crate) mailbox: Mailbox<WorkerMessage>,
    pub(crate) outbox: Outbox,
    pub(crate) routes: Arc<Routes>,
    pub(crate) counters: Arc<Counters>,
    pub(crate) limits: Limits,
    pub(crate) clock: Clock,
    ringer: Ringer,
    /// The mailbox may have more than was taken.
    more_messages: bool,
    active: VecDeque<u32>,
    deadlines: BTreeSet<(Instant, u32)>,
}

impl Worker {
    pub(crate) fn new(
        mailbox: Mailbox<WorkerMessage>,
        outbox: Outbox,
        routes: Arc<Routes>,
        counters: Arc<Counters>,
        limits: Limits,
    ) -> io::Result<Worker> {
        let poller = Poller::new()?;
        let ringer = Ringer::new();
        if !ringer.guarded() {
            tracing::warn!(
                "this kernel has no asynchronous I/O for us: a hostile VMM could stop the VMs \
                 that share its worker; allow io_setup and io_submit, or raise fs.aio-max-nr"
            );
        }
        poller.add(mailbox.fd(), Source::Mailbox)?;
        Ok(Worker {
            devices: Vec::new(),
            poller,
            mailbox,
            outbox,
            routes,
            counters,
            limits,
            clock: Clock::new(),
            ringer,
            more_messages: false,
            active: VecDeque::new(),
            deadlines: BTreeSet::new(),
        })
    }

    /// Runs until it is told to stop.
    pub(crate) fn run(mut self) -> io::Result<()> {
        let now = self.clock.now();
        for vm in 0..self.devices.len() {
            let (device, cx) = self.lend(vm as u32, now);
            if let Some(device) = device {
                device.listen(&cx)?;
            }
        }
        let mut events = Vec::new();
        loop {
            if !self.take_messages() {
                return Ok(());
            }
            let timeout = self.timeout();
            self.poller.wait(timeout, &mut events)?;
            let now = self.clock.now();
            for &(source, readiness) in &events {
                self.dispatch(source, readiness, now);
            }
            while let Some(&(at, vm)) = self.deadlines.first() {
                if at > now {
                    break;
                }
                self.deadlines.pop_first();
                if let Some(device) = self.devices.get_mut(vm as usize) {
                    device.armed = None;
                }
                self.activate(vm);
            }
            self.turn_devices(now);
        }
    }

    /// Tells a device what an edge was about and gives it a turn.
    fn dispatch(&mut self, source: Source, readiness: Readiness, now: Instant) {
        let vm = match source {
            Source::Mailbox => return,
            Source::Kick { vm }
            | Source::Listener { vm, .. }
            | Source::Handshake { vm, .. }
            | Source::Join { vm, .. } => vm,
        };
        let (Some(device), mut cx) = self.lend(vm, now) else {
            return;
        };
        match source {
            Source::Mailbox => {}
            Source::Kick { .. } => cx.counters.kicks.add(1),
            Source::Listener { key, .. } => device.accept(key, &mut cx),
            Source::Handshake { key, .. } => device.handshake_ready(key, &mut cx),
            Source::Join { key, .. } => device.join_ready(key, readiness, &mut cx),
        }
        self.activate(vm);
    }

    /// Gives every active device one turn.
    fn turn_devices(&mut self, now: Instant) {
        for _ in 0..self.active.len() {
            let Some(vm) = self.active.pop_front() else {
                break;
            };
            let (device, mut cx) = self.lend(vm, now);
            let Some(device) = device else { continue };
            let more = device.turn(&mut cx);
            device.active = more;
            if more {
                self.active.push_back(vm);
            }
            self.note_deadline(vm);
        }
        self.deliver_local(now);
    }

    /// Hands over what devices of this worker had to say to each other. Each message makes its
    /// receiver active, so that none waits for a wake-up.
    fn deliver_local(&mut self, now: Instant) {
        // Bounded: an answer to a message may be another message, and sockets want their turn.
        for _ in 0..1024 {
            let Some((vm, message)) = self.outbox.pop_local() else {
                break;
            };
            let (device, mut cx) = self.lend(vm, now);
            if let Some(device) = device {
                device.sibling_says(message, &mut cx);
                self.activate(vm);
            }
        }
    }

    /// Takes the messages of other threads. False: the worker is to end.
    fn take_messages(&mut self) -> bool {
        let messages: Vec<WorkerMessage> = self.mailbox.drain().take(MESSAGES).collect();
        self.more_messages = messages.len() == MESSAGES;
        if messages.is_empty() {
            return true;
        }
        let now = self.clock.now();
        for message in messages {
            match message {
                WorkerMessage::Command { vm, command, reply } => {
                    let (device, mut cx) = self.lend(vm, now);
                    if let Some(device) = device {
                        device.command(command, reply, &mut cx);
                        self.activate(vm);
                    }
                }
                WorkerMessage::Sibling { vm, message } => {
                    let (device, mut cx) = self.lend(vm, now);
                    if let Some(device) = device {
                        device.sibling_says(message, &mut cx);
                        self.activate(vm);
                    }
                }
                WorkerMessage::Shutdown => {
                    for vm in 0..self.devices.len() {
                        let (device, mut cx) = self.lend(vm as u32, now);
                        if let Some(device) = device {
                            device.say_goodbye(&mut cx);
                        }
                    }
                    return false;
                }
            }
        }
        true
    }

    fn timeout(&self) -> Option<Duration> {
        if !self.active.is_empty() || self.more_messages || self.outbox.has_local() {
            return Some(Duration::ZERO);
        }
        let at = self.deadlines.first()?.0;
        Some(at.saturating_duration_since(self.clock.now()))
    }

    fn note_deadline(&mut self, vm: u32) {
        let Some(device) = self.devices.get_mut(vm as usize) else {
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

    fn activate(&mut self, vm: u32) {
        if let Some(device) = self.devices.get_mut(vm as usize)
            && !device.active
        {
            device.active = true;
            self.active.push_back(vm);
        }
    }

    /// A device and what it needs for its turn.
    fn lend(&mut self, vm: u32, now: Instant) -> (Option<&mut Device>, Context<'_>) {
        let cx = Context {
            now,
            poller: &self.poller,
            routes: &self.routes,
            outbox: &mut self.outbox,
            counters: &self.counters,
            ringer: &self.ringer,
            limits: &self.limits,
        };
        (self.devices.get_mut(vm as usize), cx)
    }
}
