//! A device whose memory the driver is given.

use std::os::fd::OwnedFd;

use zerosock_proto::Cid;
use zerosock_proto::vsock::datagram::{F_DGRAM, F_DGRAM_FLOW};
use zerosock_proto::vsock::features::{F_SEQPACKET, F_STREAM};
use zerosock_virtio::{F_EVENT_IDX, F_VERSION_1};

/// The virtio features that a driver uses with one queue pair. The device of each daemon that has guest endpoints offers
/// them: the messages between agent and daemon do not say what is offered.
pub const FEATURES: u64 =
    F_VERSION_1 | F_EVENT_IDX | F_STREAM | F_SEQPACKET | F_DGRAM | F_DGRAM_FLOW;

/// What a driver gets in the place of a vhost-user connection.
#[derive(Debug)]
pub struct GuestDevice {
    /// The memory: at least as long as
    /// [`DriverConfig::memory_len`](super::DriverConfig::memory_len), used by nothing else, and
    /// of zeroes but for the last cache line of each huge page, which belongs to the daemon of the host.
    pub memory: OwnedFd,
    /// The doorbell: a connected stream. Each byte is a wake-up, and its end is that of the device.
    pub doorbell: OwnedFd,
    /// The virtio features that the device offers.
    pub features: u64,
    /// The endpoint's CID.
    pub cid: Cid,
}
