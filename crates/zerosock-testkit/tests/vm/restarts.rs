//! `kill -9` of the process that serves, under traffic, with a stock guest and a front-end that does not connect again: a
//! successor continues the device. What each side received is a prefix of what was sent, a blocked `read` of the guest ends
//! with a reset, its listeners stay, and new connections work.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use zerosock_cli::vm::hybrid;
use zerosock_cli::vm::pattern::{Pattern, sha256};
use zerosock_testkit::device::{Device, Endpoint, Program};
use zerosock_testkit::protocol::{Command, Outcome, Source};

use crate::Alone;
use crate::guest_pages::{Extras, Machine};
use crate::lab::{STEP, Skipped, echo, serving, short_dir, zerosock};

/// All of them.
pub(crate) const ALL: &[(&str, Alone)] = &[
    ("a_killed_process_has_a_successor_on_6.12", || kills("6.12")),
    ("a_killed_process_has_a_successor_on_6.1", || kills("6.1")),
];

/// The host's port, the guest's port that echoes, and its port that receives.
const HOST: u32 = 7;
const ECHO: u32 = 5000;
const SINK: u32 = 5001;
/// Bytes on a connection at most: the guest has them in memory.
const LEN: u64 = 16 << 20;

fn rounds() -> u64 {
    let text = std::env::var("ZEROSOCK_RESTARTS");
    text.map_or(5, |text| text.parse().expect("a number"))
}

/// Longer than a test takes.
pub(crate) fn limit() -> Duration {
    STEP * 2 + Duration::from_secs(10) * rounds() as u32
}

/// The parent of a process.
pub(crate) fn parent(pid: &str) -> Option<u32> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.split(' ').nth(1)?.parse().ok()
}

/// The process that serves, below the one that was started.
pub(crate) fn worker(root: u32) -> Option<Pid> {
    let is_below = |pid: &str| {
        let mut above = parent(pid);
        while let Some(pid) = above.filter(|&pid| pid != root && pid > 1) {
            above = parent(&pid.to_string());
        }
        above == Some(root)
    };
    let processes = fs::read_dir("/proc").ok()?.flatten();
    let mut names = processes.filter_map(|entry| entry.file_name().into_string().ok());
    let pid = names.find(|name| {
        let environment = fs::read(format!("/proc/{name}/environ")).unwrap_or_default();
        let mut variables = environment.split(|&byte| byte == 0);
        variables.any(|it| it == b"ZEROSOCK_SUPERVISED=1") && is_below(name)
    })?;
    Pid::from_raw(pid.parse().ok()?)
}

/// Whether a receive call has ended because of a reset: Linux has no error for it on a connection without unread bytes.
fn is_reset(outcome: &Outcome) -> bool {
    outcome.end || outcome.errno.as_deref() == Some("ECONNRESET")
}

/// Sends and receives one message by the guest's echo; the time until the answer is there.
pub(crate) fn echo_once(endpoint: &Endpoint) {
    let deadline = Instant::now() + STEP;
    loop {
        let answer = hybrid::connect(&endpoint.uds, ECHO, STEP)
            .ok()
            .and_then(|(mut stream, _)| {
                stream.set_read_timeout(Some(STEP)).ok()?;
                stream.write_all(b"hello").ok()?;
                let mut answer = [0; 5];
                stream.read_exact(&mut answer).ok()?;
                Some(answer)
            });
        match answer {
            Some(answer) => return assert_eq!(&answer, b"hello"),
            None => assert!(Instant::now() < deadline, "the guest does not answer"),
        }
    }
}

/// Reads to the end or a reset; returns the number of bytes, all of which are those of the pattern.
fn read_pattern(mut stream: UnixStream, seed: u64) -> u64 {
    let (mut buffer, mut expected) = (vec![0; 1 << 16], vec![0; 1 << 16]);
    let mut pattern = Pattern::new(seed);
    let mut received = 0;
    while let Ok(bytes @ 1..) = stream.read(&mut buffer) {
        pattern.fill(&mut expected[..bytes]);
        assert!(
            buffer[..bytes] == expected[..bytes],
            "not the bytes that were sent, after {received}"
        );
        received += bytes as u64;
    }
    received
}

/// Writes the pattern until the other end is gone. Returns how much was written.
fn write_pattern(mut stream: UnixStream, seed: u64) -> u64 {
    let mut buffer = vec![0; 1 << 16];
    let mut pattern = Pattern::new(seed);
    let mut sent = 0;
    while sent < LEN {
        pattern.fill(&mut buffer);
        match stream.write(&buffer) {
            Ok(bytes) if bytes == buffer.len() => sent += bytes as u64,
            Ok(bytes) => return sent + bytes as u64,
            Err(_) => return sent,
        }
    }
    // Until then the connection stays open.
    let _ = stream.read(&mut [0]);
    sent
}

fn kills(release: &str) -> Result<(), Skipped> {
    let dir = short_dir();
    let endpoint = Endpoint::new(dir.path(), 3);
    let program = Program {
        path: serving(),
        arguments: vec!["serve".into()],
        zerosock: zerosock().to_owned(),
    };
    let device = Device::start(&program, std::slice::from_ref(&endpoint), echo("device"));
    let device = device.expect("a device");
    let listener = hybrid::listen(&endpoint.uds, HOST).expect("a port of the host");
    let machine = Machine::boot_with(release, Some(&endpoint.vhost), Extras::default())?;
    let guest = &machine.guest.remote;
    let listen = |port| {
        guest
            .socket(Command::Listen { port }, STEP)
            .expect("a listener")
    };
    let (echoing, sink) = (listen(ECHO), listen(SINK));
    guest.start(Command::Echo { socket: echoing });
    echo_once(&endpoint);

    let mut recoveries = Vec::new();
    let mut received = (0, 0);
    for round in 0..rounds() {
        let connect = || {
            let connecting = guest.start(Command::Connect { cid: 2, port: HOST });
            let accepted = hybrid::accept(&listener, STEP).expect("a connection of the guest");
            (connecting.socket(STEP).expect("a socket"), accepted)
        };
        let receive = |socket, keep| Command::Receive {
            socket,
            limit: Some(LEN + 1),
            keep,
            acknowledge: false,
        };
        let (socket, idle_end) = connect();
        let idle = guest.start(receive(socket, false));
        let (socket, from_guest) = connect();
        let source = Source::Pattern {
            seed: round,
            len: LEN,
        };
        let sending = guest.start(Command::Send {
            socket,
            source,
            chunks: vec![4000, 64 << 10],
        });
        let accepting = guest.start(Command::Accept { socket: sink });
        let (to_guest, _) = hybrid::connect(&endpoint.uds, SINK, STEP).expect("a connection");
        let socket = accepting.socket(STEP).expect("a socket");
        let receiving = guest.start(receive(socket, true));
        let (up, down) = thread::scope(|scope| {
            let up = scope.spawn(move || read_pattern(from_guest, round));
            let down = scope.spawn(move || write_pattern(to_guest, round));
            // Any moment will do.
            thread::sleep(Duration::from_millis(20 + round * 37 % 200));
            let pid = worker(device.id()).expect("a process that serves");
            kill_process(pid, Signal::KILL).expect("a kill");
            let killed = Instant::now();
            echo_once(&endpoint);
            recoveries.push(killed.elapsed());
            (up.join().expect("a reader"), down.join().expect("a writer"))
        });
        drop(idle_end);
        let log = || device.log.tail(30);
        let outcome = idle
            .wait(STEP)
            .unwrap_or_else(|error| panic!("idle: {error}\n{}", log()));
        assert!(
            is_reset(&outcome) && outcome.bytes == 0,
            "{outcome:?}\n{}",
            log()
        );
        let outcome = sending
            .wait(STEP)
            .unwrap_or_else(|error| panic!("sending: {error}\n{}", log()));
        assert!(
            up <= outcome.bytes && (outcome.errno.is_some() || outcome.bytes == LEN),
            "{outcome:?}, {up} received"
        );
        let outcome = receiving
            .wait(STEP)
            .unwrap_or_else(|error| panic!("receiving: {error}\n{}", log()));
        assert!(is_reset(&outcome), "{outcome:?}");
        assert!(outcome.bytes <= down, "{outcome:?}, {down} sent");
        assert_eq!(
            outcome.sha256,
            Some(sha256(&Pattern::bytes(round, outcome.bytes as usize)))
        );
        received = (received.0 + up, received.1 + outcome.bytes);
        // From the guest, too.
        drop(connect());
    }
    // A single process may be killed before the first byte.
    assert!(received.0 > 0 && received.1 > 0, "{received:?}");
    recoveries.sort();
    println!(
        "Linux {}: {} kills; bytes from the guest and to it: {received:?}; until a new connection has its answer: \
         median {:?}, longest {:?}",
        machine.guest.release,
        recoveries.len(),
        recoveries[recoveries.len() / 2],
        recoveries[recoveries.len() - 1],
    );
    Ok(())
}
