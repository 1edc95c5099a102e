//! Slots and notifiers: one notification for several buffers.
//!
//! A slot has at most one notifier. A send that is executed attaches to the notifier of its slot, which is
//! made when there is none, with the tag of the slot and its next sequence number. A flush closes the
//! notifier: nothing more attaches, and when every attached send has released its buffer, one
//! [`Notification`] is posted. The next send of the slot makes a new notifier. A flush of a slot to which
//! nothing is attached posts nothing. A send that fails attaches but does not flush. The notification
//! slots of io_uring did this before Linux 6.0 was released without them (Pavel Begunkov's series
//! "io_uring zerocopy send", v3, July 2022).
//!
//! There, a request was executed within the call that submitted it. Here, it may be made again, and later
//! ones overtake it. What a program is told must not depend on that: a flush, also one that a send
//! carries, waits for the sends that were accepted before it, and a notifier has the tag that its slot
//! had when the first of its sends was accepted.
//!
//! # Invariants
//! A flush covers every send that was accepted before it, also those that the kernel has not executed
//! yet. Nothing is posted twice, and nothing is lost.

use std::collections::VecDeque;
use std::ops::Range;

use slab::Slab;

use super::indexed_queue::IndexedQueue;

/// All sends that were attached to one notifier have released their buffers.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct Notification {
    /// The slot's tag, as it was when the first of those sends was accepted.
    pub tag: u64,
    /// Which notifier of its slot it is, counted from 0 and wrapping.
    pub sequence: u32,
}

/// There are fewer slots than that.
#[derive(Copy, Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("there is no slot {slot}: there are {slots}")]
pub struct NoSuchSlot {
    /// The one that was named.
    pub slot: u32,
    /// How many there are.
    pub slots: u32,
}

/// A send's place among those of its slot.
#[derive(Copy, Clone, Debug)]
pub(super) struct Ticket {
    slot: u32,
    /// Sends accepted before it.
    before: u64,
    /// The slot's tag then.
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
    /// How many have ever been posted.
    posted_count: u64,
}

struct Slot {
    tag: u64,
    /// What the next notifier is called.
    sequence: u32,
    notifier: Option<usize>,
    /// Sends that are over and before which all are, counted without end.
    passed: u64,
    /// Those accepted after them, in order.
    sends: IndexedQueue<Accepted>,
}

#[derive(Default)]
struct Accepted {
    finished: bool,
    /// A flush waits for this one and all before it.
    flush: bool,
}

struct Notifier {
    tag: u64,
    /// Sends accepted before the first that is attached.
    first: u64,
    sequence: u32,
    attached: usize,
    closed: bool,
}

impl Slot {
    /// Sends accepted so far.
    fn accepted(&self) -> u64 {
        self.passed + self.sends.len() as u64
    }

    /// The send before which so many were accepted, unless it has been passed.
    fn send(&mut self, before: u64) -> Option<&mut Accepted> {
        let ahead = before.wrapping_sub(self.passed);
        self.sends.get_mut(ahead as usize)
    }

    /// Passes what is over, until something is not. Whether flushes were reached on the way.
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
    /// One slot for each tag.
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

    /// Whether there is such a slot.
    pub(super) fn check(&self, slot: u32) -> Result<(), NoSuchSlot> {
        let slots = self.count();
        if slot < slots {
            Ok(())
        } else {
            Err(NoSuchSlot { slot, slots })
        }
    }

    /// The tag of notifiers whose first send is accepted from now on.
    pub(super) fn set_tag(&mut self, slot: u32, tag: u64) -> Result<(), NoSuchSlot> {
        self.slot(slot)?.tag = tag;
        Ok(())
    }

    /// A send to this slot has been accepted.
    pub(super) fn accepted(&mut self, index: u32) -> Ticket {
        let (mut before, mut tag) = (0, 0);
        if let Ok(slot) = self.slot(index) {
            (before, tag) = (slot.accepted(), slot.tag);
            slot.sends.push(Accepted::default());
        }
        Ticket {
            slot: index,
            before,
            tag,
        }
    }

    /// The kernel has executed a send, which flushes if it was to and succeeded. The send is to be
    /// released.
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
            // It was overtaken.
            (notifier.first, notifier.tag) = (ticket.before, ticket.tag);
        }
        self.finish(ticket);
        Some(Attached(index))
    }

    /// A send ends without having been executed.
    pub(super) fn abandoned(&mut self, ticket: Ticket) {
        self.finish(ticket);
    }

    /// Sends need not be over in the order in which they were accepted.
    fn finish(&mut self, ticket: Ticket) {
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

    /// Closes the notifier that is in the slot, if there is one.
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

    /// A send's buffer is free.
    pub(super) fn released(&mut self, Attached(notifier): Attached) {
        if let Some(found) = self.notifiers.get_mut(notifier) {
            found.attached = found.attached.saturating_sub(1);
            self.post_if_done(notifier);
        }
    }

    /// Flushes the slots of a range, each after the sends that were accepted before.
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

    /// The oldest notification that has not been taken.
    pub(super) fn next(&mut self) -> Option<Notification> {
        self.posted.pop_front()
    }

    /// How many have been posted, taken or not.
    pub(super) fn posted_count(&self) -> u64 {
        self.posted_count
    }

    /// How many are to be taken.
    pub(super) fn waiting(&self) -> usize {
        self.posted.len()
    }
}

#[cfg(test)]
#[path = "slots_tests.rs"]
mod tests;
