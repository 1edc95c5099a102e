//! Handoffs between two queue pairs of one device during which the driver stops or resets a pair.
//! The test delivers the messages between the pairs, in an order of its own.

use std::sync::Arc;
use zerosock_proto::vsock::{PortTable, QueuePairs, Shard, ShardConfig};
use zerosock_proto::wire::vsock::{Op, Repr};
use zerosock_proto::{Address, Cid, Instant, Port};
use zerosock_vhost_user::{DeviceCommand, Reply};
use zerosock_virtio::device::WorkerDevice;
use zerosock_virtio::outbox::DeviceAddr;

use super::bare::{self, Guest};
use super::lab::Lab;
use super::*;
use crate::device::state::peer::Peer;
use crate::device::state::sibling_message::{Handoff, SiblingMessage};
use crate::stats::Stats;

const THERE: Address = Address::new(Cid::HOST, Port::new(9));
const HERE: Address = Address::new(Cid::new(3), Port::new(5));
const SIBLING: DeviceAddr = DeviceAddr {
    worker: 0,
    number: 7,
};
/// Connections move from pair 1 to pair 0.
const OLD: usize = 1;
const NEW: usize = 0;

struct TwoPairs {
    labs: [Lab; 2],
    guests: [Guest; 2],
    /// The connection at the old queue pair.
    flow: FlowId,
    /// The flow of the sibling.
    there: FlowId,
    /// Messages sent to the sibling.
    told: Vec<SiblingMessage>,
}

impl TwoPairs {
    fn new() -> TwoPairs {
        let addrs = [0, 1].map(|vm| DeviceAddr {
            worker: 0,
            number: vm,
        });
        let two = QueuePairs::new(2).unwrap();
        let ports = Arc::new(PortTable::new());
        let mut labs = [0, 1].map(|_| Lab::of(ports.clone()));
        let guests = [0, 1].map(|pair| {
            let device = labs[pair].lend().0;
            device.addr = addrs[pair];
            device.set_queue_pair(pair as u16, Arc::new(addrs));
            device.shard.set_moves(true);
            device.queue_pairs.used = two;
            bare::start(device)
        });
        let there = some_flow();
        let (device, mut cx) = labs[OLD].lend();
        // The first pair has forwarded this request to the old pair.
        let local = (0..)
            .map(|port| Address::new(THERE.cid, Port::new(port)))
            .find(|local| two.of_flow(HERE.port, *local) == OLD as u16)
            .unwrap();
        let from = Peer {
            device: SIBLING,
            flow: there,
        };
        let connect = SiblingMessage::Connect {
            from,
            local,
            peer: HERE,
            socket_type: SocketType::Stream,
        };
        device.handle_sibling_message(connect, &mut cx);
        device.turn(&mut cx);
        let key = device.bridges.keys()[0];
        let flow = device.bridges.get(key).unwrap().flow.unwrap();
        let mut pairs = TwoPairs {
            labs,
            guests,
            flow,
            there,
            told: Vec::new(),
        };
        pairs.guest_sends(OLD, local, Op::Response);
        pairs.deliver_messages();
        let accepted = |one: &SiblingMessage| matches!(one, SiblingMessage::Accepted { .. });
        assert!(pairs.told.iter().any(accepted), "{:?}", pairs.told);
        pairs.told.clear();
        pairs.guests[OLD].received();
        pairs
    }

    fn local(&mut self) -> Address {
        let device = self.labs[OLD].lend().0;
        device.shard.flow(self.flow).unwrap().local
    }

    fn guest_sends(&mut self, queue_pair: usize, to: Address, op: Op) {
        self.guests[queue_pair].send(HERE.port.get(), to, op, 0);
        let (device, mut cx) = self.labs[queue_pair].lend();
        device.turn(&mut cx);
    }

    /// Sends MOVE and extracts the connection from the old queue pair.
    fn extract(&mut self) -> Option<Box<Handoff>> {
        let local = self.local();
        self.guest_sends(OLD, local, Op::Move);
        let (device, mut cx) = self.labs[OLD].lend();
        let Some((0, SiblingMessage::HandOff { to, pair })) = self_message(&mut cx) else {
            return None;
        };
        let (queue_pair, handoff) = device.extract(to, pair, &mut cx)?;
        assert_eq!(queue_pair.number, NEW as u32);
        Some(handoff)
    }

    fn take_over(&mut self, handoff: Box<Handoff>) {
        let (device, mut cx) = self.labs[NEW].lend();
        device.handle_sibling_message(SiblingMessage::TakeOver(handoff), &mut cx);
    }

    /// Delivers messages until there are none; answers `Relocated` for the sibling.
    fn deliver_messages(&mut self) {
        loop {
            let mut messages = Vec::new();
            for lab in &mut self.labs {
                let (device, mut cx) = lab.lend();
                device.turn(&mut cx);
                messages.extend(std::iter::from_fn(|| cx.outbox.pop_local()));
            }
            if messages.is_empty() {
                return;
            }
            for (vm, message) in messages {
                match (vm as usize, message) {
                    (queue_pair @ (0 | 1), message) => {
                        let (device, mut cx) = self.labs[queue_pair].lend();
                        device.handle_sibling_message(message, &mut cx);
                    }
                    (_, SiblingMessage::Relocated { to, from, old }) => {
                        assert_eq!(to, self.there);
                        let to = old.flow;
                        let (device, mut cx) = self.labs[old.device.number as usize].lend();
                        device.handle_sibling_message(SiblingMessage::Flushed { to }, &mut cx);
                        self.told.push(SiblingMessage::Asking { to, from });
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

    fn resets_sent(&self) -> usize {
        let is_end = |one: &&SiblingMessage| matches!(one, SiblingMessage::Reset { .. });
        self.told.iter().filter(is_end).count()
    }

    fn received(&mut self, queue_pair: usize) -> Vec<(Option<Op>, u32)> {
        let received = self.guests[queue_pair].received();
        let told = |header: &Repr| (header.op.known(), header.flags);
        received.iter().map(told).collect()
    }
}

/// The next message of the old pair to its own worker.
fn self_message(cx: &mut Context<'_>) -> Option<(usize, SiblingMessage)> {
    let (vm, message) = cx.outbox.pop_local()?;
    assert_eq!(vm, OLD as u32);
    Some((0, message))
}

/// A flow of another device.
fn some_flow() -> FlowId {
    let ports = Arc::new(PortTable::new());
    let cid = Cid::new(4);
    let mut shard = Shard::new(ShardConfig::driver(cid), ports);
    let local = Address::new(cid, THERE.port);
    let stream = SocketType::Stream;
    shard.connect(Instant::ZERO, local, HERE, stream).unwrap()
}

#[test]
fn moved_connection_continues_at_the_new_queue_pair() {
    let mut pairs = TwoPairs::new();
    let handoff = pairs.extract().expect("handed off");
    assert_eq!(pairs.bridges(), [0, 0]);
    pairs.take_over(handoff);
    pairs.deliver_messages();
    assert_eq!(pairs.bridges(), [1, 0]);
    assert_eq!(pairs.resets_sent(), 0);
    assert_eq!(pairs.received(OLD), [(Some(Op::Moved), 0)]);
    let old = &pairs.labs[OLD].lend().0.queue_pairs;
    assert!(old.is_at_rest() && pairs.labs[NEW].lend().0.queue_pairs.is_at_rest());
}

#[test]
fn handoff_that_arrives_after_a_reset_ends_the_connection() {
    // The new pair processes the reset before the connection arrives.
    let mut pairs = TwoPairs::new();
    let handoff = pairs.extract().expect("handed off");
    for queue_pair in [NEW, OLD] {
        pairs.command(queue_pair, DeviceCommand::ResetDevice);
    }
    pairs.take_over(handoff);
    assert_eq!(
        pairs.bridges(),
        [1, 0],
        "the new pair cannot know of the reset"
    );
    pairs.deliver_messages();
    assert_eq!(pairs.bridges(), [0, 0]);
    assert_eq!(pairs.resets_sent(), 1, "{:?}", pairs.told);
    for lab in &mut pairs.labs {
        let (device, mut cx) = lab.lend();
        assert!(device.queue_pairs.is_at_rest());
        assert_eq!(device.shard.ports().len(), 0);
        let mut next = bare::start(device);
        device.turn(&mut cx);
        assert!(
            next.received().is_empty(),
            "the next driver receives no packet about it"
        );
    }
}

#[test]
fn reset_of_the_old_queue_pair_ends_a_connection_that_was_taken_over() {
    // The sibling has not processed `Relocated`: its messages to the old pair are lost.
    let mut pairs = TwoPairs::new();
    let handoff = pairs.extract().expect("handed off");
    pairs.take_over(handoff);
    let outbox = pairs.labs[NEW].lend().1.outbox;
    let messages: Vec<_> = std::iter::from_fn(|| outbox.pop_local()).collect();
    for (vm, message) in messages {
        if vm as usize == OLD {
            let (device, mut cx) = pairs.labs[OLD].lend();
            device.handle_sibling_message(message, &mut cx);
        }
    }
    pairs.command(OLD, DeviceCommand::ResetDevice);
    pairs.deliver_messages();
    assert_eq!(pairs.bridges(), [0, 0]);
    assert_eq!(pairs.resets_sent(), 1, "{:?}", pairs.told);
    assert!(pairs.labs[NEW].lend().0.queue_pairs.is_at_rest());
}

#[test]
fn stopped_queue_pair_refuses_a_move() {
    let mut pairs = TwoPairs::new();
    let local = pairs.local();
    pairs.guest_sends(OLD, local, Op::Move);
    pairs.command(OLD, DeviceCommand::StopQueue { index: TX });
    assert!(pairs.labs[OLD].lend().0.queues.rings.tx.is_none());
    let (device, mut cx) = pairs.labs[OLD].lend();
    let Some((_, SiblingMessage::HandOff { to, pair })) = self_message(&mut cx) else {
        panic!("no handoff was requested");
    };
    assert!(device.extract(to, pair, &mut cx).is_none());
    pairs.deliver_messages();
    assert_eq!(pairs.bridges(), [0, 1]);
    assert_eq!(
        pairs.received(OLD),
        [(Some(Op::Moved), OLD as u32)],
        "the move is refused"
    );
}

#[test]
fn handoff_to_a_pair_with_the_same_addresses_resets_both_ends() {
    let mut pairs = TwoPairs::new();
    let local = pairs.local();
    let (device, mut cx) = pairs.labs[NEW].lend();
    let stream = SocketType::Stream;
    device.shard.connect(cx.now, local, HERE, stream).unwrap();
    device.turn(&mut cx);
    let handoff = pairs.extract().expect("handed off");
    pairs.take_over(handoff);
    pairs.deliver_messages();
    assert_eq!(pairs.bridges(), [0, 0]);
    assert_eq!(pairs.resets_sent(), 1);
    assert_eq!(pairs.received(OLD), [(Some(Op::Rst), 0)]);
    assert!(pairs.labs[OLD].lend().0.queue_pairs.is_at_rest());
    let mut stats = Stats::default();
    for lab in &mut pairs.labs {
        lab.lend().1.shared.counters.add_to(&mut stats);
    }
    assert_eq!((stats.conns_added, stats.conns_removed), (1, 1));
}
