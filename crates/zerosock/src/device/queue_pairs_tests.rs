//! Connections between queue_pairs whose driver goes, stops or starts anew meanwhile: two
//! queue_pairs of one device, between which the test carries what they say, when it likes.

use super::bare::{self, Guest};
use super::ready_tests::Lab;
use super::*;
use crate::device::queue_pairs::Handoff;
use crate::device::sibling_message::{Message, Peer};
use crate::stats::Stats;
use zerosock_proto::Address;
use zerosock_proto::vsock::{PortTable, QueuePairs, ShardConfig};
use zerosock_proto::wire::vsock::{Op, Repr};
use zerosock_vhost_user::{DeviceCommand, Reply};

const THERE: Address = Address::new(Cid::HOST, Port::new(9));
const HERE: Address = Address::new(Cid::new(3), Port::new(5));
const SIBLING: DeviceAddr = DeviceAddr { worker: 0, vm: 7 };
/// The queue_pair that a connection leaves has pair 1, the other one pair 0: the guest of the test
/// moves all to that.
const OLD: usize = 1;
const NEW: usize = 0;

struct QueuePairSet {
    labs: [Lab; 2],
    guests: [Guest; 2],
    /// The connection, in the old queue_pair.
    flow: FlowId,
    /// Its other end.
    there: FlowId,
    /// What the sibling has been told.
    told: Vec<Message>,
}

impl QueuePairSet {
    fn new() -> QueuePairSet {
        let addrs = [0, 1].map(|vm| DeviceAddr { worker: 0, vm });
        let two = QueuePairs::new(2).unwrap();
        let ports = Arc::new(PortTable::new());
        let mut labs = [0, 1].map(|_| Lab::of(ports.clone()));
        let guests = [0, 1].map(|pair| {
            let device = labs[pair].lend().0;
            device.addr = addrs[pair];
            device.set_lane(pair as u16, Arc::new(addrs));
            device.shard.set_moves(true);
            device.queue_pairs.used = two;
            bare::start(device)
        });
        let there = some_flow();
        let (device, mut cx) = labs[OLD].lend();
        // As a queue_pair that was asked by the first one.
        let local = (0..)
            .map(|port| Address::new(THERE.cid, Port::new(port)))
            .find(|local| two.of_flow(HERE.port, *local) == OLD as u16)
            .unwrap();
        let from = Peer {
            device: SIBLING,
            flow: there,
        };
        let connect = Message::Connect {
            from,
            local,
            peer: HERE,
            socket_type: SocketType::Stream,
        };
        device.sibling_says(connect, &mut cx);
        device.turn(&mut cx);
        let flow = device.bridges.iter().next().unwrap().1.flow.unwrap();
        let mut queue_pairs = QueuePairSet {
            labs,
            guests,
            flow,
            there,
            told: Vec::new(),
        };
        queue_pairs.guest_says(OLD, local, Op::Response);
        queue_pairs.carry();
        let accepted = |one: &Message| matches!(one, Message::Accepted { .. });
        assert!(
            queue_pairs.told.iter().any(accepted),
            "{:?}",
            queue_pairs.told
        );
        queue_pairs.told.clear();
        queue_pairs.guests[OLD].received();
        queue_pairs
    }

    fn local(&mut self) -> Address {
        let device = self.labs[OLD].lend().0;
        device.shard.flow(self.flow).unwrap().local
    }

    fn guest_says(&mut self, queue_pair: usize, to: Address, op: Op) {
        self.guests[queue_pair].send(HERE.port.get(), to, op, 0);
        let (device, mut cx) = self.labs[queue_pair].lend();
        device.turn(&mut cx);
    }

    /// The guest has asked for a move, and the old queue_pair has given the connection out.
    fn leave(&mut self) -> Option<Box<Handoff>> {
        let local = self.local();
        self.guest_says(OLD, local, Op::Move);
        let (device, mut cx) = self.labs[OLD].lend();
        let Some((0, Message::HandOff { to, pair })) = self_message(&mut cx) else {
            return None;
        };
        let (queue_pair, handoff) = device.extract(to, pair, &mut cx)?;
        assert_eq!(queue_pair.vm, NEW as u32);
        Some(handoff)
    }

    fn arrive(&mut self, handoff: Box<Handoff>) {
        let (device, mut cx) = self.labs[NEW].lend();
        device.sibling_says(Message::TakeOver(handoff), &mut cx);
    }

    /// Carries what they have to say, until they have said all; the sibling answers what it must.
    fn carry(&mut self) {
        loop {
            let mut said = Vec::new();
            for lab in &mut self.labs {
                let (device, mut cx) = lab.lend();
                device.turn(&mut cx);
                said.extend(std::iter::from_fn(|| cx.outbox.pop_local()));
            }
            if said.is_empty() {
                return;
            }
            for (vm, message) in said {
                match (vm as usize, message) {
                    (queue_pair @ (0 | 1), message) => {
                        let (device, mut cx) = self.labs[queue_pair].lend();
                        device.sibling_says(message, &mut cx);
                    }
                    (_, Message::Relocated { to, from, old }) => {
                        assert_eq!(to, self.there);
                        let to = old.flow;
                        let (device, mut cx) = self.labs[old.device.vm as usize].lend();
                        device.sibling_says(Message::Flushed { to }, &mut cx);
                        self.told.push(Message::Asking { to, from });
                    }
                    (_, message) => self.told.push(message),
                }
            }
        }
    }

    fn command(&mut self, queue_pair: usize, command: DeviceCommand) {
        let (device, mut cx) = self.labs[queue_pair].lend();
        device.command(command, Reply::discarded(), &mut cx);
    }

    fn bridges(&mut self) -> [usize; 2] {
        [0, 1].map(|queue_pair| self.labs[queue_pair].lend().0.bridges.len())
    }

    fn ends_told(&self) -> usize {
        let is_end = |one: &&Message| matches!(one, Message::Reset { .. });
        self.told.iter().filter(is_end).count()
    }

    fn received(&mut self, queue_pair: usize) -> Vec<(Option<Op>, u32)> {
        let received = self.guests[queue_pair].received();
        let told = |header: &Repr| (header.op.known(), header.flags);
        received.iter().map(told).collect()
    }
}

/// What a device has said to its own worker.
fn self_message(cx: &mut Context<'_>) -> Option<(usize, Message)> {
    let (vm, message) = cx.outbox.pop_local()?;
    assert_eq!(vm, OLD as u32);
    Some((0, message))
}

/// The name of a flow of another device's.
fn some_flow() -> FlowId {
    let ports = Arc::new(PortTable::new());
    let cid = Cid::new(4);
    let mut shard = Shard::new(ShardConfig::driver(cid), ports);
    let local = Address::new(cid, THERE.port);
    let stream = SocketType::Stream;
    shard.connect(Instant::ZERO, local, HERE, stream).unwrap()
}

#[test]
fn a_connection_goes_from_lane_to_lane() {
    let mut queue_pairs = QueuePairSet::new();
    let handoff = queue_pairs.leave().expect("it leaves");
    assert_eq!(queue_pairs.bridges(), [0, 0]);
    queue_pairs.arrive(handoff);
    queue_pairs.carry();
    assert_eq!(queue_pairs.bridges(), [1, 0]);
    assert_eq!(queue_pairs.ends_told(), 0);
    assert_eq!(queue_pairs.received(OLD), [(Some(Op::Moved), 0)]);
    let old = &queue_pairs.labs[OLD].lend().0.queue_pairs;
    assert!(old.is_at_rest() && queue_pairs.labs[NEW].lend().0.queue_pairs.is_at_rest());
}

#[test]
fn one_that_arrives_after_a_reset_ends() {
    // Each queue_pair hears of the reset when it comes to it: the new one before the connection
    // comes.
    let mut queue_pairs = QueuePairSet::new();
    let handoff = queue_pairs.leave().expect("it leaves");
    for queue_pair in [NEW, OLD] {
        queue_pairs.command(queue_pair, DeviceCommand::ResetDevice);
    }
    queue_pairs.arrive(handoff);
    assert_eq!(queue_pairs.bridges(), [1, 0], "its queue_pair cannot know");
    queue_pairs.carry();
    assert_eq!(queue_pairs.bridges(), [0, 0]);
    assert_eq!(queue_pairs.ends_told(), 1, "{:?}", queue_pairs.told);
    for lab in &mut queue_pairs.labs {
        let (device, mut cx) = lab.lend();
        assert!(device.queue_pairs.is_at_rest());
        assert_eq!(device.shard.ports().len(), 0);
        let mut next = bare::start(device);
        device.turn(&mut cx);
        assert!(
            next.received().is_empty(),
            "the next driver has no part in it"
        );
    }
}

#[test]
fn one_that_has_arrived_when_its_old_lane_is_reset_ends() {
    // The sibling has not taken note yet: what it has sent to the old queue_pair is lost.
    let mut queue_pairs = QueuePairSet::new();
    let handoff = queue_pairs.leave().expect("it leaves");
    queue_pairs.arrive(handoff);
    let outbox = queue_pairs.labs[NEW].lend().1.outbox;
    let said: Vec<_> = std::iter::from_fn(|| outbox.pop_local()).collect();
    for (vm, message) in said {
        if vm as usize == OLD {
            let (device, mut cx) = queue_pairs.labs[OLD].lend();
            device.sibling_says(message, &mut cx);
        }
    }
    queue_pairs.command(OLD, DeviceCommand::ResetDevice);
    queue_pairs.carry();
    assert_eq!(queue_pairs.bridges(), [0, 0]);
    assert_eq!(queue_pairs.ends_told(), 1, "{:?}", queue_pairs.told);
    assert!(queue_pairs.labs[NEW].lend().0.queue_pairs.is_at_rest());
}

#[test]
fn nothing_leaves_a_lane_whose_queue_is_stopped() {
    let mut queue_pairs = QueuePairSet::new();
    let local = queue_pairs.local();
    queue_pairs.guest_says(OLD, local, Op::Move);
    queue_pairs.command(OLD, DeviceCommand::StopQueue { index: TX });
    assert!(queue_pairs.labs[OLD].lend().0.tx.is_none());
    let (device, mut cx) = queue_pairs.labs[OLD].lend();
    let Some((_, Message::HandOff { to, pair })) = self_message(&mut cx) else {
        panic!("it was to leave");
    };
    assert!(device.extract(to, pair, &mut cx).is_none());
    queue_pairs.carry();
    assert_eq!(queue_pairs.bridges(), [0, 1]);
    assert_eq!(
        queue_pairs.received(OLD),
        [(Some(Op::Moved), OLD as u32)],
        "it stays"
    );
}

#[test]
fn one_that_finds_its_addresses_taken_ends_for_everybody() {
    let mut queue_pairs = QueuePairSet::new();
    let local = queue_pairs.local();
    let (device, mut cx) = queue_pairs.labs[NEW].lend();
    let stream = SocketType::Stream;
    device.shard.connect(cx.now, local, HERE, stream).unwrap();
    device.turn(&mut cx);
    let handoff = queue_pairs.leave().expect("it leaves");
    queue_pairs.arrive(handoff);
    queue_pairs.carry();
    assert_eq!(queue_pairs.bridges(), [0, 0]);
    assert_eq!(queue_pairs.ends_told(), 1);
    assert_eq!(queue_pairs.received(OLD), [(Some(Op::Rst), 0)]);
    assert!(queue_pairs.labs[OLD].lend().0.queue_pairs.is_at_rest());
    let mut stats = Stats::default();
    for lab in &mut queue_pairs.labs {
        lab.lend().1.counters.add_to(&mut stats);
    }
    assert_eq!((stats.conns_added, stats.conns_removed), (1, 1));
}
