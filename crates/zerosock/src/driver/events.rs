//! The events and counters of a driver.

use zerosock_proto::{Address, Port};

use super::StreamId;

/// An event of a driver; [`Driver::poll`](super::Driver::poll) returns them one by one, oldest
/// first.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub enum DriverEvent {
    /// A connection waits at a listener: call
    /// [`Driver::accept`](super::Driver::accept).
    Incoming {
        /// The listener's port.
        port: Port,
    },
    /// A connect succeeded.
    Connected {
        /// The connection.
        stream: StreamId,
    },
    /// A connect failed: refused, or not answered in time. The connection's state is
    /// [`StreamState::Reset`](super::StreamState::Reset).
    Refused {
        /// The connection; must still be closed.
        stream: StreamId,
        /// The peer's address.
        peer: Address,
    },
    /// Bytes arrived on a connection without unread bytes.
    Readable {
        /// The connection.
        stream: StreamId,
    },
    /// Room became available after a send found none.
    Writable {
        /// The connection.
        stream: StreamId,
    },
    /// The peer shut down one or both directions. The flags are cumulative.
    PeerShutdown {
        /// The connection.
        stream: StreamId,
        /// The peer shut down receiving.
        receive: bool,
        /// The peer shut down sending: end of stream follows the unread bytes.
        send: bool,
    },
    /// The connection has ended. Unread bytes can still be read.
    Closed {
        /// The connection; must still be closed.
        stream: StreamId,
        /// Whether it ended by a reset instead of in order.
        reset: bool,
    },
    /// The device announced a transport reset (virtio 1.2, 5.10.6.7.1): connections are lost (a
    /// `Closed` each follows), listeners remain.
    TransportReset,
    /// The device hung up. [`Driver::reconnect`](super::Driver::reconnect) can attach to a
    /// restarted one.
    DeviceGone,
}

/// Counters since the driver was attached.
#[derive(Copy, Clone, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub struct DriverStats {
    /// Packets sent to the device, including control packets.
    pub tx_packets: u64,
    /// Payload bytes sent to the device.
    pub tx_bytes: u64,
    /// Packets received from the device, including control packets.
    pub rx_packets: u64,
    /// Payload bytes received for an existing connection.
    pub rx_bytes: u64,
    /// Received bytes copied because their connection held receive buffers for too long.
    pub rx_overflow_bytes: u64,
    /// Invalid packets: shorter than a header or than their length field, or with invalid fields.
    pub rx_malformed: u64,
    /// Well-formed packets that the protocol core dropped.
    pub rx_dropped: u64,
    /// Writes to a kick eventfd.
    pub kicks: u64,
    /// Times that the driver slept.
    pub sleeps: u64,
    /// TRANSPORT_RESET events received.
    pub transport_resets: u64,
    /// Events of an unknown kind or too short.
    pub unknown_events: u64,
}
