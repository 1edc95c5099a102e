//! Retries of connects to a guest's listener, with time as an argument.

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use zerosock_proto::wire::vsock::{Op, Repr, SocketType};
use zerosock_proto::{Instant, Port};
use zerosock_virtio::device::WorkerDevice;

use crate::device::host_sockets::HostSocket;
use crate::device::lab::DeviceFixture;
use crate::device::state::host::Caller;
use crate::device::test_guest::{self, Guest};

const PORT: Port = Port::new(22);
const MS: Duration = Duration::from_millis(1);

/// A device, its guest, and the host programs that connect to a port of the guest.
struct Test {
    lab: DeviceFixture,
    guest: Guest,
    programs: Vec<UnixStream>,
    /// Since the start.
    now: Duration,
}

impl Test {
    fn new(connect_timeout: Duration) -> Test {
        let mut lab = DeviceFixture::new();
        lab.shared.limits.connect = connect_timeout;
        let (cid, addr) = (lab.device.cid, lab.device.addr);
        Arc::make_mut(&mut lab.shared.routes).add(cid, addr, &[]);
        let guest = test_guest::start(&mut lab.device);
        Test {
            lab,
            guest,
            programs: Vec::new(),
            now: Duration::ZERO,
        }
    }

    /// Programs connect; returns the packets that the guest receives.
    fn call(&mut self, count: usize) -> Vec<Repr> {
        for _ in 0..count {
            let (ours, program) = UnixStream::pair().unwrap();
            program.set_nonblocking(true).unwrap();
            self.programs.push(program);
            let (device, mut cx) = self.lab.lend();
            cx.now = Instant::ZERO + self.now;
            let permit = device.account.take_descriptors(1).unwrap();
            let caller = Caller {
                socket: HostSocket::accepted(ours.into(), permit),
                socket_type: SocketType::Stream,
                to: PORT,
                wants_ok: false,
                forwarded: None,
            };
            device.bridges_with(&mut cx).call_guest(caller, false);
        }
        self.at(self.now)
    }

    /// The device has turns at this time; returns the packets that the guest receives.
    fn at(&mut self, now: Duration) -> Vec<Repr> {
        self.now = now;
        for _ in 0..3 {
            let (device, mut cx) = self.lab.lend();
            cx.now = Instant::ZERO + now;
            device.turn(&mut cx);
        }
        self.guest.received()
    }

    /// The guest answers a request; returns the packets that it receives then.
    fn answer(&mut self, request: &Repr, op: Op) -> Vec<Repr> {
        assert_eq!(request.op, Op::Request.into());
        self.guest.send(request.dst.port.get(), request.src, op, 0);
        self.at(self.now)
    }

    /// The first program is connected: the port has a listener.
    fn accept_one(&mut self) {
        let [request] = self.call(1).try_into().unwrap();
        assert!(self.answer(&request, Op::Response).is_empty());
    }

    /// Waits until the sockets of these programs, and of no others, are closed, which the reaper does.
    #[track_caller]
    fn assert_refused(&self, wanted: &[bool]) {
        let is_closed = |mut program: &UnixStream| match program.read(&mut [0]) {
            Err(error) => error.kind() != std::io::ErrorKind::WouldBlock,
            Ok(_) => true,
        };
        let deadline = std::time::Instant::now() + Duration::from_secs(60);
        loop {
            let closed: Vec<bool> = self.programs.iter().map(is_closed).collect();
            if closed == wanted {
                return;
            }
            assert!(std::time::Instant::now() < deadline, "{closed:?}");
            std::thread::yield_now();
        }
    }
}

#[test]
fn one_program_at_a_time_is_tried_again_after_pauses_that_double() {
    let mut test = Test::new(Duration::from_secs(60));
    test.accept_one();
    let requests = test.call(3);
    assert_eq!(requests.len(), 3, "nothing is known to be full yet");
    for request in &requests {
        assert!(test.answer(request, Op::Rst).is_empty());
    }
    // A program that comes now waits behind the others.
    assert!(test.call(1).is_empty());
    let mut began = test.now;
    for pause in [1, 2, 4, 8, 16, 32, 64, 100, 100] {
        assert!(
            test.at(began + MS * pause - Duration::from_nanos(1))
                .is_empty()
        );
        let [request] = test.at(began + MS * pause).try_into().unwrap();
        // No other one while the guest has not answered.
        assert!(test.at(test.now + MS * 50).is_empty());
        assert!(test.answer(&request, Op::Rst).is_empty());
        began = test.now;
    }
    test.assert_refused(&[false; 5]);
    assert_eq!(test.lab.counters().connect_retries.get(), 9);
}

#[test]
fn an_attempt_that_succeeds_is_followed_by_the_next_in_the_order_of_the_programs() {
    let mut test = Test::new(Duration::from_secs(60));
    test.accept_one();
    for request in test.call(2) {
        test.answer(&request, Op::Rst);
    }
    let [first] = test.at(test.now + MS).try_into().unwrap();
    test.answer(&first, Op::Response);
    let [second] = test.at(test.now + MS).try_into().unwrap();
    test.answer(&second, Op::Response);
    assert!(test.at(test.now + MS).is_empty());
    assert_eq!(test.lab.device.bridges.len(), 3);
    test.assert_refused(&[false; 3]);
}

#[test]
fn programs_are_refused_at_the_connect_time_out() {
    let limit = MS * 300;
    let mut test = Test::new(limit);
    test.accept_one();
    let began = test.now;
    for request in test.call(2) {
        test.answer(&request, Op::Rst);
    }
    while test.now < began + limit - MS {
        for request in test.at(test.now + MS) {
            test.answer(&request, Op::Rst);
        }
    }
    test.assert_refused(&[false; 3]);
    test.at(began + limit);
    test.at(began + limit + MS);
    test.assert_refused(&[false, true, true]);
    assert_eq!(test.lab.counters().refused_by_endpoint.get(), 2);
}

#[test]
fn a_reset_is_passed_on_where_the_port_has_accepted_nothing_in_the_last_second() {
    let mut test = Test::new(Duration::from_secs(60));
    let [request] = test.call(1).try_into().unwrap();
    test.answer(&request, Op::Rst);
    test.assert_refused(&[true]);
    test.accept_one();
    test.now += Duration::from_secs(1);
    let [request] = test.call(1).try_into().unwrap();
    test.answer(&request, Op::Rst);
    test.assert_refused(&[true, false, false]);
    let [request] = test.at(test.now + MS).try_into().unwrap();
    test.answer(&request, Op::Rst);
    test.assert_refused(&[true, false, true]);
    assert_eq!(test.lab.counters().connect_retries.get(), 1);
}
