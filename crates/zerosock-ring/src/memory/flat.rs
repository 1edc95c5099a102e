//! A second mapping of a peer's memory, in one piece, for kernel interfaces that take one range of
//! addresses.
//!
//! # Invariants
//! - The regions lie back to back in order of guest addresses, as [`Memory::flat_offset`] counts; private
//!   memory follows.
//! - This process never accesses the part of the peer through this mapping, so a file that shrinks
//!   raises no SIGBUS here. Only the kernel uses it, and its calls fail with EFAULT then.
//! - The mapping keeps the [`Memory`] and is unmapped by the memory's [`Unmapper`](super::Unmapper).

use core::ptr;
use std::sync::Arc;

use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, MremapFlags, ProtFlags};
use rustix::mm::{madvise, mmap_anonymous, mremap_fixed};

use super::Memory;
use super::map::RetiredRegion;
use crate::slice::{GuestSlice, Piece};

/// Why there is no second mapping.
#[derive(Copy, Clone, Eq, PartialEq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FlatError {
    /// A region begins or ends inside a page.
    #[error(
        "the memory region at guest address {guest_addr:#x} does not consist of whole pages, so the regions \
         cannot be mapped as one range"
    )]
    Unaligned {
        /// Where the region begins.
        guest_addr: u64,
    },
    /// mmap failed.
    #[error("cannot map {len} bytes as one range: {errno}")]
    Reserve {
        /// Length of the mapping.
        len: u64,
        /// The system's reason.
        errno: Errno,
    },
    /// mremap failed.
    #[error(
        "the memory region at guest address {guest_addr:#x} cannot be mapped a second time: {errno} (the kernel \
         refuses this for huge pages)"
    )]
    Map {
        /// Where the region begins.
        guest_addr: u64,
        /// The system's reason.
        errno: Errno,
    },
}

/// All regions of a [`Memory`] as one range of addresses, and private memory behind them.
#[derive(Debug)]
pub struct FlatMapping {
    memory: Option<Arc<Memory>>,
    /// None only during `drop`.
    region: Option<RetiredRegion>,
    start: *mut u8,
    /// Bytes of the memory's regions.
    shared: usize,
    /// Bytes behind them.
    private: usize,
}

// SAFETY: the pointer is the address of a mapping that this object owns, valid on every thread until
// `drop`, which has the object to itself.
unsafe impl Send for FlatMapping {}
// SAFETY: through a shared reference the bytes are accessed only by `GuestSlice`, which races with
// nothing; the other fields never change.
unsafe impl Sync for FlatMapping {}

impl FlatMapping {
    /// Maps the regions of `memory`, and at least `private` bytes of zeroes behind them.
    ///
    /// # Errors
    /// [`FlatError`]; nothing stays mapped.
    pub fn new(memory: Option<Arc<Memory>>, private: usize) -> Result<FlatMapping, FlatError> {
        let page = rustix::param::page_size();
        let regions = memory.as_deref().map_or(&[][..], |memory| &memory.regions);
        for region in regions {
            let (addr, len) = (region.host.addr(), region.len);
            if addr % page != 0 || len % page as u64 != 0 {
                let guest_addr = region.guest_addr;
                return Err(FlatError::Unaligned { guest_addr });
            }
        }
        let shared = memory.as_deref().map_or(0, Memory::size);
        let total = (private.checked_next_multiple_of(page))
            .and_then(|private| shared.checked_add(private as u64))
            .and_then(|total| usize::try_from(total).ok())
            .filter(|total| (1..=isize::MAX as usize).contains(total));
        let reserve_error = |errno| FlatError::Reserve {
            len: shared.saturating_add(private as u64),
            errno,
        };
        let total = total.ok_or(reserve_error(Errno::INVAL))?;
        // At most `total`, which fits.
        let shared = shared as usize;
        // SAFETY: a fresh mapping at an address the system chooses touches no memory in use.
        let reserved = unsafe {
            let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
            mmap_anonymous(ptr::null_mut(), total, ProtFlags::empty(), flags)
        };
        let start = reserved.map_err(reserve_error)?.cast::<u8>();
        let mapping = FlatMapping {
            region: Some(RetiredRegion::new(start, total)),
            start,
            shared,
            private: total - shared,
            memory: memory.clone(),
        };
        let mut at = 0;
        for region in regions {
            let len = region.len as usize;
            // SAFETY: the lengths of all regions add up to `shared`, so the target lies in the range
            // reserved above, which nothing uses yet. With an old length of 0 the source stays mapped; the
            // kernel refuses one that is not shared.
            let mapped = unsafe {
                let flags = MremapFlags::MAYMOVE;
                mremap_fixed(region.host.cast(), 0, len, flags, start.add(at).cast())
            };
            mapped.map_err(|errno| FlatError::Map {
                guest_addr: region.guest_addr,
                errno,
            })?;
            at += len;
        }
        if mapping.private > 0 {
            // Shared, so that a fork leaves the pages that the kernel has pinned to this process.
            let flags = MapFlags::SHARED | MapFlags::FIXED;
            let access = ProtFlags::READ | ProtFlags::WRITE;
            // SAFETY: [shared, shared + private) is the rest of the range reserved above, likewise.
            unsafe { mmap_anonymous(start.add(shared).cast(), mapping.private, access, flags) }
                .map_err(reserve_error)?;
        }
        // As for the first mapping: it may fail.
        // SAFETY: the range just mapped; the advice changes no contents.
        let _ = unsafe { madvise(start.cast(), total, Advice::LinuxDontDump) };
        Ok(mapping)
    }

    /// Allocates all pages, as far as that is possible: what fails is for a later use to report.
    ///
    /// A kernel interface that pins memory keeps the mappings of the whole process locked until it has done so: a
    /// call of mmap on any thread waits. With pages that are allocated, in steps, this is short.
    pub fn populate(&self) {
        const STEP: usize = 2 << 20;
        let total = self.shared + self.private;
        for at in (0..total).step_by(STEP) {
            let len = STEP.min(total - at);
            // SAFETY: at + len <= total, the length of the mapping, which lives as long as `self`. The advice
            // changes no contents, and raises no signal.
            let populated =
                unsafe { madvise(self.start.add(at).cast(), len, Advice::LinuxPopulateWrite) };
            if populated.is_err() {
                return;
            }
        }
    }

    /// The memory that it maps.
    pub fn memory(&self) -> Option<&Arc<Memory>> {
        self.memory.as_ref()
    }

    /// Address of the first byte, for the kernel.
    pub fn addr(&self) -> usize {
        self.start.expose_provenance()
    }

    /// Length of the whole mapping in bytes.
    pub fn size(&self) -> u64 {
        (self.shared + self.private) as u64
    }

    /// Where private memory begins, in bytes from the start: the size of the peer's memory.
    pub fn private_start(&self) -> u64 {
        self.shared as u64
    }

    /// Offset of a piece of the peer's memory. None if it does not lie there.
    #[inline]
    pub fn offset(&self, piece: Piece) -> Option<u64> {
        self.memory.as_deref()?.flat_offset(piece)
    }

    /// The `len` bytes of private memory at `offset` from the start of the mapping. None if some of them
    /// are no private memory.
    #[inline]
    pub fn private(&self, offset: u64, len: usize) -> Option<GuestSlice<'_>> {
        let offset = usize::try_from(offset).ok()?;
        let inside = offset.checked_sub(self.shared)?;
        if len > self.private.checked_sub(inside)? {
            return None;
        }
        // SAFETY: just checked: shared <= offset and offset + len <= shared + private, which is the length
        // of the mapping and at most isize::MAX. That part is readable and writable until `self` is
        // dropped, and no reference to its bytes is made.
        Some(unsafe { GuestSlice::new(self.start.add(offset), len) })
    }
}

impl Drop for FlatMapping {
    fn drop(&mut self) {
        let unmapper = self.memory.as_deref().map(Memory::mapping);
        let unmapper = unmapper.and_then(|it| it.backing.first()?.unmapper());
        // All slices borrow `self`, so nothing in this process has an address in it any more.
        if let (Some(region), Some(unmapper)) = (self.region.take(), unmapper) {
            unmapper.unmap(region);
        }
    }
}
