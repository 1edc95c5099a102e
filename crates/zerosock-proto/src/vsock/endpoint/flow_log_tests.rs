//! The log of a device: whatever its guest and its callers do, and whenever the process is killed, each
//! connection that the guest knows is in the log, or its RST is under way.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use proptest::prelude::*;

use super::*;
use crate::addr::{Address, Cid, Port};
use crate::time::{Duration, Instant};
use crate::vsock::event::Event;
use crate::vsock::{Directions, FlowId, PortTable, ShardConfig};
use crate::wire::vsock::{Op, Repr, SHUTDOWN_RECEIVE, SHUTDOWN_SEND, SocketType};

const GUEST: Cid = Cid::new(3);
const MOST: usize = 6;

/// The memory of a log, which outlives its shard.
#[derive(Clone, Debug, Default)]
struct Memory(Arc<Mutex<Vec<Option<LoggedFlow>>>>);

impl Memory {
    fn all(&self) -> Vec<(u32, LoggedFlow)> {
        let entries = self.0.lock().unwrap();
        let entries = (0..).zip(entries.iter());
        entries
            .filter_map(|(entry, flow)| Some((entry, (*flow)?)))
            .collect()
    }

    fn has(&self, flow: &LoggedFlow) -> bool {
        self.all().iter().any(|(_, other)| other == flow)
    }
}

impl FlowLog for Memory {
    fn is_full(&self) -> bool {
        self.all().len() == MOST
    }

    fn enter(&mut self, flow: LoggedFlow) -> u32 {
        assert!(!self.is_full());
        let mut entries = self.0.lock().unwrap();
        let free = entries.iter().position(Option::is_none);
        let entry = free.unwrap_or(entries.len());
        if entry == entries.len() {
            entries.push(None);
        }
        entries[entry] = Some(flow);
        entry as u32
    }

    fn clear(&mut self, entry: u32) {
        let flow = self.0.lock().unwrap()[entry as usize].take();
        assert!(flow.is_some(), "cleared twice");
    }
}

fn shard(log: &Memory) -> Shard {
    let config = ShardConfig {
        max_connections: MOST,
        accept_all: true,
        ..ShardConfig::device(GUEST)
    };
    let mut shard = Shard::new(config, Arc::new(PortTable::new()));
    shard.set_seqpacket(true);
    shard.set_flow_log(Box::new(log.clone()));
    shard
}

fn flow(port: u32, socket_type: SocketType) -> LoggedFlow {
    LoggedFlow {
        local: Address::new(Cid::HOST, Port::new(1024)),
        peer: Address::new(GUEST, Port::new(port)),
        socket_type,
    }
}

fn of_port(port: u32) -> LoggedFlow {
    let kind = [SocketType::Stream, SocketType::SeqPacket];
    flow(port, kind[port as usize % 2])
}

/// A packet of the guest.
fn packet(flow: LoggedFlow, op: Op, flags: u32, len: u32) -> Repr {
    Repr {
        src: flow.peer,
        dst: flow.local,
        len,
        socket_type: flow.socket_type.into(),
        op: op.into(),
        flags,
        buf_alloc: 1 << 16,
        fwd_cnt: 0,
    }
}

#[derive(Clone, Debug)]
enum Step {
    Request(u32),
    Answer(u32),
    Payload(u32),
    ShutDown(u32, u32),
    Rst(u32),
    Connect(u32),
    Accept(usize),
    Reject(usize),
    Shutdown(usize, Directions),
    Reset(usize),
    Consume(usize),
    Events,
    Transmit(usize),
    Publish,
    Wait(u64),
    TransportReset,
    Kill,
}

fn step() -> impl Strategy<Value = Step> {
    let port = 0..8u32;
    let how = prop_oneof![
        Just(Directions::BOTH),
        Just(Directions {
            receive: true,
            send: false
        }),
        Just(Directions {
            receive: false,
            send: true
        }),
    ];
    prop_oneof![
        6 => port.clone().prop_map(Step::Request),
        3 => port.clone().prop_map(Step::Answer),
        2 => port.clone().prop_map(Step::Payload),
        4 => (port.clone(), 0..4u32).prop_map(|(port, how)| Step::ShutDown(port, how)),
        3 => port.clone().prop_map(Step::Rst),
        5 => port.prop_map(Step::Connect),
        3 => any::<usize>().prop_map(Step::Accept),
        1 => any::<usize>().prop_map(Step::Reject),
        3 => (any::<usize>(), how).prop_map(|(flow, how)| Step::Shutdown(flow, how)),
        2 => any::<usize>().prop_map(Step::Reset),
        2 => any::<usize>().prop_map(Step::Consume),
        4 => Just(Step::Events),
        6 => (1..4usize).prop_map(Step::Transmit),
        4 => Just(Step::Publish),
        1 => (0..10_000u64).prop_map(Step::Wait),
        1 => Just(Step::TransportReset),
        1 => Just(Step::Kill),
    ]
}

struct World {
    now: Instant,
    log: Memory,
    shard: Shard,
    flows: Vec<FlowId>,
    /// What the shard has returned and the guest does not see yet.
    unpublished: Vec<Repr>,
    /// RSTs among them that belong to no connection, by port: those over the limit of connections.
    refused: Vec<u32>,
    /// The connections that the guest has.
    known: BTreeSet<u32>,
}

impl World {
    fn new() -> World {
        let log = Memory::default();
        World {
            now: Instant::ZERO,
            shard: shard(&log),
            log,
            flows: Vec::new(),
            unpublished: Vec::new(),
            refused: Vec::new(),
            known: BTreeSet::new(),
        }
    }

    fn send(&mut self, port: u32, op: Op, flags: u32, len: u32) {
        let header = packet(of_port(port), op, flags, len);
        let _ = self.shard.handle_packet(self.now, &header);
    }

    fn chosen(&self, choice: usize) -> Option<FlowId> {
        self.flows
            .get(choice.checked_rem(self.flows.len())?)
            .copied()
    }

    fn run(&mut self, step: Step) {
        let now = self.now;
        match step {
            Step::Request(port) => {
                // A request that crosses ours is not what this test is about.
                let LoggedFlow { local, peer, .. } = of_port(port);
                let crosses =
                    self.shard.is_connected(local, peer) || self.requested().contains(&port);
                if self.known.contains(&port) || !crosses {
                    self.known.insert(port);
                    self.send(port, Op::Request, 0, 0);
                }
            }
            Step::Answer(port) if self.known.contains(&port) => self.send(port, Op::Response, 0, 0),
            Step::Payload(port) if self.known.contains(&port) => self.send(port, Op::Rw, 1, 10),
            Step::ShutDown(port, how) if self.known.contains(&port) => {
                self.send(
                    port,
                    Op::Shutdown,
                    how & (SHUTDOWN_RECEIVE | SHUTDOWN_SEND),
                    0,
                );
            }
            Step::Rst(port) => {
                // One that crosses our request of another connection ends that one.
                if !self.requested().contains(&port) && self.known.remove(&port) {
                    self.send(port, Op::Rst, 0, 0);
                }
            }
            Step::Answer(_) | Step::Payload(_) | Step::ShutDown(..) => {}
            Step::Connect(port) => {
                let LoggedFlow {
                    local,
                    peer,
                    socket_type,
                } = of_port(port);
                if let Ok(flow) = self.shard.connect(now, local, peer, socket_type) {
                    self.flows.push(flow);
                }
            }
            Step::Accept(n) => {
                let _ = self.chosen(n).map(|it| self.shard.accept(now, it));
            }
            Step::Reject(n) => {
                let _ = self.chosen(n).map(|it| self.shard.reject(it));
            }
            Step::Shutdown(n, how) => {
                let _ = self.chosen(n).map(|it| self.shard.shutdown(now, it, how));
            }
            Step::Reset(n) => {
                let _ = self.chosen(n).map(|it| self.shard.reset(it));
            }
            Step::Consume(n) => {
                let _ = self.chosen(n).map(|it| self.shard.consume(it, 10));
            }
            Step::Events => {
                while let Some(event) = self.shard.poll_event() {
                    match event {
                        Event::Incoming { flow, .. } => self.flows.push(flow),
                        Event::Refused { flow, .. } | Event::Closed { flow, .. } => {
                            self.flows.retain(|other| *other != flow);
                        }
                        _ => {}
                    }
                }
            }
            Step::Transmit(count) => {
                for _ in 0..count {
                    let refused = self.shard.resets.front();
                    self.refused
                        .extend(refused.map(|header| header.dst.port.get()));
                    let packet = self.shard.poll_transmit(now, 0);
                    self.unpublished.extend(packet.map(|packet| packet.header));
                }
            }
            Step::Publish => self.publish(),
            Step::Wait(millis) => {
                self.now += Duration::from_millis(millis);
                self.shard.handle_timeout(self.now);
            }
            Step::TransportReset => {
                // The guest has reset its connections itself.
                self.known.clear();
                self.unpublished.clear();
                self.refused.clear();
                self.shard.handle_transport_reset(now);
            }
            Step::Kill => self.kill(),
        }
    }

    fn publish(&mut self) {
        for header in self.unpublished.drain(..) {
            let port = header.dst.port.get();
            match header.op.known() {
                Some(Op::Request) => drop(self.known.insert(port)),
                Some(Op::Rst) => drop(self.known.remove(&port)),
                _ => {}
            }
        }
        self.refused.clear();
        self.shard.handle_published();
    }

    /// The connections that the guest gets with the next packets.
    fn requested(&self) -> Vec<u32> {
        let packets = self.unpublished.iter();
        let requests = packets.filter(|header| header.op.known() == Some(Op::Request));
        requests.map(|header| header.dst.port.get()).collect()
    }

    /// What the guest would wait for in vain if the process died now.
    fn check(&self) {
        let refused = self.shard.resets.iter();
        let refused = refused.map(|header| header.dst.port.get());
        let refused: BTreeSet<u32> = refused.chain(self.refused.iter().copied()).collect();
        for port in self.known.iter().copied().chain(self.requested()) {
            let is_safe = self.log.has(&of_port(port)) || refused.contains(&port);
            assert!(
                is_safe,
                "the guest's connection from port {port} is forgotten"
            );
        }
        let entries = self.log.all().len();
        assert_eq!(entries, self.shard.ports.occupied(), "entries count");
    }

    /// The process dies, and its successor resets what is in the log.
    fn kill(&mut self) {
        let mut logged = BTreeSet::new();
        self.shard = shard(&self.log);
        for (entry, flow) in self.log.all() {
            let is_first = logged.insert(flow.peer.port.get());
            assert_eq!(self.shard.reset_stale(entry, flow), is_first);
        }
        self.flows.clear();
        // A successor publishes what was completed. It does not know of RSTs that the guest's queue may not have:
        // those over the limit of connections.
        let requested = self.requested();
        self.known.extend(requested);
        self.unpublished.clear();
        self.refused.clear();
        self.known.retain(|port| logged.contains(port));
    }
}

proptest! {
    #[test]
    fn each_connection_that_the_guest_knows_is_in_the_log(
        steps in prop::collection::vec(step(), 1..200),
    ) {
        let mut world = World::new();
        for step in steps {
            world.run(step);
            world.check();
        }
        world.kill();
        while world.shard.has_transmit() {
            world.run(Step::Transmit(1));
            world.check();
            world.publish();
        }
        prop_assert!(world.known.is_empty(), "the guest keeps {:?}", world.known);
        prop_assert_eq!(world.log.all(), []);
        prop_assert_eq!(world.shard.occupied(), 0);
    }
}

/// A shard with one stale connection, and the log of it.
fn stale() -> (Shard, Memory, LoggedFlow) {
    let mut log = Memory::default();
    let stale = flow(5, SocketType::Stream);
    let entry = log.enter(stale);
    let mut shard = shard(&log);
    assert!(shard.reset_stale(entry, stale));
    (shard, log, stale)
}

fn sent(shard: &mut Shard) -> Vec<(Op, Address, Address)> {
    let packets = std::iter::from_fn(|| shard.poll_transmit(Instant::ZERO, 0));
    let packets = packets.map(|it| (it.header.op.known().unwrap(), it.header.src, it.header.dst));
    packets.collect()
}

#[test]
fn a_stale_connection_gets_one_reset_and_no_event() {
    let (mut shard, log, stale) = stale();
    assert_eq!(shard.connections(), 0);
    assert_eq!(sent(&mut shard), [(Op::Rst, stale.local, stale.peer)]);
    assert_eq!(shard.poll_event(), None);
    assert!(log.has(&stale), "the guest may not see it yet");
    shard.handle_published();
    assert_eq!(log.all(), []);
}

#[test]
fn payload_of_a_stale_connection_gets_no_second_reset() {
    let (mut shard, _log, stale) = stale();
    let _ = shard.handle_packet(Instant::ZERO, &packet(stale, Op::Rw, 0, 100));
    assert_eq!(sent(&mut shard), [(Op::Rst, stale.local, stale.peer)]);
}

#[test]
fn a_new_connection_of_the_guest_with_the_same_addresses_is_not_reset() {
    let (mut shard, log, stale) = stale();
    let _ = shard.handle_packet(Instant::ZERO, &packet(stale, Op::Rst, 0, 0));
    assert_eq!(sent(&mut shard), []);
    let _ = shard.handle_packet(Instant::ZERO, &packet(stale, Op::Request, 0, 0));
    let Some(Event::Incoming { flow, .. }) = shard.poll_event() else {
        panic!("no request")
    };
    shard.accept(Instant::ZERO, flow).unwrap();
    assert_eq!(sent(&mut shard), [(Op::Response, stale.local, stale.peer)]);
    shard.handle_published();
    assert_eq!(log.all().len(), 1);
}

#[test]
fn a_new_connection_to_the_guest_with_the_same_addresses_is_requested_after_the_reset() {
    let (mut shard, log, stale) = stale();
    let LoggedFlow {
        local,
        peer,
        socket_type,
    } = stale;
    shard
        .connect(Instant::ZERO, local, peer, socket_type)
        .unwrap();
    let expected = [(Op::Rst, local, peer), (Op::Request, local, peer)];
    assert_eq!(sent(&mut shard), expected);
    shard.handle_published();
    assert!(log.has(&stale), "the new one");
}

#[test]
fn a_driver_that_knows_no_connection_gets_no_reset() {
    let (mut shard, log, _) = stale();
    shard.handle_transport_reset(Instant::ZERO);
    assert_eq!(sent(&mut shard), []);
    shard.handle_published();
    assert_eq!(log.all(), []);
}

#[test]
fn an_entry_counts_as_a_connection_until_the_last_packet_is_published() {
    let log = Memory::default();
    let mut shard = shard(&log);
    let request = |shard: &mut Shard, port| {
        let header = packet(flow(port, SocketType::Stream), Op::Request, 0, 0);
        let _ = shard.handle_packet(Instant::ZERO, &header);
        match shard.poll_event() {
            Some(Event::Incoming { flow, .. }) => Some(flow),
            _ => None,
        }
    };
    let all = (0..MOST as u32).map(|port| request(&mut shard, port).unwrap());
    let all: Vec<FlowId> = all.collect();
    shard.reject(all[0]).unwrap();
    while shard.poll_event().is_some() {}
    assert_eq!(sent(&mut shard).len(), 1);
    assert_eq!(request(&mut shard, 100), None);
    assert_eq!(sent(&mut shard).len(), 1, "refused");
    shard.handle_published();
    assert!(request(&mut shard, 100).is_some());
    drop(shard);
    assert_eq!(log.all().len(), MOST, "a successor resets all of them");
}
