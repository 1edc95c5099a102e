//! The counters of a sender, and what it knows about its socket.

use std::fmt;
use std::io;

use super::SendBackend;
use crate::sys::SocketKind;

/// Counts of a sender since it was opened.
///
/// Each send whose buffer is free counts once in `in_place`, one of the `copied_` counters, or `failed`.
///
/// ```
/// use std::net::UdpSocket;
/// use zerosock_zc::{Copying, Outgoing, Sender};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let (socket, peer) = (UdpSocket::bind("127.0.0.1:0")?, UdpSocket::bind("127.0.0.1:0")?);
/// socket.connect(peer.local_addr()?)?;
/// let mut sender: Sender = Sender::open(socket)?;
/// let mut outgoing = Outgoing::new(vec![1; 3000]);
/// outgoing.copying = Copying::Always;
/// sender.send(outgoing)?;
/// sender.finish(None)?;
/// let stats = sender.stats();
/// assert_eq!(stats.copied_on_request, 1);
/// assert_eq!(stats.freed(), stats.accepted);
/// # Ok(())
/// # }
/// ```
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
    /// Sends that were copied because of [`Copying::Always`](super::Copying::Always).
    pub copied_on_request: u64,
    /// Sends that were copied because that is cheaper for their length.
    pub copied_short: u64,
    /// Sends that were copied because zero copy is off ([`SenderReport::off`]).
    pub copied_off: u64,
    /// Sends that were copied because the kernel had no memory for a zero-copy request.
    pub copied_for_memory: u64,
    /// Sends without a copy on our side of which the kernel copied at least a part.
    pub copied_by_kernel: u64,
    /// Notifications, counted once for each send and request that took bytes of it without a copy.
    /// One notification of the kernel can cover several sends.
    pub notified: u64,
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

impl SenderStats {
    /// Sends whose buffer is free: the sum of `in_place`, the `copied_` counters and `failed`.
    #[must_use]
    pub fn freed(&self) -> u64 {
        self.in_place
            + self.copied_on_request
            + self.copied_short
            + self.copied_off
            + self.copied_for_memory
            + self.copied_by_kernel
            + self.failed
    }

    pub(super) fn count_copied(&mut self, reason: Option<CopyReason>) {
        let counter = match reason {
            Some(CopyReason::Request) => &mut self.copied_on_request,
            Some(CopyReason::Short) => &mut self.copied_short,
            Some(CopyReason::Off) => &mut self.copied_off,
            Some(CopyReason::Memory) => &mut self.copied_for_memory,
            None => &mut self.copied_by_kernel,
        };
        *counter += 1;
    }
}

/// Why a send is copied on our side.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(super) enum CopyReason {
    /// The program asked for it.
    Request,
    /// A copy is cheaper for this length.
    Short,
    /// Zero copy is off.
    Off,
    /// The kernel had no memory for a zero-copy request.
    Memory,
}

/// Why the sends of a sender are copied, whatever their length.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub enum OffReason {
    /// The back-end is [`SendBackend::Copy`], for good.
    BackendCopies,
    /// The kernel refuses to send from this socket without a copy, for good.
    RefusedByKernel,
    /// The kernel copied the last sends after all, as it does on the loopback device. Zero copy is tried again
    /// after 1 MiB was copied, and after each failure after twice as much, at most 1 GiB.
    CopiedByKernel,
}

impl fmt::Display for OffReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            OffReason::BackendCopies => "the back-end copies",
            OffReason::RefusedByKernel => "the kernel refuses it on this socket",
            OffReason::CopiedByKernel => "the kernel copied the last sends",
        })
    }
}

/// All counters, as `name=value`, on one line.
impl fmt::Display for SenderStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "accepted={} over={} bytes={} requests={} registered={} in_place={} copied_on_request={} copied_short={} copied_off={} copied_for_memory={} copied_by_kernel={} notified={} system_calls={} failed={} timed_out={} foreign={}",
            self.accepted,
            self.over,
            self.bytes,
            self.requests,
            self.registered,
            self.in_place,
            self.copied_on_request,
            self.copied_short,
            self.copied_off,
            self.copied_for_memory,
            self.copied_by_kernel,
            self.notified,
            self.system_calls,
            self.failed,
            self.timed_out,
            self.foreign,
        )
    }
}

/// The back-end and socket of a sender, and the threshold it uses.
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
    /// The length in bytes from which on sends go in place, if zero copy is not `off`: as configured
    /// ([`SenderBuilder::threshold`](super::SenderBuilder::threshold)), or that of the kind of socket.
    pub threshold: usize,
    /// Why zero copy is off, if it is.
    pub off: Option<OffReason>,
    /// Number of pool arenas (of up to 1 GiB each) that are registered with the kernel, at most 64.
    /// Sends from other arenas are counted as sends from other memory.
    pub registered: usize,
}

/// One line: back-end, socket and threshold.
impl fmt::Display for SenderReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} on {:?}", self.backend, self.socket)?;
        if let Some(refused) = self.uring_refused {
            write!(f, ", io_uring: {refused}")?;
        }
        match self.off {
            Some(reason) => write!(f, ", zero copy off: {reason}"),
            None => write!(f, ", in place from {} bytes", self.threshold),
        }
    }
}
