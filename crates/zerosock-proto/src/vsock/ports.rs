//! placeholder
/// Listeners and ports, shared by shards.
#[derive(Debug, Default)]
pub struct PortTable {}
impl PortTable {
    /// An empty table.
    pub fn new() -> PortTable {
        PortTable {}
    }
}
