//! The next chain, read where it is posted.
//!
//! Most packets are done with before the next one is looked at. They need no [`Chain`], which can be
//! held: nothing is counted as outstanding, and nothing has to be unpopped. While writes are marked in
//! a log, all chains are popped: only one call marks them.

use super::{DeviceQueue, PREFETCH_DISTANCE};
use crate::slice::{GuestSlice, Piece};
use crate::split::chain::Chain;
use crate::split::layout::{DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE};

/// The next chain of a queue, which is still posted: its bytes in two parts.
#[derive(Debug)]
pub struct FrontChain<'q> {
    /// As many of the first bytes as the caller asked for.
    pub header: GuestSlice<'q>,
    /// All other bytes.
    pub body: GuestSlice<'q>,
    /// Names the chain to the queue.
    pub token: FrontToken,
}

/// Names the chain at the front of a queue: for [`DeviceQueue::complete_front`] or
/// [`DeviceQueue::pop_front`]. One that is dropped leaves the chain posted.
#[derive(Debug)]
pub struct FrontToken {
    head: u16,
    position: u16,
    writable: bool,
    /// The private copies of its descriptors, checked. Without a second descriptor the second piece
    /// is empty.
    pieces: [Piece; 2],
}

impl FrontToken {
    /// Length of the chain in bytes. The two pieces have less than 2^32.
    #[inline]
    fn len(&self) -> u32 {
        self.pieces[0].len + self.pieces[1].len
    }
}

impl DeviceQueue {
    /// The next chain, in the common case: of one plain descriptor with at least `at` bytes, or of
    /// two, the first with `at` bytes; all of them writable or all readable, and in the regions of
    /// the last one; of a queue without a log. `None` says nothing about the queue: ask [`pop`](Self::pop), which reads
    /// everything again. So does a call of this function: the driver may have changed the chain.
    #[inline(always)] // keeps the chain in registers
    pub fn front(&mut self, at: usize, writable: bool) -> Option<FrontChain<'_>> {
        if self.log.is_some() || self.available() == 0 {
            return None;
        }
        let position = self.avail.next();
        if self.avail.seen() > PREFETCH_DISTANCE {
            self.prefetch(position.wrapping_add(PREFETCH_DISTANCE));
        }
        let kind = if writable { DESC_F_WRITE } else { 0 };
        let mask = DESC_F_WRITE | DESC_F_NEXT | DESC_F_INDIRECT;
        let mem = self.rings.memory();
        let head = self.rings.avail_head(position);
        let first_copy = self.rings.descriptor(head)?;
        let first = mem.piece_in(self.hint, first_copy.addr, first_copy.len)?;
        let slice = mem.slice(first)?;
        let free = self.size() - self.held_descriptors;
        let (header, body, second) = if first_copy.flags & mask == kind {
            if slice.len() < at || free < 1 {
                return None;
            }
            (slice.part(0, at), slice.part(at, usize::MAX), Piece::NONE)
        } else {
            if first_copy.flags & mask != kind | DESC_F_NEXT || slice.len() != at || free < 2 {
                return None;
            }
            let second_copy = self.rings.descriptor(first_copy.next)?;
            let second = mem.piece_in(self.next_hint, second_copy.addr, second_copy.len)?;
            if second_copy.flags & mask != kind || first.len.checked_add(second.len).is_none() {
                return None;
            }
            (slice, mem.slice(second)?, second)
        };
        let token = FrontToken {
            head,
            position,
            writable,
            pieces: [first, second],
        };
        Some(FrontChain {
            header,
            body,
            token,
        })
    }

    /// Completes the chain as [`complete`](Self::complete) does, without popping it first.
    ///
    /// # Panics
    /// If it is not the chain at the front, or the queue was given a log since: the caller's mistake.
    #[inline(always)] // as `front`
    pub fn complete_front(&mut self, token: FrontToken, written: u32) {
        assert!(self.log.is_none(), "the write would not be marked");
        self.leave_front(&token);
        let most = if token.writable { token.len() } else { 0 };
        debug_assert!(written <= most, "written past the end of the chain");
        self.add_used(token.head, written.min(most));
        self.record_completed_front();
    }

    /// Pops the chain as it was read.
    ///
    /// # Panics
    /// If it is not the chain at the front: the caller's mistake.
    #[inline]
    pub fn pop_front(&mut self, token: FrontToken) -> Chain {
        self.leave_front(&token);
        let len = token.len();
        let chain = Chain::from_uniform(
            token.head,
            token.position,
            token.pieces,
            len,
            token.writable,
        );
        self.outstanding += 1;
        self.held_descriptors += chain.descriptors;
        self.record_popped(chain.head);
        chain
    }

    #[inline(always)] // as `front`
    fn leave_front(&mut self, token: &FrontToken) {
        assert_eq!(
            token.position,
            self.avail.next(),
            "only the chain at the front can be completed there"
        );
        self.avail.advance();
    }
}
