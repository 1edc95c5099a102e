//! `kill -9` of clients, of the agent, and of all of zerosock's processes in a stock guest but the keeper, under traffic, and
//! many attachments, at `zerosock serve`. Clients free the pages of their memory before. All free memory of the guest has
//! patterns: no foreign byte changes, neither there nor in the streams, and nothing leaks in the guest or in the daemon.
//!
//! The loop is a program in the guest: `zerosock_testkit::guest::kills`. This file is the host's side.

use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use zerosock_cli::vm::hybrid;
use zerosock_testkit::device::{Device, Endpoint};
use zerosock_testkit::guest::NAME;
use zerosock_testkit::guest::kills::exchange::{Expected, HEADER, Header};
use zerosock_testkit::protocol::Command;

use crate::Alone;
use crate::guest_endpoint::start_daemon;
use crate::guest_pages::{Extras, Machine};
use crate::lab::{STEP, Skipped, short_dir};

/// All of them.
pub(crate) const ALL: &[(&str, Alone)] = &[
    ("no_foreign_byte_changes_on_6.12", || kills("6.12")),
    ("no_foreign_byte_changes_on_6.1", || kills("6.1")),
];

const KEY: &str = "0123456789abcdef0123456789abcdef";
const PORT: u32 = 7;
/// Of the first loop, behind which daemon and guest have all memory that they need.
const FIRST: Counts = Counts {
    kills: 3,
    cycles: 5,
};
/// Bytes that a slow host sends at once, and the time between.
const SLOW: usize = 4096;
const PAUSE: Duration = Duration::from_millis(1);
/// Memory that the daemon's allocator may keep.
const MORE: u64 = 4 << 20;

/// How often the guest does what.
#[derive(Copy, Clone)]
struct Counts {
    /// Of a client, of the agent and of all but the keeper, in turn.
    kills: u64,
    cycles: u64,
}

/// The counts of `ZEROSOCK_GUEST_KILLS` and `ZEROSOCK_GUEST_CYCLES`, or small ones.
fn counts() -> Counts {
    let number = |name, default| {
        let text = std::env::var(name);
        text.map_or(default, |text| text.parse().expect("a number"))
    };
    Counts {
        kills: number("ZEROSOCK_GUEST_KILLS", 6),
        cycles: number("ZEROSOCK_GUEST_CYCLES", 20),
    }
}

impl Counts {
    /// Longer than the loop takes on a slow machine.
    fn limit(self) -> Duration {
        STEP * 2 + Duration::from_millis(5000 * self.kills + 500 * self.cycles)
    }
}

/// Longer than a test takes.
pub(crate) fn limit() -> Duration {
    counts().limit() + FIRST.limit()
}

/// The program behind the daemon's port: it sends to all clients and checks what they send.
#[derive(Default)]
struct Peer {
    connections: AtomicUsize,
    /// Threads of connections.
    active: AtomicUsize,
    sent: AtomicU64,
    received: AtomicU64,
    faults: Mutex<Vec<String>>,
}

impl Peer {
    fn start(listener: UnixListener) -> Arc<Peer> {
        let peer = Arc::new(Peer::default());
        let shared = peer.clone();
        thread::spawn(move || {
            for stream in listener.incoming() {
                let (stream, peer) = (stream.expect("a connection"), shared.clone());
                peer.connections.fetch_add(1, Ordering::Relaxed);
                peer.active.fetch_add(1, Ordering::Relaxed);
                thread::spawn(move || {
                    peer.serve(&stream);
                    peer.active.fetch_sub(1, Ordering::Relaxed);
                });
            }
        });
        peer
    }

    /// Until both directions have ended.
    fn serve(&self, mut stream: &UnixStream) {
        let mut header = [0; HEADER];
        if stream.read_exact(&mut header).is_err() {
            return;
        }
        let header = Header::decode(&header);
        thread::scope(|scope| {
            scope.spawn(|| self.send(stream, &header));
            if let Err(error) = self.receive(stream, &header) {
                self.faults().push(error.to_string());
            }
        });
    }

    fn send(&self, mut stream: &UnixStream, header: &Header) {
        let (mut pattern, mut left) = (header.from_host(), header.len);
        let mut bytes = vec![0; if header.is_paced { SLOW } else { 64 << 10 }];
        while left > 0 {
            let len = left.min(bytes.len() as u64);
            let bytes = &mut bytes[..len as usize];
            pattern.fill(bytes);
            if stream.write_all(bytes).is_err() {
                return;
            }
            self.sent.fetch_add(len, Ordering::Relaxed);
            left -= len;
            if header.is_paced {
                thread::sleep(PAUSE);
            }
        }
    }

    fn receive(&self, mut stream: &UnixStream, header: &Header) -> io::Result<()> {
        let mut expected = Expected::new(header.to_host());
        let mut bytes = vec![0; 64 << 10];
        // A reset, or an end.
        while let Ok(len @ 1..) = stream.read(&mut bytes) {
            expected.check(&bytes[..len])?;
            self.received.fetch_add(len as u64, Ordering::Relaxed);
        }
        Ok(())
    }

    fn faults(&self) -> std::sync::MutexGuard<'_, Vec<String>> {
        self.faults.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What the daemon has.
#[derive(Clone, Debug, PartialEq)]
struct Usage {
    descriptors: usize,
    threads: u64,
    /// Mappings of the guest's memory.
    mappings: usize,
    /// Attachments, connections and bridges.
    attachments: u64,
    connections: u64,
    bridges: u64,
    /// Bytes of memory of its own.
    memory: u64,
}

impl Usage {
    fn of(device: &Device, memory: &Path) -> Usage {
        let read = |what: &str| {
            let path = format!("/proc/{}/{what}", device.id());
            fs::read_to_string(path).expect("a daemon")
        };
        let (status, maps) = (read("status"), read("maps"));
        let of_status = |name: &str| number(&status, name).expect("a number");
        let descriptors = fs::read_dir(format!("/proc/{}/fd", device.id()));
        let sums = sums(device);
        let of_sums = |name: &str| number(&sums, name).expect("a counter");
        let name = memory.to_string_lossy();
        Usage {
            descriptors: descriptors.expect("a daemon").count(),
            threads: of_status("Threads:"),
            mappings: maps.lines().filter(|line| line.ends_with(&*name)).count(),
            attachments: of_sums("guest_endpoints="),
            connections: of_sums("connections_now="),
            bridges: of_sums("bridges_now="),
            memory: of_status("RssAnon:") << 10,
        }
    }

    /// Whether this is as much as before.
    fn is_like(&self, before: &Usage) -> bool {
        let same = Usage {
            memory: before.memory,
            ..self.clone()
        };
        same == *before && self.memory <= before.memory + MORE
    }
}

/// The number behind a name.
fn number(text: &str, name: &str) -> Option<u64> {
    let (_, rest) = text.split_once(name)?;
    let rest = rest.trim_start();
    let digits = rest.find(|it: char| !it.is_ascii_digit());
    rest[..digits.unwrap_or(rest.len())].parse().ok()
}

/// The daemon's counters, which it logs when it is asked.
fn sums(device: &Device) -> String {
    let last = || {
        let text = device.log.tail(usize::MAX);
        let mut lines = text.lines().rev();
        lines
            .find(|line| line.contains("bridges_now="))
            .map(str::to_owned)
    };
    // A line has the time, so the next one is another.
    let (before, deadline) = (last(), Instant::now() + STEP);
    let id = Pid::from_raw(device.id() as i32).expect("a process");
    kill_process(id, Signal::USR1).expect("a daemon");
    loop {
        match last() {
            Some(line) if before.as_ref() != Some(&line) => return line,
            _ => assert!(Instant::now() < deadline, "the daemon logs no counters"),
        }
        thread::sleep(Duration::from_millis(5));
    }
}

fn kills(release: &str) -> Result<(), Skipped> {
    let dir = short_dir();
    let endpoint = Endpoint::new(dir.path(), 3);
    let key = dir.path().join("key");
    fs::write(&key, KEY).expect("a file");
    fs::set_permissions(&key, fs::Permissions::from_mode(0o600)).expect("a mode");
    let peer = Peer::start(hybrid::listen(&endpoint.uds, PORT).expect("a port of the host"));
    let device = start_daemon(&endpoint, &key, &dir.path().join("attach"));
    let extras = Extras {
        cpus: 2,
        ..Extras::default()
    };
    let machine = Machine::boot_with(release, Some(&endpoint.vhost), extras)?;
    let setup = format!("printf %s {KEY} > /key; chmod 600 /key");
    assert_eq!(machine.shell(&setup), "");

    run(&machine, &device, &peer, FIRST);
    let before = Usage::of(&device, &machine.memory);
    let text = run(&machine, &device, &peer, counts());
    let deadline = Instant::now() + STEP;
    let now = loop {
        let now = Usage::of(&device, &machine.memory);
        if now.is_like(&before) {
            break now;
        }
        let log = device.log.tail(20);
        assert!(
            Instant::now() < deadline,
            "{now:?}, before {before:?}\n{log}"
        );
    };
    assert_eq!(before.attachments, 0);
    println!("Linux {}:\n{text}", machine.guest.release);
    println!("daemon: {before:?}, then {now:?}");
    println!(
        "{} connections, {} MiB to the guest, {} MiB from it",
        peer.connections.load(Ordering::Relaxed),
        peer.sent.load(Ordering::Relaxed) >> 20,
        peer.received.load(Ordering::Relaxed) >> 20,
    );
    Ok(())
}

/// The loop. Returns what the guest reports.
fn run(machine: &Machine, device: &Device, peer: &Peer, counts: Counts) -> String {
    let Counts { kills, cycles } = counts;
    let options = format!("--key /key --port {PORT} --kills {kills} --cycles {cycles} --seed 1");
    let loop_ = format!("/bin/zerosock {NAME} kills run {options}");
    let argv = loop_.split(' ').map(str::to_owned).collect();
    let run = Command::Run { argv };
    let outcome = machine.guest.remote.run(run, counts.limit());
    let logs = || {
        let (console, log) = (machine.guest.console.tail(20), device.log.tail(20));
        format!(
            "{:?}\nthe guest's console:\n{console}\nthe daemon's log:\n{log}",
            peer.faults()
        )
    };
    let outcome = outcome.unwrap_or_else(|error| panic!("{error}\n{}", logs()));
    let text = outcome.text.unwrap_or_default();
    assert_eq!(outcome.bytes, 0, "{text}\n{}", logs());
    let deadline = Instant::now() + STEP;
    while peer.active.load(Ordering::Relaxed) > 0 {
        assert!(
            Instant::now() < deadline,
            "connections are left\n{}",
            logs()
        );
        thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(*peer.faults(), Vec::<String>::new());
    text
}
