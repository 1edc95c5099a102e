//! Ends all connections of a device in parts, so that the other devices of the worker have their turns
//! in between: 131072 connections take a second.
//!
//! # Invariants
//! - The command that ends the connections is answered after the last part: until then the CID stays in
//!   use, no queue of another driver starts, and the memory stays mapped.
//! - No packet is taken and no connection begins between the first part and the last.

use crate::device::guest_bridges::GuestBridges;
use zerosock_proto::vsock::Event as CoreEvent;
use zerosock_virtio::command;
use zerosock_virtio::ring::Ring;

use super::events::GONE;
use super::state::teardown::Teardown;
use super::{Context, Device};

/// Connections that end in one turn, which takes about two milliseconds.
pub(super) const PART: usize = 256;
/// Flows of the protocol core that are freed in one turn, after their connections.
const SLOTS: usize = 4096;

impl Device {
    /// Whether a driver takes requests for connections.
    pub(super) fn accepts_requests(&self) -> bool {
        !self.queues.is_resetting() && self.queues.rings.rx.as_ref().is_some_and(Ring::live)
    }

    /// Whether the end of all connections has begun, and the memory of the guest has vanished.
    pub(super) fn has_lost_memory(&self) -> bool {
        self.teardown.memory_lost
    }

    /// The turn of a device that ends its connections.
    pub(super) fn teardown_turn(&mut self, cx: &mut Context<'_>) {
        if self.queues.is_memory_lost() && !self.has_lost_memory() {
            self.fail("guest memory vanished under the device", cx);
        } else {
            command::finish(self, cx);
        }
        self.publish_gauges(cx);
    }

    /// Ends the next connections without sending the guest a packet, because its driver no longer knows
    /// them. Returns true if none is left. Bytes that the guest has sent are still delivered.
    /// Connections with sends in flight are reset unless their streams had ended and the queues stop
    /// (`stopped`): the kernel may read memory that the driver changes.
    pub(super) fn forget_connections(&mut self, stopped: bool, cx: &mut Context<'_>) -> bool {
        if !std::mem::replace(&mut self.teardown.has_begun, true) {
            self.half(cx).recall(true);
            self.half(cx).recall_loans(true);
            self.reset_next = None;
        }
        let mut next = self.teardown.next_bridge;
        let (keys, more) = self.bridges.next_keys(&mut next, PART);
        self.teardown.next_bridge = next;
        for key in keys {
            self.bridges_with(cx).forget_connection(key, stopped);
        }
        let next = &mut self.teardown.next_app;
        let (flows, more_flows) = self.app.flows.next_part(next, PART);
        for flow in flows {
            self.half(cx).end_app(flow, false, GONE);
        }
        let more_associations = self
            .datagrams_with(cx)
            .end_associations("the endpoint has gone", PART);
        if more || more_flows || more_associations {
            return false;
        }
        let next = &mut self.teardown.next_flow;
        let is_last = self
            .shard
            .handle_transport_reset_in_parts(cx.now, next, SLOTS);
        while let Some(event) = self.shard.poll_event() {
            match event {
                CoreEvent::Refused { flow, reason } => {
                    self.count_refused(flow, reason, cx);
                    self.half(cx).end_app(flow, false, GONE);
                }
                CoreEvent::Closed { flow, .. } => self.half(cx).end_app(flow, false, GONE),
                _ => {}
            }
        }
        is_last
    }

    /// Ends the sockets and timers that are left after the connections.
    pub(super) fn end_teardown(&mut self, cx: &mut Context<'_>) {
        self.teardown = Teardown::default();
        self.bridges.clear_ready();
        self.outgoing.clear();
        self.coalesced.clear();
        self.bridges_with(cx).refuse_waiting_callers();
        self.datagrams_with(cx).forget_datagrams();
    }

    /// Begins to reset all connections if the receive or transmit queue has broken, so that their peers do
    /// not wait for data, or goes on with it. Returns whether connections are left.
    pub(super) fn reset_on_broken_ring(&mut self, cx: &mut Context<'_>) -> bool {
        if self.has_broken() {
            for ring in [&mut self.queues.rings.rx, &mut self.queues.rings.tx]
                .into_iter()
                .flatten()
            {
                ring.reset_pending = false;
            }
            self.reset_next = Some((0, 0));
        }
        let Some((mut bridge, mut flow)) = self.reset_next else {
            return false;
        };
        let (keys, more) = self.bridges.next_keys(&mut bridge, PART);
        let (flows, more_flows) = self.app.flows.next_part(&mut flow, PART);
        let more = more || more_flows;
        self.reset_next = more.then_some((bridge, flow));
        for flow in flows {
            self.half(cx).reset_app(flow);
        }
        for key in keys {
            // Lingering bridges have no flow any more.
            if self.bridges.get(key).is_some_and(|it| it.flow.is_some()) {
                self.bridges_with(cx).reset_bridge(key);
            }
        }
        more
    }
}

impl GuestBridges<'_, '_> {
    fn forget_connection(&mut self, key: u32, stopped: bool) {
        if self.device.has_lost_memory() {
            return self.end_bridge(key);
        }
        let Some(bridge) = self.device.bridges.get_mut(key) else {
            return;
        };
        bridge.read_reports(&mut self.device.queues.rings.tx, self.cx);
        if bridge.has_sends_in_flight() {
            if !stopped || !self.linger_without_ring(key) {
                self.end_bridge(key);
            }
        } else if bridge.flow.is_some() && !self.linger(key) {
            // One without a flow lingers already.
            self.remove_without_guest(key);
        }
    }
}
