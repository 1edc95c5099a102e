//! Devices with several queue pairs (docs/queue-pairs.md).
//!
//! Each queue pair is a `Device` of its own with a shard, two queues and a worker; the address of
//! the first pair is the address of the whole device. The pairs share the memory and the
//! front-end, which the control thread manages. A connection stays at the pair where it began.

use std::sync::Arc;

use zerosock_proto::vsock::QueuePairs;
use zerosock_virtio::outbox::DeviceAddr;

use super::{Context, Device};
use crate::device::state::queue_pairs::QueuePairSet;
use crate::device::state::sibling_message::SiblingMessage;

impl Device {
    /// Makes this device queue pair `pair` of `all`.
    pub(crate) fn set_queue_pair(&mut self, pair: u16, all: Arc<[DeviceAddr]>) {
        self.queue_pairs = QueuePairSet::new(pair, self.addr, all);
    }

    /// The addresses of all queue pairs of the device, by number.
    pub(crate) fn queue_pair_addrs(&self) -> &Arc<[DeviceAddr]> {
        &self.queue_pairs.all
    }

    /// The number of this queue pair.
    pub(crate) fn pair(&self) -> u16 {
        self.queue_pairs.pair
    }

    /// Announces lost connections to the driver. Only the first pair has the event queue.
    pub(super) fn announce_lost(&mut self, cx: &mut Context<'_>) {
        if self.queue_pairs.pair == 0 {
            self.announce_reset = true;
        } else {
            cx.outbox
                .send(self.queue_pairs.first(), SiblingMessage::Lost);
        }
    }

    /// Resets the number of pairs in use; the next driver sets it again.
    pub(super) fn reset_used_pairs(&mut self) {
        self.queue_pairs.used = QueuePairs::ONE;
    }
}
