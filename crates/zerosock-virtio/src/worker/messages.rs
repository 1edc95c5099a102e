//! Handles the messages that a worker receives: from other threads, and between its devices.
//!
//! # Invariants
//!
//! - A message makes its receiver active, so that the receiver has a turn before the worker sleeps.
//! - A message that cannot be delivered is answered.
//! - The number of messages handled at once is bounded ([`super::intake`]).

use zerosock_proto::Instant;

use super::Worker;
use super::intake::Intake;
use super::message::{PauseStep, WorkerMessage};
use crate::device::WorkerDevice;

impl<D: WorkerDevice> Worker<D> {
    /// Delivers messages between the worker's devices. Each makes its receiver active, so that none
    /// waits for a wake-up. Returns whether there were any.
    pub fn deliver(&mut self, now: Instant) -> bool {
        // Bounded: the answer to a message is another message, and sockets must have their turn.
        let mut intake = Intake::default();
        let mut any = false;
        while intake.is_open()
            && let Some((number, message)) = self.outbox.pop_local()
        {
            any = true;
            intake.add_of_device(&message);
            self.deliver_to(number, message, now);
        }
        self.send_remote();
        any
    }

    /// Delivers a message to device `number`, or answers it if that device is removed.
    fn deliver_to(&mut self, number: u32, message: D::Message, now: Instant) {
        match self.lend(number, now) {
            (Some(device), mut cx) => {
                device.begin_call(cx.shared);
                device.on_message(message, &mut cx);
                device.end_call(cx.shared);
                self.activate(number);
            }
            (None, cx) => D::undeliverable(message, cx.outbox),
        }
    }

    fn add_device(&mut self, device: D, now: Instant) {
        let number = device.addr().number;
        self.add(device);
        let (device, mut cx) = self.lend(number, now);
        if let Some(device) = device {
            // The device has logged an error.
            let _ = device.start(&mut cx);
        }
    }

    fn remove_device(&mut self, number: u32, now: Instant) {
        let (Some(device), mut cx) = self.lend(number, now) else {
            return;
        };
        device.retire(&mut cx);
        if let Some(slot) = self.devices.0.remove(number)
            && let Some(at) = slot.armed
        {
            self.deadlines.remove(&(at, number));
        }
        self.active.retain(|&other| other != number);
    }

    /// Handles messages of other threads. Returns false on shutdown.
    pub fn take_messages(&mut self) -> bool {
        let mut messages = Vec::new();
        let mut intake = Intake::default();
        let mut queued = self.mailbox.drain();
        // A worker that pauses handles the messages behind in their order.
        let mut ends_batch = false;
        while intake.is_open()
            && !ends_batch
            && let Some(message) = queued.next()
        {
            ends_batch = matches!(message, WorkerMessage::Pause(_));
            match &message {
                WorkerMessage::Device { message, .. } => intake.add_of_device(message),
                _ => intake.add(),
            }
            messages.push(message);
        }
        drop(queued);
        self.more_messages = !intake.is_open() || ends_batch;
        if messages.is_empty() {
            return true;
        }
        let now = self.clock.now();
        for message in messages {
            if !self.handle_message(message, now) {
                return false;
            }
        }
        while self.is_paused {
            let now = self.clock.now();
            while self.deliver(now) {}
            let message = self.mailbox.wait();
            if !message.is_some_and(|message| self.handle_message(message, now)) {
                return false;
            }
        }
        true
    }

    /// Handles a message of another thread. Returns false on shutdown.
    fn handle_message(&mut self, message: WorkerMessage<D>, now: Instant) -> bool {
        match message {
            WorkerMessage::Command {
                number,
                command,
                reply,
            } => {
                let (device, mut cx) = self.lend(number, now);
                if let Some(device) = device {
                    device.begin_call(cx.shared);
                    device.command(command, reply, &mut cx);
                    device.end_call(cx.shared);
                    self.activate(number);
                }
            }
            WorkerMessage::Device { number, message } => self.deliver_to(number, message, now),
            WorkerMessage::AddDevice(device) => self.add_device(*device, now),
            WorkerMessage::RemoveDevice { number } => self.remove_device(number, now),
            WorkerMessage::Update(update) => update(&mut self.shared),
            WorkerMessage::Pause(step) => self.pause_step(step, now),
            WorkerMessage::Liveness(query) => query.answer(),
            WorkerMessage::Shutdown => {
                self.end_devices();
                self.send_remote();
                return false;
            }
        }
        true
    }

    fn pause_step(&mut self, mut step: PauseStep<D>, now: Instant) {
        self.is_paused = step.is_paused;
        for number in self.devices.numbers() {
            let (device, mut cx) = self.lend(number, now);
            if let Some(device) = device {
                device.begin_call(cx.shared);
                (step.call)(device, &mut cx);
                device.end_call(cx.shared);
                self.activate(number);
            }
        }
        // The receiver may have given up.
        let _ = step.done.send(());
    }

    /// Ends all devices: see [`WorkerDevice::end`].
    pub fn end_devices(&mut self) {
        let now = self.clock.now();
        for number in self.devices.numbers() {
            let (device, mut cx) = self.lend(number, now);
            if let Some(device) = device {
                device.end(&mut cx);
            }
        }
    }
}
