//! The counts of the buffers of one queue.

use zerosock_proto::Instant;

/// The buffers of one queue.
#[derive(Debug)]
pub(crate) struct Pool {
    /// Number of buffers.
    pub(super) size: u32,
    /// Buffers unread or leased in place.
    pub(super) held: u32,
    /// Buffers leased in place.
    pub(super) leased: u32,
    /// Indices of the connections that hold buffers.
    pub(super) holders: Vec<u32>,
    /// Leases in place of removed connections; all had readers at the last check.
    pub(super) orphans: Vec<u32>,
    /// Leases in place past the hold time that had readers.
    pub(super) overdue: Vec<u32>,
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
    pub(super) fn limit(&self) -> u32 {
        (self.size / 4 * 3).max(1)
    }

    /// Buffers that one connection may lease in place, or hold for an incomplete message.
    pub(super) fn eighth(&self) -> u32 {
        (self.size / 8).max(1)
    }
}
