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

/// What io_uring registers as one buffer at most.
const ARENA: usize = 1 << 30;
/// A huge page.
const HUGE: usize = 2 << 20;

/// One mapping of a pool: what a ring registers.
#[doc(hidden)]
pub struct Arena {
    base: NonNull<u8>,
    /// Of the mapping.
    len: usize,
    /// Of the pages that blocks lie in.
    used: usize,
    block: usize,
    huge: bool,
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
        // What is registered counts as locked memory by the page: a small pool gets no huge one.
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
        // Of this size, whatever size is the machine's default: others could not be unmapped by it.
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
            // SAFETY: exactly the mapping made above. The advice changes the size of its pages,
            // not its contents; that it is refused is no loss.
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

/// Has the kernel give all pages of a new mapping: a reserved huge page can still be denied, by a
/// limit of the control group or of a node of memory, and to touch it then is to die of SIGBUS.
fn populate(base: *mut c_void, len: usize) -> bool {
    // SAFETY: the caller's own mapping, just made; the kernel writes into its pages what is there.
    unsafe { madvise(base, len, Advice::LinuxPopulateWrite) }.is_ok()
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: the mapping that `map` made, unmapped once. No block is out: each has a handle.
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
/// One of more than 1 MiB lies in huge pages of 2 MiB, where the machine has some set aside and gives
/// them (Linux 5.14); else the kernel is asked for transparent ones. A sender over io_uring registers
/// the pages of its blocks when it first sends from it: from then on no send of one block pins
/// pages, and none counts against the limit of locked memory (`RLIMIT_MEMLOCK`) but the registration.
/// Several blocks in one send (a vector of them) are pinned as other memory is. It has room for 64
/// pools, fewer if some are larger than 1 GiB: another takes the place of one that was not sent from
/// for a thousand sends, and is sent from like other memory until then. A handle is cheap to clone;
/// the memory is there for as long as a handle, a block or a sender that has it registered.
///
/// A forked child has a copy of the memory, as of all private memory, and may use and drop it; the
/// parent's senders send from the parent's.
#[derive(Clone, Debug)]
pub struct Pool {
    arenas: Arc<[Arc<Arena>]>,
    block: usize,
}

impl Pool {
    /// A pool of `blocks` blocks of `block` bytes each, beginning at multiples of `block`.
    ///
    /// # Errors
    /// `InvalidInput` for none, or blocks of 0 bytes or of more than 1 GiB; what mmap(2) answers.
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

    /// A block, if one is free; its bytes are what was in it before, or zeros.
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

    /// How many bytes each block has.
    #[must_use]
    pub fn block(&self) -> usize {
        self.block
    }

    /// How many blocks are free at this moment.
    #[must_use]
    pub fn free(&self) -> usize {
        self.arenas.iter().map(|arena| arena.free().len()).sum()
    }

    /// Whether all of it lies in huge pages that the machine had set aside.
    #[must_use]
    pub fn huge(&self) -> bool {
        self.arenas.iter().all(|arena| arena.huge)
    }
}

/// A block of a [`Pool`], or a part of one: to be written, sent, and had back. Dropped, it is free.
pub struct PoolBuf {
    arena: Arc<Arena>,
    index: u32,
    from: usize,
    len: usize,
}

impl PoolBuf {
    /// Makes it the bytes `from..from + len` of its block.
    ///
    /// # Errors
    /// Changes nothing and answers with the block's length if they do not lie within it.
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
mod tests {
    use super::*;

    #[test]
    fn blocks_are_apart_and_come_back() {
        let pool = Pool::new(4, 5000).expect("memory");
        let mut blocks: Vec<_> = std::iter::from_fn(|| pool.loan()).collect();
        assert_eq!(blocks.len(), 4);
        for (fill, block) in (1..).zip(&mut blocks) {
            block.fill(fill);
        }
        for (fill, block) in (1..).zip(&blocks) {
            assert!(block.len() == 5000 && block.iter().all(|&byte| byte == fill));
        }
        blocks.truncate(1);
        assert_eq!(pool.free(), 3);
        drop(pool);
        assert_eq!(blocks[0][4999], 1);
    }

    #[test]
    fn a_range_stays_within_its_block() {
        let pool = Pool::new(2, 4096).expect("memory");
        let mut block = pool.loan().expect("a block");
        assert_eq!(block.set_range(4096, 1), Err(4096));
        assert_eq!(block.set_range(1, usize::MAX), Err(4096));
        block.set_range(4000, 96).expect("within");
        assert_eq!(block.len(), 96);
    }

    #[test]
    fn what_is_registered_is_what_blocks_lie_in() {
        let page = page_size();
        for (blocks, block) in [(1, 1), (3, page / 2), (8, page), (5, 1 << 20)] {
            let pool = Pool::new(blocks, block).expect("memory");
            let used: usize = pool.arenas.iter().map(|arena| arena.vector().iov_len).sum();
            let unit = if pool.huge() { HUGE } else { page };
            assert_eq!(used, (blocks * block).next_multiple_of(unit));
            assert!(pool.arenas.iter().all(|arena| arena.len >= arena.used));
        }
    }

    #[test]
    fn a_pool_of_nothing_is_refused() {
        for (blocks, block) in [(0, 4096), (1, 0), (1, ARENA + 1), (usize::MAX, ARENA)] {
            assert!(Pool::new(blocks, block).is_err(), "{blocks} of {block}");
        }
    }
}
