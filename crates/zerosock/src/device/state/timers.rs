//! The deadlines of one device, ordered. An expired timer is a hint: its object may have been
//! removed or its deadline moved, so the handler checks the object's own deadline.

use std::collections::BTreeSet;
use zerosock_proto::Instant;

use crate::device::host_sockets::HostPort;

/// What a deadline is for; the number is a key into the device's tables.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(crate) enum Timer {
    /// Close a host program with an incomplete CONNECT line.
    Handshake(u32),
    /// Refuse a connect that the kernel has not completed.
    Connect(u32),
    /// Retry connects to a host socket with a full backlog.
    Backlog(HostPort),
    /// Close host sockets that do not take the last bytes of ended connections.
    Linger,
    /// Copy out the chains that a stalled connection holds.
    Hold(u32),
    /// Check the idle time-out of a forwarded connection.
    Idle(u32),
    /// Retry accept on a listener after a failure.
    Accept(u32),
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Timers(BTreeSet<(Instant, Timer)>);

impl Timers {
    pub(crate) fn set(&mut self, at: Instant, timer: Timer) {
        self.0.insert((at, timer));
    }

    /// Removes a timer.
    pub(crate) fn cancel(&mut self, at: Instant, timer: Timer) {
        self.0.remove(&(at, timer));
    }

    pub(crate) fn next(&self) -> Option<Instant> {
        self.0.first().map(|t| t.0)
    }

    /// The number of timers.
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// Removes and returns an expired timer.
    pub(crate) fn pop(&mut self, now: Instant) -> Option<Timer> {
        if self.next()? > now {
            return None;
        }
        self.0.pop_first().map(|t| t.1)
    }
}
