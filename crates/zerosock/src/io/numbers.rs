//! Numbers of devices, and the table that finds a device by its number.
//!
//! Devices come and go while messages to them are under way in mailboxes, so a number is not a
//! bare place in a table: it is a place and a generation. Whoever gives out numbers
//! ([`Numbers`]) gives a place out again only after its device is gone, with the next generation;
//! what was meant for the one before finds nothing ([`Table::get`]) and is dropped or sent back.
//! A message would have to be under way while its place is reused [`GENERATIONS`] times to be
//! taken for one of another device; each reuse takes a round trip through the same mailbox.
//!
//! A number that is never used again would need no generation, but a search on the way of a
//! packet: this way the lookup is an index and a comparison.

use std::collections::VecDeque;

/// Bits of a number that are the place.
const PLACE_BITS: u32 = 16;
const GENERATION_BITS: u32 = 12;
/// Bits of a number: as many as fit into the token of a descriptor.
pub(crate) const NUMBER_BITS: u32 = PLACE_BITS + GENERATION_BITS;
/// Devices that one worker can have at once.
pub(crate) const MAX_DEVICES: usize = 1 << PLACE_BITS;
/// Devices that may have a place one after the other before a number comes again.
const GENERATIONS: u32 = 1 << GENERATION_BITS;

fn place(number: u32) -> usize {
    number as usize & (MAX_DEVICES - 1)
}

/// Gives out the numbers of one worker's devices: 0, 1, 2 and so on, then those of places that
/// are free again, the one that is free for longest first.
#[derive(Debug, Default)]
pub(crate) struct Numbers {
    /// Places that were given out at least once.
    used: usize,
    /// The next numbers of places that are free.
    free: VecDeque<u32>,
}

impl Numbers {
    /// A number that no device has; `None`: there are [`MAX_DEVICES`].
    pub(crate) fn take(&mut self) -> Option<u32> {
        if let Some(number) = self.free.pop_front() {
            return Some(number);
        }
        let number = (self.used < MAX_DEVICES).then_some(self.used as u32)?;
        self.used += 1;
        Some(number)
    }

    /// The device that had `number` is gone from its worker.
    pub(crate) fn release(&mut self, number: u32) {
        let generation = (number >> PLACE_BITS).wrapping_add(1) % GENERATIONS;
        self.free
            .push_back(generation << PLACE_BITS | place(number) as u32);
    }

    /// Numbers that are given out.
    pub(crate) fn taken(&self) -> usize {
        self.used - self.free.len()
    }
}

/// What has a number, found by it.
#[derive(Debug)]
pub(crate) struct Table<T> {
    places: Vec<Option<(u32, T)>>,
}

impl<T> Table<T> {
    pub(crate) fn new() -> Table<T> {
        Table { places: Vec::new() }
    }

    /// What has this very number, not an earlier or later one of the same place.
    #[inline]
    pub(crate) fn get_mut(&mut self, number: u32) -> Option<&mut T> {
        match self.places.get_mut(place(number)) {
            Some(Some((n, value))) if *n == number => Some(value),
            _ => None,
        }
    }

    /// As [`get_mut`](Self::get_mut), to look only.
    #[inline]
    pub(crate) fn get(&self, number: u32) -> Option<&T> {
        match self.places.get(place(number)) {
            Some(Some((n, value))) if *n == number => Some(value),
            _ => None,
        }
    }

    /// Everything in the table, with its number.
    #[inline]
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, &T)> {
        let used = self.places.iter().flatten();
        used.map(|(number, value)| (*number, value))
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = (u32, &mut T)> {
        let used = self.places.iter_mut().flatten();
        used.map(|(number, value)| (*number, value))
    }

    /// Puts `value` in; gives back what had the place, which is nothing if numbers come from
    /// [`Numbers`].
    pub(crate) fn insert(&mut self, number: u32, value: T) -> Option<T> {
        let place = place(number);
        if self.places.len() <= place {
            self.places.resize_with(place + 1, || None);
        }
        let entry = self.places.get_mut(place)?;
        entry.replace((number, value)).map(|(_, old)| old)
    }

    /// Takes out what has this very number.
    pub(crate) fn remove(&mut self, number: u32) -> Option<T> {
        self.get_mut(number)?;
        let entry = self.places.get_mut(place(number))?;
        entry.take().map(|(_, value)| value)
    }

    /// Places that there are, used or not.
    pub(crate) fn places(&self) -> usize {
        self.places.len()
    }

    /// The number of what has this place now.
    #[inline]
    pub(crate) fn at_place(&self, place: usize) -> Option<u32> {
        let (number, _) = self.places.get(place)?.as_ref()?;
        Some(*number)
    }

    /// The numbers in use.
    pub(crate) fn numbers(&self) -> Vec<u32> {
        let used = self.places.iter().flatten();
        used.map(|(number, _)| *number).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_comes_again_only_after_all_generations_of_its_place() {
        let mut numbers = Numbers::default();
        let first: Vec<u32> = (0..3).map(|_| numbers.take().unwrap()).collect();
        assert_eq!(first, [0, 1, 2]);
        let mut seen = std::collections::HashSet::from([1]);
        numbers.release(1);
        for _ in 1..GENERATIONS {
            let number = numbers.take().unwrap();
            assert!(number < 1 << NUMBER_BITS);
            assert_eq!(place(number), 1);
            assert!(seen.insert(number), "{number} came twice");
            numbers.release(number);
        }
        assert_eq!(numbers.take(), Some(1));
        assert_eq!(numbers.taken(), 3);
    }

    #[test]
    fn there_are_so_many_and_no_more() {
        let mut numbers = Numbers::default();
        for n in 0..MAX_DEVICES as u32 {
            assert_eq!(numbers.take(), Some(n));
        }
        assert_eq!(numbers.take(), None);
        numbers.release(7);
        assert_eq!(numbers.take(), Some(1 << PLACE_BITS | 7));
    }

    #[test]
    fn what_was_meant_for_an_earlier_one_finds_nothing() {
        let mut table = Table::new();
        let mut numbers = Numbers::default();
        let old = numbers.take().unwrap();
        assert!(table.insert(old, "old").is_none());
        assert_eq!(table.remove(old), Some("old"));
        numbers.release(old);
        let new = numbers.take().unwrap();
        assert!(table.insert(new, "new").is_none());
        assert_eq!(table.get_mut(old), None);
        assert_eq!(table.remove(old), None);
        assert_eq!(table.get_mut(new), Some(&mut "new"));
        assert_eq!(table.numbers(), [new]);
        assert_eq!(table.get_mut(9), None);
    }
}
