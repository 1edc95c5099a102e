//! The deadlines of one device, ordered. A timer that fires is a hint: whoever set it may be gone
//! or have moved its deadline, so the receiver looks at the deadline of the thing itself.

use super::backlog::HostPort;
use std::collections::BTreeSet;
use zerosock_proto::Instant;

/// What a deadline is for; the number is a key into the device's tables.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(crate) enum Timer {
    /// A host program has not said CONNECT in time.
    Handshake(u32),
    /// A connect that the kernel has not decided takes too long.
    Connect(u32),
    /// Try to reach a host socket again that had a full backlog.
    Backlog(HostPort),
    /// Close host sockets that do not take the last bytes of ended connections.
    Linger,
    /// Copy out what a stalled connection holds.
    Hold(u32),
    /// Try again to accept on a listener that failed for want of descriptors.
    Accept(u32),
    /// Look again whether a writer has left the guest's buffers.
    Recall,
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Timers(BTreeSet<(Instant, Timer)>);

impl Timers {
    pub(crate) fn set(&mut self, at: Instant, timer: Timer) {
        self.0.insert((at, timer));
    }

    /// Takes a timer back.
    pub(crate) fn cancel(&mut self, at: Instant, timer: Timer) {
        self.0.remove(&(at, timer));
    }

    pub(crate) fn next(&self) -> Option<Instant> {
        self.0.first().map(|t| t.0)
    }

    /// Timers that are set.
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// A timer that is due.
    pub(crate) fn pop(&mut self, now: Instant) -> Option<Timer> {
        if self.next()? > now {
            return None;
        }
        self.0.pop_first().map(|t| t.1)
    }
}
