//! What can go wrong with a command: one enum for each kind of command.

/// Why [`Shard::connect`](super::Shard::connect) did not start.
#[derive(Copy, Clone, Eq, PartialEq, Hash, Debug, thiserror::Error)]
pub enum ConnectError {
    /// Caller: the local CID is not one of ours.
    #[error("the local CID is not one of this endpoint's")]
    LocalCid,
    /// Caller: the peer's address is a wildcard, or not the device's guest.
    #[error("the peer cannot be reached from here")]
    Unreachable,
    /// Caller: datagrams have no connections.
    #[error("datagram sockets do not connect")]
    SocketType,
    /// Caller: the local port has a listener, or these two addresses have a
    /// connection.
    #[error("the local address is in use")]
    InUse,
    /// System: no connection is left below the cap.
    #[error("too many connections")]
    TooManyConnections,
}

/// Why [`Shard::listen`](super::Shard::listen) or
/// [`Shard::unlisten`](super::Shard::unlisten) failed.
#[derive(Copy, Clone, Eq, PartialEq, Hash, Debug, thiserror::Error)]
pub enum ListenError {
    /// Caller: the wildcard is no port to listen on.
    #[error("a port is needed to listen on")]
    AnyPort,
    /// Caller: a listener or a connection has the port.
    #[error("the port is in use")]
    InUse,
    /// Caller: nobody listens there.
    #[error("nobody listens on the port")]
    NotListening,
}

/// Why a command on a connection failed.
#[derive(Copy, Clone, Eq, PartialEq, Hash, Debug, thiserror::Error)]
pub enum FlowError {
    /// Caller: the connection has ended.
    #[error("no such connection")]
    Stale,
    /// Caller: the connection's state does not allow the command.
    #[error("not possible in the connection's state")]
    WrongState,
}

/// Why [`Shard::consume`](super::Shard::consume) failed.
#[derive(Copy, Clone, Eq, PartialEq, Hash, Debug, thiserror::Error)]
pub enum ConsumeError {
    /// The connection has ended; nobody counts its bytes any more.
    #[error("no such connection")]
    Stale,
    /// Caller: more bytes than were delivered. Nothing was counted.
    #[error("more bytes than were delivered")]
    TooMany,
}

/// Why [`Shard::reserve`](super::Shard::reserve) failed.
#[derive(Copy, Clone, Eq, PartialEq, Hash, Debug, thiserror::Error)]
pub enum ReserveError {
    /// Caller: the connection has ended.
    #[error("no such connection")]
    Stale,
    /// Caller: not, or not yet, connected.
    #[error("not connected")]
    NotConnected,
    /// Caller: we have shut down sending.
    #[error("sending is shut down")]
    Shutdown,
    /// The peer will receive no more (EPIPE).
    #[error("the peer receives no more")]
    PeerShutdown,
    /// Not now: no credit, the RESPONSE has not left, or queued sends come
    /// first. `Event::Writable` tells when.
    #[error("no credit")]
    NoCredit,
    /// Not now, and only of [`send_now`](super::Shard::send_now): these few bytes of a stream should
    /// wait for others, or others wait already. [`coalesce`](super::Shard::coalesce) takes them.
    #[error("few bytes wait for others")]
    ShouldCoalesce,
    /// Caller: asked for no bytes.
    #[error("nothing to reserve")]
    Empty,
    /// Caller: a message that the peer's buffer, or our own bound on what is under way, can never
    /// take (EMSGSIZE).
    #[error("the message is larger than the peer's buffer")]
    TooLong,
    /// Caller: the connection is a stream, and has no messages.
    #[error("a stream has no messages")]
    SocketType,
}

/// Why [`Shard::commit`](super::Shard::commit) failed. The reservation is
/// gone and its credit given back.
#[derive(Copy, Clone, Eq, PartialEq, Hash, Debug, thiserror::Error)]
pub enum CommitError {
    /// The connection has ended.
    #[error("no such connection")]
    Stale,
    /// Caller: nothing to send; cancel instead.
    #[error("an empty packet cannot be sent")]
    Empty,
    /// Caller: more than was reserved.
    #[error("more bytes than were reserved")]
    TooMany,
    /// We have shut down sending since.
    #[error("sending is shut down")]
    Shutdown,
    /// The peer will receive no more (EPIPE).
    #[error("the peer receives no more")]
    PeerShutdown,
    /// Caller: another message has begun and not ended. What was reserved is still there.
    #[error("another message has not ended")]
    Interleaved,
    /// Caller: as many messages without a byte are out as may be. What was reserved is still there.
    #[error("too many messages without a byte are unread")]
    ManyEmpty,
}

/// Why [`Shard::send`](super::Shard::send) failed.
#[derive(Copy, Clone, Eq, PartialEq, Hash, Debug, thiserror::Error)]
pub enum SendError {
    /// Caller: the connection has ended.
    #[error("no such connection")]
    Stale,
    /// Caller: not, or not yet, connected.
    #[error("not connected")]
    NotConnected,
    /// Caller: we have shut down sending.
    #[error("sending is shut down")]
    Shutdown,
    /// The peer will receive no more (EPIPE).
    #[error("the peer receives no more")]
    PeerShutdown,
    /// Caller: nothing to send.
    #[error("an empty message cannot be sent")]
    Empty,
    /// Caller: a SEQPACKET message larger than the peer's buffer, or than our own bound
    /// on what is under way (EMSGSIZE).
    #[error("the message is larger than the peer's buffer")]
    TooLong,
    /// Not now: too many queued sends. `Event::Writable` tells when.
    #[error("too many queued sends")]
    QueueFull,
}

/// Why a connection cannot be moved to another queue pair.
#[derive(Copy, Clone, Eq, PartialEq, Hash, Debug, thiserror::Error)]
pub enum MoveError {
    /// The connection has ended.
    #[error("no such connection")]
    Stale,
    /// Caller: a device's shard was asked to ask, or moves were not negotiated.
    #[error("not this half's to ask, or not negotiated")]
    NotNegotiated,
    /// Not connected yet, or closing.
    #[error("not possible in the connection's state")]
    WrongState,
    /// It is on its way already, or reservations are out.
    #[error("the connection is busy")]
    Busy,
}
