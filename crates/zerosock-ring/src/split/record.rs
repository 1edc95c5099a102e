//! The record of chains in flight of a device half, as `device/inflight.rs` keeps it.
//!
//! # Invariants
//! - Each store has Release ordering, which the compiler does not move earlier stores behind: see there.

use std::collections::TryReserveError;
use std::sync::atomic::Ordering::{Relaxed, Release};

use rustix::io::Errno;

use super::stored;
use crate::state_map::{InflightWords, StateCell, StateMap};

/// One queue's record of the chains that it has popped and not completed, in memory that outlives the
/// process. Clones share it; one queue at a time uses it.
#[derive(Clone, Debug)]
pub struct InflightRecord(StateCell<InflightWords>);

/// Chains that a predecessor has popped and not completed: for
/// [`DeviceQueue::complete_lost`](crate::DeviceQueue::complete_lost).
#[must_use = "the chains go back to the driver through complete_lost()"]
#[derive(Debug, Default)]
pub struct LostChains {
    /// Their heads, below the size of the queue.
    pub(super) heads: Vec<u16>,
}

impl InflightRecord {
    /// Bytes of a record, whole pages. As many pages are touched as the heads of the queue need: one for up
    /// to 4032.
    pub const LEN: usize = size_of::<InflightWords>().next_multiple_of(4096);

    /// The record in a range of at least [`LEN`](Self::LEN) bytes; `None` if it is shorter.
    pub fn new(map: StateMap) -> Option<InflightRecord> {
        StateCell::new(map).map(InflightRecord)
    }

    /// Allocates the memory of a queue's record.
    ///
    /// # Errors
    /// There is none.
    pub(super) fn populate(&self, size: u16) -> Result<(), Errno> {
        let header = size_of::<InflightWords>() - self.0.heads.len();
        self.0.populate(header + usize::from(size))
    }

    /// One copy of the number of the queue start.
    pub(super) fn start(&self) -> u64 {
        self.0.start.load(Relaxed)
    }

    /// One copy of the used index up to which elements are written.
    pub(super) fn completed(&self) -> u16 {
        self.0.completed.load(Relaxed)
    }

    /// One copy of how far the available index was ahead of the used index at the start.
    pub(super) fn offset(&self) -> u16 {
        self.0.offset.load(Relaxed)
    }

    /// One copy of all bytes: whether the chain with each head is in flight.
    ///
    /// # Errors
    /// There is no memory for it.
    pub(super) fn in_flight(&self, size: u16) -> Result<Vec<bool>, TryReserveError> {
        let mut in_flight = Vec::new();
        in_flight.try_reserve_exact(size.into())?;
        let heads = self.0.heads.iter().take(size.into());
        in_flight.extend(heads.map(|head| head.load(Relaxed) != 0));
        Ok(in_flight)
    }

    /// Begins the record of a queue from which nothing is popped.
    pub(super) fn begin(&self, size: u16, start: u64, base: u16, used: u16) {
        // A successor takes nothing from a record that is half written.
        self.0.start.store(0, Relaxed);
        stored();
        for head in self.0.heads.iter().take(size.into()) {
            head.store(0, Release);
        }
        self.set_completed(used);
        self.0.offset.store(base.wrapping_sub(used), Release);
        stored();
        self.0.start.store(start, Release);
        stored();
    }

    #[inline(always)] // every packet
    pub(super) fn set_head(&self, head: u16, value: u8) {
        self.0.heads[usize::from(head)].store(value, Release);
        stored();
    }

    #[inline(always)] // every packet
    pub(super) fn set_completed(&self, next: u16) {
        self.0.completed.store(next, Release);
        stored();
    }
}
