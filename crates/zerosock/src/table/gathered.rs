//! Small writes of a program that wait to leave together.
//!
//! When a peer has so many unread packets of a connection that small ones should wait for each other
//! ([`Shard::gather`]), what a program writes in small pieces is copied here, and leaves as one packet
//! when it is not small any more, when the peer has read, or after some milliseconds. The protocol core
//! says when: here are the bytes alone, of one shard.
//!
//! What must hold: of each connection lie here as many bytes as its shard has unsent, in their order
//! (fewer than a packet's worth, and never above its credit); what is here of connections that have
//! ended is forgotten; no more connections than [`MOST`] have something here.

use std::collections::HashMap;

use zerosock_proto::vsock::{FlowId, FlowInfo, SMALL_PACKET, Shard};

/// Connections that may have something here. Those beyond send packets of their own, and wait.
const MOST: usize = 512;

/// Bytes of a connection that were taken from its user and that the peer is not known to have consumed.
pub(crate) fn unsent(info: &FlowInfo) -> u32 {
    let gathered = u32::try_from(info.unsent).unwrap_or(u32::MAX);
    let sent = info.tx_cnt.wrapping_sub(info.peer_fwd_cnt);
    sent.saturating_add(gathered)
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Gathered(HashMap<FlowId, Vec<u8>>);

impl Gathered {
    /// Takes the first of `bytes`, as many as `shard` lets wait; how many. `None`: they are to leave
    /// as they are.
    pub(crate) fn take_in(
        &mut self,
        shard: &mut Shard,
        flow: FlowId,
        bytes: &[u8],
    ) -> Option<usize> {
        if self.0.len() >= MOST && !self.0.contains_key(&flow) {
            let unsent = |flow| shard.flow(flow).is_some_and(|info| info.unsent > 0);
            self.0.retain(|flow, _| unsent(*flow));
            if self.0.len() >= MOST {
                return None;
            }
        }
        let len = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        let taken = shard.coalesce(flow, len) as usize;
        let taken = bytes.get(..taken).unwrap_or(bytes);
        if !taken.is_empty() {
            let kept = self.0.entry(flow);
            let kept = kept.or_insert_with(|| Vec::with_capacity(SMALL_PACKET as usize));
            kept.extend_from_slice(taken);
        }
        Some(taken.len())
    }

    /// The next `len` bytes of a connection leave: they are given to `put`.
    pub(crate) fn leave(&mut self, flow: FlowId, len: u32, put: impl FnOnce(&[u8])) {
        let Some(kept) = self.0.get_mut(&flow) else {
            return;
        };
        let len = (len as usize).min(kept.len());
        put(kept.get(..len).unwrap_or(kept));
        kept.drain(..len);
        if kept.is_empty() {
            self.forget(flow);
        }
    }

    /// Nobody will receive what is here of a connection.
    pub(crate) fn forget(&mut self, flow: FlowId) {
        self.0.remove(&flow);
        if self.0.is_empty() {
            self.0 = HashMap::new();
        }
    }

    /// Nor of any.
    pub(crate) fn clear(&mut self) {
        self.0 = HashMap::new();
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn has(&self, flow: FlowId) -> bool {
        self.0.contains_key(&flow)
    }

    /// Those that have something here.
    pub(crate) fn flows(&self) -> impl Iterator<Item = FlowId> + '_ {
        self.0.keys().copied()
    }
}
