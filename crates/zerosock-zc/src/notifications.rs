//! Notifications of zero-copy sends on a TCP socket, for programs that call sendmsg(2) with
//! MSG_ZEROCOPY themselves.
//!
//! # Invariants
//! The kernel numbers the sends of a socket that take at least one byte, from 0 on, wrapping. A send that
//! fails has no number. After each number was reported, in any order, the kernel no longer reads the
//! memory of that send.
//!
//! # Use
//! [`permit`] zero-copy sends first. After the first send, compare the memory for [`reports`] with
//! that before: if it has not grown, the kernel has copied and reports neither this send nor a later one
//! (a BPF program sees the bytes of the socket, for instance). Then [`read`] the error queue at each
//! EPOLLERR. [`CopyFeedback`] says whether zero copy pays on the socket. No other sender may use MSG_ZEROCOPY
//! on it.

use std::io;
use std::os::fd::AsFd;

use crate::Completion;
pub use crate::copy_feedback::CopyFeedback;
use crate::sys;

/// Permits zero-copy sends (SO_ZEROCOPY). Returns whether the kernel can send from this socket without
/// a copy.
pub fn permit(socket: impl AsFd) -> bool {
    sys::permit_zero_copy(socket).unwrap_or(false)
}

/// Bytes of the socket's option memory: each send is charged to it until its notification was read, and
/// other things may be. `None`: the kernel does not tell (before 4.12).
pub fn reports(socket: impl AsFd) -> Option<u32> {
    sys::option_memory(socket.as_fd())
}

/// Reads all notifications and passes them to `each`. Does not block.
///
/// # Errors
/// Errors of recvmmsg(2).
pub fn read(socket: impl AsFd, mut each: impl FnMut(Completion)) -> io::Result<()> {
    sys::read_ranges(socket.as_fd(), |(lo, hi, copied)| {
        each(Completion { lo, hi, copied });
    })
}

#[cfg(test)]
#[path = "notifications_tests.rs"]
mod tests;
