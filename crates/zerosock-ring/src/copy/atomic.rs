//! Copies by relaxed atomics, for architectures without a block of instructions, and for Miri.
//!
//! The unsafe functions have the contracts of those of the same names in `copy`.

use core::sync::atomic::{AtomicU8, AtomicUsize, Ordering::Relaxed};

pub(super) use super::copy_overlapping as copy_disjoint;

const WORD: usize = size_of::<usize>();

/// Calls `word` with the offset of each aligned word of `shared`, and `byte` with those of the
/// bytes in front of the words and behind them.
#[inline(always)]
fn each(shared: *const u8, len: usize, mut word: impl FnMut(usize), mut byte: impl FnMut(usize)) {
    let head = shared.align_offset(WORD).min(len);
    let tail = len - (len - head) % WORD;
    (0..head).for_each(&mut byte);
    (head..tail).step_by(WORD).for_each(&mut word);
    (tail..len).for_each(&mut byte);
}

#[inline]
pub(super) unsafe fn copy_out(src: *const u8, dst: *mut u8, len: usize) {
    let shared = src.cast_mut();
    // SAFETY: `each` gives offsets of words and bytes that lie within `len`; words at `src` are
    // aligned. Atomic loads through a pointer that may not write are loads alone.
    each(
        src,
        len,
        |at| unsafe {
            let value = AtomicUsize::from_ptr(shared.add(at).cast()).load(Relaxed);
            dst.add(at).cast::<usize>().write_unaligned(value);
        },
        |at| unsafe { *dst.add(at) = AtomicU8::from_ptr(shared.add(at)).load(Relaxed) },
    );
}

#[inline]
pub(super) unsafe fn copy_in(src: *const u8, dst: *mut u8, len: usize) {
    // SAFETY: as in `copy_out`, with aligned words at `dst`.
    each(
        dst,
        len,
        |at| unsafe {
            let value = src.add(at).cast::<usize>().read_unaligned();
            AtomicUsize::from_ptr(dst.add(at).cast()).store(value, Relaxed);
        },
        |at| unsafe { AtomicU8::from_ptr(dst.add(at)).store(*src.add(at), Relaxed) },
    );
}

#[inline]
pub(super) unsafe fn load(at: *const u8) -> u64 {
    let mut copy = [0; 8];
    // SAFETY: the caller's promise; `copy` is private.
    unsafe { copy_out(at, copy.as_mut_ptr(), 8) };
    u64::from_ne_bytes(copy)
}

#[inline]
pub(super) unsafe fn store(at: *mut u8, word: u64) {
    let copy = word.to_ne_bytes();
    // SAFETY: the caller's promise; `copy` is private.
    unsafe { copy_in(copy.as_ptr(), at, 8) }
}
