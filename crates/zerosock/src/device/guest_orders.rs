//! What the control thread orders the device of a VM to do with guest endpoints, and what that device reports.
//!
//! The device of a VM is the front-end of the guest endpoints of this VM: it checks their pages, and starts, stops and
//! ends their devices, which run on its worker. The control thread speaks with the agents, decides which endpoints there
//! may be, and adds and removes their devices.
//!
//! # Invariants
//! - Orders and reports for one attachment keep their order.
//! - Each `Check` for a device that has reported a `Stream` is answered by `Checked`, and each attachment that was
//!   checked without a fault ends with one `Ended`, whatever happens to the VM. The control thread removes the VM's
//!   device behind the last of them.
//! - Behind `Ended` nothing of the attachment is in use: not its pages, its endpoint's device, or its token.

use zerosock_proto::Cid;
use zerosock_ring::Extent;
use zerosock_sys::PeerFd;
use zerosock_sys::mailbox::Sender;
use zerosock_vhost_user::DeviceReply;
use zerosock_virtio::outbox::DeviceAddr;

use crate::registration::key::Nonce;
use crate::registration::{Reason, Refusal, Start, Token};

/// The number of an attachment in this daemon. Never reused.
#[derive(Copy, Clone, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub(crate) struct AttachmentKey(pub(crate) u64);

/// An order of the control thread.
#[derive(Debug)]
pub(crate) enum GuestOrder {
    /// Check that the extents lie in the VM's memory and in no other attachment, and that every page has its value. The
    /// answer is `Checked`. For a device that has reported a [`Stream`](GuestEvent::Stream): one to which guest
    /// endpoints were never [allowed](Self::Allow) does not answer. The token opens the doorbell.
    Check {
        key: AttachmentKey,
        extents: Vec<Extent>,
        nonce: Nonce,
        token: Token,
    },
    /// Start the queues of an attachment that was checked without a fault. Its endpoint's device was added to the same
    /// worker. The answer is `Started`, or `Ended` with the reason. Once for each attachment.
    Start {
        key: AttachmentKey,
        device: DeviceAddr,
        start: Start,
    },
    /// End the attachment, at any stage. The answer is `Ended`, unless it was sent already.
    End { key: AttachmentKey, reason: Reason },
    /// From now on the guest may register endpoints, which are reported there; `None`: it may not, and its two ports are
    /// as any other. Attachments are not affected. Has no answer.
    Allow(Option<GuestReports>),
}

/// A report of the device of a VM.
#[derive(Debug)]
pub(crate) enum GuestEvent {
    /// A process of the guest, from a port below 1024, has opened a stream to the registration port.
    Stream(PeerFd),
    /// Whether the pages have shown their values, or why they are refused. Behind a refusal the key is unknown.
    Checked {
        key: AttachmentKey,
        result: Result<(), Refusal>,
    },
    /// The queues run.
    Started { key: AttachmentKey },
    /// The pages are not touched any more, and never will be. The endpoint's device may be removed.
    Ended { key: AttachmentKey, reason: Reason },
    /// The guest's driver starts anew. Sent at least once for each such event.
    Reset,
}

/// A command for the device of an endpoint.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(crate) enum Step {
    SetFeatures,
    SetMemory,
    Start { index: u16, base: u16 },
    Stop(u16),
    Disconnect,
}

/// The answer of the device of a guest endpoint to a command.
#[derive(Debug)]
pub(crate) struct GuestAnswer {
    pub(super) key: AttachmentKey,
    pub(super) step: Step,
    pub(super) reply: DeviceReply,
}

/// Where the devices of VMs report, each with the CID of its VM.
pub(crate) type GuestReports = Sender<(Cid, GuestEvent)>;
