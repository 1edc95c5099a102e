//! Chains of one plain descriptor, for devices that complete chains in order and at once: they are read
//! ahead of their use, many at a time, and popped only when they are completed.
//!
//! # Invariants
//! - A [`Single`] is the only copy of its descriptor, and is checked as a popped chain is.
//! - Chains that were read ahead are still posted: a caller that stops has nothing to undo. What it has of
//!   them is void as soon as a chain is popped in another way.

use super::DeviceQueue;
use crate::slice::Piece;
use crate::split::chain::Chain;
use crate::split::layout::{DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE};

/// How many chains ahead of the one in use memory is prefetched.
const PREFETCH_DISTANCE: usize = 4;
/// Most chains that are read ahead.
const MAX: usize = 32;

/// A posted chain of one descriptor, in one region of memory.
#[derive(Copy, Clone, Debug)]
pub struct Single {
    head: u16,
    is_writable: bool,
    piece: Piece,
}

impl Single {
    const NONE: Single = Single {
        head: 0,
        is_writable: false,
        piece: Piece::NONE,
    };

    /// The bytes of the buffer.
    #[inline]
    pub fn piece(&self) -> &Piece {
        &self.piece
    }

    /// The length of the buffer in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.piece.len()
    }

    /// False: a descriptor without bytes is no `Single`.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.piece.is_empty()
    }
}

/// The next chains of a queue.
#[derive(Debug)]
pub struct Singles {
    chains: [Single; MAX],
    /// The first one that is left.
    first: usize,
    /// Behind the last one.
    end: usize,
    /// Bytes of each that are prefetched.
    prefetched: usize,
}

impl Default for Singles {
    #[inline]
    fn default() -> Singles {
        Singles {
            chains: [Single::NONE; MAX],
            first: 0,
            end: 0,
            prefetched: 0,
        }
    }
}

impl Singles {
    /// The next chain.
    #[inline]
    pub fn front(&self) -> Option<Single> {
        match self.first < self.end {
            true => self.chains.get(self.first).copied(),
            false => None,
        }
    }

    /// Forgets all chains, which stay posted.
    #[inline]
    pub fn clear(&mut self) {
        self.end = self.first;
    }
}

impl DeviceQueue {
    /// Reads the next chains, at most `most` and 32, up to the first that is no [`Single`] of the wanted
    /// kind; and prefetches `bytes` bytes of the first of them.
    #[inline]
    pub fn read_singles(
        &mut self,
        singles: &mut Singles,
        most: usize,
        writable: bool,
        bytes: usize,
    ) {
        (singles.first, singles.end) = (0, 0);
        singles.prefetched = bytes;
        let count = usize::from(self.available()).min(most);
        if self.held_descriptors >= self.size() {
            return;
        }
        let position = self.avail.next();
        let memory = self.rings.memory();
        for (at, place) in singles.chains.iter_mut().take(count).enumerate() {
            let head_copy = self.rings.avail_head(position.wrapping_add(at as u16));
            let Some(descriptor_copy) = self.rings.descriptor(head_copy) else {
                break;
            };
            if descriptor_copy.has(DESC_F_NEXT | DESC_F_INDIRECT)
                || descriptor_copy.has(DESC_F_WRITE) != writable
            {
                break;
            }
            let (addr, len) = (descriptor_copy.addr, descriptor_copy.len);
            let Some(piece) = memory.piece_in(self.hint, addr, len) else {
                break;
            };
            *place = Single {
                head: head_copy,
                is_writable: writable,
                piece,
            };
            singles.end = at + 1;
        }
        for at in 0..singles.end.min(PREFETCH_DISTANCE) {
            self.prefetch_single(singles, at);
        }
    }

    /// Prefetches the beginning of a chain that is used later.
    #[inline]
    fn prefetch_single(&self, singles: &Singles, at: usize) {
        let Some(single) = singles.chains.get(at).filter(|_| at < singles.end) else {
            return;
        };
        let part = single.piece.part(0, singles.prefetched);
        if let Some(slice) = self.rings.memory().slice(part) {
            slice.prefetch_lines(single.is_writable);
        }
    }

    /// Pops the front of `singles` and completes it, as [`complete`](Self::complete) does.
    #[inline]
    pub fn complete_single(&mut self, singles: &mut Singles, written: u32) {
        let Some(single) = singles.front() else {
            return;
        };
        self.prefetch_single(singles, singles.first + PREFETCH_DISTANCE);
        singles.first += 1;
        self.avail.advance();
        let written = match single.is_writable {
            true => written.min(single.piece.len),
            false => 0,
        };
        let changed = self.add_used(single.head, written);
        if self.log.is_some() {
            self.log_completed(&[single.piece], written, changed);
        }
        self.record_completed_front();
    }

    /// Pops the front of `singles` as a chain.
    #[inline]
    pub fn pop_single(&mut self, singles: &mut Singles) -> Option<Chain> {
        let single = singles.front()?;
        self.prefetch_single(singles, singles.first + PREFETCH_DISTANCE);
        singles.first += 1;
        if self.held_descriptors + 1 >= self.size() {
            // Another chain could have a descriptor of those that are held.
            singles.clear();
        }
        let position = self.avail.next();
        self.avail.advance();
        self.outstanding += 1;
        self.held_descriptors += 1;
        let Single {
            head,
            is_writable,
            piece,
        } = single;
        self.record_popped(head);
        let (pieces, len) = ([piece, Piece::NONE], piece.len);
        Some(Chain::from_uniform(
            head,
            position,
            pieces,
            len,
            is_writable,
        ))
    }
}
