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

use std::collections::TryReserveError;
use std::sync::Arc;

use super::{Consumer, DeviceQueue, Producer};
use crate::memory::Memory;
use crate::split::layout::{QueueConfig, QueueError};
use crate::split::record::{InflightRecord, LostChains};
use crate::sync::Ordering;

impl DeviceQueue {
    /// As [`new`](Self::new), and keeps a record of chains in flight from now on.
    ///
    /// If the record is of the same queue start, the queue continues where its predecessor was killed:
    /// `config.base` is not used, see [`base`](Self::base). Chains that the predecessor completed are
    /// published by the next [`publish`](Self::publish); those that it had popped are
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
        record.populate(size).map_err(|_| no_memory)?;
        let is_same = start != 0 && record.start() == start;
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
    ) -> Result<Option<LostChains>, TryReserveError> {
        let size = self.size();
        let used_copy = u16::from_le(self.rings.used_words().index.load(Ordering::Relaxed));
        let completed = record.completed().wrapping_sub(used_copy);
        let posted = self.driver_index().wrapping_sub(used_copy);
        if posted > size || completed > posted {
            return Ok(None);
        }
        let mut in_flight = record.in_flight(size)?;
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
        let taken = u32::from(completed) + u32::from(record.offset()) + outstanding;
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
