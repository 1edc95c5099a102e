//! Coalescing of small writes.
//!
//! While the peer has many unread packets of a connection, small writes are copied here and sent as
//! one packet: when enough bytes are pending, when the peer has read, or after some milliseconds.
//! The protocol core decides when ([`Shard::coalesce`]); this file stores the bytes of one shard.
//!
//! # Invariants
//! - The bytes stored for a connection are those that its shard counts as unsent, in order: fewer
//!   than a packet, and never more than its credit.
//! - The bytes of a closed connection are removed.
//! - At most [`MAX_CONNECTIONS`] connections have bytes here.

use std::collections::HashMap;

use zerosock_proto::vsock::{FlowId, FlowInfo, SMALL_PACKET, Shard};

/// Connections that may have bytes here. Writes of further ones are sent uncoalesced, or block.
const MAX_CONNECTIONS: usize = 512;

/// Bytes accepted from the writer that the peer has not reported as consumed.
pub(crate) fn unsent(info: &FlowInfo) -> u32 {
    let coalesced = u32::try_from(info.unsent).unwrap_or(u32::MAX);
    let sent = info.tx_cnt.wrapping_sub(info.peer_fwd_cnt);
    sent.saturating_add(coalesced)
}

/// The coalesced bytes of each connection. See the module documentation.
#[derive(Debug, Default)]
pub(crate) struct CoalescedWrites(HashMap<FlowId, Vec<u8>>);

impl CoalescedWrites {
    /// Stores the first of `bytes`, as many as `shard` allows, and returns how many. `None`: the
    /// bytes are to be sent uncoalesced.
    pub(crate) fn push(&mut self, shard: &mut Shard, flow: FlowId, bytes: &[u8]) -> Option<usize> {
        if self.0.len() >= MAX_CONNECTIONS && !self.0.contains_key(&flow) {
            let unsent = |flow| shard.flow(flow).is_some_and(|info| info.unsent > 0);
            self.0.retain(|flow, _| unsent(*flow));
            if self.0.len() >= MAX_CONNECTIONS {
                return None;
            }
        }
        let len = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        let taken = shard.coalesce(flow, len) as usize;
        let taken = bytes.get(..taken).unwrap_or(bytes);
        if !taken.is_empty() {
            let pending = self.0.entry(flow);
            let pending = pending.or_insert_with(|| Vec::with_capacity(SMALL_PACKET as usize));
            pending.extend_from_slice(taken);
        }
        Some(taken.len())
    }

    /// Removes the next `len` bytes of a connection.
    pub(crate) fn pop(&mut self, flow: FlowId, len: u32) -> Vec<u8> {
        let Some(pending) = self.0.get_mut(&flow) else {
            return Vec::new();
        };
        let rest = pending.split_off((len as usize).min(pending.len()));
        let next = std::mem::replace(pending, rest);
        if pending.is_empty() {
            self.forget(flow);
        }
        next
    }

    /// Drops the bytes of a connection that has ended.
    pub(crate) fn forget(&mut self, flow: FlowId) {
        self.0.remove(&flow);
        if self.0.is_empty() {
            self.0 = HashMap::new();
        }
    }

    /// Drops the bytes of all connections.
    pub(crate) fn clear(&mut self) {
        self.0 = HashMap::new();
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn has(&self, flow: FlowId) -> bool {
        self.0.contains_key(&flow)
    }

    /// The connections with bytes here.
    pub(crate) fn flows(&self) -> impl Iterator<Item = FlowId> + '_ {
        self.0.keys().copied()
    }
}
