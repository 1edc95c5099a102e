//! Retries of connects to a guest's listener whose backlog is full.
//!
//! A guest answers with a reset for that, as for a port without a listener. Only where the port has accepted
//! a connection in the last second does the device try again: after a pause that doubles, with one attempt
//! at a time for each port, until the connect deadline. Other programs that connect to the port wait behind
//! those that wait. [`backlog`](super::backlog) does the other direction.
//!
//! # Invariants
//! - A program is in one list, or its attempt is under way, until it is connected or refused.
//! - A program that waits has no bridge, and its socket is not in the poller.

use std::collections::VecDeque;
use std::time::Duration;

use zerosock_proto::Port;
use zerosock_proto::vsock::{FlowId, QueuePairs};

use super::state::bridge::BridgePeer;
use super::state::guest_backlogs::{GuestBacklog, GuestConnect};
use super::state::host::Caller;
use super::state::timers::Timer;
use crate::device::guest_bridges::GuestBridges;
use crate::stats::RefusalCause;

/// The first pause.
const FIRST_PAUSE: Duration = Duration::from_millis(1);
/// The longest pause.
const LONGEST_PAUSE: Duration = Duration::from_millis(100);
/// Programs that are refused per call.
const BUDGET: usize = 64;

impl GuestBridges<'_, '_> {
    /// Puts a program behind others that wait for the same port. Returns it if none does.
    pub(super) fn wait_for_listener(&mut self, caller: Caller, watched: bool) -> Option<Caller> {
        if !self.device.accepts_requests() || !self.device.guest_backlogs.has_room() {
            return Some(caller);
        }
        let Some(port) = self.device.guest_backlogs.ports.get_mut(&caller.to) else {
            return Some(caller);
        };
        if watched {
            self.cx.poller.remove(&caller.socket);
        }
        let deadline = self.cx.now + self.cx.shared.limits.connect;
        port.waiting.push_back((deadline, caller));
        None
    }

    /// The guest has accepted a connect.
    pub(super) fn guest_connect_accepted(&mut self, flow: FlowId) {
        if let Some(connect) = self.device.guest_backlogs.unanswered.remove(&flow) {
            self.device
                .guest_backlogs
                .note_accepted(connect.to, self.cx.now);
            self.attempt_ended(flow, connect.to, None);
        }
    }

    /// The guest has refused a connect by a reset. Returns whether the program waits for another attempt.
    pub(super) fn guest_connect_refused(&mut self, flow: FlowId) -> bool {
        let all = &mut self.device.guest_backlogs;
        let Some(connect) = all.unanswered.remove(&flow) else {
            return false;
        };
        let retries = self.device.queue_pairs.used == QueuePairs::ONE
            && all.has_accepted_lately(connect.to, self.cx.now)
            && all.has_room()
            && self.cx.now < connect.deadline;
        let bridge = self.device.bridges.key_of(flow).filter(|_| retries);
        let Some(bridge) = bridge.and_then(|key| self.device.bridges.remove(key)) else {
            self.attempt_ended(flow, connect.to, None);
            return false;
        };
        self.cx.shared.counters.conns_removed.add(1);
        let BridgePeer::Socket { socket, .. } = bridge.peer else {
            // Only these are recorded.
            return false;
        };
        // An event would be attributed to the next bridge with this key.
        self.cx.poller.remove(&socket);
        let caller = Caller {
            socket,
            socket_type: connect.socket_type,
            to: connect.to,
            wants_ok: connect.wants_ok,
            forwarded: bridge.forwarded,
        };
        let deadline = connect.deadline;
        match self.device.guest_backlogs.ports.get_mut(&connect.to) {
            None => {
                let next = deadline.min(self.cx.now + FIRST_PAUSE);
                let port = GuestBacklog {
                    waiting: VecDeque::from([(deadline, caller)]),
                    pause: FIRST_PAUSE,
                    next,
                    attempt: None,
                };
                self.device.guest_backlogs.ports.insert(connect.to, port);
                self.device
                    .timers
                    .set(next, Timer::GuestBacklog(connect.to));
            }
            Some(port) => {
                // Those of a burst were refused in the order of their connects.
                let at = port
                    .waiting
                    .partition_point(|(other, _)| *other <= deadline);
                let at = if port.attempt == Some(flow) { 0 } else { at };
                port.waiting.insert(at, (deadline, caller));
                let pause = (port.pause * 2).min(LONGEST_PAUSE);
                self.attempt_ended(flow, connect.to, Some(pause));
            }
        }
        true
    }

    /// A connect has ended without an answer.
    pub(super) fn forget_guest_connect(&mut self, flow: FlowId) {
        if let Some(connect) = self.device.guest_backlogs.unanswered.remove(&flow) {
            self.attempt_ended(flow, connect.to, None);
        }
    }

    /// The attempt of a port has ended: sets the time of the next one, at once without a `pause`.
    fn attempt_ended(&mut self, flow: FlowId, to: Port, pause: Option<Duration>) {
        if let Some(port) = self.device.guest_backlogs.ports.get_mut(&to)
            && port.attempt == Some(flow)
        {
            port.attempt = None;
            port.pause = pause.unwrap_or(FIRST_PAUSE);
            let first = port
                .waiting
                .front()
                .map_or(self.cx.now, |(deadline, _)| *deadline);
            let next = self.cx.now + pause.unwrap_or(Duration::from_nanos(1));
            port.next = if pause.is_some() {
                next.min(first)
            } else {
                next
            };
            self.device.timers.set(port.next, Timer::GuestBacklog(to));
        }
    }

    /// Refuses the programs that have waited for too long, and tries the first of the others.
    pub(super) fn retry_guest_connects(&mut self, to: Port) {
        for _ in 0..BUDGET {
            let Some(port) = self.device.guest_backlogs.ports.get_mut(&to) else {
                return;
            };
            if port.next > self.cx.now {
                // The timer of an earlier list of this port.
                return;
            }
            let Some(&(deadline, _)) = port.waiting.front() else {
                if port.attempt.is_none() {
                    self.device.guest_backlogs.ports.remove(&to);
                }
                return;
            };
            let is_late = deadline <= self.cx.now;
            if port.attempt.is_some() && !is_late {
                port.next = deadline;
                self.device.timers.set(deadline, Timer::GuestBacklog(to));
                return;
            }
            let Some((_, caller)) = port.waiting.pop_front() else {
                return;
            };
            if is_late {
                self.give_up_guest_connect(caller);
                continue;
            }
            self.cx.shared.counters.connect_retries.add(1);
            let attempt = self.try_guest_connect(caller, Port::ANY, false, deadline);
            let Some(port) = self.device.guest_backlogs.ports.get_mut(&to) else {
                return;
            };
            port.attempt = attempt;
            // Without an attempt the next one follows.
            if attempt.is_some() {
                let first = port.waiting.front().map(|(deadline, _)| *deadline);
                port.next = first.unwrap_or(deadline);
                self.device.timers.set(port.next, Timer::GuestBacklog(to));
                return;
            }
        }
        // The rest in the next turn.
        if let Some(port) = self.device.guest_backlogs.ports.get_mut(&to) {
            port.next = self.cx.now + Duration::from_nanos(1);
            self.device.timers.set(port.next, Timer::GuestBacklog(to));
        }
    }

    /// Refuses all programs that wait: the driver has gone.
    pub(super) fn refuse_waiting_callers(&mut self) {
        let all = std::mem::take(&mut self.device.guest_backlogs);
        for (to, port) in all.ports {
            self.device
                .timers
                .cancel(port.next, Timer::GuestBacklog(to));
            for (_, caller) in port.waiting {
                self.cx.shared.counters.refuse(RefusalCause::Unreachable);
                self.refuse_caller(caller, "the endpoint has gone");
            }
        }
    }

    /// Records a connect that the guest has not answered yet.
    pub(super) fn await_answer(&mut self, flow: FlowId, connect: GuestConnect) {
        self.device.guest_backlogs.unanswered.insert(flow, connect);
    }

    fn give_up_guest_connect(&self, caller: Caller) {
        let reason = "the backlog of the endpoint's listener stays full";
        self.cx.shared.counters.refuse(RefusalCause::Endpoint);
        tracing::debug!(cid = %self.device.cid, port = %caller.to, reason, "host program refused");
        self.refuse_caller(caller, reason);
    }

    fn refuse_caller(&self, caller: Caller, reason: &str) {
        if let Some(forwarded) = &caller.forwarded {
            self.device.refuse_forwarded(forwarded, reason);
        }
        caller.socket.abort();
    }
}
