//! A peer and a caller that do anything: no panic, no limit exceeded, no answer lost while the
//! caller obeys `is_backlogged`, and no state left at the end. The fuzz target `peer` runs the same steps.

use std::sync::Arc;

use proptest::prelude::*;
use zerosock_proto::vsock::{
    Directions, Disposition, Event, FlowId, PortTable, Reservation, Shard, ShardConfig,
};
use zerosock_proto::wire::vsock::{
    HEADER_LEN, Op, Repr, SEQ_EOM, SEQ_EOR, SocketType, WireOp, WireType,
};
use zerosock_proto::{Address, Cid, Duration, Instant, Port};

const GUEST: Cid = Cid::new(3);
const CAP: usize = 6;
const RESETS: usize = 3;
const BACKLOG: usize = 3;

#[derive(Clone, Debug)]
pub(crate) enum Step {
    Packet(Repr),
    /// The same, by a caller that ignores `is_backlogged`.
    Rude(Repr),
    Event,
    Transmit(u32),
    Connect(u32, u32),
    Accept(usize),
    Reject(usize),
    Consume(usize, u32),
    Reserve(usize, u32),
    Commit(u32),
    Cancel,
    Send(usize, u32),
    Shutdown(usize, bool, bool),
    Buffer(usize, u32),
    Reset(usize),
    Wait(u64),
    TransportReset,
    Listen(u32),
    Unlisten(u32),
}

fn number() -> impl Strategy<Value = u32> {
    prop_oneof![0u32..4, 0u32..100_000, any::<u32>(), Just(u32::MAX)]
}

fn packet() -> impl Strategy<Value = Repr> {
    let cid = prop_oneof![20 => Just(3u32), 1 => any::<u32>()];
    let host = prop_oneof![20 => Just(2u32), 1 => Just(9u32), 1 => any::<u32>()];
    let port = || prop_oneof![20 => 0u32..4, 1 => any::<u32>()];
    let op = prop_oneof![20 => 0u16..8, 2 => 0x7a10u16..0x7a12, 1 => any::<u16>()];
    let kind = prop_oneof![20 => Just(1u16), 2 => Just(2u16), 1 => any::<u16>()];
    let len = prop_oneof![0u32..4, 0u32..65537];
    let addresses = (cid, host, port(), port());
    (addresses, op, kind, len, number(), number(), number()).prop_map(
        |((cid, host, src, dst), op, kind, len, flags, buf_alloc, fwd_cnt)| Repr {
            src: Address::new(Cid::new(cid), Port::new(src)),
            dst: Address::new(Cid::new(host), Port::new(dst)),
            len,
            socket_type: WireType::from(kind),
            op: WireOp::from(op),
            flags,
            buf_alloc,
            fwd_cnt,
        },
    )
}

fn step() -> impl Strategy<Value = Step> {
    let flow = 0usize..8;
    prop_oneof![
        30 => packet().prop_map(Step::Packet),
        2 => packet().prop_map(Step::Rude),
        8 => Just(Step::Event),
        8 => number().prop_map(Step::Transmit),
        3 => (0u32..5, 0u32..5).prop_map(|(local, peer)| Step::Connect(local, peer)),
        8 => flow.clone().prop_map(Step::Accept),
        1 => flow.clone().prop_map(Step::Reject),
        4 => (flow.clone(), number()).prop_map(|(f, n)| Step::Consume(f, n)),
        4 => (flow.clone(), number()).prop_map(|(f, n)| Step::Reserve(f, n)),
        4 => number().prop_map(Step::Commit),
        1 => Just(Step::Cancel),
        4 => (flow.clone(), number()).prop_map(|(f, n)| Step::Send(f, n)),
        2 => (flow.clone(), any::<bool>(), any::<bool>())
            .prop_map(|(f, receive, send)| Step::Shutdown(f, receive, send)),
        1 => (flow.clone(), number()).prop_map(|(f, n)| Step::Buffer(f, n)),
        1 => flow.prop_map(Step::Reset),
        2 => (0u64..10_000).prop_map(Step::Wait),
        1 => Just(Step::TransportReset),
        1 => (0u32..4).prop_map(Step::Listen),
        1 => (0u32..4).prop_map(Step::Unlisten),
    ]
}

/// The caller's view: one entry for each connection it knows.
struct Caller {
    shard: Shard,
    now: Instant,
    flows: Vec<FlowId>,
    alive: Vec<FlowId>,
    held: Vec<Reservation>,
}

impl Caller {
    fn pick(&self, flow: usize) -> Option<FlowId> {
        // Also stale ids.
        self.flows.get(flow % self.flows.len().max(1)).copied()
    }

    fn event(&mut self) -> bool {
        match self.shard.poll_event() {
            None => return false,
            Some(Event::Incoming { flow, .. }) => {
                self.flows.push(flow);
                self.alive.push(flow);
            }
            Some(Event::Refused { flow, .. } | Event::Closed { flow, .. }) => {
                let place = self.alive.iter().position(|&f| f == flow);
                self.alive
                    .swap_remove(place.expect("ended twice, or never begun"));
                assert!(self.shard.flow(flow).is_none());
            }
            Some(
                Event::Connected { flow }
                | Event::PeerShutdown { flow, .. }
                | Event::Writable { flow },
            ) => assert!(self.alive.contains(&flow)),
        }
        true
    }

    fn packet(&mut self, header: &Repr) {
        match self.shard.handle_packet(self.now, header) {
            Disposition::Deliver { flow, len, .. } => {
                let info = self.shard.flow(flow).unwrap();
                assert!(len > 0 && info.unread >= len);
            }
            Disposition::Part { flow, len, flags } => {
                let info = self.shard.flow(flow).unwrap();
                assert!(info.unread >= len && info.socket_type == SocketType::SeqPacket);
                assert!(len > 0 || flags & SEQ_EOM != 0);
                if len == 0 {
                    // It may have ended a message with bytes.
                    let _ = self.shard.consume_empty(flow, 1);
                }
            }
            Disposition::Handled | Disposition::Dropped(_) => {}
        }
    }

    fn step(&mut self, step: Step) {
        let (now, shard) = (self.now, &mut self.shard);
        match step {
            Step::Packet(header) => {
                while self.shard.is_backlogged() {
                    assert!(self.shard.poll_transmit(now, 0).is_some());
                }
                let lost = self.shard.stats().resets_lost;
                self.packet(&header);
                assert_eq!(self.shard.stats().resets_lost, lost);
            }
            Step::Rude(header) => self.packet(&header),
            Step::Event => {
                self.event();
            }
            Step::Transmit(max_payload) => {
                if let Some(packet) = shard.poll_transmit(now, max_payload) {
                    assert!(packet.header.len <= max_payload.min(65536));
                    assert_eq!(packet.header.len, packet.span.map_or(0, |span| span.len));
                    if let Some(span) = packet.span {
                        shard.handle_released(span);
                        shard.handle_released(span);
                    }
                }
            }
            Step::Connect(local, peer) => {
                let local = if local == 4 {
                    Port::ANY
                } else {
                    Port::new(local)
                };
                let peer = Address::new(GUEST, Port::new(peer));
                let local = Address::new(Cid::ANY, local);
                if let Ok(flow) = shard.connect(now, local, peer, SocketType::Stream) {
                    self.flows.push(flow);
                    self.alive.push(flow);
                }
            }
            Step::Listen(port) => {
                let _ = shard.listen(Port::new(port), BACKLOG);
            }
            Step::Unlisten(port) => {
                let _ = shard.unlisten(Port::new(port));
            }
            Step::Wait(millis) => {
                self.now += Duration::from_millis(millis);
                shard.handle_timeout(self.now);
            }
            Step::TransportReset => shard.handle_transport_reset(now),
            Step::Commit(len) => {
                if let Some(reservation) = self.held.pop() {
                    let most = reservation.len();
                    if let Ok(header) = shard.commit(reservation, len, u32::MAX) {
                        assert!(header.len == len && len <= most);
                        let record = header.socket_type == SocketType::SeqPacket.into();
                        let flags = if record { SEQ_EOM | SEQ_EOR } else { 0 };
                        assert_eq!(header.flags, flags);
                    }
                }
            }
            Step::Cancel => {
                if let Some(reservation) = self.held.pop() {
                    shard.cancel(reservation);
                }
            }
            Step::Accept(flow)
            | Step::Reject(flow)
            | Step::Consume(flow, _)
            | Step::Reserve(flow, _)
            | Step::Send(flow, _)
            | Step::Shutdown(flow, ..)
            | Step::Buffer(flow, _)
            | Step::Reset(flow) => {
                if let Some(flow) = self.pick(flow) {
                    self.flow_step(step, flow);
                }
            }
        }
    }

    fn flow_step(&mut self, step: Step, flow: FlowId) {
        let (now, shard) = (self.now, &mut self.shard);
        let before = shard.flow(flow);
        match step {
            Step::Accept(_) => {
                let _ = shard.accept(now, flow);
            }
            Step::Reject(_) => {
                let _ = shard.reject(flow);
            }
            Step::Consume(_, n) => {
                let ok = shard.consume(flow, n).is_ok();
                assert_eq!(ok, before.is_some_and(|info| n <= info.unread));
            }
            Step::Reserve(_, n) => {
                if let Ok(reservation) = shard.reserve(flow, n) {
                    assert!(reservation.len() <= n.min(before.unwrap().send_credit));
                    self.held.push(reservation);
                }
                if let Ok(mut reservation) = shard.reserve_message(flow, n) {
                    assert!(n <= before.unwrap().send_credit);
                    let (first, last) = (n / 2, n - n / 2);
                    if first > 0 && shard.commit_part(&mut reservation, first, None).is_err() {
                        assert!(first > 65536);
                    }
                    let _ = shard.commit_part(&mut reservation, last, Some(u32::MAX));
                    assert_eq!(reservation.remaining() * u32::from(last <= 65536), 0);
                    shard.cancel_message(reservation);
                }
            }
            Step::Send(_, n) => {
                let _ = shard.send(flow, n, 0);
            }
            Step::Shutdown(_, receive, send) => {
                let _ = shard.shutdown(now, flow, Directions { receive, send });
            }
            Step::Buffer(_, n) => {
                let _ = shard.set_buf_alloc(flow, n);
            }
            Step::Reset(_) => {
                assert_eq!(shard.reset(flow).is_ok(), before.is_some());
                assert!(shard.flow(flow).is_none());
            }
            _ => {}
        }
    }
}

pub(crate) fn run(first: u32, accept_all: bool, seqpacket: bool, steps: Vec<Step>) {
    let mut config = ShardConfig::device(GUEST);
    config.first_count = first;
    config.buf_alloc = 1000;
    config.max_connections = CAP;
    config.max_pending_resets = RESETS;
    config.max_queued_sends = 4;
    config.backlog = BACKLOG;
    config.accept_all = accept_all;
    let ports = Arc::new(PortTable::new());
    let mut shard = Shard::new(config, ports.clone());
    shard.set_seqpacket(seqpacket);
    shard.set_declines_moves(seqpacket.then_some(0));
    for port in 0..2 {
        shard.listen(Port::new(port), BACKLOG).unwrap();
    }
    let mut caller = Caller {
        shard,
        now: Instant::ZERO,
        flows: Vec::new(),
        alive: Vec::new(),
        held: Vec::new(),
    };
    for step in steps {
        caller.step(step);
        assert!(caller.shard.connections() <= caller.shard.occupied());
        assert!(caller.shard.occupied() <= CAP);
    }
    // At the end, reset live connections, send queued packets, and poll events.
    while caller.event() {}
    for flow in caller.alive.clone() {
        caller.shard.reset(flow).unwrap();
    }
    while caller.event() {}
    let mut waiting = 0;
    while caller.shard.poll_transmit(caller.now, 0).is_some() {
        waiting += 1;
    }
    assert!(waiting <= CAP + RESETS, "only RSTs can be left");
    assert!(caller.alive.is_empty());
    let shard = &mut caller.shard;
    assert_eq!((shard.connections(), shard.occupied()), (0, 0));
    assert!(!shard.has_transmit() && shard.poll_timeout().is_none());
    for port in 0..4 {
        let address = Address::new(Cid::HOST, Port::new(port));
        assert!(ports.waiting(address).is_none_or(|waiting| waiting == 0));
        let _ = shard.unlisten(Port::new(port));
    }
    assert!(ports.is_empty(), "{ports:?}");
    for reservation in caller.held {
        assert!(caller.shard.commit(reservation, 1, 0).is_err());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..Default::default() })]

    #[test]
    fn arbitrary_packets_and_commands_leave_no_state(
        first in prop_oneof![Just(0u32), (u32::MAX - 2000)..],
        accept_all in any::<bool>(),
        seqpacket in any::<bool>(),
        steps in prop::collection::vec(step(), 1..200),
    ) {
        run(first, accept_all, seqpacket, steps);
    }

    /// Raw bytes in every field.
    #[test]
    fn raw_bytes_do_not_panic(bytes in prop::collection::vec(any::<u8>(), HEADER_LEN * 8)) {
        let mut shard = Shard::new(ShardConfig::driver(GUEST), Arc::new(PortTable::new()));
        for header in bytes.as_chunks().0 {
            if let Ok(header) = Repr::parse(header) {
                let _ = shard.handle_packet(Instant::ZERO, &header);
            }
        }
    }
}

/// A flood of REQUESTs from chosen ports reaches the limit, and every further one gets RST
/// (threats: unbounded state, backlog leak).
#[test]
fn a_flood_of_requests_is_reset_above_the_limit() {
    let mut config = ShardConfig::device(GUEST);
    (
        config.accept_all,
        config.max_connections,
        config.max_pending_resets,
    ) = (true, 100, 10);
    let mut shard = Shard::new(config, Arc::new(PortTable::new()));
    let mut resets = 0;
    for port in 0..10_000 {
        while shard.is_backlogged() {
            let packet = shard.poll_transmit(Instant::ZERO, 0).unwrap();
            assert_eq!(packet.header.op, Op::Rst.into());
            resets += 1;
        }
        let request = Repr {
            src: Address::new(GUEST, Port::new(port)),
            dst: Address::new(Cid::HOST, Port::new(1)),
            len: 0,
            socket_type: SocketType::Stream.into(),
            op: Op::Request.into(),
            flags: 0,
            buf_alloc: 1,
            fwd_cnt: 0,
        };
        let _ = shard.handle_packet(Instant::ZERO, &request);
    }
    assert_eq!(shard.connections(), 100);
    assert_eq!(
        (shard.stats().over_cap, shard.stats().resets_lost),
        (9_900, 0)
    );
    assert!(resets >= 9_890);
}
