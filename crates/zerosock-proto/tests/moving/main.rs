//! Connections move between three queue pairs while both ends send: a driver with three shards, a
//! device with three shards, and six queues between them. Each queue keeps order; there is no order
//! among queues.
//!
//! The oracle counts bytes: each packet carries its connection and offset, and every byte must
//! arrive once and in order, at whatever pair.

mod rules;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use proptest::prelude::*;
use zerosock_proto::vsock::{
    CloseReason, Disposition, Event, FlowId, How, MoveError, PortTable, QueuePairs, Shard,
    ShardConfig,
};
use zerosock_proto::wire::vsock::{Repr, SocketType};
use zerosock_proto::{Address, Cid, Instant, Port};

const GUEST: Cid = Cid::new(3);
const SERVER: Address = Address::new(Cid::HOST, Port::new(1024));
const PAIRS: usize = 3;
const CONNECTIONS: usize = 4;
const NOW: Instant = Instant::ZERO;

const DRIVER: usize = 0;
const DEVICE: usize = 1;

/// One end of a connection.
#[derive(Default)]
struct End {
    /// Where it is; `None` when it has ended.
    at: Option<(usize, FlowId)>,
    sent: u64,
    received: u64,
    unread: u32,
    ended: Option<CloseReason>,
}

/// A move that the driver has requested and the device has not made.
struct MoveRequest {
    connection: usize,
    pair: usize,
}

struct Side {
    shards: Vec<Shard>,
    by_id: HashMap<(usize, FlowId), usize>,
    ends: Vec<End>,
}

/// A queue: headers and the offsets of their payloads.
type Wire = VecDeque<(Repr, Option<u64>)>;

struct World {
    sides: [Side; 2],
    /// `wires[s][p]` leads from side `s` to the other, through pair `p`.
    wires: [[Wire; PAIRS]; 2],
    requests: VecDeque<MoveRequest>,
    /// Headers to send at the old pair once the connection is inserted at the new one.
    answers: VecDeque<(usize, Repr)>,
    resets: bool,
    moved: usize,
}

#[derive(Clone, Debug)]
enum Step {
    Transmit {
        side: usize,
        pair: usize,
        max_payload: u32,
    },
    Arrive {
        side: usize,
        pair: usize,
    },
    Queue {
        side: usize,
        connection: usize,
        len: u32,
    },
    SendNow {
        side: usize,
        connection: usize,
        len: u32,
    },
    Consume {
        side: usize,
        connection: usize,
    },
    Ask {
        connection: usize,
        pair: usize,
    },
    Decide {
        keep: bool,
    },
    Answer,
    Shutdown {
        side: usize,
        connection: usize,
        how: How,
    },
    Reset {
        side: usize,
        connection: usize,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let side = || 0..2usize;
    let pair = || 0..PAIRS;
    let connection = || 0..CONNECTIONS;
    prop_oneof![
        6 => (side(), pair(), 1..4000u32).prop_map(|(side, pair, max_payload)| Step::Transmit { side, pair, max_payload }),
        8 => (side(), pair()).prop_map(|(side, pair)| Step::Arrive { side, pair }),
        4 => (side(), connection(), 1..6000u32)
            .prop_map(|(side, connection, len)| Step::Queue { side, connection, len }),
        4 => (side(), connection(), 1..3000u32)
            .prop_map(|(side, connection, len)| Step::SendNow { side, connection, len }),
        3 => (side(), connection()).prop_map(|(side, connection)| Step::Consume { side, connection }),
        3 => (connection(), pair()).prop_map(|(connection, pair)| Step::Ask { connection, pair }),
        4 => prop::bool::weighted(0.2).prop_map(|keep| Step::Decide { keep }),
        4 => Just(Step::Answer),
        1 => (side(), connection(), any::<(bool, bool)>()).prop_map(|(side, connection, (receive, send))| {
            Step::Shutdown { side, connection, how: How { receive, send } }
        }),
        1 => (side(), connection()).prop_map(|(side, connection)| Step::Reset { side, connection }),
    ]
}

impl World {
    fn new(resets: bool) -> World {
        let side = |config: ShardConfig| {
            let ports = Arc::new(PortTable::new());
            let shard = || {
                let config = ShardConfig {
                    buf_alloc: 8192,
                    ..config.clone()
                };
                let mut shard = Shard::new(config, ports.clone());
                shard.set_moves(true);
                shard
            };
            Side {
                shards: (0..PAIRS).map(|_| shard()).collect(),
                by_id: HashMap::new(),
                ends: (0..CONNECTIONS).map(|_| End::default()).collect(),
            }
        };
        let mut world = World {
            sides: [
                side(ShardConfig::driver(GUEST)),
                side(ShardConfig::device(GUEST)),
            ],
            wires: Default::default(),
            requests: VecDeque::new(),
            answers: VecDeque::new(),
            resets,
            moved: 0,
        };
        world.sides[DEVICE].shards[0]
            .listen(SERVER.port, CONNECTIONS)
            .unwrap();
        for connection in 0..CONNECTIONS {
            world.connect(connection);
        }
        world
    }

    /// Connects at the pair that the hash names.
    fn connect(&mut self, connection: usize) {
        let port = Port::new(5000 + connection as u32);
        let pair = usize::from(QueuePairs::new(PAIRS as u16).unwrap().of_flow(port, SERVER));
        let local = Address::new(Cid::ANY, port);
        let driver = &mut self.sides[DRIVER];
        let flow = driver.shards[pair]
            .connect(NOW, local, SERVER, SocketType::Stream)
            .unwrap();
        driver.ends[connection].at = Some((pair, flow));
        driver.by_id.insert((pair, flow), connection);
        let request = driver.shards[pair].poll_transmit(NOW, 0).unwrap();
        let device = &mut self.sides[DEVICE];
        let got = device.shards[pair].handle_packet(NOW, &request.header);
        assert_eq!(got, Disposition::Handled);
        let Some(Event::Incoming { flow, .. }) = device.shards[pair].poll_event() else {
            panic!("the listener is that of all shards")
        };
        device.shards[pair].accept(NOW, flow).unwrap();
        device.ends[connection].at = Some((pair, flow));
        device.by_id.insert((pair, flow), connection);
        self.transmit(DEVICE, pair, 0);
        self.arrive(DEVICE, pair);
    }

    fn transmit(&mut self, side: usize, pair: usize, max_payload: u32) {
        let from = &mut self.sides[side];
        if let Some(packet) = from.shards[pair].poll_transmit(NOW, max_payload) {
            let tag = packet.span.map(|span| {
                from.shards[pair].handle_released(span);
                let end = &mut from.ends[from.by_id[&(pair, span.flow)]];
                let at = end.sent;
                end.sent += u64::from(span.len);
                at
            });
            self.wires[side][pair].push_back((packet.header, tag));
        }
        self.events(side);
    }

    fn arrive(&mut self, side: usize, pair: usize) {
        let other = 1 - side;
        if self.sides[other].shards[pair].is_backlogged() {
            return;
        }
        let Some((header, tag)) = self.wires[side][pair].pop_front() else {
            return;
        };
        let to = &mut self.sides[other];
        match to.shards[pair].handle_packet(NOW, &header) {
            Disposition::Deliver { flow, len, .. } => {
                let end = &mut to.ends[to.by_id[&(pair, flow)]];
                assert_eq!(end.at, Some((pair, flow)));
                assert_eq!(Some(end.received), tag, "not the next byte");
                end.received += u64::from(len);
                end.unread += len;
            }
            Disposition::Part { .. } => panic!("a stream has no messages"),
            Disposition::Move { flow, pair: wanted } => {
                assert_eq!(other, DEVICE);
                let connection = to.by_id[&(pair, flow)];
                self.requests.push_back(MoveRequest {
                    connection,
                    pair: wanted as usize,
                });
            }
            Disposition::Moved { flow, pair: there } => {
                assert_eq!(other, DRIVER);
                let there = there as usize;
                if there == pair {
                    to.shards[pair].resume(flow).unwrap();
                } else {
                    let moved = self.relocate(DRIVER, pair, flow, there);
                    assert!(matches!(moved, Ok(None)));
                }
            }
            Disposition::MovedStray { pair } => {
                assert!(self.resets, "no end has reset it");
                to.shards[pair as usize].reset_stray(&header);
            }
            Disposition::Handled => {}
            Disposition::Dropped(reason) => {
                assert!(self.resets || header.len == 0, "{reason:?}: {header}");
            }
        }
        self.events(other);
    }

    /// Moves one end from shard to shard; returns the header to send at the old pair.
    fn relocate(
        &mut self,
        side: usize,
        from: usize,
        flow: FlowId,
        to: usize,
    ) -> Result<Option<Repr>, MoveError> {
        let Side {
            shards,
            by_id,
            ends,
        } = &mut self.sides[side];
        let (handoff, answer) = shards[from].extract(flow, to as u16)?;
        assert_eq!(shards[from].flow(flow), None, "the old id is invalid");
        let moved = shards[to].insert(handoff).expect("a free slot");
        let connection = by_id.remove(&(from, flow)).unwrap();
        by_id.insert((to, moved), connection);
        ends[connection].at = Some((to, moved));
        self.moved += usize::from(side == DRIVER);
        Ok(answer)
    }

    fn events(&mut self, side: usize) {
        for pair in 0..PAIRS {
            let Side {
                shards,
                by_id,
                ends,
            } = &mut self.sides[side];
            while let Some(event) = shards[pair].poll_event() {
                match event {
                    Event::Closed { flow, reason } => {
                        let end = &mut ends[by_id.remove(&(pair, flow)).unwrap()];
                        end.at = None;
                        end.ended = Some(reason);
                    }
                    Event::Refused { .. } => panic!("all were connected"),
                    _ => {}
                }
            }
        }
    }

    fn take(&mut self, step: Step) {
        match step {
            Step::Transmit {
                side,
                pair,
                max_payload,
            } => self.transmit(side, pair, max_payload),
            Step::Arrive { side, pair } => self.arrive(side, pair),
            Step::Queue {
                side,
                connection,
                len,
            } => {
                if let Some((pair, flow)) = self.sides[side].ends[connection].at {
                    // Shut down, or too many: not sent.
                    let _ = self.sides[side].shards[pair].send(flow, len, 0);
                }
            }
            Step::SendNow {
                side,
                connection,
                len,
            } => {
                if let Some((pair, flow)) = self.sides[side].ends[connection].at
                    && let Ok(header) = self.sides[side].shards[pair].send_now(flow, len, 0)
                {
                    let end = &mut self.sides[side].ends[connection];
                    self.wires[side][pair].push_back((header, Some(end.sent)));
                    end.sent += u64::from(header.len);
                }
            }
            Step::Consume { side, connection } => self.consume(side, connection),
            Step::Ask { connection, pair } => {
                if let Some((at, flow)) = self.sides[DRIVER].ends[connection].at
                    && at != pair
                {
                    // Closing, or on its way already.
                    let _ = self.sides[DRIVER].shards[at].request_move(flow, pair as u16);
                }
            }
            Step::Decide { keep } => self.decide(keep),
            Step::Answer => {
                if let Some((pair, answer)) = self.answers.pop_front() {
                    self.sides[DEVICE].shards[pair].send_moved(answer);
                }
            }
            Step::Shutdown {
                side,
                connection,
                how,
            } => {
                if let Some((pair, flow)) = self.sides[side].ends[connection].at
                    && self.resets
                {
                    let _ = self.sides[side].shards[pair].shutdown(NOW, flow, how);
                    self.events(side);
                }
            }
            Step::Reset { side, connection } => {
                if let Some((pair, flow)) = self.sides[side].ends[connection].at
                    && self.resets
                {
                    self.sides[side].shards[pair].reset(flow).unwrap();
                    self.events(side);
                }
            }
        }
    }

    fn consume(&mut self, side: usize, connection: usize) {
        let end = &mut self.sides[side].ends[connection];
        if let Some((pair, flow)) = end.at {
            let bytes = std::mem::take(&mut end.unread);
            self.sides[side].shards[pair].consume(flow, bytes).unwrap();
            self.events(side);
        }
    }

    /// The device answers the oldest request.
    fn decide(&mut self, keep: bool) {
        let Some(MoveRequest { connection, pair }) = self.requests.pop_front() else {
            return;
        };
        let Some((at, flow)) = self.sides[DEVICE].ends[connection].at else {
            return;
        };
        if !keep {
            match self.relocate(DEVICE, at, flow, pair) {
                Ok(Some(answer)) => return self.answers.push_back((at, answer)),
                Ok(None) => panic!("a device answers"),
                Err(MoveError::WrongState) => {}
                Err(error) => panic!("{error}"),
            }
        }
        // It may be closing.
        let _ = self.sides[DEVICE].shards[at].decline_move(flow, at as u16);
    }

    /// Runs until nothing changes.
    fn run_to_idle(&mut self) {
        let mut quiet = 0;
        for round in 0.. {
            assert!(round < 10_000, "it never ends");
            let before = self.progress();
            while !self.requests.is_empty() {
                self.decide(false);
            }
            while !self.answers.is_empty() {
                self.take(Step::Answer);
            }
            for side in 0..2 {
                for pair in 0..PAIRS {
                    self.transmit(side, pair, 4096);
                    self.arrive(side, pair);
                }
                for connection in 0..CONNECTIONS {
                    self.consume(side, connection);
                }
            }
            let queues = self.wires.iter().flatten().all(VecDeque::is_empty);
            // Bytes consumed in one round are announced in the next.
            quiet = if queues && before == self.progress() {
                quiet + 1
            } else {
                0
            };
            if quiet > 1 && self.answers.is_empty() {
                return;
            }
        }
    }

    fn progress(&self) -> (u64, u64, usize) {
        let sum = |side: &Side| {
            side.ends
                .iter()
                .map(|end| end.sent + end.received)
                .sum::<u64>()
        };
        let shards = self.sides.iter().flat_map(|side| &side.shards);
        let packets = shards.map(|shard| shard.stats().packets).sum();
        (
            sum(&self.sides[0]) + sum(&self.sides[1]),
            packets,
            self.moved,
        )
    }

    fn check(&mut self) {
        self.run_to_idle();
        for connection in 0..CONNECTIONS {
            let [driver, device] = [0, 1].map(|side| &self.sides[side].ends[connection]);
            if self.resets {
                let both = driver.at.is_some() == device.at.is_some();
                assert!(
                    both,
                    "one end is left: {:?} {:?}",
                    driver.ended, device.ended
                );
                continue;
            }
            let (Some((here, flow)), Some((there, _))) = (driver.at, device.at) else {
                panic!("lost: {:?} {:?}", driver.ended, device.ended);
            };
            assert_eq!(here, there, "at one pair");
            assert_eq!(
                (driver.sent, device.sent),
                (device.received, driver.received)
            );
            let info = self.sides[DRIVER].shards[here].flow(flow).unwrap();
            assert_eq!(info.unsent, 0);
            assert!(info.send_credit > 0, "it is held for ever");
        }
        let live: usize = self.sides[DRIVER]
            .shards
            .iter()
            .map(Shard::connections)
            .sum();
        let ends = self.sides[DRIVER]
            .ends
            .iter()
            .filter(|end| end.at.is_some());
        assert_eq!(live, ends.count());
        // Each connection has a port of its own at the driver, which counts where the connection
        // is.
        let held = |side: usize| -> usize {
            let shards = self.sides[side].shards.iter();
            shards.map(Shard::held_ports).sum()
        };
        let ports = self.sides[DRIVER].shards[0].ports().len();
        assert_eq!((held(DRIVER), held(DEVICE)), (ports, 0));
        assert_eq!(ports, live);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn moved_connections_lose_nothing_and_keep_their_order(
        steps in prop::collection::vec(step(), 1..300),
    ) {
        let mut world = World::new(false);
        for step in steps {
            world.take(step);
        }
        world.check();
    }

    #[test]
    fn a_connection_that_ends_while_moving_ends_at_both_sides(
        steps in prop::collection::vec(step(), 1..300),
    ) {
        let mut world = World::new(true);
        for step in steps {
            world.take(step);
        }
        world.check();
    }
}

/// Both ends send as fast as they can while the connection moves from pair to pair.
#[test]
fn a_busy_connection_moves_through_all_pairs() {
    let mut world = World::new(false);
    for turn in 0..300 {
        for side in 0..2 {
            world.take(Step::Queue {
                side,
                connection: 0,
                len: 700,
            });
            world.take(Step::SendNow {
                side,
                connection: 0,
                len: 100,
            });
            for pair in 0..PAIRS {
                world.take(Step::Transmit {
                    side,
                    pair,
                    max_payload: 512,
                });
                world.take(Step::Arrive { side, pair });
            }
            world.take(Step::Consume {
                side,
                connection: 0,
            });
        }
        world.take(Step::Ask {
            connection: 0,
            pair: turn % PAIRS,
        });
        world.take(Step::Decide {
            keep: turn % 7 == 0,
        });
        world.take(Step::Answer);
    }
    world.check();
    assert!(world.moved > 20, "{} moves", world.moved);
    assert!(
        world
            .sides
            .iter()
            .all(|side| side.ends[0].received > 10_000)
    );
}
