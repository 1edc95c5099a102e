//! Host programs and clients that a guest has refused although the port has a listener.
//!
//! # Invariants
//! - A port with a list has a timer at `next`, or an earlier one, or an attempt under way.
//! - The ports that are remembered, the connects that are not answered, and the programs that wait are bounded.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::Duration;

use zerosock_proto::vsock::FlowId;
use zerosock_proto::wire::vsock::SocketType;
use zerosock_proto::{Instant, Port};

use super::host::Caller;

/// Ports that are remembered because they have accepted a connection.
const PORTS: usize = 64;
/// Programs that wait for a retry, of all ports of a device.
const WAITING: usize = 1024;
/// A port that has accepted a connection within this time has a listener.
const LATELY: Duration = Duration::from_secs(1);

/// A connect that the guest has not answered.
#[derive(Clone, Copy, Debug)]
pub(in crate::device) struct GuestConnect {
    pub(in crate::device) to: Port,
    pub(in crate::device) socket_type: SocketType,
    pub(in crate::device) wants_ok: bool,
    pub(in crate::device) deadline: Instant,
}

/// The programs that wait for one port.
#[derive(Debug)]
pub(in crate::device) struct GuestBacklog {
    /// In the order of their deadlines.
    pub(in crate::device) waiting: VecDeque<(Instant, Caller)>,
    /// The last pause.
    pub(in crate::device) pause: Duration,
    /// When the first program is tried again.
    pub(in crate::device) next: Instant,
    /// The attempt that the guest has not answered.
    pub(in crate::device) attempt: Option<FlowId>,
}

/// See the [module](self).
#[derive(Debug, Default)]
pub(crate) struct GuestBacklogs {
    pub(in crate::device) unanswered: HashMap<FlowId, GuestConnect>,
    pub(in crate::device) ports: BTreeMap<Port, GuestBacklog>,
    /// Ports and the times of their last accepted connections.
    accepted: Vec<(Port, Instant)>,
}

impl GuestBacklogs {
    /// Records that the guest has accepted a connection at `port`.
    pub(in crate::device) fn note_accepted(&mut self, port: Port, now: Instant) {
        let known = self.accepted.iter().position(|&(one, _)| one == port);
        let oldest = || {
            let ages = self.accepted.iter().enumerate();
            ages.min_by_key(|(_, (_, at))| *at).map(|(at, _)| at)
        };
        match known.or_else(|| (self.accepted.len() >= PORTS).then(oldest).flatten()) {
            Some(at) => self.accepted[at] = (port, now),
            None => self.accepted.push((port, now)),
        }
    }

    /// Whether the guest has accepted a connection at `port` lately.
    pub(in crate::device) fn has_accepted_lately(&self, port: Port, now: Instant) -> bool {
        let mut all = self.accepted.iter();
        all.any(|&(one, at)| one == port && now <= at + LATELY)
    }

    /// Whether another program may wait.
    pub(in crate::device) fn has_room(&self) -> bool {
        let waiting = self.ports.values().map(|port| port.waiting.len());
        waiting.sum::<usize>() < WAITING
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ports_that_accepted_last_are_remembered_for_a_second() {
        let mut all = GuestBacklogs::default();
        let at = |millis| Instant::ZERO + Duration::from_millis(millis);
        for port in 0..PORTS as u32 + 1 {
            all.note_accepted(Port::new(port), at(u64::from(port)));
        }
        assert_eq!(all.accepted.len(), PORTS);
        assert!(!all.has_accepted_lately(Port::new(0), at(70)));
        assert!(all.has_accepted_lately(Port::new(1), at(1001)));
        assert!(!all.has_accepted_lately(Port::new(1), at(1002)));
        all.note_accepted(Port::new(1), at(1002));
        assert!(all.has_accepted_lately(Port::new(1), at(2002)));
        assert_eq!(all.accepted.len(), PORTS);
    }
}
