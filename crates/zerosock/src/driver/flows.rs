//! The connection of each flow of the protocol core.
//!
//! # Invariants
//! An entry is a hint: it may name an ended flow or a closed connection. The connection's own flow
//! decides.

use zerosock_proto::vsock::FlowId;

use crate::table::sockets::StreamId;

/// Indexed by the flow's index, which is small and reused.
#[derive(Debug, Default)]
pub(crate) struct Flows(Vec<Option<StreamId>>);

impl Flows {
    pub(crate) fn insert(&mut self, flow: FlowId, stream: StreamId) {
        if self.0.len() <= flow.index() {
            self.0.resize(flow.index() + 1, None);
        }
        if let Some(place) = self.0.get_mut(flow.index()) {
            *place = Some(stream);
        }
    }

    #[inline]
    pub(crate) fn get(&self, flow: FlowId) -> Option<StreamId> {
        *self.0.get(flow.index())?
    }
}
