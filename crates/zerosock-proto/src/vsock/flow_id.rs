//! The identity of a connection.

use std::fmt;

/// Identifies a connection of one shard. A later connection in the same slot has another id.
#[derive(Copy, Clone, Eq, PartialEq, Hash, Debug)]
pub struct FlowId {
    pub(crate) index: u32,
    pub(crate) generation: u32,
}

impl fmt::Display for FlowId {
    /// Slot and generation, for logs.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.index, self.generation)
    }
}

impl FlowId {
    /// The connection's slot, a small number that is reused: an index for side tables, which store
    /// the whole id beside each entry.
    #[inline]
    pub const fn index(self) -> usize {
        self.index as usize
    }
}
