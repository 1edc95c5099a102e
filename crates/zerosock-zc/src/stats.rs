//! The counters of a sender, and what it knows about its socket.

use std::fmt;
use std::io;

use super::SendBackend;
use crate::sys::SocketKind;

/// Counts of a sender since it was opened.
#[derive(Copy, Clone, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub struct SenderStats {
    /// Sends that were accepted.
    pub accepted: u64,
    /// Finished sends: the kernel took all of the send, or it failed. The kernel may still read the
    /// buffer. The pieces of a datagram that is copied after all are finished only when the copies
    /// are.
    pub over: u64,
    /// Bytes that the kernel took.
    pub bytes: u64,
    /// Requests to the kernel: more than sends if a send took several, fewer if several sends of a
    /// stream became one request.
    pub requests: u64,
    /// Requests from pool memory that is registered with the kernel.
    pub registered: u64,
    /// Sends that the device or the receiver read directly from their buffer.
    pub in_place: u64,
    /// Notifications, counted once for each send and request that took bytes of it without a copy.
    /// One notification of the kernel can cover several sends.
    pub notified: u64,
    /// Of the notifications, those that say that the kernel copied after all.
    pub copied_by_kernel: u64,
    /// Sends that were copied because the kernel had no memory for a zero-copy request.
    pub copied_for_memory: u64,
    /// System calls to send, to poll and to wait.
    pub system_calls: u64,
    /// Sends that failed.
    pub failed: u64,
    /// Of the failed sends, those that exceeded [`SenderBuilder::limit`](super::SenderBuilder::limit).
    pub timed_out: u64,
    /// Other messages of the socket's error queue (ICMP errors, timestamps), which the error queue
    /// back-end read in search of notifications and dropped.
    pub foreign: u64,
}

/// All counters, as `name=value`, on one line.
impl fmt::Display for SenderStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "accepted={} over={} bytes={} requests={} registered={} in_place={} notified={} copied_by_kernel={} copied_for_memory={} system_calls={} failed={} timed_out={} foreign={}",
            self.accepted,
            self.over,
            self.bytes,
            self.requests,
            self.registered,
            self.in_place,
            self.notified,
            self.copied_by_kernel,
            self.copied_for_memory,
            self.system_calls,
            self.failed,
            self.timed_out,
            self.foreign,
        )
    }
}

/// How a [threshold](SenderReport::threshold) is known, or that there is none.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub enum ThresholdBasis {
    /// It was set with [`SenderBuilder::threshold`](super::SenderBuilder::threshold).
    Configured,
    /// No length is decided yet, or none will be because the back-end copies.
    Unknown,
    /// The length classes below and above it were measured, as far as they are decided.
    Measured,
    /// One of these classes could not be measured, because sockets were full or sends of several
    /// lengths were submitted together. It goes in place from 16 KiB on, until it is measured.
    Assumed,
}

/// The back-end and socket of a sender, and the thresholds it uses.
#[derive(Copy, Clone, Debug)]
#[non_exhaustive]
pub struct SenderReport {
    /// The back-end in use.
    pub backend: SendBackend,
    /// Why io_uring is not used, if it was tried: `PermissionDenied` where it is forbidden,
    /// `Unsupported` before Linux 6.2 and the stable releases of 6.1 that have its flags.
    pub uring_refused: Option<io::ErrorKind>,
    /// The kind of its socket.
    pub socket: SocketKind,
    /// The length in bytes from which on sends go in place: as configured, or the shortest from
    /// which on every decided length class goes in place, for this kind of socket and back-end in
    /// the whole process. None while there is no such length. A class that is not decided is sent
    /// both ways for now, also above the threshold, and each class is measured anew after a million
    /// sends. See also `off`.
    pub threshold: Option<usize>,
    /// How `threshold` is known.
    pub threshold_basis: ThresholdBasis,
    /// The same for pool memory, which costs less because io_uring registers it.
    pub registered_threshold: Option<usize>,
    /// How `registered_threshold` is known.
    pub registered_threshold_basis: ThresholdBasis,
    /// Zero copy is off: for good, or for now because the kernel copied.
    pub off: bool,
    /// Number of pool arenas (of up to 1 GiB each) that are registered with the kernel, at most 64.
    /// Sends from other arenas are counted, and measured, as sends from other memory.
    pub registered: usize,
}

/// One line: back-end, socket and threshold.
impl fmt::Display for SenderReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} on {:?}", self.backend, self.socket)?;
        if let Some(refused) = self.uring_refused {
            write!(f, ", io_uring: {refused}")?;
        }
        match (self.off, self.threshold) {
            (true, _) => f.write_str(", zero copy off"),
            (false, Some(bytes)) => {
                write!(
                    f,
                    ", in place from {bytes} bytes ({:?})",
                    self.threshold_basis
                )
            }
            (false, None) => write!(f, ", no threshold ({:?})", self.threshold_basis),
        }
    }
}
