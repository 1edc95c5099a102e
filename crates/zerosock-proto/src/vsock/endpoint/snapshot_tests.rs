//! Any state survives: a world in which shards are replaced by successors that restore them behaves as its twin
//! does. And hostile snapshots.

use proptest::prelude::*;
use std::collections::VecDeque;
use std::sync::Arc;

use super::*;
use crate::addr::Port;
use crate::time::Duration;
use crate::vsock::connection::{MessageReservation, Reservation};
use crate::vsock::event::{Event, Span};
use crate::vsock::state::Directions;
use crate::vsock::{CommitError, PortTable, ShardConfig};
use crate::wire::vsock::{Op, Repr, SEQ_EOM, SocketType};

const GUEST: Cid = Cid::new(3);
const MOST: usize = 6;
/// The port with a listener.
const SERVICE: u32 = 1;

#[derive(Clone, Debug)]
enum Step {
    Connect { from: u32, to: u32, message: bool },
    Accept(usize),
    Reject(usize),
    Reserve(usize, u32),
    Commit(u32),
    SendNow(usize, u32),
    Send(usize, u32),
    Coalesce(usize, u32),
    FlushCoalesced(usize),
    SetCoalescing(usize, bool),
    ShouldDelay(usize, u32),
    BeginMessage(usize, u32),
    ContinueMessage(u32),
    Consume(usize, u32),
    ConsumeEmpty(usize),
    SetBuffer(usize, u32),
    SetLowWater(usize, u32),
    RequestProgress(usize),
    Shutdown(usize, Directions),
    Reset(usize),
    Transmit(usize),
    Release,
    Deliver(usize),
    Forge(usize, Repr),
    Events,
    Wait(u64),
    Replace,
}

/// A shard and its caller.
struct Side {
    shard: Shard,
    config: ShardConfig,
    /// All connections in the order in which the caller learned of them; `None`: the id has no meaning any more.
    flows: Vec<Option<FlowId>>,
    reservations: Vec<Reservation>,
    message: Option<MessageReservation>,
    spans: VecDeque<Span>,
    /// Headers on their way to the other side.
    wire: VecDeque<Repr>,
}

struct World {
    now: Instant,
    sides: [Side; 2],
    /// Whether [`Step::Replace`] does what it says.
    replaces: bool,
}

fn with_config(config: &ShardConfig) -> Shard {
    let mut shard = Shard::new(config.clone(), Arc::new(PortTable::new()));
    shard.listen(Port::new(SERVICE), 1).unwrap();
    shard
}

impl World {
    fn new(replaces: bool, buf_alloc: [u32; 2], first_count: u32) -> World {
        let side = |mut config: ShardConfig, buf_alloc| {
            config.buf_alloc = buf_alloc;
            config.send_limit = Some(200_000);
            config.first_count = first_count;
            config.max_queued_sends = 4;
            config.max_connections = MOST;
            let mut shard = with_config(&config);
            shard.set_seqpacket(true);
            shard.set_declines_moves(Some(1));
            Side {
                shard,
                config,
                flows: Vec::new(),
                reservations: Vec::new(),
                message: None,
                spans: VecDeque::new(),
                wire: VecDeque::new(),
            }
        };
        World {
            now: Instant::ZERO,
            sides: [
                side(ShardConfig::driver(GUEST), buf_alloc[0]),
                side(ShardConfig::device(GUEST), buf_alloc[1]),
            ],
            replaces,
        }
    }

    /// The results that the caller gets.
    fn step(&mut self, side: usize, step: &Step) -> String {
        // No two timers are due at the same time.
        self.now += Duration::from_nanos(1);
        let output = self.run(side, step);
        self.with_names(side, output)
    }

    /// Ids depend on slots, which a successor assigns anew.
    fn with_names(&self, side: usize, output: String) -> String {
        let flows = (0..).zip(&self.sides[side].flows);
        flows.fold(output, |output, (name, flow)| match flow {
            Some(flow) => output.replace(&format!("{flow:?}"), &format!("#{name}")),
            None => output,
        })
    }

    fn run(&mut self, side: usize, step: &Step) -> String {
        match *step {
            Step::Replace => return self.replace(side),
            Step::Transmit(count) => return self.transmit(side, count),
            Step::Deliver(count) => return self.deliver(1 - side, count),
            Step::Wait(millis) => {
                self.now += Duration::from_millis(millis);
                for side in &mut self.sides {
                    side.shard.handle_timeout(self.now);
                }
                return String::new();
            }
            _ => {}
        }
        let (now, cid) = (self.now, [GUEST, Cid::HOST]);
        let (own, other) = (cid[side], cid[1 - side]);
        let of = &mut self.sides[side];
        let picked = |number: usize| {
            let count = of.flows.len().clamp(1, 4);
            *of.flows.iter().rev().nth(number % count)?
        };
        let flow = match *step {
            Step::Accept(flow)
            | Step::Reject(flow)
            | Step::Reserve(flow, _)
            | Step::SendNow(flow, _)
            | Step::Send(flow, _)
            | Step::Coalesce(flow, _)
            | Step::FlushCoalesced(flow)
            | Step::SetCoalescing(flow, _)
            | Step::ShouldDelay(flow, _)
            | Step::BeginMessage(flow, _)
            | Step::Consume(flow, _)
            | Step::ConsumeEmpty(flow)
            | Step::SetBuffer(flow, _)
            | Step::SetLowWater(flow, _)
            | Step::RequestProgress(flow)
            | Step::Shutdown(flow, _)
            | Step::Reset(flow)
            | Step::Forge(flow, _) => picked(flow),
            _ => None,
        };
        let nobody = FlowId {
            index: u32::MAX,
            generation: 0,
        };
        let flow = flow.unwrap_or(nobody);
        let shard = &mut of.shard;
        let info = shard.flow(flow);
        let has_messages = info.is_some_and(|it| it.socket_type == SocketType::SeqPacket);
        match *step {
            Step::Connect { from, to, message } => {
                let (from, to) = (Port::new(1000 + from), Port::new(to));
                let kind = match message {
                    true => SocketType::SeqPacket,
                    false => SocketType::Stream,
                };
                let result =
                    shard.connect(now, Address::new(own, from), Address::new(other, to), kind);
                of.flows.extend(result.ok().map(Some));
                format!("{result:?}")
            }
            Step::Accept(_) => format!("{:?}", shard.accept(now, flow)),
            Step::Reject(_) => format!("{:?}", shard.reject(flow)),
            Step::Reserve(_, max) if !has_messages => {
                let result = shard.reserve(flow, max);
                let output = format!("{result:?}");
                of.reservations.extend(result);
                output
            }
            Step::Reserve(..) => String::new(),
            Step::Commit(len) => match of.reservations.pop() {
                Some(reservation) => {
                    let len = len % (reservation.len() + 1);
                    let result = shard.commit(reservation, len, 0);
                    of.wire.extend(result);
                    format!("{result:?}")
                }
                None => String::new(),
            },
            Step::SendNow(_, len) => {
                let result = shard.send_now(flow, len, SEQ_EOM);
                of.wire.extend(result);
                format!("{result:?}")
            }
            Step::Send(_, len) => format!("{:?}", shard.send(flow, len, SEQ_EOM)),
            Step::Coalesce(_, len) => format!("{:?}", shard.coalesce(flow, len)),
            Step::FlushCoalesced(_) => format!("{:?}", shard.flush_coalesced(flow)),
            Step::SetCoalescing(_, on) => format!("{:?}", shard.set_coalescing(flow, on)),
            Step::ShouldDelay(_, bytes) => format!("{:?}", shard.should_delay(flow, bytes)),
            Step::BeginMessage(_, len) if of.message.is_none() => {
                let result = shard.reserve_message(flow, len);
                let output = format!("{result:?}");
                of.message = result.ok();
                output
            }
            Step::BeginMessage(..) => String::new(),
            Step::ContinueMessage(most) => {
                let Some(message) = &mut of.message else {
                    return String::new();
                };
                let part = message.remaining().min(most);
                let end = (part == message.remaining()).then_some(0);
                let result = shard.commit_part(message, part, end);
                of.wire.extend(result);
                let waits = matches!(
                    result,
                    Err(CommitError::Interleaved | CommitError::ManyEmpty)
                );
                if end.is_some() && !waits || result.is_err() && !waits {
                    of.message = None;
                }
                format!("{result:?}")
            }
            Step::Consume(_, bytes) => {
                let unread = info.map_or(0, |info| info.unread);
                let bytes = if bytes % 2 == 0 { unread } else { bytes };
                format!("{:?}", shard.consume(flow, bytes))
            }
            Step::ConsumeEmpty(_) => format!("{:?}", shard.consume_empty(flow, 1)),
            Step::SetBuffer(_, bytes) => format!("{:?}", shard.set_buf_alloc(flow, bytes)),
            Step::SetLowWater(_, bytes) => format!("{:?}", shard.set_low_water(flow, bytes)),
            Step::RequestProgress(_) => format!("{:?}", shard.request_progress(flow)),
            Step::Shutdown(_, how) => format!("{:?}", shard.shutdown(now, flow, how)),
            Step::Reset(_) => format!("{:?}", shard.reset(flow)),
            Step::Forge(number, mut header) => {
                if shard.is_backlogged() {
                    return String::new();
                }
                (header.src.cid, header.dst.cid) = (other, own);
                if let Some(info) = info {
                    (header.src, header.dst) = (info.peer, info.local);
                } else {
                    header.src.port = Port::new(number as u32 % 3);
                    header.dst.port = Port::new(SERVICE);
                }
                format!("{:?}", shard.handle_packet(now, &header))
            }
            Step::Release => {
                let span = of.spans.pop_front();
                span.into_iter().for_each(|it| shard.handle_released(it));
                String::new()
            }
            Step::Events => self.events(side).concat(),
            Step::Replace | Step::Transmit(_) | Step::Deliver(_) | Step::Wait(_) => unreachable!(),
        }
    }

    fn events(&mut self, side: usize) -> Vec<String> {
        let Side { shard, flows, .. } = &mut self.sides[side];
        let mut output = Vec::new();
        while let Some(event) = shard.poll_event() {
            if let Event::Incoming { flow, .. } = event {
                if flows.contains(&Some(flow)) {
                    continue; // reported again
                }
                flows.push(Some(flow));
            }
            output.push(format!("{event:?}"));
        }
        output
    }

    fn transmit(&mut self, side: usize, count: usize) -> String {
        let of = &mut self.sides[side];
        let mut output = String::new();
        for _ in 0..count {
            self.now += Duration::from_nanos(1);
            let Some(packet) = of.shard.poll_transmit(self.now, 3000) else {
                break;
            };
            output += &format!("{packet:?}");
            of.wire.push_back(packet.header);
            of.spans.extend(packet.span);
        }
        output
    }

    fn deliver(&mut self, from: usize, count: usize) -> String {
        let mut output = String::new();
        for _ in 0..count {
            if self.sides[1 - from].shard.is_backlogged() {
                break;
            }
            let Some(header) = self.sides[from].wire.pop_front() else {
                break;
            };
            let shard = &mut self.sides[1 - from].shard;
            output += &format!("{:?}", shard.handle_packet(self.now, &header));
        }
        output
    }

    /// A successor continues a side. Its twin cancels reservations and polls events, as the successor does.
    fn replace(&mut self, side: usize) -> String {
        let of = &mut self.sides[side];
        for reservation in of.reservations.drain(..) {
            of.shard.cancel(reservation);
        }
        if let Some(message) = of.message.take_if(|it| !it.begun) {
            of.shard.cancel_message(message);
        }
        if self.replaces {
            let before = ids(&of.shard);
            let joined = |flow: &FlowId| {
                let info = of.shard.flow(*flow);
                info.is_some_and(|info| info.state != State::Incoming)
            };
            let expected: Vec<bool> = before.iter().map(joined).collect();
            // The clocks of processes differ.
            let bytes = of.shard.save(self.now);
            let mut successor = with_config(&of.config);
            let flows = successor.restore(self.now, &bytes).unwrap();
            of.shard = successor;

            let after = ids(&of.shard);
            assert_eq!(before.len(), after.len());
            let expected = after.iter().zip(expected).filter(|(_, joined)| *joined);
            assert_eq!(flows, expected.map(|(flow, _)| *flow).collect::<Vec<_>>());
            let renamed = |flow: FlowId| {
                let position = before.iter().position(|&it| it == flow);
                position.map(|position| after[position])
            };
            for flow in &mut of.flows {
                *flow = flow.and_then(renamed);
            }
            of.spans.retain(|span| renamed(span.flow).is_some());
            for span in &mut of.spans {
                span.flow = renamed(span.flow).unwrap();
            }
            of.message = of.message.take().and_then(|message| {
                let flow = renamed(message.flow())?;
                of.shard.flow(flow)?;
                Some(of.shard.resume_message(flow, message.remaining()).unwrap())
            });
        } else if let Some(message) = &of.message
            && of.shard.flow(message.flow()).is_none()
        {
            of.message = None;
        }
        let events = self.events(side).into_iter();
        let events = events.map(|event| self.with_names(side, event));
        let mut events: Vec<String> = events.collect();
        events.sort();
        events.concat()
    }

    fn state(&self) -> String {
        self.sides.iter().map(|it| state(&it.shard)).collect()
    }
}

fn ids(shard: &Shard) -> Vec<FlowId> {
    let slots = (0u32..).zip(&shard.table.slots);
    let taken = slots.filter(|(_, slot)| slot.connection.is_some());
    taken.map(|(index, _)| shard.table.id(index)).collect()
}

/// All that a successor must have, whatever slots the connections have.
fn state(shard: &Shard) -> String {
    let slots = &shard.table.slots;
    let name = |index: u32| {
        let connection = slots[index as usize].connection.as_ref().unwrap();
        let is_found = shard.table.look_up(&connection.key) == Some(index);
        format!("{:?} {is_found}", connection.key)
    };
    let describe = |flow: FlowId| {
        let it = slots[flow.index()].connection.as_ref().unwrap();
        let name = name(flow.index);
        match it.state {
            State::Closed => format!("{name} {:?} {:?} {:?}", it.control, it.pending, it.rx),
            _ => format!("{name} {it:?}"),
        }
    };
    let mut connections: Vec<String> = ids(shard).into_iter().map(describe).collect();
    connections.sort();
    let names = |members: Vec<u32>| members.into_iter().map(name).collect::<Vec<_>>();
    let lists = [
        names(shard.control.members(slots).collect()),
        names(shard.data.members(slots).collect()),
        names(shard.events.members(slots).collect()),
    ];
    let timers = shard.timers.iter().map(|&(at, index)| (at, name(index)));
    let timers: Vec<_> = timers.collect();
    let cid = match shard.config.role {
        Role::Device { .. } => Cid::HOST,
        Role::Driver { local } => local,
    };
    let own = Address::new(cid, Port::new(SERVICE));
    let ports = shard.ports.len() + shard.ports.occupied();
    let counts = [shard.live, shard.undecided, shard.held_ports, ports];
    let waiting = shard.ports.waiting(own);
    let flags = (shard.seqpacket, shard.declines_moves);
    format!(
        "{connections:?} {lists:?} {timers:?} {counts:?} {waiting:?} {flags:?} {:?}\n",
        shard.resets
    )
}

fn forged() -> impl Strategy<Value = Repr> {
    let nobody = Address::new(Cid::ANY, Port::ANY);
    let op = prop_oneof![
        2 => Just(1u16), 2 => Just(2), 5 => Just(5), 2 => 0u16..9, 1 => Just(Op::Move as u16)
    ];
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

fn step() -> impl Strategy<Value = Step> {
    let flow = || 0usize..4;
    let len = || prop_oneof![1u32..200, 1u32..3000, 0u32..90_000];
    let how = prop_oneof![
        Just(Directions::RECEIVE),
        Just(Directions::SEND),
        Just(Directions::BOTH)
    ];
    prop_oneof![
        4 => (0u32..4, 0u32..3, any::<bool>())
            .prop_map(|(from, to, message)| Step::Connect { from, to: to.max(SERVICE), message }),
        10 => flow().prop_map(Step::Accept),
        1 => flow().prop_map(Step::Reject),
        4 => (flow(), len()).prop_map(|(flow, max)| Step::Reserve(flow, max)),
        4 => len().prop_map(Step::Commit),
        8 => (flow(), len()).prop_map(|(flow, len)| Step::SendNow(flow, len)),
        4 => (flow(), len()).prop_map(|(flow, len)| Step::Send(flow, len)),
        4 => (flow(), len()).prop_map(|(flow, len)| Step::Coalesce(flow, len)),
        1 => flow().prop_map(Step::FlushCoalesced),
        2 => (flow(), any::<bool>()).prop_map(|(flow, on)| Step::SetCoalescing(flow, on)),
        2 => (flow(), len()).prop_map(|(flow, len)| Step::ShouldDelay(flow, len)),
        6 => (flow(), len()).prop_map(|(flow, len)| Step::BeginMessage(flow, len)),
        6 => len().prop_map(Step::ContinueMessage),
        10 => (flow(), len()).prop_map(|(flow, bytes)| Step::Consume(flow, bytes)),
        2 => flow().prop_map(Step::ConsumeEmpty),
        1 => (flow(), 0u32..9000).prop_map(|(flow, bytes)| Step::SetBuffer(flow, bytes)),
        1 => (flow(), 0u32..9000).prop_map(|(flow, bytes)| Step::SetLowWater(flow, bytes)),
        1 => flow().prop_map(Step::RequestProgress),
        2 => (flow(), how).prop_map(|(flow, how)| Step::Shutdown(flow, how)),
        1 => flow().prop_map(Step::Reset),
        14 => (1usize..6).prop_map(Step::Transmit),
        2 => Just(Step::Release),
        20 => (1usize..6).prop_map(Step::Deliver),
        3 => (flow(), forged()).prop_map(|(flow, header)| Step::Forge(flow, header)),
        10 => Just(Step::Events),
        2 => (0u64..3000).prop_map(Step::Wait),
        8 => Just(Step::Replace),
    ]
}

fn steps(count: core::ops::Range<usize>) -> impl Strategy<Value = Vec<(usize, Step)>> {
    prop::collection::vec((0usize..2, step()), count)
}

fn buffer() -> impl Strategy<Value = u32> {
    prop_oneof![Just(262_144u32), 1u32..9000, Just(65_536)]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..Default::default() })]

    #[test]
    fn any_state_survives(
        buf_alloc in [buffer(), buffer()],
        first_count in prop_oneof![Just(0u32), (u32::MAX - 3000)..],
        steps in steps(1..200),
    ) {
        let [mut world, mut twin] = [true, false].map(|it| World::new(it, buf_alloc, first_count));
        for (side, step) in &steps {
            prop_assert_eq!(world.step(*side, step), twin.step(*side, step), "{:?}", step);
            prop_assert_eq!(world.state(), twin.state(), "{:?}", step);
        }
    }
}
