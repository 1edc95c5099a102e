//! The record of chains in flight, by which a successor of a process that was killed returns each chain
//! exactly once.
//!
//! | call | stores, in this order |
//! |---|---|
//! | a queue starts | `start` = 0; all heads 0; `completed` and `offset`; `start` |
//! | pop | the head's byte = 1 |
//! | unpop | the head's byte = 0 |
//! | complete | the element of the used ring; `completed` += 1; the head's byte = 0 |
//! | complete without a pop | the element; `completed` += 1 |
//! | publish | the used index, which is not in the record |
//!
//! The next available index is not written down: it is `completed + offset` and the number of bytes that
//! are 1. So each call has one store that commits it.
//!
//! # Invariants
//! - Stores reach the memory in program order if the process is killed at any instruction: the record's have
//!   Release ordering, which the compiler does not move stores behind. It pairs with no load: the
//!   predecessor is dead when its record is read.
//! - A chain whose byte is 1 was not completed, unless it is the last one in the used ring: the process was
//!   killed between the two last stores of `complete`.
//! - The record is hostile input, and so are the rings: each value is read once, and nothing is taken from
//!   a record that does not agree with the indices of the rings.
//! - A chain that was in flight is returned with no written bytes, and is not processed again.

use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, Release};

use super::{Consumer, DeviceQueue, Producer};
use crate::memory::Memory;
use crate::split::layout::{QueueConfig, QueueError};
use crate::split::stored;
use crate::state_map::{InflightWords, StateCell, StateMap};

/// One queue's record of the chains that it has popped and not completed, in memory that outlives the
/// process. Clones share it; one queue at a time uses it.
#[derive(Clone, Debug)]
pub struct InflightRecord(StateCell<InflightWords>);

/// Chains that a predecessor has popped and not completed: for [`DeviceQueue::complete_lost`].
#[must_use = "the chains go back to the driver through complete_lost()"]
#[derive(Debug, Default)]
pub struct LostChains {
    heads: Vec<u16>,
}

impl InflightRecord {
    /// Bytes of a record, whole pages. As many pages are touched as the heads of the queue need: one for up
    /// to 4032.
    pub const LEN: usize = size_of::<InflightWords>().next_multiple_of(4096);

    /// The record in a range of at least [`LEN`](Self::LEN) bytes; `None` if it is shorter.
    pub fn new(map: StateMap) -> Option<InflightRecord> {
        StateCell::new(map).map(InflightRecord)
    }

    /// Begins the record of a queue from which nothing is popped.
    fn begin(&self, size: u16, start: u64, base: u16, used: u16) {
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
    fn set_head(&self, head: u16, value: u8) {
        self.0.heads[usize::from(head)].store(value, Release);
        stored();
    }

    #[inline(always)] // every packet
    fn set_completed(&self, next: u16) {
        self.0.completed.store(next, Release);
        stored();
    }
}

impl DeviceQueue {
    /// As [`new`](Self::new), and keeps a record of chains in flight from now on.
    ///
    /// If the record is of the same queue start, the queue continues where its predecessor was killed:
    /// `config.base` is not used, see [`base`](Self::base). Chains that the predecessor completed are
    /// published by the next [`publish`](Self::publish), which returns true; those that it had popped are
    /// counted as outstanding, and returned by [`complete_lost`](Self::complete_lost). A record of another
    /// start, or one that does not agree with the rings, begins anew. `start` 0 is no number: nothing
    /// continues.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn recover(
        mem: Arc<Memory>,
        config: &QueueConfig,
        record: InflightRecord,
        start: u64,
    ) -> Result<(DeviceQueue, LostChains), QueueError> {
        let mut queue = DeviceQueue::new(mem, config)?;
        let (size, no_memory) = (config.size, QueueError::NoMemory(config.size));
        let len = size_of::<InflightWords>() - record.0.heads.len() + usize::from(size);
        record.0.populate(len).map_err(|_| no_memory)?;
        let is_same = start != 0 && record.0.start.load(Relaxed) == start;
        let lost = match is_same {
            true => queue.continue_record(&record).map_err(|_| no_memory)?,
            false => None,
        };
        if lost.is_none() {
            record.begin(size, start, config.base, queue.used.next());
        }
        queue.inflight = Some(record);
        Ok((queue, lost.unwrap_or_default()))
    }

    /// Sets the indices to where the record ends. `None`: the record does not agree with the rings, and
    /// nothing has changed.
    ///
    /// # Errors
    /// There is no memory for the list of chains.
    fn continue_record(
        &mut self,
        record: &InflightRecord,
    ) -> Result<Option<LostChains>, std::collections::TryReserveError> {
        let size = self.size();
        let completed_copy = record.0.completed.load(Relaxed);
        let offset_copy = record.0.offset.load(Relaxed);
        let used_copy = u16::from_le(self.rings.used_words().index.load(Relaxed));
        let completed = completed_copy.wrapping_sub(used_copy);
        let posted = self.driver_index().wrapping_sub(used_copy);
        if posted > size || completed > posted {
            return Ok(None);
        }
        let mut in_flight = Vec::new();
        in_flight.try_reserve_exact(size.into())?;
        let heads = record.0.heads.iter().take(size.into());
        in_flight.extend(heads.map(|head| head.load(Relaxed) != 0));
        let mut completed_heads = Vec::new();
        completed_heads.try_reserve_exact(completed.into())?;
        for at in 0..completed {
            let (head_copy, _) = self.rings.used_element(used_copy.wrapping_add(at));
            let Some(in_flight) = in_flight.get_mut(head_copy as usize) else {
                return Ok(None);
            };
            if std::mem::take(in_flight) {
                // Below the size.
                completed_heads.push(head_copy as u16);
            }
        }
        let mut lost = LostChains::default();
        lost.heads.try_reserve_exact(size.into())?;
        lost.heads
            .extend((0..size).filter(|head| in_flight[usize::from(*head)]));
        // At most the size: there are so many heads.
        let outstanding = lost.heads.len() as u32;
        let taken = u32::from(completed) + u32::from(offset_copy) + outstanding;
        if taken > posted.into() {
            return Ok(None);
        }
        for head in completed_heads {
            record.set_head(head, 0);
        }
        self.avail = Consumer::new(used_copy.wrapping_add(taken as u16));
        self.used = Producer::new(used_copy);
        for _ in 0..completed {
            self.used.advance();
        }
        self.outstanding = outstanding;
        Ok(Some(lost))
    }

    /// Completes the chains that a predecessor had popped, with no written bytes. Returns how many there were.
    pub fn complete_lost(&mut self, lost: LostChains) -> u16 {
        for &head in &lost.heads {
            let changed = self.add_used(head, 0);
            self.log_completed(&[], 0, changed);
            self.record_completed(head);
            self.outstanding = self.outstanding.saturating_sub(1);
        }
        // At most the size.
        lost.heads.len() as u16
    }

    /// Writes down that a chain was popped.
    #[inline(always)] // every packet
    pub(super) fn record_popped(&self, head: u16) {
        if let Some(record) = &self.inflight {
            record.set_head(head, 1);
        }
    }

    /// Writes down that the chain popped last was unpopped.
    #[inline(always)] // as those beside it
    pub(super) fn record_unpopped(&self, head: u16) {
        if let Some(record) = &self.inflight {
            record.set_head(head, 0);
        }
    }

    /// Writes down that a popped chain is in the used ring.
    #[inline(always)] // every packet
    pub(super) fn record_completed(&self, head: u16) {
        if let Some(record) = &self.inflight {
            record.set_completed(self.used.next());
            record.set_head(head, 0);
        }
    }

    /// Writes down that a chain is in the used ring that was not popped before.
    #[inline(always)] // every packet
    pub(super) fn record_completed_front(&self) {
        if let Some(record) = &self.inflight {
            record.set_completed(self.used.next());
        }
    }
}
