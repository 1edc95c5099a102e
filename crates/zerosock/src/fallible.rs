//! Memory that a peer makes us need.
//!
//! # The rule
//! An allocation of which a peer chooses the size, and which can be larger than 64 KiB (the largest
//! payload of a packet), is asked for by the `try_reserve` family: where there is no memory, that
//! peer loses its connection, its request or its device, and the process goes on. Smaller ones, and
//! those of which the embedding program chooses the size, are as any other in Rust: the process ends
//! where there is no memory for them.

use std::collections::TryReserveError;

/// So many bytes of zero.
pub(crate) fn zeroed(len: usize) -> Result<Vec<u8>, TryReserveError> {
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(len)?;
    bytes.resize(len, 0);
    Ok(bytes)
}
