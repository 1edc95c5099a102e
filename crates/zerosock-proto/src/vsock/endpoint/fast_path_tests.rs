//! Runs the fast path and the slow path side by side: every result is the same, and so is every
//! field of the state, whatever callers and peers do.

use proptest::prelude::*;

use super::*;
use crate::addr::{Address, Port};
use crate::time::Duration;
use crate::vsock::connection::Reservation;
use crate::vsock::state::Directions;
use crate::vsock::{Disposition, Event};
use crate::wire::vsock::{SEQ_EOM, SEQ_EOR};

const GUEST: Cid = Cid::new(3);

#[derive(Clone, Debug)]
enum Step {
    Reserve { end: usize, max: u32 },
    Commit { end: usize, len: u32, flags: u32 },
    Cancel { end: usize },
    SendNow { end: usize, len: u32, flags: u32 },
    Send { end: usize, len: u32 },
    Coalesce { end: usize, len: u32 },
    FlushCoalesced { end: usize },
    SetCoalescing { end: usize, on: bool },
    Message { end: usize, len: u32, most: u32 },
    MessageNow { end: usize, len: u32, flags: u32 },
    Consume { end: usize, bytes: u32 },
    Buffer { end: usize, buf_alloc: u32 },
    Shutdown { end: usize, how: Directions },
    Reset { end: usize },
    Transmit { side: usize, count: usize },
    Deliver { side: usize, count: usize },
    Forge { end: usize, header: Repr },
    Events { side: usize },
    Wait { millis: u64 },
}

/// One end of a connection, as its caller and its peer know it.
struct End {
    side: usize,
    flow: FlowId,
    local: Address,
    peer: Address,
    held: Vec<Reservation>,
}

struct World {
    now: Instant,
    /// The guest and the host.
    shards: [Shard; 2],
    /// Headers sent by each.
    wires: [VecDeque<Repr>; 2],
    ends: Vec<End>,
}

impl World {
    /// Two connections, a STREAM and a SEQPACKET one.
    fn new(detour: bool, buf_alloc: [u32; 2], first_count: u32) -> World {
        let shard = |mut config: ShardConfig, buf_alloc| {
            config.buf_alloc = buf_alloc;
            config.send_limit = Some(200_000);
            config.first_count = first_count;
            config.max_queued_sends = 4;
            config.accept_all = true;
            let mut shard = Shard::new(config, Arc::new(PortTable::new()));
            shard.set_seqpacket(true);
            shard.slow_path_only = detour;
            shard
        };
        let mut world = World {
            now: Instant::ZERO,
            shards: [
                shard(ShardConfig::driver(GUEST), buf_alloc[0]),
                shard(ShardConfig::device(GUEST), buf_alloc[1]),
            ],
            wires: Default::default(),
            ends: Vec::new(),
        };
        for (port, socket_type) in [(1, SocketType::Stream), (2, SocketType::SeqPacket)] {
            let local = Address::new(GUEST, Port::new(1024));
            let peer = Address::new(Cid::HOST, Port::new(port));
            let flow = world.shards[0]
                .connect(world.now, local, peer, socket_type)
                .unwrap();
            world.add_end(0, flow, local, peer);
            world.transmit(0, 9);
            world.deliver(0, 9);
            let Some(Event::Incoming { flow, .. }) = world.shards[1].poll_event() else {
                panic!()
            };
            world.shards[1].accept(world.now, flow).unwrap();
            world.add_end(1, flow, peer, local);
        }
        world
    }

    fn add_end(&mut self, side: usize, flow: FlowId, local: Address, peer: Address) {
        self.ends.push(End {
            side,
            flow,
            local,
            peer,
            held: Vec::new(),
        });
    }

    fn transmit(&mut self, side: usize, count: usize) -> String {
        let mut output = String::new();
        for _ in 0..count {
            let Some(packet) = self.shards[side].poll_transmit(self.now, 3000) else {
                break;
            };
            output += &format!("{packet:?}");
            self.wires[side].push_back(packet.header);
        }
        output
    }

    fn deliver(&mut self, side: usize, count: usize) -> Vec<Disposition> {
        let Self {
            wires, shards, now, ..
        } = self;
        let headers = wires[side].drain(..count.min(wires[side].len()));
        headers
            .map(|header| shards[1 - side].handle_packet(*now, &header))
            .collect()
    }

    /// The results that the caller of the step gets.
    fn step(&mut self, step: &Step) -> String {
        let now = self.now;
        match *step {
            Step::Transmit { side, count } => return self.transmit(side, count),
            Step::Deliver { side, count } => return format!("{:?}", self.deliver(side, count)),
            Step::Events { side } => {
                let shard = &mut self.shards[side];
                let events: Vec<Event> = core::iter::from_fn(|| shard.poll_event()).collect();
                return format!("{events:?}");
            }
            Step::Wait { millis } => {
                self.now += Duration::from_millis(millis);
                for shard in &mut self.shards {
                    shard.handle_timeout(self.now);
                }
                return String::new();
            }
            _ => {}
        }
        let (Step::Reserve { end, .. }
        | Step::Commit { end, .. }
        | Step::Cancel { end }
        | Step::SendNow { end, .. }
        | Step::Send { end, .. }
        | Step::Coalesce { end, .. }
        | Step::FlushCoalesced { end }
        | Step::SetCoalescing { end, .. }
        | Step::Message { end, .. }
        | Step::MessageNow { end, .. }
        | Step::Consume { end, .. }
        | Step::Buffer { end, .. }
        | Step::Shutdown { end, .. }
        | Step::Reset { end }
        | Step::Forge { end, .. }) = *step
        else {
            unreachable!()
        };
        let End {
            side,
            flow,
            local,
            peer,
            ref mut held,
        } = self.ends[end];
        let shard = &mut self.shards[side];
        match *step {
            Step::Reserve { max, .. } => {
                let result = shard.reserve(flow, max);
                let output = format!("{result:?}");
                held.extend(result);
                output
            }
            Step::Commit { len, flags, .. } => {
                let Some(reservation) = held.pop() else {
                    return String::new();
                };
                // A few are invalid.
                let len = if len % 50 == 0 {
                    len
                } else {
                    len % reservation.len() + 1
                };
                let result = shard.commit(reservation, len, flags);
                self.wires[side].extend(result);
                format!("{result:?}")
            }
            Step::Cancel { .. } => {
                if let Some(reservation) = held.pop() {
                    shard.cancel(reservation);
                }
                String::new()
            }
            Step::SendNow { len, flags, .. } => {
                let result = shard.send_now(flow, len, flags);
                self.wires[side].extend(result);
                format!("{result:?}")
            }
            Step::Send { len, .. } => format!("{:?}", shard.send(flow, len, 0)),
            Step::Coalesce { len, .. } => format!("{:?}", shard.coalesce(flow, len)),
            Step::FlushCoalesced { .. } => format!("{:?}", shard.flush_coalesced(flow)),
            Step::SetCoalescing { on, .. } => format!("{:?}", shard.set_coalescing(flow, on)),
            Step::Message { len, most, .. } => {
                let result = shard.reserve_message(flow, len);
                let output = format!("{result:?} {}", shard.can_reserve_message(flow));
                let Ok(mut reservation) = result else {
                    return output;
                };
                loop {
                    let part = reservation.remaining().min(most);
                    let end = (part == reservation.remaining()).then_some(0);
                    let header = shard.commit_part(&mut reservation, part, end);
                    self.wires[side].extend(header);
                    if end.is_some() || header.is_err() {
                        return output + &format!("{header:?}");
                    }
                }
            }
            Step::MessageNow { len, flags, .. } => {
                let whole = SEQ_EOM | flags & SEQ_EOR;
                let header = match shard.send_whole_now(flow, len, whole) {
                    Some(header) => header,
                    None => match shard.reserve_message(flow, len) {
                        Ok(mut room) => match shard.commit_part(&mut room, len, Some(flags)) {
                            Ok(header) => header,
                            Err(error) => return format!("{error:?}"),
                        },
                        Err(error) => return format!("{error:?}"),
                    },
                };
                self.wires[side].push_back(header);
                format!("{header:?}")
            }
            Step::Consume { bytes, .. } => {
                // Mostly as much as can be consumed.
                let unread = shard.flow(flow).map_or(0, |info| info.unread);
                let bytes = match bytes % 8 {
                    0 => bytes,
                    1..=3 => unread,
                    _ => bytes.min(unread),
                };
                format!("{:?}", shard.consume(flow, bytes))
            }
            Step::Buffer { buf_alloc, .. } => format!("{:?}", shard.set_buf_alloc(flow, buf_alloc)),
            Step::Shutdown { how, .. } => format!("{:?}", shard.shutdown(now, flow, how)),
            Step::Reset { .. } => format!("{:?}", shard.reset(flow)),
            Step::Forge { mut header, .. } => {
                (header.src, header.dst) = (peer, local);
                format!("{:?}", shard.handle_packet(now, &header))
            }
            _ => unreachable!(),
        }
    }

    fn state(&self) -> String {
        let state = |shard: &Shard| {
            let lists = (&shard.control, &shard.data, &shard.events);
            let rest = (&shard.timers, &shard.resets, &shard.stats);
            format!("{:?} {lists:?} {rest:?}", shard.table.slots)
        };
        format!("{}\n{}", state(&self.shards[0]), state(&self.shards[1]))
    }
}

fn forged() -> impl Strategy<Value = Repr> {
    let nobody = Address::new(Cid::ANY, Port::ANY);
    let op = prop_oneof![10 => Just(5u16), 1 => 0u16..9];
    let socket_type = prop_oneof![20 => 1u16..3, 1 => 0u16..5];
    let len = prop_oneof![1u32..200, 0u32..3, 0u32..65537];
    let count = prop_oneof![0u32..3000, (u32::MAX - 3000)..];
    (op, socket_type, len, 0u32..4, 0u32..9000, count).prop_map(
        move |(op, socket_type, len, flags, buf_alloc, fwd_cnt)| Repr {
            src: nobody,
            dst: nobody,
            len,
            socket_type: socket_type.into(),
            op: op.into(),
            flags,
            buf_alloc,
            fwd_cnt,
        },
    )
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let (end, side) = (0usize..4, 0usize..2);
    let len = prop_oneof![1u32..200, 1u32..200, 1u32..3000, 0u32..90_000];
    let flags = prop_oneof![
        Just(0),
        Just(SEQ_EOM),
        Just(SEQ_EOM | SEQ_EOR),
        any::<u32>()
    ];
    let how = prop_oneof![
        Just(Directions::RECEIVE),
        Just(Directions::SEND),
        Just(Directions::BOTH)
    ];
    let step = prop_oneof![
        9 => (end.clone(), len.clone()).prop_map(|(end, max)| Step::Reserve { end, max }),
        9 => (end.clone(), len.clone(), flags.clone())
            .prop_map(|(end, len, flags)| Step::Commit { end, len, flags }),
        1 => end.clone().prop_map(|end| Step::Cancel { end }),
        12 => (end.clone(), len.clone(), flags.clone())
            .prop_map(|(end, len, flags)| Step::SendNow { end, len, flags }),
        6 => (end.clone(), len.clone(), flags)
            .prop_map(|(end, len, flags)| Step::MessageNow { end, len, flags }),
        2 => (end.clone(), len.clone()).prop_map(|(end, len)| Step::Send { end, len }),
        4 => (end.clone(), len.clone()).prop_map(|(end, len)| Step::Coalesce { end, len }),
        1 => end.clone().prop_map(|end| Step::FlushCoalesced { end }),
        1 => (end.clone(), any::<bool>()).prop_map(|(end, on)| Step::SetCoalescing { end, on }),
        6 => (end.clone(), len.clone(), 1u32..9000)
            .prop_map(|(end, len, most)| Step::Message { end, len, most }),
        15 => (end.clone(), len).prop_map(|(end, bytes)| Step::Consume { end, bytes }),
        1 => (end.clone(), 0u32..9000).prop_map(|(end, buf_alloc)| Step::Buffer { end, buf_alloc }),
        15 => (side.clone(), 1usize..6).prop_map(|(side, count)| Step::Deliver { side, count }),
        6 => (side.clone(), 1usize..6).prop_map(|(side, count)| Step::Transmit { side, count }),
        4 => side.prop_map(|side| Step::Events { side }),
        1 => (0u64..1000).prop_map(|millis| Step::Wait { millis }),
    ];
    let rare = prop_oneof![
        (end.clone(), how).prop_map(|(end, how)| Step::Shutdown { end, how }),
        (end.clone(), forged()).prop_map(|(end, header)| Step::Forge { end, header }),
        end.prop_map(|end| Step::Reset { end }),
    ];
    (
        prop_oneof![Just(0u32), Just(1), Just(8)],
        prop::collection::vec((0u32..100, step, rare), 1..200),
    )
        .prop_map(|(rate, steps)| {
            let pick = |(dice, step, rare)| if dice < rate { rare } else { step };
            steps.into_iter().map(pick).collect()
        })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..Default::default() })]

    #[test]
    fn fast_path_and_slow_path_agree(
        buf_alloc in prop_oneof![Just(262_144u32), 1u32..9000, Just(65_536)],
        other in prop_oneof![Just(262_144u32), 1u32..9000],
        first_count in prop_oneof![Just(0u32), (u32::MAX - 3000)..],
        steps in steps(),
    ) {
        let world = |detour| World::new(detour, [buf_alloc, other], first_count);
        let (mut straight, mut long) = (world(false), world(true));
        for step in &steps {
            prop_assert_eq!(straight.step(step), long.step(step), "{:?}", step);
            prop_assert_eq!(straight.state(), long.state(), "{:?}", step);
        }
    }
}
