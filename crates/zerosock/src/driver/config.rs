//! The configuration of a [`Driver`](super::Driver) and its validation.

use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use zerosock_proto::vsock::QueuePairs;

use zerosock_proto::Port;

/// The most entries of a virtqueue.
pub(super) const MAX_QUEUE: u16 = 32768;
/// The most payload bytes of a receive buffer.
pub(super) const MAX_RX_BUFFER: u32 = 1 << 20;
/// The most payload bytes of a transmit buffer.
pub(super) const MAX_TX_BUFFER: u32 = 65536;

/// How a driver attaches and how much memory it shares with the device.
///
/// [`DriverConfig::new`] has the settings of a Linux guest; every field can be changed before
/// [`Driver::attach`](super::Driver::attach).
#[derive(Clone, Debug)]
pub struct DriverConfig {
    /// Path of the device's vhost-user control socket; unused by
    /// [`Driver::attach_over`](super::Driver::attach_over), which is given a connected one.
    pub socket: PathBuf,
    /// Entries of each virtqueue: a power of two, 8 to 32768. A packet takes
    /// two of them, one for the header and one for the payload.
    pub queue_size: u16,
    /// Limit on the queue pairs to use if the device offers several (docs/queue-pairs.md): 1 to 16.
    /// Each has its own buffers.
    pub queue_pairs: u16,
    /// Payload bytes of one receive buffer. Linux posts 4096.
    pub rx_buffer_size: u32,
    /// Payload bytes of one transmit buffer, which limit the payload of a packet: at most 65536,
    /// the longest packet.
    pub tx_buffer_size: u32,
    /// Receive window of a connection in bytes, advertised as `buf_alloc`.
    pub buf_alloc: u32,
    /// Limit on open connections; further requests are answered with RST.
    pub max_connections: usize,
    /// Set if the endpoint is a service of the host: its CID is 2 and its connections use these
    /// local ports, which the daemon assigned when it attached. `None` for a guest or a process
    /// with its own CID.
    pub host_ports: Option<RangeInclusive<Port>>,
    /// How long a connect waits for the peer's answer. Linux: 2 s.
    pub connect_timeout: Duration,
    /// Time limit of attaching as a whole, and of each later vhost-user request.
    pub control_timeout: Duration,
    /// Whether to negotiate VIRTIO_RING_F_EVENT_IDX.
    pub event_idx: bool,
    /// Whether to negotiate datagrams and their flow control (docs/datagrams.md).
    pub datagrams: bool,
    /// Whether to use huge pages if enough are free;
    /// [`Driver::huge_pages`](super::Driver::huge_pages) tells the result. Only with `seal`.
    pub huge_pages: bool,
    /// Whether to seal the memory against shrinking. Disabled only by tests that shrink the memory
    /// under a device.
    pub seal: bool,
}

impl Default for DriverConfig {
    /// The settings of a Linux guest, for a device that is already connected.
    fn default() -> DriverConfig {
        DriverConfig::new("")
    }
}

impl DriverConfig {
    /// The settings of a Linux guest, for the device at `socket`.
    pub fn new(socket: impl Into<PathBuf>) -> DriverConfig {
        DriverConfig {
            socket: socket.into(),
            queue_size: 256,
            queue_pairs: 1,
            rx_buffer_size: 4096,
            tx_buffer_size: 65536,
            buf_alloc: 262_144,
            max_connections: 131_072,
            host_ports: None,
            connect_timeout: Duration::from_secs(2),
            control_timeout: Duration::from_secs(10),
            event_idx: true,
            datagrams: true,
            huge_pages: true,
            seal: true,
        }
    }

    /// Returns the first invalid setting.
    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        if !self.queue_size.is_power_of_two() || !(8..=MAX_QUEUE).contains(&self.queue_size) {
            return Err(ConfigError::QueueSize(self.queue_size));
        }
        if QueuePairs::new(self.queue_pairs).is_err() {
            return Err(ConfigError::QueuePairs(self.queue_pairs));
        }
        if self.rx_buffer_size == 0 || self.rx_buffer_size > MAX_RX_BUFFER {
            return Err(ConfigError::RxBufferSize(self.rx_buffer_size));
        }
        if self.tx_buffer_size == 0 || self.tx_buffer_size > MAX_TX_BUFFER {
            return Err(ConfigError::TxBufferSize(self.tx_buffer_size));
        }
        if self.buf_alloc == 0 {
            return Err(ConfigError::EmptyWindow);
        }
        if self.connect_timeout.is_zero() {
            return Err(ConfigError::NoConnectTime);
        }
        Ok(())
    }

    /// Packets that one queue holds: each takes a header and a payload descriptor.
    pub(crate) fn slots(&self) -> u16 {
        self.queue_size / 2
    }
}

/// A setting out of its range.
#[derive(Copy, Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// See [`DriverConfig::queue_size`].
    #[error("queue_size {0}: must be a power of two from 8 to 32768")]
    QueueSize(u16),
    /// See [`DriverConfig::queue_pairs`].
    #[error("queue_pairs {0}: must be from 1 to 16")]
    QueuePairs(u16),
    /// See [`DriverConfig::rx_buffer_size`].
    #[error("rx_buffer_size {0}: must be from 1 to 1048576")]
    RxBufferSize(u32),
    /// See [`DriverConfig::tx_buffer_size`].
    #[error("tx_buffer_size {0}: must be from 1 to 65536")]
    TxBufferSize(u32),
    /// See [`DriverConfig::buf_alloc`].
    #[error("buf_alloc 0: must be at least 1")]
    EmptyWindow,
    /// See [`DriverConfig::connect_timeout`].
    #[error("connect_timeout 0: must be longer")]
    NoConnectTime,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_out_of_range_are_named() {
        let good = DriverConfig::new("/nowhere");
        assert_eq!(good.check(), Ok(()));
        let bad = DriverConfig {
            queue_size: 100,
            ..good.clone()
        };
        assert_eq!(bad.check(), Err(ConfigError::QueueSize(100)));
        for queue_pairs in [0, 17] {
            let bad = DriverConfig {
                queue_pairs,
                ..good.clone()
            };
            assert_eq!(bad.check(), Err(ConfigError::QueuePairs(queue_pairs)));
        }
        let bad = DriverConfig {
            rx_buffer_size: 0,
            ..good.clone()
        };
        assert_eq!(bad.check(), Err(ConfigError::RxBufferSize(0)));
        let bad = DriverConfig {
            tx_buffer_size: 65537,
            ..good.clone()
        };
        assert_eq!(bad.check(), Err(ConfigError::TxBufferSize(65537)));
        let bad = DriverConfig {
            buf_alloc: 0,
            ..good.clone()
        };
        assert_eq!(bad.check(), Err(ConfigError::EmptyWindow));
        let bad = DriverConfig {
            connect_timeout: Duration::ZERO,
            ..good
        };
        assert_eq!(bad.check(), Err(ConfigError::NoConnectTime));
    }
}
