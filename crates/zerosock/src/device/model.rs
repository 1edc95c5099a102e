//! The vsock device model for the control side of vhost-user.
//!
//! The configuration space is the guest's CID as le64 (virtio 1.3, 5.10.4) and, for a device with
//! several queue pairs, the maximum and the number in use (docs/queue-pairs.md).

use zerosock_proto::Cid;
use zerosock_proto::vsock::QueuePairs;
use zerosock_proto::vsock::datagram::{F_DGRAM, F_DGRAM_FLOW};
use zerosock_proto::vsock::features::{F_PAIRS, F_SEQPACKET, F_STREAM};
use zerosock_vhost_user::session::{F_EVENT_IDX, F_INDIRECT_DESC, F_VERSION_1};
use zerosock_vhost_user::{ConfigWrite, DeviceModel, FrontendFault};

const FEATURES: u64 =
    F_STREAM | F_SEQPACKET | F_DGRAM | F_DGRAM_FLOW | F_INDIRECT_DESC | F_EVENT_IDX | F_VERSION_1;

/// The names of the features of vsock, for the log.
const FEATURE_NAMES: &[(u64, &str)] = &[
    (F_STREAM, "STREAM"),
    (F_SEQPACKET, "SEQPACKET"),
    (1 << 2, "NO_IMPLIED_STREAM"),
    (F_DGRAM, "DGRAM"),
    (F_DGRAM_FLOW, "DGRAM_FLOW"),
    (F_PAIRS, "PAIRS"),
];

/// Offset of the number of queue pairs in use, an le16, in the configuration space.
const USED_PAIRS: usize = 10;

/// A vsock device: see the module.
#[derive(Debug)]
pub(crate) struct VsockModel {
    /// The guest's CID.
    pub(crate) cid: Cid,
    /// Most queue pairs that a driver may use.
    pub(crate) max_pairs: QueuePairs,
}

/// The number of queue pairs in use according to this configuration space.
pub(crate) fn used_pairs(config: &[u8]) -> QueuePairs {
    match config.get(USED_PAIRS..USED_PAIRS + 2) {
        Some(&[low, high]) => {
            QueuePairs::new(u16::from_le_bytes([low, high])).unwrap_or(QueuePairs::ONE)
        }
        _ => QueuePairs::ONE,
    }
}

impl DeviceModel for VsockModel {
    fn features(&self) -> u64 {
        match self.max_pairs {
            QueuePairs::ONE => FEATURES,
            _ => FEATURES | F_PAIRS,
        }
    }

    fn feature_name(&self, bit: u32) -> Option<&'static str> {
        let names = FEATURE_NAMES.iter();
        let mut found = names.filter(|(feature, _)| *feature == 1 << bit);
        found.next().map(|(_, name)| *name)
    }

    fn is_given_buffers_at_once(&self) -> bool {
        true
    }

    fn max_queues(&self) -> u16 {
        self.max_pairs.queues()
    }

    fn queues(&self, features: u64, config: &[u8]) -> u16 {
        match features & F_PAIRS {
            0 => QueuePairs::ONE.queues(),
            _ => used_pairs(config).queues(),
        }
    }

    fn config(&self) -> Vec<u8> {
        let mut config = u64::from(self.cid.get()).to_le_bytes().to_vec();
        if self.max_pairs != QueuePairs::ONE {
            config.extend(self.max_pairs.get().to_le_bytes());
            config.extend(QueuePairs::ONE.get().to_le_bytes());
            config.extend([0; 4]);
        }
        config
    }

    /// The driver may write only the number of queue pairs, before any queue runs.
    fn write_config(
        &self,
        config: &mut [u8],
        write: ConfigWrite<'_>,
    ) -> Result<(), (FrontendFault, String)> {
        if write.features & F_PAIRS == 0 || write.offset != USED_PAIRS {
            let text = "nothing but queue_pairs can be written in the configuration space";
            return Err((FrontendFault::Unsupported, text.into()));
        }
        let &[low, high] = write.bytes else {
            return Err((FrontendFault::Payload, "queue_pairs has two bytes".into()));
        };
        let wanted = QueuePairs::new(u16::from_le_bytes([low, high])).ok();
        let max = self.max_pairs.get();
        if wanted.is_none_or(|pairs| pairs.get() > max) {
            return Err((FrontendFault::Payload, format!("queue_pairs is 1 to {max}")));
        }
        if write.running {
            return Err((FrontendFault::Order, "a queue runs".into()));
        }
        if let Some(used) = config.get_mut(USED_PAIRS..USED_PAIRS + 2) {
            used.copy_from_slice(write.bytes);
        }
        Ok(())
    }
}
