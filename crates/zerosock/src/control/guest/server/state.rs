//! The state of the server of guest endpoints: VMs, streams and attachments. The files beside this one change it.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::epoll;
use rustix::net::{Shutdown, shutdown};
use zerosock_proto::{Cid, Port};
use zerosock_ring::Extent;
use zerosock_sys::account::Account;
use zerosock_sys::mailbox::Mailbox;
use zerosock_sys::{LogLimit, PeerFd};
use zerosock_vhost_user::FrontendRegistry;
use zerosock_virtio::outbox::DeviceAddr;

use super::super::key::Nonce;
use super::super::options::GuestEndpoints;
use super::super::wire::{AttachmentId, Reason, Refusal, RequestReader, Token};
use crate::control::attach::directory::Directory;
use crate::control::registry::DeviceRegistry;
use crate::device::HostAccess;
use crate::device::guest_orders::{AttachmentKey, GuestEvent, GuestReports};
use crate::routing::name::Name;

/// The keys of the server's descriptors in the epoll instance of the control thread begin here. The first is the inbox's;
/// the attach server has the keys below.
pub(crate) const FIRST_KEY: u32 = 1 << 31;
/// Pages that have not shown their values, after which the port stays shut until the VM's next reset.
pub(super) const MAX_FAILURES: u32 = 5;
/// Limit of streams of one VM that have no attachment. A further one takes the place of one without a valid request.
pub(super) const MAX_UNATTACHED: usize = 32;
/// Limit of queries of one VM that are answered while an older stream has sent no request.
pub(super) const MAX_RETIRED: usize = 64;

/// The time limits of streams.
#[derive(Copy, Clone, Debug)]
pub(crate) struct TimeLimits {
    /// For the first request: the agent writes into each page before it. Until then any process with a low port could
    /// be at the other end.
    pub(crate) request: Duration,
    /// For `Start` behind `Accepted`: the agent clears all pages before it.
    pub(crate) start: Duration,
    /// How long a stream stays open behind its last answer.
    pub(crate) close: Duration,
    /// How long a page that has not shown its value delays the answer and the VM's next check.
    pub(crate) failure: Duration,
}

impl Default for TimeLimits {
    fn default() -> TimeLimits {
        TimeLimits {
            request: Duration::from_secs(10),
            start: Duration::from_secs(60),
            close: Duration::from_secs(10),
            failure: Duration::from_secs(10),
        }
    }
}

/// What the control thread lends the server for a call.
pub(crate) struct ControlContext<'a> {
    pub(crate) registry: &'a mut DeviceRegistry,
    pub(crate) frontends: &'a mut FrontendRegistry,
}

/// The server of guest endpoints: see the [module](super).
pub(crate) struct GuestServer {
    pub(super) inbox: Mailbox<(Cid, GuestEvent)>,
    pub(super) reports: GuestReports,
    pub(super) vms: BTreeMap<Cid, GuestVm>,
    pub(super) streams: BTreeMap<u32, GuestStream>,
    pub(super) attachments: BTreeMap<AttachmentKey, Attachment>,
    pub(super) last_stream: u32,
    pub(super) last_attachment: u64,
    /// The CIDs for endpoints.
    pub(super) cids: RangeInclusive<u32>,
    /// The CID to try first.
    pub(super) next_cid: u32,
    pub(super) limits: TimeLimits,
    pub(super) directory: Arc<Directory>,
}

/// What a VM passes on to its endpoints.
#[derive(Debug)]
pub(crate) struct GuestShare {
    /// The first queue pair of the VM's device.
    pub(crate) addr: DeviceAddr,
    /// For connections to the host; without listeners.
    pub(crate) host: HostAccess,
    pub(crate) buf_alloc: u32,
    pub(crate) groups: Vec<String>,
    pub(crate) account: Account,
    pub(crate) stopped_timeout: Option<Duration>,
    /// `None`: it may have no endpoints.
    pub(crate) options: Option<GuestEndpoints>,
}

/// A configured VM.
pub(super) struct GuestVm {
    pub(super) share: GuestShare,
    /// Checks that have found a page without its value, since the last reset.
    pub(super) failures: u32,
    /// No check begins before.
    pub(super) next_check: Option<Instant>,
    /// What its guest causes to be logged.
    pub(super) log: LogLimit,
}

/// A stream to the registration port of a VM.
pub(super) struct GuestStream {
    pub(super) vm: Cid,
    pub(super) socket: PeerFd,
    /// The epoll instance that watches the socket.
    pub(super) epoll: Arc<OwnedFd>,
    pub(super) nonce: Nonce,
    pub(super) reader: RequestReader,
    /// Whether a request with a valid tag has come.
    pub(super) is_valid: bool,
    /// The beginning of a request, at most [`MAX_REQUEST`](super::super::wire::MAX_REQUEST) bytes.
    pub(super) received: Vec<u8>,
    pub(super) state: StreamState,
    /// The end of the state.
    pub(super) until: Option<Instant>,
    /// The attachments that were answered as unknown on a younger stream. A request for one of them may have been on its
    /// way on this stream.
    pub(super) retired: Vec<AttachmentId>,
}

impl Drop for GuestStream {
    fn drop(&mut self) {
        // The reaper closes the socket later. Without this, epoll would report it until then.
        let _ = epoll::delete(&self.epoll, &self.socket);
        let _ = shutdown(&self.socket, Shutdown::Both);
    }
}

/// The state of a stream.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(super) enum StreamState {
    /// It has sent no request.
    New,
    Attached(AttachmentKey),
    /// The refusal is sent at the end of the state.
    Delayed(Refusal),
    /// The last answer was sent. What is received is discarded.
    Closing,
}

/// A request to register pages that was not refused, and what became of it.
pub(super) struct Attachment {
    pub(super) vm: Cid,
    pub(super) id: AttachmentId,
    pub(super) cid: Cid,
    pub(super) name: Option<Name>,
    pub(super) ports: Vec<Port>,
    /// Taken by the check.
    pub(super) extents: Vec<Extent>,
    /// Bytes of the extents.
    pub(super) bytes: u64,
    pub(super) nonce: Nonce,
    /// Opens the doorbell.
    pub(super) token: Token,
    /// Its stream, as long as that is open.
    pub(super) stream: Option<u32>,
    /// The endpoint's device, once there is one.
    pub(super) addr: Option<DeviceAddr>,
    pub(super) stage: Stage,
}

/// The stage of an attachment, from its request to its removal.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(super) enum Stage {
    /// Another check of the VM comes first. The VM's device does not know the attachment.
    Queued,
    Checking,
    /// The workers are getting the new routes; the number of the notice.
    Joining(u64),
    Accepted,
    /// With these features.
    Starting(u64),
    Running,
    /// The VM's device was told to end it, for this reason.
    Ending(Reason),
    /// The workers are removing the endpoint's device; the number of the notice, and why.
    Removing(u64, Reason),
}
