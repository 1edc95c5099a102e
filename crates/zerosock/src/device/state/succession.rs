//! What a device has of a process that it succeeds.

use zerosock_proto::Instant;
use zerosock_ring::StateMap;

/// See the [module](self).
#[derive(Debug, Default)]
pub(crate) struct Succession {
    /// A successor of this process would continue the queues.
    pub(crate) is_kept: bool,
    /// The memory of the flow log, until the device starts.
    pub(crate) flows: Option<StateMap>,
    /// The queues that another process has run are about to be started again: host programs wait for that.
    pub(crate) awaits_queues: bool,
    /// When they stop waiting, once the device has started.
    pub(crate) waits_until: Option<Instant>,
}
