//! Connects to host sockets with a full backlog that wait for a retry.
//!
//! # Invariants
//! - A bridge is in the list of its port exactly while its end is [`BridgePeer::Retrying`] and no
//!   attempt for it is running.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use zerosock_proto::Instant;

use super::bridge::{Bridge, BridgePeer};
use crate::device::host_sockets::HostPort;

/// The ports that had a full backlog when they were last tried.
#[derive(Debug, Default)]
pub(crate) struct Backlogs(pub(in crate::device) BTreeMap<HostPort, Backlog>);

#[derive(Debug)]
pub(in crate::device) struct Backlog {
    /// Deadlines and keys of the bridges that wait.
    pub(in crate::device) waiting: BTreeSet<(Instant, u32)>,
    /// The last pause.
    pub(in crate::device) pause: Duration,
    /// When the first bridge is tried again.
    pub(in crate::device) next: Instant,
}

impl Backlogs {
    #[cfg(test)]
    pub(in crate::device) fn len(&self) -> usize {
        self.0.len()
    }

    /// Queues a bridge behind others for the same port. Returns false if no other bridge waits.
    pub(in crate::device) fn wait_behind_others(
        &mut self,
        to: HostPort,
        deadline: Instant,
        key: u32,
    ) -> bool {
        let backlog = self.0.get_mut(&to);
        backlog.is_some_and(|backlog| backlog.waiting.insert((deadline, key)))
    }

    /// Removes a bridge from the list of its port.
    pub(in crate::device) fn forget(&mut self, key: u32, bridge: &Bridge) {
        if let BridgePeer::Retrying { to, deadline } = bridge.peer
            && let Some(backlog) = self.0.get_mut(&to)
        {
            backlog.waiting.remove(&(deadline, key));
            if backlog.waiting.is_empty() {
                self.0.remove(&to);
            }
        }
    }
}
