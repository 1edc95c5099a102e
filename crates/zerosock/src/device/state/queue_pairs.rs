//! The queue pairs of a device, and connections that are handed off between them.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use zerosock_proto::vsock::{FlowId, QueuePairs};
use zerosock_virtio::outbox::DeviceAddr;

use super::peer::Peer;
use super::sibling_message::SiblingMessage;

/// What one queue pair knows of the device's other pairs, and of connections that are being handed
/// off between it and them.
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
    /// Connections that this pair has handed off and the new pair has not confirmed.
    pub(in crate::device) unconfirmed: HashSet<FlowId>,
    /// Connections that this pair has handed off, and whose siblings may still send messages for
    /// them to this pair.
    pub(in crate::device) forwarding: HashMap<FlowId, Forwarding>,
    /// For each connection that this pair has taken over: messages that its sibling has sent to
    /// this pair. They wait until the old pair has forwarded the earlier ones.
    pub(in crate::device) parked: HashMap<FlowId, Vec<SiblingMessage>>,
}

/// What happens to messages for a connection that was handed off.
#[derive(Debug)]
pub(in crate::device) enum Forwarding {
    /// They are kept here, because the new pair has not confirmed the handoff yet.
    InTransit(Vec<SiblingMessage>),
    /// They are forwarded to the connection at the new pair.
    To(Peer),
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
            unconfirmed: HashSet::new(),
            forwarding: HashMap::new(),
            parked: HashMap::new(),
        }
    }

    /// Whether no handoff from or to this pair is in progress.
    #[cfg(test)]
    pub(in crate::device) fn is_at_rest(&self) -> bool {
        self.unconfirmed.is_empty() && self.forwarding.is_empty() && self.parked.is_empty()
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
