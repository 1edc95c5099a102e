//! Whether a failed datagram took a notification id.
//!
//! The kernel assigns the id of a zero-copy datagram early, so a datagram can fail with its id
//! taken: a filter drops it (EPERM), a queue is full (ENOBUFS, with IP_RECVERR set), or its device
//! goes down. The kernel then reads the buffer until it reports the id, which can be after the
//! error if fragments of the datagram were already queued. Other failures take no id. The error
//! code does not tell the two apart. So the back-end makes a second send that takes an id, fails
//! for certain, and is reported at once (`probe`): if the reported id leaves a gap, the failed
//! datagram took the missing id. Until this is known, the buffer of the failed datagram stays in
//! its place and all other sends are copied.
//!
//! After ENOBUFS the probe can run out of memory as well, and its failure proves nothing: locked
//! memory is accounted per user, including the pages of the failed datagram. But each id charges
//! the socket's option memory from its assignment until its report is read
//! (`has_no_unreported_id`). If none is charged, the failed datagram took no id.
#![allow(unsafe_code)]

use std::io;
use std::mem;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use super::places::header;
use super::requests::RequestId;
use super::socket_state::SocketState;
use super::{Key, Piece, SocketAddress, SocketKind};

/// An upper bound of a datagram's length, in bytes: a longer one fails before it takes an id.
const MAX_DATAGRAM: usize = 0xffff;

/// A send that failed and may have taken a notification id.
pub(super) struct UnresolvedNotification {
    pub(super) request: RequestId,
    /// The place of its buffer.
    pub(super) key: Key,
    /// The error number of its failure.
    pub(super) code: i32,
    /// The id that it took, if it took one.
    pub(super) id: u32,
}

/// Makes the kernel assign and report one id, if that is possible now, without sending anything:
/// for the destination of place `key`. Returns the error number of the probe.
pub(super) fn probe<B>(state: &mut SocketState<B>, key: Key) -> Option<i32> {
    state.system_calls += 1;
    let first = send_probe(state.socket.as_fd(), state.places.address(key));
    if matches!(
        first,
        None | Some(libc::EINVAL | libc::EAGAIN | libc::ENOBUFS)
    ) {
        return first;
    }
    // The route to the destination may be gone: a probe to the loopback address has one.
    state.system_calls += 1;
    let home: IpAddr = match state.kind {
        SocketKind::Udp6 => Ipv6Addr::LOCALHOST.into(),
        _ => Ipv4Addr::LOCALHOST.into(),
    };
    let home = SocketAddress::new(&SocketAddr::new(home, 9));
    send_probe(state.socket.as_fd(), home.as_ref());
    first
}

/// Whether a datagram of `total` bytes that failed with `code` can have taken an id.
pub(super) fn may_have_taken_id(socket: BorrowedFd<'_>, code: i32, total: usize) -> bool {
    match code {
        // The memory for notifications or the limit of locked memory is exhausted, before an id is
        // assigned; or a queue is full, which is reported only if IP_RECVERR is set.
        libc::ENOBUFS => reports_drops(socket),
        // The send buffer of the socket is full.
        libc::EAGAIN => false,
        _ => total <= MAX_DATAGRAM,
    }
}

/// Whether every id that the socket assigned was reported and the report was read: until then each
/// id is charged to its option memory (SO_MEMINFO, Linux 4.12). False also if something else is
/// charged there, such as a filter.
pub(super) fn has_no_unreported_id(socket: BorrowedFd<'_>) -> bool {
    option_memory(socket) == Some(0)
}

/// The option memory of a socket, in bytes. `None`: the kernel does not tell.
pub(crate) fn option_memory(socket: BorrowedFd<'_>) -> Option<u32> {
    const SO_MEMINFO: libc::c_int = 55;
    const OPTION_MEMORY: usize = 6;
    let mut counts = [u32::MAX; 16];
    let mut len = mem::size_of_val(&counts) as libc::socklen_t;
    // SAFETY: room for more counts than there are, of the given length; both outlive the call.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            SO_MEMINFO,
            counts.as_mut_ptr().cast(),
            &mut len,
        )
    };
    (result == 0).then_some(counts[OPTION_MEMORY])
}

/// Whether a send fails when a queue drops it.
fn reports_drops(socket: BorrowedFd<'_>) -> bool {
    let is_set = |level, option| sockopt_is_set(socket, level, option);
    is_set(libc::SOL_IP, libc::IP_RECVERR) || is_set(libc::SOL_IPV6, libc::IPV6_RECVERR)
}

/// Sends a datagram with more segments than the kernel permits (UDP_SEGMENT, Linux 4.18). The
/// kernel refuses it (EINVAL) when it is complete, after it took an id, and reports that id at
/// once. Nothing is transmitted. Returns the error number, or none if the kernel accepted the
/// datagram.
fn send_probe(socket: BorrowedFd<'_>, address: Option<&SocketAddress>) -> Option<i32> {
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

/// Whether an option with an int value is set.
pub(super) fn sockopt_is_set(
    socket: BorrowedFd<'_>,
    level: libc::c_int,
    option: libc::c_int,
) -> bool {
    let mut value: libc::c_int = 0;
    let mut len = mem::size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: the value is an int of the given length; both outlive the call.
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
