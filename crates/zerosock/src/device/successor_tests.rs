//! A device on the rings of another one that was dropped without a goodbye.

use std::fs::File;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

use zerosock_proto::vsock::features::F_SEQPACKET;
use zerosock_proto::vsock::{Directions, FlowId, FlowLog, LoggedFlow};
use zerosock_proto::wire::vsock::{Op, Repr, SHUTDOWN_SEND, SocketType};
use zerosock_proto::{Address, Cid, Instant, Port};
use zerosock_ring::{Memory, StateMap};
use zerosock_virtio::command::{QueueStarted, VirtioDevice};
use zerosock_virtio::device::WorkerDevice;

use super::lab::DeviceFixture;
use super::state::flow_table::table_len;
use super::test_guest::{self, Guest};
use super::*;

const CONNECTIONS: usize = 8192;
const GUEST: Cid = Cid::new(3);
/// The port of a host program.
pub(super) const SERVICE: Address = Address::new(Cid::HOST, Port::new(1024));

/// A flow as the guest names it: its port, the other address and the type.
pub(super) type Named = (u32, Address, SocketType);

pub(super) struct Lab {
    pub(super) dir: tempfile::TempDir,
    pub(super) state: File,
    pub(super) lab: DeviceFixture,
    pub(super) guest: Guest,
}

impl Lab {
    pub(super) fn new() -> Lab {
        // Else the first connect to a path waits for the connector.
        zerosock_sys::socket_path::learn_mounts().unwrap();
        let state = zerosock_sys::memfd::create("flows", table_len(CONNECTIONS) as u64, true);
        let state = File::from(state.unwrap());
        let dir = tempfile::tempdir().unwrap();
        let mut lab = fixture(&dir, &state, None);
        let guest = test_guest::start(&mut lab.device);
        Lab {
            dir,
            state,
            lab,
            guest,
        }
    }

    pub(super) fn turn(&mut self) {
        let (device, mut cx) = self.lab.lend();
        device.turn(&mut cx);
    }

    /// Turns until the guest has got all packets.
    pub(super) fn packets(&mut self) -> Vec<Repr> {
        let mut all = Vec::new();
        loop {
            self.turn();
            let new = self.guest.received();
            if new.is_empty() {
                return all;
            }
            all.extend(new);
        }
    }

    /// Replaces the process: nothing of it remains but the rings, which `memory` has, and the state.
    fn crash(&mut self) -> Arc<Memory> {
        let rings = &self.lab.device.queues.rings;
        let bases = [&rings.tx, &rings.rx].map(|ring| ring.as_ref().unwrap().queue.base());
        let memory = self.lab.device.queues.memory.clone().unwrap();
        self.lab = fixture(&self.dir, &self.state, None);
        test_guest::resume(&mut self.lab.device, &memory, bases);
        memory
    }

    fn connect(&mut self, port: u32, socket_type: SocketType) -> (FlowId, Named) {
        let (device, cx) = self.lab.lend();
        let local = Address::new(Cid::HOST, Port::ANY);
        let peer = Address::new(GUEST, Port::new(port));
        let flow = device
            .shard
            .connect(cx.now, local, peer, socket_type)
            .unwrap();
        let local = device.shard.flow(flow).unwrap().local;
        (flow, (port, local, socket_type))
    }

    /// A connection of the host that the guest has accepted.
    pub(super) fn open(&mut self, port: u32) -> (FlowId, Named) {
        let (flow, named) = self.connect(port, SocketType::Stream);
        assert_eq!(ops(&self.packets()), [Op::Request]);
        self.guest.send(port, named.1, Op::Response, 0);
        self.turn();
        (flow, named)
    }

    pub(super) fn shut_down(&mut self, flow: FlowId, how: Directions) {
        let (device, cx) = self.lab.lend();
        device.shard.shutdown(cx.now, flow, how).unwrap();
        assert_eq!(ops(&self.packets()), [Op::Shutdown]);
    }

    /// A connection of the guest to a program of the host, that is open.
    pub(super) fn serve(&mut self, port: u32) -> (UnixListener, UnixStream) {
        let path = self.dir.path().join(format!("vm_{}", SERVICE.port));
        let _ = std::fs::remove_file(&path);
        let listener = UnixListener::bind(path).unwrap();
        self.guest.send(port, SERVICE, Op::Request, 0);
        assert_eq!(ops(&self.packets()), [Op::Response]);
        let (stream, _) = listener.accept().unwrap();
        (listener, stream)
    }
}

/// A device whose guest may connect to the host and back.
fn routed() -> DeviceFixture {
    let mut lab = DeviceFixture::with(|config| {
        config.max_connections = CONNECTIONS;
        config.accept_all = true;
    });
    let mut routes = crate::routing::Routes::default();
    routes.add(GUEST, lab.device.addr, &["default".to_owned()]);
    lab.shared.routes = Arc::new(routes);
    lab
}

/// A device with what a former process has left, without queues.
pub(super) fn fixture(
    dir: &tempfile::TempDir,
    state: &File,
    saved: Option<SavedDevice>,
) -> DeviceFixture {
    let mut lab = routed();
    let range = StateMap::map(state, table_len(CONNECTIONS)).unwrap();
    let (device, mut cx) = lab.lend();
    device.host = HostAccess::Hybrid {
        services: dir.path().join("vm").into(),
        listener: None,
        messages: None,
    };
    device.set_former_process(Some(range), false);
    device.succession.saved = saved;
    device.set_features(F_SEQPACKET);
    device.start(&mut cx).unwrap();
    lab
}

pub(super) fn ops(packets: &[Repr]) -> Vec<Op> {
    packets.iter().map(|it| it.op.known().unwrap()).collect()
}

pub(super) fn resets(packets: &[Repr]) -> Vec<Named> {
    let resets = packets.iter().filter(|it| it.op.known() == Some(Op::Rst));
    let named = resets.map(|it| (it.dst.port.get(), it.src, it.socket_type.known().unwrap()));
    let mut named: Vec<Named> = named.collect();
    named.sort_unstable_by_key(|&(port, ..)| port);
    named
}

#[test]
fn each_flow_of_a_killed_process_is_reset_once_whatever_its_state() {
    let mut lab = Lab::new();
    let mut expected = Vec::new();
    // The guest has not answered.
    expected.push(lab.connect(1, SocketType::Stream).1);
    expected.push(lab.connect(2, SocketType::SeqPacket).1);
    assert_eq!(ops(&lab.packets()), [Op::Request; 2]);
    expected.push(lab.open(3).1);
    let (_, half) = lab.open(4);
    lab.guest.shut_down(4, half.1, SHUTDOWN_SEND);
    lab.turn();
    expected.push(half);
    let (flow, half) = lab.open(5);
    lab.shut_down(
        flow,
        Directions {
            receive: false,
            send: true,
        },
    );
    expected.push(half);
    // The guest has not answered the SHUTDOWN.
    let (flow, closing) = lab.open(6);
    lab.shut_down(flow, Directions::BOTH);
    expected.push(closing);
    let _open = lab.serve(7);
    expected.push((7, SERVICE, SocketType::Stream));
    // These have ended, and the guest has been told or has told it.
    let (flow, _) = lab.open(8);
    lab.lab.device.shard.reset(flow).unwrap();
    assert_eq!(ops(&lab.packets()), [Op::Rst]);
    let (_, closed) = lab.open(9);
    lab.guest.send(9, closed.1, Op::Rst, 0);
    lab.turn();
    // An RST is not sent yet.
    let (flow, ended) = lab.open(10);
    lab.lab.device.shard.reset(flow).unwrap();
    expected.push(ended);

    lab.crash();
    let packets = lab.packets();
    assert_eq!(resets(&packets), expected);
    assert_eq!(packets.len(), expected.len());
    assert!(
        packets
            .iter()
            .all(|it| (it.buf_alloc, it.fwd_cnt, it.len) == (0, 0, 0))
    );

    // New connections, also with the addresses of old ones.
    let (device, cx) = lab.lab.lend();
    let (peer, stream) = (Address::new(GUEST, Port::new(3)), SocketType::Stream);
    device
        .shard
        .connect(cx.now, expected[2].1, peer, stream)
        .unwrap();
    let [request] = lab.packets().try_into().unwrap();
    assert_eq!(
        (request.op, request.src),
        (Op::Request.into(), expected[2].1)
    );
    lab.guest.send(3, request.src, Op::Response, 0);
    let _open = lab.serve(7);
    lab.turn();
    assert_eq!(lab.lab.device.shard.connections(), 2);

    // What was reset is no longer in the log: the next successor resets the new ones only.
    lab.crash();
    let new = [expected[2], (7, SERVICE, stream)];
    assert_eq!(resets(&lab.packets()), new);
    lab.crash();
    assert_eq!(lab.packets(), []);
    assert_eq!(lab.lab.device.shard.occupied(), 0);
}

#[test]
fn more_flows_than_buffers_are_reset_in_parts_before_a_new_connection() {
    const COUNT: u32 = 3000;
    let mut lab = Lab::new();
    let flows: Vec<Named> = (0..COUNT)
        .map(|port| lab.connect(port, SocketType::Stream).1)
        .collect();
    assert_eq!(lab.packets().len(), COUNT as usize);
    lab.crash();
    lab.connect(COUNT, SocketType::Stream);
    lab.turn();
    let mut packets = lab.guest.received();
    assert_eq!(packets.len(), usize::from(test_guest::SIZE), "a part");
    packets.extend(lab.packets());
    let last = packets.pop().unwrap();
    assert_eq!((last.op, last.dst.port.get()), (Op::Request.into(), COUNT));
    assert_eq!(resets(&packets), flows);
}

#[test]
fn a_process_killed_before_it_publishes_leaves_the_flow_in_the_log() {
    let mut lab = Lab::new();
    let (flow, open) = lab.open(1);
    lab.lab.device.shard.reset(flow).unwrap();
    // The RST is in a buffer that the guest does not see.
    let (device, mut cx) = lab.lab.lend();
    let base = device.queues.rings.rx.as_ref().unwrap().queue.base();
    device.transmit_control(&mut cx);
    let rings = &device.queues.rings;
    assert_eq!(rings.rx.as_ref().unwrap().queue.base(), base + 1);
    assert!(!device.shard.has_transmit());
    let tx = rings.tx.as_ref().unwrap().queue.base();
    let memory = device.queues.memory.clone().unwrap();
    lab.lab = fixture(&lab.dir, &lab.state, None);
    test_guest::resume(&mut lab.lab.device, &memory, [tx, base]);
    assert_eq!(resets(&lab.packets()), [open]);
}

/// A log with one entry that notes how many packets the guest could see when it was cleared.
#[derive(Debug)]
struct Spy {
    guest: Arc<Memory>,
    seen: Arc<AtomicU16>,
}

impl FlowLog for Spy {
    fn is_full(&self) -> bool {
        false
    }

    fn enter(&mut self, _: LoggedFlow) -> u32 {
        0
    }

    fn clear(&mut self, _: u32) {
        let mut pieces = Vec::new();
        let index = test_guest::config(test_guest::RX).used + 2;
        self.guest.translate(index, 2, &mut pieces).unwrap();
        let index = self.guest.read_array::<2>(&pieces, 0).unwrap();
        self.seen
            .store(u16::from_le_bytes(index), Ordering::Relaxed);
    }
}

#[test]
fn an_entry_is_cleared_when_the_guest_can_see_the_last_packet() {
    let mut lab = DeviceFixture::new();
    let mut guest = test_guest::start(&mut lab.device);
    let seen = Arc::new(AtomicU16::new(0));
    let spy = Spy {
        guest: lab.device.queues.memory.clone().unwrap(),
        seen: Arc::clone(&seen),
    };
    lab.device.shard.set_flow_log(Box::new(spy));
    let (device, mut cx) = lab.lend();
    let (local, peer) = (SERVICE, Address::new(GUEST, Port::new(1)));
    let stream = SocketType::Stream;
    let flow = device.shard.connect(cx.now, local, peer, stream).unwrap();
    device.turn(&mut cx);
    device.shard.reset(flow).unwrap();
    assert_eq!(seen.load(Ordering::Relaxed), 0);
    device.turn(&mut cx);
    assert_eq!(seen.load(Ordering::Relaxed), 2);
    assert_eq!(ops(&guest.received()), [Op::Request, Op::Rst]);
}

#[test]
fn a_driver_that_was_reset_gets_no_resets() {
    let mut lab = Lab::new();
    lab.open(1);
    lab.crash();
    let (device, mut cx) = lab.lab.lend();
    let reset = zerosock_vhost_user::DeviceCommand::ResetDevice;
    device.command(reset, zerosock_vhost_user::Reply::discarded(), &mut cx);
    assert!(!device.queues.is_resetting());
    lab.lab = fixture(&lab.dir, &lab.state, None);
    assert_eq!(lab.lab.device.shard.occupied(), 0);
}

#[test]
fn host_programs_wait_until_the_queues_of_a_successor_run() {
    let mut lab = Lab::new();
    let rings = &lab.lab.device.queues.rings;
    let bases = [&rings.tx, &rings.rx].map(|ring| ring.as_ref().unwrap().queue.base());
    let memory = lab.lab.device.queues.memory.clone().unwrap();
    let path = lab.dir.path().join("host");
    let listener = UnixListener::bind(&path).unwrap();
    listener.set_nonblocking(true).unwrap();
    let mut successor = routed();
    let (device, mut cx) = successor.lend();
    device.host = HostAccess::Hybrid {
        services: lab.dir.path().join("vm").into(),
        listener: Some(std::os::fd::OwnedFd::from(listener).into()),
        messages: None,
    };
    device.set_former_process(None, true);
    device.start(&mut cx).unwrap();
    let mut program = UnixStream::connect(&path).unwrap();
    std::io::Write::write_all(&mut program, b"CONNECT 80\n").unwrap();
    device.bridges_with(&mut cx).accept(0);
    let almost = Instant::ZERO + Duration::from_millis(999);
    cx.now = almost;
    device.turn(&mut cx);
    assert_eq!(device.shard.connections(), 0);
    test_guest::resume(device, &memory, bases);
    cx.now = almost + Duration::from_millis(1);
    device.turn(&mut cx);
    let [request] = lab.guest.received().try_into().unwrap();
    assert_eq!(
        (request.op, request.dst.port.get()),
        (Op::Request.into(), 80)
    );
}

#[test]
fn transport_reset_ends_connections_that_have_begun_before_it() {
    let mut lab = Lab::new();
    let (_, stale) = lab.open(7);
    let memory = lab.crash();
    let (device, mut cx) = lab.lab.lend();
    let started = QueueStarted {
        resumed: true,
        base: 1,
        recovered: 0,
        stopped_at: None,
    };
    device.queue_started(TX, started, &mut cx);
    assert_eq!(resets(&lab.packets()), [stale]);
    // This one begins before the event queue runs.
    lab.lab.ready();
    let [request] = lab.packets().try_into().unwrap();
    lab.guest
        .send(request.dst.port.get(), request.src, Op::Response, 0);
    assert_eq!(lab.packets(), []);
    let mut events = test_guest::start_event(&mut lab.lab.device, &memory);
    let new = (request.dst.port.get(), request.src, SocketType::Stream);
    lab.turn();
    assert_eq!(resets(&lab.packets()), [new]);
    assert_eq!(events.poll().unwrap().unwrap().len, 4);
    assert_eq!(lab.lab.device.bridges.len(), 0);
}
