//! The slab of connections and the map that finds them.
//!
//! A place in the slab is taken until nothing is left to tell: an RST that
//! has not been sent and an event that has not been polled keep it, and with
//! it their share of the cap. So neither needs a queue of its own.

use core::hash::BuildHasher;

use hashbrown::HashMap;

use super::list::{LISTS, Link};
use crate::addr::{Address, Cid, Port};
use crate::vsock::connection::{Connection, FlowId, Key};
use crate::vsock::state::State;

/// No place: a slab never grows so far.
const NOWHERE: u32 = u32::MAX;

/// A place in the slab.
#[derive(Debug)]
pub(super) struct Slot<C = Connection> {
    pub(super) generation: u32,
    pub(super) links: [Link; LISTS],
    pub(super) connection: Option<C>,
}

impl<C> Slot<C> {
    pub(super) fn vacant() -> Slot<C> {
        Slot {
            generation: 0,
            links: [Link::default(); LISTS],
            connection: None,
        }
    }
}

/// Connections by place, by id, and by addresses.
#[derive(Debug)]
pub(super) struct Table<S> {
    pub(super) slots: Vec<Slot>,
    free: Vec<u32>,
    map: HashMap<Key, u32, S>,
    /// The last connection found, if its place is not [`NOWHERE`]: runs of packets belong together.
    last: Key,
    last_index: u32,
}

impl<S: BuildHasher> Table<S> {
    pub(super) fn new(hasher: S) -> Table<S> {
        Table {
            slots: Vec::new(),
            free: Vec::new(),
            map: HashMap::with_hasher(hasher),
            last: Key {
                local: Address::new(Cid::ANY, Port::ANY),
                peer: Address::new(Cid::ANY, Port::ANY),
            },
            last_index: NOWHERE,
        }
    }

    /// Places taken.
    pub(super) fn occupied(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Finds by addresses; hashes only when it is not the last one found.
    pub(super) fn find(&mut self, key: &Key) -> Option<u32> {
        if self.last_index != NOWHERE && self.last.is(key) {
            return Some(self.last_index);
        }
        let index = *self.map.get(key)?;
        (self.last, self.last_index) = (*key, index);
        Some(index)
    }

    /// The last connection found, if it has these addresses: for the packets that make up most.
    #[inline]
    pub(super) fn find_again(&mut self, key: &Key) -> Option<(FlowId, &mut Connection)> {
        if !self.last.is(key) {
            return None;
        }
        let index = self.last_index;
        // Nothing is at NOWHERE.
        let slot = self.slots.get_mut(index as usize)?;
        let flow = FlowId {
            index,
            generation: slot.generation,
        };
        Some((flow, slot.connection.as_mut()?))
    }

    /// Takes a place and can be found from now on.
    pub(super) fn insert(&mut self, connection: Connection) -> u32 {
        let key = connection.key;
        let index = match self.free.pop() {
            Some(index) => index,
            None => {
                self.slots.push(Slot::vacant());
                // Callers keep `occupied` below a cap far below 2^32.
                (self.slots.len() - 1) as u32
            }
        };
        self.slots[index as usize].connection = Some(connection);
        self.map.insert(key, index);
        (self.last, self.last_index) = (key, index);
        index
    }

    /// Can no longer be found by its addresses; another may have them.
    pub(super) fn detach(&mut self, index: u32) {
        let Some(connection) = &self.slots[index as usize].connection else {
            return;
        };
        let key = connection.key;
        if self.map.get(&key) == Some(&index) {
            self.map.remove(&key);
        }
        if self.last_index == index {
            self.last_index = NOWHERE;
        }
    }

    /// Frees the place; ids of it are stale from now on.
    pub(super) fn free(&mut self, index: u32) {
        self.detach(index);
        let slot = &mut self.slots[index as usize];
        slot.connection = None;
        slot.generation = slot.generation.wrapping_add(1);
        self.free.push(index);
    }

    /// At a place of our own lists, timers and map.
    #[inline]
    pub(super) fn at(&mut self, index: u32) -> Option<&mut Connection> {
        self.slots[index as usize].connection.as_mut()
    }

    #[inline]
    pub(super) fn id(&self, index: u32) -> FlowId {
        FlowId {
            index,
            generation: self.slots[index as usize].generation,
        }
    }

    /// The live connection of that name.
    #[inline]
    pub(super) fn get(&self, flow: FlowId) -> Option<&Connection> {
        let slot = self.slots.get(flow.index())?;
        slot.connection
            .as_ref()
            .filter(|c| slot.generation == flow.generation && c.state != State::Closed)
    }

    /// The live connection of that name.
    #[inline]
    pub(super) fn get_mut(&mut self, flow: FlowId) -> Option<&mut Connection> {
        let slot = self.slots.get_mut(flow.index())?;
        slot.connection
            .as_mut()
            .filter(|c| slot.generation == flow.generation && c.state != State::Closed)
    }
}
