//! The carrier over io_uring.
//!
//! One ring for one socket, which is registered with it. A request is an entry of the submission
//! queue; nothing is a system call but [`submit`](Ring::submit) and the waiting. Completions are
//! read from memory that the kernel shares. A zero-copy request has two: its result, which says by
//! a flag whether a notification follows, and that notification. Which request of which place a
//! completion is of, and when a place is idle, is kept by `attempts`.
//!
//! The ring is made with COOP_TASKRUN: the kernel posts what is done when the thread that submitted
//! enters it next for whatever reason, at the latest at a tick of the clock, and does not interrupt
//! it for that. When something waits to be posted, a flag in shared memory says so.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::OnceLock;
use std::time::Duration;

use io_uring::{IoUring, Probe, opcode, squeue, types};

use super::arenas::Arenas;
use super::attempts::{Attempts, Posted};
use super::carrier::Held;
use super::places::{Message, Rest};
use super::{Event, Key, NotStarted, Order, Stable, Way};

/// `IORING_SEND_ZC_REPORT_USAGE`: the notification says whether the kernel copied (Linux 6.2).
pub(super) const REPORT_USAGE: u16 = 1 << 3;
/// Completions of requests that are nobody's: a wait for a writable socket.
const NOBODY: u64 = u64::MAX;
/// The socket's place among the ring's files.
pub(super) const SOCKET: types::Fixed = types::Fixed(0);
/// The longest that the thread of orphans waits for one ring.
const MOMENT: Duration = Duration::from_millis(5);
/// The longest request, in bytes; the kernel takes no more in one call (MAX_RW_COUNT).
pub const LONGEST: usize = 0x7fff_f000;

/// What was not done yet of a ring that is to go.
#[derive(Copy, Clone, Eq, PartialEq)]
enum Ending {
    /// Requests that the kernel has are to be cancelled.
    Requests,
    /// They have been; the ring has the socket open.
    Socket,
    Nothing,
}

/// A ring of its own for the sends of one socket.
pub(super) struct Ring {
    ring: IoUring,
    arenas: Arenas,
    attempts: Attempts,
    /// Entries of the submission queue that the kernel has not been told of.
    queued: usize,
    /// What those entries carry as user data, in their order.
    unsent: VecDeque<u64>,
    /// Of a ring that is to go: what is left to be ended.
    ending: Ending,
}

impl Ring {
    /// A ring for `socket` with `capacity` places.
    ///
    /// # Errors
    /// `Unsupported` where the kernel lacks what is needed (Linux 6.2); what io_uring_setup(2)
    /// answers, EPERM where it is forbidden.
    pub(super) fn open(socket: impl AsFd, capacity: u32) -> io::Result<Self> {
        if !supported()? {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let ring = IoUring::builder()
            .dontfork()
            .setup_clamp()
            .setup_submit_all()
            .setup_coop_taskrun()
            .setup_taskrun_flag()
            .setup_cqsize(capacity.saturating_mul(2).max(16))
            .build(capacity.max(4))?;
        let socket = socket.as_fd().as_raw_fd();
        ring.submitter().register_files(&[socket])?;
        Ok(Self {
            ring,
            arenas: Arenas::default(),
            attempts: Attempts::new(capacity),
            queued: 0,
            unsent: VecDeque::new(),
            ending: Ending::Requests,
        })
    }

    /// The kernel learns of the request by `submit`.
    pub(super) fn start<B: Stable>(
        &mut self,
        held: &mut Held<B>,
        key: Key,
        order: Order,
    ) -> Result<(), NotStarted> {
        let room = self.ring.params().sq_entries() as usize - self.queued;
        if room < 1 + usize::from(order.when_writable) {
            return Err(NotStarted::QueueFull);
        }
        let longest = held.longest(order.way);
        let place = held.places.get_mut(key).ok_or(NotStarted::Vacant)?;
        let buffer = place.buffer.as_ref().ok_or(NotStarted::Vacant)?;
        let flags = libc::MSG_NOSIGNAL
            | if order.whole { libc::MSG_WAITALL } else { 0 }
            | if order.more { libc::MSG_MORE } else { 0 };
        let mut number = None;
        let entry = match Rest::of(buffer, order.from, longest) {
            Rest::One(piece) => {
                let len = piece.len as u32;
                let (address, address_len) = match &place.address {
                    Some(address) => (address.as_ptr(), address.len()),
                    None => (std::ptr::null(), 0),
                };
                match order.way {
                    Way::ZeroCopy => {
                        let arena = buffer.arena();
                        number = arena.and_then(|arena| self.arenas.number(&self.ring, arena));
                        opcode::SendZc::new(SOCKET, piece.address, len)
                            .buf_index(number)
                            .dest_addr(address)
                            .dest_addr_len(address_len)
                            .flags(flags)
                            .zc_flags(REPORT_USAGE)
                            .build()
                    }
                    Way::Copy => opcode::Send::new(SOCKET, piece.address, len)
                        .dest_addr(address)
                        .dest_addr_len(address_len)
                        .flags(flags)
                        .build(),
                }
            }
            Rest::Many(pieces) => {
                if pieces.len() > libc::UIO_MAXIOV as usize {
                    return Err(NotStarted::TooManyPieces);
                }
                // An older message of this place is only replaced when no request refers to it.
                if place.results > 0 {
                    return Err(NotStarted::Unfinished);
                }
                let message = Box::new(Message::new(pieces, place.address.as_ref()));
                let header = &raw const message.header;
                place.message = Some(message);
                match order.way {
                    Way::ZeroCopy => opcode::SendMsgZc::new(SOCKET, header)
                        .ioprio(REPORT_USAGE)
                        .flags(flags as u32)
                        .build(),
                    Way::Copy => opcode::SendMsg::new(SOCKET, header)
                        .flags(flags as u32)
                        .build(),
                }
            }
        };
        if let (None, Some(number)) = (place.arena, number) {
            place.arena = Some(number);
            self.arenas.begun(number);
        }
        let link = if order.linked {
            squeue::Flags::IO_LINK
        } else {
            squeue::Flags::empty()
        };
        let entry = entry.user_data(self.attempts.next(key)).flags(link);
        if order.when_writable {
            let poll = opcode::PollAdd::new(SOCKET, libc::POLLOUT as u32)
                .build()
                .user_data(NOBODY)
                .flags(squeue::Flags::IO_LINK);
            self.push(&poll);
        }
        self.push(&entry);
        held.places.begun(key);
        Ok(())
    }

    /// The queue has room: who calls has seen that.
    fn push(&mut self, entry: &squeue::Entry) {
        // SAFETY: what the entry refers to is the place's: its buffer, whose bytes stay where they
        // are (`Stable`), its address and its message. None of them leaves the place or is replaced
        // before the kernel has given the request's result, and the buffer not before the
        // notification (`Places::take`, and `start` for the message). When the carrier, which has
        // both, is dropped before, they live on together (`orphans`). A registered arena is mapped
        // for as long as it is registered, and not replaced while a request names it (`arenas`).
        if unsafe { self.ring.submission().push(entry) }.is_ok() {
            self.queued += 1;
            self.unsent.push_back(entry.get_user_data());
        }
    }

    /// Whether the kernel has something to post: what is done, or found no room in the queue.
    fn has_more(&mut self) -> bool {
        let flags = self.ring.submission();
        flags.taskrun() || flags.cq_overflow()
    }

    pub(super) fn submit<B>(&mut self, held: &mut Held<B>) -> io::Result<()> {
        if self.queued == 0 {
            return Ok(());
        }
        self.enter(held, 0, None)
    }

    /// One io_uring_enter(2): submits what is queued, waits for `want` completions.
    fn enter<B>(
        &mut self,
        held: &mut Held<B>,
        want: usize,
        timeout: Option<Duration>,
    ) -> io::Result<()> {
        held.calls += 1;
        let result = match timeout {
            Some(timeout) => {
                let time = types::Timespec::from(timeout);
                let args = types::SubmitArgs::new().timespec(&time);
                self.ring.submitter().submit_with_args(want.max(1), &args)
            }
            None => self.ring.submitter().submit_and_wait(want),
        };
        self.queued = self.ring.submission().len();
        self.unsent
            .drain(..self.unsent.len().saturating_sub(self.queued));
        match result.map_err(|error| (error.raw_os_error(), error)) {
            Ok(_) | Err((Some(libc::ETIME | libc::EINTR | libc::EBUSY), _)) => Ok(()),
            Err((_, error)) => Err(error),
        }
    }

    pub(super) fn reap<B>(&mut self, held: &mut Held<B>) -> io::Result<()> {
        if self.ring.completion().is_empty() && self.has_more() {
            self.enter(held, 0, Some(Duration::ZERO))?;
        }
        Ok(())
    }

    pub(super) fn wait<B>(
        &mut self,
        held: &mut Held<B>,
        timeout: Option<Duration>,
    ) -> io::Result<()> {
        if held.places.owed == 0 || !self.ring.completion().is_empty() {
            return self.submit(held);
        }
        self.enter(held, 1, timeout)
    }

    pub(super) fn event<B>(&mut self, held: &mut Held<B>) -> Option<Event> {
        loop {
            let entry = self.ring.completion().next()?;
            if entry.user_data() == NOBODY {
                continue;
            }
            let posted = Posted {
                user_data: entry.user_data(),
                result: entry.result(),
                flags: entry.flags(),
            };
            let event = self.attempts.event(&mut held.places, posted);
            if let Some(Event::Done(key, _)) = event
                && let Some(place) = held.places.get_mut(key).filter(|place| place.results == 0)
                && let Some(number) = place.arena.take()
            {
                self.arenas.ended(number);
            }
            if event.is_some() {
                return event;
            }
        }
    }

    pub(super) fn cancel(&self) -> io::Result<()> {
        self.cancel_within(None)
    }

    fn cancel_within(&self, time: Option<Duration>) -> io::Result<()> {
        let all = types::CancelBuilder::any();
        let time = time.map(types::Timespec::from);
        match self.ring.submitter().register_sync_cancel(time, all) {
            Err(error) if error.raw_os_error() != Some(libc::ENOENT) => Err(error),
            _ => Ok(()),
        }
    }

    /// Ends the requests that the kernel has not been told of: it will not be. Nothing is to be
    /// started or submitted after that.
    pub(super) fn abandon<B>(&mut self, held: &mut Held<B>) {
        for user_data in self.unsent.drain(..) {
            if user_data != NOBODY {
                held.places.ended(Attempts::key(user_data));
            }
        }
    }

    /// Goes on with the end of a ring whose carrier was dropped, and takes in what the kernel says.
    pub(super) fn go_on_ending<B>(&mut self, held: &mut Held<B>) {
        if self.has_more() {
            const GETEVENTS: u32 = 1;
            let (submit, wait, argument) = (0, 0, None::<&libc::sigset_t>);
            // SAFETY: nothing is submitted, which matters: what was abandoned is in the queue, and
            // its buffers may be free. No argument is given.
            // Who may not enter is told of what finds room in the queue.
            let _ = unsafe {
                self.ring
                    .submitter()
                    .enter(submit, wait, GETEVENTS, argument)
            };
            held.calls += 1;
        }
        while self.event(held).is_some() {}
        self.end(held);
        while self.event(held).is_some() {}
    }

    /// The socket is let go when only notifications are to come: its peer is told of the end, and older
    /// kernels wait for requests before they let it go.
    fn end<B>(&mut self, held: &mut Held<B>) {
        if self.ending == Ending::Requests && self.cancel_within(Some(MOMENT)).is_ok() {
            self.ending = Ending::Socket;
        }
        while self.event(held).is_some() {}
        let ended = self.ending == Ending::Socket || held.places.owed == 0;
        if ended && self.ending != Ending::Nothing && !held.places.has_requests() {
            self.let_go();
            self.ending = Ending::Nothing;
        }
    }

    /// Of the socket.
    pub(super) fn let_go(&self) {
        let _ = self.ring.submitter().unregister_files();
    }

    /// How many arenas of pools it has registered.
    pub(super) fn registered(&self) -> usize {
        self.arenas.count()
    }

    /// Whether a request without a copy of this buffer is expected to be from registered memory.
    pub(super) fn expects_registered(&self, buffer: &impl Stable) -> bool {
        let arena = buffer.arena();
        arena.is_some_and(|arena| self.arenas.expects(arena))
    }

    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the ring's descriptor is open for as long as `self` is borrowed.
        unsafe { BorrowedFd::borrow_raw(self.ring.as_raw_fd()) }
    }
}

/// Whether the kernel has zero-copy sends that report whether they copied, and lets us use them.
pub(super) fn supported() -> io::Result<bool> {
    static SUPPORTED: OnceLock<bool> = OnceLock::new();
    if let Some(&known) = SUPPORTED.get() {
        return Ok(known);
    }
    // An error is no answer to keep: descriptors or memory can be short, and a filter one thread's.
    let answer = try_out()?;
    Ok(*SUPPORTED.get_or_init(|| answer))
}

fn try_out() -> io::Result<bool> {
    let mut ring = IoUring::new(2)?;
    let mut probe = Probe::new();
    ring.submitter().register_probe(&mut probe)?;
    if !probe.is_supported(opcode::SendZc::CODE) || !probe.is_supported(opcode::SendMsgZc::CODE) {
        return Ok(false);
    }
    // A kernel that does not know the flag says EINVAL before it looks at the descriptor.
    let entry = opcode::SendZc::new(types::Fd(-1), std::ptr::null(), 0).zc_flags(REPORT_USAGE);
    // SAFETY: the request names no memory, and no socket.
    unsafe { ring.submission().push(&entry.build()) }.map_err(io::Error::other)?;
    ring.submit_and_wait(1)?;
    match ring.completion().next().map(|entry| -entry.result()) {
        Some(libc::EBADF) => Ok(true),
        Some(libc::EINVAL) => Ok(false),
        _ => Err(io::ErrorKind::Other.into()),
    }
}
