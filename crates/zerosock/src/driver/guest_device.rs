//! A device whose memory the driver is given, and the request that starts its queues. The attach protocol and that of
//! guest endpoints have the request in the same 40 bytes, so that an agent can pass it on:
//!
//! | at | bytes | |
//! |---|---|---|
//! | 0 | 8 | the virtio features that the driver accepts |
//! | 8 | 2 | descriptors of each queue |
//! | 10 | 6 | 0 |
//! | 16 | 8 × 3 | where the receive, the transmit and the event ring begin in the memory |

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

/// Bytes of the encoded request.
pub(crate) const START_LEN: usize = 40;

/// A request to start the queues of an endpoint on memory that was given to its driver.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct Start {
    /// The virtio features that the driver accepts of those that the device has.
    pub features: u64,
    /// Descriptors of each queue.
    pub queue_size: u16,
    /// Where the rings of the receive, transmit and event queue begin, in bytes from the start of the file: as
    /// [`DriverLayout::at`](zerosock_ring::DriverLayout::at) takes it.
    pub rings: [u64; 3],
}

impl Start {
    /// The request, byte by byte.
    pub(crate) fn encode(&self) -> [u8; START_LEN] {
        let mut bytes = [0; START_LEN];
        bytes[..8].copy_from_slice(&self.features.to_le_bytes());
        bytes[8..10].copy_from_slice(&self.queue_size.to_le_bytes());
        for (field, ring) in bytes[16..].chunks_exact_mut(8).zip(self.rings) {
            field.copy_from_slice(&ring.to_le_bytes());
        }
        bytes
    }

    /// The request in these bytes; `None` if a byte is not zero that has to be.
    pub(crate) fn decode(bytes: &[u8; START_LEN]) -> Option<Start> {
        let (words, _) = bytes.as_chunks::<8>();
        let [features, size, rings @ ..] = <[[u8; 8]; 5]>::try_from(words).ok()?;
        let [low, high, 0, 0, 0, 0, 0, 0] = size else {
            return None;
        };
        Some(Start {
            features: u64::from_le_bytes(features),
            queue_size: u16::from_le_bytes([low, high]),
            rings: rings.map(u64::from_le_bytes),
        })
    }
}
