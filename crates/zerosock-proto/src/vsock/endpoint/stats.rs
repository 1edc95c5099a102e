//! Counters of a shard.

/// Counters since the shard was made. They only grow.
#[derive(Copy, Clone, Eq, PartialEq, Debug, Default)]
#[non_exhaustive]
pub struct ShardStats {
    /// Packets handled.
    pub packets: u64,
    /// Payload bytes delivered.
    pub delivered_bytes: u64,
    /// Payload bytes sent.
    pub sent_bytes: u64,
    /// Connections begun by either side, restored ones included.
    pub opened: u64,
    /// Connections ended, failed attempts included.
    pub closed: u64,
    /// RSTs sent.
    pub resets_sent: u64,
    /// RSTs by the peer that ended a connection.
    pub resets_received: u64,
    /// RSTs that did not fit the queue: the caller handled packets although `is_backlogged` was
    /// true.
    pub resets_lost: u64,
    /// Dropped: the source is not the device's guest.
    pub wrong_source: u64,
    /// Dropped: an unknown type, or not the connection's.
    pub wrong_type: u64,
    /// Dropped: no connection and no listener.
    pub no_socket: u64,
    /// Dropped: a REQUEST above a limit.
    pub over_cap: u64,
    /// Dropped: no effect in the state, or empty, or a stray RST.
    pub unexpected: u64,
    /// Dropped: payload for a direction that we have shut down.
    pub receive_shut: u64,
    /// Connections reset: payload above the credit.
    pub credit_exceeded: u64,
    /// Connections reset: a message longer than our buffer.
    pub message_too_long: u64,
    /// Connections reset: too many unread empty messages.
    pub message_flood: u64,
    /// Connections reset: another protocol error.
    pub protocol_errors: u64,
    /// Headers with a `fwd_cnt` that was ahead of the bytes sent, or went back.
    pub bad_fwd_cnt: u64,
    /// Times that a sender ran out of credit.
    pub credit_stalls: u64,
    /// Connections that ended because a timer ran out.
    pub timed_out: u64,
}
