//! The slab of connections, and the map that finds them by address.
//!
//! # Invariants
//! - A slot is taken until the connection's RST has been sent and its end has been polled. The slot
//!   counts against the limit so long, and neither RST nor event needs a queue of its own.
//! - The map stores slot indices only and reads the addresses in the slab: with keys it would be
//!   four times as large.
//! - Slots are reused. When the last of many becomes free, the memory is released.

use core::hash::BuildHasher;

use hashbrown::HashTable;

use super::list::{LISTS, Link, Linked};
use crate::addr::{Address, Cid, Port};
use crate::vsock::connection::{Connection, Key};
use crate::vsock::flow_id::FlowId;
use crate::vsock::state::State;

/// As `log_entry`: the connection is not in the log.
pub(super) const NO_ENTRY: u32 = u32::MAX;
/// Index of no slot: a slab never grows so far.
const NO_SLOT: u32 = u32::MAX;
/// Most slots that the slab keeps memory for when none is taken.
const KEPT_SLOTS: usize = 1024;

/// An entry of the slab.
#[derive(Debug)]
pub(super) struct Slot<C = Connection> {
    pub(super) generation: u32,
    /// The connection's entry in the log, or [`NO_ENTRY`].
    pub(super) log_entry: u32,
    links: [Link; LISTS],
    pub(super) connection: Option<C>,
}

impl<C> Slot<C> {
    pub(super) fn vacant() -> Slot<C> {
        Slot {
            generation: 0,
            log_entry: NO_ENTRY,
            links: [Link::default(); LISTS],
            connection: None,
        }
    }
}

impl<C> Linked for Slot<C> {
    #[inline]
    fn links(&mut self) -> &mut [Link; LISTS] {
        &mut self.links
    }

    fn next<const L: usize>(&self) -> Option<u32> {
        self.links[L].next()
    }
}

/// Connections by slot, by id, and by addresses.
#[derive(Debug)]
pub(super) struct Table<S> {
    pub(super) slots: Vec<Slot>,
    free: Vec<u32>,
    /// Generation of the connection inserted last: unique until it wraps.
    generation: u32,
    hasher: S,
    /// Slots of the connections that can be found by address.
    map: HashTable<u32>,
    /// The last connection found, unless its index is [`NO_SLOT`]: packets of a connection arrive
    /// in runs.
    last: Key,
    last_index: u32,
}

impl<S> Table<S> {
    /// Slots taken.
    pub(super) fn occupied(&self) -> usize {
        self.slots.len() - self.free.len()
    }
}

impl<S: BuildHasher> Table<S> {
    pub(super) fn new(hasher: S) -> Table<S> {
        Table {
            slots: Vec::new(),
            free: Vec::new(),
            generation: 0,
            hasher,
            map: HashTable::new(),
            last: Key {
                local: Address::new(Cid::ANY, Port::ANY),
                peer: Address::new(Cid::ANY, Port::ANY),
            },
            last_index: NO_SLOT,
        }
    }

    /// Finds a connection by addresses; hashes only if it is not the last one found.
    pub(super) fn find(&mut self, key: &Key) -> Option<u32> {
        if self.last_index != NO_SLOT && self.last.is(key) {
            return Some(self.last_index);
        }
        let index = self.look_up(key)?;
        (self.last, self.last_index) = (*key, index);
        Some(index)
    }

    pub(super) fn look_up(&self, key: &Key) -> Option<u32> {
        let hash = self.hasher.hash_one(key);
        let found = self.map.find(hash, |&index| has(&self.slots, index, key));
        found.copied()
    }

    /// The last connection found, if it has these addresses: the case of most packets.
    #[inline]
    pub(super) fn find_last(&mut self, key: &Key) -> Option<(FlowId, &mut Connection)> {
        if !self.last.is(key) {
            return None;
        }
        let index = self.last_index;
        // The slab has no entry at NO_SLOT.
        let slot = self.slots.get_mut(index as usize)?;
        let flow = FlowId {
            index,
            generation: slot.generation,
        };
        Some((flow, slot.connection.as_mut()?))
    }

    /// Reserves memory for `count` more connections. False: there is none.
    pub(super) fn reserve(&mut self, count: usize) -> bool {
        let (slots, hasher) = (&self.slots, &self.hasher);
        let others = |&other: &u32| match &slots[other as usize].connection {
            Some(connection) => hasher.hash_one(connection.key),
            None => 0,
        };
        self.map.try_reserve(count, others).is_ok()
            && (self.free.len() >= count
                // All slots may be free at once.
                || self.slots.try_reserve(count).is_ok()
                    && self.free.try_reserve(self.slots.len() + count).is_ok())
    }

    /// Inserts a connection, which can be found from now on; returns its slot.
    pub(super) fn insert(&mut self, connection: Connection) -> u32 {
        let key = connection.key;
        let index = match self.free.pop() {
            Some(index) => index,
            None => {
                self.slots.push(Slot::vacant());
                // Callers keep `occupied` below a limit far below 2^32.
                (self.slots.len() - 1) as u32
            }
        };
        self.generation = self.generation.wrapping_add(1);
        let slot = &mut self.slots[index as usize];
        slot.generation = self.generation;
        slot.log_entry = NO_ENTRY;
        slot.connection = Some(connection);
        let (slots, hasher) = (&self.slots, &self.hasher);
        let hash = hasher.hash_one(key);
        let others = |&other: &u32| match &slots[other as usize].connection {
            Some(connection) => hasher.hash_one(connection.key),
            // Every index in the map has a connection.
            None => 0,
        };
        self.map.insert_unique(hash, index, others);
        (self.last, self.last_index) = (key, index);
        index
    }

    /// Removes a connection from the map: another connection may have its addresses.
    pub(super) fn detach(&mut self, index: u32) {
        let Some(connection) = &self.slots[index as usize].connection else {
            return;
        };
        let hash = self.hasher.hash_one(connection.key);
        if let Ok(entry) = self.map.find_entry(hash, |&other| other == index) {
            entry.remove();
        }
        if self.last_index == index {
            self.last_index = NO_SLOT;
        }
    }

    /// Frees the slot; ids of it are stale from now on.
    pub(super) fn free(&mut self, index: u32) {
        self.detach(index);
        self.slots[index as usize].connection = None;
        self.free.push(index);
        if self.occupied() == 0 && self.slots.len() > KEPT_SLOTS {
            self.slots = Vec::new();
            self.free = Vec::new();
            self.map = HashTable::new();
        }
    }

    /// The connection in a slot. The index comes from our own lists, timers or map.
    #[inline]
    pub(super) fn at(&mut self, index: u32) -> Option<&mut Connection> {
        self.slots.get_mut(index as usize)?.connection.as_mut()
    }

    #[inline]
    pub(super) fn id(&self, index: u32) -> FlowId {
        FlowId {
            index,
            generation: self.slots[index as usize].generation,
        }
    }

    /// The live connection with this id.
    #[inline]
    pub(super) fn get(&self, flow: FlowId) -> Option<&Connection> {
        let slot = self.slots.get(flow.index())?;
        slot.connection
            .as_ref()
            .filter(|c| slot.generation == flow.generation && c.state != State::Closed)
    }

    /// The live connection with this id.
    #[inline]
    pub(super) fn get_mut(&mut self, flow: FlowId) -> Option<&mut Connection> {
        let slot = self.slots.get_mut(flow.index())?;
        slot.connection
            .as_mut()
            .filter(|c| slot.generation == flow.generation && c.state != State::Closed)
    }
}

/// Whether the connection in a slot has these addresses.
#[inline]
fn has(slots: &[Slot], index: u32, key: &Key) -> bool {
    let slot = slots.get(index as usize);
    let connection = slot.and_then(|slot| slot.connection.as_ref());
    connection.is_some_and(|connection| connection.key.is(key))
}

#[cfg(test)]
#[path = "table_tests.rs"]
mod tests;
