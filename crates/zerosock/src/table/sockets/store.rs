//! What the table asks of a backend.

use std::sync::Arc;

use zerosock_proto::vsock::FlowId;
use zerosock_ring::{Memory, Piece};

/// The backend's operations on its buffers and flows.
pub(crate) trait Store {
    /// Identifies a held buffer.
    type Token;

    /// The memory of a buffer; `None` if it was unmapped.
    fn memory(&self, token: &Self::Token) -> Option<&Arc<Memory>>;

    /// The buffer's pieces in that memory. The offset of a [`HeldBuffer`](super::HeldBuffer) counts
    /// from the first piece.
    fn pieces<'a>(&'a self, token: &'a Self::Token) -> &'a [Piece];

    /// Returns a buffer to the peer.
    fn release(&mut self, token: Self::Token);

    /// Whether the peer would learn nothing now if all buffers of a connection were returned.
    fn may_return_later(&self, pool: u32, flow: FlowId) -> bool;

    /// Reports `bytes` of a connection as read or discarded: the sender gets credit for them.
    fn consumed(&mut self, pool: u32, flow: FlowId, bytes: u32);

    /// Reports `messages` empty messages of a connection as read.
    fn consumed_empty(&mut self, pool: u32, flow: FlowId, messages: u16);
}
