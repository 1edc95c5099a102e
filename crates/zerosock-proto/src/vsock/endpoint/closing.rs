//! Ends connections: by the state table, or all at once with their transport.
//!
//! # Invariants
//! Every connection ends in [`Shard::finish`](Shard), which releases its port and timer. Its end is
//! reported once, and an RST is sent once.

use core::hash::BuildHasher;

use super::Shard;
use crate::time::Instant;
use crate::vsock::connection::{End, PendingEvents};
use crate::vsock::event::{CloseReason, RefuseReason};
use crate::vsock::ports::PortRef;
use crate::vsock::state::{Input, State, transition};

impl<S: BuildHasher> Shard<S> {
    /// The transport was reset: the peer has rebooted or migrated, or TRANSPORT_RESET arrived on
    /// the event queue. All connections end, nothing is sent, listeners stay.
    pub fn handle_transport_reset(&mut self, now: Instant) {
        self.handle_transport_reset_in_parts(now, &mut 0, usize::MAX);
    }

    /// As [`handle_transport_reset`](Self::handle_transport_reset), for `most` slots from `next` on, which
    /// advances. Returns true if no slot is left. The caller handles no packet and opens no connection between
    /// the parts, and polls the events after each.
    pub fn handle_transport_reset_in_parts(
        &mut self,
        now: Instant,
        next: &mut usize,
        most: usize,
    ) -> bool {
        self.resets.clear();
        let end = self.table.slots.len().min(next.saturating_add(most));
        for index in *next..end {
            self.forget_at(now, index as u32);
        }
        *next = end;
        end >= self.table.slots.len()
    }

    pub(super) fn forget_at(&mut self, now: Instant, index: u32) {
        let Some(connection) = self.table.at(index) else {
            return;
        };
        if connection.state == State::Closed {
            self.forget_reset(index);
        } else {
            let (next, action) = transition(connection.state, Input::TransportReset);
            self.apply_action(now, index, next, action);
        }
    }

    pub(super) fn end(&mut self, index: u32, rst: bool, reason: CloseReason) {
        self.finish(index, rst, End::Closed(reason));
    }

    /// Ends a connection. The port is free at once and the id stale; the slot stays taken until the
    /// RST has been sent and the event polled.
    pub(super) fn finish(&mut self, index: u32, rst: bool, end: End) {
        let Some(connection) = self.table.at(index) else {
            return;
        };
        // A peer that got no REQUEST needs no RST.
        let rst = rst && !connection.control.request;
        let undecided = connection.state == State::Incoming;
        if undecided {
            self.undecided -= 1;
        }
        connection.state = State::Closed;
        connection.control = Default::default();
        connection.control.rst = rst;
        connection.control.no_socket = undecided;
        connection.drop_queue();
        connection.wants_credit = false;
        connection.deadline = None;
        connection.probe_at = None;
        // A caller that does not know the connection gets no event.
        connection.pending = if connection.known_to_caller {
            PendingEvents {
                connected: connection.pending.connected,
                end: Some(end),
                ..PendingEvents::default()
            }
        } else {
            PendingEvents::default()
        };
        if let Some(port_ref) = connection.port_ref.take() {
            self.held_ports -= usize::from(port_ref == PortRef::Outgoing);
            self.ports.release(connection.key.local, port_ref);
        }
        self.live -= 1;
        self.stats.closed += 1;
        if matches!(
            end,
            End::Closed(CloseReason::TimedOut) | End::Refused(RefuseReason::TimedOut)
        ) {
            self.stats.timed_out += 1;
        }
        if !rst {
            self.table.detach(index);
        }
        self.rearm(index);
        self.update_lists(index);
        self.free_if_over(index);
    }

    /// Cancels a queued RST.
    pub(super) fn forget_reset(&mut self, index: u32) {
        if let Some(connection) = self.table.at(index) {
            connection.control.rst = false;
            self.table.detach(index);
            self.update_lists(index);
            self.free_if_over(index);
        }
    }

    /// Frees the slot of a closed connection without a queued RST or event.
    pub(super) fn free_if_over(&mut self, index: u32) {
        let over = self
            .table
            .at(index)
            .is_some_and(|c| c.state == State::Closed && !c.control.any() && !c.pending.any());
        if over {
            let slots = &mut self.table.slots;
            self.control.remove(slots, index);
            self.data.remove(slots, index);
            self.events.remove(slots, index);
            self.free_slot(index);
        }
    }
}
