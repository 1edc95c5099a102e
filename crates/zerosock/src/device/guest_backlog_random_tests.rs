//! Connects to a guest that accepts, refuses and ignores them in any order.

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use zerosock_proto::wire::vsock::{Op, SocketType};
use zerosock_proto::{Address, Instant, Port};
use zerosock_virtio::device::{Event, WorkerDevice};
use zerosock_virtio::poller::{Events, Poller};

use crate::device::host_sockets::HostSocket;
use crate::device::lab::DeviceFixture;
use crate::device::state::host::Caller;
use crate::device::test_guest::{self, Guest};

/// A generator of numbers (xorshift).
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % end
    }
}

struct Play {
    lab: DeviceFixture,
    guest: Guest,
    now: Instant,
    random: Random,
    programs: Vec<UnixStream>,
    /// Connections that the guest has accepted: its port, and the other end.
    accepted: Vec<(u32, Address)>,
    /// Requests that the guest has not answered.
    ignored: Vec<(u32, Address)>,
}

impl Play {
    fn new(seed: u64) -> Play {
        let mut lab = DeviceFixture::new();
        let (cid, addr) = (lab.device.cid, lab.device.addr);
        let routes = Arc::make_mut(&mut lab.shared.routes);
        routes.add(cid, addr, &["default".to_owned()]);
        let guest = test_guest::start(&mut lab.device);
        Play {
            lab,
            guest,
            now: Instant::ZERO,
            random: Random(seed + 1),
            programs: Vec::new(),
            accepted: Vec::new(),
            ignored: Vec::new(),
        }
    }

    fn connect(&mut self, port: u32) {
        let (ours, program) = UnixStream::pair().unwrap();
        // The reaper closes the device's end.
        let patience = Duration::from_secs(60);
        program.set_read_timeout(Some(patience)).unwrap();
        self.programs.push(program);
        let (device, mut cx) = self.lab.lend();
        cx.now = self.now;
        let permit = device.account.take_descriptors(1).unwrap();
        let caller = Caller {
            socket: HostSocket::accepted(ours.into(), permit),
            socket_type: SocketType::Stream,
            to: Port::new(port),
            wants_ok: true,
            forwarded: None,
        };
        device.bridges_with(&mut cx).call_guest(caller, false);
    }

    fn turn(&mut self) {
        let (device, mut cx) = self.lab.lend();
        cx.now = self.now;
        let mut events = Events::default();
        events.wait(cx.poller, Some(Duration::ZERO)).unwrap();
        for (token, readiness) in Poller::interpret(&events) {
            let (kind, key) = (token.kind, token.key);
            let event = Event {
                kind,
                key,
                readiness,
            };
            device.on_event(event, &mut cx);
        }
        device.turn(&mut cx);
        for (port, list) in &device.guest_backlogs.ports {
            let answered = |flow| !device.guest_backlogs.unanswered.contains_key(flow);
            assert!(!list.attempt.as_ref().is_some_and(answered), "{port}");
            assert!(list.waiting.iter().is_sorted_by_key(|(at, _)| *at));
        }
    }

    /// The guest answers. `answers`: of ten requests, those that it accepts, and those that it refuses.
    fn answer(&mut self, answers: [u64; 2]) {
        let packets = self.guest.received().into_iter();
        let requests = packets.filter(|packet| packet.op.known() == Some(Op::Request));
        for request in requests {
            let (port, to) = (request.dst.port.get(), request.src);
            let at = self.random.below(10);
            if at < answers[0] {
                self.guest.send(port, to, Op::Response, 0);
                self.accepted.push((port, to));
            } else if at < answers[0] + answers[1] {
                self.guest.send(port, to, Op::Rst, 0);
            } else {
                self.ignored.push((port, to));
            }
        }
    }
}

#[test]
fn each_program_is_connected_or_refused_and_nothing_is_left() {
    let mut retries = 0;
    for seed in 0..30 {
        let mut play = Play::new(seed);
        let answers = [1 + seed % 5, seed % 6];
        for _ in 0..150 {
            play.now += Duration::from_micros(play.random.below(20_000));
            for _ in 0..play.random.below(4) {
                let port = 1 + play.random.below(2) as u32;
                play.connect(port);
            }
            if play.random.below(4) == 0 && !play.programs.is_empty() {
                let at = play.random.below(play.programs.len() as u64) as usize;
                play.programs.swap_remove(at);
            }
            if play.random.below(3) == 0 {
                // A late answer: the device may have given up.
                if let Some((port, to)) = play.ignored.pop() {
                    play.guest.send(port, to, Op::Response, 0);
                }
            }
            if play.random.below(2) == 0
                && let Some((port, to)) = play.accepted.pop()
            {
                play.guest.send(port, to, Op::Rst, 0);
            }
            play.turn();
            play.answer(answers);
        }
        // All deadlines pass.
        for _ in 0..400 {
            play.now += Duration::from_millis(10);
            play.turn();
            play.answer(answers);
        }
        retries += play.lab.counters().connect_retries.get();
        let backlogs = &play.lab.device.guest_backlogs;
        assert!(
            backlogs.ports.is_empty(),
            "seed {seed}: {:?}",
            backlogs.ports
        );
        assert!(backlogs.unanswered.is_empty(), "seed {seed}");
        assert_eq!(play.lab.device.timers.len(), 0, "seed {seed}");
        for program in &mut play.programs {
            let mut line = [0; 8];
            let read = program.read(&mut line).map_err(|error| error.kind());
            let is_decided = matches!(read, Ok(0)) || read.is_ok_and(|_| line.starts_with(b"OK "));
            assert!(is_decided, "seed {seed}: {read:?} {line:?}");
        }
    }
    assert!(retries > 1000, "{retries}");
}
