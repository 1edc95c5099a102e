//! The queue pairs of a device.

use std::sync::Arc;

use zerosock_proto::vsock::QueuePairs;
use zerosock_virtio::outbox::DeviceAddr;

/// What one queue pair knows of the device's other pairs.
#[derive(Debug)]
pub(crate) struct QueuePairSet {
    /// The number of this pair.
    pub(in crate::device) pair: u16,
    /// The address of this pair.
    pub(in crate::device) own: DeviceAddr,
    /// The addresses of all pairs, by number.
    pub(in crate::device) all: Arc<[DeviceAddr]>,
    /// The number of pairs that the driver uses.
    pub(in crate::device) used: QueuePairs,
}

impl QueuePairSet {
    /// For a device with a single pair, or for the first pair before the others are known.
    pub(in crate::device) fn one(addr: DeviceAddr) -> QueuePairSet {
        QueuePairSet::new(0, addr, Arc::new([addr]))
    }

    pub(in crate::device) fn new(
        pair: u16,
        own: DeviceAddr,
        all: Arc<[DeviceAddr]>,
    ) -> QueuePairSet {
        QueuePairSet {
            pair,
            own,
            all,
            used: QueuePairs::ONE,
        }
    }

    /// The address of the first pair, which is the address of the device.
    pub(in crate::device) fn first(&self) -> DeviceAddr {
        self.all.first().copied().unwrap_or(self.own)
    }

    /// The address of pair `pair`; `None` if the driver does not use it or it is this pair.
    pub(in crate::device) fn other(&self, pair: u32) -> Option<DeviceAddr> {
        let other = pair < u32::from(self.used.get()) && pair != u32::from(self.pair);
        self.all.get(pair as usize).copied().filter(|_| other)
    }
}
