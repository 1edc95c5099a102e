//! The switch: which endpoint a CID is, who may reach whom, and what siblings say to each other.
//!
//! Two guests of one daemon are joined by two connections, one in each device's shard, so that
//! credit, caps and state are enforced against each of them separately. Bytes go from the
//! sender's chain straight into the receiver's posted buffer, in the receiver's worker: one
//! copy. Until then the chain is on loan to the receiver ([`Message::Lent`]) and comes back by
//! [`Message::Returned`]; the lender can ask for it back at any time ([`Message::Recall`]).

use crate::access::{AccessList, Verdict, Who};
use crate::attach::Name;
use crate::engine::messages::WorkerMessage;
use crate::io::mailbox::Sender;
use std::collections::HashMap;
use std::sync::Arc;
use zerosock_proto::vsock::FlowId;
use zerosock_proto::wire::vsock::SocketType;
use zerosock_proto::{Address, Cid, Port};
use zerosock_ring::Memory;

use crate::device::datagrams::returned;
use crate::device::host::Caller;
use crate::device::lanes::Arrival;
use crate::device::outbound::Held;
use crate::vsock::sockets::Ends;
use zerosock_proto::wire::vsock::Repr;

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
        socket_type: SocketType,
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
    /// The last `len` bytes, all of which I have sent, are a message.
    Ended { to: FlowId, len: u32, ends: Ends },
    /// A message of yours without a byte was read.
    ReadEmpty { to: FlowId },
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

    /// From lane to lane of a device with several queue pairs: this host program's connection belongs
    /// to you, from that port.
    Call { caller: Caller, local: Port },
    /// From lane to lane, to the first: the driver knows connections that the device does not.
    Lost,
    /// From a device to itself, that is to its worker: the connection goes to the lane of that queue
    /// pair.
    Depart { to: FlowId, pair: u16 },
    /// From lane to lane: take this connection.
    Adopt(Box<Arrival>),
    /// The answer: it is there, or nowhere. With what the driver is to be told.
    Arrived {
        to: FlowId,
        now: Option<Peer>,
        answer: Repr,
    },
    /// From the old lane to the new one: the driver that had this connection is gone.
    Orphaned { to: FlowId },
    /// From the lane that has a connection now, to its sibling: send to me. `old` is who had it.
    Relocated { to: FlowId, from: Peer, old: Peer },
    /// The answer, to `old`: nothing more will come to you.
    Flushed { to: FlowId },
    /// From the old lane to the new one: what was sent to me.
    SentOn(Box<Message>),

    /// A datagram, or a word of their flow control, for your guest. Give the chain back at once.
    Datagram(Datagram),
    /// The answer to `Datagram`: the chain, and a word for your guest.
    DatagramDone {
        chain: zerosock_ring::Chain,
        epoch: u32,
        /// Bytes of it that were put together.
        copied: usize,
        answer: Option<Repr>,
    },
    /// A word of the flow control for your guest.
    DatagramWord(Repr),
}

/// A packet of type DGRAM on its way from one guest to another.
#[derive(Debug)]
pub(crate) struct Datagram {
    pub(crate) from: DeviceAddr,
    /// Its sender understands words of the flow control.
    pub(crate) flow: bool,
    /// As the guest has sent it; of one that was put together, with the length of all of it.
    pub(crate) header: Repr,
    pub(crate) payload: Payload,
    /// The chain that it came in, the last of those.
    pub(crate) chain: zerosock_ring::Chain,
    pub(crate) epoch: u32,
}

/// Where a datagram lies.
#[derive(Debug)]
pub(crate) enum Payload {
    /// In its chain, behind the header.
    Lent(Arc<Memory>),
    /// It was put together.
    Copied(Box<[u8]>),
}

impl Payload {
    /// Bytes that were put together.
    pub(crate) fn copied(&self) -> usize {
        match self {
            Payload::Lent(_) => 0,
            Payload::Copied(bytes) => bytes.len(),
        }
    }
}

impl Message {
    /// The connection that it is for, if it is for one that exists.
    pub(crate) fn to(&self) -> Option<FlowId> {
        match self {
            Message::Asking { to, .. }
            | Message::Refused { to }
            | Message::Accepted { to, .. }
            | Message::Lent { to, .. }
            | Message::Copied { to, .. }
            | Message::Ended { to, .. }
            | Message::ReadEmpty { to, .. }
            | Message::Returned { to, .. }
            | Message::Recall { to }
            | Message::Shutdown { to, .. }
            | Message::Reset { to }
            | Message::Depart { to, .. }
            | Message::Arrived { to, .. }
            | Message::Orphaned { to }
            | Message::Relocated { to, .. }
            | Message::Flushed { to } => Some(*to),
            Message::Connect { .. }
            | Message::Call { .. }
            | Message::Lost
            | Message::Adopt(_)
            | Message::SentOn(_)
            | Message::Datagram(_)
            | Message::DatagramDone { .. }
            | Message::DatagramWord(_) => None,
        }
    }

    /// The connection that it is for has this name now.
    pub(crate) fn set_to(&mut self, now: FlowId) {
        match self {
            Message::Asking { to, .. }
            | Message::Refused { to }
            | Message::Accepted { to, .. }
            | Message::Lent { to, .. }
            | Message::Copied { to, .. }
            | Message::Ended { to, .. }
            | Message::ReadEmpty { to, .. }
            | Message::Returned { to, .. }
            | Message::Recall { to }
            | Message::Shutdown { to, .. }
            | Message::Reset { to }
            | Message::Depart { to, .. }
            | Message::Arrived { to, .. }
            | Message::Orphaned { to }
            | Message::Relocated { to, .. }
            | Message::Flushed { to } => *to = now,
            Message::Connect { .. }
            | Message::Call { .. }
            | Message::Lost
            | Message::Adopt(_)
            | Message::SentOn(_)
            | Message::Datagram(_)
            | Message::DatagramDone { .. }
            | Message::DatagramWord(_) => {}
        }
    }

    /// What is to be said, and to whom, when the device that this was for is gone: whoever asked
    /// it gets an answer, whoever lent it something gets it back. All others know already, or will
    /// when they have read what the device said before it went.
    pub(crate) fn undeliverable(self) -> Option<(DeviceAddr, Message)> {
        match self {
            Message::Connect { from, .. } => {
                let to = from.flow;
                Some((from.device, Message::Refused { to }))
            }
            Message::Asking { from, .. } | Message::Accepted { from, .. } => {
                let to = from.flow;
                Some((from.device, Message::Reset { to }))
            }
            Message::Lent {
                from, held, epoch, ..
            } => {
                let message = Message::Returned {
                    to: from.flow,
                    bytes: 0,
                    chain: Some((held.chain, epoch)),
                };
                Some((from.device, message))
            }
            // Who had it sends on the news that nothing more will come.
            Message::Relocated { old, .. } => {
                let to = old.flow;
                Some((old.device, Message::Flushed { to }))
            }
            Message::SentOn(message) => message.undeliverable(),
            Message::Datagram(datagram) => Some(returned(datagram)),
            // Whoever has one sees to it: it is more than one answer.
            Message::Adopt(_) => None,
            // The program sees its socket close.
            Message::Call { .. }
            | Message::Lost
            | Message::Depart { .. }
            | Message::Arrived { .. }
            | Message::Orphaned { .. }
            | Message::Flushed { .. }
            | Message::DatagramDone { .. }
            | Message::DatagramWord(_)
            | Message::Refused { .. }
            | Message::Copied { .. }
            | Message::Ended { .. }
            | Message::ReadEmpty { .. }
            | Message::Returned { .. }
            | Message::Recall { .. }
            | Message::Shutdown { .. }
            | Message::Reset { .. } => None,
        }
    }
}

/// The table of endpoints. It is never changed in place: each worker has a snapshot, and gets the
/// next one by message, so that no lock lies on the way of a connect.
#[derive(Clone, Debug, Default)]
pub(crate) struct Routes {
    by_cid: HashMap<Cid, Route>,
    /// The ports of CID 2 that services have claimed, and whose they are.
    services: HashMap<Port, DeviceAddr>,
    access: AccessList,
}

#[derive(Clone, Debug)]
struct Route {
    device: DeviceAddr,
    groups: Arc<[String]>,
    name: Option<Name>,
    /// The ports that may be connected to, sorted; `None`: all.
    ports: Option<Arc<[Port]>>,
}

impl Routes {
    /// Adds an endpoint; one with the same CID is replaced.
    pub(crate) fn add(&mut self, cid: Cid, device: DeviceAddr, groups: &[String]) {
        let groups = groups.into();
        self.by_cid.insert(
            cid,
            Route {
                device,
                groups,
                name: None,
                ports: None,
            },
        );
    }

    /// From now on rules about `name` are about `cid`.
    pub(crate) fn call(&mut self, cid: Cid, name: &Name) {
        if let Some(route) = self.by_cid.get_mut(&cid) {
            route.name = Some(name.clone());
        }
    }

    /// From now on `cid` is in these groups.
    pub(crate) fn set_groups(&mut self, cid: Cid, groups: &[String]) {
        if let Some(route) = self.by_cid.get_mut(&cid) {
            route.groups = groups.into();
        }
    }

    /// From now on these rules hold, for what is asked for from now on.
    pub(crate) fn set_access(&mut self, access: AccessList) {
        self.access = access;
    }

    /// From now on only these ports of `cid` may be connected to.
    pub(crate) fn limit_ports(&mut self, cid: Cid, ports: impl IntoIterator<Item = Port>) {
        let mut ports: Vec<Port> = ports.into_iter().collect();
        ports.sort_unstable();
        if let Some(route) = self.by_cid.get_mut(&cid) {
            route.ports = Some(ports.into());
        }
    }

    pub(crate) fn remove(&mut self, cid: Cid) {
        self.by_cid.remove(&cid);
    }

    pub(crate) fn contains(&self, cid: Cid) -> bool {
        self.by_cid.contains_key(&cid)
    }

    pub(crate) fn len(&self) -> usize {
        self.by_cid.len()
    }

    /// Whether anybody at all may connect to this port.
    fn is_open(&self, to: Address) -> bool {
        let ports = self.by_cid.get(&to.cid).and_then(|r| r.ports.as_ref());
        ports.is_none_or(|ports| ports.binary_search(&to.port).is_ok())
    }

    /// `port` of CID 2 belongs to the service with this device.
    pub(crate) fn claim(&mut self, port: Port, service: DeviceAddr) {
        self.services.insert(port, service);
    }

    /// `port` of CID 2 belongs to nobody any more.
    pub(crate) fn unclaim(&mut self, port: Port) {
        self.services.remove(&port);
    }

    /// The service that has claimed `port` of CID 2. What nobody has claimed is for the host's
    /// side of the asking device.
    #[inline]
    pub(crate) fn service(&self, port: Port) -> Option<DeviceAddr> {
        self.services.get(&port).copied()
    }

    /// The device that is to be asked for `to`, once [`may_reach`](Routes::may_reach) has said
    /// yes: the endpoint's, or the service's that has claimed the port.
    pub(crate) fn target(&self, to: Address) -> Option<DeviceAddr> {
        match to.cid {
            Cid::HOST => self.service(to.port),
            cid => self.device(cid),
        }
    }

    /// The device of `cid`.
    pub(crate) fn device(&self, cid: Cid) -> Option<DeviceAddr> {
        self.by_cid.get(&cid).map(|route| route.device)
    }

    /// Whether the endpoint `from` may ask the endpoint and port `to` for a connection, or send it
    /// a datagram: all that groups, the ports that a process has named, and the access list say.
    /// `from` and `to.cid` may be [`Cid::HOST`], which stands for everything that is CID 2, host
    /// programs and services alike. The answer holds for what begins now; what exists stays.
    ///
    /// - Nobody reaches himself, so neither does the host; and nobody a CID that is nobody's.
    /// - A port that a process has not named, when it attached, is reached by nobody.
    /// - The first rule of the access list that fits decides.
    /// - If none does, the host reaches everybody and is reached by everybody (whether something
    ///   of it is there is for others to know), and all others need a group in common.
    ///
    /// Without a list that is two searches by CID and, between guests, a comparison of a few
    /// names; with one, a walk over its rules. No lock, and no allocation.
    pub(crate) fn may_reach(&self, from: Cid, to: Address) -> bool {
        let (Some(asking), Some(asked)) = (self.who(from), self.who(to.cid)) else {
            return false;
        };
        if from == to.cid || !self.is_open(to) {
            return false;
        }
        match self.access.verdict(asking, asked, to.port) {
            Some(verdict) => verdict == Verdict::Allow,
            None if from == Cid::HOST || to.cid == Cid::HOST => true,
            None => asking.groups.iter().any(|g| asked.groups.contains(g)),
        }
    }

    fn who(&self, cid: Cid) -> Option<Who<'_>> {
        if cid == Cid::HOST {
            let (groups, name) = (&[][..], None);
            return Some(Who { cid, groups, name });
        }
        let route = self.by_cid.get(&cid)?;
        Some(Who {
            cid,
            groups: &route.groups,
            name: route.name.as_ref(),
        })
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

    /// Every packet between siblings is one, and is moved from list to list: two cache lines.
    #[test]
    fn a_message_is_small() {
        assert!(size_of::<Message>() <= 128, "{}", size_of::<Message>());
    }

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
        let reached = |routes: &Routes, from| {
            let to = |n: &u64| Address::new(cid(*n), Port::new(1));
            let reached = |n: &u64| routes.may_reach(cid(from), to(n));
            (3..10).filter(reached).collect::<Vec<u64>>()
        };
        assert_eq!(reached(&routes, 3), [4, 6]);
        assert_eq!(reached(&routes, 4), [3]);
        assert!(reached(&routes, 5).is_empty());
        assert!(reached(&routes, 9).is_empty(), "it is nobody");
        routes.remove(cid(4));
        assert_eq!(reached(&routes, 3), [6]);
        assert!(!routes.contains(cid(4)) && routes.contains(cid(6)));
        // The host needs no group; it is not itself.
        let host = Address::new(Cid::HOST, Port::new(1));
        assert!(routes.may_reach(cid(5), host));
        assert!(routes.may_reach(Cid::HOST, Address::new(cid(5), Port::new(1))));
        assert!(!routes.may_reach(Cid::HOST, host));
        assert!(!routes.may_reach(Cid::HOST, Address::new(cid(9), Port::new(1))));
    }

    #[test]
    fn the_access_list_goes_before_groups_and_after_named_ports() {
        use crate::access::{Party, Ports, Rule};
        let mut routes = Routes::default();
        let (one, two) = (Cid::new(3), Cid::new(4));
        let device = DeviceAddr { worker: 0, vm: 0 };
        routes.add(one, device, &["a".into()]);
        routes.add(two, device, &["a".into()]);
        routes.call(two, &"db".parse().unwrap());
        routes.limit_ports(two, [5, 6].map(Port::new));
        let rule = |verdict, from, port, to| Rule {
            verdict,
            from: vec![from],
            to: vec![to],
            ports: Ports::one(Port::new(port)).unwrap(),
        };
        let db = Party::Name("db".parse().unwrap());
        routes.set_access(AccessList::new([
            rule(Verdict::Deny, Party::Any, 5, db.clone()),
            rule(Verdict::Allow, Party::Any, 7, db),
            rule(Verdict::Deny, Party::Group("a".into()), 8, Party::Host),
        ]));
        let may = |from, to, port| routes.may_reach(from, Address::new(to, Port::new(port)));
        assert!(!may(one, two, 5) && !may(Cid::HOST, two, 5), "denied");
        assert!(may(one, two, 6) && may(Cid::HOST, two, 6), "as without");
        assert!(!may(one, two, 7), "not named");
        assert!(may(two, one, 5) && may(two, one, 7));
        assert!(!may(one, Cid::HOST, 8) && may(one, Cid::HOST, 9));
    }

    #[test]
    fn a_port_is_open_unless_others_were_named() {
        let mut routes = Routes::default();
        let cid = Cid::guest(3).unwrap();
        let device = DeviceAddr { worker: 0, vm: 0 };
        routes.add(cid, device, &[]);
        let open = |routes: &Routes, port| routes.is_open(Address::new(cid, Port::new(port)));
        assert!(open(&routes, 1) && open(&routes, 2));
        routes.limit_ports(cid, [9, 2, 5].map(Port::new));
        assert!(open(&routes, 2) && open(&routes, 5) && open(&routes, 9));
        assert!(!open(&routes, 1) && !open(&routes, 3) && !open(&routes, 10));
    }

    #[test]
    fn who_asks_or_lends_is_answered_for_a_device_that_is_gone() {
        let mut shard = zerosock_proto::vsock::Shard::new(
            zerosock_proto::vsock::ShardConfig::driver(Cid::new(3)),
            Arc::new(zerosock_proto::vsock::PortTable::new()),
        );
        let host = Address::new(Cid::HOST, Port::new(1));
        let any = Address::new(Cid::ANY, Port::ANY);
        let stream = zerosock_proto::wire::vsock::SocketType::Stream;
        let now = zerosock_proto::Instant::ZERO;
        let flow = shard.connect(now, any, host, stream).unwrap();
        let device = DeviceAddr { worker: 1, vm: 2 };
        let from = Peer { device, flow };
        let connect = Message::Connect {
            from,
            local: any,
            peer: host,
            socket_type: SocketType::SeqPacket,
        };
        let Some((to, Message::Refused { to: told })) = connect.undeliverable() else {
            panic!("an unanswered connect");
        };
        assert_eq!((to, told), (device, flow));
        for message in [
            Message::Asking { to: flow, from },
            Message::Accepted { to: flow, from },
        ] {
            let Some((to, Message::Reset { to: told })) = message.undeliverable() else {
                panic!("a half connection");
            };
            assert_eq!((to, told), (device, flow));
        }
        assert!(Message::Reset { to: flow }.undeliverable().is_none());
    }
}
