//! For tests: a device with two queues that does nothing but what a test tells it.

use zerosock_proto::Instant;
use zerosock_vhost_user::{DeviceCommand, Reply};

use crate::command::{self, QueueStarted, VirtioDevice};
use crate::device::{Context, Event, Message, WorkerDevice};
use crate::outbox::{DeviceAddr, Outbox};
use crate::queues::{QueueSet, Quiesced, Scope};
use crate::ring::Ring;

/// See the module.
#[derive(Debug)]
pub(crate) struct TestDevice {
    pub(crate) addr: DeviceAddr,
    pub(crate) queues: QueueSet<[Option<Ring>; 2]>,
    /// What [`VirtioDevice::quiesce`] answers.
    pub(crate) quiesced: Quiesced,
    pub(crate) features: u64,
    /// How many turns it needs to end its connections, after the first part.
    pub(crate) parts: usize,
    /// The calls of the worker, in their order.
    pub(crate) calls: Vec<Call>,
}

#[derive(Debug, Eq, PartialEq)]
pub(crate) enum Call {
    Turn,
    Event(u32),
    Note(u32),
    Started { index: u16, resumed: bool },
    Release(Scope),
    ResetPart { stopped: bool },
    Reset { stopped: bool },
    MemoryReplaced { had: bool },
    Forgotten,
    Finished,
    Retired,
    Ended,
}

/// Notes between test devices.
#[derive(Debug)]
pub(crate) enum Note {
    /// The bytes that the receiver copies.
    Bytes(usize),
    /// Recorded by its receiver.
    Number(u32),
}

impl Message for Note {
    fn copied_bytes(&self) -> usize {
        match self {
            Note::Bytes(bytes) => *bytes,
            Note::Number(_) => 0,
        }
    }
}

impl TestDevice {
    pub(crate) fn new(number: u32) -> TestDevice {
        TestDevice {
            addr: DeviceAddr { worker: 0, number },
            queues: QueueSet::new(0),
            quiesced: Quiesced::Done,
            features: 0,
            parts: 0,
            calls: Vec::new(),
        }
    }
}

impl WorkerDevice for TestDevice {
    /// The bytes of the messages received, and a number that a test changes.
    type Shared = (Vec<usize>, usize);
    type Message = Note;

    fn addr(&self) -> DeviceAddr {
        self.addr
    }

    fn on_event(&mut self, event: Event, _: &mut Context<'_, Self>) {
        self.calls.push(Call::Event(event.key));
    }

    fn on_message(&mut self, message: Note, cx: &mut Context<'_, Self>) {
        match message {
            Note::Bytes(bytes) => cx.shared.0.push(bytes),
            Note::Number(number) => self.calls.push(Call::Note(number)),
        }
    }

    /// Returns the message to the first device.
    fn undeliverable(message: Note, outbox: &mut Outbox<Note>) {
        let (worker, number) = (0, 0);
        outbox.send(DeviceAddr { worker, number }, message);
    }

    fn command(&mut self, command: DeviceCommand, reply: Reply, cx: &mut Context<'_, Self>) {
        command::command(self, command, reply, cx);
    }

    fn turn(&mut self, cx: &mut Context<'_, Self>) -> bool {
        self.calls.push(Call::Turn);
        command::finish(self, cx);
        false
    }

    fn next_timeout(&self) -> Option<Instant> {
        self.queues.next_timeout()
    }

    fn has_available_chains(&mut self) -> bool {
        false
    }

    fn enable_kicks(&mut self) -> bool {
        false
    }

    fn retire(&mut self, _: &mut Context<'_, Self>) {
        self.calls.push(Call::Retired);
    }

    fn end(&mut self, _: &mut Context<'_, Self>) {
        self.calls.push(Call::Ended);
    }
}

impl VirtioDevice for TestDevice {
    type Rings = [Option<Ring>; 2];

    fn queues(&mut self) -> &mut QueueSet<Self::Rings> {
        &mut self.queues
    }

    fn set_features(&mut self, features: u64) {
        self.features = features;
    }

    fn queue_started(&mut self, index: u16, started: QueueStarted, _: &mut Context<'_, Self>) {
        let resumed = started.resumed;
        self.calls.push(Call::Started { index, resumed });
    }

    fn release(&mut self, scope: Scope, _: &mut Context<'_, Self>) {
        self.calls.push(Call::Release(scope));
    }

    fn quiesce(&mut self, _: Scope, _: &mut Context<'_, Self>) -> Quiesced {
        self.quiesced
    }

    fn command_finished(&mut self) {
        self.calls.push(Call::Finished);
    }

    fn reset_part(&mut self, stopped: bool, _: &mut Context<'_, Self>) -> bool {
        let is_last = self.parts == 0;
        if !is_last {
            self.parts -= 1;
            self.calls.push(Call::ResetPart { stopped });
        }
        is_last
    }

    fn reset(&mut self, stopped: bool, _: &mut Context<'_, Self>) {
        self.calls.push(Call::Reset { stopped });
    }

    fn forgotten(&mut self) {
        self.calls.push(Call::Forgotten);
    }

    fn memory_replaced(
        &mut self,
        old: Option<std::sync::Arc<zerosock_ring::Memory>>,
        _: &mut Context<'_, Self>,
    ) {
        let had = old.is_some();
        self.calls.push(Call::MemoryReplaced { had });
    }
}
