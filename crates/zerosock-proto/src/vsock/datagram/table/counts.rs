//! What is limited and what is counted of datagram sockets.

#[cfg(doc)]
use crate::vsock::datagram::OVERHEAD;

/// How much of a socket's may wait, in bytes.
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
pub struct DatagramLimits {
    /// Received and not read, [`OVERHEAD`] for each datagram included. One that comes when there
    /// is more is dropped; so the last may overshoot.
    pub receive: u32,
    /// Sent, and not yet taken by the other side of the queue, [`OVERHEAD`] for each datagram
    /// included. While there is as much, no more is sent; so the last may overshoot.
    pub send: u32,
}

impl Default for DatagramLimits {
    /// 1 MiB received, and 212992 bytes (Linux's default) sent.
    fn default() -> DatagramLimits {
        DatagramLimits {
            receive: 1 << 20,
            send: 212_992,
        }
    }
}

/// Why a datagram was dropped, without a word to its sender.
#[derive(Copy, Clone, Eq, PartialEq, Hash, Debug)]
pub enum DropCause {
    /// No socket has the port.
    NoSocket,
    /// The socket is connected, and not to its sender.
    NotPeer,
    /// The socket had received as much as it may.
    Full,
}

/// Datagrams that were dropped, by cause.
#[derive(Copy, Clone, Eq, PartialEq, Debug, Default)]
pub struct DatagramDrops {
    /// [`DropCause::NoSocket`].
    pub no_socket: u64,
    /// [`DropCause::NotPeer`].
    pub not_peer: u64,
    /// [`DropCause::Full`].
    pub full: u64,
    /// Some of their fragments have not come in time, or in order.
    pub incomplete: u64,
    /// Longer than any may be.
    pub too_long: u64,
}

/// What a socket has counted.
#[derive(Copy, Clone, Eq, PartialEq, Debug, Default)]
pub struct DatagramStats {
    /// Datagrams received.
    pub received: u64,
    /// Their bytes.
    pub received_bytes: u64,
    /// Datagrams sent.
    pub sent: u64,
    /// Their bytes.
    pub sent_bytes: u64,
    /// Dropped because the receive buffer was full.
    pub dropped_full: u64,
    /// Dropped because the socket is connected to somebody else.
    pub dropped_not_peer: u64,
    /// Times that a destination asked us to stop.
    pub stopped: u64,
}
