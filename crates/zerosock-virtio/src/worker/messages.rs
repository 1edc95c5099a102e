//! Messages to a worker: from other threads, and between its devices.
//!
//! # Invariants
//!
//! - A message makes its receiver active; it never waits for another wake-up.
//! - A message that cannot be delivered is answered.
//! - The number of messages handled at once is bounded ([`super::intake`]).

use std::fmt;

use zerosock_proto::Instant;
use zerosock_vhost_user::liveness::LivenessQuery;
use zerosock_vhost_user::{DeviceCommand, DevicePort, Reply};

use super::Worker;
use super::intake::Intake;
use crate::device::WorkerDevice;
use crate::mailbox::Sender;

/// A change of the state that the devices of a worker share.
pub type Update<D> = Box<dyn FnOnce(&mut <D as WorkerDevice>::Shared) + Send>;

/// A message of another thread to a worker.
pub enum WorkerMessage<D: WorkerDevice> {
    /// A command of the VMM of device `vm`.
    Command {
        /// The number of the device.
        vm: u32,
        /// The command.
        command: DeviceCommand,
        /// The token for the answer.
        reply: Reply,
    },
    /// A message of a device on another worker to device `vm`.
    Device {
        /// The number of the device.
        vm: u32,
        /// The message.
        message: D::Message,
    },
    /// A new device of this worker; its address contains its number.
    AddDevice(Box<D>),
    /// Remove a device. Its front-end has disconnected.
    RemoveDevice {
        /// The number of the device.
        vm: u32,
    },
    /// Change the shared state.
    Update(Update<D>),
    /// Answered as soon as it is handled.
    Liveness(LivenessQuery),
    /// End all devices and the thread.
    Shutdown,
}

impl<D: WorkerDevice> fmt::Debug for WorkerMessage<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            WorkerMessage::Command { .. } => "Command",
            WorkerMessage::Device { .. } => "Device",
            WorkerMessage::AddDevice(_) => "AddDevice",
            WorkerMessage::RemoveDevice { .. } => "RemoveDevice",
            WorkerMessage::Update(_) => "Update",
            WorkerMessage::Liveness(_) => "Liveness",
            WorkerMessage::Shutdown => "Shutdown",
        })
    }
}

impl<D: WorkerDevice> Worker<D> {
    /// Delivers messages between the worker's devices. Each makes its receiver active, so that none
    /// waits for a wake-up.
    pub fn deliver(&mut self, now: Instant) {
        // Bounded: the answer to a message is another message, and sockets must have their turn.
        let mut intake = Intake::default();
        while intake.is_open()
            && let Some((vm, message)) = self.outbox.pop_local()
        {
            intake.add_of_device(&message);
            self.deliver_to(vm, message, now);
        }
        self.send_remote();
    }

    /// Delivers a message to device `vm`, or answers it if that device is removed; then the urgent
    /// messages that follow from it.
    fn deliver_to(&mut self, vm: u32, message: D::Message, now: Instant) {
        let mut next = Some((vm, message));
        while let Some((vm, message)) = next {
            match self.lend(vm, now) {
                (Some(device), mut cx) => {
                    device.on_message(message, &mut cx);
                    self.activate(vm);
                }
                (None, mut cx) => D::undeliverable(message, &mut cx),
            }
            next = self.outbox.pop_urgent();
        }
    }

    fn add_device(&mut self, device: D, now: Instant) {
        let vm = device.addr().vm;
        self.add(device);
        let (device, mut cx) = self.lend(vm, now);
        if let Some(device) = device {
            // The device has logged an error.
            let _ = device.start(&mut cx);
        }
    }

    fn remove_device(&mut self, vm: u32, now: Instant) {
        let (Some(device), mut cx) = self.lend(vm, now) else {
            return;
        };
        device.retire(&mut cx);
        if let Some(slot) = self.devices.0.remove(vm)
            && let Some(at) = slot.armed
        {
            self.deadlines.remove(&(at, vm));
        }
        self.active.retain(|&other| other != vm);
    }

    /// Handles messages of other threads. Returns false on shutdown.
    pub fn take_messages(&mut self) -> bool {
        let mut messages = Vec::new();
        let mut intake = Intake::default();
        let mut queued = self.mailbox.drain();
        while intake.is_open()
            && let Some(message) = queued.next()
        {
            match &message {
                WorkerMessage::Device { message, .. } => intake.add_of_device(message),
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
                WorkerMessage::Device { vm, message } => self.deliver_to(vm, message, now),
                WorkerMessage::AddDevice(device) => self.add_device(*device, now),
                WorkerMessage::RemoveDevice { vm } => self.remove_device(vm, now),
                WorkerMessage::Update(update) => update(&mut self.shared),
                WorkerMessage::Liveness(query) => query.answer(),
                WorkerMessage::Shutdown => {
                    self.end_devices();
                    self.send_remote();
                    return false;
                }
            }
        }
        true
    }

    /// Ends all devices: see [`WorkerDevice::end`].
    pub fn end_devices(&mut self) {
        let now = self.clock.now();
        for vm in self.devices.numbers() {
            let (device, mut cx) = self.lend(vm, now);
            if let Some(device) = device {
                device.end(&mut cx);
            }
        }
    }
}

/// The port through which the control thread sends commands to a device of a worker.
#[derive(Debug)]
pub struct WorkerPort<D: WorkerDevice> {
    /// The number of the device.
    pub vm: u32,
    /// The worker that has the device.
    pub worker: Sender<WorkerMessage<D>>,
}

impl<D> DevicePort for WorkerPort<D>
where
    D: WorkerDevice + Send + 'static,
    D::Message: 'static,
{
    fn submit(&mut self, command: DeviceCommand, reply: Reply) {
        // A worker that has ended drops the reply, which answers `Failed`.
        let _ = self.worker.send(WorkerMessage::Command {
            vm: self.vm,
            command,
            reply,
        });
    }
}
