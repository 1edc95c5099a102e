//! Reads the error queue of a socket, where the kernel reports the ids of completed zero-copy
//! sends.
#![allow(unsafe_code)]

use std::io;
use std::mem::{self, MaybeUninit};
use std::os::fd::{AsRawFd, BorrowedFd};

/// `SO_EE_ORIGIN_ZEROCOPY`.
const ORIGIN: u8 = 5;
/// `SO_EE_CODE_ZEROCOPY_COPIED`.
const COPIED: u8 = 1;
/// `SOL_VSOCK` and `VSOCK_RECVERR`.
const VSOCK: (libc::c_int, libc::c_int) = (287, 1);
/// The most messages that one call receives.
pub(super) const BATCH: usize = 16;
/// Room for the control data of one message, in bytes: an extended error with the address of the
/// offender, and what socket options add (SO_TIMESTAMPING, IP_PKTINFO and others).
const CONTROL: usize = 256;

/// Notification ids, from the first to the last, and whether the kernel copied.
pub(crate) type ReportedRange = (u32, u32, bool);

/// Buffers to receive messages of an error queue.
pub(super) struct ErrorQueue {
    headers: [libc::mmsghdr; BATCH],
    control: [Control; BATCH],
}

#[derive(Copy, Clone)]
#[repr(C, align(8))]
struct Control([u8; CONTROL]);

// SAFETY: the pointers in the headers are set anew before each call, to the value's own control
// buffers; between calls nothing follows them.
unsafe impl Send for ErrorQueue {}

impl Default for ErrorQueue {
    fn default() -> Self {
        Self {
            // SAFETY: all zeros is a valid `mmsghdr`: null pointers with zero lengths.
            headers: unsafe { MaybeUninit::zeroed().assume_init() },
            control: [Control([0; CONTROL]); BATCH],
        }
    }
}

impl ErrorQueue {
    /// Receives up to [`BATCH`] messages, and returns how many; if fewer, the queue is empty.
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
                BATCH as libc::c_uint,
                (libc::MSG_ERRQUEUE | libc::MSG_DONTWAIT) as _,
                std::ptr::null_mut(),
            )
        };
        let Ok(count) = usize::try_from(count) else {
            let error = io::Error::last_os_error();
            return match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(0),
                _ => Err(error),
            };
        };
        Ok(count)
    }

    /// The range that a received message reports; none if it is no notification.
    pub(super) fn range(&self, index: usize) -> Option<ReportedRange> {
        let used = self.headers.get(index)?.msg_hdr.msg_controllen;
        reported_range(self.control.get(index)?.0.get(..used.min(CONTROL))?)
    }
}

/// The most reads in a row: peers can fill the queue as well (IP_RECVERR).
const MAX_READS: usize = 64;

/// Reads the queue of a socket until it is empty, and passes the ranges to `each`.
pub(crate) fn read_ranges(
    socket: BorrowedFd<'_>,
    mut each: impl FnMut(ReportedRange),
) -> io::Result<()> {
    let mut queue = ErrorQueue::default();
    for _ in 0..MAX_READS {
        let count = queue.receive(socket)?;
        (0..count)
            .filter_map(|index| queue.range(index))
            .for_each(&mut each);
        if count < BATCH {
            break;
        }
    }
    Ok(())
}

/// Finds the extended error among control messages: others, such as a timestamp, can precede it.
fn reported_range(mut control: &[u8]) -> Option<ReportedRange> {
    // `struct cmsghdr`: its length with itself, the level and the type; the next one begins at a
    // multiple of the length's size.
    const WORD: usize = mem::size_of::<usize>();
    const HEADER: usize = WORD + 8;
    loop {
        let len = usize::from_ne_bytes(control.get(..WORD)?.try_into().ok()?);
        let level = int(control, WORD)?;
        let kind = int(control, WORD + 4)?;
        let data = control.get(HEADER..len)?;
        let is_error = matches!(
            (level, kind),
            (libc::SOL_IP, libc::IP_RECVERR) | (libc::SOL_IPV6, libc::IPV6_RECVERR) | VSOCK
        );
        if is_error {
            return extended(data);
        }
        control = control.get(len.checked_next_multiple_of(WORD)?..)?;
    }
}

/// `struct sock_extended_err`: u32 errno, u8 origin, type, code, pad, u32 info, u32 data.
fn extended(error: &[u8]) -> Option<ReportedRange> {
    let (origin, code) = (*error.get(4)?, *error.get(6)?);
    let (lo, hi) = (int(error, 8)? as u32, int(error, 12)? as u32);
    (origin == ORIGIN && int(error, 0)? == 0).then_some((lo, hi, code & COPIED != 0))
}

fn int(bytes: &[u8], at: usize) -> Option<i32> {
    let bytes = bytes.get(at..at + 4)?;
    Some(i32::from_ne_bytes(bytes.try_into().ok()?))
}

#[cfg(test)]
#[path = "error_queue_tests.rs"]
mod tests;
