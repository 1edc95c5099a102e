//! The configuration of a sender, and how one is opened.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use super::Sender;
use super::backend_choice;
use super::policy::Policy;
use super::send_queue::SendQueue;
use super::slots::Slots;
use crate::sys::{SendBackend, Stable, ZcSocket, kind, permit_zero_copy};

/// Number of places by default.
const DEFAULT_CAPACITY: u32 = 256;
/// The most places: a completion queue has room for two completions of each.
const MAX_CAPACITY: u32 = 1 << 14;

/// Why a socket could not be opened for sending.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SenderOpenError {
    /// The descriptor is not a socket.
    #[error("not a socket")]
    NotASocket,
    /// The requested back-end does not support this socket on this machine. No back-end supports
    /// AF_VSOCK messages (SOCK_SEQPACKET): if the peer has credit for a part of a message only, the
    /// kernel splits a message that is sent without blocking.
    #[error("this socket cannot be sent from with the back-end {0:?} on this machine")]
    Unavailable(SendBackend),
    /// No back-end was requested, and none supports AF_VSOCK messages; see
    /// [`Unavailable`](Self::Unavailable).
    #[error("no back-end supports vsock messages (SOCK_SEQPACKET): the kernel can split them")]
    Messages,
    /// The capacity is 0 or above 16384.
    #[error("a capacity of {0} places: it must be 1 to {MAX_CAPACITY}")]
    Capacity(u32),
    /// A system call failed.
    #[error(transparent)]
    Call(io::Error),
}

/// The configuration of a sender.
#[derive(Clone, Debug)]
pub struct SenderBuilder {
    backend: Option<SendBackend>,
    capacity: u32,
    tags: Vec<u64>,
    threshold: Option<usize>,
    inline: bool,
    discard: bool,
    limit: Option<Duration>,
}

impl Default for SenderBuilder {
    fn default() -> Self {
        Self {
            backend: None,
            capacity: DEFAULT_CAPACITY,
            tags: vec![0],
            threshold: None,
            inline: false,
            discard: false,
            limit: None,
        }
    }
}

impl SenderBuilder {
    /// Requires this back-end. By default, the sender uses io_uring where it can, else the error
    /// queue, else copies; a sender that keeps [completions](Self::inline_completions) may use the error
    /// queue first.
    #[must_use]
    pub fn backend(mut self, backend: SendBackend) -> Self {
        self.backend = Some(backend);
        self
    }

    /// Number of buffers that can be under way; as many plus 1024 can be free and not taken. 256 by
    /// default, at most 16384.
    #[must_use]
    pub fn capacity(mut self, places: u32) -> Self {
        self.capacity = places;
        self
    }

    /// Creates a slot for each tag. By default there is one, with the tag 0. A slot takes about 100
    /// bytes; their number is limited by memory only.
    #[must_use]
    pub fn slots(mut self, tags: impl IntoIterator<Item = u64>) -> Self {
        self.tags = tags.into_iter().collect();
        self
    }

    /// The length in bytes from which on buffers go in place, for sends with
    /// [`Copying::Auto`](super::Copying::Auto). The default depends on the
    /// [kind of socket](super::SocketKind::zero_copy_threshold).
    #[must_use]
    pub fn threshold(mut self, bytes: usize) -> Self {
        self.threshold = Some(bytes);
        self
    }

    /// Keeps [`Completion`](super::Completion)s, to be taken with [`Sender::send_with`] or [`Sender::completions`].
    ///
    /// If no [back-end](Self::backend) is required, this chooses the one that was measured to be cheaper:
    /// the error queue on TCP, and on UDP if the last sender of the process over UDP was asked for
    /// completions less than once for three sends; otherwise io_uring. Memory of a
    /// [`Pool`](super::Pool) is registered over io_uring only.
    ///
    /// The application must take them: when 65536 are waiting, no more sends are accepted.
    #[must_use]
    pub fn inline_completions(mut self) -> Self {
        self.inline = true;
        self
    }

    /// Drops free buffers instead of returning them.
    #[must_use]
    pub fn discard_returned(mut self) -> Self {
        self.discard = true;
        self
    }

    /// Limits the time of a send, from its acceptance until its buffer is free. By default there is
    /// no limit. The time of all sends of one submission starts with the first of them.
    ///
    /// When a send is late, every send that the kernel has not taken is cancelled, also later ones,
    /// which wait behind it; they are returned as failed (ETIMEDOUT). A TCP stream is reset, and
    /// nothing more is accepted ([`Refusal::Broken`](super::Refusal::Broken)). The reset frees unacknowledged buffers; they
    /// are returned as failed as well, because it is unknown how much of them arrived. Buffers in
    /// the queue of a device follow when the device no longer reads them. The limit also holds for
    /// a sender that is dropped.
    ///
    /// Other sockets cannot be reset. The kernel keeps what it has taken: datagrams in the queue of
    /// a device, and bytes that a vsock peer has not read. These sends are returned as successful.
    /// Such a stream accepts nothing more either.
    ///
    /// A copied buffer is free when the kernel has taken it: the limit does not cover bytes in the
    /// send buffer of the socket.
    ///
    /// The time is checked when the application submits, polls or waits, and a wait ends when a
    /// send is late. No thread checks a sender that is not used. An event loop calls
    /// [`poll`](Sender::poll) after [`next_timeout`](Sender::next_timeout); shared and asynchronous
    /// senders wake the threads and tasks that wait.
    #[must_use]
    pub fn limit(mut self, time: Duration) -> Self {
        self.limit = Some(time);
        self
    }

    /// Opens a sender that owns `socket`. Bytes sent over a duplicate of the socket are interleaved
    /// with those of the sender.
    ///
    /// The error queue and the notification ids belong to the socket, not to a sender. If several
    /// senders of this process use one socket with the error queue back-end, the first that sends
    /// without a copy owns both, until it is dropped and the kernel no longer reads its buffers;
    /// the others copy meanwhile. The kernel must have finished every send that the application
    /// itself made with MSG_ZEROCOPY (whether their notifications were read or not), and the
    /// application must make none later. A TCP socket that was disconnected and connected again
    /// must not have sent without a copy before: its next id cannot be found out.
    ///
    /// # Errors
    /// [`SenderOpenError`].
    pub fn open<B: Stable>(self, socket: impl Into<OwnedFd>) -> Result<Sender<B>, SenderOpenError> {
        if self.capacity == 0 || self.capacity > MAX_CAPACITY {
            return Err(SenderOpenError::Capacity(self.capacity));
        }
        let socket = socket.into();
        let backend = self.backend.or_else(|| self.preferred_backend(&socket));
        let opened = ZcSocket::open(socket, self.capacity, backend);
        let zc_socket = opened.map_err(|error| match (error.kind(), self.backend) {
            (io::ErrorKind::Unsupported, Some(backend)) => SenderOpenError::Unavailable(backend),
            (io::ErrorKind::Unsupported, None) => SenderOpenError::Messages,
            _ if error.raw_os_error() == Some(rustix::io::Errno::NOTSOCK.raw_os_error()) => {
                SenderOpenError::NotASocket
            }
            _ => SenderOpenError::Call(error),
        })?;
        let threshold = zc_socket.kind().zero_copy_threshold();
        let policy = Policy::new(zc_socket.backend(), self.threshold.unwrap_or(threshold));
        let slots = Slots::new(self.tags);
        let mut queue = SendQueue::new(zc_socket, self.capacity, slots, policy);
        queue.keeps_ranges = self.inline;
        queue.returns_buffers = !self.discard;
        queue.limit.time = self.limit;
        Ok(Sender {
            queue,
            capacity: self.capacity as usize,
            seen_events: 0,
        })
    }

    /// The error queue if it is better for completions and the socket has it.
    fn preferred_backend(&self, socket: &OwnedFd) -> Option<SendBackend> {
        let is_better = self.inline && backend_choice::prefers_error_queue(kind(socket).ok()?);
        (is_better && permit_zero_copy(socket).ok()?).then_some(SendBackend::ErrorQueue)
    }
}

impl<B: Stable> Sender<B> {
    /// Opens a sender with the best available back-end: for buffers of any kind (`Sender`, the default), or of
    /// one (`Sender<Vec<u8>>`).
    ///
    /// # Errors
    /// [`SenderOpenError`].
    pub fn open(socket: impl Into<OwnedFd>) -> Result<Self, SenderOpenError> {
        SenderBuilder::default().open(socket)
    }
}

impl Sender {
    /// The default configuration of a sender, to be changed.
    #[must_use]
    pub fn builder() -> SenderBuilder {
        SenderBuilder::default()
    }
}
