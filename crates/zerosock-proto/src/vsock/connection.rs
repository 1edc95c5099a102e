//! placeholder
use super::state::State;
use crate::addr::Address;
use crate::wire::vsock::SocketType;

/// Names a connection of one shard.
#[derive(Copy, Clone, Eq, PartialEq, Hash, Debug)]
pub struct FlowId {
    pub(crate) index: u32,
    pub(crate) generation: u32,
}
impl FlowId {
    /// The place in the slab.
    pub const fn index(self) -> usize {
        self.index as usize
    }
}
/// What can be asked about a connection.
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
pub struct FlowInfo {
    /// Our address.
    pub local: Address,
    /// The peer's address.
    pub peer: Address,
    /// STREAM or SEQPACKET.
    pub socket_type: SocketType,
    /// The state.
    pub state: State,
    /// The peer will receive no more.
    pub peer_shut_rcv: bool,
    /// The peer will send no more.
    pub peer_shut_snd: bool,
    /// We will receive no more.
    pub local_shut_rcv: bool,
    /// We will send no more.
    pub local_shut_snd: bool,
    /// Bytes that may be sent now: credit neither used nor reserved.
    pub send_credit: u32,
    /// Bytes of queued sends not yet cut into packets.
    pub unsent: u64,
    /// Bytes of spans given out and not yet released.
    pub unreleased: u64,
    /// Bytes delivered and not yet consumed.
    pub unread: u32,
    /// Our receive buffer.
    pub buf_alloc: u32,
    /// Bytes consumed, free-running.
    pub fwd_cnt: u32,
    /// Bytes sent, free-running.
    pub tx_cnt: u32,
    /// The peer's receive buffer.
    pub peer_buf_alloc: u32,
    /// Bytes that the peer has consumed, free-running.
    pub peer_fwd_cnt: u32,
}
/// Credit taken before the header exists.
#[derive(Debug)]
#[must_use = "a reservation holds credit until it is committed or cancelled"]
pub struct Reservation {
    pub(crate) flow: FlowId,
    pub(crate) len: u32,
}
impl Reservation {
    /// The connection.
    pub const fn flow(&self) -> FlowId {
        self.flow
    }
    /// Most bytes that may be committed.
    #[allow(clippy::len_without_is_empty, reason = "never empty")]
    pub const fn len(&self) -> u32 {
        self.len
    }
}
