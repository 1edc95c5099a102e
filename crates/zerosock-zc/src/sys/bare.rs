//! Minimal loops that send without a copy, to measure a sender against.
//!
//! Both loops send from the same buffers in turn, check only what they must, and report only
//! counts. They are for benchmarks: when a loop ends before the kernel has read the buffers, by an
//! error or a panic, the buffers are leaked, since nothing waits for the kernel.
#![allow(unsafe_code)]

use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use io_uring::{IoUring, cqueue, opcode, squeue};
use rustix::event::{PollFd, PollFlags, poll};

use super::error_queue::ErrorQueue;
use super::requests::COPIED;
use super::sendmsg::send;
use super::uring::{REPORT_USAGE, SOCKET};
use super::{Piece, Stable};

/// How a loop sends.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub enum Bare {
    /// With a copy.
    Plain,
    /// Without.
    ZeroCopy,
    /// Without, from memory that is registered with the ring.
    Registered,
}

/// When the kernel posts completions to a loop over a ring.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub enum Posting {
    /// When the thread enters the kernel for whatever reason (COOP_TASKRUN).
    OnEntry,
    /// Only when the thread asks for it (DEFER_TASKRUN). Only that thread may use the ring.
    OnAsking,
}

/// What a loop did.
#[derive(Copy, Clone, Debug, Default)]
pub struct Counts {
    /// Sends that the kernel took.
    pub sends: u64,
    /// Bytes of them.
    pub bytes: u64,
    /// Notifications.
    pub notified: u64,
    /// Of the notifications, those that said that the kernel had copied.
    pub copied: u64,
    /// System calls.
    pub calls: u64,
}

/// Sends over a ring, `batch` at a time, until `go_on`, which is called between batches, returns
/// false. On a stream the requests of a batch are linked, so that they keep their order.
///
/// # Errors
/// Errors of any system call or send.
pub fn over_ring<B: Stable>(
    socket: BorrowedFd<'_>,
    buffers: Vec<B>,
    batch: usize,
    (how, posting): (Bare, Posting),
    is_stream: bool,
    go_on: impl FnMut(&Counts) -> bool,
) -> io::Result<Counts> {
    let buffers = ManuallyDrop::new(buffers);
    let counts = ring_loop(socket, &buffers, batch, (how, posting), is_stream, go_on)?;
    // Every request has had its result, and its notification.
    drop(ManuallyDrop::into_inner(buffers));
    Ok(counts)
}

fn ring_loop<B: Stable>(
    socket: BorrowedFd<'_>,
    buffers: &[B],
    batch: usize,
    (how, posting): (Bare, Posting),
    is_stream: bool,
    mut go_on: impl FnMut(&Counts) -> bool,
) -> io::Result<Counts> {
    let (Some(first), true) = (buffers.first(), batch > 0) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    let mut ring = IoUring::builder();
    ring.setup_submit_all().setup_cqsize(4 * batch as u32);
    match posting {
        Posting::OnEntry => ring.setup_coop_taskrun(),
        Posting::OnAsking => ring.setup_single_issuer().setup_defer_taskrun(),
    };
    let mut ring: IoUring = ring.build(batch as u32)?;
    ring.submitter().register_files(&[socket.as_raw_fd()])?;
    if how == Bare::Registered {
        let arena = first.arena().ok_or(io::ErrorKind::InvalidInput)?;
        // SAFETY: the buffers' arena is mapped until after the ring is gone: the caller owns the
        // buffers, and drops them later, if at all.
        unsafe { ring.submitter().register_buffers(&[arena.vector()])? };
    }
    let pieces = buffers.iter().map(only_piece).enumerate();
    let entries: Vec<squeue::Entry> = pieces
        .map(|(index, piece)| entry(piece, how, is_stream).user_data(index as u64))
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

fn only_piece(buffer: &impl Stable) -> Piece {
    let mut first = Piece::EMPTY;
    buffer.pieces(&mut |piece| first = piece);
    first
}

fn entry(piece: Piece, how: Bare, whole: bool) -> squeue::Entry {
    let flags = match whole {
        true => libc::MSG_WAITALL,
        false => 0,
    };
    let len = piece.len as u32;
    match how {
        Bare::Plain => opcode::Send::new(SOCKET, piece.address, len)
            .flags(flags)
            .build(),
        Bare::ZeroCopy | Bare::Registered => opcode::SendZc::new(SOCKET, piece.address, len)
            .buf_index((how == Bare::Registered).then_some(0))
            .flags(flags)
            .zc_flags(REPORT_USAGE)
            .build(),
    }
}

/// Sends with MSG_ZEROCOPY, one call each, and reads the error queue until it is empty after every
/// `limit` sends, then waits until the socket is writable: as the kernel's own test program
/// `msg_zerocopy -z -l LIMIT` does. `go_on` is called before each send. The socket blocks, and
/// SO_ZEROCOPY is set on it.
///
/// # Errors
/// Errors of any system call or send.
pub fn over_error_queue<B: Stable>(
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

fn queue_loop<B: Stable>(
    socket: BorrowedFd<'_>,
    buffers: &[B],
    limit: u32,
    mut go_on: impl FnMut(&Counts) -> bool,
) -> io::Result<Counts> {
    let mut queue = ErrorQueue::default();
    let mut counts = Counts::default();
    let mut since = 0;
    let pieces: Vec<_> = buffers
        .iter()
        .map(|one| [only_piece(one).vector()])
        .collect();
    for pieces in pieces.iter().cycle() {
        if !go_on(&counts) {
            break;
        }
        counts.bytes += send(socket, pieces, None, true, 0)? as u64;
        counts.sends += 1;
        counts.calls += 1;
        since += 1;
        if since >= limit {
            drain(&mut queue, socket, &mut counts)?;
            since = 0;
        }
        loop {
            let mut descriptors = [PollFd::from_borrowed_fd(socket, PollFlags::OUT)];
            poll(&mut descriptors, None)?;
            counts.calls += 1;
            if descriptors[0].revents().contains(PollFlags::OUT) {
                break;
            }
            drain(&mut queue, socket, &mut counts)?;
        }
    }
    while counts.notified < counts.sends {
        let mut descriptors = [PollFd::from_borrowed_fd(socket, PollFlags::empty())];
        poll(&mut descriptors, None)?;
        counts.calls += 1;
        drain(&mut queue, socket, &mut counts)?;
    }
    Ok(counts)
}

fn drain(queue: &mut ErrorQueue, socket: BorrowedFd<'_>, counts: &mut Counts) -> io::Result<()> {
    loop {
        let found = queue.receive_one(socket.as_fd())?;
        counts.calls += 1;
        if found == 0 {
            return Ok(());
        }
        for index in 0..found {
            if let Some((lo, hi, copied)) = queue.range(index) {
                let count = u64::from(hi.wrapping_sub(lo).wrapping_add(1));
                counts.notified += count;
                counts.copied += count * u64::from(copied);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;
    use std::os::fd::AsFd;
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::Arc;

    use super::*;

    /// Number of references to the buffer after a loop ended with a panic while sends were under
    /// way.
    fn left(run: impl FnOnce(BorrowedFd<'_>, Vec<Arc<[u8]>>)) -> usize {
        let socket = UdpSocket::bind("127.0.0.1:0").expect("loopback");
        let address = socket.local_addr().expect("an address");
        socket.connect(address).expect("loopback");
        super::super::permit_zero_copy(&socket).expect("UDP");
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
        let how = (Bare::ZeroCopy, Posting::OnEntry);
        if super::super::uring::supported().is_ok_and(|has| has.zero_copy) {
            assert_eq!(
                left(|socket, buffers| drop(over_ring(socket, buffers, 1, how, false, go_on))),
                1
            );
        }
    }
}
