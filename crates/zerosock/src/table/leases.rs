//! Lease and loan state shared between their holders and the endpoint without the endpoint's lock.
//!
//! An endpoint's state lies behind a lock. Reading leased memory must not take that lock, and
//! dropping a lease must not wait for it. Each lease therefore has an atomic state word here: the
//! number of threads that read it now (or, for a loan, write), and whether its bytes were moved.
//! The endpoint moves bytes only of a lease without readers: reader and endpoint each decide by one
//! atomic operation on the word, so that only one can succeed. A lease that is dropped while another
//! thread holds the endpoint's lock is pushed onto a lock-free stack; the next thread with the lock
//! takes the whole stack at once, which rules out the ABA problem.
//!
//! A lease whose return would show the peer nothing, because its buffer and credit are only passed on
//! in batches, stays on the stack until the endpoint's next call: dropping it takes one atomic
//! operation. Such a lease carries the number of the [round](Leases::round) in which it was made.
//! The endpoint ends the round when the peer may begin to wait for a return.
//!
//! If the endpoint needs to move bytes under a reader, it sets a mark in the word. The last reader
//! to leave sees the mark and pushes one extra index, the *recheck* index, onto the stack. A lease
//! that is read for long therefore needs no timer.
//!
//! # Invariants
//! - An index is on the stack at most once, and is reused only after it was taken off.
//! - No holder begins to write to revoked memory.
//! - Nothing allocates after construction.

use std::sync::atomic::{AtomicU32, Ordering};

/// No index.
pub(crate) const NONE: u32 = u32::MAX;
/// The bytes were moved: the endpoint has the copy.
const MOVED: u32 = 1 << 31;
/// The buffer was returned to the peer under a reader. The memory is still mapped, but the peer may
/// write it.
const REVOKED: u32 = 1 << 30;
/// The endpoint waits to move the bytes; the last reader must request a recheck.
const WANTED: u32 = 1 << 29;
/// The number of readers.
const READERS: u32 = WANTED - 1;
/// Limit on readers. Safe code exceeds it only by forgetting guards; the process is then aborted,
/// as with `Arc`. The rest of the field absorbs threads that increment concurrently.
const MAX_READERS: u32 = READERS / 2;

#[derive(Debug)]
struct Entry {
    state: AtomicU32,
    /// The next index on the stack of dropped leases.
    next: AtomicU32,
}

/// The lease table. See the module documentation.
#[derive(Debug)]
pub struct Leases {
    /// The last entry is the recheck index; its state is 1 while it is on the stack.
    entries: Box<[Entry]>,
    dropped: AtomicU32,
    /// See [`Leases::round`].
    round: AtomicU32,
}

/// The result of [`Leases::enter`].
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(crate) enum Entered {
    /// The bytes stay in place until [`Leases::leave`].
    InPlace,
    /// The bytes were moved; [`Leases::leave`] must not be called.
    Moved,
}

impl Leases {
    pub(crate) fn new(capacity: usize) -> Leases {
        let entry = |_| Entry {
            state: AtomicU32::new(0),
            next: AtomicU32::new(NONE),
        };
        Leases {
            entries: (0..=capacity).map(entry).collect(),
            dropped: AtomicU32::new(NONE),
            round: AtomicU32::new(0),
        }
    }

    /// The number of the present round. A lease of it that is dropped may wait on the stack until the
    /// endpoint is called again.
    #[inline]
    pub(crate) fn round(&self) -> u32 {
        // Relaxed: the endpoint alone stores it and asks for it here, with its lock held.
        self.round.load(Ordering::Relaxed)
    }

    /// Ends the round: all leases that are out now return as soon as they are dropped. Called by the
    /// endpoint only, which checks the stack after it has released its lock.
    #[inline]
    pub(crate) fn end_round(&self) {
        let next = self.round().wrapping_add(1);
        // SeqCst: pairs with `push_of_round`.
        self.round.store(next, Ordering::SeqCst);
    }

    /// Leases and loans that can be out at once.
    pub(crate) fn capacity(&self) -> usize {
        self.entries.len() - 1
    }

    /// The recheck index.
    #[inline]
    pub(crate) fn recheck_index(&self) -> u32 {
        self.capacity() as u32
    }

    /// Begins a recheck: readers that leave from now on request another one. Called by the endpoint
    /// only.
    pub(crate) fn begin_recheck(&self) {
        if let Some(entry) = self.entry(self.recheck_index()) {
            // AcqRel: a reader that still finds the index on the stack has left before the recheck.
            entry.state.swap(0, Ordering::AcqRel);
        }
    }

    fn entry(&self, index: u32) -> Option<&Entry> {
        self.entries.get(index as usize)
    }

    /// Starts a lease with a cleared state word. Called by the endpoint only.
    #[inline]
    pub(crate) fn begin(&self, index: u32) {
        if let Some(entry) = self.entry(index) {
            // Relaxed: no other thread has the index. The last holder's accesses came before it pushed the
            // index, which `take_dropped` acquired, or before it took the endpoint's lock; the next holder
            // gets the index from this thread.
            entry.state.store(0, Ordering::Relaxed);
        }
    }

    /// A holder begins to read. Revoked memory may be read, because it is still mapped.
    #[inline]
    pub(crate) fn enter(&self, index: u32) -> Entered {
        self.enter_unless(index, MOVED)
    }

    /// A holder begins to write. Refused for revoked memory, which belongs to the peer again.
    #[inline]
    pub(crate) fn enter_to_write(&self, index: u32) -> Entered {
        self.enter_unless(index, MOVED | REVOKED)
    }

    #[inline]
    fn enter_unless(&self, index: u32, gone: u32) -> Entered {
        let Some(entry) = self.entry(index) else {
            return Entered::Moved;
        };
        // Acquire: pairs with the Release in `leave` and `try_move`, so that an admitted reader
        // reads after every earlier decision.
        let before = entry.state.fetch_add(1, Ordering::Acquire);
        if before & READERS > MAX_READERS {
            too_many_readers();
        }
        if before & gone == 0 {
            return Entered::InPlace;
        }
        // Relaxed: nothing was read. It keeps the release sequence of an earlier `leave`.
        entry.state.fetch_sub(1, Ordering::Relaxed);
        Entered::Moved
    }

    /// A holder has finished reading or writing. Returns true if the endpoint waits for that: the
    /// recheck index is on the stack.
    #[inline]
    pub(crate) fn leave(&self, index: u32) -> bool {
        let Some(entry) = self.entry(index) else {
            return false;
        };
        // Release: pairs with `try_move`, so that the reads happen before the endpoint returns the buffer.
        let before = entry.state.fetch_sub(1, Ordering::Release);
        before & WANTED != 0 && before & READERS == 1 && self.request_recheck()
    }

    #[cold]
    fn request_recheck(&self) -> bool {
        let recheck_index = self.recheck_index();
        // AcqRel: see `begin_recheck`.
        if let Some(entry) = self.entry(recheck_index)
            && entry.state.swap(1, Ordering::AcqRel) == 0
        {
            self.push_dropped(recheck_index);
        }
        true
    }

    /// Whether the buffer was returned to the peer under a reader.
    #[inline]
    pub(crate) fn is_revoked(&self, index: u32) -> bool {
        self.entry(index)
            .is_some_and(|entry| entry.state.load(Ordering::Acquire) & REVOKED != 0)
    }

    /// Whether [`enter_to_write`](Self::enter_to_write) would admit a holder. Only the endpoint's lock
    /// keeps that so.
    #[inline]
    pub(crate) fn is_writable(&self, index: u32) -> bool {
        self.entry(index)
            .is_some_and(|entry| entry.state.load(Ordering::Acquire) & (MOVED | REVOKED) == 0)
    }

    /// Claims the bytes of a lease without readers so that they can be moved; later readers are
    /// refused. Returns false if there are readers: the last of them requests a recheck.
    pub(crate) fn try_move(&self, index: u32) -> bool {
        let Some(entry) = self.entry(index) else {
            return false;
        };
        let mut state = entry.state.load(Ordering::Relaxed);
        loop {
            if state & (MOVED | REVOKED) != 0 {
                return false;
            }
            let free = state & READERS == 0;
            let next = if free { MOVED } else { state | WANTED };
            // AcqRel: see `enter_unless`.
            match entry.state.compare_exchange_weak(
                state,
                next,
                Ordering::AcqRel,
                Ordering::Relaxed,
            ) {
                Ok(_) => return free,
                Err(now) => state = now,
            }
        }
    }

    /// Marks a lease with readers as revoked: its buffer returns to the peer.
    pub(crate) fn mark_torn(&self, index: u32) {
        if let Some(entry) = self.entry(index) {
            entry.state.fetch_or(REVOKED, Ordering::AcqRel);
        }
    }

    /// Pushes a dropped lease onto the stack.
    #[inline]
    pub(crate) fn push_dropped(&self, index: u32) {
        self.push_chain(index, index);
    }

    /// Pushes a dropped lease that was made in `round`. Returns true if that round is over: then the
    /// caller has the stack taken.
    ///
    /// A round that ends meanwhile is not missed. The endpoint stores the new number and then checks
    /// the stack ([`any_dropped_after_unlock`](Self::any_dropped_after_unlock)); this thread pushes and
    /// then loads the number. All four are sequentially consistent: either the check finds the lease,
    /// or the load reads the new number.
    #[inline]
    pub(crate) fn push_of_round(&self, index: u32, round: u32) -> bool {
        self.push_dropped(index);
        self.round.load(Ordering::SeqCst) != round
    }

    /// Pushes several leases at once: they come off together, the last one first.
    pub(crate) fn push_all_dropped(&self, mut indices: impl Iterator<Item = u32>) {
        let Some(first) = indices.next() else {
            return;
        };
        let mut last = first;
        for index in indices {
            if let Some(entry) = self.entry(index) {
                entry.next.store(last, Ordering::Relaxed);
                last = index;
            }
        }
        self.push_chain(last, first);
    }

    /// Pushes `last` and all entries linked behind it down to `first`.
    #[inline]
    fn push_chain(&self, last: u32, first: u32) {
        let Some(entry) = self.entry(first) else {
            return;
        };
        let mut head = self.dropped.load(Ordering::Relaxed);
        loop {
            entry.next.store(head, Ordering::Relaxed);
            // The links and the holder's reads happen before the index becomes visible. SeqCst: pairs
            // with `any_dropped_after_unlock`.
            match self.dropped.compare_exchange_weak(
                head,
                last,
                Ordering::SeqCst,
                Ordering::Relaxed,
            ) {
                Ok(_) => break,
                Err(now) => head = now,
            }
        }
    }

    /// As [`any_dropped`](Self::any_dropped), for the thread that has just released the lock: a
    /// thread that dropped a lease and found the lock taken relies on this check to find it.
    ///
    /// One thread pushes onto the stack and then tries the lock; the other releases the lock and
    /// then checks the stack. All four are sequentially consistent, as those of
    /// [`OwnerLock`](zerosock_sys::OwnerLock) are: either the check finds the push, or the attempt
    /// finds the lock free or with another holder, which checks when it has released it.
    #[inline]
    pub(crate) fn any_dropped_after_unlock(&self) -> bool {
        self.dropped.load(Ordering::SeqCst) != NONE
    }

    /// Whether leases were dropped since the last [`take_dropped`](Self::take_dropped).
    #[inline]
    pub(crate) fn any_dropped(&self) -> bool {
        // Relaxed: a hint. A push that it misses is found after the unlock, or, of a lease of this round,
        // by the next call.
        self.dropped.load(Ordering::Relaxed) != NONE
    }

    /// Takes the whole stack; returns the first dropped index, followed by
    /// [`next_dropped`](Leases::next_dropped). Called by the endpoint only.
    #[inline]
    pub(crate) fn take_dropped(&self) -> u32 {
        // Acquire: pairs with all pushes since the last call, because each is a read-modify-write: their
        // links and what their holders read come before.
        self.dropped.swap(NONE, Ordering::Acquire)
    }

    /// The index dropped before `index`; must be read before `index` is reused.
    #[inline]
    pub(crate) fn next_dropped(&self, index: u32) -> u32 {
        // Relaxed: stored before the push, which `take_dropped` has acquired.
        self.entry(index)
            .map_or(NONE, |entry| entry.next.load(Ordering::Relaxed))
    }
}

/// A wrapped count would let the endpoint move bytes that are being read.
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
        leases.mark_torn(1);
        assert!(leases.is_revoked(1));
        leases.leave(1);
        assert!(!leases.try_move(1), "it was moved already");
        leases.begin(1);
        assert!(leases.try_move(1));
        assert_eq!(leases.enter(1), Entered::Moved);
        leases.begin(1);
        assert!(leases.try_move(1), "a refused reader is not counted");
        assert_eq!(leases.enter(7), Entered::Moved, "no such lease");
    }

    /// Runs the named test again in a child process, with the variable set.
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
        // As many as `mem::forget` of guards leaves within a few seconds.
        leases.entries[0]
            .state
            .store(MAX_READERS, Ordering::Relaxed);
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
        assert!(leases.is_writable(0));
        leases.mark_torn(0);
        assert!(!leases.is_writable(0));
        assert_eq!(leases.enter_to_write(0), Entered::Moved);
        assert_eq!(leases.enter(0), Entered::InPlace);
        assert!(!leases.leave(0) && !leases.leave(0));
        assert_eq!(leases.enter_to_write(0), Entered::Moved);
    }

    #[test]
    fn the_last_reader_of_a_requested_lease_requests_a_recheck() {
        let leases = Leases::new(2);
        leases.begin(0);
        leases.begin(1);
        for index in [0, 0, 1] {
            assert_eq!(leases.enter(index), Entered::InPlace);
        }
        assert!(!leases.try_move(0) && !leases.try_move(1));
        assert!(!leases.leave(0), "there is another reader");
        assert!(!leases.any_dropped());
        assert!(leases.leave(0) && leases.leave(1));
        assert_eq!(leases.take_dropped(), leases.recheck_index());
        assert_eq!(
            leases.next_dropped(leases.recheck_index()),
            NONE,
            "once for both"
        );
        leases.begin_recheck();
        assert!(leases.try_move(0));
        // A reader that entered meanwhile requests another recheck.
        assert_eq!(leases.enter(1), Entered::InPlace);
        assert!(!leases.try_move(1) && leases.leave(1));
        assert_eq!(leases.take_dropped(), leases.recheck_index());
        leases.begin_recheck();
        assert!(leases.try_move(1));
    }

    #[test]
    fn leases_dropped_together_return_together_last_first() {
        let leases = Leases::new(9);
        leases.push_dropped(7);
        leases.push_all_dropped([3, 1, 4].into_iter());
        leases.push_all_dropped(std::iter::empty());
        leases.push_all_dropped(std::iter::once(5));
        let mut index = leases.take_dropped();
        let mut seen = Vec::new();
        while index != NONE {
            seen.push(index);
            index = leases.next_dropped(index);
        }
        assert_eq!(seen, [5, 4, 1, 3, 7]);
    }

    #[test]
    fn dropped_leases_return_once_each_from_many_threads() {
        const EACH: u32 = 1000;
        let leases = Arc::new(Leases::new(4 * EACH as usize));
        let threads: Vec<_> = (0..4)
            .map(|thread| {
                let leases = leases.clone();
                std::thread::spawn(move || {
                    (0..EACH).for_each(|i| leases.push_dropped(thread * EACH + i));
                })
            })
            .collect();
        let mut seen = BTreeSet::new();
        let take = |seen: &mut BTreeSet<u32>| {
            let mut index = leases.take_dropped();
            while index != NONE {
                let next = leases.next_dropped(index);
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
