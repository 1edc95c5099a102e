//! What the log says about the driver, and whether it can use the device.
//!
//! vhost-user has no message for it: with QEMU, queues of a driver start one after the other, and the
//! device status is sent for network devices only. A driver is ready when the first two queues run,
//! receive and transmit; others may follow.

use std::sync::Arc;

use vhost::vhost_user::message::VhostUserVirtioFeatures;
use zerosock_ring::{DeviceQueue, Memory, QueueConfig};

use super::super::stats::FrontendFault;
use super::state::{Denied, F_EVENT_IDX, F_INDIRECT_DESC, OF_FRONT_END, Queue, Session};

/// The queues without which a driver cannot use a device.
const NEEDED: usize = 2;

/// Features of all kinds of devices (virtio 1.3, 6).
const COMMON_FEATURES: &[(u32, &str)] = &[
    (24, "NOTIFY_ON_EMPTY"),
    (26, "LOG_ALL"),
    (27, "ANY_LAYOUT"),
    (28, "INDIRECT_DESC"),
    (29, "EVENT_IDX"),
    (30, "PROTOCOL_FEATURES"),
    (32, "VERSION_1"),
    (33, "ACCESS_PLATFORM"),
    (34, "RING_PACKED"),
    (35, "IN_ORDER"),
    (36, "ORDER_PLATFORM"),
    (40, "RING_RESET"),
];

impl Session {
    /// Whether the queues run that a driver needs.
    pub(crate) fn is_driver_ready(&self) -> bool {
        let mut needed = self.queues.iter().take(NEEDED);
        !self.queues.is_empty() && needed.all(|queue| queue.started && self.is_enabled(queue))
    }

    /// "Ring states": without the protocol features a ring that is started is enabled.
    fn is_enabled(&self, queue: &Queue) -> bool {
        let negotiated = VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits();
        queue.enabled || self.features & negotiated == 0
    }

    /// The number of queues that run.
    pub(crate) fn running_queues(&self) -> usize {
        self.queues.iter().filter(|queue| queue.started).count()
    }

    /// The names of the features that the driver has accepted, for the log.
    pub(crate) fn accepted_features(&self) -> String {
        self.feature_names(self.features & !OF_FRONT_END)
    }

    /// Whether a driver may accept these features. A front-end may set its own ones before there is a
    /// driver; then the model is asked when a queue starts.
    pub(super) fn check_features(&self, features: u64) -> Result<(), Denied> {
        let unknown = features & !self.offered();
        if unknown != 0 {
            let names = self.feature_names(unknown);
            let text = format!("features that were not offered: {names}");
            return Err((FrontendFault::Unsupported, text));
        }
        match features & !OF_FRONT_END {
            0 => Ok(()),
            _ => self.model.check_features(features),
        }
    }

    /// The names of virtio features, for the log.
    pub(super) fn feature_names(&self, features: u64) -> String {
        let bits = (0..u64::BITS).filter(|bit| features & 1 << bit != 0);
        let names = bits.map(|bit| {
            let common = COMMON_FEATURES.iter().find(|(common, _)| *common == bit);
            let name = common.map(|(_, name)| *name);
            match name.or_else(|| self.model.feature_name(bit)) {
                Some(name) => name.to_owned(),
                None => format!("bit {bit}"),
            }
        });
        names.collect::<Vec<_>>().join(", ")
    }

    /// Whether the driver of a device that is [given buffers at
    /// once](crate::DeviceModel::is_given_buffers_at_once) has put nothing into a queue since it began,
    /// as far as can be seen in `memory`.
    pub(crate) fn is_driver_silent(&self) -> bool {
        let Some(memory) = self.memory.upgrade() else {
            return false;
        };
        self.model.is_given_buffers_at_once()
            && self.is_driver_ready()
            && self
                .queues
                .iter()
                .take(NEEDED)
                .all(|queue| self.is_unused(queue, &memory))
    }

    fn is_unused(&self, queue: &Queue, memory: &Arc<Memory>) -> bool {
        let (Some(size), Some((desc, avail, used))) = (queue.size, queue.addresses) else {
            return false;
        };
        let config = QueueConfig {
            size,
            desc,
            avail,
            used,
            base: 0,
            event_idx: self.features & F_EVENT_IDX != 0,
            indirect: self.features & F_INDIRECT_DESC != 0,
        };
        // A queue of a guest that was migrated or resumed begins elsewhere.
        let begins_anew = queue.base == 0;
        let rings = DeviceQueue::new(Arc::clone(memory), &config);
        begins_anew && rings.is_ok_and(|rings| !rings.has_available())
    }
}
