//! What a set of devices is made of, and why it could not be made.

use crate::engine::numbers::MAX_DEVICES;
use std::io;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use zerosock_proto::Cid;

/// How a guest meets the host.
#[derive(Debug)]
pub enum HostSide {
    /// Hybrid vsock over Unix sockets.
    Hybrid {
        /// Programs that serve the guest's port P listen on `path_P`.
        path: PathBuf,
        /// The bound socket on which programs say `CONNECT <port>`.
        listener: UnixListener,
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
