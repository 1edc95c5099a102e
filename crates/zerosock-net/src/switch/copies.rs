//! Frames in copies, one behind the other.
//!
//! # Invariants
//! - Frames, of at least one byte, lie in chunks, in their order, each in one chunk. The first frame of a chunk begins at its start.
//! - Without frames there is at most one chunk, and none after [`Copies::clear`].
//! - A chunk has been used for one receiver only: an earlier frame that a later one does not cover is not
//!   shown to another guest.

use std::collections::VecDeque;

use zerosock_proto::wire::net::{Header, MAX_FRAME};
use zerosock_sys::PrivateMemory;

/// Bytes of a chunk: two of the longest frames, in whole pages.
pub(super) const CHUNK: usize = (2 * MAX_FRAME).next_multiple_of(4096);
/// Frames for which an empty list keeps its allocation.
const MAX_SPARE: usize = 64;

/// See the [module](self).
#[derive(Debug, Default)]
pub(super) struct Copies {
    frames: VecDeque<CopiedFrame>,
    chunks: VecDeque<PrivateMemory>,
    /// The last chunk that was finished.
    spare: Option<PrivateMemory>,
    /// Bytes of the last chunk in use.
    used: usize,
    /// Bytes of all frames.
    bytes: usize,
}

#[derive(Debug)]
struct CopiedFrame {
    header: Header,
    len: usize,
    /// Where it begins in its chunk.
    at: usize,
}

impl Copies {
    pub(super) fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    /// The number of frames.
    pub(super) fn len(&self) -> usize {
        self.frames.len()
    }

    /// Bytes of all frames.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Appends a frame and returns its place, which has any contents. `None`: it is too long, or there is no
    /// memory.
    pub(super) fn add(&mut self, header: Header, len: usize) -> Option<&mut [u8]> {
        if self.chunks.is_empty() || self.used + len > CHUNK {
            if len > CHUNK {
                return None;
            }
            let chunk = match self.spare.take() {
                Some(spare) => spare,
                None => PrivateMemory::new(CHUNK).ok()?,
            };
            self.chunks.push_back(chunk);
            self.used = 0;
        }
        let at = self.used;
        let place = self.chunks.back_mut()?.get_mut(at..at + len)?;
        self.frames.push_back(CopiedFrame { header, len, at });
        self.used += len;
        self.bytes += len;
        Some(place)
    }

    /// The first frame.
    pub(super) fn first(&self) -> Option<(&Header, &[u8])> {
        let CopiedFrame { header, len, at } = self.frames.front()?;
        Some((header, self.chunks.front()?.get(*at..at + len)?))
    }

    /// Removes the first frame. False: there is none.
    pub(super) fn pop(&mut self) -> bool {
        let Some(popped) = self.frames.pop_front() else {
            return false;
        };
        self.bytes -= popped.len;
        match self.frames.front() {
            Some(CopiedFrame { at: 0, .. }) => self.spare = self.chunks.pop_front(),
            Some(_) => {}
            None => {
                self.chunks.truncate(1);
                self.spare = None;
                self.used = 0;
                self.frames.shrink_to(MAX_SPARE);
            }
        }
        true
    }

    /// Drops all frames, and gives their memory back.
    pub(super) fn clear(&mut self) {
        *self = Copies::default();
    }

    /// Bytes of memory that it has from the system.
    #[cfg(test)]
    pub(super) fn capacity(&self) -> usize {
        CHUNK * (self.chunks.len() + usize::from(self.spare.is_some()))
    }
}
