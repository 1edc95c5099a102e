//! The devices on the worker of a switch.

use std::io;

use zerosock_proto::Instant;
use zerosock_vhost_user::{DeviceCommand, Reply};
use zerosock_virtio::device::{Context, Event, WorkerDevice};
use zerosock_virtio::outbox::{DeviceAddr, Outbox};

use super::frames::PortMessage;
use super::port::{SwitchPort, undeliverable};
use super::uplink::Uplink;
use crate::backend::{Backend, Never};
use crate::device::Device;

/// A device on the worker of a switch.
#[derive(Debug)]
pub enum SwitchDevice<B> {
    /// A port with a guest.
    Port(Box<Device<SwitchPort>>),
    /// A port with a back-end.
    Uplink(Box<Uplink<B>>),
}

/// Makes the same call of either device.
macro_rules! either {
    ($self:ident, $device:ident => $call:expr) => {
        match $self {
            SwitchDevice::Port($device) => $call,
            SwitchDevice::Uplink($device) => $call,
        }
    };
}

impl<B: Backend<Message = Never>> WorkerDevice for SwitchDevice<B> {
    type Shared = ();
    type Message = PortMessage;

    fn addr(&self) -> DeviceAddr {
        either!(self, device => device.addr())
    }

    fn start(&mut self, cx: &mut Context<'_, Self>) -> io::Result<()> {
        either!(self, device => device.start(&mut cx.of()))
    }

    fn on_event(&mut self, event: Event, cx: &mut Context<'_, Self>) {
        either!(self, device => device.on_event(event, &mut cx.of()));
    }

    fn on_message(&mut self, message: PortMessage, cx: &mut Context<'_, Self>) {
        either!(self, device => device.on_message(message, &mut cx.of()));
    }

    fn undeliverable(message: PortMessage, outbox: &mut Outbox<PortMessage>) {
        undeliverable(message, outbox);
    }

    fn command(&mut self, command: DeviceCommand, reply: Reply, cx: &mut Context<'_, Self>) {
        either!(self, device => device.command(command, reply, &mut cx.of()));
    }

    fn turn(&mut self, cx: &mut Context<'_, Self>) -> bool {
        either!(self, device => device.turn(&mut cx.of()))
    }

    fn next_timeout(&self) -> Option<Instant> {
        either!(self, device => device.next_timeout())
    }

    fn has_available_chains(&mut self) -> bool {
        either!(self, device => device.has_available_chains())
    }

    fn enable_kicks(&mut self) -> bool {
        either!(self, device => device.enable_kicks())
    }

    fn retire(&mut self, cx: &mut Context<'_, Self>) {
        either!(self, device => device.retire(&mut cx.of()));
    }

    fn end(&mut self, cx: &mut Context<'_, Self>) {
        either!(self, device => device.end(&mut cx.of()));
    }
}
