//! What a [`Shard`](super::Shard) tells its driver: verdicts on packets,
//! events, and headers to send.

use super::connection::FlowId;
use crate::addr::Address;
use crate::wire::vsock::{Repr, SocketType};

/// What becomes of a packet handed to
/// [`Shard::handle_packet`](super::Shard::handle_packet).
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
#[must_use]
pub enum Disposition {
    /// Hand the payload on, now and once, then report it with
    /// [`Shard::consume`](super::Shard::consume) as it leaves our hands.
    Deliver {
        /// Whose payload it is.
        flow: FlowId,
        /// Bytes, never 0.
        len: u32,
    },
    /// As `Deliver`, of a SEQPACKET connection: a part of a message, which may be the whole of it.
    /// The message is for its reader when it has ended; one that has not when the connection ends
    /// is nobody's.
    Part {
        /// Whose message it is.
        flow: FlowId,
        /// Bytes. 0 only with SEQ_EOM: then the message ends with what came before, or it is one
        /// without a byte, which is reported with
        /// [`Shard::consume_empty`](super::Shard::consume_empty) when it was read.
        len: u32,
        /// SEQ_EOM: the message ends here. SEQ_EOR with it: its sender said that a record does.
        flags: u32,
    },
    /// Done with; payload, if any, is not wanted.
    Handled,
    /// Not acted upon. An RST may have been queued: see the reason.
    Dropped(DropReason),
    /// To a device: the driver wants the connection to go on at another queue
    /// pair. [`extract`](super::Shard::extract) it, or
    /// [`decline_move`](super::Shard::decline_move) it.
    Move {
        /// The connection.
        flow: FlowId,
        /// The number of the pair, as it came.
        pair: u32,
    },
    /// To a driver: the device has moved the connection there, if that is not
    /// where it is. [`extract`](super::Shard::extract) it, or
    /// [`resume`](super::Shard::resume) it.
    Moved {
        /// The connection.
        flow: FlowId,
        /// The number of the pair, as it came.
        pair: u32,
    },
    /// To a driver: the device has moved a connection there that has ended
    /// here. It is to be told there: [`Shard::reset_stray`](super::Shard::reset_stray)
    /// of that pair's shard, with the packet's header.
    MovedStray {
        /// The number of the pair, as it came.
        pair: u32,
    },
}

/// Why a packet was dropped.
#[derive(Copy, Clone, Eq, PartialEq, Hash, Debug)]
pub enum DropReason {
    /// It does not come from the device's guest. No RST.
    WrongSource,
    /// The type is neither STREAM nor SEQPACKET. RST.
    UnknownType,
    /// There is no connection and no listener for it. RST.
    NoSocket,
    /// The connection or listener is of another type. RST.
    TypeMismatch,
    /// A REQUEST above a cap: connections, or one more than the listener's backlog. RST.
    OverCap,
    /// An RST for nothing we know, or that we had already given up. No RST.
    StrayReset,
    /// Payload above the credit we gave: the connection was reset.
    CreditExceeded,
    /// The state forbids it: the connection was reset.
    ProtocolError,
    /// The state has no use for it. No RST.
    Unexpected,
    /// A message longer than our buffer: the connection was reset.
    MessageTooLong,
    /// One more unread message without a byte than is kept: the connection was reset.
    MessageFlood,
    /// RW without payload; nobody sends that on a stream. No RST.
    Empty,
    /// Payload for a direction that we have shut down; its credit has been
    /// given back. No RST.
    ReceiveShut,
}

/// Something that happened to a connection.
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
pub enum Event {
    /// A peer asks: [`accept`](super::Shard::accept) or
    /// [`reject`](super::Shard::reject).
    Incoming {
        /// The new connection.
        flow: FlowId,
        /// Our address, as the peer named it.
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
        /// The connection that did not come about.
        flow: FlowId,
        /// Why.
        reason: RefuseReason,
    },
    /// The peer has shut down a direction; both flags are cumulative. Never
    /// both of them without unread bytes: that is [`Event::Closed`].
    PeerShutdown {
        /// The connection.
        flow: FlowId,
        /// The peer will receive no more: what we send is lost, queued sends
        /// have been dropped.
        receive: bool,
        /// The peer will send no more: after what was delivered comes the
        /// end of the stream.
        send: bool,
    },
    /// After `NoCredit` or `QueueFull`: try again.
    Writable {
        /// The connection.
        flow: FlowId,
    },
    /// The connection is gone and the id no longer valid. Comes exactly once
    /// for every connection that the caller has seen (unless
    /// [`Event::Refused`] came), also after
    /// [`reset`](super::Shard::reset) and [`reject`](super::Shard::reject).
    Closed {
        /// The connection.
        flow: FlowId,
        /// Why.
        reason: CloseReason,
    },
}

/// Why a connection did not come about.
#[derive(Copy, Clone, Eq, PartialEq, Hash, Debug)]
pub enum RefuseReason {
    /// The peer answered with RST (ECONNREFUSED, ECONNRESET).
    Reset,
    /// The peer did not answer in time (ETIMEDOUT).
    TimedOut,
    /// The peer answered with nonsense (EPROTO).
    ProtocolError,
    /// The transport was reset (ECONNRESET).
    TransportReset,
    /// The caller gave it up with [`reset`](super::Shard::reset).
    LocalReset,
}

/// Why a connection ended.
#[derive(Copy, Clone, Eq, PartialEq, Hash, Debug)]
pub enum CloseReason {
    /// We shut down both directions and the peer confirmed. In order.
    Finished,
    /// The peer shut down both directions and all it sent was consumed. In
    /// order.
    PeerClosed,
    /// RST by the peer (ECONNRESET).
    PeerReset,
    /// The peer asked for a new connection between the same ports: it has
    /// forgotten this one.
    Superseded,
    /// The peer broke the protocol and was reset.
    ProtocolError,
    /// The peer sent more than its credit and was reset.
    CreditExceeded,
    /// The peer sent a message longer than our buffer and was reset.
    MessageTooLong,
    /// The peer sent more messages without a byte than we keep unread and was reset.
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

/// A part of a queued send, to be put behind a header.
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
    /// The payload behind it, if any.
    pub span: Option<Span>,
}
