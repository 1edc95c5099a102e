//! Whether a send that failed has taken a number.
//!
//! A datagram can fail after it was numbered: a filter forbids it (EPERM), a queue is full (ENOBUFS, with
//! IP_RECVERR set), or its device goes down. Then the number is used, and the kernel reads the buffer until
//! it reports the number, which may be after the error if a part of the datagram is already on its way.
//! Other failures use no number. The error does not say which it was. So another send is made that is
//! certain to fail after it was numbered (`probe`) and is reported at once: the number that is missing in
//! front of it is that of the failed send. Until that is known, the buffer of the failed send stays and
//! everything else is copied.
//!
//! After a lack of memory (ENOBUFS) the probe may find no memory either, which says nothing: locked memory
//! counts for all sockets of a user, and the pages of the failed send count, too. But each number costs
//! the socket some memory from when it is given until it is read (`holds_no_number`): if none is used, no
//! number was given.
#![allow(unsafe_code)]

use std::io;
use std::mem;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use super::error_queue::BATCH;
use super::places::header;
use super::requests::Id;
use super::sendmsg::{LOOKS, SendmsgBackend};
use super::zc_socket::SocketState;
use super::{Address, Key, Kind, Piece};

/// The longest datagram, and more: what is longer fails before anything is done about it.
const DATAGRAM: usize = 0xffff;

/// A send that failed and may have taken a number.
pub(super) struct Doubt {
    pub(super) id: Id,
    /// Of which place it is.
    pub(super) key: Key,
    /// What it was answered.
    pub(super) code: i32,
    /// The number that it took, if it took one.
    pub(super) number: u32,
}

impl SendmsgBackend {
    /// Looks until there is nothing to be seen, within reason. Whether there is nothing.
    fn look_at_all<B>(&mut self, state: &mut SocketState<B>) -> bool {
        (0..LOOKS).any(|_| self.look(state).is_ok_and(|count| count < BATCH))
    }

    /// Finds out whether the send in doubt has a number, if that can be had now.
    pub(super) fn settle<B>(&mut self, state: &mut SocketState<B>) {
        let Some(doubt) = self.doubt.take() else {
            return;
        };
        let mut complete = self.look_at_all(state);
        let mut failed_early = complete && holds_no_number(state.socket.as_fd());
        if complete && !failed_early && !self.corked && self.numbers.next() == doubt.number {
            let answer = match sockopt_is_set(state.socket.as_fd(), libc::SOL_UDP, libc::UDP_CORK) {
                // What the user gathers must not get any more; and errors end it before numbers.
                true => Some(doubt.code),
                false => self.probe(state, doubt.key),
            };
            complete = self.look_at_all(state);
            // It fails where the other did, before there are numbers. Of memory that can be chance.
            let of_memory = matches!(doubt.code, libc::ENOBUFS | libc::ENOMEM);
            failed_early = answer == Some(doubt.code) && !of_memory;
        }
        if !complete || (self.numbers.next() == doubt.number && !failed_early) {
            self.doubt = Some(doubt);
            return;
        }
        for _ in 0..self.numbers.claim(doubt.number, doubt.id) {
            state.requests.owes(&mut state.places, doubt.id);
        }
        state.requests.noted(&mut state.places, doubt.id, false);
    }

    /// Has a number taken and named, if that is possible now, and nothing sent. What was answered.
    pub(super) fn probe<B>(&self, state: &mut SocketState<B>, key: Key) -> Option<i32> {
        state.system_calls += 1;
        let first = probe(state.socket.as_fd(), state.places.address(key));
        if matches!(
            first,
            None | Some(libc::EINVAL | libc::EAGAIN | libc::ENOBUFS)
        ) {
            return first;
        }
        // There may be no way to there any more.
        state.system_calls += 1;
        let home: IpAddr = match self.kind {
            Kind::Udp6 => Ipv6Addr::LOCALHOST.into(),
            _ => Ipv4Addr::LOCALHOST.into(),
        };
        let home = Address::new(&SocketAddr::new(home, 9));
        probe(state.socket.as_fd(), home.as_ref());
        first
    }
}

/// Whether a datagram of `total` bytes can have a number although it was answered with an error.
pub(super) fn may_have_number(socket: BorrowedFd<'_>, code: i32, total: usize) -> bool {
    match code {
        // The kernel's memory for notifications, or the limit of locked memory. A queue that
        // is full is only told of if errors are asked for.
        libc::ENOBUFS => hears_of_drops(socket),
        // The socket's own buffer.
        libc::EAGAIN => false,
        _ => total <= DATAGRAM,
    }
}

/// Whether the socket has given no number that has not been named, and that name read: each is some
/// of its option memory (SO_MEMINFO, Linux 4.12) until then. What else is, such as a filter, makes
/// the answer no.
pub(super) fn holds_no_number(socket: BorrowedFd<'_>) -> bool {
    const SO_MEMINFO: libc::c_int = 55;
    const OPTION_MEMORY: usize = 6;
    let mut counts = [u32::MAX; 16];
    let mut len = mem::size_of_val(&counts) as libc::socklen_t;
    // SAFETY: room for more counts than there are, whose length is given; both outlive the call.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            SO_MEMINFO,
            counts.as_mut_ptr().cast(),
            &mut len,
        )
    };
    result == 0 && counts[OPTION_MEMORY] == 0
}

/// Whether a send is told that a queue was full.
fn hears_of_drops(socket: BorrowedFd<'_>) -> bool {
    let is_set = |level, option| sockopt_is_set(socket, level, option);
    is_set(libc::SOL_IP, libc::IP_RECVERR) || is_set(libc::SOL_IPV6, libc::IPV6_RECVERR)
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
pub(super) fn sockopt_is_set(
    socket: BorrowedFd<'_>,
    level: libc::c_int,
    option: libc::c_int,
) -> bool {
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
