//! Bytes of one connection from the guest that the other end has not taken yet.
//!
//! # Invariants
//! - Held chains precede the overflow; while there is overflow, no new chain is held.
//! - A connection without bytes owns no queue: the few connections with bytes share the queues in
//!   [`QueuePool`].
//!
//! # Operation
//! Bytes stay in the guest's buffers (one held chain each) within bounds: at most `share` chains
//! per connection once the other end has stalled. The rest is copied into an overflow buffer, which
//! credit limits to the advertised `buf_alloc`.

use std::collections::VecDeque;
use zerosock_ring::{Chain, Memory, SliceBuf};

use crate::fallible;

/// Part of a chain's readable bytes.
#[derive(Debug)]
pub(crate) struct HeldChain {
    pub(crate) chain: Chain,
    pub(crate) offset: u32,
    pub(crate) len: u32,
}

/// Empty queues for reuse, so that packets do not allocate and idle connections own no memory.
#[derive(Debug)]
pub(crate) struct QueuePool<T>(Vec<Box<T>>);

/// A container that can be reused by another connection.
pub(crate) trait ReusableQueue: Default {
    /// Whether it is empty.
    fn is_empty(&self) -> bool;

    /// The number of elements that fit without allocation.
    fn capacity(&self) -> usize;
}

/// Queues kept for reuse.
const MAX_POOLED: usize = 64;
/// Largest capacity of a queue that is kept: more elements than one turn adds.
const MAX_POOLED_CAPACITY: usize = 512;

impl<T> Default for QueuePool<T> {
    fn default() -> QueuePool<T> {
        QueuePool(Vec::with_capacity(MAX_POOLED))
    }
}

impl<T: ReusableQueue> QueuePool<T> {
    /// Returns the queue in `place`, filling an empty place from the spares.
    #[inline]
    pub(crate) fn get_or_insert_spare<'a>(&mut self, place: &'a mut Option<Box<T>>) -> &'a mut T {
        place.get_or_insert_with(|| self.0.pop().unwrap_or_default())
    }

    /// Takes the queue in `place` back if it is empty.
    #[inline]
    pub(crate) fn recycle(&mut self, place: &mut Option<Box<T>>) {
        let Some(list) = place.take_if(|list| list.is_empty()) else {
            return;
        };
        if self.0.len() < MAX_POOLED && list.capacity() <= MAX_POOLED_CAPACITY {
            self.0.push(list);
        }
    }
}

/// The bytes of one connection: see the module.
#[derive(Debug, Default)]
pub(crate) struct Outbound(Option<Box<OutboundQueue>>);

/// Waiting bytes: held, then copied.
#[derive(Debug, Default)]
pub(crate) struct OutboundQueue {
    held: VecDeque<HeldChain>,
    held_bytes: usize,
    /// Bytes of the first held chain were taken by a zero-copy send.
    front_sent: bool,
    overflow: Vec<u8>,
    /// Bytes at the front of `overflow` that have been taken.
    taken: usize,
    /// An allocation for a copy failed: the bytes after the held ones are lost, and later bytes
    /// are dropped.
    lost: bool,
}

impl OutboundQueue {
    #[cold]
    fn lose(&mut self) {
        fallible::free(std::mem::take(&mut self.overflow));
        self.taken = 0;
        self.lost = true;
    }
}

impl ReusableQueue for OutboundQueue {
    #[inline]
    fn is_empty(&self) -> bool {
        self.held.is_empty() && self.overflow.is_empty() && !self.lost
    }

    #[inline]
    fn capacity(&self) -> usize {
        self.held.capacity()
    }
}

impl Outbound {
    /// An `Outbound` with these bytes in its overflow.
    pub(crate) fn of_copies(overflow: Vec<u8>) -> Outbound {
        if overflow.is_empty() {
            return Outbound::default();
        }
        Outbound(Some(Box::new(OutboundQueue {
            overflow,
            ..OutboundQueue::default()
        })))
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Waiting bytes, held and copied.
    pub(crate) fn len(&self) -> usize {
        let waiting = |bytes: &OutboundQueue| bytes.held_bytes + bytes.overflow.len() - bytes.taken;
        self.0.as_deref().map_or(0, waiting)
    }

    /// The held chains.
    pub(crate) fn chains(&self) -> impl Iterator<Item = &Chain> {
        let held = self.0.iter().flat_map(|bytes| &bytes.held);
        held.map(|held| &held.chain)
    }

    /// Waiting bytes in held chains.
    pub(crate) fn held_bytes(&self) -> usize {
        self.0.as_ref().map_or(0, |bytes| bytes.held_bytes)
    }

    pub(crate) fn held_chains(&self) -> usize {
        self.0.as_ref().map_or(0, |bytes| bytes.held.len())
    }

    /// Whether bytes were lost to a failed allocation: the connection has to be reset.
    #[inline]
    pub(crate) fn has_lost_bytes(&self) -> bool {
        self.0.as_ref().is_some_and(|bytes| bytes.lost)
    }

    /// Bytes in the private overflow.
    pub(crate) fn overflow_len(&self) -> usize {
        let waiting = |bytes: &OutboundQueue| bytes.overflow.len() - bytes.taken;
        self.0.as_deref().map_or(0, waiting)
    }

    /// Returns an empty queue to `spares`.
    #[inline]
    pub(crate) fn recycle(&mut self, spares: &mut QueuePool<OutboundQueue>) {
        spares.recycle(&mut self.0);
    }

    /// Appends `len` bytes of a chain's readable part. The chain is held if fewer than `share` are
    /// and there is no overflow; else its bytes are copied and the chain is returned for
    /// completion.
    #[inline(always)] // saves copies of the chain
    pub(crate) fn push(
        &mut self,
        mem: &Memory,
        held: HeldChain,
        share: usize,
        spares: &mut QueuePool<OutboundQueue>,
    ) -> Option<Chain> {
        let bytes = spares.get_or_insert_spare(&mut self.0);
        if bytes.lost {
            return Some(held.chain);
        }
        if bytes.overflow.is_empty() && bytes.held.len() < share {
            if bytes.held.try_reserve(1).is_err() {
                bytes.lose();
                return Some(held.chain);
            }
            bytes.held_bytes += held.len as usize;
            bytes.held.push_back(held);
            return None;
        }
        match bytes.overflow.try_reserve(held.len as usize) {
            Ok(()) => copy_out(mem, &held, &mut bytes.overflow),
            Err(_) => bytes.lose(),
        }
        Some(held.chain)
    }

    /// Adds slices of the first `chains` held chains to `out`; returns the bytes covered.
    pub(crate) fn gather<'m, const N: usize>(
        &self,
        mem: &'m Memory,
        chains: usize,
        out: &mut SliceBuf<'m, N>,
    ) -> usize {
        let mut total = 0;
        let held = self.0.iter().flat_map(|bytes| &bytes.held);
        for held in held.take(chains) {
            let covered = mem.slices(
                held.chain.readable(),
                held.offset as usize,
                held.len as usize,
                out,
            );
            total += covered;
            if covered < held.len as usize {
                break;
            }
        }
        total
    }

    /// As `gather`, for at most `len` bytes.
    pub(crate) fn gather_first<'m, const N: usize>(
        &self,
        mem: &'m Memory,
        len: usize,
        out: &mut SliceBuf<'m, N>,
    ) -> usize {
        let mut total = 0;
        for held in self.0.iter().flat_map(|bytes| &bytes.held) {
            let want = (held.len as usize).min(len - total);
            let covered = mem.slices(held.chain.readable(), held.offset as usize, want, out);
            total += covered;
            if covered < want || total == len {
                break;
            }
        }
        total
    }

    /// The copied bytes; to be sent once no chain is held.
    pub(crate) fn overflow(&self) -> &[u8] {
        let bytes = self.0.as_deref();
        let waiting = bytes.and_then(|bytes| bytes.overflow.get(bytes.taken..));
        waiting.unwrap_or_default()
    }

    /// Removes `n` held bytes from the front, which a zero-copy send may have taken. Passes each chain
    /// that is used up to `done`, and whether a zero-copy send has taken bytes of it.
    #[inline]
    pub(crate) fn advance_held(
        &mut self,
        mut n: usize,
        zero_copy: bool,
        mut done: impl FnMut(Chain, bool),
    ) {
        let Some(bytes) = self.0.as_deref_mut() else {
            return;
        };
        bytes.held_bytes -= n;
        while n > 0 {
            let Some(front) = bytes.held.front_mut() else {
                break;
            };
            let take = n.min(front.len as usize);
            front.offset += take as u32;
            front.len -= take as u32;
            n -= take;
            bytes.front_sent |= zero_copy;
            if front.len == 0
                && let Some(held) = bytes.held.pop_front()
            {
                done(held.chain, std::mem::take(&mut bytes.front_sent));
            }
        }
    }

    /// Removes `n` copied bytes from the front. An empty overflow is freed. A non-empty one is
    /// compacted when half of it was taken: it stays below twice the waiting bytes, and each byte
    /// is moved at most once.
    pub(crate) fn advance_overflow(&mut self, n: usize) {
        let Some(bytes) = self.0.as_deref_mut() else {
            return;
        };
        bytes.taken += n;
        if bytes.taken >= bytes.overflow.len() {
            fallible::free(std::mem::take(&mut bytes.overflow));
            bytes.taken = 0;
        } else if bytes.taken >= bytes.overflow.len() / 2 {
            bytes.overflow.drain(..bytes.taken);
            bytes.taken = 0;
        }
    }

    /// Copies out all held chains after the first `keep` and passes them to `done`, as `advance_held`
    /// does. Returns the bytes copied.
    pub(crate) fn spill(
        &mut self,
        mem: &Memory,
        keep: usize,
        mut done: impl FnMut(Chain, bool),
    ) -> usize {
        let waiting = self.overflow_len();
        let Some(bytes) = self.0.as_deref_mut().filter(|b| b.held.len() > keep) else {
            return 0;
        };
        let spilt: usize = bytes.held.iter().skip(keep).map(|h| h.len as usize).sum();
        let mut sent = keep == 0 && std::mem::take(&mut bytes.front_sent);
        let mut done = |held: HeldChain| done(held.chain, std::mem::take(&mut sent));
        let mut overflow = Vec::new();
        if overflow.try_reserve_exact(spilt + waiting).is_err() {
            bytes.held.drain(keep..).for_each(done);
            bytes.held_bytes -= spilt;
            bytes.lose();
            return 0;
        }
        for held in bytes.held.drain(keep..) {
            copy_out(mem, &held, &mut overflow);
            done(held);
        }
        overflow.extend_from_slice(bytes.overflow.get(bytes.taken..).unwrap_or_default());
        fallible::free(std::mem::replace(&mut bytes.overflow, overflow));
        bytes.taken = 0;
        bytes.held_bytes -= spilt;
        spilt
    }

    /// Drops all bytes; passes the chains to `done`, as `advance_held` does.
    pub(crate) fn clear(&mut self, mut done: impl FnMut(Chain, bool)) {
        let Some(bytes) = self.0.take() else { return };
        let OutboundQueue {
            held,
            overflow,
            mut front_sent,
            ..
        } = *bytes;
        held.into_iter()
            .for_each(|held| done(held.chain, std::mem::take(&mut front_sent)));
        fallible::free(overflow);
    }

    /// Removes the first held chain, to lend it to a sibling.
    pub(crate) fn pop_held(&mut self) -> Option<HeldChain> {
        let bytes = self.0.as_deref_mut()?;
        let held = bytes.held.pop_front()?;
        bytes.held_bytes -= held.len as usize;
        Some(held)
    }

    /// Removes the copied bytes. No chain may be held.
    pub(crate) fn take_overflow(&mut self) -> Vec<u8> {
        let Some(bytes) = self.0.as_deref_mut() else {
            return Vec::new();
        };
        let taken = std::mem::take(&mut bytes.taken);
        let mut bytes = std::mem::take(&mut bytes.overflow);
        bytes.drain(..taken);
        bytes
    }
}

/// Appends the bytes of `held` to `to`. A piece outside the memory would read as zeros; it cannot
/// occur, because chains are translated when they are popped.
pub(crate) fn copy_out(mem: &Memory, held: &HeldChain, to: &mut Vec<u8>) {
    let start = to.len();
    to.resize(start + held.len as usize, 0);
    mem.read(
        held.chain.readable(),
        held.offset as usize,
        &mut to[start..],
    );
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::sync::Arc;
    use zerosock_ring::{
        Buffer, DeviceQueue, DriverLayout, DriverQueue, QueueConfig, RegionConfig,
    };

    const DATA: u64 = 0x8000;

    /// A queue with `n` chains of 16 bytes; byte i of chain c is 16 * c + i.
    pub(crate) fn chains(n: usize) -> (Arc<Memory>, DeviceQueue, Vec<Chain>) {
        let len = 1 << 16;
        let fd = zerosock_sys::memfd::create("outbound", len, true).unwrap();
        let config = RegionConfig {
            guest_addr: 0,
            user_addr: 0,
            len,
            fd_offset: 0,
        };
        let memory = Arc::new(Memory::map(vec![(fd, config)]).unwrap());
        let layout = DriverLayout::at(0, 256);
        let mut driver = DriverQueue::new(memory.clone(), layout, false).unwrap();
        let mut pieces = Vec::new();
        for c in 0..n {
            let addr = DATA + 16 * c as u64;
            memory.translate(addr, 16, &mut pieces).unwrap();
            let bytes: Vec<u8> = (0..16).map(|i| (16 * c + i) as u8).collect();
            memory.write(&pieces[c..], 0, &bytes);
            driver
                .add(
                    &[Buffer {
                        addr,
                        len: 16,
                        writable: false,
                    }],
                    0,
                )
                .unwrap();
        }
        let _ = driver.publish();
        let (desc, avail, used) = (layout.desc, layout.avail, layout.used);
        let (event_idx, indirect) = (false, false);
        let config = QueueConfig {
            size: 256,
            desc,
            avail,
            used,
            base: 0,
            event_idx,
            indirect,
        };
        let mut device = DeviceQueue::new(memory.clone(), &config).unwrap();
        let chains = (0..n).map(|_| device.pop().unwrap().unwrap()).collect();
        (memory, device, chains)
    }

    /// Takes everything in steps of `step` bytes, as a socket would.
    fn drain(outbound: &mut Outbound, memory: &Memory, step: usize) -> (Vec<u8>, Vec<u16>) {
        let (mut bytes, mut heads) = (Vec::new(), Vec::new());
        while !outbound.is_empty() {
            if outbound.held_chains() > 0 {
                let front = outbound.0.as_ref().unwrap().held.front().unwrap();
                let n = step.min(front.len as usize);
                let mut part = vec![0; n];
                memory.read(front.chain.readable(), front.offset as usize, &mut part);
                bytes.extend(part);
                outbound.advance_held(n, false, |chain, _| heads.push(chain.head()));
            } else {
                let n = step.min(outbound.overflow().len());
                bytes.extend_from_slice(&outbound.overflow()[..n]);
                outbound.advance_overflow(n);
            }
        }
        (bytes, heads)
    }

    #[test]
    fn bytes_keep_their_order_when_held_copied_or_spilled() {
        for share in [0, 1, 3, 10] {
            for keep in [0, 1, 2, 10] {
                for step in [1, 5, 16, 100] {
                    let (memory, _queue, chains) = chains(8);
                    let mut outbound = Outbound::default();
                    let mut spares = QueuePool::default();
                    let mut back = 0;
                    for (i, chain) in chains.into_iter().enumerate() {
                        let held = HeldChain {
                            chain,
                            offset: 0,
                            len: 16,
                        };
                        let copied = outbound.push(&memory, held, share, &mut spares);
                        back += copied.is_some() as usize;
                        if i == 4 {
                            outbound.spill(&memory, keep, |_, _| back += 1);
                        }
                    }
                    assert_eq!(outbound.len(), 128);
                    let (bytes, heads) = drain(&mut outbound, &memory, step);
                    assert!(
                        bytes.iter().enumerate().all(|(i, &b)| i == b as usize),
                        "{bytes:?}"
                    );
                    assert_eq!(back + heads.len(), 8, "every chain comes back once");
                    outbound.recycle(&mut spares);
                    assert!(outbound.0.is_none(), "an empty queue was not recycled");
                    let [spare] = &spares.0[..] else {
                        panic!("the queue is not in the spares");
                    };
                    assert!(spare.is_empty() && spare.held_bytes == 0);
                    assert_eq!(spare.overflow.capacity(), 0);
                }
            }
        }
    }

    #[test]
    fn a_chain_is_marked_if_a_zero_copy_send_has_taken_any_of_its_bytes() {
        // What takes the second half of the first chain and the others, and whether it is copied.
        type Take = fn(&mut Outbound, &Memory, &mut dyn FnMut(Chain, bool));
        let ways: [(Take, [bool; 3]); 5] = [
            (
                |all, _, done| all.advance_held(40, false, done),
                [true, false, false],
            ),
            (
                |all, _, done| {
                    all.advance_held(20, true, &mut *done);
                    all.advance_held(20, false, done);
                },
                [true, true, false],
            ),
            (
                |all, mem, done| {
                    all.spill(mem, 0, done);
                },
                [true, false, false],
            ),
            (|all, _, done| all.clear(done), [true, false, false]),
            (
                |all, mem, done| {
                    all.spill(mem, 1, &mut *done);
                    all.advance_held(8, false, done);
                },
                [false, false, true],
            ),
        ];
        for (take, wanted) in ways {
            let (memory, _queue, chains) = chains(3);
            let mut outbound = Outbound::default();
            let mut spares = QueuePool::default();
            for chain in chains {
                let held = HeldChain {
                    chain,
                    offset: 0,
                    len: 16,
                };
                assert!(outbound.push(&memory, held, 3, &mut spares).is_none());
            }
            outbound.advance_held(8, true, |_, _| panic!("a chain too early"));
            let mut marks = Vec::new();
            take(&mut outbound, &memory, &mut |_, sent| marks.push(sent));
            assert_eq!(marks, wanted);
        }
    }

    #[test]
    fn overflow_that_never_empties_stays_small() {
        let (memory, _queue, chains) = chains(64);
        let mut outbound = Outbound::default();
        let mut spares = QueuePool::default();
        for chain in chains {
            let held = HeldChain {
                chain,
                offset: 0,
                len: 16,
            };
            assert!(outbound.push(&memory, held, 0, &mut spares).is_some());
            if outbound.overflow_len() > 16 {
                outbound.advance_overflow(16);
            }
            let bytes = outbound.0.as_ref().unwrap();
            assert!(bytes.overflow.len() <= 64, "{}", bytes.overflow.len());
        }
    }

    #[test]
    fn spares_keep_few_small_queues() {
        let mut spares = QueuePool::<OutboundQueue>::default();
        let mut places: Vec<Option<Box<OutboundQueue>>> = Vec::new();
        places.resize_with(2 * MAX_POOLED, || None);
        for place in &mut places {
            spares.get_or_insert_spare(place).held.reserve(4);
        }
        places.iter_mut().for_each(|place| spares.recycle(place));
        assert!(places.iter().all(Option::is_none));
        assert_eq!(spares.0.len(), MAX_POOLED);
        let large = spares.get_or_insert_spare(&mut places[0]);
        assert!(large.held.capacity() >= 4, "a reused queue");
        large.held.reserve(2 * MAX_POOLED_CAPACITY);
        spares.recycle(&mut places[0]);
        assert!(places[0].is_none());
        assert_eq!(spares.0.len(), MAX_POOLED - 1);
    }
}
