//! What a send costs with and without a copy: measured once for each class, for the whole process.
//!
//! A class is a kind of socket, memory that is registered or not, and a length to within a factor
//! of two. While a class is undecided, turns of the two ways alternate, and each turn that consists
//! of sends of one class and one way counts: the time of its system call, divided by its sends.
//! The cheapest turn of each way is what it costs when nothing disturbs it. When both have been
//! seen often enough the cheaper is kept for good; not copying must be cheaper by a twentieth,
//! because a part of its cost comes later, when it is notified.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use zerosock_sys::zc::{Kind, Way};

/// Turns of each way until a class is decided.
const TURNS: u32 = 24;
/// Sends in a row the same way while it is undecided.
const STRETCH: u32 = 32;
/// Below 256 bytes one class, above 16 MiB one.
const SIZES: usize = 18;
const KINDS: usize = 10;

/// What is decided together.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(super) struct Class(usize);

impl Class {
    pub(super) fn of(kind: Kind, registered: bool, len: usize) -> Self {
        let kind = match kind {
            Kind::Tcp4 => 0,
            Kind::Tcp6 => 1,
            Kind::Udp4 => 2,
            Kind::Udp6 => 3,
            Kind::Raw => 4,
            Kind::Packet => 5,
            Kind::VsockStream => 6,
            Kind::VsockMessages => 7,
            Kind::OtherStream => 8,
            Kind::OtherDatagram => 9,
        };
        let size = (usize::BITS - (len >> 8).leading_zeros()) as usize;
        Self((kind * 2 + usize::from(registered)) * SIZES + size.min(SIZES - 1))
    }
}

struct Cell {
    /// The cheapest turn so far, in picoseconds a send, and the number of turns: copying.
    copy: AtomicU64,
    copies: AtomicU32,
    /// The same in place.
    place: AtomicU64,
    places: AtomicU32,
    /// Sends that were asked about while undecided.
    asked: AtomicU32,
    /// 0 undecided, 1 copy, 2 in place.
    decided: AtomicU32,
}

impl Cell {
    const fn new() -> Self {
        Self {
            copy: AtomicU64::new(u64::MAX),
            copies: AtomicU32::new(0),
            place: AtomicU64::new(u64::MAX),
            places: AtomicU32::new(0),
            asked: AtomicU32::new(0),
            decided: AtomicU32::new(0),
        }
    }

    fn way(&self) -> Way {
        match self.decided.load(Relaxed) {
            1 => Way::Copy,
            2 => Way::ZeroCopy,
            _ if (self.asked.fetch_add(1, Relaxed) / STRETCH).is_multiple_of(2) => Way::Copy,
            _ => Way::ZeroCopy,
        }
    }

    fn learn(&self, way: Way, each: u64) {
        let (cost, turns) = match way {
            Way::Copy => (&self.copy, &self.copies),
            Way::ZeroCopy => (&self.place, &self.places),
        };
        cost.fetch_min(each, Relaxed);
        turns.fetch_add(1, Relaxed);
        if self.copies.load(Relaxed) < TURNS || self.places.load(Relaxed) < TURNS {
            return;
        }
        let (copy, place) = (self.copy.load(Relaxed), self.place.load(Relaxed));
        let in_place = place.saturating_add(place / 20) <= copy;
        self.decided.store(1 + u32::from(in_place), Relaxed);
    }
}

static CELLS: [Cell; KINDS * 2 * SIZES] = [const { Cell::new() }; KINDS * 2 * SIZES];

/// How to send one of this class.
pub(super) fn way(class: Class) -> Way {
    CELLS.get(class.0).map_or(Way::Copy, Cell::way)
}

/// Whether turns of this class are still to be measured.
pub(super) fn is_open(class: Class) -> bool {
    CELLS
        .get(class.0)
        .is_some_and(|cell| cell.decided.load(Relaxed) == 0)
}

/// A turn of so many sends took so long.
pub(super) fn learn(class: Class, way: Way, sends: u32, took: Duration) {
    let Some(cell) = CELLS.get(class.0).filter(|_| sends > 0) else {
        return;
    };
    let picoseconds = u64::try_from(took.as_nanos())
        .unwrap_or(u64::MAX)
        .saturating_mul(1000);
    cell.learn(way, picoseconds / u64::from(sends));
}

/// The length from which on the process sends in place over sockets of this kind; none while that
/// is not decided for any length, or if copying won at all that are.
pub(super) fn threshold(kind: Kind, registered: bool) -> Option<usize> {
    let Class(first) = Class::of(kind, registered, 0);
    let cells = CELLS.get(first..first + SIZES)?;
    let size = cells
        .iter()
        .position(|cell| cell.decided.load(Relaxed) == 2)?;
    Some(if size == 0 { 0 } else { 128 << size })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_classes() {
        let class = |len| Class::of(Kind::Tcp4, false, len);
        assert_eq!(class(0), class(255));
        assert_ne!(class(255), class(256));
        assert_eq!(class(4096), class(8191));
        assert_eq!(class(usize::MAX), class(32 << 20));
        assert_ne!(class(4096), Class::of(Kind::Tcp4, true, 4096));
        let last = Class::of(Kind::OtherDatagram, true, usize::MAX);
        assert!(last.0 < CELLS.len());
    }

    fn decide(copy: u64, place: u64) -> Way {
        let cell = Cell::new();
        let mut seen = [0; 2];
        while cell.decided.load(Relaxed) == 0 {
            let way = cell.way();
            let noise = u64::from(seen[0] as u32 % 7) * 1000;
            seen[usize::from(way == Way::ZeroCopy)] += 1;
            cell.learn(way, noise + if way == Way::Copy { copy } else { place });
            assert!(seen.iter().sum::<i32>() < 1000, "it never decides");
        }
        cell.way()
    }

    #[test]
    fn the_cheaper_way_wins_by_a_twentieth() {
        assert_eq!(decide(1_000_000, 800_000), Way::ZeroCopy);
        assert_eq!(decide(1_000_000, 980_000), Way::Copy);
        assert_eq!(decide(1_000_000, 1_500_000), Way::Copy);
    }

    #[test]
    fn the_threshold_is_the_least_length_that_goes_in_place() {
        // A kind that no other test sends over.
        assert_eq!(threshold(Kind::OtherDatagram, true), None);
        let class = Class::of(Kind::OtherDatagram, true, 16_384);
        CELLS[class.0].decided.store(2, Relaxed);
        assert_eq!(threshold(Kind::OtherDatagram, true), Some(16_384));
    }
}
