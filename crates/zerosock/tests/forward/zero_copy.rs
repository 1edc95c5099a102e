//! Sends of which the kernel reads guest memory later: no byte changes, no chain is returned early, and a
//! target that does not acknowledge delays nothing but its own connection.
//!
//! On the loopback interface the kernel copies a packet when it is delivered. What the target has no room
//! for stays in guest memory until then.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use rustix::net::sockopt::set_socket_recv_buffer_size;
use zerosock::driver::Directions;
use zerosock::forward::{ForwardRule, ZeroCopy};
use zerosock_proto::wire::vsock::Op;

use super::inward::{listening, tcp_listener};
use super::{ForwardingDaemon, accept, rule, tcp_server, with_time_outs};
use crate::common::raw::{GUEST, NEXT, RX, RawGuest, SIZE, TX, emit};
use crate::common::{PATIENCE, assert_bytes, byte, bytes, deadline, eventually, host};

/// Payload of one packet of [`Sender`].
const PART: usize = 64 << 10;
/// More than the buffers of a connection to a target that does not read.
const MANY: usize = 160;
/// A connection may hold an eighth of the queue.
const SHARE: u16 = SIZE / 8;

/// A server with small receive buffers, so that a few packets fill them.
fn small_server() -> (TcpListener, String) {
    let (listener, target) = tcp_server();
    set_socket_recv_buffer_size(&listener, 64 << 10).unwrap();
    (listener, target)
}

fn with_zero_copy(port: u32, target: &str, option: ZeroCopy) -> ForwardRule {
    let mut rule = rule(port, target);
    rule.zero_copy = option;
    rule
}

/// How long chains may be held. A send is slow after half of it, also on a busy machine.
const HOLD: Duration = Duration::from_secs(1);

/// `vms` VMs with credit for everything that a test sends, and these rules.
fn lab(vms: u32, rules: Vec<ForwardRule>) -> ForwardingDaemon {
    lab_that_holds(HOLD, vms, rules)
}

fn lab_that_holds(hold: Duration, vms: u32, rules: Vec<ForwardRule>) -> ForwardingDaemon {
    ForwardingDaemon::with(vms, |config| {
        config.forward = rules;
        config.hold = hold;
        config.vms.iter_mut().for_each(|vm| vm.buf_alloc = 64 << 20);
    })
}

/// A guest that reuses the memory of a packet as soon as the device has returned its chain.
struct Sender {
    guest: RawGuest,
    /// Bytes sent on each port.
    sent: [usize; 4],
}

impl Sender {
    fn new(lab: &ForwardingDaemon) -> Sender {
        Sender {
            guest: RawGuest::attach(&lab.vms[0].socket),
            sent: [0; 4],
        }
    }

    /// Connects to `port` of the host.
    fn connect(&mut self, port: u32, listener: &TcpListener) -> TcpStream {
        self.guest.connect(1000 + port, port);
        accept(listener)
    }

    /// Sends the next `count` packets on the connection to `port`.
    #[track_caller]
    fn send(&mut self, port: u32, count: usize) {
        for _ in 0..count {
            let guest = &mut self.guest;
            let index = guest.tx_pair();
            let (at, data) = (
                guest.buffer(TX, index),
                GUEST + (4 << 20) + u64::from(index / 2) * PART as u64,
            );
            let mut header = guest.header(1000 + port, port, Op::Rw);
            header.len = PART as u32;
            let header = emit(&header);
            guest.write(at, &header);
            guest.desc(TX, index, at, header.len() as u32, NEXT, index + 1);
            let sent = &mut self.sent[port as usize];
            let part: Vec<u8> = (*sent..*sent + PART)
                .map(|at| byte(port.into(), at as u64))
                .collect();
            *sent += PART;
            guest.write(data, &part);
            guest.desc(TX, index + 1, data, PART as u32, 0, 0);
            guest.make_available(TX, index);
            guest.kick(TX);
        }
    }

    /// Overwrites the memory of the packets that the device has returned.
    fn overwrite_returned(&mut self) {
        let mut taken = Vec::new();
        while self.guest.may_send_on(0) {
            let index = self.guest.tx_pair();
            let data = GUEST + (4 << 20) + u64::from(index / 2) * PART as u64;
            self.guest.write(data, &[0xee; PART]);
            taken.push(index);
        }
        assert!(taken.len() < usize::from(SIZE / 2), "no chain is in flight");
    }

    /// Sends on the connection to `port`, whose target does not read, until chains stay in flight that
    /// are not held for want of room in the socket.
    #[track_caller]
    fn fill(&mut self, lab: &ForwardingDaemon, port: u32) {
        self.send(port, MANY);
        self.until_only_in_flight(lab, HOLD);
    }

    /// Waits until all chains but those of sends in flight are back, and returns how many these are.
    #[track_caller]
    fn until_only_in_flight(&mut self, lab: &ForwardingDaemon, hold: Duration) -> u16 {
        let all: usize = self.sent.iter().sum();
        eventually("the packets taken", || lab.stats().rx_bytes >= all as u64);
        let (mut last, mut since) = (u16::MAX, Instant::now());
        eventually("the chains beyond the share back", || {
            let now = self.guest.outstanding_on(0);
            if now != last {
                (last, since) = (now, Instant::now());
            }
            // Held chains are copied out by then.
            since.elapsed() > 2 * hold
        });
        assert!((1..=SHARE).contains(&last), "{last} chains are in flight");
        last
    }

    #[track_caller]
    fn expect(&self, port: u32, got: &[u8]) {
        assert_bytes(got, &bytes(port.into(), self.sent[port as usize]));
    }
}

/// Reads in a thread: `len` bytes.
fn read(mut stream: TcpStream, len: usize) -> thread::JoinHandle<(TcpStream, Vec<u8>)> {
    thread::spawn(move || {
        let mut got = vec![0; len];
        stream.read_exact(&mut got).unwrap();
        (stream, got)
    })
}

/// Reads all bytes before the end of the stream or its reset.
fn read_until_reset(mut stream: TcpStream) -> Vec<u8> {
    let (mut got, mut piece) = (Vec::new(), vec![0; PART]);
    while let Ok(count @ 1..) = stream.read(&mut piece) {
        got.extend_from_slice(&piece[..count]);
    }
    got
}

fn assert_reset(mut stream: TcpStream) {
    let error = stream.read_to_end(&mut Vec::new()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
}

#[test]
fn bulk_arrives_and_all_chains_return() {
    let (listener, target) = tcp_server();
    let lab = lab(1, vec![with_zero_copy(1, &target, ZeroCopy::Always)]);
    let mut sender = Sender::new(&lab);
    let reader = read(sender.connect(1, &listener), 256 * PART);
    sender.send(1, 256);
    sender.guest.wait_tx_done();
    let (_target, got) = reader.join().unwrap();
    sender.expect(1, &got);
    let stats = lab.stats();
    assert!(stats.zero_copy_bytes > 0, "{stats:?}");
    assert_eq!(stats.in_place_bytes + stats.copied_bytes, got.len() as u64);
}

#[test]
fn a_client_of_a_listening_rule_is_served_too() {
    let (socket, on) = tcp_listener();
    let mut rule = listening(on, socket, "3:1");
    rule.zero_copy = ZeroCopy::Always;
    let lab = ForwardingDaemon::with(1, |config| config.listen = vec![rule]);
    let mut guest = lab.guest();
    guest.listen(zerosock::Port::new(1), 1).unwrap();
    let client = with_time_outs(TcpStream::connect(on).unwrap());
    let stream = guest
        .wait_accept(zerosock::Port::new(1), deadline())
        .unwrap();
    let sent = bytes(1, 4 << 20);
    let reader = read(client, sent.len());
    guest.wait_send(stream, &sent, deadline()).unwrap();
    guest.shutdown(stream, Directions::SEND);
    crate::common::eventually_with(&mut guest, "all read", |_| reader.is_finished());
    assert_bytes(&reader.join().unwrap().1, &sent);
    assert!(lab.stats().zero_copy_bytes > 0);
}

#[test]
fn never_means_never() {
    let (listener, target) = tcp_server();
    let lab = lab(1, vec![with_zero_copy(1, &target, ZeroCopy::Never)]);
    let mut sender = Sender::new(&lab);
    let reader = read(sender.connect(1, &listener), 64 * PART);
    sender.send(1, 64);
    sender.expect(1, &reader.join().unwrap().1);
    assert_eq!(lab.stats().zero_copy_bytes, 0);
}

/// A process can exit right after its last write, which must not cut its stream short.
#[test]
fn bytes_of_a_process_are_sent_by_copy() {
    let (listener, target) = tcp_server();
    let lab = lab(0, vec![with_zero_copy(1, &target, ZeroCopy::Always)]);
    let process = lab.process(|process| process);
    let stream = process.connect(host(1)).unwrap();
    let sent = bytes(1, 4 << 20);
    let reader = read(accept(&listener), sent.len());
    (&stream).write_all(&sent).unwrap();
    assert_bytes(&reader.join().unwrap().1, &sent);
    assert_eq!(lab.stats().zero_copy_bytes, 0);
}

#[test]
fn auto_stops_where_the_kernel_copies_after_all() {
    const COUNT: usize = 1024;
    let (listener, target) = tcp_server();
    let lab = lab(1, vec![rule(1, &target)]);
    let mut sender = Sender::new(&lab);
    let reader = read(sender.connect(1, &listener), COUNT * PART);
    sender.send(1, COUNT);
    sender.guest.wait_tx_done();
    sender.expect(1, &reader.join().unwrap().1);
    let tried = lab.stats().zero_copy_bytes as usize;
    // A probe has the connection's share of chains at most, and there is one after 1, 2, 4, 8, 16 and
    // 32 MiB.
    assert!(
        (1..=6 * usize::from(SHARE) * PART).contains(&tried),
        "{tried}"
    );
}

/// Nothing but the pause of the target is measured: it is part of what is promised.
#[test]
fn a_target_that_pauses_for_5_s_keeps_its_connection_and_delays_no_other() {
    for option in [ZeroCopy::Always, ZeroCopy::Auto] {
        let (listener, target) = small_server();
        let (other, other_target) = tcp_server();
        let lab = lab(
            2,
            vec![
                with_zero_copy(1, &target, option),
                with_zero_copy(2, &other_target, option),
            ],
        );
        let mut sender = Sender::new(&lab);
        let paused = sender.connect(1, &listener);
        let beside = sender.connect(2, &other);
        // `auto` makes no attempt before.
        let reader = read(paused, 32 * PART);
        sender.send(1, 32);
        let (paused, first) = reader.join().unwrap();
        let pause = Instant::now();
        sender.send(1, MANY);

        // The same guest and another one go on meanwhile.
        let reader = read(beside, 64 * PART);
        sender.send(2, 64);
        sender.expect(2, &reader.join().unwrap().1);
        let mut neighbour = lab.guest_of(1);
        let stream = neighbour.wait_connect(host(2), deadline()).unwrap();
        let reader = read(accept(&other), 4 << 20);
        let sent = bytes(9, 4 << 20);
        neighbour.wait_send(stream, &sent, deadline()).unwrap();
        neighbour.shutdown(stream, Directions::SEND);
        crate::common::eventually_with(&mut neighbour, "all read", |_| reader.is_finished());
        assert_bytes(&reader.join().unwrap().1, &sent);
        if option == ZeroCopy::Always {
            sender.until_only_in_flight(&lab, HOLD);
        }

        thread::sleep(Duration::from_secs(5).saturating_sub(pause.elapsed()));
        let (_paused, mut rest) = read(paused, MANY * PART).join().unwrap();
        let mut got = first;
        got.append(&mut rest);
        sender.expect(1, &got);
        sender.guest.wait_tx_done();
        assert_eq!(lab.rule(0).active, 1);
    }
}

#[test]
fn chains_come_back_only_when_the_kernel_has_read_them() {
    let (listener, target) = small_server();
    let lab = lab(1, vec![with_zero_copy(1, &target, ZeroCopy::Always)]);
    let mut sender = Sender::new(&lab);
    let target = sender.connect(1, &listener);
    sender.fill(&lab, 1);
    assert_eq!(lab.stats().timers_now, 0, "it waits for the kernel alone");
    sender.overwrite_returned();
    let (_target, got) = read(target, MANY * PART).join().unwrap();
    sender.expect(1, &got);
    sender.guest.wait_tx_done();
}

/// The event of a report is also that of a socket that has failed.
#[test]
fn reports_do_not_end_a_connection_of_which_the_target_has_ended_its_stream() {
    let (listener, target) = tcp_server();
    let lab = lab(1, vec![with_zero_copy(1, &target, ZeroCopy::Always)]);
    let mut sender = Sender::new(&lab);
    let target = sender.connect(1, &listener);
    target.shutdown(Shutdown::Write).unwrap();
    let (end, _) = sender.guest.recv_op(1001, Op::Shutdown);
    assert_eq!(end.flags, 2, "it still receives");
    let reader = read(target, 64 * PART);
    sender.send(1, 64);
    sender.expect(1, &reader.join().unwrap().1);
    sender.guest.wait_tx_done();
    assert!(lab.stats().zero_copy_bytes > 0);
    while let Some((packet, _)) = sender.guest.try_recv() {
        let credit = [Op::CreditUpdate, Op::CreditRequest];
        assert!(
            credit.iter().any(|&op| packet.op.known() == Some(op)),
            "{packet:?}"
        );
    }
    assert_eq!(lab.rule(0).active, 1);
}

#[test]
fn a_guest_that_closes_with_sends_in_flight_delivers_all_bytes_and_the_end() {
    // All bytes are in the socket, or some are also in a copy.
    for count in [8, MANY] {
        let (listener, target) = small_server();
        let lab = lab(1, vec![with_zero_copy(1, &target, ZeroCopy::Always)]);
        let mut sender = Sender::new(&lab);
        let mut target = sender.connect(1, &listener);
        sender.send(1, count);
        sender.until_only_in_flight(&lab, HOLD);
        let mut close = sender.guest.header(1001, 1, Op::Shutdown);
        close.flags = 3;
        sender.guest.send(close, &[]);
        if count == MANY {
            // As a kernel does that waits no longer.
            let reset = sender.guest.header(1001, 1, Op::Rst);
            sender.guest.send(reset, &[]);
        } else {
            sender.guest.recv_op(1001, Op::Rst);
        }
        eventually("the connection gone", || lab.stats().connections_now == 0);
        sender.overwrite_returned();
        let mut got = Vec::new();
        target.read_to_end(&mut got).unwrap();
        sender.expect(1, &got);
        sender.guest.wait_tx_done();
        lab.until_none_is_left();
        assert_eq!(lab.stats().bridges_now, 0);
    }
}

#[test]
fn a_front_end_that_vanishes_after_the_end_of_a_stream_loses_no_byte() {
    for closed in [false, true] {
        let (listener, target) = small_server();
        let lab = lab(1, vec![with_zero_copy(1, &target, ZeroCopy::Always)]);
        let mut sender = Sender::new(&lab);
        let mut target = sender.connect(1, &listener);
        sender.send(1, 8);
        sender.until_only_in_flight(&lab, HOLD);
        let mut end = sender.guest.header(1001, 1, Op::Shutdown);
        // Of one direction, or of both.
        end.flags = if closed { 3 } else { 2 };
        sender.guest.send(end, &[]);
        if closed {
            sender.guest.recv_op(1001, Op::Rst);
        }
        let all = bytes(1, sender.sent[1]);
        drop(sender);
        let mut got = Vec::new();
        target.read_to_end(&mut got).unwrap();
        assert_bytes(&got, &all);
        lab.until_none_is_left();
    }
}

#[test]
fn a_reset_of_the_guest_with_sends_in_flight_resets_the_target() {
    let (listener, target) = small_server();
    let lab = lab(1, vec![with_zero_copy(1, &target, ZeroCopy::Always)]);
    let mut sender = Sender::new(&lab);
    let target = sender.connect(1, &listener);
    sender.fill(&lab, 1);
    let reset = sender.guest.header(1001, 1, Op::Rst);
    sender.guest.send(reset, &[]);
    sender.guest.wait_tx_done();
    assert_reset(target);
    lab.until_none_is_left();
}

#[test]
fn a_target_that_resets_with_sends_in_flight_returns_the_chains() {
    let (listener, target) = small_server();
    let lab = lab(1, vec![with_zero_copy(1, &target, ZeroCopy::Always)]);
    let mut sender = Sender::new(&lab);
    let target = sender.connect(1, &listener);
    sender.fill(&lab, 1);
    rustix::net::sockopt::set_socket_linger(&target, Some(Duration::ZERO)).unwrap();
    drop(target);
    sender.guest.recv_op(1001, Op::Rst);
    sender.guest.wait_tx_done();
    lab.until_none_is_left();
}

/// Stops and starts both queues; the second connection of the guest is still there afterwards.
fn stop_with_sends_in_flight(paused: bool) {
    let (listener, target) = small_server();
    let (other, other_target) = tcp_server();
    let lab = lab(
        1,
        vec![
            with_zero_copy(1, &target, ZeroCopy::Always),
            with_zero_copy(2, &other_target, ZeroCopy::Always),
        ],
    );
    let mut sender = Sender::new(&lab);
    let mut target = sender.connect(1, &listener);
    let beside = sender.connect(2, &other);
    sender.fill(&lab, 1);
    let reader = (!paused).then(|| {
        let reader = read(target.try_clone().unwrap(), MANY * PART);
        // It runs.
        eventually("some bytes read", || sender.guest.outstanding_on(0) < SHARE);
        reader
    });
    let since = Instant::now();
    let tx = sender.guest.frontend.get_vring_base(TX as u32).unwrap();
    assert!(since.elapsed() < PATIENCE / 4, "{:?}", since.elapsed());
    assert!(sender.guest.is_idle_on(0), "a chain is missing");
    let rx = sender.guest.frontend.get_vring_base(RX as u32).unwrap();
    sender.guest.start(&[rx, tx]).unwrap();
    match reader {
        None => assert_reset(target),
        Some(reader) => {
            sender.expect(1, &reader.join().unwrap().1);
            sender.send(1, 1);
            let mut last = vec![0; PART];
            target.read_exact(&mut last).unwrap();
        }
    }
    let reader = read(beside, 8 * PART);
    sender.send(2, 8);
    sender.expect(2, &reader.join().unwrap().1);
    sender.guest.wait_tx_done();
}

#[test]
fn a_queue_stops_in_time_although_a_target_does_not_acknowledge() {
    stop_with_sends_in_flight(true);
}

#[test]
fn a_queue_stops_when_the_sends_in_flight_have_been_read() {
    stop_with_sends_in_flight(false);
}

#[test]
fn a_reset_of_the_device_and_a_vanished_front_end_reset_connections_with_sends_in_flight() {
    for vanishes in [false, true] {
        let (listener, target) = small_server();
        let lab = lab(1, vec![with_zero_copy(1, &target, ZeroCopy::Always)]);
        let mut sender = Sender::new(&lab);
        let target = sender.connect(1, &listener);
        sender.fill(&lab, 1);
        if !vanishes {
            sender.guest.frontend.reset_device().unwrap();
            sender.guest.frontend.sync().unwrap();
        }
        drop(sender);
        // Otherwise the target could read everything before.
        lab.until_none_is_left();
        assert_reset(target);
        // The next ring returns its own chains only.
        let mut sender = Sender::new(&lab);
        let reader = read(sender.connect(1, &listener), PART);
        sender.send(1, 1);
        sender.expect(1, &reader.join().unwrap().1);
        sender.guest.wait_tx_done();
    }
}

#[test]
fn a_reset_of_the_device_waits_for_a_target_that_reads() {
    let (listener, target) = small_server();
    // The target has five times as long to read all, also on a machine with busy cores.
    let hold = Duration::from_secs(5);
    let lab = lab_that_holds(hold, 1, vec![with_zero_copy(1, &target, ZeroCopy::Always)]);
    let mut sender = Sender::new(&lab);
    let target = sender.connect(1, &listener);
    sender.send(1, MANY);
    sender.until_only_in_flight(&lab, hold);
    let reader = thread::spawn(move || read_until_reset(target));
    sender.guest.frontend.reset_device().unwrap();
    sender.guest.frontend.sync().unwrap();
    // What was copied into the socket may be lost with the reset that follows, but no send in place.
    let (got, in_place) = (reader.join().unwrap(), lab.stats().zero_copy_bytes);
    assert!(
        got.len() as u64 >= in_place,
        "{} of {in_place} bytes",
        got.len()
    );
    let sent = bytes(1, sender.sent[1]);
    assert_bytes(&got, &sent[..got.len()]);
}

/// Pinned pages count as locked memory. The limit is one of the process, so this runs in a child.
#[test]
fn a_process_that_may_lock_no_memory_sends_by_copy() {
    use rustix::process::{Resource, Rlimit, setrlimit};
    use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities};

    const CHILD: &str = "ZEROSOCK_TEST_IN_A_CHILD";
    if std::env::var_os(CHILD).is_none() {
        let output = std::process::Command::new(std::env::current_exe().unwrap())
            .arg("a_process_that_may_lock_no_memory_sends_by_copy")
            .arg("--nocapture")
            .env(CHILD, "1")
            .output()
            .unwrap();
        return assert!(output.status.success(), "{output:?}");
    }
    // The threads of the daemon inherit it.
    let now = capabilities(None).unwrap();
    let without = |set: CapabilitySet| set - CapabilitySet::IPC_LOCK;
    let sets = CapabilitySets {
        effective: without(now.effective),
        permitted: without(now.permitted),
        inheritable: without(now.inheritable),
    };
    set_capabilities(None, sets).unwrap();
    let none = Rlimit {
        current: Some(0),
        maximum: Some(0),
    };
    setrlimit(Resource::Memlock, none).unwrap();
    let (listener, target) = tcp_server();
    let lab = lab(1, vec![with_zero_copy(1, &target, ZeroCopy::Always)]);
    let mut sender = Sender::new(&lab);
    let reader = read(sender.connect(1, &listener), 64 * PART);
    sender.send(1, 64);
    sender.expect(1, &reader.join().unwrap().1);
    sender.guest.wait_tx_done();
    assert_eq!(lab.stats().zero_copy_bytes, 0);
}
