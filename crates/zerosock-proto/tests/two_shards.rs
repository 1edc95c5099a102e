//! Two shards, a driver and a device, joined by two queues that keep order and delay packets
//! arbitrarily, under any interleaving of their callers' commands.
//!
//! The oracle counts bytes only: each packet carries its sender and offset. Every byte must arrive
//! once and in order, and all of them unless a caller reset the connection or stopped receiving.
//! The fuzz target `protocol` runs the same steps.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use proptest::prelude::*;
use zerosock_proto::vsock::{
    Directions, Disposition, DropReason, Event, FlowId, PortTable, Reservation, Shard, ShardConfig,
};
use zerosock_proto::wire::vsock::{Repr, SocketType};
use zerosock_proto::{Address, Cid, Duration, Instant, Port};

const GUEST: Cid = Cid::new(3);

/// One end of a connection, as its caller sees it.
#[derive(Default)]
struct End {
    id: Option<FlowId>,
    /// Bytes sent.
    sent: u64,
    /// Bytes queued and not yet sent.
    queued: VecDeque<u32>,
    /// Message and offset that the next span must have.
    message: u64,
    offset: u32,
    held: Vec<Reservation>,
    received: u64,
    unread: u32,
    /// The end that sends to this one.
    peer: Option<usize>,
    connected: bool,
    shut: Directions,
    peer_send: bool,
    /// How it ended, and whether in order.
    ended: Option<bool>,
}

struct Side {
    shard: Shard,
    ports: Arc<PortTable>,
    ends: Vec<usize>,
    by_id: HashMap<FlowId, usize>,
}

/// What a packet carries besides its header: the sender's end and offset.
type Wire = VecDeque<(Repr, Option<(usize, u64)>)>;

struct World {
    now: Instant,
    sides: [Side; 2],
    /// `wires[s]` leads from side `s` to the other.
    wires: [Wire; 2],
    ends: Vec<End>,
    graceful: bool,
}

#[derive(Clone, Debug)]
pub(crate) struct Config {
    pub(crate) buf_alloc: [u32; 2],
    pub(crate) first: u32,
    pub(crate) graceful: bool,
    pub(crate) caps: usize,
}

#[derive(Clone, Debug)]
pub(crate) enum Step {
    Connect {
        side: usize,
    },
    Transmit {
        side: usize,
        count: usize,
        max_payload: u32,
    },
    Arrive {
        side: usize,
        count: usize,
    },
    Events {
        side: usize,
        accept: bool,
    },
    Send {
        end: usize,
        len: u32,
    },
    Reserve {
        end: usize,
        max: u32,
    },
    Commit {
        end: usize,
        len: u32,
    },
    Cancel {
        end: usize,
    },
    SendNow {
        end: usize,
        len: u32,
    },
    Consume {
        end: usize,
        bytes: u32,
    },
    Buffer {
        end: usize,
        buf_alloc: u32,
    },
    Shutdown {
        end: usize,
        how: Directions,
    },
    Reset {
        end: usize,
    },
    Wait {
        millis: u64,
    },
    TransportReset,
}

impl World {
    fn new(config: &Config) -> World {
        let side = |mut shard_config: ShardConfig, buf_alloc| {
            shard_config.buf_alloc = buf_alloc;
            // Linux's limit, or one that makes tiny buffers usable.
            shard_config.send_limit = (buf_alloc < 1000).then_some(5000);
            shard_config.first_count = config.first;
            shard_config.max_connections = config.caps;
            shard_config.max_pending_resets = 4;
            shard_config.max_queued_sends = 8;
            shard_config.accept_all = true;
            if config.graceful {
                // A connect that times out may lose bytes.
                shard_config.connect_timeout = Duration::from_secs(3600);
            }
            let ports = Arc::new(PortTable::new());
            let shard = Shard::new(shard_config, ports.clone());
            Side {
                shard,
                ports,
                ends: Vec::new(),
                by_id: HashMap::new(),
            }
        };
        World {
            now: Instant::ZERO,
            sides: [
                side(ShardConfig::driver(GUEST), config.buf_alloc[0]),
                side(ShardConfig::device(GUEST), config.buf_alloc[1]),
            ],
            wires: [Wire::new(), Wire::new()],
            ends: Vec::new(),
            graceful: config.graceful,
        }
    }

    fn add_end(&mut self, side: usize, id: FlowId) -> usize {
        let end = self.ends.len();
        self.ends.push(End {
            id: Some(id),
            ..End::default()
        });
        self.sides[side].ends.push(end);
        assert!(
            self.sides[side].by_id.insert(id, end).is_none(),
            "id given out twice"
        );
        end
    }

    /// The end that a step's number means, if it is alive.
    fn pick(&self, end: usize) -> Option<(usize, usize, FlowId)> {
        let end = end % self.ends.len().max(1);
        let id = self.ends.get(end)?.id?;
        let side = usize::from(self.sides[1].ends.contains(&end));
        Some((end, side, id))
    }

    fn transmit(&mut self, side: usize, count: usize, max_payload: u32) {
        for _ in 0..count {
            let Some(packet) = self.sides[side].shard.poll_transmit(self.now, max_payload) else {
                return;
            };
            let tag = packet.span.map(|span| {
                let number = self.sides[side].by_id[&span.flow];
                let end = &mut self.ends[number];
                assert_eq!((span.message, span.offset), (end.message, end.offset));
                assert!(span.len > 0 && span.len <= max_payload);
                let front = end.queued.front_mut().unwrap();
                *front -= span.len;
                end.offset += span.len;
                if *front == 0 {
                    end.queued.pop_front();
                    end.message += 1;
                    end.offset = 0;
                }
                let at = end.sent;
                end.sent += u64::from(span.len);
                self.sides[side].shard.handle_released(span);
                (number, at)
            });
            self.wires[side].push_back((packet.header, tag));
        }
    }

    fn arrive(&mut self, side: usize, count: usize) {
        let other = 1 - side;
        for _ in 0..count {
            if self.sides[other].shard.is_backlogged() {
                return;
            }
            let Some((header, tag)) = self.wires[side].pop_front() else {
                return;
            };
            match self.sides[other].shard.handle_packet(self.now, &header) {
                Disposition::Deliver { flow, len, .. } => {
                    let (sender, at) = tag.expect("payload without a sender");
                    // The end of a connection that was accepted and not yet polled is not known
                    // here; nothing can have been sent to it.
                    let end = self.sides[other].by_id[&flow];
                    let end = &mut self.ends[end];
                    assert_eq!(
                        *end.peer.get_or_insert(sender),
                        sender,
                        "from another connection"
                    );
                    assert_eq!(end.received, at, "not the next byte");
                    assert_eq!(len, header.len);
                    assert!(!end.peer_send, "payload after the end");
                    end.received += u64::from(len);
                    end.unread += len;
                }
                Disposition::Part { .. } => panic!("a stream has no messages"),
                Disposition::Handled => {}
                Disposition::Dropped(reason) => {
                    assert!(
                        matches!(
                            reason,
                            DropReason::NoSocket
                                | DropReason::StrayReset
                                | DropReason::Unexpected
                                | DropReason::ReceiveShut
                                | DropReason::OverCap
                        ),
                        "{reason:?}: {header}"
                    );
                    assert!(
                        !self.graceful || header.len == 0,
                        "payload lost to {reason:?}: {header}"
                    );
                }
            }
        }
    }

    fn events(&mut self, side: usize, accept: bool) {
        while let Some(event) = self.sides[side].shard.poll_event() {
            match event {
                Event::Incoming { flow, .. } => {
                    let end = self.add_end(side, flow);
                    let shard = &mut self.sides[side].shard;
                    if accept || self.graceful {
                        // It may have ended since; an event reports that.
                        self.ends[end].connected = shard.accept(self.now, flow).is_ok();
                    } else {
                        let _ = shard.reject(flow);
                    }
                }
                Event::Connected { flow } => {
                    let end = self.sides[side].by_id[&flow];
                    self.ends[end].connected = true;
                }
                Event::PeerShutdown {
                    flow,
                    send,
                    receive,
                } => {
                    assert!(send || receive);
                    let end = self.sides[side].by_id[&flow];
                    self.ends[end].peer_send |= send;
                    if receive {
                        self.ends[end].queued.clear();
                    }
                }
                Event::Writable { .. } => {}
                Event::Refused { flow, .. } => self.ended(side, flow, false),
                Event::Closed { flow, reason } => self.ended(side, flow, reason.is_orderly()),
            }
        }
    }

    fn ended(&mut self, side: usize, flow: FlowId, orderly: bool) {
        let end = self.sides[side]
            .by_id
            .remove(&flow)
            .expect("ended twice, or never known");
        assert!(self.sides[side].shard.flow(flow).is_none());
        let end = &mut self.ends[end];
        assert_eq!(end.ended.replace(orderly), None);
        end.id = None;
        for reservation in end.held.drain(..) {
            assert!(self.sides[side].shard.commit(reservation, 1, 0).is_err());
        }
    }

    fn step(&mut self, step: &Step) {
        match *step {
            Step::Connect { side } => {
                let peer = Address::new([Cid::HOST, GUEST][side], Port::new(7));
                let any = Address::new(Cid::ANY, Port::ANY);
                let shard = &mut self.sides[side].shard;
                if let Ok(id) = shard.connect(self.now, any, peer, SocketType::Stream) {
                    self.add_end(side, id);
                }
            }
            Step::Transmit {
                side,
                count,
                max_payload,
            } => self.transmit(side, count, max_payload),
            Step::Arrive { side, count } => {
                // Ends of incoming connections must be known before payload.
                self.arrive(side, count);
            }
            Step::Events { side, accept } => self.events(side, accept),
            Step::Wait { millis } => {
                self.now += Duration::from_millis(millis);
                for side in &mut self.sides {
                    side.shard.handle_timeout(self.now);
                    assert!(side.shard.poll_timeout().is_none_or(|at| at > self.now));
                }
            }
            Step::TransportReset if !self.graceful => {
                for (side, wire) in self.sides.iter_mut().zip(&mut self.wires) {
                    side.shard.handle_transport_reset(self.now);
                    wire.clear();
                }
            }
            Step::TransportReset => {}
            Step::Send { end, .. }
            | Step::Reserve { end, .. }
            | Step::Commit { end, .. }
            | Step::Cancel { end }
            | Step::SendNow { end, .. }
            | Step::Consume { end, .. }
            | Step::Buffer { end, .. }
            | Step::Shutdown { end, .. }
            | Step::Reset { end } => {
                if let Some((number, side, id)) = self.pick(end) {
                    self.step_end(step, number, side, id);
                }
            }
        }
    }

    fn step_end(&mut self, step: &Step, number: usize, side: usize, id: FlowId) {
        let end = &mut self.ends[number];
        let shard = &mut self.sides[side].shard;
        match *step {
            Step::Send { len, .. } if shard.send(id, len, 0).is_ok() => end.queued.push_back(len),
            Step::Reserve { max, .. } => {
                if let Ok(reservation) = shard.reserve(id, max) {
                    assert!(reservation.len() <= max);
                    end.held.push(reservation);
                }
            }
            Step::Commit { len, .. } => {
                if let Some(reservation) = end.held.pop() {
                    let len = len % reservation.len() + 1;
                    if let Ok(header) = shard.commit(reservation, len, 0) {
                        self.wires[side].push_back((header, Some((number, end.sent))));
                        end.sent += u64::from(len);
                    }
                }
            }
            Step::Cancel { .. } => {
                if let Some(reservation) = end.held.pop() {
                    shard.cancel(reservation);
                }
            }
            Step::SendNow { len, .. } => {
                if let Ok(header) = shard.send_now(id, len, 0) {
                    assert!(header.len > 0 && header.len <= len);
                    self.wires[side].push_back((header, Some((number, end.sent))));
                    end.sent += u64::from(header.len);
                }
            }
            Step::Consume { bytes, .. } => {
                let bytes = bytes.min(end.unread);
                if shard.consume(id, bytes).is_ok() {
                    end.unread -= bytes;
                }
            }
            Step::Buffer { buf_alloc, .. } => {
                let _ = shard.set_buf_alloc(id, buf_alloc);
            }
            Step::Shutdown { how, .. } => {
                let how = if self.graceful { Directions::SEND } else { how };
                if shard.shutdown(self.now, id, how).is_ok() {
                    end.shut = end.shut.and(how);
                }
            }
            Step::Reset { .. } if !self.graceful => {
                shard.reset(id).ok();
            }
            _ => {}
        }
    }

    /// Every end reads all, sends all that is queued, and closes.
    fn finish(&mut self) {
        for round in 0.. {
            assert!(
                round < 20_000,
                "does not end: {:?}",
                self.sides.each_ref().map(|s| &s.shard)
            );
            for number in 0..self.ends.len() {
                let Some((_, side, id)) = self.pick(number) else {
                    continue;
                };
                let end = &mut self.ends[number];
                let shard = &mut self.sides[side].shard;
                for reservation in end.held.drain(..) {
                    shard.cancel(reservation);
                }
                // Buffers may have shrunk to nothing; growing lets it end.
                if round == 50 {
                    let _ = shard.set_buf_alloc(id, 65536);
                }
                if end.unread > 0 && shard.consume(id, end.unread).is_ok() {
                    end.unread = 0;
                }
                if end.connected
                    && !end.shut.send
                    && shard.shutdown(self.now, id, Directions::SEND).is_ok()
                {
                    end.shut = end.shut.and(Directions::SEND);
                }
                let over = end.peer_send || !self.graceful;
                if over && end.queued.is_empty() {
                    // Stale when it has ended meanwhile.
                    let _ = shard.shutdown(self.now, id, Directions::BOTH);
                }
            }
            let mut moved = false;
            for side in 0..2 {
                self.transmit(side, 64, 4000);
                moved |= !self.wires[side].is_empty();
                self.arrive(side, 64);
                self.events(side, true);
            }
            if self.sides.iter().all(|side| side.shard.occupied() == 0) && !moved {
                return;
            }
            if !moved {
                let next = self
                    .sides
                    .iter()
                    .filter_map(|side| side.shard.poll_timeout())
                    .min();
                if let Some(next) = next {
                    self.now = self.now.max(next);
                }
                for side in &mut self.sides {
                    side.shard.handle_timeout(self.now);
                }
            }
        }
    }

    fn check(&self) {
        for side in &self.sides {
            let shard = &side.shard;
            assert_eq!((shard.connections(), shard.occupied()), (0, 0));
            assert_eq!(shard.held_ports(), 0);
            assert!(!shard.has_transmit() && shard.poll_timeout().is_none());
            assert!(side.ports.is_empty() && side.by_id.is_empty());
            let stats = shard.stats();
            assert_eq!(stats.opened, stats.closed);
            assert_eq!(
                (stats.credit_exceeded, stats.bad_fwd_cnt, stats.resets_lost),
                (0, 0, 0)
            );
            assert_eq!((stats.protocol_errors, stats.wrong_type), (0, 0));
        }
        for (number, end) in self.ends.iter().enumerate() {
            assert!(end.ended.is_some());
            let receiver = self.ends.iter().find(|other| other.peer == Some(number));
            let received = receiver.map_or(0, |receiver| receiver.received);
            assert!(received <= end.sent);
            if self.graceful && end.connected {
                assert_eq!(received, end.sent, "bytes lost");
                assert!(end.queued.is_empty(), "bytes never sent");
            }
        }
    }
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let side = 0usize..2;
    let end = 0usize..12;
    let how = prop_oneof![
        Just(Directions::RECEIVE),
        Just(Directions::SEND),
        Just(Directions::BOTH)
    ];
    let len = prop_oneof![1u32..20, 1u32..3000, 60_000u32..90_000];
    let step = prop_oneof![
        3 => side.clone().prop_map(|side| Step::Connect { side }),
        12 => (side.clone(), 1usize..8, prop_oneof![Just(0u32), 1u32..2000, Just(65536)])
            .prop_map(|(side, count, max_payload)| Step::Transmit { side, count, max_payload }),
        12 => (side.clone(), 1usize..8).prop_map(|(side, count)| Step::Arrive { side, count }),
        8 => (side, prop::bool::weighted(0.9))
            .prop_map(|(side, accept)| Step::Events { side, accept }),
        6 => (end.clone(), len.clone()).prop_map(|(end, len)| Step::Send { end, len }),
        6 => (end.clone(), len.clone()).prop_map(|(end, max)| Step::Reserve { end, max }),
        6 => (end.clone(), len.clone()).prop_map(|(end, len)| Step::Commit { end, len }),
        1 => end.clone().prop_map(|end| Step::Cancel { end }),
        6 => (end.clone(), len.clone()).prop_map(|(end, len)| Step::SendNow { end, len }),
        10 => (end.clone(), len).prop_map(|(end, bytes)| Step::Consume { end, bytes }),
        1 => (end.clone(), 0u32..4000).prop_map(|(end, buf_alloc)| Step::Buffer { end, buf_alloc }),
        1 => (end.clone(), how).prop_map(|(end, how)| Step::Shutdown { end, how }),
        1 => end.prop_map(|end| Step::Reset { end }),
        1 => (0u64..1000).prop_map(|millis| Step::Wait { millis }),
    ];
    let reset = prop_oneof![200 => step, 1 => Just(Step::TransportReset)];
    prop::collection::vec(reset, 1..250)
}

fn config(graceful: bool) -> impl Strategy<Value = Config> {
    let buf_alloc = prop_oneof![1u32..64, 1u32..5000, Just(65536), Just(262144)];
    let first = prop_oneof![Just(0u32), (u32::MAX - 3000)..];
    ([buf_alloc.clone(), buf_alloc], first, 1usize..10).prop_map(move |(buf_alloc, first, caps)| {
        Config {
            buf_alloc,
            first,
            graceful,
            caps,
        }
    })
}

pub(crate) fn run(config: &Config, steps: &[Step]) {
    let mut world = World::new(config);
    for step in steps {
        world.step(step);
        for side in &world.sides {
            assert!(side.shard.occupied() <= config.caps);
        }
    }
    world.finish();
    world.check();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..Default::default() })]

    /// Without resets, and with half-closes, no byte is lost.
    #[test]
    fn without_resets_all_bytes_arrive(config in config(true), steps in steps()) {
        run(&config, &steps);
    }

    /// Resets, rejections, shutdowns of any kind and transport resets at any
    /// time: bytes arrive in order or not at all, and everything ends.
    #[test]
    fn with_resets_bytes_arrive_in_order_and_all_connections_end(config in config(false), steps in steps()) {
        run(&config, &steps);
    }
}
