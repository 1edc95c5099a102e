//! What a device may do in one turn before the worker's other devices have theirs, and what one
//! connection may do before the device's other connections: in packets, reads and bytes. Turns are
//! counted one by one.

use std::collections::BTreeMap;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::time::{Duration, Instant};

use zerosock_proto::vsock::datagram::F_DGRAM;
use zerosock_proto::wire::vsock::{Op, Repr, SocketType};
use zerosock_proto::{Address, Cid, Port};
use zerosock_sys::account::Budget;
use zerosock_sys::socket_path;

use super::factory::{Member, MemberState, Terms};
use super::state::bridge::BridgePeer;
use super::state::flags::Flags;
use super::teardown::PART;
use super::traffic::TrafficBoard;
use super::{Shared, Worker};
use crate::device::host_sockets::hybrid::OkConvention;
use crate::device::state::turn_budget::{MAX_TURN_BYTES, OBSERVED_TURNS};
use crate::device::test_guest::{self, Guest};
use crate::device::{DriverKind, HostAccess, Limits, TURN_BYTES};
use crate::routing::Routes;
use crate::routing::forward::{ForwardRule, ForwardRules};
use crate::table::leases::Leases;
use crate::table::sockets::{Sockets, StreamState};
use zerosock_vhost_user::{DeviceCommand, DeviceReply, Reply};
use zerosock_virtio::device::WorkerDevice;
use zerosock_virtio::mailbox::Mailbox;
use zerosock_virtio::outbox::DeviceAddr;

/// Packets handled from a guest in one turn.
const FROM_GUEST: u64 = 256;
/// Reads from sockets or siblings in one turn.
const READS: usize = 64;
/// Bytes, in whole buffers, or packets, in one read.
const READ_BYTES: u32 = TURN_BYTES as u32 + MAX_PAYLOAD as u32;
const READ_PACKETS: usize = 32;
const MAX_PAYLOAD: u64 = 64 << 10;

/// A worker and its devices.
struct Harness {
    dir: tempfile::TempDir,
    worker: Worker,
    /// Numbers of the devices. Their guests have CIDs from 3 on.
    numbers: Vec<u32>,
    guests: Vec<Guest>,
    /// The next port of a guest; all are different.
    port: AtomicU32,
}

impl Harness {
    fn new(guests: u32) -> Harness {
        let dir = tempfile::tempdir().unwrap();
        let (sender, mailbox) = Mailbox::new().unwrap();
        // Else the first connect to a path waits for the connector.
        socket_path::learn_mounts().unwrap();
        let hour = Duration::from_secs(3600);
        let limits = Limits {
            handshake: hour,
            connect: hour,
            // No timer may end what a test measures.
            hold: hour,
            overflow: 1 << 30,
            old_memory: 0,
            handshakes: 1,
            lingering: 1,
            linger: hour,
            ok: OkConvention::GuestPort,
        };
        let shared = Shared {
            routes: Default::default(),
            counters: Default::default(),
            limits,
            connector: None,
            mailbox: Some(sender.clone()),
            app: None,
        };
        let worker = Worker::new(0, vec![sender], mailbox, shared);
        let terms = Terms {
            traffic: TrafficBoard::default(),
            max_connections: 1024,
            connect_timeout: hour,
            queue_pairs: zerosock_proto::vsock::QueuePairs::ONE,
        };
        let mut routes = Routes::default();
        let mut lab = Harness {
            worker: worker.unwrap(),
            numbers: Vec::new(),
            guests: Vec::new(),
            port: AtomicU32::new(5000),
            dir,
        };
        for vm in 0..guests {
            let cid = Cid::new(3 + vm);
            let addr = DeviceAddr {
                worker: 0,
                number: vm,
            };
            routes.add(cid, addr, &["default".to_owned()]);
            let member = Member {
                cid,
                host: HostAccess::Hybrid {
                    services: lab.uds_path(3 + vm).into(),
                    listener: None,
                    messages: None,
                },
                buf_alloc: 16 << 20,
                service: None,
                driver: DriverKind::Vm,
                account: Budget::unlimited().account(),
                stopped_timeout: None,
                guests: None,
                state: MemberState::default(),
            };
            let queue_pairs: Arc<[DeviceAddr]> = Arc::new([addr]);
            let [mut device] = terms.devices(&queue_pairs, member).try_into().unwrap();
            device.datagrams.set_features(F_DGRAM);
            lab.guests.push(test_guest::start(&mut device));
            lab.numbers.push(vm);
            lab.worker.add(device);
        }
        lab.worker.shared.routes = Arc::new(routes);
        lab.worker.start().unwrap();
        lab
    }

    fn uds_path(&self, cid: u32) -> PathBuf {
        self.dir.path().join(format!("vm{cid}"))
    }

    /// Kicks all guests and gives each active device a turn.
    fn turn(&mut self) {
        for vm in self.numbers.clone() {
            self.worker.activate(vm);
        }
        assert!(self.worker.step(Some(Duration::ZERO)).unwrap());
    }

    fn settle(&mut self) {
        self.turn();
        while !self.worker.is_idle() {
            self.turn();
        }
    }

    /// Gives turns until `look` has found something: a connect to a path waits for the connector if a mount
    /// has come or gone anywhere in the system.
    fn settle_until<T>(&mut self, mut look: impl FnMut(&mut Harness) -> Option<T>) -> T {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            self.settle();
            if let Some(found) = look(self) {
                return found;
            }
            assert!(Instant::now() < deadline, "the connect has no outcome");
            std::thread::yield_now();
        }
    }

    /// A connection from a guest to a host program of its own.
    fn join(&mut self, guest: usize) -> (u32, UnixStream) {
        let port = *self.port.get_mut();
        *self.port.get_mut() += 1;
        let path = self.uds_path(3 + guest as u32);
        let listener = UnixListener::bind(format!("{}_{port}", path.display())).unwrap();
        self.guests[guest].send(port, host(port), Op::Request, 0);
        let answer = self.settle_until(|lab| {
            let packets = lab.guests[guest].received();
            (!packets.is_empty()).then_some(packets)
        });
        assert_op(&answer, Op::Response);
        let (program, _) = listener.accept().unwrap();
        program.set_nonblocking(true).unwrap();
        (port, program)
    }

    /// Connections of a guest that nothing but their end concerns.
    fn crowd(&mut self, guest: u32, count: usize) {
        let now = self.worker.clock().now();
        let (device, mut cx) = self.worker.lend(guest, now);
        let device = device.unwrap();
        let local = Address::new(Cid::HOST, Port::ANY);
        let peer = Address::new(device.cid, Port::new(1));
        for _ in 0..count {
            let flow = device.shard.connect(now, local, peer, SocketType::Stream);
            let flow = flow.unwrap();
            assert!(device.bridges_with(&mut cx).reserve_bridge(flow));
            device
                .bridges_with(&mut cx)
                .add_bridge(flow, BridgePeer::Asked(None));
        }
    }

    fn connections(&self, guest: u32) -> usize {
        self.worker.devices.get(guest).unwrap().bridges.len()
    }

    /// Packets and bytes from all guests so far.
    fn taken_in(&self) -> (u64, u64) {
        let mut sum = Default::default();
        self.worker.shared.counters.add_to(&mut sum);
        (sum.rx_packets, sum.rx_bytes)
    }
}

fn host(port: u32) -> Address {
    Address::new(Cid::HOST, Port::new(port))
}

#[track_caller]
fn assert_op(packets: &[Repr], op: Op) {
    let ops: Vec<_> = packets.iter().map(|packet| packet.op.known()).collect();
    assert_eq!(ops, [Some(op)]);
}

/// Bytes that a program can read.
fn read_all(program: &mut UnixStream) -> usize {
    let mut all = 0;
    let mut bytes = vec![0; 1 << 20];
    loop {
        match program.read(&mut bytes) {
            Ok(0) => panic!("the connection has ended"),
            Ok(more) => all += more,
            Err(error) if error.kind() == ErrorKind::WouldBlock => return all,
            Err(error) => panic!("{error}"),
        }
    }
}

/// Fills the receive buffer of a program's socket.
fn fill(program: &mut UnixStream) {
    let bytes = [7; 4096];
    while program.write(&bytes).is_ok() {}
}

/// The order of reads, by their packets: the connection and the bytes read, with a new entry for
/// each change of connection.
fn reads(packets: &[Repr]) -> Vec<(u32, usize, u32)> {
    let mut reads: Vec<(u32, usize, u32)> = Vec::new();
    let data = packets
        .iter()
        .filter(|packet| packet.op.known() == Some(Op::Rw));
    for packet in data {
        let port = packet.dst.port.get();
        match reads.last_mut() {
            Some((last, packets, bytes)) if *last == port => {
                *packets += 1;
                *bytes += packet.len;
            }
            _ => reads.push((port, 1, packet.len)),
        }
    }
    reads
}

#[test]
fn packets_of_one_guest_per_turn_are_bounded_and_other_guests_have_turns() {
    let mut lab = Harness::new(2);
    let (bulk, mut sink) = lab.join(0);
    let (small, mut other) = lab.join(1);
    for _ in 0..50 {
        while lab.guests[0].try_send(bulk, host(bulk), Op::Rw, 1) {}
        lab.guests[1].send(small, host(small), Op::Rw, 1);
        let (before, _) = lab.taken_in();
        lab.turn();
        assert_eq!(lab.taken_in().0 - before, FROM_GUEST + 1);
        assert_eq!(read_all(&mut sink) as u64, FROM_GUEST);
        assert_eq!(read_all(&mut other), 1);
    }
}

#[test]
fn bytes_of_one_guest_per_turn_are_bounded_and_other_guests_have_turns() {
    let mut lab = Harness::new(2);
    let (small, mut other) = lab.join(1);
    let most = TURN_BYTES as u64;
    // Never more than the credit; no program reads.
    let (bulk, _sink) = lab.join(0);
    for _ in 0..255 {
        lab.guests[0].send(bulk, host(bulk), Op::Rw, MAX_PAYLOAD as u32);
    }
    for turn in 0..7 {
        lab.guests[1].send(small, host(small), Op::Rw, 1);
        let (_, before) = lab.taken_in();
        lab.turn();
        let bytes = lab.taken_in().1 - before - 1;
        assert!((most..most + MAX_PAYLOAD).contains(&bytes), "{bytes}");
        assert_eq!(read_all(&mut other), 1, "turn {turn}");
    }
}

/// Bytes that a socket takes at once, and that are more than two of the smallest turns.
const WINDOW: usize = 5 * TURN_BYTES / 2;

/// A guest that sends more only when all was taken, and then more than a turn may take.
#[test]
fn turns_of_a_guest_that_waits_for_them_grow_and_other_guests_have_turns() {
    let mut lab = Harness::new(2);
    let (bulk, mut sink) = lab.join(0);
    let (small, mut other) = lab.join(1);
    let send = |lab: &mut Harness, len| lab.guests[0].send(bulk, host(bulk), Op::Rw, len);
    let mut turns = Vec::new();
    // In each round two turns leave something.
    const SMALL_ROUNDS: usize = OBSERVED_TURNS as usize / 2;
    for _ in 0..SMALL_ROUNDS + 3 {
        send(&mut lab, MAX_PAYLOAD as u32);
        send(&mut lab, MAX_PAYLOAD as u32);
        send(&mut lab, MAX_PAYLOAD as u32 / 2);
        let (mut count, mut left) = (0, WINDOW);
        while left > 0 {
            lab.turn();
            left -= read_all(&mut sink);
            count += 1;
        }
        lab.settle();
        turns.push(count);
    }
    assert_eq!(turns[..SMALL_ROUNDS], [3; SMALL_ROUNDS]);
    assert_eq!(turns[SMALL_ROUNDS..], [1; 3]);
    let most = MAX_TURN_BYTES as u64;
    for _ in 0..24 {
        send(&mut lab, MAX_PAYLOAD as u32);
    }
    for turn in 0..6 {
        lab.guests[1].send(small, host(small), Op::Rw, 1);
        let (_, before) = lab.taken_in();
        lab.turn();
        let bytes = lab.taken_in().1 - before - 1;
        assert!((most..most + MAX_PAYLOAD).contains(&bytes), "{bytes}");
        assert_eq!(read_all(&mut other), 1, "turn {turn}");
    }
}

/// A program that writes more only when all was read, alone and beside others.
#[test]
fn turns_to_a_guest_grow_for_a_connection_that_is_ready_alone() {
    let mut lab = Harness::new(2);
    let (port, mut bulk) = lab.join(0);
    let (_, mut second) = lab.join(0);
    let (_, mut neighbour) = lab.join(1);
    let bytes_of_turn = |lab: &mut Harness| {
        lab.turn();
        let packets = lab.guests[0].received();
        packets.iter().map(|packet| packet.len as usize).sum()
    };
    for _ in 0..OBSERVED_TURNS {
        bulk.write_all(&vec![7; WINDOW]).unwrap();
        let mut left = WINDOW;
        while left > 0 {
            let bytes: usize = bytes_of_turn(&mut lab);
            left -= bytes;
        }
        lab.guests[0].send(port, host(port), Op::CreditUpdate, 0);
        lab.settle();
    }
    neighbour.write_all(&[1]).unwrap();
    bulk.write_all(&vec![7; WINDOW]).unwrap();
    assert_eq!(bytes_of_turn(&mut lab), WINDOW, "in one turn");
    assert_op(&lab.guests[1].received(), Op::Rw);
    lab.settle();
    for program in [&mut bulk, &mut second] {
        program.write_all(&vec![7; WINDOW]).unwrap();
    }
    neighbour.write_all(&[1]).unwrap();
    let bytes = bytes_of_turn(&mut lab);
    let bound = TURN_BYTES..TURN_BYTES + READ_BYTES as usize;
    assert!(bound.contains(&bytes), "{bytes}");
    assert_op(&lab.guests[1].received(), Op::Rw);
}

/// Programs that write without end, and programs with one byte.
#[test]
fn connections_to_a_guest_alternate_and_bytes_per_turn_are_bounded() {
    let mut lab = Harness::new(2);
    let mut bulk: Vec<_> = (0..40).map(|_| lab.join(0)).collect();
    let mut few: Vec<_> = (0..10).map(|_| lab.join(0)).collect();
    let (_, mut neighbour) = lab.join(1);
    let mut most = 0;
    for round in 0..20 {
        bulk.iter_mut().for_each(|(_, program)| fill(program));
        for (_, program) in &mut few {
            program.write_all(&[round]).unwrap();
        }
        // Ready connections have been served before an earlier one has its second turn.
        let mut waiting = few.len();
        let mut served = BTreeMap::<u32, usize>::new();
        while waiting > 0 {
            neighbour.write_all(&[round]).unwrap();
            lab.turn();
            let packets = lab.guests[0].received();
            let data = packets
                .iter()
                .filter(|packet| packet.op.known() == Some(Op::Rw));
            let bytes: u32 = data.map(|packet| packet.len).sum();
            assert!(bytes < TURN_BYTES as u32 + READ_BYTES, "{bytes} in a turn");
            most = most.max(bytes);
            let reads = reads(&packets);
            assert!(reads.len() <= READS, "{} reads in a turn", reads.len());
            for (port, packets, bytes) in reads {
                assert!(packets <= READ_PACKETS && bytes <= READ_BYTES);
                let is_small = few.iter().any(|(one, _)| *one == port);
                waiting -= usize::from(is_small);
                let times = served.entry(port).or_default();
                *times += 1;
                assert!(*times <= 2, "{waiting} still wait");
            }
            assert_op(&lab.guests[1].received(), Op::Rw);
        }
    }
    assert!(most >= TURN_BYTES as u32, "{most}: never a turn's bytes");
}

/// A socket that answers a datagram without end, and a program that writes without end.
#[test]
fn answers_to_datagrams_do_not_delay_streams() {
    const ANSWER: usize = 16_000;
    let mut lab = Harness::new(1);
    let path = lab.dir.path().join("flood");
    let flood = UnixDatagram::bind(&path).unwrap();
    flood.set_nonblocking(true).unwrap();
    let target = format!("unix-dgram:{}", path.display());
    let port = Port::new(514);
    let rule = ForwardRule::new(port..=port, target.parse().unwrap());
    let rules = ForwardRules::default().replaced(vec![rule]).unwrap();
    Arc::make_mut(&mut lab.worker.shared.routes).set_forward(rules);
    let (_, mut program) = lab.join(0);
    lab.guests[0].send_datagram(1000, host(514), 1);
    let (_, guest) = lab.settle_until(|_| flood.recv_from(&mut [0]).ok());
    let refill = || while flood.send_to_addr(&[7; ANSWER], &guest).is_ok() {};
    for turn in 0..20 {
        fill(&mut program);
        refill();
        lab.turn();
        let (mut answers, mut stream) = (0, 0);
        for packet in lab.guests[0].received() {
            match packet.socket_type.known() {
                Some(SocketType::Datagram) => answers += packet.len as usize,
                _ => stream += packet.len as usize,
            }
        }
        assert!(stream >= TURN_BYTES, "turn {turn}: {stream}");
        let share = ANSWER..TURN_BYTES / 2 + ANSWER;
        assert!(share.contains(&answers), "turn {turn}: {answers}");
    }
    // Without a stream that is ready they have all of it.
    lab.settle();
    let _ = lab.guests[0].received();
    refill();
    lab.turn();
    let answers: u32 = lab.guests[0].received().iter().map(|it| it.len).sum();
    assert!(answers as usize >= TURN_BYTES, "{answers}");
}

#[test]
fn reads_per_turn_are_bounded_however_small() {
    let mut lab = Harness::new(2);
    let mut programs: Vec<_> = (0..120).map(|_| lab.join(0)).collect();
    let (_, mut neighbour) = lab.join(1);
    for round in 0..10 {
        for (_, program) in &mut programs {
            program.write_all(&[round]).unwrap();
        }
        // Fewer than the events of one wait.
        let mut order = Vec::new();
        while order.len() < programs.len() {
            neighbour.write_all(&[round]).unwrap();
            lab.turn();
            let reads = reads(&lab.guests[0].received());
            assert!(reads.len() <= READS, "{} reads in a turn", reads.len());
            order.extend(reads.iter().map(|(port, ..)| *port));
            let [packet] = lab.guests[1].received().try_into().unwrap();
            assert_eq!((packet.op.known(), packet.len), (Some(Op::Rw), 1));
        }
        order.sort_unstable();
        order.dedup();
        assert_eq!(order.len(), programs.len(), "each once");
    }
}

/// A sibling that sends without end, and a program that writes a byte now and then.
#[test]
fn a_sibling_that_sends_without_end_does_not_starve_others() {
    let mut lab = Harness::new(2);
    let to = Address::new(Cid::new(4), Port::new(77));
    lab.guests[0].send(4000, to, Op::Request, 0);
    lab.settle();
    assert_op(&lab.guests[1].received(), Op::Request);
    let from = Address::new(Cid::new(3), Port::new(4000));
    lab.guests[1].send(77, from, Op::Response, 0);
    lab.settle();
    assert_op(&lab.guests[0].received(), Op::Response);
    let (_, mut program) = lab.join(1);
    let mut bulk = 0;
    for round in 0..50 {
        while lab.guests[0].try_send(4000, to, Op::Rw, 1) {}
        program.write_all(&[round]).unwrap();
        lab.turn();
        let reads = reads(&lab.guests[1].received());
        let small = reads.iter().position(|(port, ..)| *port != 77);
        let before = reads.iter().take(small.expect("the byte, in this turn"));
        let before: usize = before.map(|(_, packets, _)| packets).sum();
        assert!(before <= READ_PACKETS, "{before} before the program's byte");
        let all: usize = reads.iter().map(|(_, packets, _)| packets).sum();
        assert!(all <= READS * READ_PACKETS, "{all} in a turn");
        bulk += all - 1;
    }
    assert!(bulk >= 50 * READ_PACKETS, "{bulk}");
}

/// The worker is awake when the answer comes.
#[test]
fn reads_of_a_program_wake_the_worker_once_bytes_were_sent_to_it() {
    let mut lab = Harness::new(1);
    let (port, mut program) = lab.join(0);
    let is_woken = |lab: &mut Harness| lab.worker.poll_events(Some(Duration::ZERO)).unwrap().1;
    assert!(!is_woken(&mut lab), "the connection is established");
    lab.guests[0].send(port, host(port), Op::Rw, 1000);
    lab.settle();
    // Room that there was already.
    assert!(is_woken(&mut lab));
    assert_eq!(read_all(&mut program), 1000);
    assert!(is_woken(&mut lab), "by the read");
    assert!(!is_woken(&mut lab));
    const LEN: usize = 50_000;
    for _ in 0..20 {
        lab.guests[0].send(port, host(port), Op::Rw, LEN as u32);
    }
    lab.settle();
    let mut read = read_all(&mut program);
    assert!(read < 20 * LEN, "the socket was not full");
    while read < 20 * LEN {
        assert!(is_woken(&mut lab));
        lab.settle();
        read += read_all(&mut program);
    }
}

/// The driver resets the device, or the front-end disconnects.
#[test]
fn connections_that_end_together_per_turn_are_bounded_and_other_guests_have_turns() {
    const COUNT: usize = 1000;
    for disconnects in [false, true] {
        let mut lab = Harness::new(2);
        let (small, mut other) = lab.join(1);
        lab.crowd(0, COUNT);
        let order = match disconnects {
            false => DeviceCommand::ResetDevice,
            true => DeviceCommand::Disconnected,
        };
        let (reply, answer) = Reply::channel();
        let now = lab.worker.clock().now();
        let (device, mut cx) = lab.worker.lend(0, now);
        device.unwrap().command(order, reply, &mut cx);
        let (mut left, mut turns) = (COUNT, 0);
        while left > 0 {
            let now = lab.connections(0);
            // Messages between guests give a device a second turn.
            assert!(left - now <= 2 * PART, "{} in turn {turns}", left - now);
            left = now;
            if left > 0 {
                // Not before the last connection has ended: the next driver may follow.
                assert!(answer.try_recv().is_err());
                lab.guests[1].send(7000 + turns, to_first(), Op::Request, 0);
            }
            lab.guests[1].send(small, host(small), Op::Rw, 1);
            lab.turn();
            assert_eq!(read_all(&mut other), 1, "turn {turns}");
            turns += 1;
        }
        lab.settle();
        assert_eq!(answer.try_recv(), Ok(DeviceReply::Done));
        // No connection began meanwhile.
        let refused = lab.guests[1].received();
        assert!(!refused.is_empty());
        assert!(
            refused
                .iter()
                .all(|packet| packet.op.known() == Some(Op::Rst))
        );
        let device = lab.worker.devices.get(0).unwrap();
        assert_eq!((device.bridges.len(), device.shard.occupied()), (0, 0));
    }
}

/// The same for connections of the embedding program.
#[test]
fn connections_of_the_program_that_end_together_per_turn_are_bounded() {
    const COUNT: usize = 1000;
    let mut lab = Harness::new(1);
    let now = lab.worker.clock().now();
    let (device, mut cx) = lab.worker.lend(0, now);
    let device = device.unwrap();
    let mut sockets = Sockets::<()>::new(Arc::new(Leases::new(1)), Duration::ZERO, 0);
    let pool = sockets.add_pool(COUNT as u32);
    let local = Address::new(Cid::HOST, Port::ANY);
    let peer = Address::new(device.cid, Port::new(1));
    for _ in 0..COUNT {
        let flow = device
            .shard
            .connect(now, local, peer, SocketType::Stream)
            .unwrap();
        let state = StreamState::Connecting;
        let id = sockets.insert(pool, flow, state, local, peer, SocketType::Stream);
        device.app.flows.reserve(flow).unwrap();
        device.app.flows.insert(flow, id);
    }
    let (reply, answer) = Reply::channel();
    device.command(DeviceCommand::ResetDevice, reply, &mut cx);
    let connections = |lab: &Harness| lab.worker.devices.get(0).unwrap().app.flows.len();
    let mut left = connections(&lab);
    assert!(left >= COUNT - PART);
    while left > 0 {
        assert!(answer.try_recv().is_err());
        lab.turn();
        let now = connections(&lab);
        assert!(left - now <= PART, "{}", left - now);
        left = now;
    }
    lab.settle();
    assert_eq!(answer.try_recv(), Ok(DeviceReply::Done));
    assert_eq!(lab.worker.devices.get(0).unwrap().shard.occupied(), 0);
}

fn to_first() -> Address {
    Address::new(Cid::new(3), Port::new(9))
}

#[test]
fn connections_that_a_broken_queue_ends_per_turn_are_bounded() {
    const COUNT: usize = 1000;
    let mut lab = Harness::new(1);
    lab.crowd(0, COUNT);
    let device = lab.worker.devices.get_mut(0).unwrap();
    device.queues.rings.tx.as_mut().unwrap().reset_pending = true;
    let mut left = COUNT;
    while left > 0 {
        lab.turn();
        let now = lab.connections(0);
        assert!((1..=PART).contains(&(left - now)), "{}", left - now);
        left = now;
    }
}

#[test]
fn connections_of_lost_memory_end_without_its_bytes() {
    let mut lab = Harness::new(1);
    lab.crowd(0, 2 * PART);
    lab.settle();
    while !lab.guests[0].received().is_empty() {
        lab.settle();
    }
    // Its key is the last one: it ends in the last part.
    let (port, mut program) = lab.join(0);
    fill(&mut program);
    // The program's socket is full: the rest stays in the memory.
    for _ in 0..20 {
        lab.guests[0].send(port, host(port), Op::Rw, 50_000);
    }
    lab.settle();
    let now = lab.worker.clock().now();
    let (device, mut cx) = lab.worker.lend(0, now);
    let device = device.unwrap();
    device.fail("a test", &mut cx);
    let before = read_some(&mut program);
    // As for a bridge with bytes of the turn in which the memory has vanished.
    let key = 2 * PART as u32;
    let bridge = device.bridges.get_mut(key).unwrap();
    bridge.flags.insert(Flags::WRITABLE);
    device.bridges_with(&mut cx).flush(key);
    assert_eq!(read_some(&mut program), 0, "after {before} bytes");
    lab.settle();
    let ended = lab.connections(0);
    assert_eq!(
        (ended, read_some(&mut program)),
        (0, 0),
        "after {before} bytes"
    );
    assert!(lab.worker.devices.get(0).unwrap().queues.memory.is_none());
}

/// Bytes that a program can read, up to the end.
fn read_some(program: &mut UnixStream) -> usize {
    let mut bytes = vec![0; 1 << 20];
    std::iter::from_fn(|| program.read(&mut bytes).ok().filter(|&more| more > 0)).sum()
}
