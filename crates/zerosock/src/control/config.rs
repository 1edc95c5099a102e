//! What a set of devices is made of, and why it could not be made.

use crate::control::attach::AttachTerms;
use crate::io::numbers::MAX_DEVICES;
use crate::routing::access::AccessList;
use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use zerosock_proto::Cid;
use zerosock_proto::vsock::pairs::BadPairs;

/// How a guest meets the host.
#[derive(Debug)]
pub enum HostSide {
    /// Hybrid vsock over Unix sockets.
    Hybrid {
        /// Programs that serve the guest's port P listen on `path_P`.
        path: PathBuf,
        /// The bound socket on which programs say `CONNECT <port>`.
        listener: UnixListener,
        /// The same for connections that carry messages, if there are to be any.
        messages: Option<HybridMessages>,
    },
    /// The machine's own AF_VSOCK.
    Forward {
        /// Connections of the guest to CID 2 go to this CID.
        cid: u32,
        /// Connections to these ports of the machine go to the same ports of the guest.
        listen: Vec<u32>,
    },
    /// The guest reaches siblings only.
    None,
}

/// Hybrid vsock for messages, over Unix sockets of type SOCK_SEQPACKET: each message is one packet,
/// either way. The first packet that a program sends is its `CONNECT <port>` line, and the first that
/// it gets the `OK <port>` line.
///
/// A packet without a byte is a message as well: a program that wants to tell it from the end, at
/// which recv(2) gives 0 too, sets SO_PASSCRED and finds no credentials with the end. MSG_EOR does
/// not cross, since Unix sockets have none.
#[derive(Debug)]
pub struct HybridMessages {
    /// Programs that serve the guest's port P listen on `path_P`.
    pub path: PathBuf,
    /// The bound and listening socket, of type SOCK_SEQPACKET.
    pub listener: OwnedFd,
}

/// One VM.
#[derive(Debug)]
pub struct VmConfig {
    /// The guest's CID; two VMs of a daemon never have the same.
    pub cid: Cid,
    /// The bound socket to which the VMM connects.
    pub listener: UnixListener,
    /// How the guest meets the host.
    pub host: HostSide,
    /// Bytes that a connection's sender may have under way to the host: the `buf_alloc` that the
    /// guest is told, and the most that a stalled connection copies.
    pub buf_alloc: u32,
    /// The largest queue that the VMM may set up: a power of two, at most 32768.
    pub queue_size: u16,
    /// Guests with a common group reach each other.
    pub groups: Vec<String>,
    /// Refuse guest memory that can shrink: a region whose memfd has no F_SEAL_SHRINK. Without it
    /// the loss of such memory costs this VM its device, and no other. The memory of attached
    /// processes must be sealed in any case.
    pub require_sealed_memory: bool,
}

/// What is to change of a running daemon. What is not named stays as it is, and so does every
/// connection that exists, but for those of VMs that are removed.
#[derive(Debug, Default)]
pub struct Reload {
    /// VMs that are to be added.
    pub add: Vec<VmConfig>,
    /// VMs that are to go: their front-ends are disconnected, their connections reset.
    pub remove: Vec<Cid>,
    /// The groups of VMs that stay.
    pub groups: BTreeMap<Cid, Vec<String>>,
    /// The access list, whole.
    pub access: AccessList,
    /// The terms on which processes attach; `None`: as they are.
    pub attach: Option<AttachTerms>,
}

/// Why a daemon has not changed: it is as it was.
#[derive(Debug, thiserror::Error)]
pub enum ReloadError {
    /// There is no such VM, or it is about to go.
    #[error("there is no VM with CID {0}")]
    UnknownVm(Cid),
    /// The CID of a VM that was to be added belongs to somebody, or did until just now.
    #[error("CID {0} belongs to a VM or process, or to one that is just going")]
    CidTaken(Cid),
    /// Nobody attaches here.
    #[error("there is no attach socket")]
    NobodyAttaches,
    /// A VM's way to the host could not be made.
    #[error("the VM with CID {cid}: {source}")]
    Host {
        /// The VM.
        cid: Cid,
        /// Why.
        source: Box<StartError>,
    },
    /// A VM's socket cannot be used.
    #[error("the socket of the VM with CID {cid}: {source}")]
    Socket {
        /// The VM.
        cid: Cid,
        /// Why.
        source: io::Error,
    },
    /// There are as many VMs as there can be.
    #[error("no worker has a place for the VM with CID {0}")]
    Full(Cid),
    /// The daemon is ending.
    #[error("the daemon is ending")]
    Ending,
}

/// Why a daemon did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// Two VMs have the same CID.
    #[error("CID {0} is given to two VMs")]
    DuplicateCid(Cid),
    /// More VMs than can be told apart.
    #[error("more than {MAX_DEVICES} VMs for each worker")]
    TooManyVms,
    /// As many queue pairs as there cannot be.
    #[error(transparent)]
    QueuePairs(BadPairs),
    /// Receive buffers of no bytes, of a VM or of processes.
    #[error("a receive window of no bytes would never receive any")]
    EmptyWindow,
    /// A connect that does not wait for an answer at all.
    #[error("no connection can come about in no time")]
    NoConnectTime,
    /// A port of the machine's AF_VSOCK cannot be listened on.
    #[error("cannot listen on vsock port {port}: {source}")]
    Forward {
        /// The port.
        port: u32,
        /// Why.
        source: io::Error,
    },
    /// A socket cannot be bound.
    #[error("cannot bind {}: {source}", path.display())]
    Bind {
        /// Where.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The system refused something that every daemon needs.
    #[error("cannot {what}: {source}")]
    System {
        /// What was tried.
        what: &'static str,
        /// Why it failed.
        source: io::Error,
    },
}

pub(crate) fn system(what: &'static str) -> impl FnOnce(io::Error) -> StartError {
    move |source| StartError::System { what, source }
}
