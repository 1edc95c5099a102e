//! The lines of the log about connections: denied ones at INFO, within a limit, and requested, opened,
//! refused and closed ones at DEBUG.
//!
//! The lines of one connection have the same `flow`. A slot that is reused gives another one.

use std::time::Instant;

use tracing::field::display;
use zerosock_proto::Address;
use zerosock_proto::vsock::{FlowId, RefuseReason};

use super::{Context, Device};
use crate::routing::Denial;
use crate::stats::RefusalCause;

impl Device {
    /// Counts and logs that `from` may not connect to `to`.
    pub(super) fn deny(&self, from: Address, to: Address, denial: Denial, cx: &Context<'_>) {
        cx.shared.counters.refuse(denial.cause());
        if denial.cause() != RefusalCause::Denied {
            tracing::debug!(cid = %self.cid, %from, %to, reason = %denial, "connection refused");
        } else if let Some(suppressed) = self.denials.admit(Instant::now()) {
            tracing::info!(%from, %to, reason = %denial, suppressed, "connection denied");
        }
    }

    /// Counts and logs that a datagram from `from` may not be sent to `to`.
    pub(super) fn deny_datagram(
        &self,
        from: Address,
        to: Address,
        denial: Denial,
        cx: &Context<'_>,
    ) {
        cx.shared.counters.datagrams_dropped.add(1);
        if denial.cause() == RefusalCause::Denied
            && let Some(suppressed) = self.denials.admit(Instant::now())
        {
            tracing::info!(%from, %to, reason = %denial, suppressed, "datagram denied");
        }
    }

    /// Logs what happens to a connection, with its addresses.
    pub(super) fn log_flow(&self, flow: FlowId, what: &str) {
        if !tracing::enabled!(tracing::Level::DEBUG) {
            return;
        }
        if let Some(info) = self.shard.flow(flow) {
            let (local, peer) = (info.local, info.peer);
            tracing::debug!(cid = %self.cid, %flow, %local, %peer, "{what}");
        }
    }

    /// Logs that a flow was refused: by its listener, or because there is none.
    pub(super) fn log_refused(&self, flow: FlowId, reason: &str) {
        let info = self.shard.flow(flow);
        let local = info.as_ref().map(|info| display(info.local));
        let peer = info.as_ref().map(|info| display(info.peer));
        tracing::debug!(cid = %self.cid, %flow, local, peer, reason, "connection refused");
    }

    /// Counts and logs a request to our endpoint that the protocol core reports as refused.
    pub(super) fn count_refused(&self, flow: FlowId, reason: RefuseReason, cx: &Context<'_>) {
        let (cause, text) = match reason {
            RefuseReason::Reset => (
                RefusalCause::Endpoint,
                "the endpoint has no listener on the port, or its backlog is full",
            ),
            RefuseReason::TimedOut => (
                RefusalCause::Unreachable,
                "the endpoint has not answered in time",
            ),
            RefuseReason::TransportReset => (
                RefusalCause::Unreachable,
                "the endpoint has gone or restarted before it answered",
            ),
            RefuseReason::ProtocolError => {
                (RefusalCause::Other, "the endpoint's answer is invalid")
            }
            RefuseReason::LocalReset => (
                RefusalCause::Other,
                "its client has closed the connection before the answer",
            ),
        };
        cx.shared.counters.refuse(cause);
        self.log_refused(flow, text);
    }

    /// Logs that the connection of a bridge ends, if it was established, with the payload bytes from and to
    /// its endpoint.
    pub(super) fn log_closed(&self, key: u32, reason: &str) {
        if !tracing::enabled!(tracing::Level::DEBUG) {
            return;
        }
        let bridge = self
            .bridges
            .get(key)
            .filter(|bridge| bridge.state.is_open());
        if let Some(bridge) = bridge
            && let Some(flow) = bridge.flow
        {
            let (from_endpoint, to_endpoint) = (bridge.from_guest, bridge.to_guest);
            tracing::debug!(
                cid = %self.cid, %flow, from_endpoint, to_endpoint, reason, "connection closed"
            );
        }
    }
}
