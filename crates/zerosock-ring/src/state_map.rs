//! Memory that outlives this process: a sealed file of our own, in which a successor finds what was
//! written down.
//!
//! `zerosock_sys::memfd::create` creates such a file. It is sparse: only pages that were touched take
//! memory.
//!
//! # Invariants
//! - The file can neither shrink nor grow, so no access raises SIGBUS for want of a file. Its contents are
//!   what another process left there: hostile input, to be read once and checked.
//! - Each byte belongs to one [`StateMap`] or one [`StateArray`], or to one [`StateCell`] and its clones,
//!   so it is accessed by atomics of one width. A process maps a file once.
//!
//! # Use
//! ```ignore
//! let mut map = StateMap::map(&fd, 8192)?;
//! let rest = map.split_off(4096)?;
//! let words = map.into_array::<AtomicU64>();
//! words[0].store(1, Relaxed);
//! ```

use core::marker::PhantomData;
use core::ops::Deref;
use core::ptr::{self, NonNull};
use core::slice;
use core::sync::atomic::{AtomicU8, AtomicU16, AtomicU64};
use std::sync::Arc;

use rustix::fd::AsFd;
use rustix::fs::{SealFlags, fcntl_get_seals, fstat, fstatfs};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap};

use crate::memory::RetiredRegion;

/// TMPFS_MAGIC of linux/magic.h: the type of memory files without huge pages.
const TMPFS: u64 = 0x0102_1994;

/// Why a file was not mapped.
#[derive(Copy, Clone, Eq, PartialEq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StateMapError {
    /// It can change its length.
    #[error("the state file is not sealed: its length can change")]
    Unsealed,
    /// It is no memory file of ordinary pages.
    #[error("the state file is not a memory file (file system type {0:#x})")]
    FileSystem(u64),
    /// It is shorter than what the caller wants to map.
    #[error("the state file has {file_len} bytes, {len} are needed")]
    ShortFile {
        /// Bytes that the caller needs.
        len: usize,
        /// Length of the file in bytes.
        file_len: u64,
    },
    /// Nothing, or more than an address space has.
    #[error("{0} bytes of a state file cannot be mapped")]
    Length(usize),
    /// A system call failed.
    #[error("cannot map the state file: {0}")]
    System(Errno),
}

/// A mapping, unmapped when the last range of it is dropped.
#[derive(Debug)]
struct Mapping {
    _region: RetiredRegion,
}

// SAFETY: nothing can be done through a shared reference to it: the region unmaps the range when it is
// dropped, and does nothing else.
unsafe impl Sync for Mapping {}

/// A range of a mapped state file. It begins at a multiple of 8 bytes.
#[derive(Debug)]
pub struct StateMap {
    mapping: Arc<Mapping>,
    start: *mut u8,
    len: usize,
}

// SAFETY: `start` leads into a mapping that `mapping` keeps, on every thread. A `StateMap` accesses no
// byte; it only passes the range on to the `StateArray`, which accesses it by atomics alone.
unsafe impl Send for StateMap {}
// SAFETY: as for Send: nothing is accessed through a shared reference.
unsafe impl Sync for StateMap {}

impl StateMap {
    /// Maps the first `len` bytes of a memory file. No process can have made the file shorter afterwards:
    /// its seals are checked first.
    ///
    /// # Errors
    /// [`StateMapError`]; nothing stays mapped.
    pub fn map(fd: impl AsFd, len: usize) -> Result<StateMap, StateMapError> {
        // Only memory files have seals. The calls below do not wait for another process then.
        let seals = fcntl_get_seals(&fd).map_err(|_| StateMapError::Unsealed)?;
        if !seals.contains(SealFlags::SHRINK | SealFlags::GROW) {
            return Err(StateMapError::Unsealed);
        }
        // A range of huge pages is unmapped by other rules.
        let file_system = fstatfs(&fd).map_err(StateMapError::System)?;
        // The mask removes the sign extension of the magic number on some architectures.
        let magic = file_system.f_type as u64 & 0xffff_ffff;
        if magic != TMPFS {
            return Err(StateMapError::FileSystem(magic));
        }
        let stat = fstat(&fd).map_err(StateMapError::System)?;
        let file_len = u64::try_from(stat.st_size).unwrap_or(0);
        if !(1..=isize::MAX as usize).contains(&len) {
            return Err(StateMapError::Length(len));
        }
        if file_len < len as u64 {
            return Err(StateMapError::ShortFile { len, file_len });
        }
        let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: a fresh mapping at an address the system chooses touches no memory in use.
        let start = unsafe { mmap(ptr::null_mut(), len, access, flags, &fd, 0) };
        let start = start.map_err(StateMapError::System)?.cast::<u8>();
        let mapping = Mapping {
            _region: RetiredRegion::new(start, len),
        };
        Ok(StateMap {
            mapping: Arc::new(mapping),
            start,
            len,
        })
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no bytes: the other part of a split has all of them.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Splits the range in two: keeps the first `at` bytes and returns the others. `None` if the range has
    /// not so many, or `at` is no multiple of 8; then nothing changes.
    pub fn split_off(&mut self, at: usize) -> Option<StateMap> {
        let len = self.len.checked_sub(at)?;
        if !at.is_multiple_of(8) {
            return None;
        }
        self.len = at;
        Some(StateMap {
            mapping: Arc::clone(&self.mapping),
            // SAFETY: at is at most the former length: inside the mapping, or one past its end.
            start: unsafe { self.start.add(at) },
            len,
        })
    }

    /// Allocates the pages of the range, so that no later access raises SIGBUS for want of memory.
    ///
    /// # Errors
    /// Errors of madvise(2) with MADV_POPULATE_WRITE: there is no memory. A kernel before 5.14 does not
    /// know the call; then nothing is allocated and nothing is reported.
    pub fn populate(&self) -> Result<(), Errno> {
        // SAFETY: the range is part of the mapping that `self` keeps.
        unsafe { populate(self.start, self.len) }
    }

    /// The range as an array of atomics, as many as fit.
    pub fn into_array<T: StateWord>(self) -> StateArray<T> {
        StateArray {
            len: self.len / size_of::<T>(),
            map: self,
            words: PhantomData,
        }
    }
}

/// Allocates pages: see [`StateMap::populate`].
///
/// # Safety
/// The range is part of a mapping that begins at a page and stays mapped meanwhile.
unsafe fn populate(start: *mut u8, len: usize) -> Result<(), Errno> {
    if len == 0 {
        return Ok(());
    }
    let skip = start.addr() % rustix::param::page_size();
    // SAFETY: the begin of the range's first page is part of the mapping, as the caller says. The advice
    // changes no contents, and raises no signal.
    let populated = unsafe {
        let first = start.sub(skip).cast();
        madvise(first, skip + len, Advice::LinuxPopulateWrite)
    };
    match populated {
        Err(Errno::INVAL) => Ok(()),
        result => result,
    }
}

/// Atomics that can lie in a [`StateMap`].
///
/// # Safety
/// Aligned to at most 8 bytes, all contents are valid, and through a shared reference every byte is
/// accessed by atomics of one width or not at all.
#[allow(private_bounds)] // not to be implemented elsewhere
pub unsafe trait StateWord: Sized + Sync + sealed::Sealed {}

mod sealed {
    pub(crate) trait Sealed {}
}

/// Declares that types are as [`StateWord`] demands.
macro_rules! state_words {
    ($($word:ty),*) => { $(
        impl sealed::Sealed for $word {}
        // SAFETY: atomic integers, or a `repr(C)` struct of arrays of them. All contents are valid for
        // integers, and the fields do not overlap.
        unsafe impl StateWord for $word {}
    )* };
}
state_words!(AtomicU8, AtomicU16, AtomicU64, InflightWords);

/// A range of a state file as an array of atomics.
#[derive(Debug)]
pub struct StateArray<T> {
    map: StateMap,
    /// Elements; their bytes are at most those of `map`.
    len: usize,
    words: PhantomData<T>,
}

impl<T: StateWord> Deref for StateArray<T> {
    type Target = [T];

    #[inline]
    fn deref(&self) -> &[T] {
        // SAFETY: `len` elements take at most the bytes of `map`, whose mapping lives as long as `self` and
        // cannot be truncated. It begins at a page and all parts of it at multiples of 8 (`split_off`), so the
        // elements are aligned. All contents are valid for them. Other processes access the bytes as
        // atomics or not at all, and in this one no other array has any of these bytes: `map` was moved
        // here.
        unsafe { slice::from_raw_parts(self.map.start.cast::<T>(), self.len) }
    }
}

/// A range of a state file as one `T`. Clones share it.
#[derive(Debug)]
pub(crate) struct StateCell<T> {
    /// Of the range that `_mapping` keeps.
    place: NonNull<T>,
    _mapping: Arc<Mapping>,
}

// SAFETY: `place` leads into a mapping that `_mapping` keeps, on every thread, and `T` is accessed there
// through shared references only, which any thread may have.
unsafe impl<T: StateWord> Send for StateCell<T> {}
// SAFETY: as for Send.
unsafe impl<T: StateWord> Sync for StateCell<T> {}

impl<T: StateWord> StateCell<T> {
    /// The first bytes of the range as one `T`; `None` if the range has not so many.
    pub(crate) fn new(map: StateMap) -> Option<StateCell<T>> {
        if map.len < size_of::<T>() {
            return None;
        }
        Some(StateCell {
            place: NonNull::new(map.start)?.cast(),
            _mapping: map.mapping,
        })
    }

    /// As [`StateMap::populate`], for the first `len` bytes.
    pub(crate) fn populate(&self, len: usize) -> Result<(), Errno> {
        let len = len.min(size_of::<T>());
        // SAFETY: the first bytes of the `T` that lies in the mapping, which `self` keeps.
        unsafe { populate(self.place.as_ptr().cast(), len) }
    }
}

impl<T> Clone for StateCell<T> {
    fn clone(&self) -> StateCell<T> {
        StateCell {
            place: self.place,
            _mapping: Arc::clone(&self._mapping),
        }
    }
}

impl<T: StateWord> Deref for StateCell<T> {
    type Target = T;

    #[inline(always)] // every packet
    fn deref(&self) -> &T {
        // SAFETY: `new` found enough bytes, in a mapping that lives as long as `self` and cannot be truncated,
        // at a multiple of 8. All contents are valid for `T`. Other processes access the bytes as atomics
        // or not at all, and in this one only clones of `self` have them: `map` was moved into `new`.
        unsafe { self.place.as_ref() }
    }
}

/// One queue's record of chains in flight, as it lies in the file: see
/// [`InflightRecord`](crate::InflightRecord), which gives the fields their meaning.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct InflightWords {
    pub(crate) start: AtomicU64,
    pub(crate) offset: AtomicU16,
    pub(crate) completed: AtomicU16,
    _reserved: [AtomicU16; 26],
    /// One byte for each head. A u16 is always inside, so the compiler leaves out the check; pages that no
    /// head of the queue touches take no memory.
    pub(crate) heads: [AtomicU8; 1 << 16],
}

#[cfg(test)]
#[path = "state_map_tests.rs"]
mod tests;
