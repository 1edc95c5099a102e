//! Errors of commands: one enum for each kind of command.

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
    /// System: the limit of connections is reached.
    #[error("too many connections")]
    TooManyConnections,
}

/// Why [`Shard::listen`](super::Shard::listen) or
/// [`Shard::unlisten`](super::Shard::unlisten) failed.
#[derive(Copy, Clone, Eq, PartialEq, Hash, Debug, thiserror::Error)]
pub enum ListenError {
    /// Caller: the wildcard is not a port.
    #[error("cannot listen on the wildcard port")]
    AnyPort,
    /// Caller: a listener or a connection has the port.
    #[error("the port is in use")]
    InUse,
    /// Caller: the port has no listener.
    #[error("the port has no listener")]
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
    /// The connection has ended.
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
    /// Not now: no credit, the RESPONSE is queued, or queued sends come first. `Event::Writable`
    /// follows.
    #[error("no credit")]
    NoCredit,
    /// Not now, only from [`send_now`](super::Shard::send_now): these few bytes of a stream should
    /// be coalesced, or follow coalesced ones: pass them to [`coalesce`](super::Shard::coalesce).
    #[error("a small write is to be coalesced")]
    ShouldCoalesce,
    /// Caller: a reservation of 0 bytes.
    #[error("nothing to reserve")]
    Empty,
    /// Caller: the message exceeds the peer's buffer or our own limit of bytes in flight
    /// (EMSGSIZE).
    #[error("the message is larger than the peer's buffer")]
    TooLong,
    /// Caller: the connection is a stream.
    #[error("a stream has no messages")]
    SocketType,
}

/// Why [`Shard::commit`](super::Shard::commit) failed. The reservation is gone and its credit
/// released.
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
    /// Caller: another message is in progress. The reservation is unchanged.
    #[error("another message is in progress")]
    Interleaved,
    /// Caller: too many empty messages are unread. The reservation is unchanged.
    #[error("too many empty messages are unread")]
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
    /// Caller: a SEQPACKET message that exceeds the peer's buffer or our own limit of bytes in
    /// flight (EMSGSIZE).
    #[error("the message is larger than the peer's buffer")]
    TooLong,
    /// Not now: too many queued sends. `Event::Writable` follows.
    #[error("too many queued sends")]
    QueueFull,
}
