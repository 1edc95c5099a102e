//! Whether a failed datagram took a notification id.
//!
//! The kernel assigns the id of a zero-copy datagram early, so a datagram can fail with its id
//! taken: a filter drops it (EPERM), a queue is full (ENOBUFS, with IP_RECVERR set), or its device
//! goes down. The kernel then reads the buffer until it reports the id, which can be after the
//! error if fragments of the datagram were already queued. Other failures take no id. The error
//! code does not tell the two apart.
//!
//! # Invariants
//! While it is in doubt, the buffer of the failed datagram stays in its place, and all other sends
//! are copied. The doubt ends when the id is reported, or when the socket has no unreported id: each
//! charges its option memory until its report is read. If something else is charged there, such as
//! a filter or a multicast group, and the datagram took no id, that would never be so. A doubt that has
//! lasted for [`PATIENCE`], with no other id unreported, therefore keeps nothing waiting: the socket
//! counts as drained, and once it is dropped, its descriptor is closed and the buffer is leaked
//! ([`leaked_buffers`]), because the kernel may read it.

use std::mem;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::requests::RequestId;
use super::socket::option;

/// How long the report of an id in doubt is waited for.
const PATIENCE: Duration = Duration::from_secs(1);
/// The time between two attempts to end a doubt: the socket signals no event when it has no more ids.
pub(super) const TURN: Duration = Duration::from_millis(20);

/// A failed send that may have taken an id.
pub(super) struct UnresolvedSend {
    pub(super) request: RequestId,
    since: Instant,
}

impl UnresolvedSend {
    pub(super) fn new(request: RequestId) -> Self {
        let since = Instant::now();
        Self { request, since }
    }

    /// Whether its report is no longer waited for.
    pub(super) fn is_lasting(&self) -> bool {
        self.since.elapsed() >= PATIENCE
    }
}

static LEAKED: AtomicU64 = AtomicU64::new(0);

/// Number of buffers that this process has leaked, because the socket was dropped while it was in doubt
/// whether the kernel reads them.
#[must_use]
pub fn leaked_buffers() -> u64 {
    LEAKED.load(Ordering::Relaxed)
}

/// Leaks the buffer of a send in doubt.
pub(super) fn leak<B>(buffer: B) {
    mem::forget(buffer);
    LEAKED.fetch_add(1, Ordering::Relaxed);
}

/// An upper bound of a datagram's length, in bytes: a longer one fails before it takes an id.
const MAX_DATAGRAM: usize = 0xffff;

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
    // An array of u32, of which this is the number 6.
    let mut counts = [0xff; 64];
    option(socket, libc::SOL_SOCKET, SO_MEMINFO, &mut counts)?;
    let count = counts[24..].first_chunk()?;
    Some(u32::from_ne_bytes(*count))
}

/// Whether a send fails when a queue drops it.
fn reports_drops(socket: BorrowedFd<'_>) -> bool {
    let is_set = |level, option| sockopt_is_set(socket, level, option);
    is_set(libc::SOL_IP, libc::IP_RECVERR) || is_set(libc::SOL_IPV6, libc::IPV6_RECVERR)
}

/// Whether an option with an int value is set.
pub(super) fn sockopt_is_set(
    socket: BorrowedFd<'_>,
    level: libc::c_int,
    name: libc::c_int,
) -> bool {
    let mut value = [0; size_of::<libc::c_int>()];
    option(socket, level, name, &mut value).is_some() && value.iter().any(|&byte| byte != 0)
}
