//! The configuration of a set of devices, and errors of starting and changing it.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::time::Duration;
use zerosock_proto::Cid;
use zerosock_proto::addr::AddressError;
use zerosock_proto::vsock::QueuePairs;
use zerosock_vhost_user::journal::VmJournal;
use zerosock_virtio::numbers::MAX_DEVICES;

use crate::control::attach::AttachTerms;
use crate::control::guest::options::GuestEndpoints;
use crate::routing::access::AccessList;
use crate::routing::forward::{ForwardRule, ListenRule, RuleError};

/// How a guest and programs on the host connect to each other.
#[derive(Debug)]
pub enum HostSide {
    /// Hybrid vsock over Unix sockets.
    Hybrid {
        /// Programs that accept connections to port P of CID 2 listen on `path_P`.
        path: PathBuf,
        /// The bound socket where programs send `CONNECT <port>`.
        listener: UnixListener,
        /// The same for connections that carry messages (SEQPACKET), if wanted.
        messages: Option<HybridMessages>,
    },
    /// The AF_VSOCK of this machine.
    Forward {
        /// Connections of the guest to CID 2 go to this CID.
        cid: u32,
        /// Connections to these AF_VSOCK ports of this machine go to the same ports of the guest.
        listen: Vec<u32>,
    },
    /// No connections: the guest reaches only siblings.
    None,
}

/// Hybrid vsock for messages, over Unix sockets of type SOCK_SEQPACKET: each message is one packet in
/// either direction. The first packet that a program sends is the `CONNECT <port>` line, and the first
/// that it receives is the `OK <port>` line.
///
/// An empty packet is a message too. A program tells it from the end of the connection, where recv(2)
/// also returns 0, by SO_PASSCRED: the end carries no credentials. MSG_EOR is not transferred, since
/// Unix sockets do not have it.
#[derive(Debug)]
pub struct HybridMessages {
    /// Programs that accept connections to port P of CID 2 listen on `path_P`.
    pub path: PathBuf,
    /// The bound and listening socket, of type SOCK_SEQPACKET.
    pub listener: OwnedFd,
}

/// One VM.
#[derive(Debug)]
pub struct VmConfig {
    /// The guest's CID, unique in a daemon.
    pub cid: Cid,
    /// The bound socket to which the VMM connects.
    pub listener: UnixListener,
    /// How the guest and programs on the host connect to each other.
    pub host: HostSide,
    /// Bytes that the guest may send on a connection before they are acknowledged: the `buf_alloc`
    /// that it is told. Also the most bytes that are copied for a stalled connection.
    pub buf_alloc: u32,
    /// The largest queue that the VMM may set up: a power of two, at most 32768.
    pub queue_size: u16,
    /// Guests with a common group reach each other.
    pub groups: Vec<String>,
    /// Refuse guest memory that can shrink: a region without F_SEAL_SHRINK. If it is
    /// accepted and vanishes, only this VM loses its device. The memory of attached processes must
    /// always be sealed.
    pub require_sealed_memory: bool,
    /// The longest pause of the VM that connections outlast; `None`: any. A VMM may tell a reset of the
    /// guest from a pause (RESET_DEVICE), and then connections end at once; else they end when the next
    /// driver starts, or after this time.
    pub stopped_timeout: Option<Duration>,
    /// Which endpoints the guest may have on its pages; `None`: none.
    pub guest_endpoints: Option<GuestEndpoints>,
    /// What makes a process that starts after this one has been killed continue the VM's device;
    /// `None`: it ends with the process.
    pub succession: Option<Succession>,
}

/// What one process leaves to the next one that serves a VM.
pub struct Succession {
    /// The connection of the front-end.
    pub journal: VmJournal,
    /// The memory of the device that the process before has left: a file, which is checked.
    pub state: Option<OwnedFd>,
    /// What a process that has [paused](crate::daemon::Daemon::pause) for this one has passed on of the VM's
    /// queue pairs.
    pub saved: Vec<SavedQueuePair>,
    /// Keeps a new file of this kind for the process after this one.
    pub keep_state: Box<dyn FnOnce(BorrowedFd<'_>) + Send>,
}

/// The connections of a queue pair, for another process. All of it is checked there.
#[derive(Debug)]
pub struct SavedQueuePair {
    /// The number of the queue pair.
    pub pair: u16,
    /// What is to be passed on, in a format of the library's own.
    pub bytes: Vec<u8>,
    /// The descriptors that belong to it, in their order.
    pub fds: Vec<OwnedFd>,
}

impl SavedQueuePair {
    /// Checks the form of what was saved, before the process that has saved it is told to end.
    ///
    /// # Errors
    /// Why it cannot be used.
    pub fn check(bytes: &[u8]) -> Result<(), String> {
        crate::device::check_saved(bytes)
    }
}

impl fmt::Debug for Succession {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Succession")
            .field("journal", &self.journal)
            .field("state", &self.state)
            .field("saved", &self.saved.len())
            .finish_non_exhaustive()
    }
}

/// The default of [`DaemonConfig::connect_timeout`](crate::daemon::DaemonConfig::connect_timeout): less than the
/// 2 s after which Linux guests give up by themselves (VSOCK_DEFAULT_CONNECT_TIMEOUT).
pub const CONNECT_TIMEOUT: Duration = Duration::from_millis(1500);

/// The default of [`VmConfig::stopped_timeout`].
pub const STOPPED_TIMEOUT: Duration = Duration::from_secs(300);

/// Changes to a running daemon. Everything else stays as it is, including all connections but those of
/// VMs that are removed.
#[derive(Debug, Default)]
pub struct Reload {
    /// VMs to add.
    pub add: Vec<VmConfig>,
    /// VMs to remove: their front-ends are disconnected and their connections reset.
    pub remove: Vec<Cid>,
    /// New groups of VMs that stay.
    pub groups: BTreeMap<Cid, Vec<String>>,
    /// New options of VMs that stay. Without options the guest endpoints of the VM end, and no others can be registered.
    pub guest_endpoints: BTreeMap<Cid, Option<GuestEndpoints>>,
    /// The complete access list.
    pub access: AccessList,
    /// New terms of the attach server; `None`: no change.
    pub attach: Option<AttachTerms>,
    /// The complete list of forwarding rules. Connections of rules that are not in it continue.
    pub forward: Vec<ForwardRule>,
    /// The complete list of listening rules. The sockets of others are closed; their connections
    /// continue.
    pub listen: Vec<ListenRule>,
}

/// Why a daemon was not changed. It runs as before.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReloadError {
    /// No VM has this CID, or it is being removed.
    #[error("there is no VM with CID {0}")]
    UnknownVm(Cid),
    /// The CID of a VM to add belongs to another endpoint, or to one that is being removed.
    #[error("CID {0} belongs to a VM or process, or to one that is being removed")]
    CidTaken(Cid),
    /// The daemon has no attach socket.
    #[error("there is no attach socket")]
    NoAttachSocket,
    /// The host side of a VM could not be set up.
    #[error("the VM with CID {cid}: {source}")]
    Host {
        /// The VM's CID.
        cid: Cid,
        /// The cause.
        source: Box<StartError>,
    },
    /// A VM's socket cannot be used.
    #[error("the socket of the VM with CID {cid}: {source}")]
    Socket {
        /// The VM's CID.
        cid: Cid,
        /// The cause.
        source: io::Error,
    },
    /// The workers have no free address for another VM.
    #[error("the workers have no free address for the VM with CID {0}")]
    Full(Cid),
    /// The rules have a conflict.
    #[error(transparent)]
    Rules(RuleError),
    /// A socket of a rule, or a thread that serves rules, cannot be set up.
    #[error("the forwarding rules cannot be served: {0}")]
    RuleThreads(io::Error),
    /// The daemon is shutting down.
    #[error("the daemon is shutting down")]
    Ending,
}

/// Why a daemon did not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// The CID of a VM is 0, 1, 2 or 4294967295.
    #[error(transparent)]
    Cid(#[from] AddressError),
    /// Two VMs have the same CID.
    #[error("CID {0} is given to two VMs")]
    DuplicateCid(Cid),
    /// No VM has this CID, for which guest endpoints were configured.
    #[error("guest endpoints for CID {0}, which no VM has")]
    UnknownVm(Cid),
    /// More VMs than the workers have addresses for.
    #[error("more than {MAX_DEVICES} VMs for each worker")]
    TooManyVms,
    /// A number of queue pairs that is not in 1 to 16.
    #[error("{0} queue pairs: give 1 to {max}", max = QueuePairs::MAX)]
    QueuePairs(u16),
    /// A receive buffer of zero bytes, of a VM or of processes.
    #[error("a receive buffer of 0 bytes cannot receive anything")]
    EmptyWindow,
    /// A connect time-out of zero.
    #[error("a connect time-out of 0 lets no connection succeed")]
    NoConnectTime,
    /// An AF_VSOCK port of this machine cannot be listened on.
    #[error("cannot listen on vsock port {port}: {source}")]
    Forward {
        /// The port.
        port: u32,
        /// The cause.
        source: io::Error,
    },
    /// A socket cannot be bound.
    #[error("cannot bind {}: {source}", path.display())]
    Bind {
        /// The path.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The rules have a conflict.
    #[error(transparent)]
    Rules(RuleError),
    /// A system call that every daemon needs failed.
    #[error("cannot {what}: {source}")]
    System {
        /// The attempted operation.
        what: &'static str,
        /// The cause.
        source: io::Error,
    },
}

pub(crate) fn system(what: &'static str) -> impl FnOnce(io::Error) -> StartError {
    move |source| StartError::System { what, source }
}
