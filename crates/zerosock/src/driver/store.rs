//! What the driver's connections hold their received bytes in: the receive slots, and the protocol
//! core that gives credit for them.
//!
//! What must hold: a slot that a connection gives back is posted at once, to the place in the ring
//! that the device looks at next but for those that are posted already; credit is given for bytes
//! that have left our hands, not before.

use std::sync::Arc;

use zerosock_proto::vsock::{FlowId, Shard};
use zerosock_ring::{AddError, Memory, Piece};

use super::arena::Arena;
use super::queues::RxQueue;
use crate::vsock::sockets::Store;

/// See the module. Apart from the connections, because they call it while they change.
#[derive(Debug)]
pub(crate) struct Buffers {
    pub(super) arena: Arena,
    pub(super) rx: RxQueue,
    pub(super) shard: Shard,
    /// Receive buffers are kept from the device: for tests of what it does then.
    withhold: bool,
    withheld: Vec<u16>,
    /// A slot could not be posted, although it was free: told by the next turn.
    fault: Option<AddError>,
}

impl Buffers {
    pub(super) fn new(arena: Arena, rx: RxQueue, shard: Shard) -> Buffers {
        Buffers {
            arena,
            rx,
            shard,
            withhold: false,
            withheld: Vec::new(),
            fault: None,
        }
    }

    /// What went wrong in calls that cannot say so.
    pub(super) fn check(&self) -> Result<(), AddError> {
        self.fault.map_or(Ok(()), Err)
    }

    pub(super) fn withhold(&mut self, withhold: bool) {
        self.withhold = withhold;
        if !withhold {
            for slot in std::mem::take(&mut self.withheld) {
                self.release(slot);
            }
        }
    }

    pub(super) fn withheld(&self) -> usize {
        self.withheld.len()
    }
}

impl Store for Buffers {
    type Token = u16;

    #[inline]
    fn memory(&self, _: &u16) -> Option<&Arc<Memory>> {
        Some(&self.arena.memory)
    }

    #[inline]
    fn pieces<'a>(&'a self, token: &'a u16) -> &'a [Piece] {
        self.arena.rx_data.pieces(*token)
    }

    #[inline]
    fn release(&mut self, token: u16) {
        if self.withhold {
            self.withheld.push(token);
        } else if let Err(error) = self.rx.post(token) {
            self.fault = Some(error);
        }
    }

    #[inline]
    fn consumed(&mut self, _: u32, flow: FlowId, bytes: u32) {
        // A flow that ended meanwhile wants no credit.
        let _ = self.shard.consume(flow, bytes);
    }

    fn consumed_empty(&mut self, _: u32, flow: FlowId, messages: u16) {
        // As above.
        let _ = self.shard.consume_empty(flow, messages);
    }
}
