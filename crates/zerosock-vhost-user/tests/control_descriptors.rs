//! Descriptors that a front-end sends are closed, whatever the front-end does. The only test of
//! this binary, because it counts the descriptors of the process and finds the control thread by
//! name.

#[path = "control/fake.rs"]
mod fake;

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use fake::*;
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use zerosock_sys::account::Budget;
use zerosock_sys::reaper;
use zerosock_vhost_user::DeviceCommand;
use zerosock_vhost_user::codec::{Decoder, MAX_FDS};

/// An action of the front-end.
#[derive(Clone, Debug)]
enum Act {
    /// A range of the messages that start the queues, unchanged or with other descriptors.
    Sequence {
        from: usize,
        count: usize,
        fds: Option<Vec<u8>>,
    },
    /// A message with a correct header and an arbitrary payload.
    Message {
        request: u32,
        flags: u32,
        payload: Vec<u8>,
        fds: Vec<u8>,
    },
    /// A vring or memory message with plausible numbers.
    Numbers {
        request: u32,
        numbers: Vec<u8>,
        fds: Vec<u8>,
    },
    /// Arbitrary bytes.
    Bytes { bytes: Vec<u8>, fds: Vec<u8> },
}

fn descriptors() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![6 => vec(0..6u8, 0..3), 1 => vec(0..6u8, 30..36), 1 => vec(0..6u8, 0..250)]
}

fn act() -> impl Strategy<Value = Act> {
    let payload = prop_oneof![vec(any::<u8>(), 0..64), vec(any::<u8>(), 0..1200)];
    prop_oneof![
        4 => (0..20usize, 1..20usize, prop::option::weighted(0.2, descriptors()))
            .prop_map(|(from, count, fds)| Act::Sequence { from, count, fds }),
        2 => (0..50u32, prop_oneof![Just(0u32), Just(8), any::<u32>()], payload, descriptors())
            .prop_map(|(request, flags, payload, fds)| Act::Message { request, flags, payload, fds }),
        3 => (0..50u32, vec(0..4u8, 0..6), descriptors())
            .prop_map(|(request, numbers, fds)| Act::Numbers { request, numbers, fds }),
        1 => (vec(any::<u8>(), 1..40), descriptors())
            .prop_map(|(bytes, fds)| Act::Bytes { bytes, fds }),
    ]
}

/// One descriptor of each kind, sent repeatedly.
struct Kinds(Vec<OwnedFd>);

impl Kinds {
    fn new() -> Kinds {
        let (socket, _) = UnixStream::pair().unwrap();
        let null = File::open("/dev/null").unwrap();
        let file = tempfile::tempfile().unwrap();
        Kinds(vec![
            event(),
            memory(MEMORY),
            zerosock_sys::memfd::create("empty", 0, false).unwrap(),
            socket.into(),
            null.into(),
            file.into(),
        ])
    }

    fn pick(&self, picks: &[u8]) -> Vec<BorrowedFd<'_>> {
        picks
            .iter()
            .map(|pick| self.0[usize::from(*pick)].as_fd())
            .collect()
    }
}

/// Errors are expected: the other side may have closed the connection.
fn send(raw: &Raw, request: u32, flags: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) {
    let mut bytes = header(request, flags, payload.len() as u32).to_vec();
    bytes.extend_from_slice(payload);
    let _ = raw.send_bytes(&bytes, fds);
}

fn perform(raw: &Raw, kinds: &Kinds, act: &Act) {
    match act {
        Act::Sequence { from, count, fds } => {
            for (request, payload, own) in start_sequence().into_iter().skip(*from).take(*count) {
                let own: Vec<_> = own.iter().map(|fd| fd.as_fd()).collect();
                let fds = fds.as_ref().map(|fds| kinds.pick(fds)).unwrap_or(own);
                send(raw, request, 1 | NEED_REPLY, &payload, &fds);
            }
        }
        Act::Message {
            request,
            flags,
            payload,
            fds,
        } => {
            send(raw, *request, 1 | flags, payload, &kinds.pick(fds));
        }
        Act::Numbers {
            request,
            numbers,
            fds,
        } => {
            let words: Vec<u8> = numbers
                .iter()
                .flat_map(|n| u64::from(*n).to_ne_bytes())
                .collect();
            send(raw, *request, 1, &words, &kinds.pick(fds));
        }
        Act::Bytes { bytes, fds } => {
            let _ = raw.send_bytes(bytes, &kinds.pick(fds));
        }
    }
}

/// The number of open descriptors, after the reaper has closed what was dropped.
fn open_descriptors() -> usize {
    assert!(reaper::drain(Duration::from_secs(60)));
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Tests the decoder alone on a socket pair.
fn decode(acts: &[Act], kinds: &Kinds) -> Result<(), TestCaseError> {
    let before = open_descriptors();
    let (ours, theirs) = UnixStream::pair().unwrap();
    let raw = Raw(ours);
    raw.0.set_nonblocking(true).unwrap();
    let account = Budget::unlimited().account();
    let mut decoder = Decoder::new();
    for act in acts {
        perform(&raw, kinds, act);
        loop {
            match decoder.read(&theirs, &account) {
                Ok(Some(message)) => prop_assert!(message.fds.len() <= MAX_FDS),
                Ok(None) => break,
                Err(_) => {
                    decoder = Decoder::new();
                    break;
                }
            }
        }
    }
    drop((raw, theirs, decoder));
    prop_assert_eq!(open_descriptors(), before);
    Ok(())
}

/// A whole session with the control thread and a worker that drops all commands.
fn converse(
    lab: &Harness,
    commands: &Receiver<DeviceCommand>,
    acts: &[Act],
    kinds: &Kinds,
) -> Result<(), TestCaseError> {
    let before = open_descriptors();
    let raw = lab.raw(0);
    for act in acts {
        perform(&raw, kinds, act);
    }
    drop(raw);
    wait_for(commands, "Disconnected");
    prop_assert_eq!(open_descriptors(), before);
    Ok(())
}

/// Processor time of the control thread in nanoseconds.
fn control_thread_time() -> u64 {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let control = tasks
        .map(|task| task.unwrap().path())
        .find(|task| {
            std::fs::read_to_string(task.join("comm"))
                .is_ok_and(|name| name.trim() == "zerosock-contro")
        })
        .unwrap();
    let usage = std::fs::read_to_string(control.join("schedstat")).unwrap();
    usage.split(' ').next().unwrap().parse().unwrap()
}

/// Makes a session wait for its worker while more requests are in its socket.
fn park(lab: &Harness, worker: &Worker) {
    let raw = lab.raw(0);
    let (_, reply) = worker.expect("Connected");
    raw.send(1, 0, &[], &[]);
    raw.send(1, 0, &[], &[]);
    let give_up = Instant::now() + DEADLINE;
    loop {
        // A thread that spins would never be idle for that long.
        let before = control_thread_time();
        std::thread::sleep(Duration::from_millis(100));
        if control_thread_time() == before {
            break;
        }
        assert!(Instant::now() < give_up, "the control thread never sleeps");
    }
    reply.done();
    raw.reply_u64(1);
    raw.reply_u64(1);
    drop(raw);
    worker.done("Disconnected");
}

#[test]
fn arbitrary_bytes_and_descriptors_neither_panic_nor_leak() {
    let kinds = Kinds::new();
    // A runner counts its successes, so each run has a runner of its own.
    let runner = || {
        TestRunner::new(Config {
            cases: 500,
            failure_persistence: None,
            ..Config::default()
        })
    };
    runner()
        .run(&vec(act(), 1..6), |acts| decode(&acts, &kinds))
        .unwrap();

    let (lab, worker) = Harness::one();
    park(&lab, &worker);
    let commands = worker.answer_all();
    // The first run may open descriptors that stay open.
    converse(&lab, &commands, &[], &kinds).unwrap();
    runner()
        .run(&vec(act(), 1..12), |acts| {
            converse(&lab, &commands, &acts, &kinds)
        })
        .unwrap();

    // The thread still works.
    start(&lab.raw(0));
    wait_for(&commands, "Disconnected");
    let stats = lab.control.stats(0).unwrap();
    eprintln!("{stats:?}");
    // A session ends at the first reply that cannot be written. How many messages are read before
    // depends on timing, but few sessions read none.
    assert!(stats.messages > 100, "{stats:?}");
}
