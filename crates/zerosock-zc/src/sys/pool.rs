//! Memory for buffers that a ring registers once instead of pinning it for each send.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::fmt;
use std::io;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
use rustix::param::page_size;

/// The largest buffer that io_uring registers, in bytes.
const ARENA: usize = 1 << 30;
/// Size of a huge page, in bytes.
const HUGE: usize = 2 << 20;

/// One mapping of a pool, which a ring registers as one buffer.
#[doc(hidden)]
pub struct Arena {
    base: NonNull<u8>,
    /// Length of the mapping, in bytes.
    len: usize,
    /// Length of the pages that contain blocks, in bytes.
    used: usize,
    /// Length of a block, in bytes.
    block: usize,
    /// The mapping consists of reserved huge pages.
    huge: bool,
    /// Indices of free blocks.
    free: Mutex<Vec<u32>>,
}

// SAFETY: `base` is a mapping that this value owns until its drop; its bytes are only reached
// through `PoolBuf`s, each of which has a block of its own.
unsafe impl Send for Arena {}
// SAFETY: as above; the list of free blocks has a lock.
unsafe impl Sync for Arena {}

impl Arena {
    fn map(blocks: usize, block: usize) -> io::Result<Self> {
        let wanted = blocks
            .checked_mul(block)
            .ok_or(io::ErrorKind::OutOfMemory)?;
        // Registered memory counts as locked memory by the page: a small pool gets no huge page.
        let page = match wanted > HUGE / 2 {
            true => HUGE,
            false => page_size(),
        };
        let len = wanted
            .checked_next_multiple_of(page)
            .ok_or(io::ErrorKind::OutOfMemory)?;
        let blocks = u32::try_from(blocks).map_err(|_| io::ErrorKind::InvalidInput)?;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let map = |flags| {
            // SAFETY: a new anonymous mapping at an address of the kernel's choice touches no
            // memory that exists.
            unsafe { mmap_anonymous(std::ptr::null_mut(), len, protection, flags) }
        };
        // Requests 2 MiB explicitly: the length of a mapping of other huge pages could not be
        // unmapped.
        let in_huge_pages = MapFlags::PRIVATE | MapFlags::HUGETLB | MapFlags::HUGE_2MB;
        let reserved = (page == HUGE).then(|| map(in_huge_pages).ok()).flatten();
        let (base, huge) = match reserved {
            Some(base) if populate(base, len) => (base, true),
            Some(base) => {
                // SAFETY: the mapping made above, to which nothing refers yet.
                let _ = unsafe { munmap(base, len) };
                (map(MapFlags::PRIVATE)?, false)
            }
            None => (map(MapFlags::PRIVATE)?, false),
        };
        if !huge {
            // SAFETY: exactly the mapping made above. The advice changes the size of its pages, not
            // its contents. An error is harmless.
            let _ = unsafe { madvise(base, len, Advice::LinuxHugepage) };
        }
        Ok(Self {
            base: NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?,
            len,
            used: wanted.next_multiple_of(if huge { HUGE } else { page_size() }),
            block,
            huge,
            free: Mutex::new((0..blocks).rev().collect()),
        })
    }

    pub(super) fn vector(&self) -> libc::iovec {
        libc::iovec {
            iov_base: self.base.as_ptr().cast(),
            iov_len: self.used,
        }
    }

    fn free(&self) -> std::sync::MutexGuard<'_, Vec<u32>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Allocates all pages of a new mapping: a reserved huge page can still be denied, by a limit of
/// the control group or of a NUMA node, and an access to it then raises SIGBUS.
fn populate(base: *mut c_void, len: usize) -> bool {
    // SAFETY: the mapping is new and owned by the caller; its contents do not change.
    unsafe { madvise(base, len, Advice::LinuxPopulateWrite) }.is_ok()
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: the mapping that `map` made, unmapped once. No block is loaned: each loan keeps
        // the arena.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
    }
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Arena({} bytes)", self.len)
    }
}

/// Blocks of memory, all of one length, to be filled and sent.
///
/// A pool of more than 1 MiB uses huge pages of 2 MiB, if the machine has reserved some (Linux
/// 5.14); otherwise transparent huge pages are requested. A sender over io_uring registers the
/// pages of the pool when it first sends a block of it. From then on, a send of one block pins no
/// pages, and only the registration counts against the limit of locked memory (`RLIMIT_MEMLOCK`). A
/// send of several blocks (a vector of them) pins its pages. A sender registers up to 64 pools,
/// fewer if some are larger than 1 GiB: another pool replaces one that was not used for about a
/// thousand sends, and is pinned like other memory until then. A handle is cheap to clone; the
/// memory is mapped as long as there is a handle, a block or a sender that has registered it.
///
/// A forked child has a copy of the memory, and may use and drop it; the senders of the parent send
/// from the memory of the parent.
#[derive(Clone, Debug)]
pub struct Pool {
    arenas: Arc<[Arc<Arena>]>,
    block: usize,
}

impl Pool {
    /// A pool of `blocks` blocks of `block` bytes each, beginning at multiples of `block`.
    ///
    /// # Errors
    /// `InvalidInput` for no blocks, or blocks of 0 bytes or of more than 1 GiB; errors of mmap(2).
    pub fn new(blocks: usize, block: usize) -> io::Result<Self> {
        if blocks == 0 || block == 0 || block > ARENA {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let each = ARENA / block;
        let arenas = (0..blocks)
            .step_by(each)
            .map(|first| Arena::map(each.min(blocks - first), block).map(Arc::new))
            .collect::<io::Result<_>>()?;
        Ok(Self { arenas, block })
    }

    /// Takes a free block, if there is one; it contains the bytes of its last use, or zeros.
    #[must_use]
    pub fn loan(&self) -> Option<PoolBuf> {
        self.arenas.iter().find_map(|arena| {
            let index = arena.free().pop()?;
            Some(PoolBuf {
                arena: Arc::clone(arena),
                index,
                from: 0,
                len: arena.block,
            })
        })
    }

    /// Length of a block, in bytes.
    #[must_use]
    pub fn block(&self) -> usize {
        self.block
    }

    /// Number of free blocks at this moment.
    #[must_use]
    pub fn free(&self) -> usize {
        self.arenas.iter().map(|arena| arena.free().len()).sum()
    }

    /// Whether the whole pool uses reserved huge pages.
    #[must_use]
    pub fn huge(&self) -> bool {
        self.arenas.iter().all(|arena| arena.huge)
    }
}

/// A block of a [`Pool`], or a part of one. The block is free when this value is dropped.
pub struct PoolBuf {
    arena: Arc<Arena>,
    index: u32,
    from: usize,
    len: usize,
}

impl PoolBuf {
    /// Restricts the value to the bytes `from..from + len` of its block.
    ///
    /// # Errors
    /// The length of the block, if the range is not within it; nothing changes then.
    pub fn set_range(&mut self, from: usize, len: usize) -> Result<(), usize> {
        let block = self.arena.block;
        if from.checked_add(len).is_none_or(|end| end > block) {
            return Err(block);
        }
        (self.from, self.len) = (from, len);
        Ok(())
    }

    pub(super) fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }

    fn address(&self) -> *mut u8 {
        let offset = self.index as usize * self.arena.block + self.from;
        // SAFETY: `index` came from the arena's list, which has as many as there are blocks in the
        // mapping; `from` and `len` lie within a block (`set_range`). Nothing overflows: the
        // mapping is at most 1 GiB and a huge page long.
        unsafe { self.arena.base.as_ptr().add(offset) }
    }
}

impl Deref for PoolBuf {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `len` bytes from `address` lie within the block, which is mapped (the arena is
        // kept), initialised (anonymous memory is zero), and reached through this handle alone.
        unsafe { std::slice::from_raw_parts(self.address(), self.len) }
    }
}

impl DerefMut for PoolBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`; and the handle is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.address(), self.len) }
    }
}

impl Drop for PoolBuf {
    fn drop(&mut self) {
        self.arena.free().push(self.index);
    }
}

impl fmt::Debug for PoolBuf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PoolBuf({} bytes)", self.len)
    }
}

#[cfg(test)]
#[path = "pool_tests.rs"]
mod tests;
