//! The address of one side of a sibling connection.

use zerosock_proto::vsock::FlowId;
use zerosock_virtio::outbox::DeviceAddr;

/// One side of a sibling connection.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Peer {
    pub(crate) device: DeviceAddr,
    pub(crate) flow: FlowId,
}

impl Peer {
    pub(crate) fn new(device: DeviceAddr, flow: FlowId) -> Peer {
        Peer { device, flow }
    }
}
