//! Slots and notifiers: one notification for several buffers.
//!
//! A slot has at most one notifier. A send that is executed attaches to the notifier of its slot,
//! which is made when there is none, with the tag of the slot and its next sequence number. A flush
//! closes the notifier: nothing more attaches, and when every attached send has released its
//! buffer, one [`Notification`] is posted. The next send of the slot makes a new notifier. A flush
//! of a slot to which nothing is attached posts nothing. A send that fails attaches but does not
//! flush. The notification slots of io_uring did this before Linux 6.0 was released without them
//! (Pavel Begunkov's series "io_uring zerocopy send", v3, July 2022).
//!
//! There, a request was executed within the call that submitted it. Here, a request can be retried,
//! and later ones can overtake it. Notifications do not depend on that: a flush, also one that a
//! send carries, waits for the sends that were accepted before it, and a notifier has the tag that
//! its slot had when the first of its sends was accepted.
//!
//! # Invariants
//! A flush covers every send that was accepted before it, also those that the kernel has not
//! executed yet. Each notification is posted exactly once.

use std::collections::VecDeque;
use std::ops::Range;

use slab::Slab;

use super::indexed_queue::IndexedQueue;

/// All sends that were attached to one notifier have released their buffers.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct Notification {
    /// The tag of the slot when the first of those sends was accepted.
    pub tag: u64,
    /// The number of the notifier in its slot, counted from 0 and wrapping.
    pub sequence: u32,
}

/// The slot does not exist.
#[derive(Copy, Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("there is no slot {slot}: there are {slots}")]
pub struct NoSuchSlot {
    /// The requested slot.
    pub slot: u32,
    /// Number of slots.
    pub slots: u32,
}

/// The position of a send among the sends of its slot.
#[derive(Copy, Clone, Debug)]
pub(super) struct Ticket {
    slot: u32,
    /// Number of sends accepted before it.
    before: u64,
    /// The tag of the slot when the send was accepted.
    tag: u64,
}

/// The notifier that a send is attached to.
#[derive(Copy, Clone, Debug)]
pub(super) struct Attached(usize);

#[derive(Default)]
pub(super) struct Slots {
    slots: Vec<Slot>,
    notifiers: Slab<Notifier>,
    posted: VecDeque<Notification>,
    /// Number of notifications posted so far.
    posted_count: u64,
}

struct Slot {
    tag: u64,
    /// The sequence number of the next notifier.
    sequence: u32,
    /// The open notifier, by its key in [`Slots::notifiers`].
    notifier: Option<usize>,
    /// Number of sends at the front that are finished and removed from `sends`.
    passed: u64,
    /// The sends accepted after those, in order.
    sends: IndexedQueue<SlotSend>,
}

#[derive(Default)]
struct SlotSend {
    finished: bool,
    /// A flush waits for this send and all earlier ones.
    flush: bool,
}

struct Notifier {
    tag: u64,
    /// [`Ticket::before`] of the earliest attached send.
    first: u64,
    sequence: u32,
    attached: usize,
    closed: bool,
}

impl Slot {
    /// Number of sends accepted so far.
    fn accepted(&self) -> u64 {
        self.passed + self.sends.len() as u64
    }

    /// The send with `before` sends accepted earlier, unless it was removed.
    fn send(&mut self, before: u64) -> Option<&mut SlotSend> {
        let ahead = before.wrapping_sub(self.passed);
        self.sends.get_mut(ahead as usize)
    }

    /// Removes finished sends from the front. Returns whether a flush was reached.
    fn advance(&mut self) -> bool {
        let mut reached = false;
        while let Some(send) = self.sends.pop_if(|send| send.finished) {
            reached |= send.flush;
            self.passed += 1;
        }
        reached
    }
}

impl Slots {
    /// Creates a slot for each tag.
    pub(super) fn new(tags: impl IntoIterator<Item = u64>) -> Self {
        let slot = |tag| Slot {
            tag,
            sequence: 0,
            notifier: None,
            passed: 0,
            sends: IndexedQueue::default(),
        };
        Self {
            slots: tags.into_iter().map(slot).collect(),
            ..Self::default()
        }
    }

    pub(super) fn count(&self) -> u32 {
        self.slots.len() as u32
    }

    fn slot(&mut self, slot: u32) -> Result<&mut Slot, NoSuchSlot> {
        let slots = self.count();
        let found = self.slots.get_mut(slot as usize);
        found.ok_or(NoSuchSlot { slot, slots })
    }

    /// Checks that the slot exists.
    pub(super) fn check(&self, slot: u32) -> Result<(), NoSuchSlot> {
        let slots = self.count();
        if slot < slots {
            Ok(())
        } else {
            Err(NoSuchSlot { slot, slots })
        }
    }

    /// Sets the tag of notifiers of later sends.
    pub(super) fn set_tag(&mut self, slot: u32, tag: u64) -> Result<(), NoSuchSlot> {
        self.slot(slot)?.tag = tag;
        Ok(())
    }

    /// Takes note of an accepted send to this slot.
    pub(super) fn accepted(&mut self, index: u32) -> Ticket {
        let (mut before, mut tag) = (0, 0);
        if let Ok(slot) = self.slot(index) {
            (before, tag) = (slot.accepted(), slot.tag);
            slot.sends.push(SlotSend::default());
        }
        Ticket {
            slot: index,
            before,
            tag,
        }
    }

    /// Takes note that the kernel executed a send, and attaches it to a notifier until
    /// [`released`](Self::released). `flush` if the send flushes and succeeded.
    pub(super) fn executed(&mut self, ticket: Ticket, flush: bool) -> Option<Attached> {
        let slot = self.slots.get_mut(ticket.slot as usize)?;
        let index = match slot.notifier {
            Some(notifier) => notifier,
            None => {
                let made = self.notifiers.insert(Notifier {
                    tag: ticket.tag,
                    first: ticket.before,
                    sequence: slot.sequence,
                    attached: 0,
                    closed: false,
                });
                slot.sequence = slot.sequence.wrapping_add(1);
                slot.notifier = Some(made);
                made
            }
        };
        if let Some(send) = slot.send(ticket.before) {
            send.flush |= flush;
        }
        let notifier = self.notifiers.get_mut(index)?;
        notifier.attached += 1;
        if ticket.before < notifier.first {
            // A later send was executed before this one.
            (notifier.first, notifier.tag) = (ticket.before, ticket.tag);
        }
        self.finish(ticket);
        Some(Attached(index))
    }

    /// Takes note that a send is finished, executed or not: sends finish in any order.
    pub(super) fn finish(&mut self, ticket: Ticket) {
        let Some(slot) = self.slots.get_mut(ticket.slot as usize) else {
            return;
        };
        if let Some(send) = slot.send(ticket.before) {
            send.finished = true;
        }
        if slot.advance() {
            self.close(ticket.slot);
        }
    }

    /// Closes the open notifier of the slot, if there is one.
    fn close(&mut self, index: u32) {
        let slot = self.slots.get_mut(index as usize);
        let Some(notifier) = slot.and_then(|slot| slot.notifier.take()) else {
            return;
        };
        if let Some(closed) = self.notifiers.get_mut(notifier) {
            closed.closed = true;
        }
        self.post_if_done(notifier);
    }

    fn post_if_done(&mut self, notifier: usize) {
        let done = |notifier: &Notifier| notifier.closed && notifier.attached == 0;
        if self.notifiers.get(notifier).is_some_and(done) {
            let Notifier { tag, sequence, .. } = self.notifiers.remove(notifier);
            self.posted.push_back(Notification { tag, sequence });
            self.posted_count += 1;
        }
    }

    /// Takes note that the buffer of a send is free.
    pub(super) fn released(&mut self, Attached(notifier): Attached) {
        if let Some(found) = self.notifiers.get_mut(notifier) {
            found.attached = found.attached.saturating_sub(1);
            self.post_if_done(notifier);
        }
    }

    /// Flushes the slots of a range, each after the sends accepted before.
    pub(super) fn flush(&mut self, range: Range<u32>) -> Result<(), NoSuchSlot> {
        if let Some(last) = range.clone().last() {
            self.check(last)?;
        }
        for index in range {
            let slot = self.slot(index)?;
            match slot.sends.last_mut() {
                Some(last) => last.flush = true,
                None => self.close(index),
            }
        }
        Ok(())
    }

    /// Takes the oldest notification.
    pub(super) fn next(&mut self) -> Option<Notification> {
        self.posted.pop_front()
    }

    /// Number of notifications posted so far, taken or not.
    pub(super) fn posted_count(&self) -> u64 {
        self.posted_count
    }

    /// Number of notifications that the application has not taken.
    pub(super) fn waiting(&self) -> usize {
        self.posted.len()
    }
}

#[cfg(test)]
#[path = "slots_tests.rs"]
mod tests;
