//! What a driver tells its user.

use zerosock_proto::{Address, Port};

use super::StreamId;

/// Something that happened; [`Driver::poll`](super::Driver::poll) hands them
/// out one by one, oldest first.
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
    /// A connect failed: refused, or not answered in time. The connection's
    /// state is [`StreamState::Reset`](super::StreamState::Reset).
    Refused {
        /// The connection; still to be closed.
        stream: StreamId,
        /// Whom it tried to reach.
        peer: Address,
    },
    /// Bytes wait where there were none before.
    Readable {
        /// The connection.
        stream: StreamId,
    },
    /// There is room again after a send found none.
    Writable {
        /// The connection.
        stream: StreamId,
    },
    /// The peer shut down one way or both. Cumulative and for good.
    PeerShutdown {
        /// The connection.
        stream: StreamId,
        /// It will read no more.
        receive: bool,
        /// It will send no more: after the bytes that wait, end of file.
        send: bool,
    },
    /// The connection is over. What waits to be read can still be read.
    Closed {
        /// The connection; still to be closed.
        stream: StreamId,
        /// Whether the end came by a reset instead of in good order.
        reset: bool,
    },
    /// The device announced that it lost all state (virtio 1.2, 5.10.6.7.1):
    /// connections are gone (a `Closed` each follows), listeners stay.
    TransportReset,
    /// The device hung up. [`Driver::reconnect`](super::Driver::reconnect)
    /// may be tried.
    DeviceGone,
}

/// Counters since the driver was attached.
#[derive(Copy, Clone, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub struct DriverStats {
    /// Packets given to the device, control packets included.
    pub tx_packets: u64,
    /// Payload bytes given to the device.
    pub tx_bytes: u64,
    /// Packets taken from the device, control packets included.
    pub rx_packets: u64,
    /// Payload bytes taken from the device for a connection of ours.
    pub rx_bytes: u64,
    /// Received bytes copied aside because their connection held receive
    /// buffers for too long.
    pub rx_overflow_bytes: u64,
    /// Packets that were none: shorter than a header, shorter than they said,
    /// or with fields that no packet may have.
    pub rx_malformed: u64,
    /// Well-formed packets that the protocol core dropped.
    pub rx_dropped: u64,
    /// Writes to a kick eventfd.
    pub kicks: u64,
    /// Times the driver slept.
    pub sleeps: u64,
    /// TRANSPORT_RESET events seen.
    pub transport_resets: u64,
    /// Events of an unknown kind, or too short.
    pub unknown_events: u64,
}
