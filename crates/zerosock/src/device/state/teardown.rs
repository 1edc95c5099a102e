//! How far a device has come with the end of all its connections, which it ends in parts.

/// The parts that were done: see the [module](self).
#[derive(Debug, Default)]
pub(crate) struct Teardown {
    /// The first part has begun.
    pub(crate) has_begun: bool,
    /// The guest's memory has vanished: bytes that lie in it are not delivered.
    pub(crate) memory_lost: bool,
    /// The bridges with a smaller key have ended.
    pub(crate) next_bridge: u32,
    /// The program's connections in flows with a smaller index have ended.
    pub(crate) next_app: usize,
    /// The slots of the protocol core below this one are free.
    pub(crate) next_flow: usize,
}
