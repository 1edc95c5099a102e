//! The sender for one thread.

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use super::message::too_many_pieces;
use super::send_queue::SendQueue;
use super::{
    Completion, NoSuchSlot, Notification, Outgoing, Refusal, Refused, Returned, SenderReport,
    SenderStats,
};
use crate::sys::{Buf, SendBackend, Stable};

/// The most completions that one send can return.
const MAX_COMPLETIONS: usize = 16;
/// The most notifications, and the most ranges, that the application has not taken.
const MAX_UNREAD: usize = 1 << 16;
/// The number of threads that can share a sender if each takes free buffers only after its send:
/// then there are at most as many free buffers as places, plus one per thread.
const MAX_THREADS: usize = 1024;
/// How long pieces of an incomplete datagram are kept before an event loop is asked to poll.
const KEPT_PIECES_TIMEOUT: Duration = Duration::from_millis(10);

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
    pub(super) seen_events: u64,
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
    /// the number of ranges in it. Needs [`SenderBuilder::inline_completions`](super::SenderBuilder::inline_completions).
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
        self.queue.free.pop_front()
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
    /// send is [late](super::SenderBuilder::limit).
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
    /// application that needs these messages uses another back-end ([`SenderBuilder::backend`](super::SenderBuilder::backend)), which
    /// does not read that queue.
    #[must_use]
    pub fn socket(&self) -> BorrowedFd<'_> {
        self.queue.zc_socket.socket()
    }

    /// The time after which an event loop must call [`poll`](Self::poll) without an event on the
    /// descriptor; usually none. There are three cases: a [limit](super::SenderBuilder::limit), until the oldest
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
            _ if self.queue.full => Interest::WritableOrError,
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
