//! Why AF_XDP cannot be used, and what to do about it.

use std::io;

use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};
use rustix::thread::{CapabilitySet, capabilities};
use zerosock_ring::FlatError;

use crate::bpf::BpfError;

/// Why an interface, a UMEM or a socket could not be made, or does not work any more.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum XdpError {
    /// There is no such interface in the network namespace of this thread.
    #[error("no such interface")]
    NoInterface,
    /// The map or the program could not be made.
    #[error(transparent)]
    Program(#[from] BpfError),
    /// Another program has attached its own XDP program.
    #[error("another XDP program is attached; `ip link set dev NAME xdp off` detaches some")]
    Attached,
    /// The program could not be attached.
    #[error("the XDP program cannot be attached: {0}")]
    Attach(io::Error),
    /// An AF_XDP socket needs a capability.
    #[error("an AF_XDP socket is not permitted without CAP_NET_RAW")]
    Denied,
    /// The kernel has no AF_XDP, or an old one.
    #[error("this kernel has no AF_XDP, or one before Linux 5.11")]
    NotSupported,
    /// The regions cannot be mapped as one range.
    #[error(transparent)]
    Flat(#[from] FlatError),
    /// RLIMIT_MEMLOCK is too low.
    #[error(
        "locked memory needed: {need} bytes, limit {limit} (RLIMIT_MEMLOCK, for all sockets of the user \
         together; CAP_IPC_LOCK exempts from it)"
    )]
    MemoryLock {
        /// Bytes of the UMEM.
        need: u64,
        /// The limit in bytes.
        limit: u64,
    },
    /// The memory cannot be pinned: EFAULT.
    #[error(
        "the memory cannot be pinned: it lies in a file on a disk, or cannot be written (EFAULT); use a memfd \
         or a file in /dev/shm"
    )]
    NotPinnable,
    /// The memory has a hole, or the system is out of memory: ENOMEM.
    #[error(
        "the memory cannot be pinned: it has a hole because its file was truncated, or the system has not \
         enough memory (ENOMEM)"
    )]
    NoMemory,
    /// The kernel refuses the size of chunks or the headroom.
    #[error("the kernel refuses chunks of 2048 bytes with a headroom of 268 (EINVAL)")]
    Chunks,
    /// The interface has no such queue.
    #[error("it has no queue {queue}, or not for AF_XDP")]
    NoQueue {
        /// The number.
        queue: u32,
    },
    /// Another socket is bound to the queue, or was until a moment ago.
    #[error("queue {queue} is in use by another AF_XDP socket")]
    Busy {
        /// The number.
        queue: u32,
    },
    /// The interface is down (ENETDOWN).
    #[error("the interface is down")]
    Down,
    /// The interface was removed, or the kernel has detached the socket (ENXIO, ENODEV).
    #[error("the interface was removed")]
    InterfaceRemoved,
    /// Another failure of the system.
    #[error("{what}: {error}")]
    System {
        /// What failed.
        what: &'static str,
        /// The error of the call.
        error: io::Error,
    },
}

impl XdpError {
    /// Whether the same memory may be registered later: locked memory of others is released, limits are raised, and
    /// the system gets memory back.
    pub fn may_pass(&self) -> bool {
        matches!(
            self,
            XdpError::MemoryLock { .. } | XdpError::NoMemory | XdpError::System { .. }
        )
    }

    pub(super) fn system(what: &'static str, error: impl Into<io::Error>) -> XdpError {
        let error = error.into();
        XdpError::System { what, error }
    }

    /// Of a call that makes a socket.
    pub(super) fn of_socket(errno: Errno) -> XdpError {
        match errno {
            Errno::PERM | Errno::ACCESS => XdpError::Denied,
            Errno::AFNOSUPPORT | Errno::NOPROTOOPT => XdpError::NotSupported,
            errno => XdpError::system("cannot set up an AF_XDP socket", errno),
        }
    }

    /// Of a call that registers a UMEM of this size.
    pub(super) fn of_umem(errno: Errno, need: u64) -> XdpError {
        match errno {
            Errno::NOBUFS => XdpError::MemoryLock {
                need,
                limit: getrlimit(Resource::Memlock).current.unwrap_or(u64::MAX),
            },
            Errno::FAULT => XdpError::NotPinnable,
            Errno::NOMEM => XdpError::NoMemory,
            Errno::INVAL => XdpError::Chunks,
            errno => XdpError::of_socket(errno),
        }
    }

    /// Of a call that binds a socket.
    pub(super) fn of_bind(errno: Errno, queue: u32) -> XdpError {
        match errno {
            Errno::BUSY => XdpError::Busy { queue },
            Errno::INVAL => XdpError::NoQueue { queue },
            errno => XdpError::of_use("cannot bind an AF_XDP socket", errno),
        }
    }

    /// Of a call on a bound socket.
    pub(super) fn of_use(what: &'static str, errno: Errno) -> XdpError {
        match errno {
            Errno::NETDOWN => XdpError::Down,
            Errno::NXIO | Errno::NODEV => XdpError::InterfaceRemoved,
            errno => XdpError::system(what, errno),
        }
    }
}

/// Refuses to lock more memory than this thread may, before any is locked. The kernel counts all
/// sockets of the user together and has the last word.
pub(super) fn check_limit(need: u64) -> Result<(), XdpError> {
    let exempt =
        capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::IPC_LOCK));
    match getrlimit(Resource::Memlock).current {
        Some(limit) if !exempt && limit < need => Err(XdpError::MemoryLock { need, limit }),
        _ => Ok(()),
    }
}
