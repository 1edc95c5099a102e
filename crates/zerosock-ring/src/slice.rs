//! Pieces of peer memory: numbers ([`Piece`]) and checked, borrowed addresses ([`GuestSlice`]).
#![allow(unsafe_code)]

use core::marker::PhantomData;
use core::mem::MaybeUninit;
use core::ops::Deref;

use crate::memory::Memory;

/// A part of one region of a [`Memory`]: only numbers, meaningless without the memory.
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
pub struct Piece {
    pub(crate) region: u32,
    pub(crate) len: u32,
    pub(crate) offset: u64,
}

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

/// A checked range of mapped peer memory; the layout is that of `struct iovec`.
#[repr(C)]
#[derive(Copy, Clone)]
pub struct GuestSlice<'m> {
    ptr: *mut u8,
    len: usize,
    memory: PhantomData<&'m Memory>,
}

// SAFETY: to be argued.
unsafe impl Send for GuestSlice<'_> {}
// SAFETY: to be argued.
unsafe impl Sync for GuestSlice<'_> {}

impl<'m> GuestSlice<'m> {
    /// Address of the first byte.
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
    pub fn part(self, offset: usize, len: usize) -> GuestSlice<'m> {
        let _ = (offset, len);
        todo!()
    }
    /// Copies out from `offset` on; returns the bytes copied.
    pub fn read(self, offset: usize, out: &mut [u8]) -> usize {
        let _ = (offset, out);
        todo!()
    }
    /// Copies in from `offset` on; returns the bytes copied.
    pub fn write(self, offset: usize, data: &[u8]) -> usize {
        let _ = (offset, data);
        todo!()
    }
    /// Copies as much as fits from this slice to `dst`.
    pub fn copy_to(self, dst: GuestSlice<'_>) -> usize {
        let _ = dst;
        todo!()
    }
}

/// Up to `N` [`GuestSlice`]s on the stack.
pub struct SliceBuf<'m, const N: usize> {
    slices: [MaybeUninit<GuestSlice<'m>>; N],
    len: usize,
}

impl<'m, const N: usize> SliceBuf<'m, N> {
    /// An empty buffer.
    pub fn new() -> Self {
        SliceBuf {
            slices: [const { MaybeUninit::uninit() }; N],
            len: 0,
        }
    }
    /// Forgets all slices.
    pub fn clear(&mut self) {
        self.len = 0;
    }
    /// Appends; false when full.
    pub fn push(&mut self, slice: GuestSlice<'m>) -> bool {
        let _ = slice;
        todo!()
    }
    /// Whether `N` slices are in it.
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
    fn deref(&self) -> &Self::Target {
        todo!()
    }
}
