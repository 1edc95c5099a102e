//! What a send costs with and without a copy: measured once for each class, for the whole process.
//!
//! A class is a kind of socket, the back-end, memory that is registered or not, and a length to
//! within a factor of two. While a class is undecided, turns of the two ways alternate, and each
//! turn counts that consists of sends of one class and one way, all of which the kernel took in it:
//! the time of its system call, divided by its sends. The cheapest turn of each way is what it
//! costs when nothing disturbs it. When both have been seen often enough the cheaper is kept; not
//! copying must be cheaper by a twentieth, because a part of its cost comes later, when it is
//! notified.
//!
//! No decision is for ever: after a million sends a class is measured anew, for as long as that
//! takes and for 8192 sends at most. Meanwhile the old decision is what a report names.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use zerosock_sys::zc::{Kind, Way};

use super::Backend;

/// Turns of each way until a class is decided.
const TURNS: u32 = 24;
/// Sends in a row the same way while it is undecided.
const STRETCH: u32 = 32;
/// Below 256 bytes one class, above 16 MiB one.
const SIZES: usize = 18;
const KINDS: usize = 10;
/// The error queue, the ring, and the ring with memory that is registered.
const MEANS: usize = 3;
/// Sends until a decided class is measured anew, and for how many of them at most.
const LASTS: u32 = 1 << 20;
const ANEW: u32 = 1 << 13;

/// What is decided together.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(super) struct Class(usize);

impl Class {
    pub(super) fn of(kind: Kind, backend: Backend, registered: bool, len: usize) -> Self {
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
        // Only a ring registers memory.
        let means = match backend {
            Backend::Uring => 1 + usize::from(registered),
            Backend::ErrorQueue | Backend::Copy => 0,
        };
        Self((kind * MEANS + means) * SIZES + size.min(SIZES - 1))
    }
}

struct Cell {
    /// The cheapest turn so far, in picoseconds a send, and the number of turns: copying.
    copy: AtomicU64,
    copies: AtomicU32,
    /// The same in place.
    place: AtomicU64,
    places: AtomicU32,
    /// Sends that were asked about while it is measured.
    asked: AtomicU32,
    /// 0 undecided, 1 copy, 2 in place.
    decided: AtomicU32,
    /// It is measured, for the first time or anew.
    open: AtomicBool,
    /// Sends since it was decided.
    used: AtomicU32,
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
            open: AtomicBool::new(true),
            used: AtomicU32::new(0),
        }
    }

    fn way(&self) -> Way {
        let decided = self.decided.load(Relaxed);
        if self.open.load(Relaxed) {
            let asked = self.asked.fetch_add(1, Relaxed);
            if decided == 0 || asked < ANEW {
                return match (asked / STRETCH).is_multiple_of(2) {
                    true => Way::Copy,
                    false => Way::ZeroCopy,
                };
            }
            // Nothing could be learnt: it stays as it was.
            self.close();
        }
        match decided {
            2 => Way::ZeroCopy,
            _ => Way::Copy,
        }
    }

    fn close(&self) {
        self.used.store(0, Relaxed);
        self.open.store(false, Relaxed);
    }

    fn used(&self, sends: u32) {
        if self.open.load(Relaxed) || self.used.fetch_add(sends, Relaxed) < LASTS - sends {
            return;
        }
        self.copy.store(u64::MAX, Relaxed);
        self.place.store(u64::MAX, Relaxed);
        self.copies.store(0, Relaxed);
        self.places.store(0, Relaxed);
        self.asked.store(0, Relaxed);
        self.open.store(true, Relaxed);
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
        self.close();
    }
}

static CELLS: [Cell; KINDS * MEANS * SIZES] = [const { Cell::new() }; KINDS * MEANS * SIZES];

/// How to send one of this class.
pub(super) fn way(class: Class) -> Way {
    CELLS.get(class.0).map_or(Way::Copy, Cell::way)
}

/// Whether turns of this class are still to be measured.
pub(super) fn is_open(class: Class) -> bool {
    CELLS
        .get(class.0)
        .is_some_and(|cell| cell.open.load(Relaxed))
}

/// So many sends have been of this class.
pub(super) fn used(class: Class, sends: u32) {
    if let Some(cell) = CELLS.get(class.0) {
        cell.used(sends);
    }
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

/// The shortest length from which on every class that is decided goes in place; none while there is
/// none.
pub(super) fn threshold(kind: Kind, backend: Backend, registered: bool) -> Option<usize> {
    let Class(first) = Class::of(kind, backend, registered, 0);
    let cells = CELLS.get(first..first + SIZES)?;
    let decided = |cell: &Cell| cell.decided.load(Relaxed);
    let copied = cells.iter().rposition(|cell| decided(cell) == 1);
    let from = copied.map_or(0, |last| last + 1);
    let size = from + cells[from..].iter().position(|cell| decided(cell) == 2)?;
    Some(if size == 0 { 0 } else { 128 << size })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_classes() {
        let class = |len| Class::of(Kind::Tcp4, Backend::Uring, false, len);
        assert_eq!(class(0), class(255));
        assert_ne!(class(255), class(256));
        assert_eq!(class(4096), class(8191));
        assert_eq!(class(usize::MAX), class(32 << 20));
        let last = Class::of(Kind::OtherDatagram, Backend::Uring, true, usize::MAX);
        assert!(last.0 < CELLS.len());
    }

    #[test]
    fn what_costs_differently_is_another_class() {
        let class = |backend, registered| Class::of(Kind::Tcp4, backend, registered, 4096);
        let (ring, queue) = (Backend::Uring, Backend::ErrorQueue);
        assert_ne!(class(ring, false), class(ring, true));
        assert_ne!(class(ring, false), class(queue, false));
        // No memory is registered for the error queue.
        assert_eq!(class(queue, false), class(queue, true));
    }

    #[test]
    fn a_decision_is_measured_anew_and_stays_if_nothing_is_learnt() {
        let cell = Cell::new();
        let learn = |copy, place| {
            for _ in 0..TURNS {
                cell.learn(Way::Copy, copy);
                cell.learn(Way::ZeroCopy, place);
            }
        };
        learn(1000, 500);
        assert_eq!(cell.way(), Way::ZeroCopy);
        for _ in 0..LASTS / 1024 - 1 {
            cell.used(1024);
            assert_eq!(cell.way(), Way::ZeroCopy);
        }
        cell.used(1024);
        // Both ways for a while, though nothing comes of it.
        let copies = (0..ANEW).filter(|_| cell.way() == Way::Copy).count();
        assert_eq!(copies, ANEW as usize / 2);
        assert!((0..ANEW).all(|_| cell.way() == Way::ZeroCopy));
        // The next time it is another machine.
        for _ in 0..LASTS / 1024 {
            cell.used(1024);
        }
        learn(500, 1000);
        assert!((0..ANEW).all(|_| cell.way() == Way::Copy));
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
        let class = |len| Class::of(Kind::OtherDatagram, Backend::Uring, true, len).0;
        let threshold = || threshold(Kind::OtherDatagram, Backend::Uring, true);
        assert_eq!(threshold(), None);
        CELLS[class(16_384)].decided.store(2, Relaxed);
        assert_eq!(threshold(), Some(16_384));
        CELLS[class(32_768)].decided.store(1, Relaxed);
        assert_eq!(threshold(), None, "a longer one is copied");
        CELLS[class(usize::MAX)].decided.store(2, Relaxed);
        assert_eq!(threshold(), Some(16 << 20));
        assert_eq!(class((16 << 20) - 1) + 1, class(16 << 20));
    }
}
