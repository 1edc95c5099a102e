//! The back-end over io_uring.
//!
//! A ring is for one socket, which is registered with it. A request is an entry of the submission
//! queue; only [`submit`](UringBackend::submit) and waiting are system calls. Completions are read
//! from memory that the kernel shares. A zero-copy request has two: its result, with a flag that
//! says whether a notification follows, and the notification. Which completion belongs to which
//! request, and when a place is idle, is kept by `requests`.
//!
//! On TCP, the notifications of consecutive requests can be tied together: since Linux 6.10 a
//! packet with the end of one request and the beginning of the next ties their notifications
//! (`io_link_skb`), and so on for as long as there is more to send. The kernel then posts none of
//! them until everything is acknowledged. So a packet ends with a request (MSG_EOR) every 128 KiB.
//!
//! The ring has COOP_TASKRUN: the kernel posts completions when the thread that submitted enters it
//! for any reason, at the latest at a tick of the clock, and does not interrupt the thread. A flag
//! in shared memory says that completions wait to be posted.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::OnceLock;
use std::time::Duration;

use io_uring::{IoUring, Probe, cqueue, opcode, squeue, types};

use super::arenas::Arenas;
use super::places::{Place, header};
use super::requests::{CompletionEntry, GatherRules, Request};
use super::socket_state::SocketState;
use super::{Event, Key, NotStarted, Piece, SendMode, SocketKind, Stable, Started, Submission};

/// `IORING_SEND_ZC_REPORT_USAGE`: the notification says whether the kernel copied (Linux 6.2, and
/// stable releases of 6.1).
const REPORT_USAGE: u16 = 1 << 3;
/// `IORING_RECVSEND_FIXED_BUF`: from registered memory. Of several pieces since Linux 6.15.
const FIXED_BUF: u16 = 1 << 2;
/// User data of entries that belong to no request: polls for a writable socket.
const NO_REQUEST: u64 = u64::MAX;
/// The index of the socket among the registered files of the ring.
const SOCKET: types::Fixed = types::Fixed(0);
/// Number of zero-copy bytes that may have tied notifications. Ending a packet with a request makes
/// it shorter than others at the same cost.
const MAX_TIED_BYTES: usize = 128 << 10;
/// The longest time that the thread of `orphans` waits for one ring.
const CANCEL_TIMEOUT: Duration = Duration::from_millis(5);

/// The next step of the shutdown of a ring.
#[derive(Copy, Clone, Eq, PartialEq)]
enum Ending {
    /// Cancel the requests that the kernel has.
    Requests,
    /// Unregister the socket.
    Socket,
    Nothing,
}

/// An io_uring instance for the sends of one socket.
pub(super) struct UringBackend {
    ring: IoUring,
    arenas: Arenas,
    /// Number of entries of the submission queue that were not submitted.
    queued: usize,
    /// User data of those entries, in order.
    unsubmitted: Vec<u64>,
    /// Number of zero-copy bytes since a packet ended with a request.
    tied_bytes: usize,
    /// The kernel supports requests of several pieces of registered memory.
    vectors_of_arenas: bool,
    /// The next step of the shutdown, after the drop of the `ZcSocket`.
    ending: Ending,
}

impl UringBackend {
    /// Creates a ring for `socket` with `capacity` places.
    ///
    /// # Errors
    /// `Unsupported` before Linux 6.2, except for stable releases of 6.1; errors of
    /// io_uring_setup(2), EPERM where it is forbidden.
    pub(super) fn open(socket: impl AsFd, capacity: u32) -> io::Result<Self> {
        let answers = supported()?;
        if !answers.zero_copy {
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
            queued: 0,
            unsubmitted: Vec::new(),
            tied_bytes: 0,
            vectors_of_arenas: answers.vectors_of_arenas,
            ending: Ending::Requests,
        })
    }

    /// Queues a request for `submit`.
    pub(super) fn start<B: Stable>(
        &mut self,
        state: &mut SocketState<B>,
        keys: &[Key],
        submission: Submission,
    ) -> Result<Started, NotStarted> {
        let room = self.ring.params().sq_entries() as usize - self.queued;
        if room < 1 + usize::from(submission.when_writable) {
            return Err(NotStarted::QueueFull);
        }
        // The crate io_uring cannot set the index of the arena in a request of several pieces: it
        // is 0.
        let alone = |arena| !self.vectors_of_arenas || !self.arenas.is_first(arena);
        let place = keys.first().and_then(|&first| state.places.get(first));
        let arena = place.and_then(|place| place.buffer.as_ref()?.arena());
        let rules = GatherRules {
            many: state.gathers(submission.mode)
                && (submission.mode == SendMode::Copy || !arena.is_some_and(alone)),
            by_arena: submission.mode == SendMode::ZeroCopy,
            longest: state.longest(submission.mode),
        };
        let id = state
            .requests
            .gather(&state.places, keys, &submission, rules)?;
        let request = state.requests.get_mut(id);
        let flags = self.flags(request.total(), state.kind, submission);
        let entry = self.entry(request, place, submission.mode, flags);
        if let Some(number) = request.arena {
            self.arenas.begun(number);
        }
        let places = request.places();
        let follows = submission.linked || submission.whole && places < keys.len();
        let started = Started {
            places,
            linked: follows && !request.is_cut,
            registered: request.arena.is_some(),
        };
        let link = match started.linked {
            true => squeue::Flags::IO_LINK,
            false => squeue::Flags::empty(),
        };
        let entry = entry.user_data(state.requests.user_data(id)).flags(link);
        if submission.when_writable {
            let poll = opcode::PollAdd::new(SOCKET, libc::POLLOUT as u32)
                .build()
                .user_data(NO_REQUEST)
                .flags(squeue::Flags::IO_LINK);
            self.push(&poll);
        }
        self.push(&entry);
        state.requests.begun(&mut state.places, id);
        Ok(started)
    }

    /// The submission queue entry of a request, with the address and the arena of its first place.
    fn entry<B: Stable>(
        &mut self,
        request: &mut Request,
        place: Option<&Place<B>>,
        mode: SendMode,
        flags: i32,
    ) -> squeue::Entry {
        let address = place.and_then(|place| place.address.as_ref());
        let arena = place.and_then(|place| place.buffer.as_ref()?.arena());
        match *request.pieces() {
            [] | [_] => {
                let piece = request.pieces().first().map_or(Piece::EMPTY, Piece::from);
                let (to, to_len) = match address {
                    Some(address) => (address.as_ptr(), address.len()),
                    None => (std::ptr::null(), 0),
                };
                match mode {
                    SendMode::ZeroCopy => {
                        request.arena = arena.and_then(|it| self.arenas.number(&self.ring, it));
                        opcode::SendZc::new(SOCKET, piece.address, piece.len as u32)
                            .buf_index(request.arena)
                            .dest_addr(to)
                            .dest_addr_len(to_len)
                            .flags(flags)
                            .zc_flags(REPORT_USAGE)
                            .build()
                    }
                    SendMode::Copy => opcode::Send::new(SOCKET, piece.address, piece.len as u32)
                        .dest_addr(to)
                        .dest_addr_len(to_len)
                        .flags(flags)
                        .build(),
                }
            }
            _ => {
                let header = request.header(address);
                match mode {
                    SendMode::ZeroCopy => {
                        let number = arena.and_then(|it| self.arenas.number(&self.ring, it));
                        request.arena = number.filter(|&number| number == 0);
                        let fixed = match request.arena {
                            Some(_) => FIXED_BUF,
                            None => 0,
                        };
                        opcode::SendMsgZc::new(SOCKET, header)
                            .ioprio(REPORT_USAGE | fixed)
                            .flags(flags as u32)
                            .build()
                    }
                    SendMode::Copy => opcode::SendMsg::new(SOCKET, header)
                        .flags(flags as u32)
                        .build(),
                }
            }
        }
    }

    /// The flags of a request of `total` bytes.
    fn flags(&mut self, total: usize, kind: SocketKind, submission: Submission) -> i32 {
        let mut flags = libc::MSG_NOSIGNAL;
        if submission.whole {
            flags |= libc::MSG_WAITALL;
        }
        if submission.more {
            flags |= libc::MSG_MORE;
        }
        if kind.is_tcp() && submission.mode == SendMode::ZeroCopy {
            self.tied_bytes += total;
            if self.tied_bytes >= MAX_TIED_BYTES && submission.whole && !submission.more {
                self.tied_bytes = 0;
                flags |= libc::MSG_EOR;
            }
        }
        flags
    }

    /// Adds an entry. The caller has checked that the queue has room.
    fn push(&mut self, entry: &squeue::Entry) {
        // SAFETY: the entry refers to buffers in their places, which do not move (`Stable`), to an
        // address in a place, and to the message header of the request. None of them is moved or
        // freed before the result of the request, and no buffer before the notification
        // (`Places::take`, `Requests::free_if_finished`). If the `ZcSocket`, which owns all of
        // them, is dropped before, it is moved as a whole to the thread of `orphans`, or leaked. A
        // registered arena is mapped as long as it is registered, and not replaced while a request
        // names it (`arenas`).
        if unsafe { self.ring.submission().push(entry) }.is_ok() {
            self.queued += 1;
            self.unsubmitted.push(entry.get_user_data());
        }
    }

    /// Whether the kernel has completions to post: deferred ones, or those that found no room in
    /// the queue.
    fn has_more(&mut self) -> bool {
        let flags = self.ring.submission();
        flags.taskrun() || flags.cq_overflow()
    }

    pub(super) fn submit<B>(&mut self, state: &mut SocketState<B>) -> io::Result<()> {
        if self.queued == 0 {
            return Ok(());
        }
        self.enter(state, 0, None)
    }

    /// One io_uring_enter(2): submits the queued entries, and waits for `want` completions.
    fn enter<B>(
        &mut self,
        state: &mut SocketState<B>,
        want: usize,
        timeout: Option<Duration>,
    ) -> io::Result<()> {
        state.system_calls += 1;
        let result = match timeout {
            Some(timeout) => {
                let time = types::Timespec::from(timeout);
                let args = types::SubmitArgs::new().timespec(&time);
                self.ring.submitter().submit_with_args(want.max(1), &args)
            }
            None => self.ring.submitter().submit_and_wait(want),
        };
        self.queued = self.ring.submission().len();
        self.unsubmitted
            .drain(..self.unsubmitted.len().saturating_sub(self.queued));
        match result.map_err(|error| (error.raw_os_error(), error)) {
            Ok(_) | Err((Some(libc::ETIME | libc::EINTR | libc::EBUSY), _)) => Ok(()),
            Err((_, error)) => Err(error),
        }
    }

    pub(super) fn reap<B>(&mut self, state: &mut SocketState<B>) -> io::Result<()> {
        if self.ring.completion().is_empty() && self.has_more() {
            self.enter(state, 0, Some(Duration::ZERO))?;
        }
        Ok(())
    }

    pub(super) fn wait<B>(
        &mut self,
        state: &mut SocketState<B>,
        timeout: Option<Duration>,
    ) -> io::Result<()> {
        let has_news = !state.requests.events.is_empty() || !self.ring.completion().is_empty();
        if state.places.busy == 0 || has_news {
            return self.submit(state);
        }
        self.enter(state, 1, timeout)
    }

    pub(super) fn event<B>(&mut self, state: &mut SocketState<B>) -> Option<Event> {
        loop {
            if let Some(event) = state.requests.events.pop_front() {
                return Some(event);
            }
            let entry = self.ring.completion().next()?;
            if entry.user_data() == NO_REQUEST {
                continue;
            }
            let posted = CompletionEntry {
                user_data: entry.user_data(),
                result: entry.result(),
                flags: entry.flags(),
            };
            if let Some(number) = state.requests.posted(&mut state.places, posted) {
                self.arenas.ended(number);
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

    /// Ends the requests that were not submitted. Nothing may be started or submitted after that.
    pub(super) fn abandon<B>(&mut self, state: &mut SocketState<B>) {
        for user_data in self.unsubmitted.drain(..) {
            if user_data != NO_REQUEST {
                state.requests.abandoned(&mut state.places, user_data);
            }
        }
    }

    /// Continues the shutdown of a ring after the drop of its `ZcSocket`, and handles its
    /// completions.
    pub(super) fn continue_shutdown<B>(&mut self, state: &mut SocketState<B>) {
        if self.has_more() {
            const GETEVENTS: u32 = 1;
            let (submit, wait, argument) = (0, 0, None::<&libc::sigset_t>);
            // SAFETY: nothing is submitted: the queue still contains abandoned entries, and their
            // buffers may be free. No argument is given. If the call is refused, completions that
            // fit into the queue are still posted.
            let _ = unsafe {
                self.ring
                    .submitter()
                    .enter(submit, wait, GETEVENTS, argument)
            };
            state.system_calls += 1;
        }
        while self.event(state).is_some() {}
        self.end(state);
        while self.event(state).is_some() {}
    }

    /// Unregisters the socket when only notifications are pending: this closes the connection.
    /// Older kernels wait for requests before they release the socket.
    fn end<B>(&mut self, state: &mut SocketState<B>) {
        if self.ending == Ending::Requests && self.cancel_within(Some(CANCEL_TIMEOUT)).is_ok() {
            self.ending = Ending::Socket;
        }
        while self.event(state).is_some() {}
        let ended = self.ending == Ending::Socket || state.places.busy == 0;
        if ended && self.ending != Ending::Nothing && !state.places.has_requests() {
            self.unregister_socket();
            self.ending = Ending::Nothing;
        }
    }

    /// Removes the socket from the registered files of the ring.
    pub(super) fn unregister_socket(&self) {
        let _ = self.ring.submitter().unregister_files();
    }

    /// Number of registered pool arenas.
    pub(super) fn registered(&self) -> usize {
        self.arenas.count()
    }

    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the ring's descriptor is open for as long as `self` is borrowed.
        unsafe { BorrowedFd::borrow_raw(self.ring.as_raw_fd()) }
    }
}

/// Features of io_uring on this machine.
#[derive(Copy, Clone, Debug)]
pub(super) struct UringFeatures {
    /// Zero-copy sends with notifications that say whether the kernel copied.
    pub(super) zero_copy: bool,
    /// Zero-copy sends of several pieces of registered memory.
    vectors_of_arenas: bool,
}

/// The features of io_uring that this process may use.
pub(super) fn supported() -> io::Result<UringFeatures> {
    static SUPPORTED: OnceLock<UringFeatures> = OnceLock::new();
    if let Some(&known) = SUPPORTED.get() {
        return Ok(known);
    }
    // An error is not cached: descriptors or memory can be short now, and a seccomp filter can
    // apply to one thread.
    let answer = probe_features()?;
    Ok(*SUPPORTED.get_or_init(|| answer))
}

fn probe_features() -> io::Result<UringFeatures> {
    let mut ring = IoUring::new(2)?;
    let mut probe = Probe::new();
    ring.submitter().register_probe(&mut probe)?;
    let zero_copy =
        probe.is_supported(opcode::SendZc::CODE) && probe.is_supported(opcode::SendMsgZc::CODE);
    if !zero_copy {
        return Ok(UringFeatures {
            zero_copy,
            vectors_of_arenas: false,
        });
    }
    // A kernel that does not know a flag returns EINVAL before it looks up the descriptor.
    let nowhere = types::Fd(-1);
    let one = opcode::SendZc::new(nowhere, std::ptr::null(), 0).zc_flags(REPORT_USAGE);
    // SAFETY: the entry refers to no memory.
    let zero_copy = match unsafe { answer(&mut ring, &one.build()) }? {
        Some(libc::EBADF) => true,
        Some(libc::EINVAL) => false,
        _ => return Err(io::ErrorKind::Other.into()),
    };
    let empty = header(&[], None);
    let many = opcode::SendMsgZc::new(nowhere, &raw const empty).ioprio(REPORT_USAGE | FIXED_BUF);
    // SAFETY: the entry refers to an empty header, which outlives the request.
    let answer = unsafe { answer(&mut ring, &many.build()) }?;
    // Also EFAULT, since no memory is registered.
    let vectors_of_arenas = answer == Some(libc::EBADF);
    Ok(UringFeatures {
        zero_copy,
        vectors_of_arenas,
    })
}

/// The error number of a request without a socket. Notifications are ignored.
///
/// # Safety
/// The memory that the request refers to is valid until this returns.
unsafe fn answer(ring: &mut IoUring, entry: &squeue::Entry) -> io::Result<Option<i32>> {
    // SAFETY: the caller keeps the memory valid; without a socket the kernel does not read it
    // later.
    unsafe { ring.submission().push(entry) }.map_err(io::Error::other)?;
    ring.submit_and_wait(1)?;
    let mut results = ring
        .completion()
        .filter(|entry| !cqueue::notif(entry.flags()));
    Ok(results.next().map(|entry| -entry.result()))
}
