//! The bridges of a device, by key and by flow, and the lists of those that have work to do.
//!
//! # Invariants
//! - The flow of a bridge leads to its key.
//! - Each list has at most one entry of a bridge that counts; entries of removed bridges are skipped.
//! - The sums are those of [`Bridge::counted`] over all bridges.
//!
//! A stored key is a hint: its bridge may have been removed, and another one may have the key.

use std::collections::{TryReserveError, VecDeque};

use slab::Slab;
use zerosock_proto::vsock::FlowId;
use zerosock_ring::{Chain, Memory};

use super::bridge::{Bridge, BridgePeer, Inbound, InboundQueue};
use super::flags::Flags;
use crate::device::outbound::{HeldChain, OutboundQueue, QueuePool};
use crate::fallible;

/// The slab is freed when it is empty and its capacity exceeds this number.
const KEPT: usize = 1024;

/// The places that [`Bridges::next_keys`] looks at.
const PLACES: u32 = 4096;

/// The bridges of a device: see the module.
#[derive(Debug, Default)]
pub(crate) struct Bridges {
    all: Slab<Bridge>,
    /// Key of the bridge that was added last, by flow index; `u32::MAX`: none.
    by_flow: Vec<u32>,
    /// Keys of bridges that may have something for the guest, in the order of their turns.
    ready: VecDeque<u32>,
    /// At least as many as the entries of `ready` whose bridge was removed.
    stale_ready: usize,
    /// Keys of bridges that received bytes from the guest since the last flush.
    dirty: VecDeque<u32>,
    /// Queues of idle bridges, for reuse.
    spare_outbound: QueuePool<OutboundQueue>,
    spare_inbound: QueuePool<InboundQueue>,
    /// Chains held, lent or in flight.
    stalled_chains: usize,
    overflow_bytes: usize,
}

impl Bridges {
    pub(crate) fn len(&self) -> usize {
        self.all.len()
    }

    pub(crate) fn keys(&self) -> Vec<u32> {
        self.keys_where(|_| true)
    }

    /// The keys of the bridges for which `applies` is true.
    pub(crate) fn keys_where(&self, applies: impl Fn(&Bridge) -> bool) -> Vec<u32> {
        let found = self.all.iter().filter(|(_, bridge)| applies(bridge));
        found.map(|(key, _)| key as u32).collect()
    }

    /// The keys of at most `most` bridges from `next` on, which advances behind them; and whether there may be
    /// more. Looks at a bounded number of places, so the keys may be fewer.
    pub(crate) fn next_keys(&self, next: &mut u32, most: usize) -> (Vec<u32>, bool) {
        let end = u32::try_from(self.all.capacity()).unwrap_or(u32::MAX);
        let places = *next..end.min(next.saturating_add(PLACES));
        let is_taken = |&key: &u32| self.get(key).is_some();
        let keys: Vec<u32> = places.clone().filter(is_taken).take(most).collect();
        *next = match keys.last() {
            Some(last) if keys.len() == most => last + 1,
            _ => places.end,
        };
        (keys, *next < end)
    }

    #[inline]
    pub(crate) fn get(&self, key: u32) -> Option<&Bridge> {
        self.all.get(key as usize)
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, key: u32) -> Option<&mut Bridge> {
        self.all.get_mut(key as usize)
    }

    /// The key of the bridge of `flow`, if it exists.
    #[inline]
    pub(crate) fn key_of(&self, flow: FlowId) -> Option<u32> {
        let key = *self.by_flow.get(flow.index())?;
        (self.get(key)?.flow == Some(flow)).then_some(key)
    }

    /// The bridge of `flow` and its key.
    #[inline]
    pub(crate) fn of_flow(&mut self, flow: FlowId) -> Option<(u32, &mut Bridge)> {
        let key = *self.by_flow.get(flow.index())?;
        let bridge = self.get_mut(key)?;
        (bridge.flow == Some(flow)).then_some((key, bridge))
    }

    /// Makes room for the key of a flow's bridge.
    pub(crate) fn reserve(&mut self, flow: FlowId) -> Result<(), TryReserveError> {
        fallible::extend_to(&mut self.by_flow, flow.index() + 1, u32::MAX)
    }

    /// Adds a bridge, for whose flow room was [reserved](Bridges::reserve). Returns its key, which is also
    /// recorded for the flow.
    pub(crate) fn insert(&mut self, bridge: Bridge) -> u32 {
        let key = self.all.vacant_key() as u32;
        if let Some(index) = bridge.flow.map(FlowId::index) {
            // A removal since then may have freed the map.
            if self.by_flow.len() <= index {
                self.by_flow.resize(index + 1, u32::MAX);
            }
            self.by_flow[index] = key;
        }
        self.all.insert(bridge);
        key
    }

    /// Removes a bridge, also from the lists and the sums.
    pub(crate) fn remove(&mut self, key: u32) -> Option<Bridge> {
        let mut bridge = self.all.try_remove(key as usize)?;
        if bridge.flags.remove(Flags::IN_READY) {
            self.count_stale_ready();
        }
        let (chains, bytes) = std::mem::take(&mut bridge.counted);
        self.stalled_chains -= chains as usize;
        self.overflow_bytes -= bytes as usize;
        if self.all.is_empty() && self.all.capacity() > KEPT {
            (self.all, self.by_flow, self.ready) = Default::default();
            self.stale_ready = 0;
        }
        Some(bridge)
    }

    /// Lists a bridge as ready if it may have something for the guest.
    pub(crate) fn enqueue(&mut self, key: u32) {
        if let Some(bridge) = self.all.get_mut(key as usize)
            && bridge.may_read()
            && bridge.flags.insert(Flags::IN_READY)
        {
            self.ready.push_back(key);
        }
    }

    /// Takes the next bridge that may have something for the guest off the list. Each entry that is
    /// looked at uses up one of `budget`.
    pub(crate) fn next_ready(&mut self, budget: &mut usize) -> Option<u32> {
        while *budget > 0 {
            let key = self.ready.pop_front()?;
            *budget -= 1;
            // A stale entry is that of an earlier bridge with this key.
            if let Some(bridge) = self.all.get_mut(key as usize)
                && bridge.flags.remove(Flags::IN_READY)
                && bridge.may_read()
            {
                return Some(key);
            }
        }
        None
    }

    /// Returns a bridge to the front of the ready list: the guest has no buffer.
    pub(crate) fn unpop_ready(&mut self, key: u32) {
        if let Some(bridge) = self.all.get_mut(key as usize)
            && bridge.flags.insert(Flags::IN_READY)
        {
            self.ready.push_front(key);
        }
    }

    /// Whether the ready list has entries.
    pub(crate) fn has_ready(&self) -> bool {
        !self.ready.is_empty()
    }

    /// Entries of the ready list, stale ones included.
    pub(crate) fn ready_len(&self) -> usize {
        self.ready.len()
    }

    pub(crate) fn clear_ready(&mut self) {
        let mut budget = usize::MAX;
        while self.next_ready(&mut budget).is_some() {}
        self.stale_ready = 0;
    }

    /// Counts a `ready` entry whose bridge was removed. Removes all such entries when they are more
    /// than half of the list.
    fn count_stale_ready(&mut self) {
        self.stale_ready += 1;
        if self.stale_ready > 64 && self.stale_ready > self.ready.len() / 2 {
            self.stale_ready = 0;
            // Keep one entry per listed bridge: a reused key has several.
            let bridges = &mut self.all;
            self.ready.retain(|&key| {
                let bridge = bridges.get_mut(key as usize);
                bridge.is_some_and(|bridge| bridge.flags.remove(Flags::IN_READY))
            });
            for &key in &self.ready {
                if let Some(bridge) = bridges.get_mut(key as usize) {
                    bridge.flags.insert(Flags::IN_READY);
                }
            }
        }
    }

    /// Adds bytes from the guest to those for the other end of a bridge, and lists it as dirty. A chain
    /// beyond the `share` of a stalled bridge is copied and returned for completion.
    #[inline(always)] // saves copies of the chain
    pub(crate) fn push_outbound(
        &mut self,
        key: u32,
        memory: &Memory,
        held: HeldChain,
        share: usize,
    ) -> Option<Chain> {
        let Some(bridge) = self.all.get_mut(key as usize) else {
            return Some(held.chain);
        };
        if bridge.flags.insert(Flags::IN_DIRTY) {
            self.dirty.push_back(key);
        }
        // During a turn every chain may be held: the flush at its end applies the bounds.
        let share = if bridge.flags.has(Flags::WRITABLE) {
            usize::MAX
        } else {
            share
        };
        let spares = &mut self.spare_outbound;
        bridge.outbound.push(memory, held, share, spares)
    }

    /// Adds bytes from a sibling to those for the guest. Returns them if the list could not grow.
    pub(crate) fn push_inbound(&mut self, key: u32, inbound: Inbound) -> Option<Inbound> {
        match self.all.get_mut(key as usize).map(|it| &mut it.peer) {
            Some(BridgePeer::Sibling(s)) => s.push(inbound, &mut self.spare_inbound),
            _ => Some(inbound),
        }
    }

    /// Queues for bytes of siblings.
    pub(crate) fn spare_inbound(&mut self) -> &mut QueuePool<InboundQueue> {
        &mut self.spare_inbound
    }

    /// Lists a bridge as dirty: it is flushed at the end of the turn.
    #[inline]
    pub(crate) fn mark_dirty(&mut self, key: u32) {
        if let Some(bridge) = self.all.get_mut(key as usize)
            && bridge.flags.insert(Flags::IN_DIRTY)
        {
            self.dirty.push_back(key);
        }
    }

    /// Takes the next dirty bridge off the list.
    #[inline]
    pub(crate) fn next_dirty(&mut self) -> Option<u32> {
        loop {
            let key = self.dirty.pop_front()?;
            if let Some(bridge) = self.all.get_mut(key as usize)
                && bridge.flags.remove(Flags::IN_DIRTY)
            {
                return Some(key);
            }
        }
    }

    /// Whether the dirty list has entries.
    #[inline]
    pub(crate) fn has_dirty(&self) -> bool {
        !self.dirty.is_empty()
    }

    /// Updates the sums by what a bridge holds now, and takes its empty queues back.
    pub(crate) fn recount(&mut self, key: u32) {
        let Some(bridge) = self.all.get_mut(key as usize) else {
            return;
        };
        let (chains, inbound) = match &mut bridge.peer {
            BridgePeer::Sibling(s) | BridgePeer::Rejoining(s) => {
                s.recycle(&mut self.spare_inbound);
                (s.lent as usize, s.copied())
            }
            _ => (
                bridge.outbound.held_chains() + bridge.chains_in_flight().count(),
                0,
            ),
        };
        let lengths = bridge
            .messages
            .as_ref()
            .map_or(0, |messages| messages.cost());
        let bytes = bridge.outbound.overflow_len() + inbound + lengths;
        // A queue has 32768 chains at most, and credit keeps the bytes below 2^31.
        let now = (chains as u32, u32::try_from(bytes).unwrap_or(u32::MAX));
        let before = std::mem::replace(&mut bridge.counted, now);
        self.stalled_chains = self.stalled_chains - before.0 as usize + now.0 as usize;
        self.overflow_bytes = self.overflow_bytes - before.1 as usize + now.1 as usize;
        bridge.outbound.recycle(&mut self.spare_outbound);
    }

    /// Chains held, lent or in flight, of all bridges except `key`.
    pub(crate) fn chains_of_others(&self, key: u32) -> usize {
        let own = self.get(key).map_or(0, |bridge| bridge.counted.0);
        self.stalled_chains - own as usize
    }

    /// Bytes that were copied for all bridges.
    pub(crate) fn overflow_bytes(&self) -> usize {
        self.overflow_bytes
    }

    /// The keys of the bridges with copied bytes, that with the most first.
    pub(crate) fn largest_holders(&self) -> Vec<u32> {
        let mut keys = self.keys_where(|bridge| bridge.counted.1 > 0);
        let bytes = |key| self.get(key).map(|bridge| bridge.counted.1);
        keys.sort_unstable_by_key(|&key| std::cmp::Reverse((bytes(key), key)));
        keys
    }

    /// Whether the kernel may still read bytes of the guest for a socket.
    pub(crate) fn have_sends_in_flight(&self) -> bool {
        let mut all = self.all.iter();
        all.any(|(_, bridge)| bridge.has_sends_in_flight())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::sync::Arc;

    use proptest::prelude::*;
    use zerosock_proto::vsock::{PortTable, Shard, ShardConfig};
    use zerosock_proto::wire::vsock::SocketType;
    use zerosock_proto::{Address, Cid, Instant, Port};
    use zerosock_virtio::outbox::DeviceAddr;

    use super::*;
    use crate::device::outbound::Outbound;
    use crate::device::state::bridge::SiblingPeer;
    use crate::device::state::bridge_state::BridgeEvent;
    use crate::device::state::peer::Peer;

    struct Table {
        shard: Shard,
        bridges: Bridges,
    }

    impl Table {
        fn new() -> Table {
            let ports = Arc::new(PortTable::new());
            Table {
                shard: Shard::new(ShardConfig::device(Cid::new(3)), ports),
                bridges: Bridges::default(),
            }
        }

        /// Adds a bridge that may have something for the guest.
        fn add(&mut self) -> u32 {
            let local = Address::new(Cid::HOST, Port::ANY);
            let peer = Address::new(Cid::new(3), Port::new(1));
            let (now, stream) = (Instant::ZERO, SocketType::Stream);
            let flow = self.shard.connect(now, local, peer, stream).unwrap();
            let device = DeviceAddr {
                worker: 0,
                number: 0,
            };
            let sibling = SiblingPeer::new(Peer { device, flow });
            let mut bridge = Bridge::new(flow, BridgePeer::Sibling(sibling));
            bridge.state.apply(BridgeEvent::Connected);
            bridge.flags.insert(Flags::READABLE);
            self.bridges.reserve(flow).unwrap();
            self.bridges.insert(bridge)
        }

        fn remove(&mut self, key: u32) {
            if let Some(flow) = self.bridges.get(key).and_then(|bridge| bridge.flow) {
                self.end_flow(flow);
                assert!(self.bridges.remove(key).is_some());
                assert_eq!(self.bridges.key_of(flow), None);
            } else {
                self.bridges.remove(key);
            }
        }

        fn end_flow(&mut self, flow: FlowId) {
            let _ = self.shard.reset(flow);
            while self.shard.poll_event().is_some() {}
            while self.shard.poll_transmit(Instant::ZERO, 0).is_some() {}
        }

        fn next_ready(&mut self) -> Option<u32> {
            let mut budget = usize::MAX;
            self.bridges.next_ready(&mut budget)
        }

        fn check(&self) {
            let all = &self.bridges;
            let (mut sums, mut listed) = ((0, 0), 0);
            for (key, bridge) in &all.all {
                let key = key as u32;
                if let Some(flow) = bridge.flow {
                    assert_eq!(all.key_of(flow), Some(key));
                }
                assert!(!bridge.flags.has(Flags::IN_READY) || all.ready.contains(&key));
                assert!(!bridge.flags.has(Flags::IN_DIRTY) || all.dirty.contains(&key));
                listed += usize::from(bridge.flags.has(Flags::IN_READY));
                sums.0 += bridge.counted.0 as usize;
                sums.1 += bridge.counted.1 as usize;
            }
            assert_eq!(sums, (all.stalled_chains, all.overflow_bytes));
            assert!(all.ready.len() <= listed + all.stale_ready);
        }
    }

    #[derive(Clone, Debug)]
    enum Step {
        Add,
        Remove(u32),
        EndFlow(u32),
        Enqueue(u32),
        /// Takes a ready bridge and, if true, returns it.
        Ready(bool),
        ClearReady,
        Dirty(u32),
        /// Takes all dirty bridges off their list.
        Flush,
        /// Changes the chains and bytes that a bridge holds.
        Hold(u32, u32, usize),
    }

    fn step() -> impl Strategy<Value = Step> {
        let key = 0..12u32;
        prop_oneof![
            4 => Just(Step::Add),
            3 => key.clone().prop_map(Step::Remove),
            1 => key.clone().prop_map(Step::EndFlow),
            4 => key.clone().prop_map(Step::Enqueue),
            3 => any::<bool>().prop_map(Step::Ready),
            1 => Just(Step::ClearReady),
            4 => key.clone().prop_map(Step::Dirty),
            1 => Just(Step::Flush),
            3 => (key, 0..9u32, 0..9usize).prop_map(|(key, chains, len)| Step::Hold(key, chains, len)),
        ]
    }

    proptest! {
        #[test]
        fn lists_flows_and_sums_match_the_bridges(steps in prop::collection::vec(step(), 1..200)) {
            let mut table = Table::new();
            let mut dirty = BTreeSet::new();
            for step in steps {
                match step {
                    Step::Add => {
                        table.add();
                    }
                    Step::Remove(key) => {
                        table.remove(key);
                        dirty.remove(&key);
                    }
                    Step::EndFlow(key) => {
                        let bridge = table.bridges.get_mut(key);
                        if let Some(flow) = bridge.and_then(|bridge| bridge.flow.take()) {
                            table.end_flow(flow);
                            assert!(table.bridges.of_flow(flow).is_none());
                        }
                    }
                    Step::Enqueue(key) => table.bridges.enqueue(key),
                    Step::Ready(returned) => {
                        let next = table.next_ready();
                        if let Some(key) = next.filter(|_| returned) {
                            table.bridges.unpop_ready(key);
                            assert_eq!(table.next_ready(), next);
                        }
                    }
                    Step::ClearReady => {
                        table.bridges.clear_ready();
                        assert_eq!(table.next_ready(), None);
                    }
                    Step::Dirty(key) => {
                        table.bridges.mark_dirty(key);
                        dirty.extend(table.bridges.get(key).map(|_| key));
                    }
                    Step::Flush => {
                        while let Some(key) = table.bridges.next_dirty() {
                            assert!(dirty.remove(&key));
                        }
                        assert!(dirty.is_empty());
                    }
                    Step::Hold(key, chains, len) => {
                        if let Some(bridge) = table.bridges.get_mut(key)
                            && let BridgePeer::Sibling(sibling) = &mut bridge.peer
                        {
                            sibling.lent = chains;
                            bridge.outbound = Outbound::of_copies(vec![0; len]);
                        }
                        table.bridges.recount(key);
                    }
                }
                table.check();
            }
        }
    }

    #[test]
    fn ready_bridges_are_listed_once_in_order() {
        let mut table = Table::new();
        let keys: Vec<u32> = (0..10).map(|_| table.add()).collect();
        for &key in keys.iter().chain(&keys) {
            table.bridges.enqueue(key);
        }
        assert_eq!(table.bridges.ready.len(), 10);
        let turns: Vec<u32> = std::iter::from_fn(|| table.next_ready()).collect();
        assert_eq!(turns, keys);
    }

    #[test]
    fn entries_of_removed_bridges_are_swept() {
        let mut table = Table::new();
        let add = |table: &mut Table| {
            let key = table.add();
            table.bridges.enqueue(key);
            key
        };
        let stays: Vec<u32> = (0..10).map(|_| add(&mut table)).collect();
        for _ in 0..10_000 {
            let key = add(&mut table);
            table.remove(key);
            let entries = table.bridges.ready.len();
            assert!(entries <= 10 + 2 * 66, "{entries} entries for 10 bridges");
        }
        // A bridge with a reused key is listed once, and every other bridge keeps its turn.
        let last = add(&mut table);
        let mut turns: Vec<u32> = std::iter::from_fn(|| table.next_ready()).collect();
        assert_eq!(turns.iter().filter(|&&key| key == last).count(), 1);
        turns.retain(|key| *key != last);
        assert_eq!(turns, stays);
    }

    #[test]
    fn each_entry_that_is_looked_at_uses_up_the_budget() {
        let mut table = Table::new();
        for _ in 0..3 {
            let key = table.add();
            table.bridges.enqueue(key);
        }
        table.remove(0);
        let mut budget = 2;
        assert_eq!(table.bridges.next_ready(&mut budget), Some(1));
        assert_eq!(budget, 0);
        assert_eq!(table.bridges.next_ready(&mut budget), None);
        assert!(table.bridges.has_ready());
    }

    #[test]
    fn largest_holders_come_first() {
        let mut table = Table::new();
        for len in [0, 5, 9, 7] {
            let key = table.add();
            table.bridges.get_mut(key).unwrap().outbound = Outbound::of_copies(vec![0; len]);
            table.bridges.recount(key);
        }
        assert_eq!(table.bridges.overflow_bytes(), 21);
        assert_eq!(table.bridges.largest_holders(), [2, 3, 1]);
        table.remove(2);
        assert_eq!(table.bridges.overflow_bytes(), 12);
    }

    #[test]
    fn memory_of_many_bridges_is_freed_with_the_last() {
        let mut table = Table::new();
        let keys: Vec<u32> = (0..2 * KEPT).map(|_| table.add()).collect();
        for key in keys {
            table.bridges.enqueue(key);
            table.remove(key);
        }
        let all = &table.bridges;
        assert_eq!((all.all.capacity(), all.by_flow.capacity()), (0, 0));
        assert!(!all.has_ready());
    }
}
