//! Limits and counters of datagram sockets.

use std::fmt;

#[cfg(doc)]
use crate::vsock::datagram::OVERHEAD;

/// Queue limits of a socket, in bytes.
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
pub struct DatagramLimits {
    /// Received and not read, [`OVERHEAD`] for each datagram included. A datagram that arrives
    /// above this limit is dropped; the last one accepted may exceed it.
    pub receive: u32,
    /// Sent and not yet taken by the other side of the queue, [`OVERHEAD`] for each datagram
    /// included. At this limit a send is refused; the last one accepted may exceed it.
    pub send: u32,
}

impl Default for DatagramLimits {
    /// 2 MiB to receive, and to send as much as Linux lets lie between two UDP sockets: a send and a
    /// receive buffer of 212992 bytes each, because a receiver reads where the sender's bytes lie. With
    /// less, a sender of long datagrams sleeps so often that its receiver runs dry until it has woken.
    /// Flow control keeps three such senders from a loss.
    fn default() -> DatagramLimits {
        DatagramLimits {
            receive: 2 << 20,
            send: 2 * 212_992,
        }
    }
}

/// Why a datagram was dropped. The sender is not notified.
#[derive(Copy, Clone, Eq, PartialEq, Hash, Debug)]
pub enum DropCause {
    /// No socket has the port.
    NoSocket,
    /// The socket is connected to another peer.
    NotPeer,
    /// The socket's receive limit was reached.
    Full,
}

/// Dropped datagrams by cause.
#[derive(Copy, Clone, Eq, PartialEq, Debug, Default)]
pub struct DatagramDrops {
    /// [`DropCause::NoSocket`].
    pub no_socket: u64,
    /// [`DropCause::NotPeer`].
    pub not_peer: u64,
    /// [`DropCause::Full`].
    pub full: u64,
    /// Fragments were missing, late or out of order.
    pub incomplete: u64,
    /// Longer than [`MAX_DATAGRAM`](crate::vsock::datagram::MAX_DATAGRAM).
    pub too_long: u64,
}

/// Counters of a socket.
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
    /// Dropped because the socket is connected to another peer.
    pub dropped_not_peer: u64,
    /// STOPs received and obeyed.
    pub stopped: u64,
}

/// All counters, as `name=value`, on one line.
impl fmt::Display for DatagramStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "received={} received_bytes={} sent={} sent_bytes={} dropped_full={} dropped_not_peer={} stopped={}",
            self.received,
            self.received_bytes,
            self.sent,
            self.sent_bytes,
            self.dropped_full,
            self.dropped_not_peer,
            self.stopped,
        )
    }
}
