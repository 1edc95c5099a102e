//! Time limits, tested with a simulated clock.

use std::io::Read;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::Duration;
use zerosock_proto::{Cid, Instant, Port};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType as SocketKind};

use super::lab::DeviceFixture;
use super::outbound::Outbound;
use super::state::flags::Flags;
use super::state::host::HostAccess;
use super::*;
use crate::device::host_sockets::HostSocket;

impl DeviceFixture {
    /// Handles the timers that are due `at` after the start.
    fn fire_at(&mut self, at: Duration) {
        let (device, mut cx) = self.lend();
        cx.now = Instant::ZERO + at;
        device.fire_timers(&mut cx);
    }

    /// An ended connection with `bytes` left for the host program.
    fn lingering(&mut self, bytes: usize) -> (u32, UnixStream) {
        let key = self.ready();
        let (ours, program) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        let (device, mut cx) = self.lend();
        let bridge = device.bridges.get_mut(key).unwrap();
        let permit = device.account.take_descriptors(1).unwrap();
        let (socket, ok) = (HostSocket::accepted(ours.into(), permit), None);
        bridge.peer = BridgePeer::Socket { socket, ok };
        bridge.outbound = Outbound::of_copies(vec![7; bytes]);
        bridge.flags.insert(Flags::WRITABLE);
        let flow = bridge.flow.unwrap();
        assert!(device.bridges_with(&mut cx).linger(key), "bytes are left");
        device.bridges_with(&mut cx).flush(key);
        let _ = device.shard.reset(flow);
        while device.shard.poll_event().is_some() {}
        (key, program)
    }

    fn lingers(&self, key: u32) -> bool {
        self.device.bridges.get(key).is_some()
    }

    fn is_at_rest(&self) -> bool {
        self.device.timers.len() == 0 && self.device.bridges.len() == 0
    }
}

/// Every limit in `DeviceFixture`.
const LIMIT: Duration = Duration::from_secs(1);
/// More than a socket buffers, and no more than the overflow limit.
const MANY_BYTES: usize = 1 << 20;

#[test]
fn lingering_socket_that_takes_no_byte_is_closed_at_the_limit() {
    let mut lab = DeviceFixture::new();
    let (key, mut program) = lab.lingering(MANY_BYTES);
    lab.fire_at(LIMIT - Duration::from_nanos(1));
    assert!(lab.lingers(key));
    lab.fire_at(LIMIT);
    assert!(!lab.lingers(key) && lab.is_at_rest());
    assert_eq!(lab.counters().linger_timeouts.get(), 1);
    let mut got = Vec::new();
    program.read_to_end(&mut got).unwrap();
    assert!(!got.is_empty() && got.len() < MANY_BYTES);
}

#[test]
fn lingering_socket_delivers_all_bytes_to_a_slow_reader() {
    let mut lab = DeviceFixture::new();
    let (key, mut program) = lab.lingering(MANY_BYTES);
    let mut got = 0;
    let mut now = Duration::ZERO;
    while lab.lingers(key) {
        let mut part = vec![0; 64 << 10];
        program.read_exact(&mut part).unwrap();
        got += part.len();
        now += LIMIT * 3 / 4;
        lab.fire_at(now);
        let (device, mut cx) = lab.lend();
        cx.now = Instant::ZERO + now;
        let bridge = device.bridges.get_mut(key).unwrap();
        bridge.flags.insert(Flags::WRITABLE);
        device.bridges_with(&mut cx).flush(key);
    }
    let mut rest = Vec::new();
    program.read_to_end(&mut rest).unwrap();
    assert_eq!(got + rest.len(), MANY_BYTES);
    assert_eq!(lab.counters().linger_timeouts.get(), 0);
    assert!(now > 4 * LIMIT && lab.is_at_rest());
}

/// A listener with a full backlog, and the connection that fills it.
fn full_listener(path: &Path) -> (UnixListener, UnixStream) {
    let kind = SocketKind::STREAM;
    let flags = SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None).unwrap();
    rustix::net::bind(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
    // Linux admits one connection more than the backlog.
    rustix::net::listen(&socket, 0).unwrap();
    (socket.into(), UnixStream::connect(path).unwrap())
}

/// A device with connects of its guest to a full listener.
fn before_full_listener(
    connections: usize,
) -> (DeviceFixture, tempfile::TempDir, UnixListener, Vec<u32>) {
    let dir = tempfile::tempdir().unwrap();
    let base = dir.path().join("vm");
    let (listener, first) = full_listener(&dir.path().join("vm_9"));
    std::mem::forget(first);
    let mut lab = DeviceFixture::new();
    lab.device.host = HostAccess::Hybrid {
        services: base.into(),
        listener: None,
        messages: None,
    };
    let mut keys = Vec::new();
    for _ in 0..connections {
        let (device, mut cx) = lab.lend();
        let peer = zerosock_proto::Address::new(Cid::new(3), Port::new(1));
        let local = zerosock_proto::Address::new(Cid::HOST, Port::ANY);
        let flow = device
            .shard
            .connect(cx.now, local, peer, SocketType::Stream);
        let flow = flow.unwrap();
        assert!(device.bridges_with(&mut cx).reserve_bridge(flow));
        device
            .bridges_with(&mut cx)
            .guest_connects(flow, Port::new(9));
        keys.push(device.bridges.key_of(flow).unwrap());
    }
    (lab, dir, listener, keys)
}

#[test]
fn connects_to_a_full_backlog_are_retried_one_at_a_time_with_growing_pauses() {
    let (mut lab, _dir, _listener, keys) = before_full_listener(500);
    let mut pauses = Vec::new();
    let mut last = Instant::ZERO;
    while lab.device.backlogs.len() > 0 {
        let next = lab.device.timers.next().unwrap();
        pauses.push(next.saturating_duration_since(last));
        last = next;
        lab.fire_at(next.saturating_duration_since(Instant::ZERO));
    }
    let doubled = pauses.windows(2).take(8).all(|pair| pair[1] == 2 * pair[0]);
    assert!(doubled, "{pauses:?}");
    // At the deadline all are refused, one budget per turn.
    assert_eq!(lab.counters().conns_refused.get(), 500);
    assert_eq!(lab.counters().refused_backlog_full.get(), 500);
    assert!(keys.iter().all(|&key| !lab.lingers(key)) && lab.is_at_rest());
    let tried = lab.counters().connect_retries.get();
    assert!(
        (10..40).contains(&tried),
        "{tried} attempts for 500 connections"
    );
}

#[test]
fn backlog_room_goes_to_the_oldest_connect() {
    let (mut lab, _dir, listener, keys) = before_full_listener(3);
    let is_open =
        |lab: &DeviceFixture, key: u32| lab.device.bridges.get(key).unwrap().state.is_open();
    listener.accept().unwrap();
    lab.fire_at(Duration::from_millis(1));
    let open: Vec<bool> = keys.iter().map(|&key| is_open(&lab, key)).collect();
    assert_eq!(open, [true, false, false]);
    // A connection that is removed does not delay those behind it.
    let (device, mut cx) = lab.lend();
    device.bridges_with(&mut cx).reset_bridge(keys[1]);
    listener.accept().unwrap();
    lab.fire_at(Duration::from_millis(300));
    assert!(is_open(&lab, keys[2]));
    assert_eq!(lab.device.backlogs.len(), 0);
    assert_eq!(lab.counters().conns_refused.get(), 0);
}

#[test]
fn few_transmit_buffers_of_a_guest_return_after_a_delay_or_at_the_end() {
    use zerosock_proto::wire::vsock::Op;
    use zerosock_virtio::device::WorkerDevice;
    use zerosock_virtio::ring::PUBLISH_DELAY;
    for (uses_datagrams, returned) in [(false, [0, 1]), (true, [1, 0])] {
        let mut lab = DeviceFixture::new();
        let (device, mut cx) = lab.lend();
        let mut guest = super::test_guest::start(device);
        if uses_datagrams {
            // A sender of datagrams waits for its buffers.
            device
                .datagrams
                .set_features(zerosock_proto::vsock::datagram::F_DGRAM);
        }
        let to = zerosock_proto::Address::new(Cid::HOST, Port::new(1));
        guest.send(1000, to, Op::Request, 0);
        device.turn(&mut cx);
        let answers: Vec<_> = guest.received().iter().map(|it| it.op.known()).collect();
        assert_eq!(answers, [Some(Op::Rst)]);
        assert_eq!(guest.take_returned(), returned[0]);
        let due = Instant::ZERO + PUBLISH_DELAY;
        assert_eq!(device.next_timeout(), (!uses_datagrams).then_some(due));
        cx.now = due;
        device.turn(&mut cx);
        assert_eq!(guest.take_returned(), returned[1]);
        assert_eq!(device.next_timeout(), None);
        // A device that ends returns them at once, so that its successor does not process them again.
        guest.send(1001, to, Op::Request, 0);
        device.turn(&mut cx);
        device.end(&mut cx);
        assert_eq!(guest.take_returned(), 1);
    }
}
