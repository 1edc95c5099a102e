//! The messages of other threads to a worker.

use std::fmt;
use std::sync::mpsc;

use zerosock_vhost_user::liveness::LivenessQuery;
use zerosock_vhost_user::{DeviceCommand, DevicePort, Reply};

use crate::device::{Context, WorkerDevice};
use crate::mailbox::Sender;

/// A change of the state that the devices of a worker share.
pub type Update<D> = Box<dyn FnOnce(&mut <D as WorkerDevice>::Shared) + Send>;

/// A step of a pause: what is done for each device of the worker, between two turns.
pub struct PauseStep<D: WorkerDevice> {
    /// Whether the worker is paused from now on: then it handles messages, those of devices too, and nothing
    /// else. Nothing is lost meanwhile.
    pub is_paused: bool,
    /// Called for each device.
    pub call: DeviceCall<D>,
    /// Gets a message when it was called for all of them.
    pub done: mpsc::Sender<()>,
}

/// See [`PauseStep`].
pub type DeviceCall<D> = Box<dyn for<'a> FnMut(&mut D, &mut Context<'a, D>) + Send>;

/// A message of another thread to a worker.
pub enum WorkerMessage<D: WorkerDevice> {
    /// A command of the VMM of device `number`.
    Command {
        /// The number of the device.
        number: u32,
        /// The command.
        command: DeviceCommand,
        /// The token for the answer.
        reply: Reply,
    },
    /// A message of a device on another worker to device `number`.
    Device {
        /// The number of the device.
        number: u32,
        /// The message.
        message: D::Message,
    },
    /// A new device of this worker; its address contains its number.
    AddDevice(Box<D>),
    /// Remove a device. Its front-end has disconnected.
    RemoveDevice {
        /// The number of the device.
        number: u32,
    },
    /// Change the shared state.
    Update(Update<D>),
    /// Pause, do a step of it, or go on.
    Pause(PauseStep<D>),
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
            WorkerMessage::Pause(_) => "Pause",
            WorkerMessage::Liveness(_) => "Liveness",
            WorkerMessage::Shutdown => "Shutdown",
        })
    }
}

/// The port through which the control thread sends commands to a device of a worker.
#[derive(Debug)]
pub struct WorkerPort<D: WorkerDevice> {
    /// The number of the device.
    pub number: u32,
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
            number: self.number,
            command,
            reply,
        });
    }
}
