//! The carrier over sendmsg(2), with the error queue or without zero copy at all.
//!
//! A request is made at once when it is started. The kernel numbers the zero-copy sends of a socket
//! that succeed with at least a byte, and names ranges of numbers in its error queue when their
//! buffers are free; a range may come before an earlier one. The socket's numbers are ours alone:
//! whoever sends with MSG_ZEROCOPY on a duplicate of it confuses them.

use std::collections::VecDeque;
use std::io;
use std::mem::{self, ManuallyDrop, MaybeUninit};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt;

pub(super) use super::places::Message;
use super::places::{Places, Rest};
use super::{Address, Event, Key, NotStarted, Order, Stable, Way, orphans};

/// `SO_EE_ORIGIN_ZEROCOPY`.
const ORIGIN: u8 = 5;
/// `SO_EE_CODE_ZEROCOPY_COPIED`.
const COPIED: u8 = 1;
/// Messages of the error queue that one call takes.
const BATCH: usize = 16;
/// Room for the control data of each: an extended error and the address of its offender.
const CONTROL: usize = 128;

/// Sends of one socket by a call each.
pub struct Calls<B: Stable> {
    /// Taken out by drop alone.
    inner: ManuallyDrop<Inner<B>>,
}

struct Inner<B> {
    socket: OwnedFd,
    zero_copy: bool,
    places: Places<B>,
    events: VecDeque<Event>,
    /// Whose the numbers from `first` on are; none for those that have been named already.
    numbered: VecDeque<Option<Key>>,
    first: u32,
    /// What the socket's error was when a wait found one; the next request has it as its result.
    error: Option<io::Error>,
    /// The last request was answered with WouldBlock.
    full: bool,
    queue: Box<ErrorQueue>,
    /// System calls for sending, asking and waiting.
    calls: u64,
}

impl<B: Stable> Calls<B> {
    /// Sends of `socket` with `capacity` places; with `zero_copy` if SO_ZEROCOPY is set.
    #[must_use]
    pub fn new(socket: OwnedFd, capacity: u32, zero_copy: bool) -> Self {
        Self {
            inner: ManuallyDrop::new(Inner {
                socket,
                zero_copy,
                places: Places::new(capacity),
                events: VecDeque::new(),
                numbered: VecDeque::new(),
                first: 0,
                error: None,
                full: false,
                queue: Box::default(),
                calls: 0,
            }),
        }
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

    /// Makes a request of what lies in a place: one call, that does not block.
    ///
    /// # Errors
    /// If it cannot be made; the place is as it was.
    pub fn start(&mut self, key: Key, order: Order) -> Result<(), NotStarted> {
        let inner = &mut *self.inner;
        let place = inner.places.get(key).ok_or(NotStarted::Vacant)?;
        let buffer = place.buffer.as_ref().ok_or(NotStarted::Vacant)?;
        let pieces = match Rest::of(buffer, order.from) {
            Rest::One(piece) => vec![piece.vector()],
            Rest::Many(pieces) if pieces.len() > libc::UIO_MAXIOV as usize => {
                return Err(NotStarted::TooManyPieces);
            }
            Rest::Many(pieces) => pieces,
        };
        let zero_copy = order.way == Way::ZeroCopy && inner.zero_copy;
        let result = match inner.error.take() {
            Some(error) => Err(error),
            None => {
                let message = Message::new(pieces, place.address.as_ref());
                let more = if order.more { libc::MSG_MORE } else { 0 };
                let flags = libc::MSG_DONTWAIT | more;
                inner.calls += 1;
                send(inner.socket.as_fd(), &message, zero_copy, flags)
            }
        };
        let numbered = zero_copy && result.as_ref().is_ok_and(|&sent| sent > 0);
        if numbered {
            inner.numbered.push_back(Some(key));
        }
        inner.full = matches!(&result, Err(error) if error.kind() == io::ErrorKind::WouldBlock);
        inner.places.begun(key);
        inner.places.ended(key, numbered);
        inner.events.push_back(Event::Done(key, result));
        Ok(())
    }

    /// Nothing: requests are made when they are started.
    ///
    /// # Errors
    /// None.
    pub fn submit(&mut self) -> io::Result<()> {
        Ok(())
    }

    /// The next thing that the kernel has said: no system call.
    pub fn event(&mut self) -> Option<Event> {
        self.inner.events.pop_front()
    }

    /// Reads the error queue, if it owes something: one call, which does not wait.
    ///
    /// # Errors
    /// What recvmmsg(2) answers.
    pub fn reap(&mut self) -> io::Result<()> {
        self.inner.reap().map(drop)
    }

    /// Waits until the kernel says something or, after WouldBlock, until the socket is writable,
    /// or for `timeout`. Returns at once if there is nothing to wait for.
    ///
    /// # Errors
    /// What poll(2) and recvmmsg(2) answer. A signal ends the waiting early.
    pub fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        let inner = &mut *self.inner;
        if !inner.events.is_empty() || (inner.places.owed == 0 && !inner.full) {
            return Ok(());
        }
        let wanted = if inner.full {
            PollFlags::OUT
        } else {
            PollFlags::empty()
        };
        let mut descriptors = [PollFd::new(&inner.socket, wanted)];
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        inner.calls += 1;
        match poll(&mut descriptors, timeout.as_ref()) {
            Ok(0) | Err(rustix::io::Errno::INTR) => return Ok(()),
            Ok(_) => {}
            Err(error) => return Err(error.into()),
        }
        let found = descriptors[0].revents();
        if found.contains(PollFlags::OUT) {
            inner.full = false;
        }
        if inner.reap()? == 0 && !found.contains(PollFlags::OUT) {
            // Not the queue, but the socket: its error is told once, to the next request; what has
            // hung up says so again and again.
            if let Ok(Err(error)) = sockopt::socket_error(&inner.socket) {
                inner.error = Some(error.into());
                inner.full = false;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
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

    /// The buffer, to look at.
    #[must_use]
    pub fn peek(&self, key: Key) -> Option<&B> {
        self.inner.places.get(key)?.buffer.as_ref()
    }

    /// Nothing: the kernel has no request that is not done.
    ///
    /// # Errors
    /// None.
    pub fn cancel(&mut self) -> io::Result<()> {
        Ok(())
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
}

impl<B: Stable> AsFd for Calls<B> {
    /// The socket: it has an error to tell (EPOLLERR) when a notification has come, and is
    /// writable when it takes more.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inner.socket.as_fd()
    }
}

impl<B: Stable> Drop for Calls<B> {
    fn drop(&mut self) {
        // SAFETY: taken once, as this is drop, and `inner` is not used after it.
        let inner = unsafe { ManuallyDrop::take(&mut self.inner) };
        if inner.places.owed > 0 {
            orphans::adopt(inner);
        }
    }
}

impl<B: Stable> Inner<B> {
    /// One look at the error queue. How many messages there were.
    fn reap(&mut self) -> io::Result<usize> {
        if self.numbered.is_empty() {
            return Ok(0);
        }
        self.calls += 1;
        let count = self.queue.receive(self.socket.as_fd())?;
        for index in 0..count {
            if let Some((lo, hi, copied)) = self.queue.range(index) {
                self.noted(lo, hi, copied);
            }
        }
        Ok(count)
    }

    /// The buffers of the numbers `lo` to `hi` are free.
    fn noted(&mut self, lo: u32, hi: u32, copied: bool) {
        let known = self.numbered.len() as u32;
        // Numbers wrap; those that are not ours, or named already, are passed over.
        for offset in 0..known.min(hi.wrapping_sub(lo).saturating_add(1)) {
            let place = lo.wrapping_add(offset).wrapping_sub(self.first);
            let key = self.numbered.get_mut(place as usize).and_then(Option::take);
            if let Some(key) = key {
                self.places.noted(key);
                self.events.push_back(Event::Noted { key, copied });
            }
        }
        while let Some(None) = self.numbered.front() {
            self.numbered.pop_front();
            self.first = self.first.wrapping_add(1);
        }
    }
}

impl<B: Stable> orphans::Orphan for Inner<B> {
    fn is_done(&mut self) -> bool {
        while self.reap().is_ok_and(|count| count > 0) {}
        self.places.owed == 0
    }

    fn descriptor(&self) -> (BorrowedFd<'_>, bool) {
        (self.socket.as_fd(), false)
    }
}

/// One sendmsg(2).
pub(super) fn send(
    socket: BorrowedFd<'_>,
    message: &Message,
    zero_copy: bool,
    flags: i32,
) -> io::Result<usize> {
    let zero_copy = if zero_copy { libc::MSG_ZEROCOPY } else { 0 };
    let flags = flags | zero_copy | libc::MSG_NOSIGNAL;
    debug_assert_eq!(message.header.msg_iovlen, message.pieces.len());
    loop {
        // SAFETY: the header refers to the message's own pieces and to the place's address, both
        // of which outlive the call; the pieces to a buffer that stays where it is (`Stable`) and
        // that its place keeps until the kernel has named the send's number (`Places::take`), or
        // the thread of `orphans` does.
        let sent = unsafe { libc::sendmsg(socket.as_raw_fd(), &message.header, flags) };
        if let Ok(sent) = usize::try_from(sent) {
            return Ok(sent);
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// Where messages of the error queue are received.
pub(super) struct ErrorQueue {
    /// Messages that one call takes.
    batch: usize,
    headers: [libc::mmsghdr; BATCH],
    control: [Control; BATCH],
}

#[derive(Copy, Clone)]
#[repr(C, align(8))]
struct Control([u8; CONTROL]);

// SAFETY: the pointers in the headers are set anew before each call, to the value's own control
// buffers; between calls nobody follows them.
unsafe impl Send for ErrorQueue {}

impl Default for ErrorQueue {
    fn default() -> Self {
        Self {
            batch: BATCH,
            // SAFETY: all zeros is a valid `mmsghdr`: null pointers with zero lengths.
            headers: unsafe { MaybeUninit::zeroed().assume_init() },
            control: [Control([0; CONTROL]); BATCH],
        }
    }
}

impl ErrorQueue {
    /// One that takes one message a call.
    pub(super) fn one_by_one() -> Self {
        Self {
            batch: 1,
            ..Self::default()
        }
    }

    /// Takes up to [`BATCH`] messages. How many there were.
    pub(super) fn receive(&mut self, socket: BorrowedFd<'_>) -> io::Result<usize> {
        for (entry, control) in self.headers.iter_mut().zip(&mut self.control) {
            entry.msg_hdr.msg_control = control.0.as_mut_ptr().cast();
            entry.msg_hdr.msg_controllen = CONTROL as _;
        }
        // SAFETY: as many headers as are named; each has room for control data of the length it
        // says and for nothing else. All of it outlives the call. No timeout is given.
        let count = unsafe {
            libc::recvmmsg(
                socket.as_raw_fd(),
                self.headers.as_mut_ptr(),
                self.batch.min(BATCH) as libc::c_uint,
                (libc::MSG_ERRQUEUE | libc::MSG_DONTWAIT) as _,
                std::ptr::null_mut(),
            )
        };
        if let Ok(count) = usize::try_from(count) {
            return Ok(count);
        }
        let error = io::Error::last_os_error();
        match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(0),
            _ => Err(error),
        }
    }

    /// The range that a message received last names, and whether the kernel copied; none if it is
    /// about something else.
    pub(super) fn range(&self, index: usize) -> Option<(u32, u32, bool)> {
        let used = self.headers.get(index)?.msg_hdr.msg_controllen;
        let control = self.control.get(index)?.0.get(..used.min(CONTROL))?;
        let header = mem::size_of::<libc::cmsghdr>();
        // `struct cmsghdr` begins with its length; behind it the extended error: u32 errno, u8
        // origin, type, code, pad, u32 info, u32 data.
        let word = |at: usize| {
            let bytes = control.get(at..at + 4)?;
            Some(u32::from_ne_bytes(bytes.try_into().ok()?))
        };
        let origin = *control.get(header + 4)?;
        let code = *control.get(header + 6)?;
        let (lo, hi) = (word(header + 8)?, word(header + 12)?);
        (origin == ORIGIN && word(header)? == 0).then_some((lo, hi, code & COPIED != 0))
    }
}
