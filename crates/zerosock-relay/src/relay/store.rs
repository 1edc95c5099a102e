//! The buffers and pipes of a worker, which its pairs borrow while bytes are in them.
//!
//! # Invariants
//! - A pair without bytes on their way has neither a buffer nor a pipe.
//! - The buffers that pairs hold are bounded: beyond [`LENT_LIMIT`] reads are so small that what is held
//!   of each is at most [`SMALL_READ`] bytes.
//! - The number of pipes is bounded, because the kernel makes the pipes of a user without privileges
//!   small beyond a sum. Without a free pipe a pair copies.

use std::os::fd::OwnedFd;

use rustix::pipe::{PipeFlags, fcntl_getpipe_size, fcntl_setpipe_size, pipe_with};
use zerosock_sys::mmsg::Batch;

/// Bytes of a read while pairs hold more than [`LENT_LIMIT`], and the most that is copied into a buffer
/// of its own size instead of lending the worker's.
pub(super) const SMALL_READ: usize = 16 << 10;

/// Bytes of the worker's buffers that pairs may hold.
const LENT_LIMIT: usize = 64 << 20;

/// Free buffers that are kept.
const SPARE_BUFFERS: usize = 8;

/// The smallest pipe that is worth its system calls.
const SMALLEST_PIPE: usize = 64 << 10;

/// Messages that one system call receives or sends.
pub(super) const BATCH: usize = 64;

/// Bytes of the longest message that is relayed. Longer than any datagram of UDP, and as long as a
/// message of a Unix socket can be with the usual limit on send buffers (net.core.wmem_max, 208 KiB).
pub(super) const LONGEST_MESSAGE: usize = 256 << 10;

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Store {
    /// Where the next read goes.
    buffer: Box<[u8]>,
    spare: Vec<Box<[u8]>>,
    /// Bytes of buffers that pairs hold.
    lent: usize,
    free_pipes: Vec<Pipe>,
    /// Pipes that exist, free or in use.
    pipes: usize,
    most_pipes: usize,
    pipe_size: usize,
    batch: Option<Box<Batch>>,
    /// For what passes by hand in joined pairs. Empty between their turns.
    scratch: Vec<u8>,
}

/// A pipe with both ends here.
#[derive(Debug)]
pub(super) struct Pipe {
    pub(super) read: OwnedFd,
    pub(super) write: OwnedFd,
}

/// Bytes that were read and not yet written.
#[derive(Debug)]
pub(super) struct Chunk {
    bytes: Box<[u8]>,
    at: u32,
    end: u32,
}

impl Chunk {
    /// Bytes to send before anything is read.
    pub(super) fn of(bytes: Vec<u8>) -> Chunk {
        let end = bytes.len() as u32;
        Chunk {
            bytes: bytes.into_boxed_slice(),
            at: 0,
            end,
        }
    }

    pub(super) fn unsent(&self) -> &[u8] {
        &self.bytes[self.at as usize..self.end as usize]
    }

    /// So many more bytes were sent.
    pub(super) fn advance(&mut self, sent: usize) {
        self.at = self.end.min(self.at + sent as u32);
    }
}

impl Store {
    /// Buffers of this size, and at most so many pipes.
    pub(super) fn new(buffer_size: usize, most_pipes: usize) -> Store {
        Store {
            buffer: new_buffer(buffer_size),
            spare: Vec::new(),
            lent: 0,
            free_pipes: Vec::new(),
            pipes: 0,
            most_pipes,
            pipe_size: buffer_size.max(SMALLEST_PIPE),
            batch: None,
            scratch: Vec::new(),
        }
    }

    /// Where to read to.
    #[inline]
    pub(super) fn buffer(&mut self) -> &mut [u8] {
        let size = self.read_size();
        &mut self.buffer[..size]
    }

    /// How much to read at once.
    #[inline]
    pub(super) fn read_size(&self) -> usize {
        match self.lent < LENT_LIMIT {
            true => self.buffer.len(),
            false => self.buffer.len().min(SMALL_READ),
        }
    }

    /// Bytes of a buffer.
    pub(super) fn buffer_size(&self) -> usize {
        self.buffer.len()
    }

    /// Keeps the bytes of the buffer from one offset to another; the next read goes elsewhere.
    pub(super) fn keep(&mut self, from: usize, to: usize) -> Chunk {
        let kept = to - from;
        if kept <= SMALL_READ {
            self.lent += kept;
            return Chunk::of(self.buffer[from..to].to_vec());
        }
        let size = self.buffer.len();
        self.lent += size;
        let next = self.spare.pop().unwrap_or_else(|| new_buffer(size));
        Chunk {
            bytes: std::mem::replace(&mut self.buffer, next),
            at: from as u32,
            end: to as u32,
        }
    }

    /// Takes the memory of a chunk back.
    pub(super) fn release(&mut self, chunk: Chunk) {
        self.lent = self.lent.saturating_sub(chunk.bytes.len());
        if chunk.bytes.len() == self.buffer.len() && self.spare.len() < SPARE_BUFFERS {
            self.spare.push(chunk.bytes);
        }
    }

    /// Counts bytes of messages that a pair holds.
    pub(super) fn lend(&mut self, bytes: usize) {
        self.lent += bytes;
    }

    /// The opposite of [`lend`](Self::lend).
    pub(super) fn unlend(&mut self, bytes: usize) {
        self.lent = self.lent.saturating_sub(bytes);
    }

    /// An empty pipe; `None` if there is none.
    pub(super) fn take_pipe(&mut self) -> Option<Pipe> {
        if let Some(pipe) = self.free_pipes.pop() {
            return Some(pipe);
        }
        if self.pipes >= self.most_pipes {
            return None;
        }
        match new_pipe(self.pipe_size) {
            Some(pipe) => {
                self.pipes += 1;
                Some(pipe)
            }
            None => {
                tracing::warn!(
                    pipes = self.pipes,
                    "no further pipes of a useful size: connections beyond that number are copied \
                     (see fs.pipe-user-pages-soft in pipe(7))"
                );
                self.most_pipes = self.pipes;
                None
            }
        }
    }

    /// Takes an empty pipe back.
    pub(super) fn release_pipe(&mut self, pipe: Pipe) {
        self.free_pipes.push(pipe);
    }

    /// Closes a pipe that still has bytes.
    pub(super) fn discard_pipe(&mut self, pipe: Pipe) {
        drop(pipe);
        self.pipes -= 1;
    }

    /// The worker's batch of messages.
    pub(super) fn batch(&mut self) -> &mut Batch {
        let new = || Box::new(Batch::new(BATCH, LONGEST_MESSAGE));
        self.batch.get_or_insert_with(new)
    }

    /// Memory for one read of a joined pair, with room for any datagram.
    pub(super) fn scratch(&mut self) -> &mut [u8] {
        self.scratch.resize(LONGEST_MESSAGE, 0);
        &mut self.scratch
    }

    /// Bytes of buffers that pairs hold.
    #[cfg(test)]
    pub(super) fn lent(&self) -> usize {
        self.lent
    }

    /// Pipes in use.
    #[cfg(test)]
    pub(super) fn pipes_in_use(&self) -> usize {
        self.pipes - self.free_pipes.len()
    }
}

fn new_buffer(size: usize) -> Box<[u8]> {
    vec![0; size].into_boxed_slice()
}

/// A pipe of this size, or of at least [`SMALLEST_PIPE`].
fn new_pipe(size: usize) -> Option<Pipe> {
    let (read, write) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).ok()?;
    if fcntl_setpipe_size(&write, size).is_err() && fcntl_getpipe_size(&write).ok()? < SMALLEST_PIPE
    {
        return None;
    }
    Some(Pipe { read, write })
}

#[cfg(test)]
#[path = "store_tests.rs"]
mod tests;
