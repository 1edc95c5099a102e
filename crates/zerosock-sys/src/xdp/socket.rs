//! A socket that is bound to a queue.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::sockopt;
use rustix::net::xdp::{
    XSK_UNALIGNED_BUF_ADDR_MASK, XSK_UNALIGNED_BUF_OFFSET_SHIFT, XdpDescOptions, XdpStatistics,
};
use rustix::net::{RecvFlags, SendFlags, recv, send};
use zerosock_ring::Piece;

use super::CHUNK;
use super::error::XdpError;
use super::frame::XdpFrame;
use super::program::Sockets;
use super::ring::Rings;
use super::sent::Sent;
use super::task::Task;
use super::umem::{PAGE, Umem};

/// Frames that one call of the kernel sends at least, unless it is refused.
const SENT_BY_ONE_CALL: usize = 32;

/// A frame that was received.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct ReceivedChunk {
    /// Address of its chunk, as it was given to [`XdpSocket::post`].
    pub chunk: u64,
    /// Where the frame is, in bytes from there.
    pub offset: u32,
    /// Bytes of the frame.
    pub len: u32,
}

/// Why a frame was not sent.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub enum SendError {
    /// The ring is full. Frames complete, after [`XdpSocket::wake`].
    Full,
    /// It lies outside the memory, has no bytes, or has more or longer parts than the socket takes.
    Invalid,
}

/// An AF_XDP socket, bound to one queue of an interface.
///
/// To receive, [`post`](Self::post) chunks and take frames by [`receive`](Self::receive). To send, give frames
/// to [`send`](Self::send), and count those that are [`completed`](Self::completed). After a batch of
/// either, call [`wake`](Self::wake). The descriptor is readable when a frame was received.
///
/// End it by [`close`](Self::close). Dropping it works as well, but waits for the kernel, for some ten
/// milliseconds.
#[derive(Debug)]
pub struct XdpSocket {
    // The order of drops: the kernel keeps a socket as long as its rings are mapped.
    pub(super) rings: Rings,
    pub(super) socket: OwnedFd,
    pub(super) umem: Umem,
    /// Where the program finds it.
    pub(super) sockets: Sockets,
    pub(super) sent: Sent,
    pub(super) queue: u32,
    pub(super) zero_copy: bool,
    pub(super) segments: bool,
}

impl XdpSocket {
    /// The memory.
    pub fn umem(&self) -> &Umem {
        &self.umem
    }

    /// The memory, to take and return private chunks.
    pub fn umem_mut(&mut self) -> &mut Umem {
        &mut self.umem
    }

    /// The queue.
    pub fn queue(&self) -> u32 {
        self.queue
    }

    /// Whether the driver reads and writes the memory itself (XDP_ZEROCOPY); otherwise the kernel copies.
    pub fn is_zero_copy(&self) -> bool {
        self.zero_copy
    }

    /// Whether a frame can have several descriptors.
    pub fn has_segments(&self) -> bool {
        self.segments
    }

    /// The chunk by which a frame is received in place behind the first `skip` bytes of the pieces; None if
    /// that is not possible there.
    pub fn chunk_for(&self, pieces: &[Piece], skip: usize) -> Option<u64> {
        let addr = self.umem.chunk_for(pieces, skip)?;
        self.is_reachable(addr, CHUNK).then_some(addr)
    }

    /// Gives a chunk for a frame to come. False: the ring is full, or the chunk lies outside the memory.
    pub fn post(&mut self, chunk: u64) -> bool {
        self.umem.contains(chunk, CHUNK) && self.rings.fill.push([chunk])
    }

    /// The next frame. The kernel's own copy uses chunks in their order; a driver that reads and writes the memory
    /// itself may leave some out and use them later. Whether the chunk was posted is for the caller to check.
    ///
    /// # Errors
    /// The kernel has returned a descriptor that cannot be: the socket is of no use any more.
    pub fn receive(&mut self) -> Result<Option<ReceivedChunk>, XdpError> {
        let Some([addr, rest]) = self.rings.receive.pop() else {
            return Ok(None);
        };
        let (len, options) = halves(rest);
        let chunk = addr & XSK_UNALIGNED_BUF_ADDR_MASK;
        let offset = (addr >> XSK_UNALIGNED_BUF_OFFSET_SHIFT) as u32;
        let fits = offset.checked_add(len).is_some_and(|end| end <= CHUNK);
        if !fits || options != 0 || !self.umem.contains(chunk, CHUNK) {
            let error = io::Error::from(io::ErrorKind::InvalidData);
            return Err(XdpError::system("bad descriptor of the kernel", error));
        }
        Ok(Some(ReceivedChunk { chunk, offset, len }))
    }

    /// The frame that consists of the pieces without their first `skip` bytes; None if it has more parts than
    /// the socket takes, or no bytes.
    pub fn frame_of(&self, pieces: &[Piece], mut skip: usize) -> Option<XdpFrame> {
        let mut frame = XdpFrame::default();
        for piece in pieces {
            let mut rest = piece.part(skip, usize::MAX);
            skip -= piece.len() - rest.len();
            while !rest.is_empty() {
                let part = rest.part(0, CHUNK as usize);
                rest = rest.part(part.len(), usize::MAX);
                let (addr, len) = (self.umem.addr_of(part)?, part.len() as u32);
                if !self.is_reachable(addr, len) || !frame.push(addr, len) {
                    return None;
                }
            }
        }
        let count = frame.parts().len();
        (count == 1 || (count > 1 && self.segments)).then_some(frame)
    }

    /// Whether one descriptor can have this range: a driver that uses the memory itself takes none that runs
    /// over the border of two pages that do not lie side by side.
    fn is_reachable(&self, addr: u64, len: u32) -> bool {
        !self.zero_copy || addr % PAGE + u64::from(len) <= PAGE
    }

    /// Sends a frame. The kernel reads it until it is [`completed`](Self::completed).
    ///
    /// # Errors
    /// See [`SendError`].
    pub fn send(&mut self, frame: &XdpFrame) -> Result<(), SendError> {
        let parts = frame.parts();
        let valid =
            |&(addr, len): &(u64, u32)| (1..=CHUNK).contains(&len) && self.umem.contains(addr, len);
        let most = if self.segments { usize::MAX } else { 1 };
        if parts.is_empty() || parts.len() > most || !parts.iter().all(valid) {
            return Err(SendError::Invalid);
        }
        let transmit = &mut self.rings.transmit;
        let count = parts.len() as u32;
        if transmit.free() < count && transmit.free_now() < count {
            return Err(SendError::Full);
        }
        for (index, &(addr, len)) in parts.iter().enumerate() {
            let last = index + 1 == parts.len();
            let options = match last {
                true => 0,
                false => XdpDescOptions::XDP_PKT_CONTD.bits(),
            };
            transmit.push([addr, joined(len, options)]);
            self.sent.push(addr, last);
        }
        Ok(())
    }

    /// How many of the frames sent, the oldest ones, have been completed since the last call.
    pub fn completed(&mut self) -> usize {
        let mut frames = 0;
        // Bounded, whatever the index of the ring says.
        for _ in 0..self.sent.len() {
            let Some([addr]) = self.rings.completion.pop() else {
                break;
            };
            frames += self.sent.complete(addr & XSK_UNALIGNED_BUF_ADDR_MASK);
        }
        frames
    }

    /// Descriptors of frames that are not completed.
    pub fn in_flight(&self) -> usize {
        self.sent.len()
    }

    /// Shows the kernel what was posted and sent, and has it send, where it asks for that. False: it has not
    /// taken all frames, and has to be called again later.
    ///
    /// # Errors
    /// [`XdpError::Down`]: the frames wait until the interface is up. [`XdpError::InterfaceRemoved`].
    pub fn wake(&mut self) -> Result<bool, XdpError> {
        const WHAT: &str = "cannot send";
        let fill = &mut self.rings.fill;
        if fill.has_unpublished() {
            // First: the kernel drops a frame for which it has a chunk and no entry.
            self.rings.receive.release();
            fill.publish();
            if fill.needs_wakeup() {
                match recv(&self.socket, &mut [0; 0], RecvFlags::DONTWAIT) {
                    Ok(_) | Err(Errno::AGAIN | Errno::INTR | Errno::BUSY | Errno::NOBUFS) => {}
                    Err(errno) => return Err(XdpError::of_use("cannot receive", errno)),
                }
            }
        }
        let transmit = &mut self.rings.transmit;
        transmit.publish();
        let mut calls = 1 + self.sent.len().div_ceil(SENT_BY_ONE_CALL);
        while transmit.is_pending() && transmit.needs_wakeup() {
            if calls == 0 {
                return Ok(false);
            }
            calls -= 1;
            match send(&self.socket, &[], SendFlags::DONTWAIT) {
                // EAGAIN: there are more than one call sends.
                Ok(_) | Err(Errno::AGAIN | Errno::INTR) => {}
                Err(Errno::BUSY | Errno::NOBUFS) => return Ok(false),
                Err(errno) => return Err(XdpError::of_use(WHAT, errno)),
            }
        }
        Ok(true)
    }

    /// The error that the kernel has reported since the last call: [`XdpError::InterfaceRemoved`] when the interface was
    /// removed.
    ///
    /// # Errors
    /// That error.
    pub fn check(&self) -> Result<(), XdpError> {
        match sockopt::socket_error(&self.socket) {
            // What the kernel reports when it detaches the socket from an interface that goes.
            Ok(Err(Errno::NETDOWN)) => Err(XdpError::InterfaceRemoved),
            Ok(Err(errno)) | Err(errno) => Err(XdpError::of_use("the AF_XDP socket", errno)),
            Ok(Ok(())) => Ok(()),
        }
    }

    /// The kernel's counters of this socket.
    ///
    /// # Errors
    /// Errors of getsockopt(2).
    pub fn statistics(&self) -> io::Result<XdpStatistics> {
        Ok(sockopt::xdp_statistics(&self.socket)?)
    }

    /// Closes it on another thread. When that is done, the kernel writes nothing to the memory any more, and
    /// the queue is free.
    pub fn close(self) -> Closing {
        let close = move || {
            // First: a process that was forked has a copy of the socket until it runs another program.
            self.sockets.remove(self.queue);
            drop(self);
        };
        Closing(Task::reap(close).ok())
    }
}

impl AsFd for XdpSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// A socket that is being closed. Dropping it waits for nothing.
#[derive(Debug)]
pub struct Closing(Option<Task<()>>);

impl Closing {
    /// Whether the socket is closed.
    pub fn is_done(&mut self) -> bool {
        let done = match &mut self.0 {
            Some(task) => task.take().is_some(),
            None => true,
        };
        if done {
            self.0 = None;
        }
        done
    }

    /// Becomes readable when it is closed; None when that is known.
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.0.as_ref().map(Task::as_fd)
    }
}

/// The two halves of the second word of a descriptor: length and options.
fn halves(word: u64) -> (u32, u32) {
    let [a, b, c, d, e, f, g, h] = word.to_ne_bytes();
    (
        u32::from_ne_bytes([a, b, c, d]),
        u32::from_ne_bytes([e, f, g, h]),
    )
}

fn joined(len: u32, options: u32) -> u64 {
    let ([a, b, c, d], [e, f, g, h]) = (len.to_ne_bytes(), options.to_ne_bytes());
    u64::from_ne_bytes([a, b, c, d, e, f, g, h])
}
