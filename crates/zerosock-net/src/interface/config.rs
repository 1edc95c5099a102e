//! The configuration of an [`Interface`](super::Interface), its validation, and why one cannot be made.

use std::io;
use std::time::Duration;

use zerosock_proto::wire::net::{HEADER_LEN, MAX_FRAME, Mac, Offloads};
use zerosock_ring::{AddError, QueueError, TranslateError, Trust};
use zerosock_vhost_user::frontend::{FrontendError, SharedMemoryError};

/// Bytes of the longest frame and its header.
pub(super) const MAX_BUFFER: u32 = (HEADER_LEN + MAX_FRAME) as u32;
/// Bytes of the shortest buffer allowed: a full frame of Ethernet with a VLAN tag, and its header.
const MIN_BUFFER: u32 = HEADER_LEN as u32 + 1518;

/// How an interface attaches, and how much memory it shares with the device.
#[derive(Clone, Debug)]
pub struct InterfaceConfig {
    /// Receive buffers, and entries of the receive queue: a power of two, 8 to 32768.
    pub rx_queue_size: u16,
    /// Bytes of a receive buffer, with the 12 bytes of a header: 1530 to 65569. A longer frame takes
    /// several buffers, if the device can do that.
    pub rx_buffer_size: u32,
    /// Loans, and entries of the transmit queue: a power of two, 8 to 32768.
    pub tx_queue_size: u16,
    /// Bytes of the buffer of a loan, with the 12 bytes of a header: 1530 to 65569.
    pub tx_buffer_size: u32,
    /// Loans with a buffer for the longest frame; less than `tx_queue_size`.
    pub large_loans: u16,
    /// How long [`wait`](super::Interface::wait) polls at most before it sleeps. It polls only while
    /// recent pauses were shorter.
    pub spin: Duration,
    /// Set if the device and all that it gets frames from are processes that keep the promises of
    /// [`Trust::declare`]. Then leases and loans give plain slices.
    pub trust: Option<Trust>,
    /// The offloads to negotiate, in both directions, where the device has them.
    pub offloads: Offloads,
    /// The MAC address; `None`: that of the device or, if it has none, a random one.
    pub mac: Option<Mac>,
    /// Whether to negotiate VIRTIO_RING_F_EVENT_IDX.
    pub event_idx: bool,
    /// Whether to use huge pages if enough are free; [`huge_pages`](super::Interface::huge_pages) tells
    /// the result.
    pub huge_pages: bool,
    /// Time limit of each vhost-user request.
    pub control_timeout: Duration,
}

impl Default for InterfaceConfig {
    fn default() -> InterfaceConfig {
        InterfaceConfig {
            rx_queue_size: 256,
            rx_buffer_size: 2048,
            tx_queue_size: 256,
            tx_buffer_size: 2048,
            large_loans: 32,
            spin: Duration::ZERO,
            trust: None,
            offloads: Offloads::ALL,
            mac: None,
            event_idx: true,
            huge_pages: false,
            control_timeout: Duration::from_secs(10),
        }
    }
}

impl InterfaceConfig {
    /// The first setting that is out of its range.
    pub(super) fn check(&self) -> Result<(), InterfaceConfigError> {
        for size in [self.rx_queue_size, self.tx_queue_size] {
            if !size.is_power_of_two() || !(8..=32768).contains(&size) {
                return Err(InterfaceConfigError::QueueSize(size));
            }
        }
        for len in [self.rx_buffer_size, self.tx_buffer_size] {
            if !(MIN_BUFFER..=MAX_BUFFER).contains(&len) {
                return Err(InterfaceConfigError::BufferSize(len));
            }
        }
        if self.large_loans >= self.tx_queue_size {
            return Err(InterfaceConfigError::LargeLoans(self.large_loans));
        }
        if self.mac.is_some_and(|mac| !mac.is_unicast()) {
            return Err(InterfaceConfigError::Mac);
        }
        Ok(())
    }
}

/// A setting out of its range.
#[derive(Copy, Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum InterfaceConfigError {
    /// See [`InterfaceConfig::rx_queue_size`] and [`InterfaceConfig::tx_queue_size`].
    #[error("queue size {0}: must be a power of two from 8 to 32768")]
    QueueSize(u16),
    /// See [`InterfaceConfig::rx_buffer_size`] and [`InterfaceConfig::tx_buffer_size`].
    #[error("buffer size {0}: must be from {MIN_BUFFER} to {MAX_BUFFER}")]
    BufferSize(u32),
    /// See [`InterfaceConfig::large_loans`].
    #[error("large_loans {0}: must be less than tx_queue_size")]
    LargeLoans(u16),
    /// See [`InterfaceConfig::mac`].
    #[error("the MAC address is none of an interface")]
    Mac,
}

/// Why an interface could not attach to a device.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InterfaceConnectError {
    /// A setting out of its range: the caller's fault.
    #[error(transparent)]
    Config(#[from] InterfaceConfigError),
    /// The shared memory could not be created.
    #[error(transparent)]
    Shared(#[from] SharedMemoryError),
    /// A buffer lies outside of the memory: an error in the layout computed here.
    #[error("a buffer lies outside of the shared memory: {0}")]
    Layout(#[from] TranslateError),
    /// The queues could not be laid out in the memory.
    #[error("cannot set up a virtqueue: {0}")]
    Queue(#[from] QueueError),
    /// The first buffers could not be posted.
    #[error("cannot post buffers: {0}")]
    Post(#[from] AddError),
    /// The device cannot be reached, refused a request or violated the protocol.
    #[error(transparent)]
    Frontend(#[from] FrontendError),
    /// No eventfd or epoll descriptor could be created.
    #[error("cannot create a descriptor to sleep on: {0}")]
    Descriptor(io::Error),
    /// The device lacks a feature that the driver requires.
    #[error("the vhost-user device does not offer {0}")]
    Missing(&'static str),
    /// Frames of the device's MTU do not fit into a receive buffer, and the device cannot use several.
    #[error(
        "frames of the device's MTU {0} do not fit into a receive buffer; raise rx_buffer_size"
    )]
    Mtu(u16),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_out_of_range_are_named() {
        let good = InterfaceConfig::default();
        assert_eq!(good.check(), Ok(()));
        let check = |change: fn(&mut InterfaceConfig)| {
            let mut bad = good.clone();
            change(&mut bad);
            bad.check().unwrap_err()
        };
        assert_eq!(
            check(|bad| bad.rx_queue_size = 100),
            InterfaceConfigError::QueueSize(100)
        );
        assert_eq!(
            check(|bad| bad.tx_queue_size = 4),
            InterfaceConfigError::QueueSize(4)
        );
        assert_eq!(
            check(|bad| bad.rx_buffer_size = 1529),
            InterfaceConfigError::BufferSize(1529)
        );
        assert_eq!(
            check(|bad| bad.tx_buffer_size = MAX_BUFFER + 1),
            InterfaceConfigError::BufferSize(MAX_BUFFER + 1)
        );
        assert_eq!(
            check(|bad| bad.large_loans = 256),
            InterfaceConfigError::LargeLoans(256)
        );
        assert_eq!(
            check(|bad| bad.mac = Some(Mac([1, 0, 0, 0, 0, 0]))),
            InterfaceConfigError::Mac
        );
    }
}
