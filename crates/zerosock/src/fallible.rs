//! Allocation and freeing of memory in a size that a peer chooses.
//!
//! # Invariants
//!
//! - An allocation in a size that a peer chooses, and that can exceed 64 KiB (the largest payload
//!   of a packet), uses the `try_reserve` family, and so do lists of a connection whose length a
//!   peer chooses, and the maps from flows to their connections. If it fails, that peer loses its
//!   connection, its datagram, its request or its device, and the process continues.
//! - Other allocations abort the process on failure as usual in Rust: smaller ones, those in a size
//!   that the embedding program chooses, the lists of all connections of a device, and the queues
//!   of messages between devices, to which each turn of a device adds a bounded number.
//! - Freeing a large buffer takes time in proportion to its pages: see [`free`].

use std::collections::TryReserveError;

use zerosock_sys::reaper;

/// A buffer of `len` zero bytes.
pub(crate) fn zeroed(len: usize) -> Result<Vec<u8>, TryReserveError> {
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(len)?;
    bytes.resize(len, 0);
    Ok(bytes)
}

/// Extends `list` by copies of `value` to at least `len` elements.
pub(crate) fn extend_to<T: Clone>(
    list: &mut Vec<T>,
    len: usize,
    value: T,
) -> Result<(), TryReserveError> {
    let len = len.max(list.len());
    list.try_reserve(len - list.len())?;
    list.resize(len, value);
    Ok(())
}

/// From this size on, freeing a buffer returns its pages to the system, which takes 150 us per MiB.
const LARGE: usize = 1 << 20;

/// Frees a buffer. Large ones go to the reaper, so that the worker does not block.
pub(crate) fn free(bytes: Vec<u8>) {
    if bytes.capacity() >= LARGE {
        reaper::run(move || drop(bytes), None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_buffers_are_freed_by_the_reaper() {
        free(vec![1; 1000]);
        let before = reaper::stats();
        free(vec![1; LARGE]);
        assert!(reaper::drain(std::time::Duration::from_secs(60)));
        assert!(reaper::stats().finished > before.finished);
    }
}
