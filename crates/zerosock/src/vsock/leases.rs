//! What the holders of leases and loans share with their endpoint, without its lock: one word each,
//! and the stack of those that were dropped.
//!
//! An endpoint's state lies behind a lock. A reader of leased memory must not take it for each
//! look, and a drop must never wait for it. So each lease has a word here: how many are reading
//! (or, for a loan, writing) at this moment, and whether its bytes have been moved away. The
//! endpoint moves bytes only of a lease that nobody reads: both sides decide by one atomic
//! operation on the word, so that they cannot both win. A lease that is dropped goes onto a stack;
//! whoever next has the endpoint's lock takes the whole stack at once (which is why a plain linked
//! list has no ABA problem here).
//!
//! What must hold: an index is on the stack at most once (a lease is dropped once), and is given
//! out again only after it was taken off; nothing here allocates after the start.

use std::sync::atomic::{AtomicU32, Ordering};

/// No index.
pub(crate) const NONE: u32 = u32::MAX;
/// The bytes lie elsewhere now: ask the endpoint.
const MOVED: u32 = 1 << 31;
/// The memory is still mapped, but the peer may do with it what it likes. The bits below count who
/// is reading.
const TORN: u32 = 1 << 30;

#[derive(Debug)]
struct Word {
    state: AtomicU32,
    /// The next index on the stack of dropped ones.
    next: AtomicU32,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Leases {
    words: Box<[Word]>,
    dropped: AtomicU32,
}

/// What a holder finds when it wants to read.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(crate) enum Entered {
    /// The bytes stay where they are until [`Leases::leave`].
    InPlace,
    /// The endpoint has moved them; [`Leases::leave`] is not to be called.
    Moved,
}

impl Leases {
    pub(crate) fn new(capacity: usize) -> Leases {
        let word = |_| Word {
            state: AtomicU32::new(0),
            next: AtomicU32::new(NONE),
        };
        Leases {
            words: (0..capacity).map(word).collect(),
            dropped: AtomicU32::new(NONE),
        }
    }

    /// How many leases and loans may be out at once.
    pub(crate) fn capacity(&self) -> usize {
        self.words.len()
    }

    fn word(&self, index: u32) -> Option<&Word> {
        self.words.get(index as usize)
    }

    /// A lease begins: its word forgets the one before. By the endpoint alone.
    #[inline]
    pub(crate) fn begin(&self, index: u32) {
        if let Some(word) = self.word(index) {
            word.state.store(0, Ordering::Relaxed);
        }
    }

    /// A holder begins to read.
    #[inline]
    pub(crate) fn enter(&self, index: u32) -> Entered {
        let Some(word) = self.word(index) else {
            return Entered::Moved;
        };
        // Acquire: pairs with the Release in `leave` and `try_move`, so that a reader that is let
        // in reads after whatever was decided before.
        let before = word.state.fetch_add(1, Ordering::Acquire);
        if before & MOVED == 0 {
            return Entered::InPlace;
        }
        word.state.fetch_sub(1, Ordering::Relaxed);
        Entered::Moved
    }

    /// A holder has read. True: the memory was torn away meanwhile.
    #[inline]
    pub(crate) fn leave(&self, index: u32) -> bool {
        self.word(index)
            // Release: what was read was read before the endpoint gives the buffer away.
            .is_some_and(|word| word.state.fetch_sub(1, Ordering::Release) & TORN != 0)
    }

    /// Whether the memory was torn away.
    #[inline]
    pub(crate) fn is_torn(&self, index: u32) -> bool {
        self.word(index)
            .is_some_and(|word| word.state.load(Ordering::Acquire) & TORN != 0)
    }

    /// Claims the bytes of a lease that nobody reads, so that they can be moved. From then on
    /// nobody is let in.
    pub(crate) fn try_move(&self, index: u32) -> bool {
        self.word(index).is_some_and(|word| {
            // A reader that has just turned back may still be counted: the claim is then made at
            // the next attempt. AcqRel: see `enter`.
            word.state
                .compare_exchange(0, MOVED, Ordering::AcqRel, Ordering::Relaxed)
                .is_ok()
        })
    }

    /// Says that the peer has its memory back although somebody reads.
    pub(crate) fn tear(&self, index: u32) {
        if let Some(word) = self.word(index) {
            word.state.fetch_or(TORN, Ordering::AcqRel);
        }
    }

    /// Puts a dropped lease on the stack.
    #[inline]
    pub(crate) fn drop_one(&self, index: u32) {
        let Some(word) = self.word(index) else {
            return;
        };
        let mut head = self.dropped.load(Ordering::Relaxed);
        loop {
            word.next.store(head, Ordering::Relaxed);
            // Release: the link, and all that the holder read, come before the index is seen.
            match self.dropped.compare_exchange_weak(
                head,
                index,
                Ordering::Release,
                Ordering::Relaxed,
            ) {
                Ok(_) => return,
                Err(now) => head = now,
            }
        }
    }

    /// Whether some were dropped since the last look.
    #[inline]
    pub(crate) fn any_dropped(&self) -> bool {
        self.dropped.load(Ordering::Relaxed) != NONE
    }

    /// Takes the stack off: the first of the dropped ones, to be followed with
    /// [`after`](Leases::after). By the endpoint alone.
    #[inline]
    pub(crate) fn take_dropped(&self) -> u32 {
        // Acquire: pairs with `drop_one`.
        self.dropped.swap(NONE, Ordering::Acquire)
    }

    /// The one that was dropped before `index`; to be asked before `index` is used again.
    #[inline]
    pub(crate) fn after(&self, index: u32) -> u32 {
        self.word(index)
            .map_or(NONE, |word| word.next.load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;
    use std::sync::Arc;

    #[test]
    fn a_lease_under_a_reader_is_not_moved() {
        let leases = Leases::new(2);
        leases.begin(1);
        assert_eq!(leases.enter(1), Entered::InPlace);
        assert!(!leases.try_move(1));
        leases.tear(1);
        assert!(leases.is_torn(1));
        assert!(leases.leave(1), "the reader is told");
        leases.begin(1);
        assert!(leases.try_move(1));
        assert_eq!(leases.enter(1), Entered::Moved);
        leases.begin(1);
        assert!(leases.try_move(1), "who was turned back is not counted");
        assert_eq!(leases.enter(7), Entered::Moved, "no such lease");
    }

    #[test]
    fn dropped_leases_come_back_once_each_from_many_threads() {
        const EACH: u32 = 1000;
        let leases = Arc::new(Leases::new(4 * EACH as usize));
        let threads: Vec<_> = (0..4)
            .map(|thread| {
                let leases = leases.clone();
                std::thread::spawn(move || {
                    (0..EACH).for_each(|i| leases.drop_one(thread * EACH + i));
                })
            })
            .collect();
        let mut seen = BTreeSet::new();
        let take = |seen: &mut BTreeSet<u32>| {
            let mut index = leases.take_dropped();
            while index != NONE {
                let next = leases.after(index);
                assert!(seen.insert(index), "{index} came back twice");
                index = next;
            }
        };
        while threads.iter().any(|thread| !thread.is_finished()) {
            take(&mut seen);
        }
        for thread in threads {
            thread.join().unwrap();
        }
        take(&mut seen);
        assert_eq!(seen.len(), 4 * EACH as usize);
    }
}
