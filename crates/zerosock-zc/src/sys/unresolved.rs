//! Whether a failed datagram took a notification id.
//!
//! The kernel assigns the id of a zero-copy datagram early, so a datagram can fail with its id taken: a
//! filter drops it (EPERM), a queue is full (ENOBUFS, with IP_RECVERR set), or its device goes down. The
//! kernel then reads the buffer until it reports the id, which can be after the error if fragments of the
//! datagram were already queued. Other failures take no id. The error code does not tell the two apart.
//! So the back-end makes a second send that takes an id, fails for certain, and is reported at once
//! (`probe`): if the reported id leaves a gap, the failed datagram took the missing id. Until this is
//! known, the buffer of the failed datagram stays in its place and all other sends are copied.
//!
//! After ENOBUFS the probe can run out of memory as well, and its failure proves nothing: locked memory is
//! accounted per user, including the pages of the failed datagram. But each id charges the socket's option
//! memory from its assignment until its report is read (`has_no_unreported_id`). If none is charged, the
//! failed datagram took no id.
#![allow(unsafe_code)]

use std::io;
use std::mem;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use super::error_queue::BATCH;
use super::places::header;
use super::requests::RequestId;
use super::sendmsg::{MAX_READS, SendmsgBackend};
use super::zc_socket::SocketState;
use super::{Address, Key, Kind, Piece};

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

impl SendmsgBackend {
    /// Reads the error queue until it is empty, or [`MAX_READS`] times. Returns whether it is empty.
    fn read_until_empty<B>(&mut self, state: &mut SocketState<B>) -> bool {
        (0..MAX_READS).any(|_| {
            self.read_error_queue(state)
                .is_ok_and(|count| count < BATCH)
        })
    }

    /// Finds out whether the unresolved send took an id, if that can be known now. If it did, its buffer
    /// stays in its place until the kernel reports that id; otherwise the buffer is free.
    pub(super) fn resolve_notification<B>(&mut self, state: &mut SocketState<B>) {
        let Some(unresolved) = self.unresolved.take() else {
            return;
        };
        if !self.is_resolved(state, &unresolved) {
            self.unresolved = Some(unresolved);
            return;
        }
        let request = unresolved.request;
        for _ in 0..self.ids.assign_unknown(unresolved.id, request) {
            state
                .requests
                .expect_notification(&mut state.places, request);
        }
        // Replaces the notification that was expected when the send failed.
        state.requests.notified(&mut state.places, request, false);
    }

    /// Whether it is known if the send took an id. If it did, `ids` holds that id without an owner.
    fn is_resolved<B>(
        &mut self,
        state: &mut SocketState<B>,
        unresolved: &UnresolvedNotification,
    ) -> bool {
        if !self.read_until_empty(state) {
            return false;
        }
        // A reported id that is not before the one in question resolves it: a gap shows that it was taken.
        if self.ids.next() != unresolved.id || has_no_unreported_id(state.socket.as_fd()) {
            return true;
        }
        if self.corked {
            return false;
        }
        let answer = match sockopt_is_set(state.socket.as_fd(), libc::SOL_UDP, libc::UDP_CORK) {
            // A probe would append to the datagram of the application; and on a corked socket an error
            // ends the datagram before ids are assigned.
            true => Some(unresolved.code),
            false => self.probe(state, unresolved.key),
        };
        if !self.read_until_empty(state) {
            return false;
        }
        // A probe that fails with the same error took no id, and neither did the send. A lack of memory
        // can be a coincidence.
        let of_memory = matches!(unresolved.code, libc::ENOBUFS | libc::ENOMEM);
        self.ids.next() != unresolved.id || answer == Some(unresolved.code) && !of_memory
    }

    /// Makes the kernel assign and report one id, if that is possible now, without sending anything.
    /// Returns the error number of the probe.
    pub(super) fn probe<B>(&self, state: &mut SocketState<B>, key: Key) -> Option<i32> {
        state.system_calls += 1;
        let first = probe(state.socket.as_fd(), state.places.address(key));
        if matches!(
            first,
            None | Some(libc::EINVAL | libc::EAGAIN | libc::ENOBUFS)
        ) {
            return first;
        }
        // The route to the destination may be gone: a probe to the loopback address has one.
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

/// Whether every id that the socket assigned was reported and the report was read: until then each id is
/// charged to its option memory (SO_MEMINFO, Linux 4.12). False also if something else is charged there,
/// such as a filter.
pub(super) fn has_no_unreported_id(socket: BorrowedFd<'_>) -> bool {
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
    result == 0 && counts[OPTION_MEMORY] == 0
}

/// Whether a send fails when a queue drops it.
fn reports_drops(socket: BorrowedFd<'_>) -> bool {
    let is_set = |level, option| sockopt_is_set(socket, level, option);
    is_set(libc::SOL_IP, libc::IP_RECVERR) || is_set(libc::SOL_IPV6, libc::IPV6_RECVERR)
}

/// Sends a datagram with more segments than the kernel permits (UDP_SEGMENT, Linux 4.18). The kernel
/// refuses it (EINVAL) when it is complete, after it took an id, and reports that id at once. Nothing is
/// transmitted. Returns the error number, or none if the kernel accepted the datagram.
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
