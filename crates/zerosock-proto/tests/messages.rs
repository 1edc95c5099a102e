//! Two shards, random messages, parts and credit: the messages received equal those sent.

use std::collections::VecDeque;
use std::sync::Arc;

use proptest::prelude::*;
use zerosock_proto::vsock::{
    Disposition, Event, FlowId, MessageReservation, PortTable, ReserveError, Shard, ShardConfig,
};
use zerosock_proto::wire::vsock::{Repr, SEQ_EOM, SEQ_EOR, SocketType};
use zerosock_proto::{Address, Cid, Duration, Instant, Port};

const GUEST: Cid = Cid::new(3);

#[derive(Clone, Debug)]
enum Step {
    /// Reserves a message of so many bytes, or queues it.
    Send {
        side: usize,
        len: u32,
        eor: bool,
        queued: bool,
    },
    /// Sends parts of a reserved message.
    Parts {
        side: usize,
        count: usize,
        most: u32,
    },
    /// Cancels a message that was not begun.
    GiveUp {
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
    /// Reads messages.
    Read {
        side: usize,
        count: usize,
    },
    Wait {
        millis: u64,
    },
}

/// A message: its length and whether a record ends with it.
type Message = (u32, bool);

struct Side {
    shard: Shard,
    flow: FlowId,
    /// Reserved, with the length; perhaps begun.
    reservation: Option<(MessageReservation, Message)>,
    begun: bool,
    /// Messages sent, in order.
    sent: VecDeque<Message>,
    queued: VecDeque<Message>,
    /// Bytes received of an incomplete message.
    half: u32,
    unread: VecDeque<Message>,
    most: u32,
}

struct World {
    now: Instant,
    sides: [Side; 2],
    wires: [VecDeque<Repr>; 2],
}

fn world(buf_alloc: [u32; 2], first_count: u32) -> World {
    let shard = |mut config: ShardConfig, buf_alloc| {
        config.buf_alloc = buf_alloc;
        config.first_count = first_count;
        config.max_queued_sends = 4;
        config.accept_all = true;
        let mut shard = Shard::new(config, Arc::new(PortTable::new()));
        shard.set_seqpacket(true);
        shard
    };
    let now = Instant::ZERO;
    let mut guest = shard(ShardConfig::driver(GUEST), buf_alloc[0]);
    let mut host = shard(ShardConfig::device(GUEST), buf_alloc[1]);
    let any = Address::new(Cid::ANY, Port::ANY);
    let to = Address::new(Cid::HOST, Port::new(1));
    let ours = guest.connect(now, any, to, SocketType::SeqPacket).unwrap();
    let request = guest.poll_transmit(now, 0).unwrap();
    assert_eq!(
        host.handle_packet(now, &request.header),
        Disposition::Handled
    );
    let Some(Event::Incoming { flow, .. }) = host.poll_event() else {
        panic!("no request");
    };
    host.accept(now, flow).unwrap();
    let answer = host.poll_transmit(now, 0).unwrap();
    assert_eq!(
        guest.handle_packet(now, &answer.header),
        Disposition::Handled
    );
    let most = buf_alloc[0].min(buf_alloc[1]);
    let side = |shard, flow| Side {
        shard,
        flow,
        reservation: None,
        begun: false,
        sent: VecDeque::new(),
        queued: VecDeque::new(),
        half: 0,
        unread: VecDeque::new(),
        most,
    };
    World {
        now,
        sides: [side(guest, ours), side(host, flow)],
        wires: Default::default(),
    }
}

impl World {
    fn step(&mut self, step: &Step) {
        match *step {
            Step::Send {
                side,
                len,
                eor,
                queued,
            } => {
                let of = &mut self.sides[side];
                if queued {
                    let flags = SEQ_EOM | if eor { SEQ_EOR } else { 0 };
                    if of.reservation.is_none()
                        && len > 0
                        && of.shard.send(of.flow, len, flags).is_ok()
                    {
                        of.queued.push_back((len, eor));
                    }
                } else if of.reservation.is_none() {
                    match of.shard.reserve_message(of.flow, len) {
                        Ok(reservation) => of.reservation = Some((reservation, (len, eor))),
                        Err(ReserveError::TooLong) => assert!(len > of.most),
                        Err(ReserveError::NoCredit) => assert!(len <= of.most),
                        Err(error) => panic!("{error}"),
                    }
                }
            }
            Step::Parts { side, count, most } => {
                for _ in 0..count {
                    let of = &mut self.sides[side];
                    let Some((reservation, message)) = &mut of.reservation else {
                        break;
                    };
                    let part = reservation.remaining().min(most);
                    let end = (part == reservation.remaining()).then_some(if message.1 {
                        SEQ_EOR
                    } else {
                        0
                    });
                    let message = *message;
                    let header = of.shard.commit_part(reservation, part, end).unwrap();
                    if !of.begun {
                        of.sent.push_back(message);
                    }
                    of.begun = end.is_none();
                    if end.is_some() {
                        of.reservation = None;
                    }
                    self.wires[side].push_back(header);
                }
            }
            Step::GiveUp { side } => {
                let of = &mut self.sides[side];
                if !of.begun
                    && let Some((reservation, _)) = of.reservation.take()
                {
                    of.shard.cancel_message(reservation);
                }
            }
            Step::Transmit {
                side,
                count,
                max_payload,
            } => {
                let of = &mut self.sides[side];
                for _ in 0..count {
                    let Some(packet) = of.shard.poll_transmit(self.now, max_payload) else {
                        break;
                    };
                    if let Some(span) = packet.span {
                        if span.offset == 0 {
                            of.sent.extend(of.queued.pop_front());
                        }
                        of.shard.handle_released(span);
                    }
                    self.wires[side].push_back(packet.header);
                }
            }
            Step::Arrive { side, count } => {
                for _ in 0..count {
                    let Some(header) = self.wires[1 - side].pop_front() else {
                        break;
                    };
                    let of = &mut self.sides[side];
                    match of.shard.handle_packet(self.now, &header) {
                        Disposition::Part { flow, len, flags } => {
                            assert_eq!((flow, len), (of.flow, header.len));
                            of.half += len;
                            if flags & SEQ_EOM != 0 {
                                let eor = flags & SEQ_EOR != 0;
                                of.unread.push_back((std::mem::take(&mut of.half), eor));
                            }
                        }
                        Disposition::Handled => {}
                        other => panic!("{other:?}: {header}"),
                    }
                }
            }
            Step::Read { side, count } => self.read(side, count),
            Step::Wait { millis } => {
                self.now += Duration::from_millis(millis);
                for side in &mut self.sides {
                    side.shard.handle_timeout(self.now);
                }
            }
        }
        for side in &mut self.sides {
            while side.shard.poll_event().is_some() {}
        }
    }

    fn read(&mut self, side: usize, count: usize) {
        for _ in 0..count {
            let Some(message) = self.sides[side].unread.pop_front() else {
                return;
            };
            let expected = self.sides[1 - side].sent.pop_front();
            assert_eq!(Some(message), expected, "not the message that was sent");
            let of = &mut self.sides[side];
            match message.0 {
                0 => of.shard.consume_empty(of.flow, 1).unwrap(),
                len => of.shard.consume(of.flow, len).unwrap(),
            }
        }
    }

    /// Completes every message; all arrive and are read.
    fn finish(&mut self) {
        for round in 0..20_000 {
            let mut moved = false;
            for side in 0..2 {
                self.step(&Step::Parts {
                    side,
                    count: 9,
                    most: 65_536,
                });
                self.step(&Step::Transmit {
                    side,
                    count: 64,
                    max_payload: 4000,
                });
                moved |= !self.wires[side].is_empty();
            }
            for side in 0..2 {
                self.step(&Step::Arrive { side, count: 64 });
                moved |= !self.sides[side].unread.is_empty();
                self.step(&Step::Read { side, count: 64 });
            }
            let done = |side: &Side| {
                side.sent.is_empty() && side.queued.is_empty() && side.reservation.is_none()
            };
            if !moved && self.sides.iter().all(done) {
                return;
            }
            if !moved {
                self.step(&Step::Wait { millis: 100 });
            }
            assert!(round < 19_999, "messages that never arrive");
        }
    }
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let side = 0usize..2;
    let len = prop_oneof![Just(0u32), 0u32..20, 0u32..3000, 60_000u32..90_000];
    let most = prop_oneof![1u32..30, 1u32..3000, Just(65_536)];
    let step = prop_oneof![
        8 => (side.clone(), len, any::<bool>(), prop::bool::weighted(0.3))
            .prop_map(|(side, len, eor, queued)| Step::Send { side, len, eor, queued }),
        9 => (side.clone(), 1usize..6, most)
            .prop_map(|(side, count, most)| Step::Parts { side, count, most }),
        1 => side.clone().prop_map(|side| Step::GiveUp { side }),
        6 => (side.clone(), 1usize..8, prop_oneof![Just(0u32), 1u32..2000, Just(65_536)])
            .prop_map(|(side, count, max_payload)| Step::Transmit { side, count, max_payload }),
        9 => (side.clone(), 1usize..8).prop_map(|(side, count)| Step::Arrive { side, count }),
        6 => (side, 1usize..5).prop_map(|(side, count)| Step::Read { side, count }),
        1 => (0u64..1000).prop_map(|millis| Step::Wait { millis }),
    ];
    prop::collection::vec(step, 1..250)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..Default::default() })]

    #[test]
    fn received_messages_equal_sent_ones(
        one in prop_oneof![1u32..64, 1u32..5000, Just(65_536u32), Just(262_144)],
        other in prop_oneof![1u32..64, 1u32..5000, Just(65_536u32), Just(262_144)],
        first_count in prop_oneof![Just(0u32), (u32::MAX - 3000)..],
        steps in steps(),
    ) {
        let mut world = world([one, other], first_count);
        for step in &steps {
            world.step(step);
        }
        world.finish();
        for side in &world.sides {
            let stats = side.shard.stats();
            prop_assert_eq!(
                (stats.credit_exceeded, stats.message_too_long, stats.message_flood),
                (0, 0, 0)
            );
            prop_assert!(side.shard.flow(side.flow).is_some());
        }
    }
}
