//! The sender: the interface for one thread, and how it is opened.

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use super::calibration;
use super::message::too_many_pieces;
use super::policy::{Policy, Threshold};
use super::send_queue::SendQueue;
use super::slots::Slots;
use super::{
    Basis, Completion, NoSuchSlot, Notification, Outgoing, Refusal, Refused, Report, Returned,
    Stats,
};
use crate::sys::{Backend, Buf, Kind, Stable, ZcSocket};

/// Completions that one send can bring back.
const MAX_COMPLETIONS: usize = 16;
/// Places unless told otherwise.
const DEFAULT_CAPACITY: u32 = 256;
/// The most places: what a completion queue can hold two answers each of.
const MAX_CAPACITY: u32 = 1 << 14;
/// Notifications, and ranges, that may be unread.
const MAX_UNREAD: usize = 1 << 16;
/// Threads that may share a sender and take buffers back only after each send: what is free then is
/// at most what was under way and one send of each.
const MAX_THREADS: usize = 1024;
/// How long an event loop leaves pieces of a datagram kept whose rest it has not sent.
const KEPT_PIECES_TIMEOUT: Duration = Duration::from_millis(10);

/// Why a socket could not be opened for sending.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// It is no socket.
    #[error("not a socket")]
    NotASocket,
    /// The back-end that was asked for cannot send from this socket on this machine. From messages
    /// of AF_VSOCK (SOCK_SEQPACKET) none can: the kernel tears those that are sent without blocking
    /// when the peer has room for a part.
    #[error("this socket cannot be sent from by {0:?}")]
    Unavailable(Backend),
    /// No back-end was asked for, and none can send from messages of AF_VSOCK, as said there.
    #[error("messages over vsock cannot be sent whole without blocking")]
    Messages,
    /// No places, or more than 16384.
    #[error("{0} places: there must be 1 to {MAX_CAPACITY}")]
    Capacity(u32),
    /// The kernel's answer.
    #[error(transparent)]
    Call(io::Error),
}

/// How a sender is to be.
#[derive(Clone, Debug)]
pub struct Builder {
    backend: Option<Backend>,
    capacity: u32,
    tags: Vec<u64>,
    threshold: Threshold,
    inline: bool,
    discard: bool,
    limit: Option<Duration>,
}

impl Default for Builder {
    fn default() -> Self {
        Self {
            backend: None,
            capacity: DEFAULT_CAPACITY,
            tags: vec![0],
            threshold: Threshold::Measured,
            inline: false,
            discard: false,
            limit: None,
        }
    }
}

impl Builder {
    /// This back-end or none. Without, the best there is: io_uring, else the error queue, else
    /// copying.
    #[must_use]
    pub fn backend(mut self, backend: Backend) -> Self {
        self.backend = Some(backend);
        self
    }

    /// So many buffers can be under way, and 1024 more be free and not taken back: 256 unless told,
    /// 16384 at most.
    #[must_use]
    pub fn capacity(mut self, places: u32) -> Self {
        self.capacity = places;
        self
    }

    /// A slot for each tag. Without, there is one, with the tag 0. There may be as many as memory
    /// has room for, at about 100 bytes each.
    #[must_use]
    pub fn slots(mut self, tags: impl IntoIterator<Item = u64>) -> Self {
        self.tags = tags.into_iter().collect();
        self
    }

    /// From which length on buffers go in place, where a send leaves that open.
    #[must_use]
    pub fn threshold(mut self, threshold: Threshold) -> Self {
        self.threshold = threshold;
        self
    }

    /// Keeps [`Completion`]s, to be read with [`Sender::send_with`] or [`Sender::completions`]. They
    /// must be read then: when 65536 are unread, no more sends are accepted.
    #[must_use]
    pub fn inline_completions(mut self) -> Self {
        self.inline = true;
        self
    }

    /// Drops buffers when they are free instead of giving them back.
    #[must_use]
    pub fn discard_returned(mut self) -> Self {
        self.discard = true;
        self
    }

    /// The longest that a send may take, from its acceptance until its buffer is free; without, as
    /// long as it takes. Sends that are submitted together all count from the first of them.
    ///
    /// When one is late, what the kernel has not taken is cancelled, also what is younger, since that
    /// waits behind it; it comes back as failed (ETIMEDOUT). A TCP stream is reset: the buffers that
    /// only its peer held come back as failed, too, although the kernel had taken them, since it is not
    /// known how much of them arrived; and nothing more is accepted ([`Refusal::Broken`]). Buffers that
    /// wait in front of a device follow when the device no longer reads them. The limit holds for a
    /// sender that is dropped, too.
    ///
    /// Other sockets cannot be reset. What the kernel has taken from them it keeps for as long as it
    /// likes: datagrams that wait in front of a device, and what a peer over vsock has not read. They
    /// come back as sent. A stream of theirs takes no more either.
    ///
    /// A buffer that is copied is free when the kernel has taken it: what a slow receiver leaves in the
    /// socket's own memory does not count.
    ///
    /// The time is checked when the program submits, polls or waits, and a wait ends when it is up: no
    /// thread checks a sender that is not used. An event loop calls [`poll`](Sender::poll) after
    /// [`next_timeout`](Sender::next_timeout); shared senders and those of tasks wake the threads and
    /// tasks that wait for them.
    #[must_use]
    pub fn limit(mut self, time: Duration) -> Self {
        self.limit = Some(time);
        self
    }

    /// A sender over `socket`, which is its own from now on. What is sent over a duplicate of it
    /// falls in between.
    ///
    /// The error queue is the socket's, and so is the kernel's count of what was sent without a
    /// copy. Of several senders of this process over one socket and that back-end, the first that
    /// sends without a copy has both, until it has gone and the kernel is done with what it sent; the
    /// others copy meanwhile. What the program sends itself with MSG_ZEROCOPY must be over before (the
    /// kernel is done with it, whether the queue was read or not), and none may be sent later. A TCP
    /// socket that was disconnected and connected again must not have been sent from without a copy
    /// before: where its count stands is not to be seen.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn open<B: Stable>(self, socket: impl Into<OwnedFd>) -> Result<Sender<B>, OpenError> {
        if self.capacity == 0 || self.capacity > MAX_CAPACITY {
            return Err(OpenError::Capacity(self.capacity));
        }
        let opened = ZcSocket::open(socket.into(), self.capacity, self.backend);
        let (zc_socket, kind) = opened.map_err(|error| match (error.kind(), self.backend) {
            (io::ErrorKind::Unsupported, Some(backend)) => OpenError::Unavailable(backend),
            (io::ErrorKind::Unsupported, None) => OpenError::Messages,
            _ if error.raw_os_error() == Some(rustix::io::Errno::NOTSOCK.raw_os_error()) => {
                OpenError::NotASocket
            }
            _ => OpenError::Call(error),
        })?;
        let policy = Policy::new(kind, zc_socket.backend(), self.threshold);
        let slots = Slots::new(self.tags);
        let mut queue = SendQueue::new(zc_socket, kind.is_stream(), self.capacity, slots, policy);
        queue.keeps_ranges = self.inline;
        queue.returns_buffers = !self.discard;
        queue.limit.time = self.limit;
        Ok(Sender {
            queue,
            kind,
            capacity: self.capacity as usize,
            threshold: self.threshold,
            seen_events: 0,
        })
    }
}

/// Sends owned buffers over one socket, and gives them back when the kernel has let go of them.
///
/// Nothing here blocks but [`send`](Self::send) and [`send_with`](Self::send_with), while there is
/// no place, and [`wait`](Self::wait) and [`finish`](Self::finish), whose purpose that is.
/// [`push`](Self::push) and [`submit`](Self::submit) are the two halves of a send: several pushes
/// and one submission cost one system call over io_uring.
///
/// A sender that is dropped hands over what the kernel takes at once and ends the rest. If that was
/// all, a stream's peer reads all of it and then the end; if it was not, or a send had failed, the
/// stream is reset (TCP), so that what is cut short does not look whole. [`close`](Self::close) waits
/// and says which it was. Buffers that the kernel still reads are freed when it has let go of them.
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
/// A forked child may drop its copy, which leaks it and leaves the parent's sender and socket as they
/// are; it must not use it.
pub struct Sender<B: Stable = Buf> {
    pub(super) queue: SendQueue<B>,
    kind: Kind,
    pub(super) capacity: usize,
    threshold: Threshold,
    /// What had been heard when the last wait ended.
    seen_events: u64,
}

impl Sender<Buf> {
    /// A sender for buffers of any kind, over the best back-end there is.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn open(socket: impl Into<OwnedFd>) -> Result<Self, OpenError> {
        Builder::default().open(socket)
    }

    /// How a sender is to be, step by step.
    #[must_use]
    pub fn builder() -> Builder {
        Builder::default()
    }
}

impl<B: Stable> Sender<B> {
    /// Accepts a send, without a system call. It goes to the kernel with the next submission.
    /// Returns its number; none if it is to be copied.
    ///
    /// # Errors
    /// With the buffer, if it is not accepted: [`Refusal`].
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

    /// Hands what was accepted to the kernel, as far as it takes it now, and takes in what it has
    /// said; over the error queue, whose reading is a system call, only once in 16 requests:
    /// [`poll`](Self::poll) reads it now. Does not wait.
    ///
    /// # Errors
    /// What the kernel answers to the call itself. What it answers to a send is told with its
    /// buffer.
    pub fn submit(&mut self) -> io::Result<()> {
        self.queue.submit()
    }

    /// Sends: accepts, waiting for a place if there is none, and submits. Returns its number; none
    /// if it is to be copied.
    ///
    /// # Errors
    /// With the buffer, if it is not accepted; never with [`Refusal::Full`]. With
    /// [`Refusal::Unread`] if too many buffers were not taken back, which does not happen to a program
    /// that takes them after every send.
    pub fn send(&mut self, outgoing: Outgoing<B>) -> Result<Option<u32>, Refused<B>> {
        let mut outgoing = outgoing;
        loop {
            match self.push(outgoing) {
                Ok(number) => {
                    // A failure of the call is no failure of the send: it is accepted, and the
                    // next submission hands it over or says why not.
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

    /// Sends, and tells which earlier sends are over: fills `room` from the front, and returns how
    /// many ranges it holds now. The builder must have asked for them.
    ///
    /// Over io_uring they are read from shared memory; with the error queue, by one call that does
    /// not wait.
    ///
    /// # Errors
    /// As [`send`](Self::send); [`Refusal::TooMuchRoom`] for more than 16, and
    /// [`Refusal::NoCompletions`] if the builder has not asked for them.
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

    /// What is over, as a send tells of it.
    pub(super) fn take_completions(&mut self, room: &mut [Completion]) -> usize {
        if self.queue.zc_socket.backend() == Backend::ErrorQueue {
            // Nothing that is lost: what it cannot read now it reads later.
            let _ = self.queue.zc_socket.reap();
            self.queue.process_events();
        }
        self.queue.ranges.take(room)
    }

    /// Tells which sends are over, without one. At most one system call, which does not wait.
    ///
    /// # Errors
    /// What the kernel answers; `InvalidInput` if the builder has not asked for them.
    pub fn completions(&mut self, room: &mut [Completion]) -> io::Result<usize> {
        if !self.queue.keeps_ranges {
            let why = Refusal::NoCompletions;
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
        self.poll()?;
        Ok(self.queue.ranges.take(room))
    }

    /// Takes in what the kernel has said, and hands over what had to wait for it. Does not wait.
    ///
    /// # Errors
    /// What the kernel answers.
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

    /// The oldest buffer that is free. No system call: [`poll`](Self::poll), everything that waits,
    /// [`send_with`](Self::send_with) and [`completions`](Self::completions) take in what the kernel
    /// says; so does [`submit`](Self::submit), and with it every send, but over the error queue only
    /// once in 16 requests. A program that sends rarely, and wants the last ones back, polls or waits
    /// for [`interest`](Self::interest).
    pub fn returned(&mut self) -> Option<Returned<B>> {
        self.queue.take()
    }

    /// Closes the notifiers of a range of slots, for every send accepted before.
    ///
    /// # Errors
    /// If there are fewer slots; nothing is flushed then.
    pub fn flush(&mut self, slots: Range<u32>) -> Result<(), NoSuchSlot> {
        self.queue.slots.flush(slots)
    }

    /// The oldest notification of a slot. No system call.
    pub fn notification(&mut self) -> Option<Notification> {
        self.queue.slots.next()
    }

    /// Gives a slot another tag, for notifiers whose first send is accepted from now on.
    ///
    /// # Errors
    /// If there are fewer slots.
    pub fn set_tag(&mut self, slot: u32, tag: u64) -> Result<(), NoSuchSlot> {
        self.queue.slots.set_tag(slot, tag)
    }

    /// Hands over what was accepted, and waits for news, or for `timeout`. News is a buffer that is
    /// free, or a notification: also one that came since the last wait ended, whichever call took it
    /// in, so that nothing is slept over. What was there before and has not been taken is no news. Returns
    /// at once if there is nothing to wait for, and early after a signal, when the kernel has taken a
    /// part of a send, or when one is [late](Builder::limit).
    ///
    /// # Errors
    /// What the kernel answers.
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

    /// Flushes every slot and waits until every buffer is free, or for `timeout`. Whether all are.
    ///
    /// # Errors
    /// What the kernel answers.
    pub fn finish(&mut self, timeout: Option<Duration>) -> io::Result<bool> {
        self.flush_all();
        self.wait_until(timeout, Self::is_quiet)
    }

    /// Waits until it is `done`, or for `timeout`. Whether it is.
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
        // The range is the slots that there are.
        let _ = self.queue.slots.flush(0..slots);
    }

    /// Counts what a wait ends for: buffers that have become free, and notifications. No wait ends
    /// because the socket is full or a send goes on.
    pub(super) fn event_count(&self) -> u64 {
        self.queue.released + self.queue.slots.posted_count()
    }

    /// What sleeping threads are woken for when it changes: news, a stream that is broken, and the
    /// time after which the sender is to be polled. Not the time at which the next send is late: it only
    /// moves on.
    pub(super) fn wake_state(&self) -> (u64, bool, Option<Duration>, bool) {
        (
            self.event_count(),
            self.is_broken(),
            self.poll_timeout(),
            self.queue.due().is_some(),
        )
    }

    /// After which time it is to be polled, but for a send that is late.
    fn poll_timeout(&self) -> Option<Duration> {
        let poll_timeout = self.queue.zc_socket.next_timeout();
        let pieces = self.queue.awaits_pieces().then_some(KEPT_PIECES_TIMEOUT);
        poll_timeout.into_iter().chain(pieces).min()
    }

    /// Whether an earlier send failed so that nothing more is accepted.
    pub(super) fn is_broken(&self) -> bool {
        self.queue.broken.is_some()
    }

    /// Whether everything that was accepted is over, and its buffer free.
    #[must_use]
    pub fn is_quiet(&self) -> bool {
        self.queue.is_quiet()
    }

    /// Ends every send that the kernel has not taken; their buffers come back as failed.
    ///
    /// # Errors
    /// What the kernel answers.
    pub fn cancel(&mut self) -> io::Result<()> {
        self.queue.cancel()
    }

    /// What it is, and what it has learnt.
    #[must_use]
    pub fn report(&self) -> Report {
        let threshold = |registered| match self.threshold {
            Threshold::Bytes(bytes) => (Some(bytes), Basis::Configured),
            Threshold::Measured => {
                let backend = self.queue.zc_socket.backend();
                calibration::threshold(self.kind, backend, registered)
            }
        };
        let (plain, registered) = (threshold(false), threshold(true));
        Report {
            backend: self.queue.zc_socket.backend(),
            uring_refused: self.queue.zc_socket.ring_refused(),
            socket: self.kind,
            threshold: plain.0,
            threshold_is: plain.1,
            registered_threshold: registered.0,
            registered_threshold_is: registered.1,
            off: self.queue.policy.is_off(),
            registered: self.queue.zc_socket.registered(),
        }
    }

    /// What it has done.
    #[must_use]
    pub fn stats(&self) -> Stats {
        Stats {
            system_calls: self.queue.zc_socket.system_calls(),
            foreign: self.queue.zc_socket.foreign(),
            ..self.queue.stats
        }
    }

    /// How many places are free.
    #[must_use]
    pub fn room(&self) -> usize {
        self.queue.zc_socket.room()
    }

    /// The socket, to look at and to receive from. Over the error queue back-end its error queue is
    /// the sender's: a program that reads there takes notifications, and buffers never come back. What
    /// else comes there (ICMP errors after IP_RECVERR, timestamps of what was sent) is read, counted
    /// ([`Stats::foreign`](super::Stats::foreign)) and dropped. A program that wants such messages sends
    /// over io_uring or by copies ([`Builder::backend`]), which leave that queue alone.
    #[must_use]
    pub fn socket(&self) -> BorrowedFd<'_> {
        self.queue.zc_socket.socket()
    }

    /// After which time an event loop is to call [`poll`](Self::poll) although the descriptor has
    /// said nothing; mostly none. With a [limit](Builder::limit) it is the time until the oldest send is
    /// late. With the error queue it may have to be asked again and again what became of a datagram
    /// that failed, since nothing tells of that. And pieces of a datagram whose rest is not sent come
    /// back when they are asked for ([`Outgoing::more`]).
    #[must_use]
    pub fn next_timeout(&self) -> Option<Duration> {
        let poll_timeout = self.poll_timeout();
        poll_timeout.into_iter().chain(self.queue.time_left()).min()
    }

    /// What an event loop is to wait for on [`as_fd`](AsFd::as_fd) before it calls
    /// [`poll`](Self::poll), but no longer than [`next_timeout`](Self::next_timeout).
    #[must_use]
    pub fn interest(&self) -> Interest {
        match self.queue.zc_socket.backend() {
            Backend::Uring => Interest::Readable,
            _ if self.queue.is_full() => Interest::WritableOrError,
            _ => Interest::Error,
        }
    }
}

/// What an event loop waits for on a sender's descriptor.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub enum Interest {
    /// EPOLLIN.
    Readable,
    /// EPOLLERR, which need not be asked for.
    Error,
    /// EPOLLOUT, and EPOLLERR.
    WritableOrError,
}

impl<B: Stable> AsFd for Sender<B> {
    /// The descriptor that an event loop waits on, for what [`interest`](Self::interest) says: the
    /// ring, or the socket.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.queue.zc_socket.as_fd()
    }
}

impl<B: Stable> std::fmt::Debug for Sender<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Sender({:?}, {:?})", self.report().backend, self.kind)
    }
}
