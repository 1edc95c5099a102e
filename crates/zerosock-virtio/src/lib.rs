//! Virtio devices of any kind, run by event loops.
//!
//! A [`worker`] is one thread with an event loop that owns devices. It knows a device by the trait
//! [`WorkerDevice`](device::WorkerDevice) only: it gives the device turns, events, messages of
//! other devices and commands of the VMM. A device with virtqueues has a
//! [`QueueSet`](queues::QueueSet) and implements [`VirtioDevice`](command::VirtioDevice), of which
//! [`command`] carries out the commands of [`zerosock_vhost_user`]: memory tables, start and stop
//! of queues, resets.
//!
//! The other modules are the parts of the event loop.
//!
//! # Invariants
//!
//! - No code here knows what a device is for.
//! - Nothing blocks except [`poller::Events::wait`].
#![forbid(unsafe_code)]

pub mod clock;
pub mod command;
pub mod deadline;
pub mod device;
pub mod numbers;
pub mod outbox;
pub mod poller;
pub mod queues;
pub mod ring;
pub mod spin;
#[cfg(test)]
mod test_device;
pub mod watch;
pub mod worker;

// What the author of a device needs of the crates below.
pub use zerosock_proto::Instant;
pub use zerosock_ring::{Chain, DeviceQueue, GuestSlice, Memory, Piece};
pub use zerosock_sys::account::{Account, Budget};
pub use zerosock_sys::notify::Notifier;
pub use zerosock_sys::{PeerFd, mailbox, sigbus};
pub use zerosock_vhost_user::session::{F_EVENT_IDX, F_INDIRECT_DESC, F_VERSION_1};
pub use zerosock_vhost_user::{
    Control, DeviceCommand, DeviceModel, DeviceReply, FrontendSocket, Reply, VmSpec,
};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
