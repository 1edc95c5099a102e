//! Pieces of peer memory: numbers ([`Piece`]) and checked, borrowed addresses ([`GuestSlice`]).
//!
//! What must hold: the bytes behind a [`GuestSlice`] may change at any moment, so no reference to
//! them is ever made; they are copied by raw pointer, and after a copy the compiler is told that
//! it cannot know the private copy's contents, lest it read the shared bytes a second time in
//! their place (validated once, used twice: the oldest hole in this kind of program).

use core::fmt;
use core::marker::PhantomData;
use core::mem::MaybeUninit;
use core::ops::Deref;
use core::{ptr, slice};

use crate::memory::Memory;

/// A part of one region of a [`Memory`]: only numbers, meaningless without the memory that
/// [`translate`](Memory::translate)d it, and checked again by [`Memory::slice`].
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
pub struct Piece {
    pub(crate) region: u32,
    pub(crate) len: u32,
    pub(crate) offset: u64,
}

const _: () = assert!(size_of::<Piece>() == 16);

impl Piece {
    /// Length in bytes.
    #[inline]
    pub fn len(self) -> usize {
        self.len as usize
    }

    /// Whether the piece has no bytes.
    #[inline]
    pub fn is_empty(self) -> bool {
        self.len == 0
    }
}

/// A checked range of mapped peer memory. The layout is that of `struct iovec`, so that an array
/// of these is what `readv` and `writev` take.
#[repr(C)]
#[derive(Copy, Clone)]
pub struct GuestSlice<'m> {
    ptr: *mut u8,
    len: usize,
    memory: PhantomData<&'m Memory>,
}

const _: () = assert!(size_of::<GuestSlice<'_>>() == 2 * size_of::<usize>());

// SAFETY: the address is valid for as long as the memory is borrowed, on every thread (Memory is
// Sync), and what can be done through it are raw copies of bytes that other processes change
// anyway: no thread can assume more than another.
unsafe impl Send for GuestSlice<'_> {}
// SAFETY: as for Send; all methods take the slice by value.
unsafe impl Sync for GuestSlice<'_> {}

impl fmt::Debug for GuestSlice<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GuestSlice({:p}, {})", self.ptr, self.len)
    }
}

impl<'m> GuestSlice<'m> {
    /// # Safety
    /// `ptr` is valid for reads and writes of `len` bytes as long as the memory behind `'m` lives,
    /// `len` is at most `isize::MAX`, and no reference to those bytes exists.
    #[inline]
    pub(crate) unsafe fn new(ptr: *mut u8, len: usize) -> GuestSlice<'m> {
        GuestSlice {
            ptr,
            len,
            memory: PhantomData,
        }
    }

    /// Address of the first byte. Reading and writing through it is the caller's `unsafe`: the
    /// bytes change under every reader.
    #[inline]
    pub fn as_ptr(self) -> *mut u8 {
        self.ptr
    }

    /// Length in bytes.
    #[inline]
    pub fn len(self) -> usize {
        self.len
    }

    /// Whether the slice has no bytes.
    #[inline]
    pub fn is_empty(self) -> bool {
        self.len == 0
    }

    /// The part from `offset` on, at most `len` bytes of it; empty when `offset` lies past the end.
    #[inline]
    pub fn part(self, offset: usize, len: usize) -> GuestSlice<'m> {
        let offset = offset.min(self.len);
        let len = len.min(self.len - offset);
        // SAFETY: offset <= self.len, so the sum stays in, or one past, the range that `new`
        // was promised to be valid.
        let ptr = unsafe { self.ptr.add(offset) };
        GuestSlice {
            ptr,
            len,
            memory: PhantomData,
        }
    }

    /// Copies out from `offset` on; returns the bytes copied, fewer than asked where the slice
    /// ends.
    #[inline]
    pub fn read(self, offset: usize, out: &mut [u8]) -> usize {
        let part = self.part(offset, out.len());
        // SAFETY: source: `part` keeps within the range that `new` was promised, and the
        // destination is at least as long. They do not overlap: `out` is a Rust reference, and
        // none is ever made to mapped memory. A peer may write the source meanwhile; it does so
        // from outside this program, so the copy only yields unspecified bytes, any of which a u8
        // may hold. A thread of this process writing there (our own driver half) makes that a
        // race between two memcpys; `settle` keeps its outcome to unspecified bytes as well.
        unsafe { ptr::copy_nonoverlapping(part.ptr, out.as_mut_ptr(), part.len) };
        settle(out.as_mut_ptr());
        part.len
    }

    /// Copies `N` bytes out from `offset` on; None if the slice ends before. For headers and the
    /// like: the length is known when this is compiled, and nothing is copied but the whole.
    #[inline]
    pub fn read_array<const N: usize>(self, offset: usize) -> Option<[u8; N]> {
        let part = self.part(offset, N);
        if part.len < N {
            return None;
        }
        let mut copy = [0; N];
        // SAFETY: as in `read`: the part was just seen to have N bytes.
        unsafe { ptr::copy_nonoverlapping(part.ptr, copy.as_mut_ptr(), N) };
        settle(copy.as_mut_ptr());
        Some(copy)
    }

    /// Copies in from `offset` on; returns the bytes copied, fewer than given where the slice
    /// ends.
    #[inline]
    pub fn write(self, offset: usize, data: &[u8]) -> usize {
        let part = self.part(offset, data.len());
        // SAFETY: as in `read`, the other way round: the destination is checked, shared and never
        // under a reference, the source is a private slice of at least that length.
        unsafe { ptr::copy_nonoverlapping(data.as_ptr(), part.ptr, part.len) };
        part.len
    }

    /// Copies as much as fits from this slice to `dst`; returns the bytes copied. The two may
    /// overlap.
    #[inline]
    pub fn copy_to(self, dst: GuestSlice<'_>) -> usize {
        let len = self.len.min(dst.len);
        // SAFETY: both ranges are valid for `len` bytes by `new`'s promise; `copy` allows them to
        // overlap, which two regions of one file or two descriptors of one guest can do.
        unsafe { ptr::copy(self.ptr, dst.ptr, len) };
        len
    }
}

/// Makes the compiler forget what it knows of the bytes at `copy`, a private copy of shared ones:
/// from here on it has to read the copy and cannot go back to the source.
#[inline(always)]
fn settle(copy: *mut u8) {
    // SAFETY: no instruction at all. The compiler must assume that the block wrote any memory it
    // can reach, and through the operand it reaches the copy.
    #[cfg(not(miri))]
    unsafe {
        core::arch::asm!("/* {0} */", in(reg) copy, options(nostack, preserves_flags));
    }
    #[cfg(miri)]
    let _ = copy;
}

/// Up to `N` [`GuestSlice`]s on the stack: what one `readv` or `writev` takes.
pub struct SliceBuf<'m, const N: usize> {
    slices: [MaybeUninit<GuestSlice<'m>>; N],
    len: usize,
}

impl<'m, const N: usize> SliceBuf<'m, N> {
    /// An empty buffer.
    #[inline]
    pub fn new() -> Self {
        SliceBuf {
            slices: [const { MaybeUninit::uninit() }; N],
            len: 0,
        }
    }

    /// Forgets all slices.
    #[inline]
    pub fn clear(&mut self) {
        self.len = 0;
    }

    /// Appends; false, and nothing done, when full.
    #[inline]
    pub fn push(&mut self, slice: GuestSlice<'m>) -> bool {
        let Some(place) = self.slices.get_mut(self.len) else {
            return false;
        };
        place.write(slice);
        self.len += 1;
        true
    }

    /// Whether `N` slices are in it.
    #[inline]
    pub fn is_full(&self) -> bool {
        self.len == N
    }

    /// Sum of the slices' lengths in bytes.
    pub fn bytes(&self) -> usize {
        self.iter().map(|slice| slice.len()).sum()
    }
}

impl<const N: usize> Default for SliceBuf<'_, N> {
    fn default() -> Self {
        Self::new()
    }
}

impl<'m, const N: usize> Deref for SliceBuf<'m, N> {
    type Target = [GuestSlice<'m>];

    #[inline]
    fn deref(&self) -> &Self::Target {
        // SAFETY: `push` alone raises `len`, by one and only after writing the element there, and
        // stops at N: the first `len` elements are initialised. MaybeUninit<T> has T's layout.
        unsafe { slice::from_raw_parts(self.slices.as_ptr().cast(), self.len) }
    }
}

impl<const N: usize> fmt::Debug for SliceBuf<'_, N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}
