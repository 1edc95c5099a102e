//! vhost-user for devices of any kind: the control side of a back-end, and a front-end
//! ([`frontend`]).
//!
//! One thread, [`Control`], owns the control sockets of all VMs. It reads their messages without
//! blocking ([`codec`]), checks order and validity ([`session`]), and hands complete
//! [`DeviceCommand`]s to the worker that owns the device ([`DevicePort`]).
//!
//! # Invariants
//!
//! - A VMM that sends half a message, no message or garbage delays no other VM and no data path.
//! - Every descriptor that arrives is either handed on or closed.
//! - No message of a VMM causes a panic; faults are counted by kind ([`ControlStats`]).
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
pub mod journal;
mod link;
pub mod liveness;
mod mailbox;
mod model;
pub mod session;
mod stats;
mod thread;
mod vm;

use std::fmt;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use zerosock_ring::{DirtyLog, Memory, QueueConfig};
use zerosock_sys::PeerFd;
use zerosock_sys::account::Account;
use zerosock_sys::notify::CallFd;

use self::journal::VmJournal;

#[cfg(fuzzing)]
pub use self::vm::fuzz;

pub use self::frontends::{ControlExtension, FrontendRegistry};
pub use self::link::FrontendLink;
pub use self::mailbox::Notice;
pub use self::mailbox::{DeviceReply, Reply};
pub use self::model::{ConfigWrite, DeviceModel};
pub use self::stats::FaultCounts;
pub use self::stats::{ControlStats, FrontendFault};
pub use self::thread::Control;
pub use vhost::vhost_user::message::VhostUserProtocolFeatures as ProtocolFeatures;

/// A request to the worker that owns the device; answered through the [`Reply`] that comes with it.
#[derive(Debug)]
pub enum DeviceCommand {
    /// A front-end connected. No queue runs and no memory is mapped. Answer: `Done`.
    Connected {
        /// Closes this front-end's connection, for instance when guest memory was lost.
        link: FrontendLink,
    },
    /// The virtio features that the driver accepted: a subset of those offered. While a queue runs
    /// only [`F_LOG_ALL`](session::F_LOG_ALL) changes: it turns the log on and off. Answer: `Done`.
    SetFeatures(u64),
    /// A log of written pages, in which the device marks what it writes while the features have
    /// [`F_LOG_ALL`](session::F_LOG_ALL). Answer: `Done` when an earlier log is no longer used.
    SetLog(Arc<DirtyLog>),
    /// How writes into the used ring of a running queue are logged. Answer: `Done`.
    SetUsedLog {
        /// Queue index, below [`DeviceModel::max_queues`].
        index: u16,
        /// The guest address of the used ring for the log; `None`: they are not logged.
        guest_addr: Option<u64>,
    },
    /// The configuration space after a write by the driver, or with another MTU. Until the first
    /// one, and after a change of the features or a reset of the device, it is
    /// [`DeviceModel::config`] with the last MTU of the front-end. Answer: `Done`.
    SetConfig(Arc<[u8]>),
    /// A new memory table replaces the old one. Running queues go on in it: their ring addresses
    /// are user addresses, which the worker translates again. Answer: `Done` when the old table is
    /// no longer used, or `Failed` when a running queue does not lie in the new one.
    SetMemory(Arc<Memory>),
    /// Start a queue. Answer: `Done`, or `Failed` when the rings do not lie in memory.
    StartQueue {
        /// Queue index, below [`DeviceModel::max_queues`].
        index: u16,
        /// Size, user addresses of the rings, next available index, and what was negotiated.
        config: QueueConfig,
        /// An eventfd that the driver writes to after it has made buffers available. The worker
        /// does not read it: the front-end shares its O_NONBLOCK flag, so a read could block.
        kick: PeerFd,
        /// Signalled after buffers were used; `None`: the driver polls.
        call: Option<CallFd>,
        /// Signalled when the queue breaks.
        err: Option<CallFd>,
        /// As in `SetUsedLog`.
        used_log: Option<u64>,
        /// Whether the queue may process buffers already; see `EnableQueue`.
        enabled: bool,
        /// The number of this queue start, for the record of chains in flight. A process that repeats the
        /// command of a predecessor gives the same number, and the queue continues where the
        /// predecessor was killed. No other start of the queue has it. 0: the queue starts at its base.
        start: u64,
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
    /// Enable or disable processing of buffers on a running queue. Answer: `Done`.
    EnableQueue {
        /// Queue index, below [`DeviceModel::max_queues`].
        index: u16,
        /// Whether the queue may process buffers.
        enabled: bool,
    },
    /// Stop a running queue: complete every chain that is held, close the queue's descriptors.
    /// Answer: `Base` with the index of the next available entry.
    StopQueue {
        /// Queue index, below [`DeviceModel::max_queues`].
        index: u16,
    },
    /// Stop all queues and reset all connections; the memory stays. Answer: `Done`.
    ResetDevice,
    /// Send one RARP broadcast with this MAC address: the guest has moved here, and its driver does
    /// not announce that itself. Answer: `Done`, or `Failed` if it was not sent.
    SendRarp([u8; 6]),
    /// The front-end disconnected: stop all queues, reset all connections, drop the memory. Answer:
    /// `Done`, after which the next front-end may connect.
    Disconnected,
}

impl DeviceCommand {
    /// A short name for logs.
    pub fn name(&self) -> &'static str {
        match self {
            DeviceCommand::Connected { .. } => "Connected",
            DeviceCommand::SetFeatures(_) => "SetFeatures",
            DeviceCommand::SetLog(_) => "SetLog",
            DeviceCommand::SetUsedLog { .. } => "SetUsedLog",
            DeviceCommand::SetConfig(_) => "SetConfig",
            DeviceCommand::SetMemory(_) => "SetMemory",
            DeviceCommand::StartQueue { .. } => "StartQueue",
            DeviceCommand::SetCall { .. } => "SetCall",
            DeviceCommand::SetErr { .. } => "SetErr",
            DeviceCommand::EnableQueue { .. } => "EnableQueue",
            DeviceCommand::StopQueue { .. } => "StopQueue",
            DeviceCommand::ResetDevice => "ResetDevice",
            DeviceCommand::SendRarp(_) => "SendRarp",
            DeviceCommand::Disconnected => "Disconnected",
        }
    }
}

/// Queues commands of the control thread for the worker that owns a device.
pub trait DevicePort: Send {
    /// Queues `command` for the worker, which answers through `reply`. Called on the control
    /// thread: it must not block and must not wait for the worker.
    fn submit(&mut self, command: DeviceCommand, reply: Reply);
}

/// A VM and its device, for the control thread.
///
/// A VM with [`FrontendSocket::Connected`] accepts no second front-end: it is removed when its
/// front-end has disconnected and the worker has answered `Disconnected`.
pub struct VmSpec {
    /// The VM's name in logs.
    pub name: String,
    /// The kind of device that the driver gets.
    pub model: Arc<dyn DeviceModel>,
    /// The source of front-end connections. It is made non-blocking.
    pub socket: FrontendSocket,
    /// The largest queue that the front-end may set up: a power of two of at most 32768.
    pub max_queue_size: u16,
    /// Refuse memory that can shrink (no F_SEAL_SHRINK). If it is accepted and vanishes, only this
    /// VM is lost, provided that the SIGBUS guard of `zerosock_sys` is installed.
    pub sealed_memory: bool,
    /// Limits the descriptors and the mapped memory of the front-end.
    pub account: Account,
    /// Takes the commands to this VM's device.
    pub port: Box<dyn DevicePort>,
    /// Records what a successor of this process needs; `None`: a front-end's connection ends with
    /// the process.
    pub journal: Option<VmJournal>,
}

/// The source of a VM's front-end connections.
#[derive(Debug)]
pub enum FrontendSocket {
    /// A bound vhost-user socket. It serves one front-end at a time.
    Listener(PeerFd),
    /// The connection of the only front-end.
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

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
