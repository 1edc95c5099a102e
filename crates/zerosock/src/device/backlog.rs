//! Retries of the guest's connects to host sockets with a full backlog.
//!
//! # Invariants
//! - A bridge is in the list of its port exactly while its end is [`BridgePeer::Retrying`] and no
//!   attempt for it is running.
//! - A port with a list has a timer at `next`, or an earlier one.
//!
//! # Operation
//! A non-blocking connect to such a Unix socket fails with EAGAIN, and no event reports room. The
//! connect is therefore retried after a pause that doubles. All connections to a port wait in the
//! order of their deadlines, and only the first of them is tried.

use std::collections::BTreeSet;
use std::time::Duration;

use zerosock_proto::Port;
use zerosock_proto::vsock::FlowId;

use super::state::bridge::BridgePeer;
use super::state::timers::Timer;
use crate::device::guest_bridges::GuestBridges;
use crate::device::host_sockets::{HostPort, Refusal};
use crate::device::state::backlogs::Backlog;
use crate::stats::RefusalCause;

/// The first pause: an accepting program has usually made room by then.
const FIRST_PAUSE: Duration = Duration::from_micros(250);
/// The longest pause.
const LONGEST_PAUSE: Duration = Duration::from_millis(100);
/// Connects tried per call.
const BUDGET: usize = 64;

/// The result of an attempt to connect.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(super) enum Tried {
    /// The backlog is full.
    Full,
    /// The bridge is connected, connecting, refused or removed.
    Decided,
}

impl GuestBridges<'_, '_> {
    /// Connects a flow of the guest to `port` on the host.
    pub(super) fn guest_connects(&mut self, flow: FlowId, port: Port) {
        let deadline = self.cx.now + self.cx.shared.limits.connect;
        let mut to = HostPort {
            port,
            messages: false,
        };
        let key = self.add_bridge(flow, BridgePeer::Retrying { to, deadline });
        if let Some(bridge) = self.device.bridges.get_mut(key) {
            to.messages = bridge.messages.is_some();
            bridge.peer = BridgePeer::Retrying { to, deadline };
        }
        if !self.device.backlogs.wait_behind_others(to, deadline, key)
            && self.try_connect(key) == Tried::Full
        {
            let next = deadline.min(self.cx.now + FIRST_PAUSE);
            let backlog = Backlog {
                waiting: BTreeSet::from([(deadline, key)]),
                pause: FIRST_PAUSE,
                next,
            };
            self.device.backlogs.0.insert(to, backlog);
            self.device.timers.set(next, Timer::Backlog(to));
        }
    }

    /// Retries the connects to a port until its backlog is full again.
    pub(super) fn retry_connects(&mut self, to: HostPort) {
        let Some(backlog) = self.device.backlogs.0.get_mut(&to) else {
            return;
        };
        if backlog.next > self.cx.now {
            // The timer of an earlier list of this port.
            return;
        }
        let longer = (backlog.pause * 2).min(LONGEST_PAUSE);
        // After a full budget, continue in the next turn.
        let mut pause = Duration::from_nanos(1);
        for tried in 0..BUDGET {
            let backlog = self.device.backlogs.0.get_mut(&to);
            let Some((deadline, key)) = backlog.and_then(|it| it.waiting.pop_first()) else {
                break;
            };
            if deadline <= self.cx.now {
                let reason = "its listener's backlog stays full";
                let refusal = Refusal::new(RefusalCause::BacklogFull, reason);
                self.refuse(key, &refusal);
                continue;
            }
            self.cx.shared.counters.connect_retries.add(1);
            if self.try_connect(key) == Tried::Full {
                self.device.backlogs.wait_behind_others(to, deadline, key);
                pause = if tried == 0 { longer } else { FIRST_PAUSE };
                break;
            }
        }
        let Some(backlog) = self.device.backlogs.0.get_mut(&to) else {
            return;
        };
        let Some(&(deadline, _)) = backlog.waiting.first() else {
            self.device.backlogs.0.remove(&to);
            return;
        };
        backlog.pause = pause.max(FIRST_PAUSE);
        backlog.next = (self.cx.now + pause).min(deadline);
        self.device.timers.set(backlog.next, Timer::Backlog(to));
    }
}
