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
//! The endpoint that wanted the bytes of a lease under a reader leaves a mark in its word. The
//! reader who leaves last sees it, and puts one more index on the stack, which is no lease's: *look
//! again*. So a lease that is read for long costs no timer.
//!
//! What must hold: an index is on the stack at most once (a lease is dropped once), and is given
//! out again only after it was taken off; nobody begins to write to memory that was torn away;
//! nothing here allocates after the start.

use std::sync::atomic::{AtomicU32, Ordering};

/// No index.
pub(crate) const NONE: u32 = u32::MAX;
/// The bytes lie elsewhere now: ask the endpoint.
const MOVED: u32 = 1 << 31;
/// The memory is still mapped, but the peer may do with it what it likes.
const TORN: u32 = 1 << 30;
/// The endpoint would have the bytes moved: it is to be told when nobody reads any more.
const WANTED: u32 = 1 << 29;
/// How many are reading.
const READERS: u32 = WANTED - 1;
/// Most that may be reading. Safe code exceeds it only by forgetting guards; then the process is
/// aborted, as `Arc` does it. The rest of the field is for the threads that are on their way there.
const MAX_READERS: u32 = READERS / 2;

#[derive(Debug)]
struct Word {
    state: AtomicU32,
    /// The next index on the stack of dropped ones.
    next: AtomicU32,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Leases {
    /// The last one stands for *look again*; its state is 1 while it is on the stack.
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
            words: (0..=capacity).map(word).collect(),
            dropped: AtomicU32::new(NONE),
        }
    }

    /// How many leases and loans may be out at once.
    pub(crate) fn capacity(&self) -> usize {
        self.words.len() - 1
    }

    /// The index that says *look again*.
    #[inline]
    pub(crate) fn look(&self) -> u32 {
        self.capacity() as u32
    }

    /// The look begins: whoever leaves from now on asks for another one. By the endpoint alone.
    pub(crate) fn begin_look(&self) {
        if let Some(look) = self.word(self.look()) {
            // AcqRel: a reader that finds it on the stack still has left before it is looked.
            look.state.swap(0, Ordering::AcqRel);
        }
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

    /// A holder begins to read. Torn memory may still be read, since it is mapped.
    #[inline]
    pub(crate) fn enter(&self, index: u32) -> Entered {
        self.enter_unless(index, MOVED)
    }

    /// A holder begins to write. Not to torn memory: the peer was told that nobody does any more.
    #[inline]
    pub(crate) fn enter_to_write(&self, index: u32) -> Entered {
        self.enter_unless(index, MOVED | TORN)
    }

    #[inline]
    fn enter_unless(&self, index: u32, gone: u32) -> Entered {
        let Some(word) = self.word(index) else {
            return Entered::Moved;
        };
        // Acquire: pairs with the Release in `leave` and `try_move`, so that a reader that is let
        // in reads after whatever was decided before.
        let before = word.state.fetch_add(1, Ordering::Acquire);
        if before & READERS > MAX_READERS {
            too_many_readers();
        }
        if before & gone == 0 {
            return Entered::InPlace;
        }
        word.state.fetch_sub(1, Ordering::Relaxed);
        Entered::Moved
    }

    /// A holder has read, or written. True: the endpoint waits for that, and *look again* is on
    /// the stack.
    #[inline]
    pub(crate) fn leave(&self, index: u32) -> bool {
        let Some(word) = self.word(index) else {
            return false;
        };
        // Release: what was read was read before the endpoint gives the buffer away.
        let before = word.state.fetch_sub(1, Ordering::Release);
        before & WANTED != 0 && before & READERS == 1 && self.ask_to_look()
    }

    #[cold]
    fn ask_to_look(&self) -> bool {
        let look = self.look();
        // AcqRel: see `begin_look`.
        if let Some(word) = self.word(look)
            && word.state.swap(1, Ordering::AcqRel) == 0
        {
            self.drop_one(look);
        }
        true
    }

    /// Whether the memory was torn away.
    #[inline]
    pub(crate) fn is_torn(&self, index: u32) -> bool {
        self.word(index)
            .is_some_and(|word| word.state.load(Ordering::Acquire) & TORN != 0)
    }

    /// Claims the bytes of a lease that nobody reads, so that they can be moved: from then on
    /// nobody is let in. If somebody does, the last who leaves asks for another look.
    pub(crate) fn try_move(&self, index: u32) -> bool {
        let Some(word) = self.word(index) else {
            return false;
        };
        let mut state = word.state.load(Ordering::Relaxed);
        loop {
            if state & (MOVED | TORN) != 0 {
                return false;
            }
            let free = state & READERS == 0;
            let next = if free { MOVED } else { state | WANTED };
            // AcqRel: see `enter_unless`.
            match word
                .state
                .compare_exchange_weak(state, next, Ordering::AcqRel, Ordering::Relaxed)
            {
                Ok(_) => return free,
                Err(now) => state = now,
            }
        }
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
        self.drop_chain(index, index);
    }

    /// Puts several on the stack at once: they come off together, the last one first.
    pub(crate) fn drop_all(&self, mut indices: impl Iterator<Item = u32>) {
        let Some(first) = indices.next() else {
            return;
        };
        let mut last = first;
        for index in indices {
            if let Some(word) = self.word(index) {
                word.next.store(last, Ordering::Relaxed);
                last = index;
            }
        }
        self.drop_chain(last, first);
    }

    /// Puts `last` on the stack, and all that are linked behind it down to `first`.
    #[inline]
    fn drop_chain(&self, last: u32, first: u32) {
        let Some(word) = self.word(first) else {
            return;
        };
        let mut head = self.dropped.load(Ordering::Relaxed);
        loop {
            word.next.store(head, Ordering::Relaxed);
            // Release: the links, and all that the holder read, come before the index is seen.
            // Acquire: pairs with `any_dropped_meanwhile`.
            match self.dropped.compare_exchange_weak(
                head,
                last,
                Ordering::AcqRel,
                Ordering::Relaxed,
            ) {
                Ok(_) => break,
                Err(now) => head = now,
            }
        }
    }

    /// As [`any_dropped`](Self::any_dropped), for the thread that has just released the lock: a
    /// thread that dropped a lease and found the lock taken relies on this look to find it.
    ///
    /// One thread writes the stack and then tries the lock, the other releases the lock and then
    /// looks at the stack. With plain loads each could miss the other's write. So this look is a
    /// read-modify-write, as the push in `drop_chain` is, and the two are ordered:
    /// - If the push comes first, this look reads what it left there, or that the stack was taken
    ///   since, by a holder of the lock.
    /// - If this look comes first, the push reads from it or from a read-modify-write behind it,
    ///   and so synchronizes with it: the release of the lock happens before the push and before
    ///   the attempt to lock. That attempt fails only if another thread took the lock later, which
    ///   looks here again when it has released it.
    #[inline]
    pub(crate) fn any_dropped_meanwhile(&self) -> bool {
        // One that changes nothing, but is not a mere load as long as the stack is empty. Release:
        // for the push behind it. Acquire: for one that a later look could be the first to see.
        self.dropped
            .compare_exchange(NONE, NONE, Ordering::AcqRel, Ordering::Acquire)
            .is_err()
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

/// A count that wrapped would let the endpoint move bytes that are being read.
#[cold]
fn too_many_readers() -> ! {
    eprintln!("zerosock: more than {MAX_READERS} readers of one lease: aborting");
    std::process::abort()
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
        leases.leave(1);
        assert!(!leases.try_move(1), "its buffer is gone already");
        leases.begin(1);
        assert!(leases.try_move(1));
        assert_eq!(leases.enter(1), Entered::Moved);
        leases.begin(1);
        assert!(leases.try_move(1), "who was turned back is not counted");
        assert_eq!(leases.enter(7), Entered::Moved, "no such lease");
    }

    /// Runs the test of that name again in a process of its own, with the variable set.
    fn in_a_child(test: &str) -> std::process::Output {
        let mut child = std::process::Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", test, "--nocapture", "--test-threads=1"]);
        child.env(CHILD, "1").output().unwrap()
    }

    const CHILD: &str = "ZEROSOCK_TEST_IN_A_CHILD";

    #[test]
    fn a_count_of_readers_that_would_wrap_aborts_the_process() {
        use std::os::unix::process::ExitStatusExt;

        let test = "table::leases::tests::a_count_of_readers_that_would_wrap_aborts_the_process";
        if std::env::var_os(CHILD).is_none() {
            let output = in_a_child(test);
            let text = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.signal(), Some(libc::SIGABRT), "{text}");
            assert!(text.contains("readers of one lease"), "{text}");
            return;
        }
        let leases = Leases::new(1);
        // As many as `mem::forget` of guards leaves there in a few seconds.
        leases.words[0].state.store(MAX_READERS, Ordering::Relaxed);
        assert_eq!(leases.enter(0), Entered::InPlace);
        assert!(!leases.try_move(0));
        for _ in 0..2 {
            leases.enter(0);
        }
        std::process::exit(0);
    }

    #[test]
    fn torn_memory_is_read_but_not_written() {
        let leases = Leases::new(2);
        leases.begin(0);
        assert_eq!(leases.enter_to_write(0), Entered::InPlace);
        leases.tear(0);
        assert_eq!(leases.enter_to_write(0), Entered::Moved);
        assert_eq!(leases.enter(0), Entered::InPlace);
        assert!(!leases.leave(0) && !leases.leave(0));
        assert_eq!(leases.enter_to_write(0), Entered::Moved);
    }

    #[test]
    fn the_last_reader_of_a_wanted_lease_asks_for_a_look() {
        let leases = Leases::new(2);
        leases.begin(0);
        leases.begin(1);
        for index in [0, 0, 1] {
            assert_eq!(leases.enter(index), Entered::InPlace);
        }
        assert!(!leases.try_move(0) && !leases.try_move(1));
        assert!(!leases.leave(0), "somebody still reads");
        assert!(!leases.any_dropped());
        assert!(leases.leave(0) && leases.leave(1));
        assert_eq!(leases.take_dropped(), leases.look());
        assert_eq!(leases.after(leases.look()), NONE, "once for both");
        leases.begin_look();
        assert!(leases.try_move(0));
        // Who came again meanwhile asks again.
        assert_eq!(leases.enter(1), Entered::InPlace);
        assert!(!leases.try_move(1) && leases.leave(1));
        assert_eq!(leases.take_dropped(), leases.look());
        leases.begin_look();
        assert!(leases.try_move(1));
    }

    #[test]
    fn those_dropped_together_come_back_together_last_first() {
        let leases = Leases::new(9);
        leases.drop_one(7);
        leases.drop_all([3, 1, 4].into_iter());
        leases.drop_all(std::iter::empty());
        leases.drop_all(std::iter::once(5));
        let mut index = leases.take_dropped();
        let mut seen = Vec::new();
        while index != NONE {
            seen.push(index);
            index = leases.after(index);
        }
        assert_eq!(seen, [5, 4, 1, 3, 7]);
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
