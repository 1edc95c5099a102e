//! A process that is killed at any step of any request, and its successor: the front-end gets each
//! answer once, and the device is as it would be without.

use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::AtomicUsize;
use std::thread;

use rustix::event::{EventfdFlags, eventfd};
use vhost::vhost_user::message::{FrontendReq, VhostUserSingleMemoryRegion};
use vm_memory::ByteValued;
use zerosock_ring::RegionConfig;
use zerosock_sys::memfd;

use super::super::mailbox::{Mail, MailSender};
use super::test_lab::{Held, State, Steps, lock, record, spec};
use super::*;
use crate::ProtocolFeatures;
use crate::frontend::{Frontend, VringAddr};
use crate::journal::RestoredFrontend;
use crate::session::F_VERSION_1;

const LIMIT: std::time::Duration = std::time::Duration::from_secs(60);
const MIB: u64 = 1 << 20;

/// A front-end that changes its mind in every way. Returns the answers, and stays connected.
fn front_end(socket: UnixStream, acks: bool) -> (Vec<u64>, Frontend) {
    let mut answers = Vec::new();
    let mut device = Frontend::from_stream(socket, LIMIT).unwrap();
    let mut wanted = ProtocolFeatures::all() - ProtocolFeatures::INFLIGHT_SHMFD;
    wanted.set(ProtocolFeatures::REPLY_ACK, acks);
    let (features, protocol) = device.negotiate(F_VERSION_1, wanted).unwrap();
    answers.extend([features, protocol.bits(), device.get_queue_num().unwrap()]);
    device.write_config(1, &[9]).unwrap();
    let file = memfd::create("guest", 4 * MIB, true).unwrap();
    let region = |number: u64| RegionConfig {
        guest_addr: number * MIB,
        user_addr: 0x10_0000_0000 + number * MIB,
        len: MIB,
        fd_offset: number * MIB,
    };
    let slots = |device: &mut Frontend, request: FrontendReq, number: u64| {
        let it = region(number);
        let body =
            VhostUserSingleMemoryRegion::new(it.guest_addr, it.len, it.user_addr, it.fd_offset);
        device
            .send_request(request, body.as_slice(), &[file.as_fd()])
            .unwrap();
    };
    for number in 0..3 {
        slots(&mut device, FrontendReq::ADD_MEM_REG, number);
    }
    slots(&mut device, FrontendReq::REM_MEM_REG, 1);
    let notifiers: Vec<_> = (0..6)
        .map(|_| eventfd(0, EventfdFlags::NONBLOCK).unwrap())
        .collect();
    let start = |device: &mut Frontend, index: u32, base: u16| {
        device.set_vring_num(index, 64).unwrap();
        device.set_vring_base(index, base).unwrap();
        let at = region(2 * u64::from(index)).user_addr;
        let addr = VringAddr {
            desc: at,
            avail: at + 0x4000,
            used: at + 0x8000,
        };
        device.set_vring_addr(index, addr).unwrap();
        let [call, err, kick] = [0, 2, 4].map(|kind| notifiers[kind + index as usize].as_fd());
        device.set_vring_call(index, Some(call)).unwrap();
        device.set_vring_err(index, Some(err)).unwrap();
        device.set_vring_kick(index, Some(kick)).unwrap();
        device.set_vring_enable(index, true).unwrap();
    };
    start(&mut device, 0, 5);
    start(&mut device, 1, 6);
    answers.push(device.get_vring_base(0).unwrap().into());
    device.reset_device().unwrap();
    device.write_config(0, &[1]).unwrap();
    start(&mut device, 0, 8);
    start(&mut device, 1, 9);
    // Refused: it runs.
    assert_eq!(device.set_vring_num(1, 128).is_err(), acks);
    device.set_vring_enable(0, false).unwrap();
    device.set_vring_call(1, None).unwrap();
    answers.push(device.get_vring_base(1).unwrap().into());
    start(&mut device, 1, 701);
    answers.push(device.get_features().unwrap());
    (answers, device)
}

/// Whether no request is left.
fn is_done(vm: &Vm) -> bool {
    match &vm.front {
        Front::Live(it) => it.waiting.is_none() && it.replay.requests.is_empty(),
        Front::Idle | Front::Draining(_) => false,
    }
}

/// Runs a front-end with a back-end: its processes end after so many steps, the last of them never.
/// Returns the answers, the state, and how many replies were sent; and how many processes were killed.
fn run(acks: bool, kills: &[usize]) -> ((Vec<u64>, State, usize), usize) {
    let (theirs, ours) = UnixStream::pair().unwrap();
    let held = Arc::new(Mutex::new(Held::default()));
    let front_end = thread::spawn(move || front_end(theirs, acks));
    let mut first = Some(ours);
    let (mut kills, mut killed) = (kills.iter(), 0);
    loop {
        let steps = kills.next().copied().unwrap_or(usize::MAX);
        let steps = Steps(Arc::new(AtomicUsize::new(steps)));
        let state = Arc::new(Mutex::new(State::default()));
        let (mail, mailbox) = MailSender::new().unwrap();
        let restored = {
            let held = lock(&held);
            let socket = held.socket.as_ref().map(|it| it.try_clone().unwrap());
            socket.map(|socket| held.restore(socket))
        };
        let spec = spec(Arc::clone(&state), Arc::clone(&held), steps, restored);
        let mut vm = None;
        let life = catch_unwind(AssertUnwindSafe(|| {
            let vm = vm.insert(Vm::new(spec, 0, mail, Arc::default(), Default::default()).unwrap());
            if let Some(socket) = first.take() {
                socket.set_nonblocking(true).unwrap();
                vm.connect(OwnedFd::from(socket).into());
            }
            while !front_end.is_finished() || !is_done(vm) {
                for mail in mailbox.drain() {
                    if let Mail::Reply {
                        sequence, reply, ..
                    } = mail
                    {
                        vm.handle_reply(sequence, reply);
                    }
                }
                vm.handle_ready(false);
                assert!(!vm.is_idle(), "it was disconnected");
                thread::yield_now();
            }
        }));
        // A process that is killed does nothing more.
        std::mem::forget(vm);
        if life.is_ok() {
            let state = state.lock().unwrap().clone();
            let replies = lock(&held).replies;
            let (answers, _) = front_end.join().unwrap();
            return ((answers, state, replies), killed);
        }
        killed += 1;
    }
}

#[test]
fn a_kill_at_any_step_changes_neither_answers_nor_device() {
    for acks in [true, false] {
        let (expected, _) = run(acks, &[]);
        assert_eq!(expected.1.queues.len(), 2, "{expected:?}");
        for step in 1.. {
            let (result, killed) = run(acks, &[step]);
            assert_eq!(result, expected, "killed at step {step}");
            if killed == 0 {
                assert!(step > 100, "only {step} steps");
                break;
            }
        }
    }
}

/// A predecessor that was taken over by an attacker has left the journal.
#[test]
fn a_forged_journal_ends_the_connection() {
    let request = |request: FrontendReq, payload: &[u8]| {
        crate::journal::encode_derived(7, request as u32, payload.to_vec())
    };
    let owner = request(FrontendReq::SET_OWNER, &[]);
    let mut long = owner.clone();
    long.push(0);
    let mut unknown = owner.clone();
    unknown[8] = 200;
    let forged = [
        ("no request at all", vec![]),
        ("more bytes than its header says", long),
        ("an unknown request", unknown),
        (
            "one that is not kept",
            request(FrontendReq::GET_FEATURES, &[]),
        ),
        (
            "one that a session refuses",
            request(FrontendReq::SET_FEATURES, &[0xff; 8]),
        ),
        (
            "a kick without a queue",
            request(FrontendReq::SET_VRING_KICK, &[9; 8]),
        ),
    ];
    for (what, bytes) in [("a valid one", owner.clone())].into_iter().chain(forged) {
        let (theirs, ours) = UnixStream::pair().unwrap();
        let (mail, mailbox) = MailSender::new().unwrap();
        let restored = RestoredFrontend {
            socket: OwnedFd::from(ours).into(),
            next_number: 1000,
            kept: vec![record(&owner, &[]), record(&bytes, &[])],
            pending: None,
        };
        let spec = spec(
            Arc::default(),
            Arc::default(),
            Steps::endless(),
            Some(restored),
        );
        let mut vm = Vm::new(spec, 0, mail, Arc::default(), Default::default()).unwrap();
        for mail in mailbox.drain() {
            if let Mail::Reply {
                sequence, reply, ..
            } = mail
            {
                vm.handle_reply(sequence, reply);
            }
        }
        let is_connected = matches!(vm.front, Front::Live(_));
        assert_eq!(is_connected, bytes == owner, "{what}");
        drop(theirs);
    }
}

#[test]
fn a_kill_of_each_successor_changes_neither_answers_nor_device() {
    let (expected, _) = run(true, &[]);
    for seed in 1..=20 {
        let kills: Vec<usize> = (1..=30).map(|n| 1 + n * seed * 7 % 23).collect();
        let (result, _) = run(true, &kills);
        assert_eq!(result, expected, "killed at steps {kills:?}");
    }
}
