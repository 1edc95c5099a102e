//! Chains of one descriptor, read ahead and completed in order: see [`Singles`].

use zerosock_ring::{Chain, Singles};

use super::{MAX_WALKED, Ring};

impl Ring {
    /// Reads the next chains, at most `most` and 32, up to the first that is not of one descriptor of the
    /// wanted kind; none if the ring may not be processed. Prefetches `bytes` bytes of them.
    #[inline]
    pub fn read_singles(
        &mut self,
        singles: &mut Singles,
        most: usize,
        writable: bool,
        bytes: usize,
    ) {
        let most = match self.live() && self.queue.walked() < MAX_WALKED {
            true => most,
            false => 0,
        };
        self.queue.read_singles(singles, most, writable, bytes);
    }

    /// Pops the front of `singles` and completes it with `written` bytes.
    #[inline]
    pub fn complete_single(&mut self, singles: &mut Singles, written: u32) {
        self.queue.complete_single(singles, written);
        self.taken = self.taken.wrapping_add(1);
        self.unpublished = self.unpublished.saturating_add(1);
    }

    /// Pops the front of `singles`, for a later [`complete`](Self::complete).
    #[inline]
    pub fn pop_single(&mut self, singles: &mut Singles) -> Option<Chain> {
        let chain = self.queue.pop_single(singles)?;
        self.taken = self.taken.wrapping_add(1);
        Some(chain)
    }
}
