//! The table of live mappings that a SIGBUS handler reads.
//!
//! A front-end can truncate the file behind mapped memory; the next access then raises SIGBUS.
//! zerosock-sys installs the handler; this module has the data it needs.
//!
//! # Invariants
//! - [`handle_fault`] runs inside a signal handler: no lock, no allocation, no memory that could be
//!   freed meanwhile. Slots therefore live in static or leaked chunks and are reused, never freed;
//!   a slot is read under a version counter, so that the reader detects and skips one that is being
//!   changed.
//! - The slot of the mapping that faults cannot change meanwhile: the faulting thread borrows the
//!   memory, or one that consists of extents of it and keeps it, so its `Drop`, which alone changes
//!   the slot, has not begun.

use core::ptr;
use core::sync::atomic::{
    AtomicBool, AtomicPtr, AtomicU64, AtomicUsize,
    Ordering::{AcqRel, Acquire, Relaxed, Release},
    fence,
};

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};

const CHUNK: usize = 128;

static TABLE: Chunk = Chunk::new();

struct Chunk {
    slots: [Slot; CHUNK],
    next: AtomicPtr<Chunk>,
}

impl Chunk {
    const fn new() -> Chunk {
        Chunk {
            slots: [const { Slot::new() }; CHUNK],
            next: AtomicPtr::new(ptr::null_mut()),
        }
    }

    fn next(&self) -> Option<&'static Chunk> {
        // SAFETY: `next` is null or was set once by `grow` to a leaked box, which is never freed,
        // never moved and only ever shared; Acquire pairs with the AcqRel exchange there, so its
        // contents are initialised for us.
        unsafe { self.next.load(Acquire).as_ref() }
    }

    /// The next chunk, allocated if there is none. Never called by a signal handler.
    fn grow(&self) -> &'static Chunk {
        if let Some(next) = self.next() {
            return next;
        }
        let fresh = Box::into_raw(Box::new(Chunk::new()));
        if self
            .next
            .compare_exchange(ptr::null_mut(), fresh, AcqRel, Acquire)
            .is_err()
        {
            // SAFETY: the exchange failed, so no other thread has seen the box made two lines
            // above.
            drop(unsafe { Box::from_raw(fresh) });
        }
        // Ours, or that of the thread that was first: not null any more.
        self.next().unwrap_or(&TABLE)
    }
}

/// What the handler knows about one mapping.
#[derive(Debug)]
struct Slot {
    /// Set while a mapping has the slot.
    taken: AtomicBool,
    /// Odd while the fields below change.
    version: AtomicUsize,
    /// First address of the mapping.
    start: AtomicUsize,
    /// 0 in a free slot, which thus contains no address.
    len: AtomicUsize,
    /// Page size of the mapping, in bytes.
    page: AtomicUsize,
    /// Id of the memory.
    owner: AtomicU64,
    /// The first slot of the same memory, in which that memory's loss is recorded.
    leader: AtomicPtr<Slot>,
    /// The id of the memory that was lost. An id rather than a flag, so that a late store does not
    /// affect the next user of the slot.
    lost: AtomicU64,
}

impl Slot {
    const fn new() -> Slot {
        Slot {
            taken: AtomicBool::new(false),
            version: AtomicUsize::new(0),
            start: AtomicUsize::new(0),
            len: AtomicUsize::new(0),
            page: AtomicUsize::new(0),
            owner: AtomicU64::new(0),
            leader: AtomicPtr::new(ptr::null_mut()),
            lost: AtomicU64::new(0),
        }
    }

    /// Changes the fields so that a concurrent [`Slot::find`] sees all of the change or skips the
    /// slot.
    fn set(&self, start: usize, len: usize, page: usize, owner: u64, leader: *const Slot) {
        // Only the holder of `taken` writes, so the version needs no read-modify-write.
        let version = self.version.load(Relaxed);
        self.version.store(version.wrapping_add(1), Relaxed);
        // Pairs with the Acquire fence in `find`: a reader that sees a new field sees the odd
        // version.
        fence(Release);
        self.start.store(start, Relaxed);
        self.len.store(len, Relaxed);
        self.page.store(page, Relaxed);
        self.owner.store(owner, Relaxed);
        self.leader.store(leader.cast_mut(), Relaxed);
        // Pairs with the first load in `find`.
        self.version.store(version.wrapping_add(2), Release);
    }

    /// A consistent copy of the fields if `addr` lies in the mapping.
    fn find(&self, addr: usize) -> Option<Found> {
        let before = self.version.load(Acquire);
        if before % 2 == 1 {
            return None;
        }
        let start = self.start.load(Relaxed);
        let len = self.len.load(Relaxed);
        let page = self.page.load(Relaxed);
        let owner = self.owner.load(Relaxed);
        let leader = self.leader.load(Relaxed);
        fence(Acquire);
        if self.version.load(Relaxed) != before || addr.wrapping_sub(start) >= len {
            return None;
        }
        Some(Found {
            start,
            len,
            page,
            owner,
            leader,
        })
    }
}

struct Found {
    start: usize,
    len: usize,
    page: usize,
    owner: u64,
    leader: *const Slot,
}

/// A mapping's entry in the table; dropping it removes the mapping, which must happen before the
/// addresses are unmapped.
#[derive(Debug)]
pub(crate) struct Registration(&'static Slot);

impl Registration {
    /// Adds a mapping of the memory `owner` (not 0); `leader` is that memory's first one.
    pub(crate) fn new(
        start: usize,
        len: usize,
        page: usize,
        owner: u64,
        leader: Option<&Registration>,
    ) -> Registration {
        let mut chunk = &TABLE;
        let slot = loop {
            let free = chunk.slots.iter().find(|slot| {
                !slot.taken.load(Relaxed)
                    // Acquire pairs with the Release in `drop`: the last user's writes are
                    // complete.
                    && slot.taken.compare_exchange(false, true, Acquire, Relaxed).is_ok()
            });
            match free {
                Some(slot) => break slot,
                None => chunk = chunk.grow(),
            }
        };
        let leader = leader.map_or(slot, |registration| registration.0);
        slot.set(start, len, page, owner, leader);
        Registration(slot)
    }

    /// Whether a fault was handled in a mapping with this leader.
    #[inline]
    pub(crate) fn is_lost(&self, owner: u64) -> bool {
        self.0.lost.load(Relaxed) == owner
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.0.set(0, 0, 0, 0, ptr::null());
        self.0.taken.store(false, Release);
    }
}

/// If `addr` lies in a mapping of a live [`Memory`](crate::Memory): marks that memory lost, maps
/// anonymous zero pages from the faulting page to the end of the mapping, and returns true: the
/// faulting instruction may be retried. Otherwise returns false and changes nothing. Truncation
/// removes the tail of a file, and one call per page would let a peer exhaust the process's
/// mappings.
///
/// Async-signal-safe: atomics and one system call, which leaves errno alone.
///
/// # Safety
/// Call it only from a SIGBUS handler, on the thread that faulted, with the address of the access
/// that faulted: that access, which is still in progress, keeps the mapping alive. With any other
/// address the range may be unmapped and reused while pages are mapped there.
pub unsafe fn handle_fault(addr: usize) -> bool {
    let mut chunk = Some(&TABLE);
    while let Some(current) = chunk {
        if let Some(found) = current.slots.iter().find_map(|slot| slot.find(addr)) {
            return replace(addr, &found);
        }
        chunk = current.next();
    }
    false
}

fn replace(addr: usize, found: &Found) -> bool {
    // First the mark, then the pages: a thread that reads zeros can find the mark.
    // SAFETY: leaders are slots, and slots are static or leaked.
    if let Some(leader) = unsafe { found.leader.as_ref() } {
        leader.lost.store(found.owner, Release);
    }
    let from = found.start + (addr - found.start) / found.page * found.page;
    let len = found.start + found.len - from;
    // SAFETY: [from, from + len) is a page-aligned part of a mapping that the memory `owner` made
    // and has not unmapped: by the contract of `handle_fault` the calling thread is in the middle
    // of an access through that memory or one of its extents, so it cannot be dropped before we
    // return. Only raw copies and atomics access the addresses, so contents that change to zero are
    // not undefined behaviour; where references access them (see `Trust`), the file cannot shrink.
    unsafe {
        mmap_anonymous(
            ptr::with_exposed_provenance_mut(from),
            len,
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE,
        )
    }
    .is_ok()
}

#[cfg(test)]
#[path = "fault_tests.rs"]
mod tests;
