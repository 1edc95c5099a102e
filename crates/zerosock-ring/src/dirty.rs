//! The log of written pages, for live migration: a bitmap in memory that the front-end shares.
//!
//! Bit `n % 8` of byte `n / 8` stands for guest page `n`, which has [`LOG_PAGE`] bytes. The front-end
//! clears the bits while the device sets them, so every mark is one atomic operation.
//!
//! The pages are those of the guest. A queue in a [memory of extents](Memory::of_extents) has no log: what it has written
//! is marked by the addresses of the extents.
//!
//! # Invariants
//! - The file is mapped and checked as guest memory is ([`Memory`]); if it vanishes, the marks go to
//!   zero pages and the log is lost.
//! - A mark beyond the end of the log is ignored.
//! - A mark follows the write that it stands for. It has release ordering, so a front-end that has
//!   cleared the bit by an atomic exchange reads what was written.

use core::ptr;
use core::sync::atomic::{AtomicU8, Ordering};
use std::sync::Arc;

use rustix::fd::AsFd;

use crate::memory::{MapError, Memory, RegionConfig, Unmapper};
use crate::slice::Piece;

/// Bytes of guest memory that one bit stands for (VHOST_LOG_PAGE).
pub const LOG_PAGE: u64 = 4096;

/// A log of written pages. One is shared by all queues of a device.
#[derive(Debug)]
pub struct DirtyLog {
    /// The mapping of `bits`.
    memory: Memory,
    bits: *const AtomicU8,
    /// At most `isize::MAX`.
    bytes: usize,
}

// SAFETY: `bits` leads into a mapping that `memory` keeps, on every thread, and all access through it
// is atomic.
unsafe impl Send for DirtyLog {}
// SAFETY: as for Send: shared access is atomic as well.
unsafe impl Sync for DirtyLog {}

impl DirtyLog {
    /// Maps a log of `bytes` bytes, from `offset` of the file on. `unmapper` gets the mapping when
    /// nothing uses it any more.
    ///
    /// # Errors
    /// [`MapError`], as for a region of guest memory.
    pub fn map(
        file: impl AsFd,
        offset: u64,
        bytes: u64,
        unmapper: Option<Arc<dyn Unmapper>>,
    ) -> Result<DirtyLog, MapError> {
        let region = RegionConfig {
            guest_addr: 0,
            user_addr: 0,
            len: bytes,
            fd_offset: offset,
        };
        let memory = Memory::map_with(vec![(file, region)], unmapper)?;
        // A region of that length was mapped.
        let host = memory.at_guest_addr(0, bytes).unwrap_or(ptr::null_mut());
        Ok(DirtyLog {
            bytes: if host.is_null() { 0 } else { bytes as usize },
            bits: host.cast(),
            memory,
        })
    }

    /// Whether there is a bit for every guest address below `end`.
    pub fn covers(&self, end: u64) -> bool {
        end.div_ceil(8 * LOG_PAGE) <= self.bytes as u64
    }

    /// Length in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Whether the file has shrunk under the log: marks are missing.
    #[inline]
    pub fn is_lost(&self) -> bool {
        self.memory.is_lost()
    }

    /// Marks the pages of the `len` bytes at `guest_addr`, which have been written.
    pub fn mark(&self, guest_addr: u64, len: u64) {
        let Some(last) = len.checked_sub(1) else {
            return;
        };
        let first = guest_addr / LOG_PAGE;
        // The sum wraps only for addresses that no region can have.
        let last = guest_addr.saturating_add(last) / LOG_PAGE;
        // Bytes beyond the log are left out before the loop: their number is not bounded.
        let end = (last / 8).min((self.bytes as u64).saturating_sub(1));
        for byte in first / 8..=end {
            let from = first.saturating_sub(8 * byte).min(8);
            let to = (last - 8 * byte).min(7);
            let mask = (0xff_u32 << from) & (0xff_u32 >> (7 - to));
            self.set(byte as usize, mask as u8);
        }
    }

    /// Marks the pages of the first `len` bytes of the pieces.
    pub(crate) fn mark_pieces(&self, memory: &Memory, pieces: &[Piece], len: u32) {
        let mut left = len as usize;
        for piece in pieces {
            if left == 0 {
                return;
            }
            let written = piece.part(0, left);
            left -= written.len();
            if let Some(guest_addr) = memory.guest_addr(written) {
                self.mark(guest_addr, written.len() as u64);
            }
        }
    }

    /// Marks all pages of a memory, if what was written to it is not known.
    pub fn mark_all(&self, memory: &Memory) {
        for (guest_addr, len) in memory.guest_ranges() {
            self.mark(guest_addr, len);
        }
    }

    #[inline]
    fn set(&self, byte: usize, mask: u8) {
        if byte < self.bytes {
            // SAFETY: just checked: within the bytes that `map` found in the mapping, which `memory`
            // keeps. One byte has no alignment. Only atomics access it, ours of one width.
            let bits = unsafe { &*self.bits.add(byte) };
            bits.fetch_or(mask, Ordering::Release);
        }
    }
}

#[cfg(test)]
#[path = "dirty_tests.rs"]
mod tests;
