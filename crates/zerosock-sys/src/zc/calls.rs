//! The carrier over sendmsg(2), with the error queue or without zero copy at all.
//!
//! A request is made at once when it is started. The kernel numbers the zero-copy sends of a socket
//! (`numbers`) and names the numbers in its error queue (`error_queue`). The socket's numbers are
//! ours alone: whoever sends with MSG_ZEROCOPY on a duplicate of it confuses them.
//! What a send that failed may have taken of them is found out in `doubt`.

use std::collections::VecDeque;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt;

use super::doubt::Doubt;
use super::error_queue::ErrorQueue;
use super::numbers::Numbers;
use super::places::{Places, Rest, header};
use super::{Address, Event, Key, Kind, NotStarted, Order, Stable, Way, kind, orphans};

/// Looks at the error queue that are taken together: peers can fill it too (IP_RECVERR).
pub(super) const LOOKS: usize = 64;
/// How often a number in doubt is asked after.
const DOUBT: Duration = Duration::from_millis(10);

/// Sends of one socket by a call each.
pub struct Calls<B: Stable> {
    /// Taken out by drop alone.
    inner: ManuallyDrop<Inner<B>>,
}

pub(super) struct Inner<B> {
    pub(super) socket: OwnedFd,
    zero_copy: bool,
    pub(super) places: Places<B>,
    pub(super) events: VecDeque<Event>,
    pub(super) numbers: Numbers,
    /// A send that failed and may have taken a number.
    pub(super) doubt: Option<Doubt>,
    /// Sends of UDP: those can fail late.
    datagrams: bool,
    pub(super) is_v6: bool,
    /// The last datagram is to be continued (MSG_MORE).
    pub(super) corked: bool,
    /// What the socket's error was when a wait found one; the next request has it as its result.
    error: Option<io::Error>,
    /// The last request was answered with WouldBlock.
    full: bool,
    queue: Box<ErrorQueue>,
    /// System calls for sending, asking and waiting.
    pub(super) calls: u64,
}

impl<B: Stable> Calls<B> {
    /// Sends of `socket` with `capacity` places; with `zero_copy` if SO_ZEROCOPY is set.
    #[must_use]
    pub fn new(socket: OwnedFd, capacity: u32, zero_copy: bool) -> Self {
        let kind = kind(&socket).ok();
        Self {
            inner: ManuallyDrop::new(Inner {
                socket,
                zero_copy,
                places: Places::new(capacity),
                events: VecDeque::new(),
                numbers: Numbers::default(),
                doubt: None,
                datagrams: matches!(kind, Some(Kind::Udp4 | Kind::Udp6)),
                is_v6: kind == Some(Kind::Udp6),
                corked: false,
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
        let wished = order.way == Way::ZeroCopy;
        let mut zero_copy = wished && inner.zero_copy;
        if zero_copy && inner.doubt.is_some() {
            inner.settle();
            zero_copy = inner.doubt.is_none() && inner.zero_copy;
        }
        let place = inner.places.get(key).ok_or(NotStarted::Vacant)?;
        let buffer = place.buffer.as_ref().ok_or(NotStarted::Vacant)?;
        let only;
        let many;
        let pieces: &[libc::iovec] = match Rest::of(buffer, order.from) {
            Rest::One(piece) => {
                only = [piece.vector()];
                &only
            }
            Rest::Many(pieces) if pieces.len() > libc::UIO_MAXIOV as usize => {
                return Err(NotStarted::TooManyPieces);
            }
            Rest::Many(pieces) => {
                many = pieces;
                &many
            }
        };
        let told = inner.error.take();
        let made = told.is_none();
        let result = match told {
            Some(error) => Err(error),
            None => {
                let more = if order.more { libc::MSG_MORE } else { 0 };
                let flags = libc::MSG_DONTWAIT | more;
                inner.calls += 1;
                let address = place.address.as_ref();
                send(inner.socket.as_fd(), pieces, address, zero_copy, flags)
            }
        };
        inner.full = matches!(&result, Err(error) if error.kind() == io::ErrorKind::WouldBlock);
        inner.places.begun(key);
        match &result {
            Ok(sent) => {
                inner.corked = order.more;
                if zero_copy && *sent > 0 {
                    inner.numbers.give(key);
                    inner.places.owes(key);
                } else if wished && !zero_copy {
                    // It was to go without a copy, and did not.
                    inner.events.push_back(Event::Noted { key, copied: true });
                }
            }
            Err(error) if made && zero_copy && inner.datagrams => {
                let code = error.raw_os_error().unwrap_or(0);
                let total = pieces.iter().map(|piece| piece.iov_len).sum();
                if inner.may_have_number(code, total) {
                    // An error ends what was to be continued.
                    inner.corked = false;
                    inner.doubt = Some(Doubt {
                        key,
                        code,
                        number: inner.numbers.next(),
                    });
                    inner.places.owes(key);
                    inner.settle();
                }
            }
            Err(_) => {}
        }
        inner.places.ended(key, false);
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
        let timeout = match inner.doubt {
            Some(_) => Some(timeout.unwrap_or(DOUBT).min(DOUBT)),
            None => timeout,
        };
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        inner.calls += 1;
        match poll(&mut descriptors, timeout.as_ref()) {
            Ok(0) if inner.doubt.is_some() => return inner.reap().map(drop),
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
        let mut inner = unsafe { ManuallyDrop::take(&mut self.inner) };
        let _ = inner.reap();
        if inner.places.owed > 0 {
            orphans::adopt(inner);
        }
    }
}

impl<B: Stable> Inner<B> {
    /// One look at the error queue, if it owes something. How many messages there were.
    fn reap(&mut self) -> io::Result<usize> {
        if self.numbers.is_empty() && self.doubt.is_none() {
            return Ok(0);
        }
        let count = self.look()?;
        match self.doubt {
            Some(_) => self.settle(),
            None => self.numbers.disown(),
        }
        Ok(count)
    }

    pub(super) fn look(&mut self) -> io::Result<usize> {
        self.calls += 1;
        let count = self.queue.receive(self.socket.as_fd())?;
        for (lo, hi, copied) in (0..count).filter_map(|index| self.queue.range(index)) {
            let in_step = self.numbers.name(lo, hi, |key| {
                self.places.noted(key);
                self.events.push_back(Event::Noted { key, copied });
            });
            // Somebody else sends without a copy, and much: what we gave has lost its meaning.
            self.zero_copy &= in_step;
        }
        Ok(count)
    }
}

impl<B: Stable> orphans::Orphan for Inner<B> {
    fn is_done(&mut self) -> bool {
        // Not without end: peers can fill the queue too, if errors are asked for.
        let _ = (0..LOOKS).all(|_| self.reap().is_ok_and(|count| count > 0));
        self.places.owed == 0
    }

    fn free_one(&mut self) -> bool {
        self.places.drop_one()
    }

    fn descriptor(&self) -> (BorrowedFd<'_>, bool) {
        (self.socket.as_fd(), false)
    }
}

/// One sendmsg(2).
pub(super) fn send(
    socket: BorrowedFd<'_>,
    pieces: &[libc::iovec],
    address: Option<&Address>,
    zero_copy: bool,
    flags: i32,
) -> io::Result<usize> {
    let zero_copy = if zero_copy { libc::MSG_ZEROCOPY } else { 0 };
    let flags = flags | zero_copy | libc::MSG_NOSIGNAL;
    let header = header(pieces, address);
    loop {
        // SAFETY: the header refers to the pieces and to the address, both of which outlive the
        // call; the pieces to a buffer that stays where it is (`Stable`) and that its place keeps
        // until the kernel has named the send's number (`Places::take`), or the thread of `orphans`
        // does.
        let sent = unsafe { libc::sendmsg(socket.as_raw_fd(), &header, flags) };
        if let Ok(sent) = usize::try_from(sent) {
            return Ok(sent);
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}
