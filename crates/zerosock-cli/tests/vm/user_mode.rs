//! User-mode Linux as the guest.

use crate::lab::Skipped;

/// All of them.
pub const ALL: &[(&str, fn() -> Result<(), Skipped>)] = &[];
