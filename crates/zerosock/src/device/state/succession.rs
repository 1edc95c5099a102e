//! What a device has of a process that it succeeds.

use std::sync::Arc;

use rustix::fd::OwnedFd;
use zerosock_proto::Instant;
use zerosock_proto::wire::vsock::SocketType;
use zerosock_ring::StateMap;

use super::host::Caller;
use crate::device::host_sockets::HostSocket;
use crate::routing::forward::RuleBoard;

/// See the [module](self).
#[derive(Debug, Default)]
pub(crate) struct Succession {
    /// A successor of this process would continue the queues.
    pub(crate) is_kept: bool,
    /// This process is about to stop for another one: no zero-copy send begins.
    pub(crate) is_ending: bool,
    /// The memory of the flow log, until the device starts.
    pub(crate) flows: Option<StateMap>,
    /// The queues that another process has run are about to be started again: host programs wait for that.
    pub(crate) awaits_queues: bool,
    /// When they stop waiting, once the device has started.
    pub(crate) waits_until: Option<Instant>,
    /// What a process that has stopped for this one has saved, until the device starts.
    pub(crate) saved: Option<SavedDevice>,
    /// The device has continued that.
    pub(crate) is_continued: bool,
    /// Programs of it without a CONNECT line, until the queues run.
    pub(crate) accepted: Vec<(HostSocket, SocketType)>,
    /// Programs of it that the guest had no room for, until the queues run.
    pub(crate) callers: Vec<Caller>,
}

/// What another process has [saved](crate::device::handover) of a device.
#[derive(Debug)]
pub(crate) struct SavedDevice {
    pub(crate) bytes: Vec<u8>,
    pub(crate) fds: Vec<OwnedFd>,
    /// Has the rules of its connections.
    pub(crate) rules: Arc<RuleBoard>,
}
