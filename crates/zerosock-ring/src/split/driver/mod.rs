//! The driver half of a split virtqueue.
//!
//! # Invariants
//! - The descriptor table is only written here, never read back, since the device could change it.
//! - Private state alone says which chains are posted, how long they are, and how much the device
//!   may have written.
//! - A used element is valid only if it names a posted chain.

#[cfg(test)]
mod indirect_tests;
mod types;

use std::sync::Arc;

use super::index::{Consumer, IndexJump, Producer};
use super::layout::{DESC_F_NEXT, Descriptor, DriverLayout, QueueError};
use super::rings::{Addresses, Rings};
use crate::memory::Memory;
use crate::sync::Ordering;

pub use self::types::{AddError, Buffer, DriverError, FixedChain, Used};

/// The private state of one descriptor.
#[derive(Copy, Clone, Debug, Default)]
struct Slot {
    /// The next descriptor of the chain, or of the free list.
    next: u16,
    state: State,
    /// In the head of a chain: its number of descriptors.
    count: u16,
    /// In the head of a chain: bytes that the device may write.
    writable_len: u32,
    /// In the head of a fixed chain: the length in its first descriptor.
    len: u32,
    /// In the head of a chain: the caller's token.
    token: u64,
    /// In the head of a chain: the number of chains added before it.
    serial: u64,
}

/// The role of a descriptor.
#[derive(Copy, Clone, Eq, PartialEq, Debug, Default)]
enum State {
    /// Free, or not the head of its chain.
    #[default]
    NotHead,
    /// Head of a posted chain, which is freed when the device returns it.
    Posted,
    /// Head of a fixed chain that is not posted.
    FixedIdle,
    /// Head of a posted fixed chain.
    FixedPosted,
}

/// The driver half of a split virtqueue: posts chains, and takes them back in any order.
///
/// How to drive it: [`add`](Self::add) chains, [`publish`](Self::publish) once per batch and kick
/// the device if it returns true; [`poll`](Self::poll) until it returns `None`; before waiting,
/// [`enable_notifications`](Self::enable_notifications), and poll again if it returns true.
///
/// A caller that posts the same buffers again and again writes their descriptors once, by
/// [`set_chain`](Self::set_chain), and posts them by [`add_fixed`](Self::add_fixed). The
/// descriptors are then never written again, and the device's cache can keep them. If the chains
/// are returned in order, the cache can keep the ring's entries too, because an unchanged entry is
/// not written.
#[derive(Debug)]
pub struct DriverQueue {
    rings: Rings,
    event_idx: bool,
    avail: Producer,
    used: Consumer,
    slots: Vec<Slot>,
    /// First free descriptor; valid while `free` is not 0.
    free_head: u16,
    /// Number of free descriptors.
    free: u16,
    /// Chains added since the queue was made.
    added: u64,
    /// The value of `added` at the last publish.
    published: u64,
    /// Chains that the device has returned.
    returned: u64,
    broken: Option<DriverError>,
    /// The available ring's entries as last written.
    avail_cache: Vec<u16>,
}

impl DriverQueue {
    /// Zeroes the rings and resolves their addresses.
    ///
    /// # Errors
    /// [`QueueError`]: the size or an address is refused; the caller's fault.
    pub fn new(
        mem: Arc<Memory>,
        layout: DriverLayout,
        event_idx: bool,
    ) -> Result<DriverQueue, QueueError> {
        Self::with_base(mem, layout, event_idx, 0)
    }

    /// As [`new`](Self::new), with both indices starting at `base`; the device half must start
    /// there too.
    ///
    /// # Errors
    /// As for [`new`](Self::new).
    pub fn with_base(
        mem: Arc<Memory>,
        layout: DriverLayout,
        event_idx: bool,
        base: u16,
    ) -> Result<DriverQueue, QueueError> {
        let addresses = Addresses {
            desc: layout.desc,
            avail: layout.avail,
            used: layout.used,
        };
        let rings = Rings::resolve(mem, layout.size, addresses, Memory::at_guest_addr)?;
        for index in 0..layout.size {
            rings.set_descriptor(
                index,
                Descriptor {
                    addr: 0,
                    len: 0,
                    flags: 0,
                    next: 0,
                },
            );
            rings.set_avail_head(index, 0);
            rings.set_used_element(index, 0, 0);
        }
        for words in [rings.avail_words(), rings.used_words()] {
            words.flags.store(0, Ordering::Relaxed);
            words.event.store(base.to_le(), Ordering::Relaxed);
            // The device learns of the queue later, by means that order memory; Release is for a
            // device that polls.
            words.index.store(base.to_le(), Ordering::Release);
        }
        let slots = (0..layout.size)
            .map(|index| Slot {
                next: index.wrapping_add(1),
                ..Slot::default()
            })
            .collect();
        Ok(DriverQueue {
            rings,
            event_idx,
            avail: Producer::new(base),
            used: Consumer::new(base),
            slots,
            free_head: 0,
            free: layout.size,
            added: 0,
            published: 0,
            returned: 0,
            broken: None,
            avail_cache: vec![0; usize::from(layout.size)],
        })
    }

    /// The memory the queue lies in.
    #[inline]
    pub fn memory(&self) -> &Arc<Memory> {
        self.rings.memory()
    }

    /// Number of descriptors.
    #[inline]
    pub fn size(&self) -> u16 {
        self.rings.size()
    }

    /// Free descriptors. Every buffer of [`add`](Self::add) takes one until its chain is returned.
    #[inline]
    pub fn free(&self) -> u16 {
        self.free
    }

    /// Posts a chain, one descriptor per buffer, readable ones first; not visible before
    /// [`publish`](Self::publish). The chain is returned with `token`. Returns its head.
    ///
    /// # Errors
    /// [`AddError`]; nothing was posted.
    #[inline]
    pub fn add(&mut self, buffers: &[Buffer], token: u64) -> Result<u16, AddError> {
        let writable_len = self.check(buffers)?;
        let descriptors = buffers.iter().map(|buffer| buffer.descriptor());
        // At most the size, so it fits.
        self.add_chain(buffers.len() as u16, writable_len, descriptors, token)
    }

    /// Posts a chain of `count` descriptors, of which the device may write `writable_len` bytes.
    #[inline]
    fn add_chain(
        &mut self,
        count: u16,
        writable_len: u32,
        descriptors: impl Iterator<Item = Descriptor>,
        token: u64,
    ) -> Result<u16, AddError> {
        if count > self.free {
            return Err(AddError::Full);
        }
        let head = self.write_chain(count, descriptors);
        if let Some(slot) = self.slots.get_mut(usize::from(head)) {
            *slot = Slot {
                next: slot.next,
                state: State::Posted,
                count,
                writable_len,
                len: 0,
                token,
                serial: self.added,
            };
        }
        self.post(head);
        Ok(head)
    }

    /// Writes the descriptors of a fixed chain, which it keeps for good and which are never written
    /// again. It is returned with `token` each time. Post it by [`add_fixed`](Self::add_fixed).
    ///
    /// # Errors
    /// [`AddError`], as for [`add`](Self::add); no descriptor was taken.
    pub fn set_chain(&mut self, buffers: &[Buffer], token: u64) -> Result<FixedChain, AddError> {
        let writable_len = self.check(buffers)?;
        // At most the size, so it fits.
        let count = buffers.len() as u16;
        if count > self.free {
            return Err(AddError::Full);
        }
        let head = self.write_chain(count, buffers.iter().map(|buffer| buffer.descriptor()));
        if let Some(slot) = self.slots.get_mut(usize::from(head)) {
            *slot = Slot {
                next: slot.next,
                state: State::FixedIdle,
                count,
                writable_len,
                len: buffers.first().map_or(0, |buffer| buffer.len),
                token,
                serial: 0,
            };
        }
        // `check` has added them up.
        let len = buffers.iter().map(|buffer| buffer.len).sum();
        Ok(FixedChain { head, len })
    }

    /// Posts a fixed chain; not visible before [`publish`](Self::publish).
    ///
    /// # Errors
    /// [`AddError::NotFixed`] if it is posted already, or belongs to another queue; nothing was
    /// posted.
    #[inline]
    pub fn add_fixed(&mut self, chain: FixedChain) -> Result<(), AddError> {
        let slot = self
            .slots
            .get_mut(usize::from(chain.head))
            .filter(|slot| slot.state == State::FixedIdle)
            .ok_or(AddError::NotFixed)?;
        slot.state = State::FixedPosted;
        slot.serial = self.added;
        self.post(chain.head);
        Ok(())
    }

    /// As [`add_fixed`](Self::add_fixed), for a chain of one readable buffer, of which the device
    /// gets the first `len` bytes this time. The descriptor is written only if its length changes.
    ///
    /// # Errors
    /// [`AddError::Empty`], [`AddError::TooMuch`]: `len` is 0 or more than the buffer has.
    /// [`AddError::NotFixed`] as for `add_fixed`, and if the chain has other buffers. Nothing was
    /// posted.
    #[inline]
    pub fn add_fixed_part(&mut self, chain: FixedChain, len: u32) -> Result<(), AddError> {
        if len == 0 || len > chain.len {
            return Err(if len == 0 {
                AddError::Empty
            } else {
                AddError::TooMuch
            });
        }
        let slot = self
            .slots
            .get_mut(usize::from(chain.head))
            .filter(|slot| slot.state == State::FixedIdle)
            .filter(|slot| slot.count == 1 && slot.writable_len == 0)
            .ok_or(AddError::NotFixed)?;
        if slot.len != len {
            slot.len = len;
            self.rings.set_readable_len(chain.head, len);
        }
        slot.state = State::FixedPosted;
        slot.serial = self.added;
        self.post(chain.head);
        Ok(())
    }

    /// Puts a head into the available ring.
    #[inline]
    fn post(&mut self, head: u16) {
        let position = self.avail.next();
        // The size is a power of two.
        let index = usize::from(position & (self.size() - 1));
        match self.avail_cache.get_mut(index) {
            // The entry still has this value, unless the device changed it and harms itself.
            Some(old) if *old == head => {}
            old => {
                self.rings.set_avail_head(position, head);
                if let Some(old) = old {
                    *old = head;
                }
            }
        }
        self.avail.advance();
        self.added += 1;
    }

    /// Takes `count` free descriptors, one for each given, and writes them; returns the first.
    #[inline]
    fn write_chain(&mut self, count: u16, descriptors: impl Iterator<Item = Descriptor>) -> u16 {
        let head = self.free_head;
        let mut index = head;
        let mut left = count;
        for mut descriptor in descriptors {
            // Free descriptors are linked already, in private memory.
            let next = self
                .slots
                .get(usize::from(index))
                .map_or(0, |slot| slot.next);
            left -= 1;
            if left > 0 {
                descriptor.flags |= DESC_F_NEXT;
                descriptor.next = next;
            }
            self.rings.set_descriptor(index, descriptor);
            index = next;
        }
        self.free_head = index;
        self.free -= count;
        head
    }

    /// Checks that the buffers make a valid chain; returns its writable length.
    fn check(&self, buffers: &[Buffer]) -> Result<u32, AddError> {
        if buffers.is_empty() {
            return Err(AddError::Empty);
        }
        if buffers.len() > usize::from(self.size()) {
            return Err(AddError::TooLong);
        }
        let mut total = 0u32;
        let mut writable_len = 0;
        for buffer in buffers {
            if buffer.len == 0 {
                return Err(AddError::Empty);
            }
            total = total.checked_add(buffer.len).ok_or(AddError::TotalLength)?;
            if buffer.writable {
                writable_len += buffer.len;
            } else if writable_len > 0 {
                return Err(AddError::Order);
            }
        }
        Ok(writable_len)
    }

    /// Makes all added chains visible to the device. True: kick it. With event index the first
    /// batch always needs a kick.
    #[must_use = "the device may wait for a kick"]
    #[inline]
    pub fn publish(&mut self) -> bool {
        self.published = self.added;
        self.avail.publish(self.rings.avail_words(), self.event_idx)
    }

    /// Takes the next returned chain; `None` if there is none.
    ///
    /// # Errors
    /// [`DriverError`]: the device broke the protocol; every later call returns the same error.
    #[inline]
    pub fn poll(&mut self) -> Result<Option<Used>, DriverError> {
        if let Some(error) = self.broken {
            return Err(error);
        }
        let result = self.take();
        if let Err(error) = result {
            self.broken = Some(error);
        }
        result
    }

    /// The token of the chain that [`poll`](Self::poll) would return after `ahead` others, if it is
    /// known to be there: for prefetching its memory. Unchecked, unlike the result of `poll`: use
    /// it for nothing else.
    #[inline]
    pub fn peek_token(&self, ahead: u16) -> Option<u64> {
        if self.used.seen() <= ahead {
            return None;
        }
        let (id_copy, _) = self
            .rings
            .used_element(self.used.next().wrapping_add(ahead));
        Some(self.slots.get(usize::try_from(id_copy).ok()?)?.token)
    }

    #[inline]
    fn take(&mut self) -> Result<Option<Used>, DriverError> {
        // At most the size, as every chain has a descriptor.
        let held = (self.published - self.returned) as u16;
        match self.used.available(self.rings.used_words(), held) {
            Ok(0) => return Ok(None),
            Ok(_) => {}
            Err(IndexJump) => return Err(DriverError::IndexJump),
        }
        let (id_copy, len_copy) = self.rings.used_element(self.used.next());
        let slot = usize::try_from(id_copy)
            .ok()
            .and_then(|id| self.slots.get_mut(id))
            .filter(|slot| slot.serial < self.published)
            .ok_or(DriverError::Id(id_copy))?;
        let used = Used {
            token: slot.token,
            len: len_copy.min(slot.writable_len),
            claimed: len_copy,
        };
        match slot.state {
            State::FixedPosted => slot.state = State::FixedIdle,
            State::Posted => {
                let chain = *slot;
                self.release(id_copy as u16, chain);
            }
            State::NotHead | State::FixedIdle => return Err(DriverError::Id(id_copy)),
        }
        self.used.advance();
        self.returned += 1;
        Ok(Some(used))
    }

    /// Puts a chain's descriptors back on the free list.
    fn release(&mut self, head: u16, chain: Slot) {
        let mut last = head;
        for _ in 1..chain.count {
            last = self
                .slots
                .get(usize::from(last))
                .map_or(last, |slot| slot.next);
        }
        if let Some(slot) = self.slots.get_mut(usize::from(head)) {
            slot.state = State::NotHead;
        }
        if let Some(slot) = self.slots.get_mut(usize::from(last)) {
            slot.next = self.free_head;
        }
        self.free_head = head;
        self.free += chain.count;
    }

    /// Makes all added chains visible without checking for a kick: for a device that spins, or
    /// before a later [`publish`](Self::publish), which checks for all of them. It saves the fence,
    /// which waits until the other core has given up every cache line written before.
    #[inline]
    pub fn publish_without_notify(&mut self) {
        self.published = self.added;
        self.avail.make_visible(self.rings.avail_words());
    }

    /// Whether [`poll`](Self::poll) would return a chain or an error: one load, nothing is checked
    /// or changed. For callers that spin.
    #[inline]
    pub fn has_used(&self) -> bool {
        self.used.has_entries(self.rings.used_words()) || self.broken.is_some()
    }

    /// Informs the device that calls are not needed.
    #[inline]
    pub fn disable_notifications(&mut self) {
        self.used.disable(self.rings.used_words(), self.event_idx);
    }

    /// Requests notifications again. True: returned chains were not polled, and no notification
    /// will follow for them. False for a broken queue.
    #[must_use = "no notification follows for chains that were returned before"]
    #[inline]
    pub fn enable_notifications(&mut self) -> bool {
        self.used.enable(self.rings.used_words(), self.event_idx) && self.broken.is_none()
    }

    /// As [`enable_notifications`](Self::enable_notifications), but requests a notification only
    /// when `more` chains have been returned beside the next one. True: all of them are there. As
    /// many must be posted, or no notification follows. A device without VIRTIO_F_EVENT_IDX
    /// notifies for the next one.
    #[must_use = "no notification follows for chains that were returned before"]
    #[inline]
    pub fn enable_notifications_after(&mut self, more: u16) -> bool {
        let words = self.rings.used_words();
        self.used.enable_after(words, self.event_idx, more) && self.broken.is_none()
    }
}
