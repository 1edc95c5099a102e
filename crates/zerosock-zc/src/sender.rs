//! The sender for one thread, and its builder.

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use super::backend_choice;
use super::message::too_many_pieces;
use super::policy::Policy;
use super::send_queue::SendQueue;
use super::slots::Slots;
use super::{
    Completion, NoSuchSlot, Notification, Outgoing, Refusal, Refused, Returned, SenderReport,
    SenderStats,
};
use crate::sys::{Buf, SendBackend, Stable, ZcSocket, kind, permit_zero_copy};

/// The most completions that one send can return.
const MAX_COMPLETIONS: usize = 16;
/// Number of places by default.
const DEFAULT_CAPACITY: u32 = 256;
/// The most places: a completion queue has room for two completions of each.
const MAX_CAPACITY: u32 = 1 << 14;
/// The most notifications, and the most ranges, that the application has not taken.
const MAX_UNREAD: usize = 1 << 16;
/// The number of threads that can share a sender if each takes free buffers only after its send:
/// then there are at most as many free buffers as places, plus one per thread.
const MAX_THREADS: usize = 1024;
/// How long pieces of an incomplete datagram are kept before an event loop is asked to poll.
const KEPT_PIECES_TIMEOUT: Duration = Duration::from_millis(10);

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

    /// Keeps [`Completion`]s, to be taken with [`Sender::send_with`] or [`Sender::completions`].
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
    /// nothing more is accepted ([`Refusal::Broken`]). The reset frees unacknowledged buffers; they
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

/// Sends owned buffers over one socket, and returns them when the kernel no longer reads them.
///
/// Only [`send`](Self::send) and [`send_with`](Self::send_with), while no place is free, and
/// [`wait`](Self::wait), [`finish`](Self::finish) and [`close`](Self::close) block.
/// [`push`](Self::push) and [`submit`](Self::submit) are the two halves of a send: several pushes
/// and one submission cost one system call over io_uring.
///
/// A dropped sender submits what the kernel takes at once and cancels the rest. If nothing was
/// cancelled and no send had failed, the peer of a stream reads all of it and then end of file;
/// otherwise the stream is reset (TCP), so that the peer does not take it for complete.
/// [`close`](Self::close) waits and returns the outcome. Buffers that the kernel still reads are
/// freed when it no longer does.
///
/// ```
/// use std::net::UdpSocket;
/// use zerosock_zc::{Outgoing, Sender};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let (socket, peer) = (UdpSocket::bind("127.0.0.1:0")?, UdpSocket::bind("127.0.0.1:0")?);
/// socket.connect(peer.local_addr()?)?;
/// let mut sender: Sender = Sender::open(socket)?;
/// sender.send(Outgoing::new(&b"static bytes"[..]))?;
/// sender.send(Outgoing::new(vec![1; 3000]))?;
/// sender.finish(None)?;
/// let lengths: Vec<_> = std::iter::from_fn(|| sender.returned())
///     .map(|returned| returned.outcome.map(|_| returned.number))
///     .collect::<Result<_, _>>()?;
/// assert_eq!(lengths, [Some(0), Some(1)]);
/// # Ok(())
/// # }
/// ```
///
/// A forked child may drop its copy, which leaks it and leaves the parent's sender and socket as
/// they are; it must not use it.
pub struct Sender<B: Stable = Buf> {
    pub(super) queue: SendQueue<B>,
    pub(super) capacity: usize,
    /// [`event_count`](Self::event_count) at the end of the last wait.
    seen_events: u64,
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

impl<B: Stable> Sender<B> {
    /// Accepts a send, without a system call. The next submission hands it to the kernel. Returns
    /// its number; none if it is to be copied.
    ///
    /// # Errors
    /// [`Refused`], with the buffer, if the send is not accepted.
    pub fn push(&mut self, outgoing: Outgoing<B>) -> Result<Option<u32>, Refused<B>> {
        if let Err(why) = self.check(&outgoing) {
            return Err(Refused { outgoing, why });
        }
        let accepted = self.queue.accept(outgoing);
        accepted.map_err(|(outgoing, why)| Refused { outgoing, why })
    }

    fn check(&self, outgoing: &Outgoing<B>) -> Result<(), Refusal> {
        match outgoing.slot {
            Some(slot) => self.queue.slots.check(slot)?,
            None if outgoing.flush => return Err(Refusal::FlushWithoutSlot),
            None => {}
        }
        let unread = self.queue.slots.waiting().max(self.queue.ranges.len());
        if unread >= MAX_UNREAD || self.queue.free.len() > self.capacity + MAX_THREADS {
            return Err(Refusal::Unread);
        }
        if too_many_pieces(&outgoing.buffer) {
            return Err(Refusal::TooManyPieces);
        }
        Ok(())
    }

    /// Hands accepted sends to the kernel, as far as it takes them now, and handles completions.
    /// The error queue, which takes a system call to read, is read once in 16 requests only;
    /// [`poll`](Self::poll) reads it now. Does not wait.
    ///
    /// # Errors
    /// The error of the system call itself. The error of a send is returned with its buffer.
    pub fn submit(&mut self) -> io::Result<()> {
        self.queue.submit()
    }

    /// Accepts a send, after waiting for a free place, and submits it. Returns its number; none if
    /// it is to be copied.
    ///
    /// # Errors
    /// [`Refused`], with the buffer, if the send is not accepted; never with [`Refusal::Full`].
    /// [`Refusal::Unread`] does not happen to an application that takes free buffers after every
    /// send.
    pub fn send(&mut self, outgoing: Outgoing<B>) -> Result<Option<u32>, Refused<B>> {
        let mut outgoing = outgoing;
        loop {
            match self.push(outgoing) {
                Ok(number) => {
                    // The send is accepted even if the call fails: the next submission repeats it,
                    // or reports the error.
                    let _ = self.submit();
                    return Ok(number);
                }
                Err(Refused {
                    outgoing: back,
                    why: Refusal::Full,
                }) => {
                    outgoing = back;
                    if let Err(error) = self.wait_for_place() {
                        let why = Refusal::Call(error);
                        return Err(Refused { outgoing, why });
                    }
                }
                Err(refused) => return Err(refused),
            }
        }
    }

    /// Sends, and takes the completions of earlier sends: fills `room` from the front, and returns
    /// the number of ranges in it. Needs [`SenderBuilder::inline_completions`].
    ///
    /// Over io_uring, completions are read from shared memory; over the error queue, by one system
    /// call that does not wait.
    ///
    /// # Errors
    /// As [`send`](Self::send); [`Refusal::TooMuchRoom`] for more than 16 ranges, and
    /// [`Refusal::NoCompletions`] if the sender keeps no completions.
    pub fn send_with(
        &mut self,
        outgoing: Outgoing<B>,
        room: &mut [Completion],
    ) -> Result<usize, Refused<B>> {
        if let Err(why) = self.check_room(room) {
            return Err(Refused { outgoing, why });
        }
        self.send(outgoing)?;
        Ok(self.take_completions(room))
    }

    pub(super) fn check_room(&self, room: &[Completion]) -> Result<(), Refusal> {
        match room.len() {
            0..=MAX_COMPLETIONS if self.queue.keeps_ranges => Ok(()),
            0..=MAX_COMPLETIONS => Err(Refusal::NoCompletions),
            _ => Err(Refusal::TooMuchRoom),
        }
    }

    /// Takes completions into `room`; over the error queue, reads it first. Returns how many.
    pub(super) fn take_completions(&mut self, room: &mut [Completion]) -> usize {
        self.queue.asked += 1;
        if self.queue.zc_socket.backend() == SendBackend::ErrorQueue {
            // After an error, the next call reads the completions.
            let _ = self.queue.zc_socket.reap();
            self.queue.process_events();
        }
        self.queue.ranges.take(room)
    }

    /// Takes completions without a send. At most one system call, which does not wait.
    ///
    /// # Errors
    /// The error of the system call; `InvalidInput` if the sender keeps no completions.
    pub fn completions(&mut self, room: &mut [Completion]) -> io::Result<usize> {
        if !self.queue.keeps_ranges {
            let why = Refusal::NoCompletions;
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
        self.queue.asked += 1;
        self.poll()?;
        Ok(self.queue.ranges.take(room))
    }

    /// Handles completions, and submits the sends that they allow. Does not wait.
    ///
    /// # Errors
    /// The error of a system call.
    pub fn poll(&mut self) -> io::Result<()> {
        self.queue.zc_socket.reap()?;
        self.queue.process_events();
        self.queue.enforce_limit();
        if !self.queue.is_handed_over() {
            self.submit()?;
        }
        self.queue.release_kept_for_caller();
        Ok(())
    }

    /// Takes the oldest free buffer, without a system call. Completions are handled by
    /// [`poll`](Self::poll), every call that waits, [`send_with`](Self::send_with) and
    /// [`completions`](Self::completions); also by [`submit`](Self::submit) and every send, but
    /// over the error queue only once in 16 requests. An application that sends rarely polls, or
    /// waits for [`interest`](Self::interest), to get the last buffers.
    pub fn returned(&mut self) -> Option<Returned<B>> {
        self.queue.take()
    }

    /// Closes the notifiers of a range of slots, for every send accepted before.
    ///
    /// # Errors
    /// If a slot of the range does not exist; nothing is flushed then.
    pub fn flush(&mut self, slots: Range<u32>) -> Result<(), NoSuchSlot> {
        self.queue.slots.flush(slots)
    }

    /// Takes the oldest notification, without a system call.
    pub fn notification(&mut self) -> Option<Notification> {
        self.queue.slots.next()
    }

    /// Gives a slot another tag, for notifiers of later sends.
    ///
    /// # Errors
    /// If the slot does not exist.
    pub fn set_tag(&mut self, slot: u32, tag: u64) -> Result<(), NoSuchSlot> {
        self.queue.slots.set_tag(slot, tag)
    }

    /// Submits, and waits until a buffer becomes free or a notification is posted, or for
    /// `timeout`. Also returns if this happened in any call since the last wait ended; buffers and
    /// notifications from before that do not end the wait. Returns at once if no send is
    /// unfinished, and early after a signal, when the kernel has taken a part of a send, or when a
    /// send is [late](SenderBuilder::limit).
    ///
    /// # Errors
    /// The error of a system call.
    pub fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        self.submit()?;
        self.queue.release_kept_for_caller();
        if self.event_count() == self.seen_events && !self.queue.is_quiet() {
            self.queue.wait(timeout)?;
            self.queue.process_events();
            self.submit()?;
        }
        self.seen_events = self.event_count();
        Ok(())
    }

    fn wait_for_place(&mut self) -> io::Result<()> {
        self.submit()?;
        self.queue.release_kept_for_caller();
        if self.room() == 0 && !self.is_broken() {
            self.queue.wait(None)?;
            self.queue.process_events();
        }
        Ok(())
    }

    /// Flushes every slot and waits until the sender [is quiet](Self::is_quiet), or for `timeout`.
    /// Returns whether every buffer is free.
    ///
    /// # Errors
    /// The error of a system call.
    pub fn finish(&mut self, timeout: Option<Duration>) -> io::Result<bool> {
        self.flush_all();
        let quiet = self.wait_until(timeout, Self::is_quiet)?;
        Ok(quiet && !self.holds_buffer())
    }

    /// Whether the kernel reads a buffer, or may read one.
    pub(super) fn holds_buffer(&self) -> bool {
        self.queue.zc_socket.busy_places() > 0
    }

    /// Waits until `done`, or for `timeout`. Returns whether it is done.
    pub(super) fn wait_until(
        &mut self,
        timeout: Option<Duration>,
        done: impl Fn(&Self) -> bool,
    ) -> io::Result<bool> {
        let until = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        loop {
            self.submit()?;
            self.queue.release_kept_for_caller();
            if done(self) {
                return Ok(true);
            }
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            if left == Some(Duration::ZERO) {
                return Ok(false);
            }
            self.queue.wait(left)?;
            self.queue.process_events();
        }
    }

    pub(super) fn flush_all(&mut self) {
        let slots = self.queue.slots.count();
        // All slots of the range exist.
        let _ = self.queue.slots.flush(0..slots);
    }

    /// Number of events that end a wait: buffers that became free, and notifications posted.
    pub(super) fn event_count(&self) -> u64 {
        self.queue.released + self.queue.slots.posted_count()
    }

    /// The state that wakes waiting threads when it changes: events, a broken stream, the time to
    /// the next poll, and whether a limit applies. The time at which the next send is late is not
    /// part of it, because it only increases.
    pub(super) fn wake_state(&self) -> (u64, bool, Option<Duration>, bool) {
        (
            self.event_count(),
            self.is_broken(),
            self.poll_timeout(),
            self.queue.due().is_some(),
        )
    }

    /// The time after which the sender must be polled, without regard to late sends.
    fn poll_timeout(&self) -> Option<Duration> {
        let pieces = self.queue.awaits_pieces().then_some(KEPT_PIECES_TIMEOUT);
        let doubt = self.queue.zc_socket.poll_timeout();
        pieces.into_iter().chain(doubt).min()
    }

    /// Whether nothing more is accepted because a send failed.
    pub(super) fn is_broken(&self) -> bool {
        self.queue.broken.is_some()
    }

    /// Whether every send is finished and every buffer free.
    ///
    /// There is one exception: over the error queue, a datagram can fail such that it cannot be known
    /// whether the kernel still reads the buffer. If the kernel has not told within a second, nothing waits
    /// for that buffer any longer, but it is not returned until the kernel does tell. If the sender is
    /// dropped before, it is leaked.
    #[must_use]
    pub fn is_quiet(&self) -> bool {
        self.queue.is_quiet()
    }

    /// Cancels every send that the kernel has not taken; they are returned as failed.
    ///
    /// # Errors
    /// The error of a system call.
    pub fn cancel(&mut self) -> io::Result<()> {
        self.queue.cancel()
    }

    /// The back-end and socket of the sender, and its threshold.
    #[must_use]
    pub fn report(&self) -> SenderReport {
        SenderReport {
            backend: self.queue.zc_socket.backend(),
            uring_refused: self.queue.zc_socket.ring_refused(),
            socket: self.queue.zc_socket.kind(),
            threshold: self.queue.policy.threshold,
            off: self.queue.policy.off(),
            registered: self.queue.zc_socket.registered(),
        }
    }

    /// The counters of the sender.
    #[must_use]
    pub fn stats(&self) -> SenderStats {
        SenderStats {
            system_calls: self.queue.zc_socket.system_calls(),
            foreign: self.queue.zc_socket.foreign(),
            ..self.queue.stats
        }
    }

    /// Number of free places.
    #[must_use]
    pub fn room(&self) -> usize {
        self.queue.zc_socket.room()
    }

    /// The socket, to inspect and to receive from. With the error queue back-end, the error queue
    /// belongs to the sender: an application that reads it takes notifications away, and buffers
    /// are never returned. The sender reads other messages there (ICMP errors after IP_RECVERR,
    /// send timestamps), counts them ([`SenderStats::foreign`](super::SenderStats::foreign)) and drops them. An
    /// application that needs these messages uses another back-end ([`SenderBuilder::backend`]), which
    /// does not read that queue.
    #[must_use]
    pub fn socket(&self) -> BorrowedFd<'_> {
        self.queue.zc_socket.socket()
    }

    /// The time after which an event loop must call [`poll`](Self::poll) without an event on the
    /// descriptor; usually none. There are three cases: a [limit](SenderBuilder::limit), until the oldest
    /// send is late; pieces of an incomplete datagram, which are released by polling
    /// ([`Outgoing::more`]); and a failed datagram whose buffer the kernel may still read
    /// ([`is_quiet`](Self::is_quiet)).
    #[must_use]
    pub fn next_timeout(&self) -> Option<Duration> {
        let poll_timeout = self.poll_timeout();
        poll_timeout.into_iter().chain(self.queue.time_left()).min()
    }

    /// The events that an event loop waits for on [`as_fd`](AsFd::as_fd), for at most
    /// [`next_timeout`](Self::next_timeout), before it calls [`poll`](Self::poll).
    #[must_use]
    pub fn interest(&self) -> Interest {
        match self.queue.zc_socket.backend() {
            SendBackend::Uring => Interest::Readable,
            _ if self.queue.is_full() => Interest::WritableOrError,
            _ => Interest::Error,
        }
    }
}

/// The events that an event loop waits for on the descriptor of a sender.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub enum Interest {
    /// EPOLLIN.
    Readable,
    /// EPOLLERR, which epoll always reports.
    Error,
    /// EPOLLOUT, and EPOLLERR.
    WritableOrError,
}

impl<B: Stable> AsFd for Sender<B> {
    /// The descriptor that an event loop waits on for [`interest`](Self::interest): the io_uring
    /// instance, or the socket.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.queue.zc_socket.as_fd()
    }
}

impl<B: Stable> std::fmt::Debug for Sender<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let report = self.report();
        write!(f, "Sender({:?}, {:?})", report.backend, report.socket)
    }
}
