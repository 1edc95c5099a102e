//! The switch: which endpoint a CID is, who may reach whom, and what siblings say to each other.
//!
//! Two guests of one daemon are joined by two connections, one in each device's shard, so that
//! credit, caps and state are enforced against each of them separately. Bytes go from the
//! sender's chain straight into the receiver's posted buffer, in the receiver's worker: one
//! copy. Until then the chain is on loan to the receiver ([`Message::Lent`]) and comes back by
//! [`Message::Returned`]; the lender can ask for it back at any time ([`Message::Recall`]).

use crate::engine::mailbox::Sender;
use crate::engine::worker::WorkerMessage;
use std::collections::HashMap;
use std::sync::Arc;
use zerosock_proto::vsock::FlowId;
use zerosock_proto::{Address, Cid};
use zerosock_ring::Memory;

use crate::device::outbound::Held;

/// A device, wherever it runs.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Hash)]
pub(crate) struct DeviceAddr {
    pub(crate) worker: u32,
    pub(crate) vm: u32,
}

/// One side of a sibling connection.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Peer {
    pub(crate) device: DeviceAddr,
    pub(crate) flow: FlowId,
}

/// What one side of a sibling connection says to the other. Messages of one pair keep their
/// order. One that names a flow that has ended is dropped, after what it carries was returned.
#[derive(Debug)]
pub(crate) enum Message {
    /// A guest wants to reach its sibling: connect to your guest and answer.
    Connect {
        from: Peer,
        local: Address,
        peer: Address,
    },
    /// The answer to `Connect`, at once: `from` is asking its guest.
    Asking { to: FlowId, from: Peer },
    /// The other answer to `Connect`: it cannot be asked.
    Refused { to: FlowId },
    /// Your connect went through; `from` is the other side from now on.
    Accepted { to: FlowId, from: Peer },
    /// Bytes that lie in my guest's memory. Give the chain back when they are read.
    Lent {
        to: FlowId,
        from: Peer,
        memory: Arc<Memory>,
        held: Held,
        epoch: u32,
    },
    /// Bytes that I had to copy.
    Copied { to: FlowId, bytes: Vec<u8> },
    /// `bytes` of what you sent were read; a chain that is no longer needed comes with it.
    Returned {
        to: FlowId,
        bytes: u32,
        chain: Option<(zerosock_ring::Chain, u32)>,
    },
    /// Copy out what you hold of mine for this flow and return it now.
    Recall { to: FlowId },
    /// My guest will not receive, or not send, any more.
    Shutdown {
        to: FlowId,
        receive: bool,
        send: bool,
    },
    /// The connection is gone, or the guest has refused it.
    Reset { to: FlowId },
}

/// The table of endpoints: fixed while the daemon runs.
#[derive(Debug, Default)]
pub(crate) struct Routes {
    by_cid: HashMap<Cid, Route>,
}

#[derive(Debug)]
struct Route {
    device: DeviceAddr,
    groups: Vec<String>,
}

impl Routes {
    pub(crate) fn add(&mut self, cid: Cid, device: DeviceAddr, groups: &[String]) {
        self.by_cid.insert(
            cid,
            Route {
                device,
                groups: groups.to_vec(),
            },
        );
    }

    /// The device of `to`, if `from` shares a group with it.
    pub(crate) fn sibling(&self, from: Cid, to: Cid) -> Option<DeviceAddr> {
        let (a, b) = (self.by_cid.get(&from)?, self.by_cid.get(&to)?);
        let shared = a.groups.iter().any(|g| b.groups.contains(g));
        (from != to && shared).then_some(b.device)
    }

    /// All CIDs that `from` may reach.
    pub(crate) fn siblings(&self, from: Cid) -> Vec<Cid> {
        let mut all: Vec<Cid> = self
            .by_cid
            .keys()
            .copied()
            .filter(|&to| self.sibling(from, to).is_some())
            .collect();
        all.sort_unstable();
        all
    }
}

/// Where a device puts its messages to siblings: the same worker's are taken up in the same turn
/// of the loop, another worker's go through its mailbox.
#[derive(Debug)]
pub(crate) struct Outbox {
    worker: u32,
    local: std::collections::VecDeque<(u32, Message)>,
    workers: Vec<Sender<WorkerMessage>>,
}

impl Outbox {
    pub(crate) fn new(worker: u32, workers: Vec<Sender<WorkerMessage>>) -> Outbox {
        Outbox {
            worker,
            local: Default::default(),
            workers,
        }
    }

    pub(crate) fn send(&mut self, to: DeviceAddr, message: Message) {
        if to.worker == self.worker {
            self.local.push_back((to.vm, message));
        } else if let Some(worker) = self.workers.get(to.worker as usize) {
            // A worker that is gone is shutting down with the rest of the daemon.
            let _ = worker.send(WorkerMessage::Sibling { vm: to.vm, message });
        }
    }

    pub(crate) fn pop_local(&mut self) -> Option<(u32, Message)> {
        self.local.pop_front()
    }

    pub(crate) fn has_local(&self) -> bool {
        !self.local.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_devices_with_a_common_group_reach_each_other() {
        let mut routes = Routes::default();
        let cid = |n| Cid::guest(n).unwrap();
        for (n, groups) in [(3, "a b"), (4, "b"), (5, "c"), (6, "a")] {
            let groups: Vec<String> = groups.split(' ').map(String::from).collect();
            routes.add(
                cid(n),
                DeviceAddr {
                    worker: 0,
                    vm: n as u32,
                },
                &groups,
            );
        }
        assert_eq!(routes.siblings(cid(3)), vec![cid(4), cid(6)]);
        assert_eq!(routes.siblings(cid(4)), vec![cid(3)]);
        assert!(routes.siblings(cid(5)).is_empty());
        assert!(routes.sibling(cid(3), cid(3)).is_none());
        assert!(routes.sibling(cid(3), cid(9)).is_none());
    }
}
