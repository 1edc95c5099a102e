//! The vhost-user control control_plane: what a VMM says about its device, made into whole configurations.
//!
//! One thread, [`Control`], owns the control sockets of all VMs (`frontends`, with a place for the
//! attach server). It reads their messages without
//! ever blocking ([`codec`]), checks order and validity ([`session`]), and hands complete
//! [`DeviceCommand`]s to the worker that owns the device ([`DevicePort`]). What must hold here:
//!
//! - a VMM that sends half a message, or nothing, or rubbish, delays no other VM and no data path;
//! - every descriptor that arrives is either handed on or closed, whatever happens;
//! - nothing a VMM sends panics; each kind of fault is counted ([`ControlStats`]).
//!
//! # How to drive it
//!
//! Make one [`VmSpec`] for each VM, with a [`DevicePort`] that queues commands for the worker and
//! wakes it, and call [`Control::spawn`]. Each submitted command comes with a [`Reply`], a token
//! that the worker consumes to answer; a token that is dropped answers [`DeviceReply::Failed`], so
//! that a command is always answered exactly once. A command of a VM is submitted only after its
//! previous one was answered, with one exception: [`DeviceCommand::Disconnected`] comes at once,
//! whatever is still unanswered, because the front-end may go at any time. Commands are to be
//! carried out in the order of submission.
//!
//! For one VM the order is: `Connected`, then any of the others, then `Disconnected`; then perhaps
//! `Connected` again, after `Disconnected` was answered. `SetMemory` may come while queues run:
//! the worker translates their addresses anew before it answers.
#![forbid(unsafe_code)]

pub mod codec;
pub mod fds;
pub mod frontend;
mod frontends;
mod log_limit;
mod mailbox;
mod model;
pub mod pulse;
pub mod session;
mod stats;
mod thread;
mod vm;

use std::fmt;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use zerosock_ring::{Memory, QueueConfig};
use zerosock_sys::PeerFd;
use zerosock_sys::account::Account;
use zerosock_sys::notify::CallFd;

pub use self::frontends::{ControlExtension, FrontendRegistry};
pub use self::log_limit::LogLimit;
pub use self::mailbox::Notice;
pub use self::mailbox::{FrontendLink, Reply};
pub use self::model::{ConfigWrite, DeviceModel};
pub use self::stats::FaultCounts;
pub use self::stats::{ControlStats, Fault};
pub use self::thread::Control;

/// What the front-end wants of the device; answered through the [`Reply`] that comes with it.
#[derive(Debug)]
pub enum DeviceCommand {
    /// A front-end has connected. No queue runs and there is no memory. Answer: `Done`.
    Connected {
        /// A way to close this front-end's connection, for instance when guest memory was lost.
        link: FrontendLink,
    },
    /// The virtio features that the driver accepted: a subset of those offered. Answer: `Done`.
    SetFeatures(u64),
    /// The driver has written to the configuration space, which reads like this from now on. Until
    /// then, and after the features have changed or the device was reset, it is
    /// [`DeviceModel::config`]. Answer: `Done`.
    SetConfig(Arc<[u8]>),
    /// A new memory table replaces the old one. Queues that run go on with it: their addresses
    /// are user addresses and translate anew. Answer `Done` when nothing of the old table is used
    /// any more, or `Failed` when a running queue no longer lies in it.
    SetMemory(Arc<Memory>),
    /// Start a queue. Answer: `Done`, or `Failed` when the rings do not lie in memory.
    StartQueue {
        /// Queue index, below [`DeviceModel::max_queues`].
        index: u16,
        /// Size, user addresses of the rings, next available index, and what was negotiated.
        config: QueueConfig,
        /// An eventfd that the driver writes to when buffers were made available. It is not read: a
        /// read could wait, as the front-end shares its flags.
        kick: PeerFd,
        /// To be notified when buffers were used; `None`: the driver polls.
        call: Option<CallFd>,
        /// To be notified when the queue breaks.
        err: Option<CallFd>,
        /// Whether data may pass yet; see `EnableQueue`.
        enabled: bool,
    },
    /// Replace the call descriptor of a running queue. Answer: `Done`.
    SetCall {
        /// Queue index, below [`DeviceModel::max_queues`].
        index: u16,
        /// The new descriptor; `None`: the driver polls.
        call: Option<CallFd>,
    },
    /// Replace the error descriptor of a running queue. Answer: `Done`.
    SetErr {
        /// Queue index, below [`DeviceModel::max_queues`].
        index: u16,
        /// The new descriptor, or none.
        err: Option<CallFd>,
    },
    /// Let data pass through a running queue, or stop it from doing so. Answer: `Done`.
    EnableQueue {
        /// Queue index, below [`DeviceModel::max_queues`].
        index: u16,
        /// Whether data may pass.
        enabled: bool,
    },
    /// Stop a running queue: complete every chain that is held, close its descriptors. Answer:
    /// `Base` with the index of the next available entry.
    StopQueue {
        /// Queue index, below [`DeviceModel::max_queues`].
        index: u16,
    },
    /// Stop all queues and reset all connections; the memory stays. Answer: `Done`.
    ResetDevice,
    /// The front-end is gone: stop all queues, reset all connections, drop the memory. Answer:
    /// `Done`, after which the next front-end may connect.
    Disconnected,
}

impl DeviceCommand {
    /// A short name for logs.
    pub fn name(&self) -> &'static str {
        match self {
            DeviceCommand::Connected { .. } => "Connected",
            DeviceCommand::SetFeatures(_) => "SetFeatures",
            DeviceCommand::SetConfig(_) => "SetConfig",
            DeviceCommand::SetMemory(_) => "SetMemory",
            DeviceCommand::StartQueue { .. } => "StartQueue",
            DeviceCommand::SetCall { .. } => "SetCall",
            DeviceCommand::SetErr { .. } => "SetErr",
            DeviceCommand::EnableQueue { .. } => "EnableQueue",
            DeviceCommand::StopQueue { .. } => "StopQueue",
            DeviceCommand::ResetDevice => "ResetDevice",
            DeviceCommand::Disconnected => "Disconnected",
        }
    }
}

/// A worker's answer to a [`DeviceCommand`].
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum DeviceReply {
    /// It was carried out.
    Done,
    /// The queue has stopped; the index of the next available entry.
    Base(u16),
    /// It was not carried out, and why; the front-end is told so where the protocol allows.
    Failed(String),
}

/// The way from the control thread to the worker that owns a device.
pub trait DevicePort: Send {
    /// Queues `command` for the worker, which answers through `reply`. Called on the control
    /// thread: it must not block and must not wait for the worker.
    fn submit(&mut self, command: DeviceCommand, reply: Reply);
}

/// A VM as the control control_plane sees it.
///
/// One whose front-end is connected already has nobody after it: when that front-end goes, and the
/// worker has answered `Disconnected`, the VM is forgotten.
pub struct VmSpec {
    /// What logs call it.
    pub name: String,
    /// The kind of device that its driver gets.
    pub model: Arc<dyn DeviceModel>,
    /// Where its front-ends come from. It is made non-blocking.
    pub socket: FrontendSocket,
    /// The largest queue that the front-end may set up: a power of two of at most 32768.
    pub max_queue_size: u16,
    /// Refuse memory that can shrink (no F_SEAL_SHRINK). Where it is taken as it is, what vanishes
    /// costs that VM alone, as long as the guard against SIGBUS is the process's handler.
    pub sealed_memory: bool,
    /// What its front-end may have of descriptors and mapped memory.
    pub account: Account,
    /// Where this VM's commands go.
    pub port: Box<dyn DevicePort>,
}

/// Where a VM's front-ends come from.
#[derive(Debug)]
pub enum FrontendSocket {
    /// A bound vhost-user socket: one front-end after the other.
    Listener(PeerFd),
    /// The one front-end's connection.
    Connected(UnixStream),
}

impl fmt::Debug for VmSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VmSpec")
            .field("name", &self.name)
            .field("socket", &self.socket)
            .field("max_queue_size", &self.max_queue_size)
            .field("sealed_memory", &self.sealed_memory)
            .finish_non_exhaustive()
    }
}
