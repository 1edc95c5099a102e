//! The index protocol, the same in both directions (virtio 1.2, 2.7.6 to 2.7.10, 2.7.13).
//!
//! A split virtqueue is two one-way rings. In the available ring the driver produces and the device
//! consumes; in the used ring the roles are exchanged. Each ring has one index that its producer
//! moves, and, *in the other ring's memory*, a flag and an event index by which its consumer
//! requests notifications. So one [`Producer`] and one [`Consumer`] serve both rings and both
//! halves, and what loom proves of them holds for all.
//!
//! # Invariants
//! - Entries are visible before the index that announces them: store Release in
//!   [`Producer::make_visible`], load Acquire in [`Consumer::available`] and [`Consumer::enable`].
//! - No notification is lost: the producer stores the index, then reads the request; the consumer
//!   stores the request, then reads the index. With a SeqCst fence between the two on both sides,
//!   at least one sees the other's store.
//! - The index is the peer's: it is read once, its distance is checked, and only the copy is used.

use crate::event_idx::need_event;
use crate::sync::{AtomicU16, Ordering, fence};

/// Flag by which a consumer declines notifications (VIRTQ_AVAIL_F_NO_INTERRUPT and
/// VIRTQ_USED_F_NO_NOTIFY are the same bit). Without event index only.
const NO_NOTIFICATION: u16 = 1;

/// The shared words of one ring's protocol, little-endian on every machine.
#[derive(Copy, Clone)]
pub(crate) struct IndexWords<'a> {
    /// The ring's index: written by its producer.
    pub(crate) index: &'a AtomicU16,
    /// The consumer's flags: written by the consumer.
    pub(crate) flags: &'a AtomicU16,
    /// The consumer's event index: written by the consumer.
    pub(crate) event: &'a AtomicU16,
}

/// The index moved more than the other half can have moved it.
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
pub(crate) struct IndexJump;

/// The half that puts entries into a ring.
#[derive(Debug)]
pub(crate) struct Producer {
    /// Free-running position of the next entry to write.
    next: u16,
    /// The index visible to the consumer.
    visible: u16,
    /// Entries made visible since the consumer's request was last read.
    unchecked: u32,
    /// Whether the last request that was read is valid. Not at the first read: a predecessor may
    /// have published and died before it notified.
    request_known: bool,
}

impl Producer {
    pub(crate) fn new(base: u16) -> Producer {
        Producer {
            next: base,
            visible: base,
            unchecked: 0,
            request_known: false,
        }
    }

    /// Free-running position of the next entry to write.
    #[inline]
    pub(crate) fn next(&self) -> u16 {
        self.next
    }

    /// Advances past the entry at `next`, which was written.
    #[inline]
    pub(crate) fn advance(&mut self) {
        self.next = self.next.wrapping_add(1);
    }

    /// Makes all entries up to `next` visible. True: notify the consumer.
    #[inline]
    pub(crate) fn publish(&mut self, words: IndexWords<'_>, event_idx: bool) -> bool {
        self.make_visible(words);
        self.needs_notification(words, event_idx)
    }

    /// Makes all entries up to `next` visible; a later `needs_notification` says whether to notify
    /// the consumer of them. Returns whether there were any.
    #[inline]
    pub(crate) fn make_visible(&mut self, words: IndexWords<'_>) -> bool {
        let count = self.next.wrapping_sub(self.visible);
        if count == 0 {
            return false;
        }
        // Pairs with the Acquire loads of the consumer: the entries come before the index.
        words.index.store(self.next.to_le(), Ordering::Release);
        self.visible = self.next;
        self.unchecked = self.unchecked.saturating_add(u32::from(count));
        true
    }

    /// Whether to notify the consumer of the entries made visible since the last call.
    #[inline]
    pub(crate) fn needs_notification(&mut self, words: IndexWords<'_>, event_idx: bool) -> bool {
        if self.unchecked == 0 {
            return false;
        }
        // Pairs with the fence in `Consumer::enable`: either we see its request below, or it sees
        // our index after its own fence and does not sleep.
        fence(Ordering::SeqCst);
        let count = core::mem::take(&mut self.unchecked);
        if event_idx {
            let event_copy = u16::from_le(words.event.load(Ordering::Relaxed));
            let first = !core::mem::replace(&mut self.request_known, true);
            // 65536 entries or more pass every event.
            let old = match u16::try_from(count) {
                Ok(count) => self.visible.wrapping_sub(count),
                Err(_) => return true,
            };
            first || need_event(event_copy, self.visible, old)
        } else {
            let flags_copy = u16::from_le(words.flags.load(Ordering::Relaxed));
            flags_copy & NO_NOTIFICATION == 0
        }
    }

    /// Whether [`publish`](Self::publish) would return true for the present request, after `more`
    /// further entries. Changes nothing, and has no fence: it may miss a request of this moment.
    #[inline]
    pub(crate) fn would_notify(&self, more: u16, words: IndexWords<'_>, event_idx: bool) -> bool {
        let next = self.next.wrapping_add(more);
        let count = u32::from(next.wrapping_sub(self.visible)) + self.unchecked;
        if count == 0 {
            return false;
        }
        if event_idx {
            let event_copy = u16::from_le(words.event.load(Ordering::Relaxed));
            let Ok(count) = u16::try_from(count) else {
                return true;
            };
            !self.request_known || need_event(event_copy, next, next.wrapping_sub(count))
        } else {
            let flags_copy = u16::from_le(words.flags.load(Ordering::Relaxed));
            flags_copy & NO_NOTIFICATION == 0
        }
    }
}

/// The half that takes entries out of a ring.
#[derive(Debug)]
pub(crate) struct Consumer {
    /// Free-running position of the next entry to take.
    next: u16,
    /// The producer's index as last read and checked.
    seen: u16,
}

impl Consumer {
    pub(crate) fn new(base: u16) -> Consumer {
        Consumer {
            next: base,
            seen: base,
        }
    }

    /// Free-running position of the next entry to take.
    #[inline]
    pub(crate) fn next(&self) -> u16 {
        self.next
    }

    /// Entries that can be taken. Reads the shared index only when all entries seen have been
    /// taken.
    ///
    /// # Errors
    /// [`IndexJump`] if there are more than `limit`.
    #[inline]
    pub(crate) fn available(
        &mut self,
        words: IndexWords<'_>,
        limit: u16,
    ) -> Result<u16, IndexJump> {
        if self.seen == self.next {
            // Pairs with the Release store in `Producer::make_visible`.
            let index_copy = u16::from_le(words.index.load(Ordering::Acquire));
            if index_copy.wrapping_sub(self.next) > limit {
                return Err(IndexJump);
            }
            self.seen = index_copy;
        }
        Ok(self.seen.wrapping_sub(self.next))
    }

    /// Whether the shared index announces entries; nothing is checked or stored. For callers that
    /// spin.
    #[inline]
    pub(crate) fn has_entries(&self, words: IndexWords<'_>) -> bool {
        // Only compared: `available` reads it again and checks it before anything is taken.
        self.seen != self.next || u16::from_le(words.index.load(Ordering::Relaxed)) != self.next
    }

    /// Entries seen and not taken yet.
    #[inline]
    #[cfg_attr(loom, allow(dead_code))] // for prefetching, which no loom test does
    pub(crate) fn seen(&self) -> u16 {
        self.seen.wrapping_sub(self.next)
    }

    /// As [`available`](Self::available), but always reads the shared index. An index that went
    /// back leaves the entries already seen.
    ///
    /// # Errors
    /// [`IndexJump`] if there are more than `limit`.
    #[inline]
    pub(crate) fn refresh(&mut self, words: IndexWords<'_>, limit: u16) -> Result<u16, IndexJump> {
        let left = self.seen.wrapping_sub(self.next);
        // Pairs with the Release store in `Producer::publish`.
        let index_copy = u16::from_le(words.index.load(Ordering::Acquire));
        let count = index_copy.wrapping_sub(self.next);
        if count > limit {
            return Err(IndexJump);
        }
        if count > left {
            self.seen = index_copy;
        }
        Ok(count.max(left))
    }

    /// Advances past the entry at `next`, which was taken.
    #[inline]
    pub(crate) fn advance(&mut self) {
        self.next = self.next.wrapping_add(1);
    }

    /// Goes back to the entry taken last.
    #[inline]
    pub(crate) fn retreat(&mut self) {
        self.next = self.next.wrapping_sub(1);
    }

    /// Declines notifications. With event index nothing is stored: an event index that is left
    /// behind is passed at most once until the index has wrapped.
    #[inline]
    pub(crate) fn disable(&mut self, words: IndexWords<'_>, event_idx: bool) {
        if !event_idx {
            words
                .flags
                .store(NO_NOTIFICATION.to_le(), Ordering::Relaxed);
        }
    }

    /// Requests a notification for the next entry. True: entries are there already, and no
    /// notification will come for them.
    #[inline]
    pub(crate) fn enable(&mut self, words: IndexWords<'_>, event_idx: bool) -> bool {
        if event_idx {
            words.event.store(self.next.to_le(), Ordering::Relaxed);
        } else {
            words.flags.store(0, Ordering::Relaxed);
        }
        // Pairs with the fence in `Producer::needs_notification`.
        fence(Ordering::SeqCst);
        // Only compared: `available` reads it again and checks it before anything is taken.
        u16::from_le(words.index.load(Ordering::Acquire)) != self.next
    }

    /// As `enable`, but requests a notification only when `more` further entries are there as well.
    /// True: they are there already. Without event index it is `enable`, because that request
    /// cannot be made.
    #[inline]
    pub(crate) fn enable_after(
        &mut self,
        words: IndexWords<'_>,
        event_idx: bool,
        more: u16,
    ) -> bool {
        if !event_idx {
            return self.enable(words, false);
        }
        let event = self.next.wrapping_add(more);
        words.event.store(event.to_le(), Ordering::Relaxed);
        // Pairs with the fence in `Producer::needs_notification`: either it sees the event above,
        // or we see an index that has passed the event.
        fence(Ordering::SeqCst);
        // Only compared, as in `enable`. `available` reports an invalid index.
        let index_copy = u16::from_le(words.index.load(Ordering::Acquire));
        index_copy.wrapping_sub(self.next) > more
    }
}
