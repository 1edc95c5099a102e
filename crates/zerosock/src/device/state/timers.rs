//! The timers of one device, ordered by deadline.
//!
//! An expired timer is a hint: its object may have been removed, or may have a later deadline by
//! now, so the handler checks the deadline that is stored in the object.

use std::collections::BTreeSet;
use zerosock_proto::{Instant, Port};

use crate::device::host_sockets::HostPort;

/// What a timer is for. The number is a key into the device's table of such objects.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(crate) enum Timer {
    /// Closes the connection of a host program that has not sent a complete CONNECT line.
    Handshake(u32),
    /// Refuses a guest's connect that the host's kernel has not completed.
    Connect(u32),
    /// Retries connects to a host socket with a full backlog.
    Backlog(HostPort),
    /// Retries connects to a port of the guest with a full backlog.
    GuestBacklog(Port),
    /// Closes host sockets that do not take the last bytes of ended connections.
    Linger,
    /// Copies out the chains that a stalled connection holds.
    Hold(u32),
    /// Checks the idle time-out of a forwarded connection.
    Idle(u32),
    /// Retries accept(2) on a listener after a failure.
    Accept(u32),
    /// Resets connections with zero-copy sends in flight for which a command waits.
    EndSends,
    /// Ends the connections of a device: its queues have been stopped for too long.
    Stopped,
    /// Checks pages of guest endpoints, and whether memory of those that end is still used.
    Guests,
}

/// Pairs of a deadline and a timer, earliest first.
#[derive(Debug, Default)]
pub(crate) struct Timers(BTreeSet<(Instant, Timer)>);

impl Timers {
    /// Adds a timer. An object may have several with different deadlines.
    pub(crate) fn set(&mut self, at: Instant, timer: Timer) {
        self.0.insert((at, timer));
    }

    /// Removes a timer that was set for `at`.
    pub(crate) fn cancel(&mut self, at: Instant, timer: Timer) {
        self.0.remove(&(at, timer));
    }

    /// The earliest deadline.
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
