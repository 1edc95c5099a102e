//! Any state survives: a world in which shards are replaced by successors that restore them behaves as its twin
//! does. And hostile snapshots.

use proptest::prelude::*;
use std::collections::VecDeque;
use std::sync::Arc;

use super::*;
use crate::addr::Port;
use crate::time::Duration;
use crate::vsock::connection::{MessageReservation, Reservation};
use crate::vsock::event::{Disposition, Event, Span};
use crate::vsock::flow_log::{FlowLog, LoggedFlow};
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
                if !waits && (end.is_some() || result.is_err()) {
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

/// A device with connections in all states and packets of all kinds pending.
fn busy() -> Shard {
    let mut world = World::new(false, [65_536, 9000], 0);
    let connect = |from, message| Step::Connect {
        from,
        to: SERVICE,
        message,
    };
    let steps = [
        (0, connect(0, false)),
        (0, connect(1, true)),
        (0, Step::Transmit(9)),
        (1, Step::Deliver(9)),
        (1, Step::Events),
        (1, Step::Accept(0)),
        (1, Step::Accept(1)),
        (1, Step::Transmit(9)),
        (0, Step::Deliver(9)),
        (0, Step::SendNow(1, 5000)),
        (1, Step::Deliver(9)),
        (1, Step::Consume(1, 4999)),
        (1, Step::Send(1, 90_000)),
        (1, Step::Transmit(2)),
        (1, Step::BeginMessage(0, 3000)),
        (1, Step::ContinueMessage(1000)),
        (0, connect(2, false)),
        (0, Step::Transmit(9)),
        (1, Step::Deliver(9)),
        (1, connect(3, true)),
        (1, connect(0, false)),
        (1, Step::Transmit(9)),
        (1, connect(1, false)),
    ];
    for (side, step) in &steps {
        world.step(*side, step);
    }
    let [_, device] = world.sides;
    let mut shard = device.shard;
    let flow = device.flows.last().unwrap().unwrap();
    shard.apply_action(
        world.now,
        flow.index,
        State::Closed,
        crate::vsock::state::Action::End {
            rst: true,
            reason: crate::vsock::CloseReason::TimedOut,
        },
    );
    shard.push_reset(address(2, 9), address(3, 9), SocketType::Stream.into());
    assert_eq!(shard.occupied(), MOST);
    shard
}

fn address(cid: u32, port: u32) -> Address {
    Address::new(Cid::new(cid), Port::new(port))
}

fn successor_of(shard: &Shard) -> Shard {
    with_config(&shard.config)
}

/// Drives a restored shard with calls of all kinds, then ends everything.
fn exercise(shard: &mut Shard, flows: &[FlowId]) {
    let now = Instant::ZERO;
    for &flow in flows {
        let Some(info) = shard.flow(flow) else {
            continue;
        };
        if let Some(mut message) = shard.resume_message(flow, 10) {
            let _ = shard.commit_part(&mut message, 10, Some(0));
        }
        let _ = shard.send(flow, 1000, SEQ_EOM);
        let _ = shard.coalesce(flow, 1000);
        if let Ok(reservation) = shard.reserve(flow, 5000) {
            let _ = shard.commit(reservation, 10, 0);
        }
        for (op, len, fwd_cnt) in [
            (Op::Response, 0, 0),
            (Op::Rw, 2000, 0),
            (Op::CreditRequest, 0, 100),
            (Op::CreditUpdate, 0, info.tx_cnt),
            (Op::Rw, 2000, 0),
        ] {
            let header = Repr {
                src: info.peer,
                dst: info.local,
                len,
                socket_type: info.socket_type.into(),
                op: op.into(),
                flags: SEQ_EOM,
                buf_alloc: 1 << 16,
                fwd_cnt,
            };
            let _ = shard.handle_packet(now, &header);
            let _ = shard.consume(flow, 1500);
            let _ = shard.consume_empty(flow, 1);
        }
        let _ = shard.set_buf_alloc(flow, 5000);
        let _ = shard.shutdown(now, flow, Directions::SEND);
    }
    for round in 0..20 {
        shard.handle_timeout(now + Duration::from_secs(round));
        while shard.poll_event().is_some() {}
        for _ in 0..100 {
            let packet = shard.poll_transmit(now, 2000);
            if let Some(span) = packet.and_then(|it| it.span) {
                shard.handle_released(span);
            }
        }
    }
    let left: Vec<FlowId> = ids(shard);
    for flow in left {
        let _ = shard.reset(flow);
    }
    while shard.poll_event().is_some() {}
    while shard.poll_transmit(now, 0).is_some() {}
    assert_unused(shard);
}

fn assert_unused(shard: &Shard) {
    assert_eq!((shard.occupied(), shard.live), (0, 0));
    assert_eq!((shard.held_ports, shard.undecided), (0, 0));
    assert_eq!((shard.ports.len(), shard.ports.occupied()), (1, 0));
    assert!(shard.timers.is_empty() && !shard.has_transmit() && !shard.has_events());
}

#[test]
fn a_truncated_or_longer_snapshot_is_refused() {
    let shard = busy();
    let mut bytes = shard.save(Instant::ZERO);
    let mut successor = successor_of(&shard);
    for len in 0..bytes.len() {
        let result = successor.restore(Instant::ZERO, &bytes[..len]);
        assert_eq!(result, Err(RestoreError::Length), "{len}");
        assert_unused(&successor);
    }
    bytes.push(0);
    let result = successor.restore(Instant::ZERO, &bytes);
    assert_eq!(result, Err(RestoreError::Length));
    bytes.pop();
    let flows = successor.restore(Instant::ZERO, &bytes).unwrap();
    assert_eq!(flows.len(), 4, "without the undecided and the closed one");
    let result = successor.restore(Instant::ZERO, &bytes);
    assert_eq!(result, Err(RestoreError::InUse));
    exercise(&mut successor, &flows);
}

#[test]
fn a_forged_snapshot_is_refused_or_harmless() {
    let shard = busy();
    let bytes = shard.save(Instant::ZERO);
    let mut accepted = 0;
    let mut attempt = |forged: &[u8]| {
        let mut successor = successor_of(&shard);
        match successor.restore(Instant::ZERO, forged) {
            Ok(flows) => {
                accepted += 1;
                exercise(&mut successor, &flows);
            }
            Err(_) => assert_unused(&successor),
        }
    };
    let numbers = [0, 1, 1 << 31, u32::MAX];
    for at in 0..bytes.len() {
        for mask in (0..8).map(|bit| 1 << bit).chain([0xff]) {
            let mut forged = bytes.clone();
            forged[at] ^= mask;
            attempt(&forged);
        }
        for number in numbers {
            let mut forged = bytes.clone();
            let len = forged.len().min(at + 4) - at;
            forged[at..at + len].copy_from_slice(&number.to_le_bytes()[..len]);
            attempt(&forged);
        }
    }
    assert!(accepted > bytes.len(), "most fields are free: {accepted}");
}

#[test]
fn a_snapshot_of_another_version_is_refused_by_name() {
    let shard = busy();
    let mut bytes = shard.save(Instant::ZERO);
    bytes[8] = 77;
    let result = successor_of(&shard).restore(Instant::ZERO, &bytes);
    assert_eq!(result, Err(RestoreError::Version(77)));
    assert!(RestoreError::Version(77).to_string().contains("77"));
    bytes[0] = 0;
    let result = successor_of(&shard).restore(Instant::ZERO, &bytes);
    assert_eq!(result, Err(RestoreError::NotASnapshot));
}

#[test]
fn a_snapshot_of_another_endpoint_is_refused() {
    let shard = busy();
    let mut bytes = shard.save(Instant::ZERO);
    for other in [ShardConfig::device(Cid::new(4)), ShardConfig::driver(GUEST)] {
        let result = with_config(&other).restore(Instant::ZERO, &bytes);
        assert_eq!(result, Err(RestoreError::OtherEndpoint));
    }
    // The connections are of CID 3, whatever the head of the snapshot says.
    bytes[16] = 4;
    let mut other = with_config(&ShardConfig::device(Cid::new(4)));
    let result = other.restore(Instant::ZERO, &bytes);
    assert_eq!(result, Err(RestoreError::OtherEndpoint));
    assert_unused(&other);
}

#[test]
fn too_many_connections_are_refused() {
    let shard = busy();
    let bytes = shard.save(Instant::ZERO);
    let config = ShardConfig {
        max_connections: MOST - 1,
        ..shard.config.clone()
    };
    let mut successor = with_config(&config);
    let result = successor.restore(Instant::ZERO, &bytes);
    assert_eq!(result, Err(RestoreError::TooManyConnections));
    assert_unused(&successor);
}

#[test]
fn two_connections_with_the_same_addresses_are_refused() {
    let mut shard = busy();
    let key = shard.table.slots[0].connection.as_ref().unwrap().key;
    shard.table.slots[1].connection.as_mut().unwrap().key = key;
    // Both can be found, as it were.
    let bytes = shard.save(Instant::ZERO);
    let mut successor = successor_of(&shard);
    let result = successor.restore(Instant::ZERO, &bytes);
    assert_eq!(result, Err(RestoreError::Duplicate));
    assert_unused(&successor);
}

/// A connection of a guest to a device, accepted.
fn accepted() -> (Shard, FlowId) {
    let mut shard = with_config(&ShardConfig::device(GUEST));
    let header = Repr {
        src: address(3, 5),
        dst: address(2, SERVICE),
        len: 0,
        socket_type: SocketType::Stream.into(),
        op: Op::Request.into(),
        flags: 0,
        buf_alloc: 4096,
        fwd_cnt: 0,
    };
    let handled = shard.handle_packet(Instant::ZERO, &header);
    assert_eq!(handled, Disposition::Handled);
    let Some(Event::Incoming { flow, .. }) = shard.poll_event() else {
        panic!("no request");
    };
    (shard, flow)
}

#[test]
fn reservations_are_cancelled_and_wake_the_waiter() {
    let (mut shard, flow) = accepted();
    shard.accept(Instant::ZERO, flow).unwrap();
    assert!(shard.poll_transmit(Instant::ZERO, 0).is_some());
    let _reservation = shard.reserve(flow, 4096).unwrap();
    assert!(shard.reserve(flow, 1).is_err());
    let bytes = shard.save(Instant::ZERO);
    let mut successor = successor_of(&shard);
    let flows = successor.restore(Instant::ZERO, &bytes).unwrap();
    let &[flow] = &flows[..] else { panic!() };
    assert_eq!(successor.poll_event(), Some(Event::Writable { flow }));
    assert_eq!(successor.flow(flow).unwrap().send_credit, 4096);
}

#[test]
fn times_count_from_the_restore() {
    let (mut shard, flow) = accepted();
    shard.accept(Instant::ZERO, flow).unwrap();
    let hour = Instant::from_nanos(3_600_000_000_000);
    shard.shutdown(hour, flow, Directions::BOTH).unwrap();
    let second = Duration::from_secs(1);
    let bytes = shard.save(hour + second);
    let mut successor = successor_of(&shard);
    successor.restore(Instant::ZERO, &bytes).unwrap();
    let left = Instant::ZERO + (shard.config.close_timeout - second);
    assert_eq!(successor.poll_timeout(), Some(left));
}

#[test]
fn an_undecided_connection_is_reported_again() {
    let (shard, _) = accepted();
    let bytes = shard.save(Instant::ZERO);
    let mut successor = successor_of(&shard);
    assert_eq!(successor.restore(Instant::ZERO, &bytes), Ok(vec![]));
    assert_eq!(successor.ports.waiting(address(2, SERVICE)), Some(1));
    let Some(Event::Incoming { flow, .. }) = successor.poll_event() else {
        panic!("not reported");
    };
    successor.accept(Instant::ZERO, flow).unwrap();
    assert_eq!(successor.ports.waiting(address(2, SERVICE)), Some(0));
}

/// A log with numbered entries.
#[derive(Clone, Debug, Default)]
struct Log(Arc<std::sync::Mutex<Vec<Option<LoggedFlow>>>>);

impl FlowLog for Log {
    fn is_full(&self) -> bool {
        false
    }

    fn enter(&mut self, flow: LoggedFlow) -> u32 {
        let mut entries = self.0.lock().unwrap();
        entries.push(Some(flow));
        entries.len() as u32 - 1
    }

    fn clear(&mut self, entry: u32) {
        let flow = self.0.lock().unwrap()[entry as usize].take();
        assert!(flow.is_some(), "cleared twice");
    }
}

#[test]
fn a_restored_connection_keeps_its_entry_in_the_log_or_gets_one() {
    let (shard, _) = accepted();
    let bytes = shard.save(Instant::ZERO);
    let of = |port, socket_type| LoggedFlow {
        local: address(2, SERVICE),
        peer: address(3, port),
        socket_type,
    };
    let own = of(5, SocketType::Stream);
    for (found, left) in [
        (vec![own], vec![Some(own)]),
        (vec![own, own], vec![Some(own), None]),
        (vec![of(5, SocketType::SeqPacket)], vec![None, Some(own)]),
        (vec![], vec![Some(own)]),
    ] {
        let mut log = Log::default();
        for flow in &found {
            log.enter(*flow);
        }
        let mut successor = successor_of(&shard);
        successor.set_flow_log(Box::new(log.clone()));
        successor.restore(Instant::ZERO, &bytes).unwrap();
        for (entry, flow) in (0..).zip(found) {
            assert!(!successor.reset_stale(entry, flow), "it is not stale");
        }
        let stale = of(6, SocketType::Stream);
        let entry = log.enter(stale);
        assert!(successor.reset_stale(entry, stale));
        successor.finish_restore();
        let mut entries = log.0.lock().unwrap().clone();
        assert_eq!(entries.remove(entry as usize), Some(stale));
        assert_eq!(entries, left);

        for flow in ids(&successor) {
            let _ = successor.reset(flow);
        }
        while successor.poll_event().is_some() {}
        while successor.poll_transmit(Instant::ZERO, 0).is_some() {}
        successor.handle_published();
        assert!(log.0.lock().unwrap().iter().all(Option::is_none));
        assert_unused(&successor);
    }
}

#[test]
fn a_restored_connection_without_an_entry_ends_without_one() {
    let (shard, _) = accepted();
    let bytes = shard.save(Instant::ZERO);
    let log = Log::default();
    let mut successor = successor_of(&shard);
    successor.set_flow_log(Box::new(log.clone()));
    successor.restore(Instant::ZERO, &bytes).unwrap();
    exercise(&mut successor, &[]);
    successor.handle_published();
    assert_eq!(log.0.lock().unwrap().len(), 0);
    assert_unused(&successor);
}
