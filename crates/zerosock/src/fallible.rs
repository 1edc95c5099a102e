//! Memory that a peer makes us need.
//!
//! # The rule
//! An allocation of which a peer chooses the size, and which can be larger than 64 KiB (the largest
//! payload of a packet), is asked for by the `try_reserve` family: where there is no memory, that
//! peer loses its connection, its request or its device, and the process goes on. Smaller ones, and
//! those of which the embedding program chooses the size, are as any other in Rust: the process ends
//! where there is no memory for them.
//!
//! Freeing a large buffer takes as long as its pages are many: see [`free`].

use std::collections::TryReserveError;

use zerosock_sys::reaper;

/// So many bytes of zero.
pub(crate) fn zeroed(len: usize) -> Result<Vec<u8>, TryReserveError> {
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(len)?;
    bytes.resize(len, 0);
    Ok(bytes)
}

/// From here on the pages of a buffer are returned to the system when it is freed, which takes
/// 150 us per MiB.
const LARGE: usize = 1 << 20;

/// Frees a buffer. The reaper does so with a large one, so that a worker does not stand still.
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
