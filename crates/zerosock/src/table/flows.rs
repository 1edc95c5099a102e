//! The connection of each flow of the protocol core.
//!
//! # Invariants
//! A flow is entered when its connection begins and removed when it has ended or its connection was
//! closed; an id of an earlier flow leads nowhere.

use std::collections::TryReserveError;

use zerosock_proto::vsock::FlowId;

use super::sockets::StreamId;
use crate::fallible;

/// A connection.
#[derive(Clone, Copy, Debug)]
struct Entry {
    flow: FlowId,
    id: StreamId,
    /// Buffers of the peer that it has on loan.
    loans: u16,
}

/// The table is freed when it is empty and its capacity exceeds this number.
const KEPT: usize = 1024;

/// The connections of a shard, by flow: see the module.
#[derive(Debug, Default)]
pub(crate) struct Flows {
    /// Indexed by the flow's index, which is small and reused.
    by_index: Vec<Option<Entry>>,
    len: usize,
}

impl Flows {
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Makes room for the connection of a flow.
    pub(crate) fn reserve(&mut self, flow: FlowId) -> Result<(), TryReserveError> {
        fallible::extend_to(&mut self.by_index, flow.index() + 1, None)
    }

    /// Enters the connection of a flow, for which room was [reserved](Flows::reserve).
    pub(crate) fn insert(&mut self, flow: FlowId, id: StreamId) {
        // A removal since then may have freed the map.
        if self.by_index.len() <= flow.index() {
            self.by_index.resize(flow.index() + 1, None);
        }
        if let Some(place) = self.by_index.get_mut(flow.index()) {
            let loans = 0;
            self.len += usize::from(place.replace(Entry { flow, id, loans }).is_none());
        }
    }

    /// The connection of a flow.
    #[inline]
    pub(crate) fn get(&self, flow: FlowId) -> Option<StreamId> {
        let place = self.by_index.get(flow.index())?.as_ref()?;
        (place.flow == flow).then_some(place.id)
    }

    /// The number of buffers that the connection of a flow has on loan.
    #[inline]
    pub(crate) fn loans_mut(&mut self, flow: FlowId) -> Option<&mut u16> {
        let place = self.by_index.get_mut(flow.index())?.as_mut()?;
        (place.flow == flow).then_some(&mut place.loans)
    }

    pub(crate) fn remove(&mut self, flow: FlowId) -> Option<StreamId> {
        let id = self.get(flow)?;
        *self.by_index.get_mut(flow.index())? = None;
        self.len -= 1;
        if self.len == 0 && self.by_index.capacity() > KEPT {
            self.by_index = Vec::new();
        }
        Some(id)
    }

    /// The flows in the next `most` places from `next` on, which advances; and whether there may be more.
    pub(crate) fn next_part(&self, next: &mut usize, most: usize) -> (Vec<FlowId>, bool) {
        let end = self.by_index.len().min(next.saturating_add(most));
        let part = self.by_index.get(*next..end).unwrap_or_default();
        *next = end;
        let flows = part.iter().flatten().map(|place| place.flow).collect();
        (flows, end < self.by_index.len())
    }

    pub(crate) fn all(&self) -> Vec<FlowId> {
        self.next_part(&mut 0, usize::MAX).0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::leases::Leases;
    use crate::table::sockets::{Sockets, StreamState};
    use std::sync::Arc;
    use std::time::Duration;
    use zerosock_proto::vsock::{PortTable, Shard, ShardConfig};
    use zerosock_proto::wire::vsock::SocketType;
    use zerosock_proto::{Address, Cid, Instant, Port};

    #[test]
    fn a_flow_leads_to_its_own_connection_only() {
        let guest = Cid::new(3);
        let mut shard = Shard::new(ShardConfig::device(guest), Arc::new(PortTable::new()));
        let connect = |shard: &mut Shard| {
            let (any, to) = (
                Address::new(Cid::ANY, Port::ANY),
                Address::new(guest, Port::new(1)),
            );
            let stream = SocketType::Stream;
            shard.connect(Instant::ZERO, any, to, stream).unwrap()
        };
        let mut sockets = Sockets::<()>::new(Arc::new(Leases::new(1)), Duration::ZERO, 0);
        let pool = sockets.add_pool(1);
        let mut add = |flow| {
            let any = Address::new(Cid::ANY, Port::ANY);
            sockets.insert(
                pool,
                flow,
                StreamState::Connected,
                any,
                any,
                SocketType::Stream,
            )
        };
        let mut flows = Flows::default();
        let old = connect(&mut shard);
        let first = add(old);
        flows.reserve(old).unwrap();
        flows.insert(old, first);
        *flows.loans_mut(old).unwrap() += 1;
        shard.reset(old).unwrap();
        while shard.poll_event().is_some() {}
        let new = connect(&mut shard);
        assert_eq!(new.index(), old.index());
        assert_eq!((flows.get(new), flows.remove(new)), (None, None));
        assert_eq!(flows.remove(old), Some(first));
        let second = add(new);
        flows.insert(new, second);
        assert_eq!((flows.get(old), flows.get(new)), (None, Some(second)));
        assert_eq!(flows.loans_mut(old), None);
        assert_eq!(flows.loans_mut(new), Some(&mut 0));
        let more: Vec<FlowId> = (0..2 * KEPT).map(|_| connect(&mut shard)).collect();
        for &flow in &more {
            flows.reserve(flow).unwrap();
            flows.insert(flow, add(flow));
        }
        let (mut next, mut found) = (0, Vec::new());
        loop {
            let (part, more) = flows.next_part(&mut next, 100);
            assert!(part.len() <= 100);
            found.extend(part);
            if !more {
                break;
            }
        }
        assert_eq!((found.len(), flows.len()), (2 * KEPT + 1, 2 * KEPT + 1));
        assert_eq!(flows.all(), found);
        // The place that is reserved for the last one goes with the map.
        let last = found.pop().unwrap();
        let id = flows.remove(last).unwrap();
        flows.reserve(last).unwrap();
        assert!(found.iter().all(|&flow| flows.remove(flow).is_some()));
        assert_eq!((flows.len(), flows.by_index.capacity()), (0, 0));
        flows.insert(last, id);
        assert_eq!(flows.get(last), Some(id));
    }
}
