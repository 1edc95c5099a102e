//! What a [`Shard`](super::Shard) returns to its caller: verdicts on packets, events, and headers
//! to send.

use super::flow_id::FlowId;
use crate::addr::Address;
use crate::wire::vsock::{Repr, SocketType};

/// What to do with the payload of a packet handed to
/// [`Shard::handle_packet`](super::Shard::handle_packet).
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
#[must_use]
pub enum Disposition {
    /// Deliver the payload, now and once, then report it with
    /// [`Shard::consume`](super::Shard::consume) when the caller has no more use for it.
    Deliver {
        /// The connection.
        flow: FlowId,
        /// Bytes, never 0.
        len: u32,
    },
    /// As `Deliver`, for a SEQPACKET connection: a part of a message, or the whole of it. Deliver
    /// the message to the reader when it is complete; discard it if the connection ends before.
    Part {
        /// The connection.
        flow: FlowId,
        /// Bytes. 0 only with SEQ_EOM: it ends the message that the earlier parts began, or it is
        /// an empty message, which is reported with
        /// [`Shard::consume_empty`](super::Shard::consume_empty) when it has been read.
        len: u32,
        /// SEQ_EOM: the message ends here. SEQ_EOR with it: the record ends here too.
        flags: u32,
    },
    /// The packet was handled; discard its payload, if it has any.
    Handled,
    /// The packet was dropped. An RST may have been queued: see the reason.
    Dropped(DropReason),
}

/// Why a packet was dropped.
#[derive(Copy, Clone, Eq, PartialEq, Hash, Debug)]
pub enum DropReason {
    /// The source CID is not the device's guest. No RST.
    WrongSource,
    /// The type is neither STREAM nor SEQPACKET. RST.
    UnknownType,
    /// No connection and no listener has this address. RST.
    NoSocket,
    /// The connection or listener is of another type. RST.
    TypeMismatch,
    /// A REQUEST above the limit of connections or of the listener's backlog. RST.
    OverCap,
    /// An RST for no connection, or for one that was already closed. No RST.
    StrayReset,
    /// Payload above the peer's credit: the connection was reset.
    CreditExceeded,
    /// The state forbids the packet: the connection was reset.
    ProtocolError,
    /// The packet has no effect in this state. No RST.
    Unexpected,
    /// A message longer than our buffer: the connection was reset.
    MessageTooLong,
    /// Too many unread empty messages: the connection was reset.
    MessageFlood,
    /// RW without payload on a stream. No RST.
    Empty,
    /// Payload for a direction that we have shut down; its credit was returned to the peer. No RST.
    ReceiveShut,
}

impl DropReason {
    /// Whether a peer that follows the protocol never sends such a packet.
    ///
    /// The others are ordinary: a packet that crosses our RST or SHUTDOWN, or a REQUEST that nothing
    /// accepts.
    pub const fn is_fault(self) -> bool {
        match self {
            DropReason::WrongSource
            | DropReason::UnknownType
            | DropReason::TypeMismatch
            | DropReason::CreditExceeded
            | DropReason::ProtocolError
            | DropReason::MessageTooLong
            | DropReason::MessageFlood
            | DropReason::Empty => true,
            DropReason::NoSocket
            | DropReason::OverCap
            | DropReason::StrayReset
            | DropReason::Unexpected
            | DropReason::ReceiveShut => false,
        }
    }
}

/// An event of a connection.
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
pub enum Event {
    /// A peer has sent REQUEST: [`accept`](super::Shard::accept) or
    /// [`reject`](super::Shard::reject).
    Incoming {
        /// The new connection.
        flow: FlowId,
        /// Our address, as given by the peer.
        local: Address,
        /// The peer's address.
        peer: Address,
        /// STREAM or SEQPACKET.
        socket_type: SocketType,
    },
    /// [`connect`](super::Shard::connect) succeeded.
    Connected {
        /// The connection.
        flow: FlowId,
    },
    /// [`connect`](super::Shard::connect) failed. The id is no longer valid.
    Refused {
        /// The connection that failed.
        flow: FlowId,
        /// Why.
        reason: RefuseReason,
    },
    /// The peer has shut down a direction; the flags are cumulative. When both are set, unread
    /// bytes are left; without unread bytes the event is [`Event::Closed`].
    PeerShutdown {
        /// The connection.
        flow: FlowId,
        /// The peer receives no more: what we send is lost, queued sends were dropped.
        receive: bool,
        /// The peer sends no more: the stream ends after the bytes delivered so far.
        send: bool,
    },
    /// After `NoCredit` or `QueueFull`: retry.
    Writable {
        /// The connection.
        flow: FlowId,
    },
    /// The connection has ended and the id is invalid. Comes exactly once for every connection that
    /// the caller knows (unless [`Event::Refused`] came), also after [`reset`](super::Shard::reset)
    /// and [`reject`](super::Shard::reject).
    Closed {
        /// The connection.
        flow: FlowId,
        /// Why.
        reason: CloseReason,
    },
}

/// Why a connection attempt failed.
#[derive(Copy, Clone, Eq, PartialEq, Hash, Debug)]
pub enum RefuseReason {
    /// The peer answered with RST (ECONNREFUSED, ECONNRESET).
    Reset,
    /// The peer did not answer in time (ETIMEDOUT).
    TimedOut,
    /// The peer's answer broke the protocol (EPROTO).
    ProtocolError,
    /// The transport was reset (ECONNRESET).
    TransportReset,
    /// The caller called [`reset`](super::Shard::reset).
    LocalReset,
}

/// Why a connection ended.
#[derive(Copy, Clone, Eq, PartialEq, Hash, Debug)]
pub enum CloseReason {
    /// We shut down both directions and the peer confirmed. Orderly.
    Finished,
    /// The peer shut down both directions and all it sent was consumed. Orderly.
    PeerClosed,
    /// RST by the peer (ECONNRESET).
    PeerReset,
    /// The peer sent REQUEST for the same ports: it has forgotten this connection.
    Superseded,
    /// The peer broke the protocol and was reset.
    ProtocolError,
    /// The peer sent more than its credit and was reset.
    CreditExceeded,
    /// The peer sent a message longer than our buffer and was reset.
    MessageTooLong,
    /// The peer sent too many empty messages that were not read, and was reset.
    MessageFlood,
    /// Closing made no progress for too long; the peer was reset.
    TimedOut,
    /// The transport was reset (ECONNRESET).
    TransportReset,
    /// [`reset`](super::Shard::reset) by the caller.
    LocalReset,
    /// [`reject`](super::Shard::reject) by the caller.
    Rejected,
}

impl CloseReason {
    /// Whether everything that the peer sent before closing was delivered.
    pub const fn is_orderly(self) -> bool {
        matches!(self, CloseReason::Finished | CloseReason::PeerClosed)
    }
}

/// A part of a queued send: the payload of a packet.
#[derive(Copy, Clone, Eq, PartialEq, Hash, Debug)]
pub struct Span {
    /// The connection.
    pub flow: FlowId,
    /// What [`send`](super::Shard::send) returned.
    pub message: u64,
    /// Where the span starts within the message, in bytes.
    pub offset: u32,
    /// Bytes, never 0.
    pub len: u32,
    /// SEQ_EOM and SEQ_EOR, on the last span of the message only.
    pub flags: u32,
}

/// A packet to send.
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
#[must_use]
pub struct Transmit {
    /// The header.
    pub header: Repr,
    /// The payload to put behind it.
    pub span: Option<Span>,
}
