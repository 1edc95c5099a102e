//! The interface between a worker and its devices: the calls that a device implements, and the
//! context that the worker passes to them.

use std::io;

use zerosock_proto::Instant;
use zerosock_sys::notify::Notifier;
use zerosock_vhost_user::{DeviceCommand, Reply};

use crate::clock::Clock;
use crate::outbox::{DeviceAddr, Outbox};
use crate::poller::{EventKind, Poller, Readiness};

/// A device that a [`Worker`](crate::worker::Worker) runs.
///
/// A device with virtqueues implements [`VirtioDevice`](crate::command::VirtioDevice) too, which has
/// the handling of commands. A device without them, such as a relay between sockets, leaves out the
/// calls that concern a driver.
///
/// # Rules
/// - No call blocks.
/// - Each call does a bounded amount of work. A device that has more to do returns true from
///   [`turn`](Self::turn).
pub trait WorkerDevice: Sized {
    /// State that all devices of a worker share.
    type Shared;
    /// A message between two devices.
    type Message: Message;

    /// The address of the device.
    fn addr(&self) -> DeviceAddr;

    /// Registers the device's descriptors, before any other call.
    ///
    /// # Errors
    /// A descriptor cannot be registered. The device has logged it and runs without it.
    fn start(&mut self, cx: &mut Context<'_, Self>) -> io::Result<()> {
        let _ = cx;
        Ok(())
    }

    /// Called before each call of [`on_event`](Self::on_event), [`on_message`](Self::on_message),
    /// [`command`](Self::command) and [`turn`](Self::turn), and [`end_call`](Self::end_call) after it: for
    /// devices that find out what they have added to the counters of their worker.
    fn begin_call(&mut self, shared: &Self::Shared) {
        let _ = shared;
    }

    /// See [`begin_call`](Self::begin_call).
    fn end_call(&mut self, shared: &Self::Shared) {
        let _ = shared;
    }

    /// Handles an event of a descriptor. The event may be stale: the descriptor may be closed and
    /// `key` reused. A turn follows.
    fn on_event(&mut self, event: Event, cx: &mut Context<'_, Self>);

    /// Handles a message of another device. A turn follows.
    fn on_message(&mut self, message: Self::Message, cx: &mut Context<'_, Self>);

    /// Answers a message to a device that does not exist any more.
    fn undeliverable(message: Self::Message, outbox: &mut Outbox<Self::Message>);

    /// Carries out a command of the VMM. The answer may come later. A turn follows. A device without a
    /// VMM has none: a reply that is dropped answers Failed.
    fn command(&mut self, command: DeviceCommand, reply: Reply, cx: &mut Context<'_, Self>) {
        let _ = (command, cx);
        drop(reply);
    }

    /// Runs one turn within the device's budget. Returns true if there is more to do.
    fn turn(&mut self, cx: &mut Context<'_, Self>) -> bool;

    /// The next time at which [`turn`](Self::turn) has timed work.
    fn next_timeout(&self) -> Option<Instant>;

    /// Whether the driver has made chains available that a turn would take. Called instead of waiting
    /// for kicks. A device without virtqueues has none.
    fn has_available_chains(&mut self) -> bool {
        false
    }

    /// Asks the driver for kicks. Returns true if chains became available meanwhile.
    fn enable_kicks(&mut self) -> bool {
        false
    }

    /// Removes the device from service, usually after [`DeviceCommand::Disconnected`].
    fn retire(&mut self, cx: &mut Context<'_, Self>);

    /// Notifies all peers that the worker ends.
    fn end(&mut self, cx: &mut Context<'_, Self>);
}

/// A message between two devices.
pub trait Message: Send {
    /// How many bytes the receiver will copy at once. The sum is bounded for each step of a worker.
    fn copied_bytes(&self) -> usize {
        0
    }
}

/// An event of a descriptor that a device has registered.
#[derive(Clone, Copy, Debug)]
pub struct Event {
    /// As in the descriptor's [`Token`](crate::poller::Token).
    pub kind: EventKind,
    /// As in the descriptor's token.
    pub key: u32,
    /// What can be done with the descriptor.
    pub readiness: Readiness,
}

/// What a worker lends to a device for one call.
pub struct Context<'a, D: WorkerDevice> {
    /// The time.
    pub now: Instant,
    /// If set, `now` may be old and this clock gives the time: see [`Context::time`].
    pub clock: Option<&'a Clock>,
    /// Where the device registers its descriptors.
    pub poller: &'a Poller,
    /// Messages to other devices.
    pub outbox: &'a mut Outbox<D::Message>,
    /// Notifies the driver.
    pub notifier: &'a Notifier,
    /// The worker polls the rings before it sleeps, so the device asks for no kicks.
    pub spins: bool,
    /// State that all devices of the worker share.
    pub shared: &'a mut D::Shared,
}

impl<D: WorkerDevice> Context<'_, D> {
    /// The same for another kind of device, one that is part of `D`.
    #[inline]
    pub fn of<E>(&mut self) -> Context<'_, E>
    where
        E: WorkerDevice<Shared = D::Shared, Message = D::Message>,
    {
        Context {
            now: self.now,
            clock: self.clock,
            poller: self.poller,
            outbox: self.outbox,
            notifier: self.notifier,
            spins: self.spins,
            shared: self.shared,
        }
    }

    /// The current time. Few packets need it, so the clock is read at the first call only.
    #[inline]
    pub fn time(&mut self) -> Instant {
        if let Some(clock) = self.clock.take() {
            self.now = clock.now();
        }
        self.now
    }
}
