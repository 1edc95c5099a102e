//! A device that continues after the crash of another process: its guest has connections that this process
//! does not know.
//!
//! The flows of the [flow log](super::state::flow_table) get a slot in the protocol core before the first
//! packet. Their RSTs go to the guest as it posts buffers, each before any packet of a new connection with
//! the same addresses; a packet of the guest that ends a flow or begins another one with its addresses
//! cancels the RST. A guest may get the RST of a flow twice if the process is killed again, or after the
//! first and before it has cleared the entry; it ignores an RST for a connection that it does not have.
//!
//! A front-end that came from another daemon has no such log. Its driver gets TRANSPORT_RESET if the front-end
//! passes the event queue ([`announce_lost`](Device::announce_lost)); so does that of a successor, because its
//! queues go on.
//!
//! # Invariants
//! - No packet is taken from the guest, and no connection begins, before all flows of the log have a slot.
//! - An entry of the log is cleared after the rings with the last packet of its flow were published.

use std::time::Duration;

use zerosock_proto::Instant;
use zerosock_ring::StateMap;

use super::state::flow_table::FlowTable;
use super::{Context, Device};

/// How long host programs wait until the queues run again.
const WAIT: Duration = Duration::from_secs(1);

impl Device {
    /// Sets what the device has of a former process, before it starts: the memory of the flow log, and
    /// whether the queues of that process will be started again.
    pub(super) fn set_former_process(&mut self, flows: Option<StateMap>, awaits_queues: bool) {
        self.succession.is_kept = flows.is_some();
        self.succession.flows = flows;
        self.succession.awaits_queues = awaits_queues;
    }

    /// Opens the flow log and resets the flows of the former process.
    pub(super) fn begin_succession(&mut self, cx: &mut Context<'_>) {
        let cid = self.cid;
        if std::mem::take(&mut self.succession.awaits_queues) {
            self.succession.waits_until = Some(cx.now + WAIT);
        }
        let Some(range) = self.succession.flows.take() else {
            return;
        };
        let Some((table, stale)) = FlowTable::open(range, cid) else {
            tracing::error!(%cid, "the flow log has no room: connections would outlast a crash");
            return;
        };
        self.shard.set_flow_log(Box::new(table));
        if let Some(saved) = self.succession.saved.take() {
            self.restore(saved, cx);
        }
        let found = stale.len();
        let stale = stale.into_iter();
        let stale = stale.filter(|&(entry, flow)| self.shard.reset_stale(entry, flow));
        let connections = stale.count();
        self.shard.finish_restore();
        if found > 0 && !self.succession.is_continued {
            tracing::info!(%cid, found, connections, "connections of the former process are reset");
        }
    }

    /// Whether host programs wait, because the queues are about to run again.
    pub(super) fn awaits_queues(&mut self, now: Instant) -> bool {
        let waits = self.succession.waits_until.is_some_and(|until| now < until);
        if waits && !self.accepts_requests() {
            return true;
        }
        self.succession.waits_until = None;
        false
    }
}
