//! For how long connections outlast the stop of a device's queues.

use std::time::Duration;

use zerosock_proto::Instant;

/// The stop of the queues: a pause of the VM, or a reset of which the VMM does not tell.
#[derive(Debug, Default)]
pub(crate) struct Stop {
    /// The longest stop that connections outlast; `None`: any.
    pub(crate) limit: Option<Duration>,
    /// When the connections end, unless a queue starts before. A timer is set for it.
    pub(crate) ends_at: Option<Instant>,
    /// The connections have ended, and the driver has to be told if it goes on.
    pub(crate) has_ended: bool,
}
