//! Minimal loops that send without a copy, to measure zerosock's sender against.
//!
//! Both loops send from the same buffers in turn, check only what they must, and report only
//! counts. When a loop ends before the kernel has read the buffers, by an error or a panic, the
//! buffers are leaked, since nothing waits for the kernel.
#![allow(unsafe_code)]

use std::io::{self, IoSlice};
use std::mem::{ManuallyDrop, MaybeUninit};
use std::ops::Deref;
use std::os::fd::{AsRawFd, BorrowedFd};

use io_uring::{IoUring, cqueue, opcode, squeue, types};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};

/// `SO_EE_CODE_ZEROCOPY_COPIED`, in a report of the error queue.
const SO_EE_CODE_ZEROCOPY_COPIED: u8 = 1;
/// `IORING_SEND_ZC_REPORT_USAGE`, and `IORING_NOTIF_USAGE_ZC_COPIED` in a notification's result.
const REPORT_USAGE: u16 = 1 << 3;
const COPIED: u32 = 1 << 31;

/// How a contestant sends.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(super) enum CopyMode {
    /// With a copy.
    Plain,
    /// Without.
    ZeroCopy,
    /// Without, from memory that is registered with the ring.
    Registered,
}

/// When the kernel posts completions to a loop over a ring.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(super) enum Posting {
    /// When the thread enters the kernel for whatever reason (COOP_TASKRUN).
    OnEntry,
    /// Only when the thread asks for it (DEFER_TASKRUN). Only that thread may use the ring.
    OnAsking,
}

/// What a loop did.
#[derive(Copy, Clone, Debug, Default)]
pub(super) struct Counts {
    /// Sends that the kernel took.
    pub(super) sends: u64,
    /// Bytes of them.
    pub(super) bytes: u64,
    /// Notifications.
    pub(super) notified: u64,
    /// Of the notifications, those that said that the kernel had copied.
    pub(super) copied: u64,
    /// System calls.
    pub(super) calls: u64,
}

/// Sends over a ring, `batch` at a time, until `go_on`, which is called between batches, returns
/// false. On a stream the requests of a batch are linked, so that they keep their order.
///
/// # Errors
/// Errors of any system call or send.
pub(super) fn over_ring<B: Deref<Target = [u8]>>(
    socket: BorrowedFd<'_>,
    buffers: Vec<B>,
    batch: usize,
    (mode, posting): (CopyMode, Posting),
    is_stream: bool,
    go_on: impl FnMut(&Counts) -> bool,
) -> io::Result<Counts> {
    let buffers = ManuallyDrop::new(buffers);
    let counts = ring_loop(socket, &buffers, batch, (mode, posting), is_stream, go_on)?;
    // Every request has had its result, and its notification.
    drop(ManuallyDrop::into_inner(buffers));
    Ok(counts)
}

fn ring_loop<B: Deref<Target = [u8]>>(
    socket: BorrowedFd<'_>,
    buffers: &[B],
    batch: usize,
    (mode, posting): (CopyMode, Posting),
    is_stream: bool,
    mut go_on: impl FnMut(&Counts) -> bool,
) -> io::Result<Counts> {
    let mut ring = IoUring::builder();
    ring.setup_submit_all().setup_cqsize(4 * batch as u32);
    match posting {
        Posting::OnEntry => ring.setup_coop_taskrun(),
        Posting::OnAsking => ring.setup_single_issuer().setup_defer_taskrun(),
    };
    let mut ring: IoUring = ring.build(batch as u32)?;
    ring.submitter().register_files(&[socket.as_raw_fd()])?;
    if mode == CopyMode::Registered {
        let vectors: Vec<_> = buffers.iter().map(|buffer| vector(buffer)).collect();
        // SAFETY: the buffers are mapped until after the ring is gone: the caller owns them, and
        // drops them later, if at all.
        unsafe { ring.submitter().register_buffers(&vectors)? };
    }
    let entries: Vec<squeue::Entry> = (0..)
        .zip(buffers)
        .map(|(index, buffer)| entry(index, buffer, mode, is_stream))
        .collect();
    let mut busy = vec![0u8; entries.len()];
    let (mut counts, mut at, mut results) = (Counts::default(), 0, 0);
    loop {
        let more = go_on(&counts);
        let mut queue = ring.submission();
        for place in 0..batch {
            if !more || busy[at] > 0 {
                break;
            }
            let link = match is_stream && place + 1 < batch {
                true => squeue::Flags::IO_LINK,
                false => squeue::Flags::empty(),
            };
            // SAFETY: the buffer does not move and is readable until its notification has arrived;
            // if the loop ends before that, `over_ring` leaks it.
            if unsafe { queue.push(&entries[at].clone().flags(link)) }.is_err() {
                break;
            }
            busy[at] = 1;
            at = (at + 1) % entries.len();
            results += 1;
        }
        drop(queue);
        // On a stream the next chain must not begin before this one is through.
        let want = match is_stream || !more {
            true => results.max(1),
            false => 1,
        };
        if !more && busy.iter().all(|&owed| owed == 0) {
            return Ok(counts);
        }
        ring.submit_and_wait(want)?;
        counts.calls += 1;
        for completion in ring.completion() {
            let owed = &mut busy[completion.user_data() as usize];
            if cqueue::notif(completion.flags()) {
                counts.notified += 1;
                counts.copied += u64::from(completion.result() as u32 & COPIED != 0);
                *owed -= 1;
                continue;
            }
            results -= 1;
            match usize::try_from(completion.result()) {
                Ok(sent) => {
                    counts.sends += 1;
                    counts.bytes += sent as u64;
                }
                Err(_) => return Err(io::Error::from_raw_os_error(-completion.result())),
            }
            if !cqueue::more(completion.flags()) {
                *owed -= 1;
            }
        }
    }
}

fn vector(bytes: &[u8]) -> libc::iovec {
    libc::iovec {
        iov_base: bytes.as_ptr().cast_mut().cast(),
        iov_len: bytes.len(),
    }
}

fn entry(index: u16, bytes: &[u8], mode: CopyMode, whole: bool) -> squeue::Entry {
    let flags = match whole {
        true => libc::MSG_WAITALL,
        false => 0,
    };
    let (socket, len) = (types::Fixed(0), bytes.len() as u32);
    let entry = match mode {
        CopyMode::Plain => opcode::Send::new(socket, bytes.as_ptr(), len)
            .flags(flags)
            .build(),
        CopyMode::ZeroCopy | CopyMode::Registered => {
            opcode::SendZc::new(socket, bytes.as_ptr(), len)
                .buf_index((mode == CopyMode::Registered).then_some(index))
                .flags(flags)
                .zc_flags(REPORT_USAGE)
                .build()
        }
    };
    entry.user_data(index.into())
}

/// Sends with MSG_ZEROCOPY, one call each, and reads the error queue until it is empty after every
/// `limit` sends, then waits until the socket is writable: as the kernel's own test program
/// `msg_zerocopy -z -l LIMIT` does. `go_on` is called before each send. The socket blocks, and
/// SO_ZEROCOPY is set on it.
///
/// # Errors
/// Errors of any system call or send.
pub(super) fn over_error_queue<B: Deref<Target = [u8]>>(
    socket: BorrowedFd<'_>,
    buffers: Vec<B>,
    limit: u32,
    go_on: impl FnMut(&Counts) -> bool,
) -> io::Result<Counts> {
    let buffers = ManuallyDrop::new(buffers);
    let counts = queue_loop(socket, &buffers, limit, go_on)?;
    // Every send has been notified.
    drop(ManuallyDrop::into_inner(buffers));
    Ok(counts)
}

fn queue_loop<B: Deref<Target = [u8]>>(
    socket: BorrowedFd<'_>,
    buffers: &[B],
    limit: u32,
    mut go_on: impl FnMut(&Counts) -> bool,
) -> io::Result<Counts> {
    let zero_copy = SendFlags::from_bits_retain(libc::MSG_ZEROCOPY as u32) | SendFlags::NOSIGNAL;
    let mut counts = Counts::default();
    let mut since = 0;
    for buffer in buffers.iter().cycle() {
        if !go_on(&counts) {
            break;
        }
        let control = &mut SendAncillaryBuffer::default();
        counts.bytes += sendmsg(socket, &[IoSlice::new(buffer)], control, zero_copy)? as u64;
        counts.sends += 1;
        counts.calls += 1;
        since += 1;
        if since >= limit {
            drain(socket, &mut counts)?;
            since = 0;
        }
        loop {
            let mut descriptors = [PollFd::from_borrowed_fd(socket, PollFlags::OUT)];
            poll(&mut descriptors, None)?;
            counts.calls += 1;
            if descriptors[0].revents().contains(PollFlags::OUT) {
                break;
            }
            drain(socket, &mut counts)?;
        }
    }
    while counts.notified < counts.sends {
        let mut descriptors = [PollFd::from_borrowed_fd(socket, PollFlags::empty())];
        poll(&mut descriptors, None)?;
        counts.calls += 1;
        drain(socket, &mut counts)?;
    }
    Ok(counts)
}

fn drain(socket: BorrowedFd<'_>, counts: &mut Counts) -> io::Result<()> {
    loop {
        counts.calls += 1;
        let Some((first, last, copied)) = receive_report(socket)? else {
            return Ok(());
        };
        let count = u64::from(last.wrapping_sub(first).wrapping_add(1));
        counts.notified += count;
        counts.copied += count * u64::from(copied);
    }
}

/// Receives one message of the error queue, and returns the ids that it reports and whether the
/// kernel copied; none if the queue is empty.
fn receive_report(socket: BorrowedFd<'_>) -> io::Result<Option<(u32, u32, bool)>> {
    // A `struct cmsghdr` of 16 bytes and a `struct sock_extended_err`, with the address behind it:
    // no other option of the socket adds control data.
    let mut control = [0u64; 16];
    // SAFETY: all zeros is a valid `msghdr`: null pointers with zero lengths.
    let mut header: libc::msghdr = unsafe { MaybeUninit::zeroed().assume_init() };
    header.msg_control = control.as_mut_ptr().cast();
    header.msg_controllen = size_of_val(&control) as _;
    let flags = libc::MSG_ERRQUEUE | libc::MSG_DONTWAIT;
    // SAFETY: the header has room for control data of the length it says and for nothing else; both
    // outlive the call.
    if unsafe { libc::recvmsg(socket.as_raw_fd(), &mut header, flags) } < 0 {
        let error = io::Error::last_os_error();
        return match error.kind() {
            io::ErrorKind::WouldBlock => Ok(None),
            _ => Err(error),
        };
    }
    // `struct sock_extended_err`: u32 errno, u8 origin, type, code, pad, u32 info, u32 data.
    let code = control[2].to_ne_bytes()[6];
    let [a, b, c, d, e, f, g, h] = control[3].to_ne_bytes();
    let range = [[a, b, c, d], [e, f, g, h]].map(u32::from_ne_bytes);
    Ok(Some((
        range[0],
        range[1],
        code == SO_EE_CODE_ZEROCOPY_COPIED,
    )))
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;
    use std::os::fd::AsFd;
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::Arc;

    use zerosock::zc::{SendBackend, Sender, notifications};

    use super::*;

    fn socket() -> UdpSocket {
        let socket = UdpSocket::bind("127.0.0.1:0").expect("loopback");
        let address = socket.local_addr().expect("an address");
        socket.connect(address).expect("loopback");
        socket
    }

    /// Number of references to the buffer after a loop ended with a panic while sends were under
    /// way.
    fn left(run: impl FnOnce(BorrowedFd<'_>, Vec<Arc<[u8]>>)) -> usize {
        let socket = socket();
        assert!(notifications::permit(&socket));
        let bytes: Arc<[u8]> = vec![1; 5000].into();
        let buffers = vec![Arc::clone(&bytes)];
        let ended = catch_unwind(AssertUnwindSafe(|| run(socket.as_fd(), buffers)));
        assert!(ended.is_err());
        Arc::strong_count(&bytes) - 1
    }

    #[test]
    fn a_buffer_that_the_kernel_may_read_is_not_freed() {
        let go_on = |counts: &Counts| match counts.sends {
            0 => true,
            _ => panic!("enough"),
        };
        assert_eq!(
            left(|socket, buffers| drop(over_error_queue(socket, buffers, 8, go_on))),
            1
        );
        let builder = Sender::builder().backend(SendBackend::Uring);
        if builder.open::<Vec<u8>>(socket()).is_err() {
            return eprintln!("SKIPPED io_uring: a_buffer_that_the_kernel_may_read_is_not_freed");
        }
        let mode = (CopyMode::ZeroCopy, Posting::OnEntry);
        assert_eq!(
            left(|socket, buffers| drop(over_ring(socket, buffers, 1, mode, false, go_on))),
            1
        );
    }

    #[test]
    fn the_ids_and_the_copies_of_sends_are_read_from_the_error_queue() {
        let socket = socket();
        assert!(notifications::permit(&socket));
        let ended = |counts: &Counts| counts.sends < 20;
        let counts = over_error_queue(socket.as_fd(), vec![vec![1; 5000]], 4, ended);
        let counts = counts.expect("loopback");
        // The loopback device copies.
        assert_eq!((counts.sends, counts.notified, counts.copied), (20, 20, 20));
    }
}
