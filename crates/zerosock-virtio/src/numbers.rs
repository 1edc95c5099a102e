//! Device numbers with a generation, and the table that finds a device by its number.
//!
//! Messages to a device may still be in a mailbox when the device is removed. So a number is a slot
//! in a table and a generation. [`Numbers`] reuses a slot only after its device was removed, with
//! the next generation; [`Table::get`] finds nothing for a number of an earlier generation, and the
//! message is dropped or sent back. A message could reach a wrong device only if it stayed in a
//! mailbox while its slot is reused 4096 times; each reuse takes a round trip through the same
//! mailbox.
//!
//! Numbers that are never reused would need no generation, but a search for each packet. With slots
//! the lookup is an index and a comparison.

use std::collections::VecDeque;

/// Bits of a number that are the slot.
const SLOT_BITS: u32 = 16;
const GENERATION_BITS: u32 = 12;
/// Bits of a number: as many as fit into an epoll token.
pub const NUMBER_BITS: u32 = SLOT_BITS + GENERATION_BITS;
/// Devices that one worker can have at once.
pub const MAX_DEVICES: usize = 1 << SLOT_BITS;
/// How often a slot is reused before a number repeats.
const GENERATIONS: u32 = 1 << GENERATION_BITS;

fn slot(number: u32) -> usize {
    number as usize & (MAX_DEVICES - 1)
}

/// Allocates the numbers of one worker's devices: 0, 1, 2 and so on, then those of free slots, the
/// longest free first.
#[derive(Debug, Default)]
pub struct Numbers {
    /// Slots that were allocated at least once.
    used: usize,
    /// The next numbers of free slots.
    free: VecDeque<u32>,
}

impl Numbers {
    /// Allocates a number; `None` if [`MAX_DEVICES`] are in use.
    pub fn take(&mut self) -> Option<u32> {
        if let Some(number) = self.free.pop_front() {
            return Some(number);
        }
        let number = (self.used < MAX_DEVICES).then_some(self.used as u32)?;
        self.used += 1;
        Some(number)
    }

    /// Frees `number` after its device was removed from its worker.
    pub fn release(&mut self, number: u32) {
        let generation = (number >> SLOT_BITS).wrapping_add(1) % GENERATIONS;
        self.free
            .push_back(generation << SLOT_BITS | slot(number) as u32);
    }

    /// How many numbers are in use.
    pub fn taken(&self) -> usize {
        self.used - self.free.len()
    }
}

/// Values by number.
#[derive(Debug)]
pub struct Table<T> {
    slots: Vec<Option<(u32, T)>>,
}

impl<T> Default for Table<T> {
    fn default() -> Table<T> {
        Table { slots: Vec::new() }
    }
}

impl<T> Table<T> {
    /// The value with this number. A number of another generation of the slot finds nothing.
    #[inline]
    pub fn get_mut(&mut self, number: u32) -> Option<&mut T> {
        match self.slots.get_mut(slot(number)) {
            Some(Some((n, value))) if *n == number => Some(value),
            _ => None,
        }
    }

    /// As [`get_mut`](Self::get_mut), by shared reference.
    #[inline]
    pub fn get(&self, number: u32) -> Option<&T> {
        match self.slots.get(slot(number)) {
            Some(Some((n, value))) if *n == number => Some(value),
            _ => None,
        }
    }

    /// All values with their numbers.
    #[inline]
    pub fn iter(&self) -> impl Iterator<Item = (u32, &T)> {
        let used = self.slots.iter().flatten();
        used.map(|(number, value)| (*number, value))
    }

    /// All values with their numbers.
    #[inline]
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (u32, &mut T)> {
        let used = self.slots.iter_mut().flatten();
        used.map(|(number, value)| (*number, value))
    }

    /// Inserts `value`; returns the previous value of the slot, which is `None` if numbers come
    /// from [`Numbers`].
    pub fn insert(&mut self, number: u32, value: T) -> Option<T> {
        let slot = slot(number);
        if self.slots.len() <= slot {
            self.slots.resize_with(slot + 1, || None);
        }
        let entry = self.slots.get_mut(slot)?;
        entry.replace((number, value)).map(|(_, old)| old)
    }

    /// Removes the value with this number.
    pub fn remove(&mut self, number: u32) -> Option<T> {
        self.get_mut(number)?;
        let entry = self.slots.get_mut(slot(number))?;
        entry.take().map(|(_, value)| value)
    }

    /// The number of slots, used or not.
    pub fn slots(&self) -> usize {
        self.slots.len()
    }

    /// The number of the value that is in this slot.
    #[inline]
    pub fn at_slot(&self, slot: usize) -> Option<u32> {
        let (number, _) = self.slots.get(slot)?.as_ref()?;
        Some(*number)
    }

    /// The numbers in use.
    pub fn numbers(&self) -> Vec<u32> {
        let used = self.slots.iter().flatten();
        used.map(|(number, _)| *number).collect()
    }
}

#[cfg(test)]
#[path = "numbers_tests.rs"]
mod tests;
