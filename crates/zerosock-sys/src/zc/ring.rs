//! The carrier over io_uring.
//!
//! One ring for one socket, which is registered with it. A request is an entry of the submission
//! queue; nothing is a system call but [`submit`](Ring::submit) and the waiting. Completions are
//! read from memory that the kernel shares. A zero-copy request has two: its result, which says by
//! a flag whether a notification follows, and that notification.
//!
//! The ring is made with COOP_TASKRUN: the kernel posts what is done when the thread that submitted
//! enters it next for whatever reason, at the latest at a tick of the clock, and does not interrupt
//! it for that. When something waits to be posted, a flag in shared memory says so.

use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::OnceLock;
use std::time::Duration;

use io_uring::{IoUring, Probe, cqueue, opcode, squeue, types};

use super::arenas::Arenas;
use super::places::{Message, Places, Rest};
use super::{Address, Event, Key, NotStarted, Order, Stable, Way, orphans};

/// `IORING_SEND_ZC_REPORT_USAGE`: the notification says whether the kernel copied (Linux 6.2).
pub(super) const REPORT_USAGE: u16 = 1 << 3;
/// `IORING_NOTIF_USAGE_ZC_COPIED`, in a notification's result.
pub(super) const COPIED: u32 = 1 << 31;
/// Completions of requests that are nobody's: a wait for a writable socket.
const NOBODY: u64 = u64::MAX;
/// The socket's place among the ring's files.
pub(super) const SOCKET: types::Fixed = types::Fixed(0);
/// The longest that the thread of orphans waits for one ring.
const MOMENT: Duration = Duration::from_millis(5);
/// The longest request, in bytes; the kernel takes no more in one call (MAX_RW_COUNT).
pub const LONGEST: usize = 0x7fff_f000;

/// Sends of one socket through a ring of its own.
pub struct Ring<B: Stable> {
    /// Taken out by drop alone.
    inner: ManuallyDrop<Inner<B>>,
}

struct Inner<B> {
    // Before the places: a ring that is closed reads nothing of them any more.
    ring: IoUring,
    socket: OwnedFd,
    places: Places<B>,
    arenas: Arenas,
    /// Entries of the submission queue that the kernel has not been told of.
    queued: usize,
    /// Of a ring that was dropped: what is left to be ended.
    ending: Ending,
    /// System calls for sending and waiting.
    calls: u64,
}

/// What was not done yet of a ring that is to go.
#[derive(Copy, Clone, Eq, PartialEq)]
enum Ending {
    /// Requests that the kernel has are to be cancelled.
    Requests,
    /// They have been; the ring has the socket open.
    Socket,
    Nothing,
}

impl<B: Stable> Ring<B> {
    /// A ring for `socket` with `capacity` places.
    ///
    /// # Errors
    /// `Unsupported` where the kernel lacks what is needed (Linux 6.2); what io_uring_setup(2)
    /// answers, EPERM where it is forbidden. The socket comes back with the error.
    pub fn open(socket: OwnedFd, capacity: u32) -> Result<Self, (io::Error, OwnedFd)> {
        match Self::ring(socket.as_raw_fd(), capacity) {
            Ok(ring) => Ok(Self {
                inner: ManuallyDrop::new(Inner {
                    ring,
                    socket,
                    places: Places::new(capacity),
                    arenas: Arenas::default(),
                    queued: 0,
                    ending: Ending::Requests,
                    calls: 0,
                }),
            }),
            Err(error) => Err((error, socket)),
        }
    }

    fn ring(socket: RawFd, capacity: u32) -> io::Result<IoUring> {
        if !supported() {
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
        ring.submitter().register_files(&[socket])?;
        Ok(ring)
    }

    /// How many places are free.
    #[must_use]
    pub fn room(&self) -> usize {
        self.inner.places.room()
    }

    /// Puts a buffer, and where it goes if the socket is not connected, into a place.
    ///
    /// # Errors
    /// Gives it back if no place is free.
    pub fn put(&mut self, buffer: B, address: Option<Address>) -> Result<Key, B> {
        self.inner.places.put(buffer, address)
    }

    /// Makes a request of what lies in a place. The kernel learns of it by `submit`.
    ///
    /// # Errors
    /// If it cannot be made; the place is as it was.
    pub fn start(&mut self, key: Key, order: Order) -> Result<(), NotStarted> {
        let inner = &mut *self.inner;
        let room = inner.ring.params().sq_entries() as usize - inner.queued;
        if room < 1 + usize::from(order.when_writable) {
            return Err(NotStarted::QueueFull);
        }
        let place = inner.places.get_mut(key).ok_or(NotStarted::Vacant)?;
        let buffer = place.buffer.as_ref().ok_or(NotStarted::Vacant)?;
        let flags = libc::MSG_NOSIGNAL
            | if order.whole { libc::MSG_WAITALL } else { 0 }
            | if order.more { libc::MSG_MORE } else { 0 };
        let entry = match Rest::of(buffer, order.from) {
            Rest::One(piece) => {
                let len = piece.len.min(LONGEST) as u32;
                let (address, address_len) = match &place.address {
                    Some(address) => (address.as_ptr(), address.len()),
                    None => (std::ptr::null(), 0),
                };
                match order.way {
                    Way::ZeroCopy => {
                        let index = buffer
                            .arena()
                            .and_then(|arena| inner.arenas.number(&inner.ring, arena));
                        opcode::SendZc::new(SOCKET, piece.address, len)
                            .buf_index(index)
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
                    return Err(NotStarted::Vacant);
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
        let link = if order.linked {
            squeue::Flags::IO_LINK
        } else {
            squeue::Flags::empty()
        };
        let entry = entry.user_data(u64::from(key.0)).flags(link);
        if order.when_writable {
            let poll = opcode::PollAdd::new(SOCKET, libc::POLLOUT as u32)
                .build()
                .user_data(NOBODY)
                .flags(squeue::Flags::IO_LINK);
            inner.push(&poll);
        }
        inner.push(&entry);
        inner.places.begun(key);
        Ok(())
    }

    /// Tells the kernel of the requests that were started: one system call, none if there are none.
    ///
    /// # Errors
    /// What io_uring_enter(2) answers, but for a completion queue that is to be read first.
    pub fn submit(&mut self) -> io::Result<()> {
        self.inner.submit()
    }

    /// The next thing that the kernel has said: no system call.
    pub fn event(&mut self) -> Option<Event> {
        self.inner.event()
    }

    /// Makes the kernel post what is done, if it says that something is: at most one system call,
    /// which does not wait.
    ///
    /// # Errors
    /// What io_uring_enter(2) answers.
    pub fn reap(&mut self) -> io::Result<()> {
        let inner = &mut *self.inner;
        if inner.ring.completion().is_empty() && inner.has_more() {
            inner.enter(0, Some(Duration::ZERO))?;
        }
        Ok(())
    }

    /// Tells the kernel of what was started and waits until it says something, or for `timeout`.
    /// Returns at once if it owes nothing.
    ///
    /// # Errors
    /// What io_uring_enter(2) answers. A signal ends the waiting early.
    pub fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        self.inner.wait(timeout)
    }

    /// How many places the kernel owes something for.
    #[must_use]
    pub fn owed(&self) -> u32 {
        self.inner.places.owed
    }

    /// Whether the kernel owes nothing for this place.
    #[must_use]
    pub fn idle(&self, key: Key) -> bool {
        self.inner.places.idle(key)
    }

    /// The buffer, if the kernel owes nothing for it. The place is free then.
    pub fn take(&mut self, key: Key) -> Option<B> {
        self.inner.places.take(key)
    }

    /// Ends what the kernel has not done yet; each request says so by its result.
    ///
    /// # Errors
    /// What io_uring_register(2) answers.
    pub fn cancel(&mut self) -> io::Result<()> {
        self.inner.cancel()
    }

    /// System calls so far, for sending, asking and waiting.
    #[must_use]
    pub fn system_calls(&self) -> u64 {
        self.inner.calls
    }

    /// The socket.
    #[must_use]
    pub fn socket(&self) -> BorrowedFd<'_> {
        self.inner.socket.as_fd()
    }

    /// How many arenas of pools the ring has registered.
    #[must_use]
    pub fn registered(&self) -> usize {
        self.inner.arenas.registered.len()
    }
}

impl<B: Stable> AsFd for Ring<B> {
    /// A descriptor that is readable when [`event`](Ring::event) has something to tell.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inner.as_fd()
    }
}

impl<B: Stable> Drop for Ring<B> {
    fn drop(&mut self) {
        // SAFETY: taken once, as this is drop, and `inner` is not used after it.
        let mut inner = unsafe { ManuallyDrop::take(&mut self.inner) };
        // What was accepted is the kernel's if it takes it now, and ends if it does not.
        let _ = inner.submit();
        while inner.event().is_some() {}
        if inner.places.owed > 0 {
            return orphans::adopt(inner);
        }
        // Else the socket stays open until the kernel has taken the ring apart, which is later.
        let _ = inner.ring.submitter().unregister_files();
    }
}

impl<B: Stable> Inner<B> {
    /// The queue has room: who calls has seen that.
    fn push(&mut self, entry: &squeue::Entry) {
        // SAFETY: what the entry refers to is the place's: its buffer, whose bytes stay where they
        // are (`Stable`), its address and its message. None of them leaves the place or is replaced
        // before the kernel has given the request's result, and the buffer not before the
        // notification (`Places::take`, and `start` for the message). When the ring is dropped
        // before, they live on with it (`orphans`). A registered arena lives as long as the ring.
        if unsafe { self.ring.submission().push(entry) }.is_ok() {
            self.queued += 1;
        }
    }

    /// Whether the kernel has something to post: what is done, or found no room in the queue.
    fn has_more(&mut self) -> bool {
        let flags = self.ring.submission();
        flags.taskrun() || flags.cq_overflow()
    }

    fn submit(&mut self) -> io::Result<()> {
        if self.queued == 0 {
            return Ok(());
        }
        self.enter(0, None)
    }

    /// One io_uring_enter(2): submits what is queued, waits for `want` completions.
    fn enter(&mut self, want: usize, timeout: Option<Duration>) -> io::Result<()> {
        self.calls += 1;
        let result = match timeout {
            Some(timeout) => {
                let time = types::Timespec::from(timeout);
                let args = types::SubmitArgs::new().timespec(&time);
                self.ring.submitter().submit_with_args(want.max(1), &args)
            }
            None => self.ring.submitter().submit_and_wait(want),
        };
        self.queued = self.ring.submission().len();
        match result.map_err(|error| (error.raw_os_error(), error)) {
            Ok(_) | Err((Some(libc::ETIME | libc::EINTR | libc::EBUSY), _)) => Ok(()),
            Err((_, error)) => Err(error),
        }
    }

    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        if self.places.owed == 0 || !self.ring.completion().is_empty() {
            return self.submit();
        }
        self.enter(1, timeout)
    }

    fn event(&mut self) -> Option<Event> {
        loop {
            let entry = self.ring.completion().next()?;
            if entry.user_data() == NOBODY {
                continue;
            }
            let key = Key(entry.user_data() as u32);
            if cqueue::notif(entry.flags()) {
                self.places.noted(key);
                let copied = entry.result() as u32 & COPIED != 0;
                return Some(Event::Noted { key, copied });
            }
            self.places.ended(key, cqueue::more(entry.flags()));
            let result = match usize::try_from(entry.result()) {
                Ok(sent) => Ok(sent),
                Err(_) => Err(io::Error::from_raw_os_error(-entry.result())),
            };
            return Some(Event::Done(key, result));
        }
    }

    fn cancel(&mut self) -> io::Result<()> {
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

    /// Goes on with the end of a ring that was dropped. The socket is let go when only
    /// notifications are to come: its peer is told of the end, and older kernels wait for requests
    /// before they let it go.
    fn end(&mut self) {
        if self.ending == Ending::Requests && self.cancel_within(Some(MOMENT)).is_ok() {
            self.ending = Ending::Socket;
        }
        while self.event().is_some() {}
        let ended = self.ending == Ending::Socket || self.places.owed == 0;
        if ended && self.ending != Ending::Nothing && !self.places.has_requests() {
            let _ = self.ring.submitter().unregister_files();
            self.ending = Ending::Nothing;
        }
    }

    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the ring's descriptor is open for as long as `self` is borrowed.
        unsafe { BorrowedFd::borrow_raw(self.ring.as_raw_fd()) }
    }
}

impl<B: Stable> orphans::Orphan for Inner<B> {
    fn is_done(&mut self) -> bool {
        if self.has_more() {
            let _ = self.enter(0, Some(Duration::ZERO));
        }
        while self.event().is_some() {}
        self.end();
        while self.event().is_some() {}
        self.places.owed == 0
    }

    fn free_one(&mut self) -> bool {
        self.places.drop_one()
    }

    fn descriptor(&self) -> (BorrowedFd<'_>, bool) {
        (self.as_fd(), true)
    }
}

/// Whether the kernel has zero-copy sends that report whether they copied, and lets us use them.
pub(super) fn supported() -> bool {
    static SUPPORTED: OnceLock<bool> = OnceLock::new();
    if let Some(&known) = SUPPORTED.get() {
        return known;
    }
    // An error is no answer to keep: descriptors or memory can be short, and a filter one thread's.
    let answer = try_out().ok();
    answer.is_some_and(|answer| *SUPPORTED.get_or_init(|| answer))
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
