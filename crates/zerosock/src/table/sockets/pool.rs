//! The counts of the buffers of one queue.

use std::time::Duration;

use zerosock_proto::Instant;

/// The buffers of one queue.
#[derive(Debug)]
pub(crate) struct Pool {
    /// Number of buffers.
    pub(super) size: u32,
    /// Buffers unread or leased in place.
    pub(super) held: u32,
    /// The leases in place, in no order.
    pub(super) leases: Vec<u32>,
    /// One of them may be overdue.
    pub(super) has_overdue: bool,
    /// Indices of the connections that hold unread buffers.
    pub(super) holders: Vec<u32>,
    /// Unread bytes in copies, over all connections.
    pub(super) unread_copies: usize,
    /// When to check for overdue buffers; `None` if nothing is held.
    pub(super) check: Option<Instant>,
    /// All leases are copies.
    pub(super) copied: bool,
    /// The peer is trusted: readers may have plain slices of its buffers.
    pub(super) trusted: bool,
}

impl Pool {
    /// Buffers that may be held.
    #[inline]
    pub(super) fn limit(&self) -> u32 {
        (self.size / 4 * 3).max(1)
    }

    /// Buffers that one connection may lease in place, or hold for an incomplete message.
    pub(super) fn eighth(&self) -> u32 {
        (self.size / 8).max(1)
    }

    /// Whether a connection with `leased` leases in place may have one more.
    #[inline]
    pub(super) fn may_lease(&self, leased: u32) -> bool {
        !self.copied
            && leased < self.eighth()
            && self.leases.len() < (self.size / 8 * 3 + 1) as usize
    }

    /// Counts a buffer that is held since then, for at most `hold`.
    #[inline]
    pub(super) fn add_held(&mut self, since: Option<Instant>, hold: Duration) {
        self.held += 1;
        match since {
            None => self.check = Some(Instant::ZERO),
            Some(since) if self.check.is_none() => self.check = Some(since + hold),
            Some(_) => {}
        }
    }

    /// Counts `count` buffers that are no longer held.
    #[inline]
    pub(super) fn remove_held(&mut self, count: u32) {
        self.held = self.held.saturating_sub(count);
        if self.held == 0 {
            self.check = None;
        }
    }
}
