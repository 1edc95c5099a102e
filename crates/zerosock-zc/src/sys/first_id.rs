//! Finds out the notification id of the first zero-copy send of a sender.
//!
//! The kernel counts ids per socket, not per sender: an earlier sender, or the application itself,
//! may have used some. No interface returns the next id, so it is found out before the first
//! zero-copy send. On a TCP socket that has sent nothing it is zero. On UDP, a send that takes an
//! id and fails for certain is made (`probe`): the kernel reports its id at once, and ours follow. In all other cases the first id is derived from the ids that the kernel reports
//! (`notification_ids`).
//!
//! # Invariants
//! Of all senders of this process over one socket, duplicates included, one at a time owns the
//! error queue ([`ErrorQueueClaim`]), also after its `ZcSocket` was dropped while notifications are
//! pending (`orphans`). The others copy.
#![allow(unsafe_code)]

use std::collections::HashSet;
use std::mem::{self, offset_of};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::net::sockopt;

use super::places::header;
use super::socket::option;
use super::{Piece, SocketAddress};

/// The sockets with an owner of their error queue, by the cookie of the kernel (SO_COOKIE).
static CLAIMED: Mutex<Option<HashSet<u64>>> = Mutex::new(None);

fn claimed() -> MutexGuard<'static, Option<HashSet<u64>>> {
    CLAIMED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The exclusive right to a socket's error queue and notification ids.
pub(super) struct ErrorQueueClaim(u64);

impl ErrorQueueClaim {
    /// Claims the error queue of a socket; none if another `ZcSocket` owns it.
    pub(super) fn of(socket: BorrowedFd<'_>) -> Option<Self> {
        let cookie = sockopt::socket_cookie(socket).ok()?;
        let mut claimed = claimed();
        let is_new = claimed.get_or_insert_default().insert(cookie);
        is_new.then(|| Self(cookie))
    }
}

impl Drop for ErrorQueueClaim {
    fn drop(&mut self) {
        if let Some(claimed) = claimed().as_mut() {
            claimed.remove(&self.0);
        }
    }
}

/// Whether nothing was ever sent on a TCP socket.
pub(super) fn has_sent_nothing(socket: BorrowedFd<'_>) -> bool {
    let mut info = [0; size_of::<libc::tcp_info>()];
    let field = |info: &[u8], at: usize| info[at..].first_chunk().map(|it| u32::from_ne_bytes(*it));
    // An older kernel fills less of it (both are of Linux 4.6).
    let filled = option(socket, libc::SOL_TCP, libc::TCP_INFO, &mut info)
        .is_some_and(|len| len >= offset_of!(libc::tcp_info, tcpi_delivery_rate));
    filled
        && field(&info, offset_of!(libc::tcp_info, tcpi_data_segs_out)) == Some(0)
        && field(&info, offset_of!(libc::tcp_info, tcpi_notsent_bytes)) == Some(0)
}

/// Sends a datagram with more segments than the kernel permits (UDP_SEGMENT, Linux 4.18). The
/// kernel refuses it (EINVAL) when it is complete, after it took an id, and reports that id at
/// once. Nothing is transmitted. A probe that fails earlier has no report.
pub(super) fn probe(socket: BorrowedFd<'_>, address: Option<&SocketAddress>) {
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
    unsafe { libc::sendmsg(socket.as_raw_fd(), &header, flags) };
}
