//! Pieces of peer memory: numbers ([`Piece`]) and checked, borrowed addresses ([`GuestSlice`]).
//!
//! # Invariants
//! The bytes behind a [`GuestSlice`] may change at any moment, so no reference to them is made
//! here. Only [`copy`](crate::copy) accesses them: without a data race, and without the compiler
//! reading the shared bytes a second time in place of their private copy (a double fetch: one value
//! is checked and another used). References come only from `as_slice` and `as_mut_slice`, for
//! callers that promise that no party writes meanwhile; see [`Trust`](crate::Trust).

use core::fmt;
use core::marker::PhantomData;
use core::mem::MaybeUninit;
use core::ops::Deref;
use core::slice;

use crate::copy::{copy_between, copy_in, copy_out, load, store};

/// Longest range in bytes that [`GuestSlice::windows`] copies at once: up to here a call of memcpy
/// costs more than what smaller windows save in the caches.
const WHOLE: usize = 4096;
/// Bytes of its windows of a longer range.
const WINDOW: usize = 512;

/// A range of bytes in one region of a [`Memory`](crate::Memory): only numbers, meaningless without
/// the memory that [`translate`](crate::Memory::translate)d it, and checked by
/// [`Memory::slice`](crate::Memory::slice).
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
pub struct Piece {
    pub(crate) region: u32,
    pub(crate) len: u32,
    pub(crate) offset: u64,
}

const _: () = assert!(size_of::<Piece>() == 16);

impl Piece {
    /// No bytes: fills unused array elements.
    pub(crate) const NONE: Piece = Piece {
        region: 0,
        len: 0,
        offset: 0,
    };

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

    /// The part from `offset` on, at most `len` bytes of it; empty when `offset` lies past the end.
    #[inline]
    #[must_use]
    pub fn part(self, offset: usize, len: usize) -> Piece {
        // Both minima are at most `self.len`, so they fit; the sum stays within the region and
        // cannot wrap, if the piece came from one, and is checked where it is resolved.
        let offset = offset.min(self.len()) as u32;
        let len = len.min((self.len - offset) as usize) as u32;
        Piece {
            region: self.region,
            len,
            offset: self.offset + u64::from(offset),
        }
    }
}

/// Bytes of a cache line.
const CACHE_LINE: usize = 64;
/// Bytes that are prefetched at most; the processor fetches the following ones by itself once they are read.
const PREFETCHED: usize = 16 * CACHE_LINE;

/// A checked range of mapped peer memory. The layout is that of `struct iovec`, so that an array
/// of these is what `readv` and `writev` take.
#[repr(C)]
#[derive(Copy, Clone)]
pub struct GuestSlice<'m> {
    ptr: *mut u8,
    len: usize,
    memory: PhantomData<&'m ()>,
}

const _: () = assert!(size_of::<GuestSlice<'_>>() == 2 * size_of::<usize>());

// SAFETY: the address is valid for as long as the memory is borrowed, on every thread (Memory is
// Sync), and the safe calls access it only by the copies of `copy`, which race with nothing.
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
    /// `len` is at most `isize::MAX`, and no reference to those bytes exists but those that
    /// `as_slice` and `as_mut_slice` made.
    #[inline]
    pub(crate) unsafe fn new(ptr: *mut u8, len: usize) -> GuestSlice<'m> {
        GuestSlice {
            ptr,
            len,
            memory: PhantomData,
        }
    }

    /// Address of the first byte. Access through it is the caller's `unsafe`: the bytes change at
    /// any time.
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

    /// Prefetches the first cache line for reading. A hint: no bytes are read, nothing can fault.
    #[inline]
    pub fn prefetch(self) {
        // SAFETY: a prefetch has no effect but on the cache, whatever the address.
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        unsafe {
            use core::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            _mm_prefetch::<_MM_HINT_T0>(self.ptr.cast_const().cast());
        }
    }

    /// As `prefetch`, for writing: takes the line away from other caches.
    #[inline]
    pub fn prefetch_write(self) {
        // SAFETY: as in `prefetch`; a processor that does not know the instruction does nothing.
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        unsafe {
            core::arch::asm!(
                "prefetchw [{0}]",
                in(reg) self.ptr,
                options(nostack, preserves_flags, readonly)
            );
        }
    }

    /// Prefetches the first cache lines, at most 16, for reading, or for writing, as `prefetch` and `prefetch_write`
    /// do. For the buffers of later packets: a cache line takes longer to come from another core than a
    /// small packet to process.
    #[inline]
    pub fn prefetch_lines(self, for_writing: bool) {
        let mut offset = 0;
        while offset < self.len.min(PREFETCHED) {
            match for_writing {
                true => self.part(offset, CACHE_LINE).prefetch_write(),
                false => self.part(offset, CACHE_LINE).prefetch(),
            }
            offset += CACHE_LINE;
        }
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

    /// Copies bytes from `offset` on into `out`; returns the number of bytes copied, fewer where
    /// the slice ends.
    #[inline]
    pub fn read(self, offset: usize, out: &mut [u8]) -> usize {
        if self.read_all(offset, out) {
            return out.len();
        }
        let part = self.part(offset, out.len());
        // SAFETY: source: `part` is within the range that `new` was promised, and the destination
        // is at least as long. They do not overlap: `out` is a Rust reference, and its maker
        // promised, if it is to mapped memory, that nothing, including this call, accesses those
        // bytes in another way.
        unsafe { copy_out(part.ptr, out.as_mut_ptr(), part.len) };
        part.len
    }

    /// Copies `N` bytes from `offset` on; None if the slice ends before. For headers: the length is
    /// a constant, and either all bytes are copied or none.
    #[inline]
    pub fn read_array<const N: usize>(self, offset: usize) -> Option<[u8; N]> {
        let part = self.part(offset, N);
        if part.len < N {
            return None;
        }
        let mut copy = [0; N];
        // SAFETY: as in `read`: the part was just seen to have N bytes.
        unsafe { copy_out(part.ptr, copy.as_mut_ptr(), N) };
        Some(copy)
    }

    /// Reads `N` little-endian words from `offset` on, each by one load into a register; None if
    /// the slice ends before. For headers, which are parsed at once: a copy that is stored in wide
    /// pieces and loaded in others must wait until all earlier stores have left the processor,
    /// those to the peer's cache lines included.
    #[inline]
    pub fn read_words<const N: usize>(self, offset: usize) -> Option<[u64; N]> {
        if offset > self.len || size_of::<[u64; N]>() > self.len - offset {
            return None;
        }
        let mut words = [0; N];
        for (index, word) in words.iter_mut().enumerate() {
            // SAFETY: just checked: the words' bytes end at or before self.len.
            *word = u64::from_le(unsafe { load(self.ptr.add(offset + 8 * index)) });
        }
        Some(words)
    }

    /// Writes the words, little-endian, from `offset` on; false, and nothing written, if the slice
    /// ends before. For headers, for the same reason as [`read_words`](Self::read_words).
    #[inline]
    pub fn write_words<const N: usize>(self, offset: usize, words: [u64; N]) -> bool {
        if offset > self.len || size_of::<[u64; N]>() > self.len - offset {
            return false;
        }
        for (index, word) in words.into_iter().enumerate() {
            // SAFETY: just checked: the words' bytes end at or before self.len; they are shared,
            // and not behind a reference that forbids this call.
            unsafe { store(self.ptr.add(offset + 8 * index), word.to_le()) };
        }
        true
    }

    /// Copies as many bytes as `out` has, from `offset` on; false, and nothing copied, if the slice
    /// ends before. Unlike in `read`, a constant length stays a constant.
    #[inline]
    pub(crate) fn read_all(self, offset: usize, out: &mut [u8]) -> bool {
        if offset > self.len || out.len() > self.len - offset {
            return false;
        }
        // SAFETY: as in `read`: offset + out.len() <= self.len was just seen.
        unsafe { copy_out(self.ptr.add(offset), out.as_mut_ptr(), out.len()) };
        true
    }

    /// Copies all of `data` to `offset`; false, and nothing copied, if the slice ends before.
    #[inline]
    pub(crate) fn write_all(self, offset: usize, data: &[u8]) -> bool {
        if offset > self.len || data.len() > self.len - offset {
            return false;
        }
        // SAFETY: as in `write`: offset + data.len() <= self.len was just seen.
        unsafe { copy_in(data.as_ptr(), self.ptr.add(offset), data.len()) };
        true
    }

    /// Copies `data` to `offset`; returns the number of bytes copied, fewer where the slice ends.
    #[inline]
    pub fn write(self, offset: usize, data: &[u8]) -> usize {
        if self.write_all(offset, data) {
            return data.len();
        }
        let part = self.part(offset, data.len());
        // SAFETY: as in `read`, with source and destination exchanged: the destination is checked
        // and shared, and not behind a reference that forbids this call, so it does not overlap
        // with the source, a slice of at least that length.
        unsafe { copy_in(data.as_ptr(), part.ptr, part.len) };
        part.len
    }

    /// Copies as many bytes as fit from this slice to `dst`; returns their number. The two may
    /// overlap.
    #[inline]
    pub fn copy_to(self, dst: GuestSlice<'_>) -> usize {
        let len = self.len.min(dst.len);
        // SAFETY: both ranges are valid for `len` bytes by `new`'s promise; they may overlap, which
        // two descriptors of one guest can do.
        unsafe { copy_between(self.ptr, dst.ptr, len) };
        len
    }

    /// Passes all bytes in order to `look` in plain slices. Each slice is a private copy, made just
    /// before: the bytes of a short range at once, others in windows that stay in the nearest cache.
    /// So each byte is fetched once from where it lies, and the peer may write it meanwhile.
    #[inline]
    pub fn windows(self, mut look: impl FnMut(&[u8])) {
        let step = if self.len <= WHOLE { WHOLE } else { WINDOW };
        let mut window = [const { MaybeUninit::<u8>::uninit() }; WHOLE];
        let copy = window.as_mut_ptr().cast::<u8>();
        let mut at = 0;
        while at < self.len {
            let part = self.part(at, step);
            // SAFETY: source: as in `read`. Destination: `window` has WHOLE bytes, at least as many as
            // `step` and so as `part`, and is private to this call, so it does not overlap.
            unsafe { copy_out(part.ptr, copy, part.len) };
            // SAFETY: `copy_out` has just written the first `part.len` bytes of `window`. Nothing
            // writes them before `look` returns, and its slice cannot leave it: it has to accept a
            // slice of any lifetime.
            look(unsafe { slice::from_raw_parts(copy, part.len) });
            at += part.len;
        }
    }

    /// The bytes in place, for reading.
    ///
    /// # Safety
    /// While the result lives, no party writes any of these bytes, and they do not vanish: not the
    /// peer, for which the caller vouches; not this process, through any slice, mapping or system
    /// call; and the file cannot shrink (the zeros that [`handle_fault`](crate::handle_fault) maps
    /// are other bytes).
    #[inline]
    pub unsafe fn as_slice(self) -> &'m [u8] {
        // SAFETY: readable for `len` bytes, at most isize::MAX, while 'm lasts, by `new`'s
        // promise; never null, being an address of a mapping; not written, by the caller's.
        unsafe { slice::from_raw_parts(self.ptr, self.len) }
    }

    /// The bytes in place, for writing.
    ///
    /// # Safety
    /// As for [`as_slice`](Self::as_slice); and while the result lives no party reads them in
    /// another way, nor makes a second reference to any of them. The slice is `Copy` and prevents
    /// none of this.
    #[inline]
    pub unsafe fn as_mut_slice(self) -> &'m mut [u8] {
        // SAFETY: as in `as_slice`, for writes as well; the only access, by the caller's promise.
        unsafe { slice::from_raw_parts_mut(self.ptr, self.len) }
    }
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

    /// Removes all slices.
    #[inline]
    pub fn clear(&mut self) {
        self.len = 0;
    }

    /// Appends a slice; false, and nothing appended, when full.
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
        // SAFETY: only `push` increments `len`, after writing that element, and stops at N: the
        // first `len` elements are initialised. MaybeUninit<T> has T's layout.
        unsafe { slice::from_raw_parts(self.slices.as_ptr().cast(), self.len) }
    }
}

impl<const N: usize> fmt::Debug for SliceBuf<'_, N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}
