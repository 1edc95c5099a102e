//! The lines of the log about connections: denied ones at INFO, within a limit, and opened, refused and
//! closed ones at DEBUG.
//!
//! The lines of one connection have the same `flow`. A slot that is reused gives another one.

use std::time::Instant;

use zerosock_proto::Address;
use zerosock_proto::vsock::FlowId;

use super::Device;
use crate::routing::Denial;

impl Device {
    /// Logs that `from` may not connect to `to`.
    pub(super) fn log_denied(&self, from: Address, to: Address, denial: Denial) {
        if !denial.is_by_configuration() {
            tracing::debug!(cid = %self.cid, %from, %to, reason = %denial, "connection refused");
        } else if let Some(suppressed) = self.denials.admit(Instant::now()) {
            tracing::info!(%from, %to, reason = %denial, suppressed, "connection denied");
        }
    }

    /// Logs that a connection is established.
    pub(super) fn log_opened(&self, flow: FlowId) {
        if !tracing::enabled!(tracing::Level::DEBUG) {
            return;
        }
        if let Some(info) = self.shard.flow(flow) {
            let (local, peer) = (info.local, info.peer);
            tracing::debug!(cid = %self.cid, %flow, %local, %peer, "connection opened");
        }
    }

    /// Logs that a flow was refused: by its listener, or because there is none.
    pub(super) fn log_refused(&self, flow: FlowId, reason: &str) {
        tracing::debug!(cid = %self.cid, %flow, reason, "connection refused");
    }

    /// Logs that the connection of a bridge ends, if it was established.
    pub(super) fn log_closed(&self, key: u32, reason: &str) {
        if !tracing::enabled!(tracing::Level::DEBUG) {
            return;
        }
        let bridge = self.bridges.get(key as usize).filter(|bridge| bridge.open);
        if let Some(flow) = bridge.and_then(|bridge| bridge.flow) {
            tracing::debug!(cid = %self.cid, %flow, reason, "connection closed");
        }
    }
}
