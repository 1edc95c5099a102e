//! The connection of a driver to its device: what is negotiated over the control socket, or was given with the memory.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::Instant;

use vhost::vhost_user::message::VhostUserProtocolFeatures;
use zerosock_proto::Cid;
use zerosock_proto::addr::AddressError;
use zerosock_proto::vsock::datagram::{F_DGRAM, F_DGRAM_FLOW};
use zerosock_proto::vsock::pairs::EVENT_QUEUE;
use zerosock_proto::vsock::{QueuePairs, Shard};

use super::arena::{Arena, ArenaError};
use super::config::DriverConfig;
use super::doorbell::Doorbell;
use super::guest_device::{FEATURES, GuestDevice};
use crate::fault::Fault;
use zerosock_proto::vsock::features::{F_PAIRS, F_SEQPACKET};
use zerosock_vhost_user::frontend::{Frontend, FrontendError, SharedMemoryError};
use zerosock_virtio::deadline::deadline_in;
use zerosock_virtio::{F_EVENT_IDX, F_VERSION_1};

/// Offset of `guest_cid` in the configuration space of a vsock device, an le64 (virtio 1.2,
/// 5.10.4).
const GUEST_CID: u32 = 0;
/// Offsets of the le16 fields that F_PAIRS adds (docs/queue-pairs.md).
const MAX_QUEUE_PAIRS: u32 = 8;
const QUEUE_PAIRS: u32 = 10;

/// The CID of the host, which a service's device reports.
const HOST: u64 = 2;

/// A request for a device without a vhost-user connection.
pub(super) const NO_FRONTEND: DriverAttachError =
    DriverAttachError::Missing("a vhost-user connection");

/// The event queue's index (virtio 1.2, 5.10.2 "Virtqueues").
pub(crate) const EVENT: usize = EVENT_QUEUE as usize;

/// Why a driver could not attach to a device.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DriverAttachError {
    /// A setting out of its range: the caller's fault.
    #[error(transparent)]
    Config(#[from] super::ConfigError),
    /// The shared memory could not be created.
    #[error(transparent)]
    Arena(#[from] ArenaError),
    /// The queues could not be laid out in the memory.
    #[error("cannot set up a virtqueue: {0}")]
    Queue(#[from] super::queues::QueueSetupError),
    /// The device refused a request or violated the protocol.
    #[error(transparent)]
    Frontend(#[from] FrontendError),
    /// No eventfd could be created.
    #[error("cannot create an eventfd: {0}")]
    Eventfd(io::Error),
    /// The device lacks a feature that the driver requires.
    #[error("the vhost-user device does not offer {0}")]
    Missing(&'static str),
    /// The device reported a CID that no guest may have.
    #[error("the vhost-user device configures no valid CID: {0}")]
    Cid(#[from] AddressError),
}

impl DriverAttachError {
    /// Which side caused the error.
    pub fn fault(&self) -> Fault {
        match self {
            DriverAttachError::Config(_)
            | DriverAttachError::Frontend(FrontendError::TooManyRegions(_)) => Fault::Caller,
            DriverAttachError::Missing(_)
            | DriverAttachError::Cid(_)
            | DriverAttachError::Frontend(
                FrontendError::Closed
                | FrontendError::TimedOut { .. }
                | FrontendError::Refused { .. }
                | FrontendError::Protocol(_),
            ) => Fault::Peer,
            DriverAttachError::Arena(_)
            | DriverAttachError::Queue(_)
            | DriverAttachError::Eventfd(_)
            | DriverAttachError::Frontend(FrontendError::Connect { .. } | FrontendError::Io(_)) => {
                Fault::System
            }
        }
    }

    /// The equivalent kind of I/O error.
    pub(crate) fn kind(&self) -> io::ErrorKind {
        use io::ErrorKind;
        match self {
            DriverAttachError::Config(_) => ErrorKind::InvalidInput,
            DriverAttachError::Missing(_) => ErrorKind::Unsupported,
            DriverAttachError::Cid(_) => ErrorKind::InvalidData,
            DriverAttachError::Arena(ArenaError::Shared(SharedMemoryError::Memfd(error)))
            | DriverAttachError::Eventfd(error) => error.kind(),
            DriverAttachError::Arena(_) | DriverAttachError::Queue(_) => ErrorKind::Other,
            DriverAttachError::Frontend(error) => match error {
                FrontendError::Connect { source, .. } | FrontendError::Io(source) => source.kind(),
                FrontendError::Closed => ErrorKind::ConnectionAborted,
                FrontendError::TimedOut { .. } => ErrorKind::TimedOut,
                FrontendError::Refused { .. } => ErrorKind::ConnectionRefused,
                FrontendError::Protocol(_) => ErrorKind::InvalidData,
                FrontendError::TooManyRegions(_) => ErrorKind::InvalidInput,
            },
        }
    }
}

/// Reads the CID that the device configures for its driver.
fn guest_cid(frontend: &mut Frontend) -> Result<u64, FrontendError> {
    let mut cid = [0; 8];
    frontend.read_config(GUEST_CID, &mut cid)?;
    Ok(u64::from_le_bytes(cid))
}

/// Reads the largest number of queue pairs that a device with F_PAIRS accepts.
fn max_queue_pairs(frontend: &mut Frontend) -> Result<u16, FrontendError> {
    let mut pairs = [0; 2];
    frontend.read_config(MAX_QUEUE_PAIRS, &mut pairs)?;
    Ok(u16::from_le_bytes(pairs))
}

/// Writes the number of queue pairs in use. The device accepts it only before a queue runs.
fn set_queue_pairs(frontend: &mut Frontend, pairs: QueuePairs) -> Result<(), FrontendError> {
    frontend.write_config(QUEUE_PAIRS, &pairs.get().to_le_bytes())
}

/// The features that a driver of this configuration can use.
fn wanted_features(config: &DriverConfig) -> u64 {
    let mut wanted = FEATURES;
    if !config.datagrams {
        wanted &= !(F_DGRAM | F_DGRAM_FLOW);
    }
    if !config.event_idx {
        wanted &= !F_EVENT_IDX;
    }
    if config.queue_pairs > 1 {
        wanted |= F_PAIRS;
    }
    wanted
}

/// An attached device.
#[derive(Debug)]
pub(crate) struct Link {
    /// The vhost-user connection; `None`: other code of this process, or the agent of the guest, has the device.
    pub(super) frontend: Option<Frontend>,
    /// Whether VIRTIO_RING_F_EVENT_IDX was negotiated.
    pub(crate) event_idx: bool,
    /// Whether SOCK_SEQPACKET was negotiated.
    pub(crate) seqpacket: bool,
    /// Whether datagrams were negotiated.
    pub(crate) datagrams: bool,
    /// Whether flow control of datagrams was negotiated.
    pub(crate) datagram_flow: bool,
    /// Queue pairs in use.
    pub(crate) pairs: QueuePairs,
    /// The CID in the device's configuration space.
    pub(crate) cid: Cid,
}

impl Link {
    /// Connects and negotiates; starts no queue.
    pub(crate) fn connect(config: &DriverConfig) -> Result<Link, DriverAttachError> {
        let deadline = deadline_in(config.control_timeout);
        let frontend = Frontend::connect(&config.socket, config.control_timeout)?;
        Link::negotiate(frontend, deadline, config)
    }

    /// As [`Link::connect`], over a connected socket.
    pub(crate) fn over(
        socket: UnixStream,
        config: &DriverConfig,
    ) -> Result<Link, DriverAttachError> {
        let deadline = deadline_in(config.control_timeout);
        let frontend = Frontend::from_stream(socket, config.control_timeout)?;
        Link::negotiate(frontend, deadline, config)
    }

    /// Negotiates. The deadline holds until the queues have [started](Link::start).
    fn negotiate(
        mut frontend: Frontend,
        deadline: Option<Instant>,
        config: &DriverConfig,
    ) -> Result<Link, DriverAttachError> {
        frontend.set_deadline(deadline);
        let protocol = VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::CONFIG;
        let (features, protocol) = frontend.negotiate(wanted_features(config), protocol)?;
        if features & F_VERSION_1 == 0 {
            return Err(DriverAttachError::Missing("VIRTIO_F_VERSION_1"));
        }
        if !protocol.contains(VhostUserProtocolFeatures::CONFIG) {
            return Err(DriverAttachError::Missing("VHOST_USER_PROTOCOL_F_CONFIG"));
        }
        let cid = match (guest_cid(&mut frontend)?, &config.host_ports) {
            (HOST, Some(_)) => Cid::HOST,
            (cid, _) => Cid::try_from(cid)?.for_guest()?,
        };
        let mut pairs = QueuePairs::ONE;
        if features & F_PAIRS != 0 {
            let most = max_queue_pairs(&mut frontend)?.min(config.queue_pairs);
            // A device that reports no pairs still has the mandatory one.
            pairs = QueuePairs::new(most).unwrap_or(QueuePairs::ONE);
            set_queue_pairs(&mut frontend, pairs)?;
        }
        Ok(Link::new(Some(frontend), features, pairs, cid))
    }

    /// For a driver on the memory of `device`. Returns the features to accept too.
    pub(crate) fn of_guest(
        device: &GuestDevice,
        config: &DriverConfig,
    ) -> Result<(Link, u64), DriverAttachError> {
        let features = device.features & wanted_features(config) & !F_PAIRS;
        if features & F_VERSION_1 == 0 {
            return Err(DriverAttachError::Missing("VIRTIO_F_VERSION_1"));
        }
        let cid = device.cid.for_guest()?;
        let link = Link::new(None, features, QueuePairs::ONE, cid);
        Ok((link, features))
    }

    fn new(frontend: Option<Frontend>, features: u64, pairs: QueuePairs, cid: Cid) -> Link {
        Link {
            frontend,
            pairs,
            event_idx: features & F_EVENT_IDX != 0,
            seqpacket: features & F_SEQPACKET != 0,
            datagrams: features & F_DGRAM != 0,
            datagram_flow: features & F_DGRAM_FLOW != 0,
            cid,
        }
    }

    /// The vhost-user connection, if it has one.
    pub(crate) fn frontend(&mut self) -> Option<&mut Frontend> {
        self.frontend.as_mut()
    }

    /// The descriptor of that connection.
    pub(super) fn connection(&self) -> Option<BorrowedFd<'_>> {
        self.frontend.as_ref().map(Frontend::as_fd)
    }

    /// Passes the memory table and starts the queues, each at its index in `bases`.
    pub(super) fn start(
        &mut self,
        arena: &Arena,
        doorbell: &Doorbell,
        bases: &[u16],
    ) -> Result<(), DriverAttachError> {
        let (Doorbell::Eventfds(event_fds), Some(frontend)) = (doorbell, self.frontend()) else {
            return Err(NO_FRONTEND);
        };
        frontend.start_queues(&arena.shared, &arena.rings, event_fds, bases)?;
        frontend.set_deadline(None);
        Ok(())
    }

    /// The CID that the device has now; `None` if it does not answer.
    pub(crate) fn current_cid(&mut self) -> Option<Cid> {
        let Some(frontend) = self.frontend() else {
            // It is that of the endpoint as long as the device exists.
            return Some(self.cid);
        };
        let cid = guest_cid(frontend).ok()?;
        Cid::try_from(cid).ok()?.for_guest().ok()
    }

    /// Passes the negotiated features to a shard.
    pub(crate) fn apply_features(&self, shard: &mut Shard) {
        shard.set_seqpacket(self.seqpacket);
    }
}
