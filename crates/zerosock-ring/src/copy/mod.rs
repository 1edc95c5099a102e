//! Copies of bytes that other threads and other processes may read and write at the same time.
//!
//! A plain Rust copy of such bytes is a data race: [`Memory`](crate::Memory) is shared by threads,
//! and its `read` and `write` are safe calls. So no Rust code here accesses shared bytes by a plain
//! load or store:
//! - On x86-64 the accesses are instructions of `asm!` blocks. The compiler knows of a block only
//!   that it may read and write memory. For the language it behaves as a sequence of relaxed
//!   atomic accesses to single bytes, which is also what another process does to the memory: bytes
//!   that are written meanwhile are read as their old or their new value, and nothing else is
//!   affected. Up to 16 bytes the block is one load and one store per word, so that an aligned
//!   number of 2, 4 or 8 bytes is never seen half written; up to 64 bytes it is one load and one
//!   store for 16 bytes; longer copies call the C library's `memcpy` from within the block. Measured on
//!   a Xeon with ERMS and FSRM, that is as fast as a plain copy at every length, while `rep movsb` takes
//!   up to 3.5 times as long below 4 KiB.
//! - Elsewhere, and under Miri, they are relaxed atomic accesses to words, and to bytes at both
//!   ends. Two such copies that meet with different ends use atomics of different widths on the
//!   same bytes, which the hardware orders, though the language does not define it.
//!
//! # Invariants
//! Private bytes are accessed by one thread alone, as any Rust memory. The compiler cannot read
//! shared bytes a second time in place of their private copy. A fault inside a copy is taken as
//! before: the handler maps pages and the instruction runs again.

/// Bytes that a copy between overlapping ranges moves at a time.
const CHUNK: usize = 512;

/// Copies shared bytes to private ones.
///
/// # Safety
/// `src` is valid for reads and `dst` for writes of `len` bytes; they do not overlap; there is no
/// reference to the bytes at `src` through which they are written.
#[inline(always)]
pub(crate) unsafe fn copy_out(src: *const u8, dst: *mut u8, len: usize) {
    // SAFETY: the caller's promise.
    unsafe { arch::copy_out(src, dst, len) }
}

/// Copies private bytes to shared ones.
///
/// # Safety
/// `src` is valid for reads and `dst` for writes of `len` bytes; they do not overlap; there is no
/// reference to the bytes at `dst`.
#[inline(always)]
pub(crate) unsafe fn copy_in(src: *const u8, dst: *mut u8, len: usize) {
    // SAFETY: the caller's promise.
    unsafe { arch::copy_in(src, dst, len) }
}

/// Copies shared bytes to other shared bytes; the ranges may overlap.
///
/// # Safety
/// `src` is valid for reads and `dst` for writes of `len` bytes; there is no reference to the bytes
/// at `dst`, and none to those at `src` through which they are written.
#[inline]
pub(crate) unsafe fn copy_between(src: *const u8, dst: *mut u8, len: usize) {
    let distance = src.addr().abs_diff(dst.addr());
    // SAFETY: the caller's promise; the ranges do not overlap where `copy_disjoint` is called.
    unsafe {
        if distance < len {
            copy_overlapping(src, dst, len);
        } else {
            arch::copy_disjoint(src, dst, len);
        }
    }
}

/// As [`copy_between`], through private memory; from the end if the source lies in front.
///
/// # Safety
/// As for [`copy_between`].
#[cold]
unsafe fn copy_overlapping(src: *const u8, dst: *mut u8, len: usize) {
    let mut chunk = [0; CHUNK];
    let mut done = 0;
    while done < len {
        let part = CHUNK.min(len - done);
        let at = match src.addr() < dst.addr() {
            true => len - done - part,
            false => done,
        };
        // SAFETY: at + part <= len, and part <= CHUNK; `chunk` is private. What a chunk overwrites
        // of the source was read before, since chunks go from the end that overlaps.
        unsafe {
            copy_out(src.add(at), chunk.as_mut_ptr(), part);
            copy_in(chunk.as_ptr(), dst.add(at), part);
        }
        done += part;
    }
}

/// One load of eight shared bytes in the machine's order, at any alignment.
///
/// # Safety
/// `at` is valid for reads of 8 bytes; there is no reference through which they are written.
#[inline(always)]
pub(crate) unsafe fn load(at: *const u8) -> u64 {
    // SAFETY: the caller's promise.
    unsafe { arch::load(at) }
}

/// One store of eight shared bytes in the machine's order, at any alignment.
///
/// # Safety
/// `at` is valid for writes of 8 bytes, to which there is no reference.
#[inline(always)]
pub(crate) unsafe fn store(at: *mut u8, word: u64) {
    // SAFETY: the caller's promise.
    unsafe { arch::store(at, word) }
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
#[path = "x86_64.rs"]
mod arch;
#[cfg(not(all(target_arch = "x86_64", not(miri))))]
#[path = "atomic.rs"]
mod arch;
// Tested everywhere.
#[cfg(all(test, target_arch = "x86_64", not(miri)))]
mod atomic;

#[cfg(test)]
mod tests;
