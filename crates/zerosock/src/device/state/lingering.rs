//! The bridges of connections that have ended before the host program has read all bytes.

use std::collections::BTreeMap;

use zerosock_proto::Instant;

/// The lingering bridges: see the module.
#[derive(Debug, Default)]
pub(crate) struct Lingering {
    /// By bridge key: when the program last took bytes, or when the connection ended.
    pub(in crate::device) last_progress: BTreeMap<u32, Instant>,
    pub(in crate::device) recheck_at: Option<Instant>,
}

impl Lingering {
    pub(in crate::device) fn len(&self) -> usize {
        self.last_progress.len()
    }
}
