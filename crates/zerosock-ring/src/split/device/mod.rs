//! The device half of a split virtqueue.
//!
//! # Invariants
//! - Everything that the driver can write is read once into a private copy, checked, and only the
//!   copy is used.
//! - A malformed chain affects no other chain; a malformed ring stops the queue; neither takes more
//!   memory than an honest queue of the same size.
//! - A chain can have as many descriptors as the table, also in a loop, and return at once. Callers
//!   bound the time that this takes by [`DeviceQueue::walked`].
//! - Only `complete` and the calls in `device/publish.rs` write into the used ring.
//! - Each chain that is popped, unpopped or completed is written down, if there is a record for it: see
//!   `device/inflight.rs`.
//! - Every write into the driver's memory is marked in the log, if there is one: buffers and elements
//!   of the used ring in `complete`, its other words where they are written.

use std::sync::Arc;

mod front;
mod inflight;
mod publish;
mod single;

pub use self::single::{Single, Singles};
use super::chain::{Chain, ChainFault, LongChain, Pool};
use super::index::{Consumer, IndexJump, Producer};
use super::layout::{
    DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE, DESC_LEN, Descriptor, QueueConfig, QueueError,
};
use super::record::InflightRecord;
use super::rings::{Addresses, Rings};
use crate::dirty::DirtyLog;
use crate::memory::Memory;
use crate::slice::Piece;
use crate::sync::Ordering;
pub use front::{FrontChain, FrontToken};

/// Most descriptors of a chain with an indirect table, if the queue size is less. The specification
/// says the queue size; Linux drivers exceed it on small queues, and vhost in the kernel accepts as
/// many as a `writev` does, 1024.
const MAX_INDIRECT: u16 = 1024;

/// How many chains ahead of the one popped the first cache lines are prefetched.
const PREFETCH_DISTANCE: u16 = 8;

/// An element of the used ring that was not written since the queue started: no head is so large.
const UNWRITTEN: u64 = u64::MAX;

/// What a chain costs at least, in units of [`DeviceQueue::walked`].
const CHAIN_COST: u32 = 8;

/// Why a posted chain was not popped: always the peer's fault.
#[derive(Debug, thiserror::Error)]
pub enum PopError {
    /// The chain is malformed ([`Chain::fault`] says why); complete it with 0. The queue continues.
    #[error("malformed descriptor chain")]
    Malformed(Chain),
    /// The ring is malformed: the queue stops.
    #[error("broken queue: {0}")]
    Broken(BrokenReason),
}

/// Why a queue is broken.
#[derive(Copy, Clone, Eq, PartialEq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BrokenReason {
    /// The available index is ahead of us by more chains than the driver can have left.
    #[error("the driver announces more buffers than the queue has: it may have cleared its rings")]
    IndexJump,
    /// A head is outside the descriptor table.
    #[error("the driver announces descriptor {0}, which the queue does not have")]
    Head(u16),
    /// There was no memory for the pieces of a chain. To go on without it would lose its bytes.
    #[error("no memory for a descriptor chain")]
    NoMemory,
}

/// The device half of a split virtqueue: takes chains, and returns them in any order.
///
/// How to drive it: after a kick, [`disable_notifications`](Self::disable_notifications); then
/// [`pop`](Self::pop) until it returns `None`, [`complete`](Self::complete) chains, at once or
/// later and in any order, and [`publish`](Self::publish) once per batch, notifying the driver if
/// it returns true; then [`enable_notifications`](Self::enable_notifications), and begin again if
/// it returns true. The suppression state of a new queue is unknown: enable (or disable) once.
///
/// Cost per batch: one load of the driver's index, one store of ours and one fence; per chain: one
/// read of each ring entry and descriptor. Chains of one or two plain descriptors take no vector;
/// for others nothing is allocated once each recycled vector has had its longest chain (up to 256
/// pieces).
#[derive(Debug)]
pub struct DeviceQueue {
    rings: Rings,
    config: QueueConfig,
    avail: Consumer,
    used: Producer,
    /// Chains popped and not completed. Wider than necessary: if it had the same type as
    /// `held_descriptors`, the compiler would load both at once, right behind separate stores.
    outstanding: u32,
    /// Descriptors of the queue's table in outstanding chains. At most the size, so that a driver
    /// that puts one descriptor into many chains cannot make us hold more pieces than an honest
    /// one.
    held_descriptors: u16,
    broken: Option<BrokenReason>,
    malformed: u64,
    walked: u32,
    /// The regions of the last chain's first and second buffer.
    hint: u32,
    next_hint: u32,
    pool: Pool,
    /// Used elements as last written ([`element_word`]): an unchanged element is not written, so that
    /// a ring with buffers that return in order stays in both caches.
    used_cache: Vec<u64>,
    /// Pieces of the indirect table being walked.
    table: Vec<Piece>,
    /// Where popped chains are written down.
    inflight: Option<InflightRecord>,
    /// Where writes into the driver's memory are marked.
    log: Option<Arc<DirtyLog>>,
    /// The guest address by which writes into the used ring are marked; None: they are not.
    used_log: Option<u64>,
}

impl DeviceQueue {
    /// Checks the configuration and resolves the rings' addresses.
    ///
    /// The used index continues at that of the used ring, as a restarted device must, if that is at
    /// most a queue size behind `config.base`; else at `config.base`.
    ///
    /// # Errors
    /// [`QueueError`]: the size or an address is refused; the fault of the configuration.
    pub fn new(mem: Arc<Memory>, config: &QueueConfig) -> Result<DeviceQueue, QueueError> {
        let rings = resolve(mem, config)?;
        let used_copy = u16::from_le(rings.used_words().index.load(Ordering::Relaxed));
        let lost = config.base.wrapping_sub(used_copy);
        let used_base = if lost <= config.size {
            used_copy
        } else {
            config.base
        };
        let size = usize::from(config.size);
        let mut written = Vec::new();
        let reserved = written.try_reserve_exact(size);
        reserved.map_err(|_| QueueError::NoMemory(config.size))?;
        written.resize(size, UNWRITTEN);
        Ok(DeviceQueue {
            rings,
            config: *config,
            avail: Consumer::new(config.base),
            used: Producer::new(used_base),
            outstanding: 0,
            held_descriptors: 0,
            broken: None,
            malformed: 0,
            walked: 0,
            hint: 0,
            next_hint: 0,
            pool: Pool::default(),
            used_cache: written,
            table: Vec::new(),
            inflight: None,
            log: None,
            used_log: None,
        })
    }

    /// The memory that chains popped now point into.
    #[inline]
    pub fn memory(&self) -> &Arc<Memory> {
        self.rings.memory()
    }

    /// Number of descriptors.
    #[inline]
    pub fn size(&self) -> u16 {
        self.rings.size()
    }

    /// Whether a chain can have its descriptors in a table of its own.
    #[inline]
    pub fn has_indirect(&self) -> bool {
        self.config.indirect
    }

    /// Next available index to pop: what GET_VRING_BASE answers.
    #[inline]
    pub fn base(&self) -> u16 {
        self.avail.next()
    }

    /// Chains popped and not yet completed.
    #[inline]
    pub fn outstanding(&self) -> u16 {
        // At most the size: `available` sees to it.
        self.outstanding as u16
    }

    /// Malformed chains seen so far.
    #[inline]
    pub fn malformed(&self) -> u64 {
        self.malformed
    }

    /// The work of popping since [`reset_walked`](Self::reset_walked): descriptors and pieces of
    /// malformed chains and of those with more than two buffers, and a constant for each of them.
    #[inline]
    pub fn walked(&self) -> u32 {
        self.walked
    }

    /// Counts [`walked`](Self::walked) from 0 again.
    #[inline]
    pub fn reset_walked(&mut self) {
        self.walked = 0;
    }

    /// Why the queue is broken, if it is.
    #[inline]
    pub fn broken(&self) -> Option<BrokenReason> {
        self.broken
    }

    /// Chains posted and not yet popped, as far as known: the driver's index is read only when all
    /// chains seen have been popped. 0 for a broken queue.
    #[inline]
    pub fn available(&mut self) -> u16 {
        if self.broken.is_some() {
            return 0;
        }
        // A driver has at most `size` chains posted, popped ones included: a chain has at least one
        // descriptor, and returns to the driver after `complete`.
        let limit = self.size().saturating_sub(self.outstanding());
        match self.avail.available(self.rings.avail_words(), limit) {
            Ok(count) => count,
            Err(IndexJump) => {
                self.broken = Some(BrokenReason::IndexJump);
                0
            }
        }
    }

    /// Chains posted and not yet popped; always reads the driver's index. 0 for a broken queue.
    #[inline]
    pub fn posted(&mut self) -> u16 {
        if self.broken.is_some() {
            return 0;
        }
        let limit = self.size().saturating_sub(self.outstanding());
        match self.avail.refresh(self.rings.avail_words(), limit) {
            Ok(count) => count,
            Err(IndexJump) => {
                self.broken = Some(BrokenReason::IndexJump);
                0
            }
        }
    }

    /// The driver's index, unchecked: it differs from an earlier one if chains were posted meanwhile.
    #[inline]
    pub fn driver_index(&self) -> u16 {
        u16::from_le(self.rings.avail_words().index.load(Ordering::Relaxed))
    }

    /// Takes the next chain; None if none is posted.
    ///
    /// # Errors
    /// [`PopError::Malformed`] has a chain to be completed with 0, after which popping continues.
    /// After [`PopError::Broken`] every call returns it, but chains popped before can still be
    /// completed and published.
    #[inline(always)] // saves a copy of the chain
    pub fn pop(&mut self) -> Result<Option<Chain>, PopError> {
        match self.pop_plain(0) {
            Some(chain) => Ok(Some(chain)),
            None => self.pop_any(),
        }
    }

    /// The next chain, if it is one of one or two plain descriptors in the regions of the last one,
    /// with at least `room` writable bytes. `None` says nothing about the queue: ask
    /// [`pop`](Self::pop), which reads everything again.
    #[inline(always)] // as `pop`
    pub fn pop_plain(&mut self, room: u32) -> Option<Chain> {
        if self.available() == 0 {
            return None;
        }
        let position = self.avail.next();
        let chain = self.pop_short(self.rings.avail_head(position), position)?;
        if chain.writable_len() < room {
            return None;
        }
        self.avail.advance();
        self.outstanding += 1;
        self.held_descriptors += chain.descriptors;
        self.record_popped(chain.head);
        if self.avail.seen() >= PREFETCH_DISTANCE {
            self.prefetch(position.wrapping_add(PREFETCH_DISTANCE));
        }
        Some(chain)
    }

    /// The next chain, of any form.
    #[inline(never)]
    fn pop_any(&mut self) -> Result<Option<Chain>, PopError> {
        if self.available() == 0 {
            return match self.broken {
                None => Ok(None),
                Some(reason) => Err(PopError::Broken(reason)),
            };
        }
        let position = self.avail.next();
        let head_copy = self.rings.avail_head(position);
        if head_copy >= self.size() {
            let reason = BrokenReason::Head(head_copy);
            self.broken = Some(reason);
            return Err(PopError::Broken(reason));
        }
        self.avail.advance();
        self.outstanding += 1;
        self.record_popped(head_copy);
        if self.avail.seen() >= PREFETCH_DISTANCE {
            self.prefetch(position.wrapping_add(PREFETCH_DISTANCE));
        }
        let (many, sound) = self.pop_long(head_copy);
        let chain = Chain::from_long(head_copy, position, many);
        if !sound {
            return Err(PopError::Malformed(chain));
        }
        self.held_descriptors += chain.descriptors;
        Ok(Some(chain))
    }

    /// The chain, in the common case: one or two plain descriptors without a fault, in the regions
    /// of the last one. In other cases nothing is kept.
    #[inline(always)] // as `pop`
    fn pop_short(&self, head: u16, position: u16) -> Option<Chain> {
        let mem = self.rings.memory();
        let first_copy = self.rings.descriptor(head)?;
        let first = mem.piece_in(self.hint, first_copy.addr, first_copy.len)?;
        let writable = first_copy.has(DESC_F_WRITE);
        let free = self.size() - self.held_descriptors;
        if !first_copy.has(DESC_F_NEXT | DESC_F_INDIRECT) {
            let pieces = [first, Piece::NONE];
            return (free >= 1)
                .then(|| Chain::from_uniform(head, position, pieces, first.len, writable));
        }
        let second_copy = self.rings.descriptor(first_copy.next)?;
        let second = mem.piece_in(self.next_hint, second_copy.addr, second_copy.len)?;
        let both = [(first, writable), (second, second_copy.has(DESC_F_WRITE))];
        let plain = !first_copy.has(DESC_F_INDIRECT)
            && !second_copy.has(DESC_F_NEXT | DESC_F_INDIRECT)
            && free >= 2;
        if plain {
            Chain::from_two(head, position, both)
        } else {
            None
        }
    }

    /// Prefetches the first cache lines of a later chain, which the driver's core wrote: fetching
    /// each takes longer than handling a small packet. The values read here are used for nothing
    /// else.
    #[inline]
    fn prefetch(&self, position: u16) {
        let mem = self.rings.memory();
        let Some(first_copy) = self.rings.descriptor(self.rings.avail_head(position)) else {
            return;
        };
        let write = first_copy.has(DESC_F_WRITE);
        mem.prefetch(self.hint, first_copy.addr, write);
        if first_copy.has(DESC_F_NEXT)
            && let Some(second_copy) = self.rings.descriptor(first_copy.next)
        {
            mem.prefetch(self.next_hint, second_copy.addr, write);
        }
    }

    /// The contents of any chain, and whether it is well-formed.
    #[inline(never)]
    fn pop_long(&mut self, head: u16) -> (Box<LongChain>, bool) {
        let mut many = self.pool.take();
        let result = self.walk(&mut many, head);
        // Each descriptor of an indirect table has given a piece.
        let steps = u32::from(many.descriptors) + many.pieces.len() as u32;
        self.walked = self.walked.saturating_add(CHAIN_COST + steps);
        if let Err(fault) = result {
            self.malformed += 1;
            if fault == ChainFault::NoMemory {
                self.broken = Some(BrokenReason::NoMemory);
            }
            many.set_fault(fault);
        } else if let [first, second] = *many.pieces {
            (self.hint, self.next_hint) = (first.region, second.region);
        }
        (many, result.is_ok())
    }

    /// Follows the chain from its head, copying each descriptor once.
    fn walk(&mut self, chain: &mut LongChain, head: u16) -> Result<(), ChainFault> {
        let limit = self.size();
        let mut index = head;
        loop {
            if chain.descriptors == limit {
                return Err(ChainFault::TooLong);
            }
            chain.descriptors += 1;
            let Some(descriptor_copy) = self.rings.descriptor(index) else {
                return Err(ChainFault::Next(index));
            };
            if descriptor_copy.has(DESC_F_INDIRECT) {
                self.walk_indirect(chain, descriptor_copy)?;
                break;
            }
            let writable = descriptor_copy.has(DESC_F_WRITE);
            chain.append(
                self.rings.memory(),
                &mut self.hint,
                descriptor_copy,
                writable,
            )?;
            if !descriptor_copy.has(DESC_F_NEXT) {
                break;
            }
            index = descriptor_copy.next;
        }
        if chain.descriptors > limit - self.held_descriptors {
            return Err(ChainFault::Shared);
        }
        Ok(())
    }

    /// Follows an indirect table, which ends the chain (2.7.5.3). WRITE on the descriptor that
    /// refers to it has no meaning (2.7.5.3.2).
    fn walk_indirect(
        &mut self,
        chain: &mut LongChain,
        table_copy: Descriptor,
    ) -> Result<(), ChainFault> {
        if !self.config.indirect {
            return Err(ChainFault::IndirectRefused);
        }
        if table_copy.has(DESC_F_NEXT) {
            return Err(ChainFault::IndirectNext);
        }
        if table_copy.len == 0 || !(table_copy.len as usize).is_multiple_of(DESC_LEN) {
            return Err(ChainFault::IndirectLength(table_copy.len));
        }
        let limit = self.size().max(MAX_INDIRECT);
        // Entries of the table; the descriptors in front of it count too.
        let Some(entries) = u16::try_from(table_copy.len as usize / DESC_LEN)
            .ok()
            .filter(|entries| *entries <= limit - (chain.descriptors - 1).min(limit))
        else {
            return Err(ChainFault::TooLong);
        };
        let mem = self.rings.memory();
        self.table.clear();
        let table = &mut self.table;
        mem.translate_near(&mut self.hint, table_copy.addr, table_copy.len, |piece| {
            table.push(piece);
        })
        .map_err(ChainFault::Address)?;
        // Nearly always one piece: then entries are read without a search.
        let whole = match *self.table {
            [piece] => mem.slice(piece),
            _ => None,
        };
        let mut index = 0u16;
        for _ in 0..entries {
            if index >= entries {
                return Err(ChainFault::Next(index));
            }
            let offset = DESC_LEN * usize::from(index);
            let entry_copy = match whole.and_then(|slice| slice.read_array(offset)) {
                Some(bytes) => Descriptor::from_bytes(bytes),
                None => {
                    let mut bytes = [0; DESC_LEN];
                    mem.read(&self.table, offset, &mut bytes);
                    Descriptor::from_bytes(bytes)
                }
            };
            if entry_copy.has(DESC_F_INDIRECT) {
                return Err(ChainFault::IndirectNested);
            }
            chain.append(
                mem,
                &mut self.hint,
                entry_copy,
                entry_copy.has(DESC_F_WRITE),
            )?;
            if !entry_copy.has(DESC_F_NEXT) {
                return Ok(());
            }
            index = entry_copy.next;
        }
        Err(ChainFault::TooLong)
    }

    /// Undoes the pop of the last chain. Several are unpopped in the reverse order of popping;
    /// completions in between do not matter.
    ///
    /// # Panics
    /// If it is not the chain popped last: the caller's mistake.
    #[inline]
    pub fn unpop(&mut self, chain: Chain) {
        assert_eq!(
            chain.position.wrapping_add(1),
            self.avail.next(),
            "only the chain popped last can be unpopped"
        );
        self.avail.retreat();
        self.record_unpopped(chain.head);
        self.release(chain);
    }

    /// Puts the chain into the used ring with the number of bytes written into it; not visible
    /// before [`publish`](Self::publish). Any order is allowed. Every write into peer memory ends
    /// here, and is marked in the log.
    ///
    /// `written` counts from the start of the writable pieces; a larger number is reduced to their
    /// length. What was written to a chain that is unpopped, or beyond `written`, is not marked: the
    /// driver may not read it.
    #[inline]
    pub fn complete(&mut self, chain: Chain, written: u32) {
        if self.log.is_some() {
            return self.complete_logged(chain, written);
        }
        let written = within(&chain, written);
        self.add_used(chain.head, written);
        self.record_completed(chain.head);
        self.release(chain);
    }

    /// Writes an element of the used ring. Returns its index if the ring has changed.
    #[inline(always)] // every packet
    fn add_used(&mut self, head: u16, written: u32) -> Option<u16> {
        let (position, element) = (self.used.next(), element_word(head, written));
        // The size is a power of two.
        let index = position & (self.size() - 1);
        let changed = match self.used_cache.get_mut(usize::from(index)) {
            Some(old) if *old == element => false,
            old => {
                self.rings
                    .set_used_element(position, u32::from(head), written);
                if let Some(old) = old {
                    *old = element;
                }
                true
            }
        };
        self.used.advance();
        changed.then_some(index)
    }

    #[inline]
    fn release(&mut self, chain: Chain) {
        debug_assert!(self.outstanding > 0, "a chain of another queue");
        self.outstanding = self.outstanding.saturating_sub(1);
        self.held_descriptors = self.held_descriptors.saturating_sub(chain.descriptors);
        if let Some(many) = chain.long {
            self.pool.put(many);
        }
    }

    #[cfg(test)]
    pub(super) fn pool_capacity(&self) -> usize {
        self.pool.capacity()
    }

    /// Whether the driver has requested a notification for chains that are completed and not yet
    /// published, or for `more` further ones: one load. It may miss a request of this moment;
    /// [`publish`](Self::publish) does not.
    #[inline]
    pub fn would_notify(&self, more: u16) -> bool {
        let words = self.rings.used_words();
        self.used.would_notify(more, words, self.config.event_idx)
    }

    /// Whether [`pop`](Self::pop) would return a chain or an error: one load, nothing is checked or
    /// changed. For callers that spin.
    #[inline]
    pub fn has_available(&self) -> bool {
        self.avail.has_entries(self.rings.avail_words()) || self.broken.is_some()
    }

    /// Moves to a new memory table with the same ring addresses and indices. Outstanding chains can
    /// be completed or unpopped afterwards, but their pieces belong to the old memory: keep it
    /// while they are read or written.
    ///
    /// # Errors
    /// [`QueueError`]: the rings do not lie in the new memory; the queue is as it was.
    pub fn remap(&mut self, mem: Arc<Memory>) -> Result<(), QueueError> {
        self.rings = resolve(mem, &self.config)?;
        (self.hint, self.next_hint) = (0, 0);
        self.used_cache.fill(UNWRITTEN);
        Ok(())
    }
}

/// An element of the used ring as one word, to be compared at once.
#[inline]
fn element_word(head: u16, written: u32) -> u64 {
    u64::from(head) | u64::from(written) << 32
}

/// The number of written bytes, at most those of the chain.
#[inline]
fn within(chain: &Chain, written: u32) -> u32 {
    debug_assert!(
        written <= chain.writable_len(),
        "written past the end of the chain"
    );
    written.min(chain.writable_len())
}

fn resolve(mem: Arc<Memory>, config: &QueueConfig) -> Result<Rings, QueueError> {
    let addresses = Addresses {
        desc: config.desc,
        avail: config.avail,
        used: config.used,
    };
    Rings::resolve(mem, config.size, addresses, Memory::at_user_addr)
}
