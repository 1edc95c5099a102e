//! The carrier over sendmsg(2), with the error queue or without zero copy at all.
//!
//! A request is made at once when it is started. The kernel numbers the zero-copy sends of a socket
//! (`numbers`) and names the numbers in its error queue (`error_queue`). The socket's numbers are
//! ours alone: whoever sends with MSG_ZEROCOPY on a duplicate of it confuses them.
//!
//! A datagram may fail after it was given its number: when a filter forbids it (EPERM), a queue is
//! full (ENOBUFS, if IP_RECVERR is set) or its device goes down. Then the number is used, and the
//! buffer is the kernel's until it is named, which may be later than the error if a part of the
//! datagram is on its way already. Other failures take no number. Which it was is not said, so that
//! it is asked: another send, that is certain to fail after it was given a number (`probe`), is
//! named at once, and what is missing in front of it was the failed one's. As long as there is no
//! answer, the failed one's buffer stays and everything else is copied.

use std::collections::VecDeque;
use std::io;
use std::mem::{self, ManuallyDrop};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt;

use super::error_queue::{BATCH, ErrorQueue};
use super::numbers::Numbers;
use super::places::{Places, Rest, header};
use super::{Address, Event, Key, Kind, NotStarted, Order, Piece, Stable, Way, kind, orphans};

/// The longest datagram, and more: what is longer fails before anything is done about it.
const DATAGRAM: usize = 0xffff;
/// Looks at the error queue that are taken together: peers can fill it too (IP_RECVERR).
const LOOKS: usize = 64;
/// How often a number in doubt is asked after.
const DOUBT: Duration = Duration::from_millis(10);

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
    numbers: Numbers,
    /// A send that failed and may have taken a number.
    doubt: Option<Doubt>,
    /// Sends of UDP: those can fail late.
    datagrams: bool,
    is_v6: bool,
    /// The last datagram is to be continued (MSG_MORE).
    corked: bool,
    /// What the socket's error was when a wait found one; the next request has it as its result.
    error: Option<io::Error>,
    /// The last request was answered with WouldBlock.
    full: bool,
    queue: Box<ErrorQueue>,
    /// System calls for sending, asking and waiting.
    calls: u64,
}

struct Doubt {
    key: Key,
    /// What it was answered.
    code: i32,
    /// The number that it took, if it took one.
    number: u32,
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

    fn look(&mut self) -> io::Result<usize> {
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

    /// Looks until there is nothing to be seen, within reason. Whether there is nothing.
    fn look_at_all(&mut self) -> bool {
        (0..LOOKS).any(|_| self.look().is_ok_and(|count| count < BATCH))
    }

    /// Whether a datagram of `total` bytes can have a number although it was answered with an error.
    fn may_have_number(&self, code: i32, total: usize) -> bool {
        match code {
            // The kernel's memory for notifications, or the limit of locked memory. A queue that
            // is full is only told of if errors are asked for.
            libc::ENOBUFS => self.hears_of_drops(),
            // The socket's own buffer.
            libc::EAGAIN => false,
            _ => total <= DATAGRAM,
        }
    }

    /// Finds out whether the send in doubt has a number, if that can be had now.
    fn settle(&mut self) {
        let Some(doubt) = self.doubt.take() else {
            return;
        };
        let mut complete = self.look_at_all();
        let mut answer = None;
        if complete && !self.corked && self.numbers.next() == doubt.number {
            answer = match sockopt_is_set(self.socket.as_fd(), libc::SOL_UDP, libc::UDP_CORK) {
                // What the user gathers must not get any more; and errors end it before numbers.
                true => Some(doubt.code),
                false => self.probe(doubt.key),
            };
            complete = self.look_at_all();
        }
        // It fails where the other did, before there are numbers. Of memory that can be chance, as
        // long as other sends use some.
        let of_memory = matches!(doubt.code, libc::ENOBUFS | libc::ENOMEM);
        let failed_early = answer == Some(doubt.code) && (!of_memory || self.numbers.is_empty());
        if !complete || (self.numbers.next() == doubt.number && !failed_early) {
            self.doubt = Some(doubt);
            return;
        }
        for _ in 0..self.numbers.claim(doubt.number, doubt.key) {
            self.places.owes(doubt.key);
        }
        let place = self.places.get(doubt.key);
        if place.is_some_and(|place| place.results == 0) {
            let (key, copied) = (doubt.key, false);
            self.events.push_back(Event::Noted { key, copied });
        }
        self.places.noted(doubt.key);
    }

    /// Has a number taken and named, if that is possible now, and nothing sent. What was answered.
    fn probe(&mut self, key: Key) -> Option<i32> {
        let place = self.places.get(key);
        self.calls += 1;
        let first = probe(
            self.socket.as_fd(),
            place.and_then(|place| place.address.as_ref()),
        );
        if matches!(
            first,
            None | Some(libc::EINVAL | libc::EAGAIN | libc::ENOBUFS)
        ) {
            return first;
        }
        // There may be no way to there any more.
        self.calls += 1;
        let home: IpAddr = match self.is_v6 {
            true => Ipv6Addr::LOCALHOST.into(),
            false => Ipv4Addr::LOCALHOST.into(),
        };
        let home = Address::new(&SocketAddr::new(home, 9));
        probe(self.socket.as_fd(), home.as_ref());
        first
    }

    /// Whether a send is told that a queue was full.
    fn hears_of_drops(&self) -> bool {
        let is_set = |level, option| sockopt_is_set(self.socket.as_fd(), level, option);
        is_set(libc::SOL_IP, libc::IP_RECVERR) || is_set(libc::SOL_IPV6, libc::IPV6_RECVERR)
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

/// A datagram that is to be cut into more segments than the kernel ever makes of one (UDP_SEGMENT,
/// Linux 4.18): it is refused (EINVAL) when it is complete, and with it goes the number that it was
/// given. Nothing is sent. What was answered; none if it was taken after all.
fn probe(socket: BorrowedFd<'_>, address: Option<&Address>) -> Option<i32> {
    static BYTES: [u8; 1 << 14] = [0; 1 << 14];
    #[repr(C)]
    struct Control {
        header: libc::cmsghdr,
        segment: u16,
        _rest: [u16; 3],
    }
    // SAFETY: all zeros is a valid `cmsghdr`, and so is the rest.
    let mut control: Control = unsafe { mem::zeroed() };
    control.header.cmsg_len = (mem::size_of::<libc::cmsghdr>() + 2) as _;
    control.header.cmsg_level = libc::SOL_UDP;
    control.header.cmsg_type = libc::UDP_SEGMENT;
    control.segment = 1;
    let pieces = [Piece::from(&BYTES[..]).vector()];
    let mut header = header(&pieces, address);
    header.msg_control = (&raw mut control).cast();
    header.msg_controllen = mem::size_of::<Control>() as _;
    let flags = libc::MSG_ZEROCOPY | libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: the header refers to the pieces, the address and the control data, which outlive the
    // call; the piece to bytes that are never freed or written.
    let sent = unsafe { libc::sendmsg(socket.as_raw_fd(), &header, flags) };
    match sent {
        0.. => None,
        _ => io::Error::last_os_error().raw_os_error(),
    }
}

/// Whether an option whose value is an int is set.
fn sockopt_is_set(socket: BorrowedFd<'_>, level: libc::c_int, option: libc::c_int) -> bool {
    let mut value: libc::c_int = 0;
    let mut len = mem::size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: the value is an int, whose length is given; both outlive the call.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            level,
            option,
            (&raw mut value).cast(),
            &mut len,
        )
    };
    result == 0 && value != 0
}
