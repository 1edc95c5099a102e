//! The four rings that an AF_XDP socket shares with the kernel.
//!
//! # Memory ordering
//! Each ring has one producer and one consumer. The producer writes entries, then its index (Release); the
//! consumer reads that index (Acquire), then the entries. The consumer writes its index (Release) after it
//! has read the entries; the producer reads that one (Acquire) before it writes them again.
//!
//! # Invariants
//! Offsets and indices come from the kernel. Offsets are checked against the mapping once; an index only
//! selects an entry by its low bits, and is never ahead of the other by more than the ring has entries.

use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};
use std::sync::atomic::{
    AtomicU32, AtomicU64,
    Ordering::{Acquire, Relaxed, Release, SeqCst},
    fence,
};

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use rustix::net::xdp::{XdpRingFlags, XdpRingOffset};

/// One ring. `WORDS` is the size of its entries in words of 8 bytes.
#[derive(Debug)]
struct Ring<const WORDS: usize> {
    start: NonNull<u8>,
    len: usize,
    producer: NonNull<AtomicU32>,
    consumer: NonNull<AtomicU32>,
    flags: NonNull<AtomicU32>,
    first: NonNull<AtomicU64>,
    /// Entries, a power of two.
    size: u32,
}

// SAFETY: the mapping belongs to the process, not to a thread, and what is in it is atomic.
unsafe impl<const WORDS: usize> Send for Ring<WORDS> {}

impl<const WORDS: usize> Ring<WORDS> {
    /// Maps the ring at `page_offset` of the socket.
    fn map(
        socket: BorrowedFd<'_>,
        page_offset: u64,
        offsets: XdpRingOffset,
        size: u32,
    ) -> io::Result<Ring<WORDS>> {
        let invalid = || io::Error::from(io::ErrorKind::InvalidData);
        let entries = (size as usize).checked_mul(8 * WORDS);
        let first = usize::try_from(offsets.desc).ok();
        let len = first.zip(entries).and_then(|(a, b)| a.checked_add(b));
        let len = len.filter(|_| size.is_power_of_two()).ok_or_else(invalid)?;
        // The offset of an object of this size and alignment in the mapping.
        let inside = |offset: Option<u64>, size: usize| {
            let offset = usize::try_from(offset?).ok()?;
            let fits = offset.is_multiple_of(size) && offset.checked_add(size)? <= len;
            fits.then_some(offset)
        };
        let producer = inside(Some(offsets.producer), 4).ok_or_else(invalid)?;
        let consumer = inside(Some(offsets.consumer), 4).ok_or_else(invalid)?;
        // Kernels before Linux 5.4 have no flags.
        let flags = inside(offsets.flags, 4).ok_or_else(invalid)?;
        let first = inside(Some(offsets.desc), 8).ok_or_else(invalid)?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let how = MapFlags::SHARED | MapFlags::POPULATE;
        // SAFETY: a new mapping at an address that the kernel chooses replaces no other mapping. The
        // kernel refuses a length beyond the ring's own.
        let start = unsafe { mmap(ptr::null_mut(), len, access, how, socket, page_offset) }?;
        let start = NonNull::new(start.cast::<u8>()).ok_or_else(invalid)?;
        // SAFETY: the four offsets were checked to lie in the mapping of `len` bytes, aligned; the
        // entries from `first` on end at `len`.
        unsafe {
            Ok(Ring {
                start,
                len,
                producer: start.add(producer).cast(),
                consumer: start.add(consumer).cast(),
                flags: start.add(flags).cast(),
                first: start.add(first).cast(),
                size,
            })
        }
    }

    fn producer(&self) -> &AtomicU32 {
        // SAFETY: `map` checked place and alignment; the mapping lives as long as `self`, and both
        // sides access it atomically.
        unsafe { self.producer.as_ref() }
    }

    fn consumer(&self) -> &AtomicU32 {
        // SAFETY: as in `producer`.
        unsafe { self.consumer.as_ref() }
    }

    fn needs_wakeup(&self) -> bool {
        // The kernel reads our index after it has set the flag: one of the two sees the other.
        fence(SeqCst);
        // SAFETY: as in `producer`.
        let flags = unsafe { self.flags.as_ref() }.load(Relaxed);
        flags & XdpRingFlags::XDP_RING_NEED_WAKEUP.bits() != 0
    }

    /// A word of the entry that an index selects.
    fn word(&self, index: u32, word: usize) -> &AtomicU64 {
        let at = (index & (self.size - 1)) as usize * WORDS + word.min(WORDS - 1);
        // SAFETY: at < size * WORDS, and `map` checked that so many words lie in the mapping, aligned.
        // Both sides write an entry only while it is theirs, so that relaxed accesses are enough.
        unsafe { self.first.add(at).as_ref() }
    }
}

impl<const WORDS: usize> Drop for Ring<WORDS> {
    fn drop(&mut self) {
        // SAFETY: the mapping that `map` made, of the same length; references to it borrow `self`.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.len) };
    }
}

/// A ring into which this process writes.
#[derive(Debug)]
pub(super) struct Producer<const WORDS: usize> {
    ring: Ring<WORDS>,
    /// Index of the next entry to write.
    next: u32,
    /// The consumer's index when it was last read.
    consumed: u32,
}

impl<const WORDS: usize> Producer<WORDS> {
    pub(super) fn map(
        socket: BorrowedFd<'_>,
        page_offset: u64,
        offsets: XdpRingOffset,
        size: u32,
    ) -> io::Result<Producer<WORDS>> {
        let ring = Ring::map(socket, page_offset, offsets, size)?;
        Ok(Producer {
            next: ring.producer().load(Relaxed),
            consumed: ring.consumer().load(Acquire),
            ring,
        })
    }

    /// Entries that can be written now.
    pub(super) fn free(&mut self) -> u32 {
        if self.next.wrapping_sub(self.consumed) >= self.ring.size {
            self.consumed = self.ring.consumer().load(Acquire);
        }
        let used = self.next.wrapping_sub(self.consumed);
        self.ring.size.saturating_sub(used)
    }

    /// As `free`, with a new look at the other side's index.
    pub(super) fn free_now(&mut self) -> u32 {
        self.consumed = self.ring.consumer().load(Acquire);
        self.free()
    }

    /// Writes an entry, which the kernel does not see before [`publish`](Self::publish). False: the ring
    /// is full.
    pub(super) fn push(&mut self, entry: [u64; WORDS]) -> bool {
        if self.free() == 0 {
            return false;
        }
        for (word, value) in entry.into_iter().enumerate() {
            self.ring.word(self.next, word).store(value, Relaxed);
        }
        self.next = self.next.wrapping_add(1);
        true
    }

    /// Whether an entry was written since `publish`.
    pub(super) fn has_unpublished(&self) -> bool {
        self.ring.producer().load(Relaxed) != self.next
    }

    pub(super) fn publish(&mut self) {
        self.ring.producer().store(self.next, Release);
    }

    /// Whether the kernel has not taken all entries that were published.
    pub(super) fn is_pending(&self) -> bool {
        self.ring.consumer().load(Acquire) != self.ring.producer().load(Relaxed)
    }

    pub(super) fn needs_wakeup(&self) -> bool {
        self.ring.needs_wakeup()
    }
}

/// A ring from which this process reads.
#[derive(Debug)]
pub(super) struct Consumer<const WORDS: usize> {
    ring: Ring<WORDS>,
    /// Index of the next entry to read.
    next: u32,
    /// Entries from there on that are known to be there.
    available: u32,
}

impl<const WORDS: usize> Consumer<WORDS> {
    pub(super) fn map(
        socket: BorrowedFd<'_>,
        page_offset: u64,
        offsets: XdpRingOffset,
        size: u32,
    ) -> io::Result<Consumer<WORDS>> {
        let ring = Ring::map(socket, page_offset, offsets, size)?;
        Ok(Consumer {
            next: ring.consumer().load(Relaxed),
            available: 0,
            ring,
        })
    }

    /// Lets the kernel write the entries again that were taken.
    pub(super) fn release(&mut self) {
        self.ring.consumer().store(self.next, Release);
    }

    /// Takes an entry.
    pub(super) fn pop(&mut self) -> Option<[u64; WORDS]> {
        if self.available == 0 {
            self.release();
            let produced = self.ring.producer().load(Acquire);
            self.available = produced.wrapping_sub(self.next).min(self.ring.size);
            if self.available == 0 {
                return None;
            }
        }
        let mut entry = [0; WORDS];
        for (word, value) in entry.iter_mut().enumerate() {
            *value = self.ring.word(self.next, word).load(Relaxed);
        }
        self.next = self.next.wrapping_add(1);
        self.available -= 1;
        Some(entry)
    }
}

/// Entries of the rings: powers of two.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct RingSizes {
    /// Of the fill ring and the receive ring.
    pub receive: u32,
    /// Of the transmit ring and the completion ring, in descriptors.
    pub transmit: u32,
}

#[derive(Debug)]
pub(super) struct Rings {
    pub(super) fill: Producer<1>,
    pub(super) receive: Consumer<2>,
    pub(super) transmit: Producer<2>,
    pub(super) completion: Consumer<1>,
}
