//! Messages to a worker: from other threads, and between its devices.
//!
//! # Invariants
//!
//! - A message makes its receiver active; it never waits for another wake-up.
//! - A message that cannot be delivered is answered.
//! - The number of messages handled at once is bounded ([`super::intake`]).

use std::sync::Arc;

use zerosock_proto::Instant;
use zerosock_proto::vsock::FlowId;

use super::Worker;
use super::intake::Intake;
use crate::device::Device;
use crate::device::sibling_message::SiblingMessage;
use crate::routing::Routes;
use zerosock_vhost_user::liveness::LivenessQuery;
use zerosock_vhost_user::{DeviceCommand, Notice, Reply};

/// A message of another thread to a worker.
#[derive(Debug)]
pub(crate) enum WorkerMessage {
    /// A command of the VMM of `vm`.
    Command {
        vm: u32,
        command: DeviceCommand,
        reply: Reply,
    },
    /// A message of a sibling on another worker to `vm`.
    Sibling { vm: u32, message: SiblingMessage },
    /// A new device of this worker; its address contains its number.
    AddDevice(Box<Device>),
    /// Remove a device. Its front-end has disconnected.
    RemoveDevice { vm: u32 },
    /// New routes. `taken` is dropped when the worker uses them.
    Routes {
        routes: Arc<Routes>,
        taken: Arc<Notice>,
    },
    /// Answered as soon as it is handled.
    Liveness(LivenessQuery),
    /// End all connections and the thread.
    Shutdown,
}

impl Worker {
    /// Delivers messages of devices to their siblings. Each makes its receiver active, so that none waits
    /// for a wake-up.
    pub(crate) fn deliver(&mut self, now: Instant) {
        // Bounded: the answer to a message is another message, and sockets must have their turn.
        let mut intake = Intake::default();
        while intake.is_open()
            && let Some((vm, message)) = self.outbox.pop_local()
        {
            intake.add_from_sibling(&message);
            self.deliver_to(vm, message, now);
        }
        self.send_remote();
    }

    /// Delivers a message to device `vm`, or answers it if that device is removed.
    fn deliver_to(&mut self, vm: u32, message: SiblingMessage, now: Instant) {
        if let SiblingMessage::HandOff { to, pair } = message {
            return self.hand_off(vm, to, pair, now);
        }
        let (device, mut cx) = self.lend(vm, now);
        match (device, message) {
            (Some(device), message) => {
                device.handle_sibling_message(message, &mut cx);
                self.activate(vm);
            }
            (None, SiblingMessage::TakeOver(handoff)) => handoff.abandon(&mut cx),
            (None, message) => {
                if let Some((to, answer)) = message.undeliverable() {
                    cx.outbox.send(to, answer);
                }
            }
        }
    }

    /// Moves a connection to another queue pair of its device. If that is on this worker, the move is
    /// completed at once, so that the embedding program always finds the connection.
    fn hand_off(&mut self, vm: u32, flow: FlowId, pair: u16, now: Instant) {
        let (Some(device), mut cx) = self.lend(vm, now) else {
            return;
        };
        let here = device.addr().worker;
        let Some((queue_pair, handoff)) = device.extract(flow, pair, &mut cx) else {
            return self.activate(vm);
        };
        self.activate(vm);
        if queue_pair.worker == here {
            self.deliver_to(queue_pair.vm, SiblingMessage::TakeOver(handoff), now);
        } else {
            self.outbox
                .send(queue_pair, SiblingMessage::TakeOver(handoff));
        }
    }

    fn add_device(&mut self, device: Box<Device>, now: Instant) {
        let vm = device.addr().vm;
        self.add(*device);
        let (device, cx) = self.lend(vm, now);
        if let Some(device) = device
            && let Err(error) = device.listen(&cx)
        {
            let cid = device.cid();
            tracing::error!(%cid, %error, "host programs cannot reach a device");
        }
    }

    fn remove_device(&mut self, vm: u32, now: Instant) {
        let (Some(device), mut cx) = self.lend(vm, now) else {
            return;
        };
        device.retire(&mut cx);
        if let Some(at) = device.armed.take() {
            self.deadlines.remove(&(at, vm));
        }
        self.devices.remove(vm);
        self.active.retain(|&other| other != vm);
    }

    /// Handles messages of other threads. Returns false on shutdown.
    pub(crate) fn take_messages(&mut self) -> bool {
        let mut messages = Vec::new();
        let mut intake = Intake::default();
        let mut queued = self.mailbox.drain();
        while intake.is_open()
            && let Some(message) = queued.next()
        {
            match &message {
                WorkerMessage::Sibling { message, .. } => intake.add_from_sibling(message),
                _ => intake.add(),
            }
            messages.push(message);
        }
        drop(queued);
        self.more_messages = !intake.is_open();
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
                WorkerMessage::Sibling { vm, message } => self.deliver_to(vm, message, now),
                WorkerMessage::AddDevice(device) => self.add_device(device, now),
                WorkerMessage::RemoveDevice { vm } => self.remove_device(vm, now),
                WorkerMessage::Routes { routes, taken } => {
                    self.routes = routes;
                    drop(taken);
                }
                WorkerMessage::Liveness(query) => query.answer(),
                WorkerMessage::Shutdown => {
                    for vm in self.devices.numbers() {
                        let (device, mut cx) = self.lend(vm, now);
                        if let Some(device) = device {
                            device.reset_connections(&mut cx);
                        }
                    }
                    self.send_remote();
                    return false;
                }
            }
        }
        true
    }
}
