//! Waiting time of a neighbour while an attacker tries to block the threads of `zerosock serve`.
//!
//! Each row has one daemon with two VMs on one worker: the attacker and the neighbour. The
//! neighbour echoes 64 bytes through a host program repeatedly, and after every 16th round trip
//! sends a vhost-user GET_FEATURES, which the control thread answers. Both are timed for 600 ms
//! without an attack, and as long while a thread of the daemon sleeps in the attacker's object (the
//! attacks of tests/isolation), or for as long as the attack takes; three times, each with a new
//! daemon. The neighbour's guest and its program are on one thread. The goal is at most 20 ms for
//! the longest of all, except in the rows of attacks that remain (SECURITY.md), which show what
//! those cost.
//!
//! `[ZEROSOCK_TEST_FUSE=1] cargo bench -p zerosock-cli --bench isolation [-- --quick]`
//!
//! `--quick`, also without `--bench` (`cargo test --benches`): to see that everything runs.
#![allow(missing_docs, reason = "a program")]
#![allow(dead_code, reason = "the tests use the rest of the modules")]

#[path = "../tests/isolation/attack.rs"]
mod attack;
#[path = "../tests/isolation/daemon.rs"]
mod daemon;
#[path = "../../zerosock/tests/common/driver.rs"]
mod driver;
#[path = "../tests/isolation/fuse.rs"]
mod fuse;
#[path = "../tests/isolation/large_vm.rs"]
mod large_vm;
#[path = "../tests/isolation/lingering.rs"]
mod lingering;
#[path = "../tests/isolation/neighbour.rs"]
mod neighbour;
#[path = "../tests/isolation/pipe_lock.rs"]
mod pipe_lock;
#[path = "../tests/process/mod.rs"]
mod process;
#[path = "../tests/isolation/raw.rs"]
mod raw;
#[path = "../tests/isolation/threads.rs"]
mod threads;

use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Command;
use std::sync::mpsc::{self, TryRecvError};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, epoll, eventfd};
use rustix::fs::{FallocateFlags, fallocate};
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with,
};
use zerosock::{Address, Cid, Port};

use attack::{Attack, be_turned_away, hand_over, hand_over_many, hand_over_pipe, replace_pipe};
use daemon::{ATTACKER, Daemon, alone, command};
use driver::{Driver, DriverConfig, StreamState};
use fuse::{FuseServer, not_asked_for};
use large_vm::{LargeVm, MEMORY, no_memory};
use lingering::{lingering_socket, queued_lingering_socket};
use neighbour::{Neighbour, deadline};
use pipe_lock::PipeLock;
use process::Running;
use raw::{
    GET_FEATURES, SET_BACKEND_REQ_FD, SET_MEM_TABLE, SET_VRING_CALL, SET_VRING_ERR, SET_VRING_KICK,
    Way, send_by,
};

/// Round trips from one control request to the next.
const ROUND_TRIPS: usize = 16;
/// Descriptors of the daemon that has few.
const DESCRIPTORS: usize = 1024;
const PORT: Port = Port::new(9);
/// Memory of the guest that punches holes up to here: its rings and receive buffers, which it
/// keeps.
const KEPT: u64 = 1 << 20;
/// Its memory.
const LARGE: u64 = MEMORY as u64;
/// Packets at a time of a guest: more than the transmit buffers that are kept.
const BURST: usize = 64;
/// Waiters on an eventfd, each with a descriptor of this process.
const WAITERS: usize = 4000;
/// Host programs that do not accept, and how many connections wait for each.
const FULL_BACKLOGS: u32 = 64;
const WAITING_EACH: usize = 16;

/// Makes an attack and measures during it. Why not, if it cannot be made.
type Attacker = fn(&Daemon, &mut Bench) -> Result<Samples, String>;

const ATTACKS: [(&str, Attacker); 20] = [
    // What the machine does by itself.
    ("none", |_, bench| Ok(bench.sample())),
    ("lingering socket as call descriptor", |daemon, bench| {
        bench.lingering(daemon, Way::With(SET_VRING_CALL))
    }),
    ("lingering socket as kick descriptor", |daemon, bench| {
        bench.lingering(daemon, Way::With(SET_VRING_KICK))
    }),
    ("lingering socket as err descriptor", |daemon, bench| {
        bench.lingering(daemon, Way::With(SET_VRING_ERR))
    }),
    ("lingering socket as backend channel", |daemon, bench| {
        bench.lingering(daemon, Way::With(SET_BACKEND_REQ_FD))
    }),
    ("lingering socket beside GET_FEATURES", |daemon, bench| {
        bench.lingering(daemon, Way::With(GET_FEATURES))
    }),
    ("lingering socket in half a message", |daemon, bench| {
        bench.lingering(daemon, Way::InHalfMessage)
    }),
    (
        "lingering socket with an out-of-band byte",
        |daemon, bench| bench.lingering(daemon, Way::WithUrgentByte),
    ),
    (
        "lingering socket queued in a passed socket",
        |daemon, bench| {
            let way = Way::With(SET_VRING_CALL);
            bench.held(hand_over(daemon, way, queued_lingering_socket()))
        },
    ),
    (
        "more lingering sockets than reaper threads",
        |daemon, bench| bench.held(hand_over_many(daemon)),
    ),
    (
        "as many front-ends turned away with one each",
        |daemon, bench| bench.held(be_turned_away(daemon)),
    ),
    ("call pipe with its lock held", |daemon, bench| {
        let pipe = PipeLock::hold().map_err(|error| format!("userfaultfd: {error}"))?;
        bench.held(hand_over_pipe(daemon, pipe))
    }),
    ("replaced call pipe with its lock held", |daemon, bench| {
        let pipe = PipeLock::hold().map_err(|error| format!("userfaultfd: {error}"))?;
        bench.held(replace_pipe(daemon, pipe))
    }),
    ("FUSE file as call descriptor", |daemon, bench| {
        bench.fuse(daemon, Way::With(SET_VRING_CALL))
    }),
    ("FUSE file as kick descriptor", |daemon, bench| {
        bench.fuse(daemon, Way::With(SET_VRING_KICK))
    }),
    ("FUSE file as memory", |daemon, bench| {
        bench.fuse(daemon, Way::With(SET_MEM_TABLE))
    }),
    ("FUSE file beside GET_FEATURES", |daemon, bench| {
        bench.fuse(daemon, Way::With(GET_FEATURES))
    }),
    ("FUSE file in half a message", |daemon, bench| {
        bench.fuse(daemon, Way::InHalfMessage)
    }),
    ("death of a VM with 1 GiB in use", die),
    ("connects against 64 full backlogs", fill_backlogs),
];

/// Attacks that SECURITY.md lists as remaining.
const REMAINING: [(&str, Attacker); 2] = [
    ("holes punched in 1 GiB of a guest", punch_holes),
    ("4000 waiters on a call eventfd", wait_for_calls),
];

/// The neighbour and what it measures.
struct Bench {
    neighbour: Neighbour,
    time: Duration,
}

#[derive(Default)]
struct Samples {
    round_trips: Vec<Duration>,
    answers: Vec<Duration>,
}

impl Samples {
    fn extend(&mut self, other: Samples) {
        self.round_trips.extend(other.round_trips);
        self.answers.extend(other.answers);
    }
}

impl Bench {
    fn lingering(&mut self, daemon: &Daemon, way: Way) -> Result<Samples, String> {
        self.held(hand_over(daemon, way, lingering_socket()))
    }

    fn fuse(&mut self, daemon: &Daemon, way: Way) -> Result<Samples, String> {
        if let Some(reason) = not_asked_for() {
            return Err(reason);
        }
        let file = FuseServer::start(daemon.pid()).map_err(|error| format!("no FUSE: {error}"))?;
        self.held(hand_over(daemon, way, file))
    }

    /// A thread of the daemon sleeps all the time.
    fn held<A, R>(&mut self, attack: Attack<A, R>) -> Result<Samples, String> {
        let samples = self.sample();
        attack.held.check();
        Ok(samples)
    }

    fn sample(&mut self) -> Samples {
        let mut samples = Samples::default();
        let end = Instant::now() + self.time;
        self.sample_until(&mut samples, || Instant::now() >= end);
        samples
    }

    fn sample_until(&mut self, samples: &mut Samples, mut ended: impl FnMut() -> bool) {
        loop {
            for n in 0..ROUND_TRIPS {
                time(&mut samples.round_trips, || {
                    self.neighbour.round_trip(n as u8)
                });
            }
            time(&mut samples.answers, || self.neighbour.ask_features());
            if ended() {
                return;
            }
        }
    }

    /// Samples while another thread repeats a step of the attack.
    fn sample_beside(&mut self, mut step: impl FnMut() + Send) -> Samples {
        let (going_on, ended) = mpsc::channel::<()>();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                while ended.try_recv() == Err(TryRecvError::Empty) {
                    step();
                }
            });
            // Dropped before the thread is waited for, also by a panic.
            let _going_on = going_on;
            self.sample()
        })
    }
}

fn time(times: &mut Vec<Duration>, act: impl FnOnce()) {
    let begin = Instant::now();
    act();
    times.push(begin.elapsed());
}

/// From the death of the VM until the daemon has unmapped its memory, several times.
fn die(daemon: &Daemon, bench: &mut Bench) -> Result<Samples, String> {
    if let Some(reason) = no_memory() {
        return Err(reason);
    }
    let mut samples = Samples::default();
    let end = Instant::now() + bench.time;
    loop {
        let vm = LargeVm::start(daemon);
        std::thread::scope(|scope| {
            let death = scope.spawn(|| {
                let mapping = vm.die(daemon);
                process::wait_until("the memory to be unmapped", || mapping.size() == 0);
            });
            bench.sample_until(&mut samples, || death.is_finished());
        });
        if Instant::now() >= end {
            return Ok(samples);
        }
    }
}

/// A guest that keeps connecting to programs that accept nothing.
fn fill_backlogs(daemon: &Daemon, bench: &mut Bench) -> Result<Samples, String> {
    let ports = (0..FULL_BACKLOGS).map(|n| Port::new(PORT.get() + 1 + n));
    let ports: Vec<_> = ports.collect();
    let listen = |port: &Port| listener_of_one(&daemon.service(ATTACKER, *port)).unwrap();
    let _listeners: Vec<_> = ports.iter().map(listen).collect();
    let mut config = DriverConfig::new(daemon.socket(ATTACKER));
    config.connect_timeout = process::DEADLINE;
    let mut guest = Driver::attach(config).unwrap();
    let mut waiting = Vec::new();
    for port in ports {
        let to = Address::new(Cid::HOST, port);
        guest.wait_connect(to, deadline()).unwrap();
        waiting.extend([to; WAITING_EACH].map(|to| (guest.connect(to).unwrap(), to)));
    }
    Ok(bench.sample_beside(move || {
        let soon = Instant::now() + Duration::from_millis(10);
        guest.wait_until(soon, |_| None::<()>).unwrap();
        for (stream, to) in &mut waiting {
            match guest.state(*stream) {
                Some(StreamState::Connecting) => {}
                Some(StreamState::Connected) => panic!("the backlog has room"),
                // The daemon has given up.
                _ => {
                    guest.abort(*stream);
                    *stream = guest.connect(*to).unwrap();
                }
            }
        }
    }))
}

/// A guest that keeps connecting after all descriptors that it may have are in use.
fn use_up_descriptors(daemon: &Daemon, bench: &mut Bench) -> Result<Samples, String> {
    let program = UnixListener::bind(daemon.service(ATTACKER, PORT)).unwrap();
    let mut guest = daemon.attach(ATTACKER);
    let to = Address::new(Cid::HOST, PORT);
    let mut ends = Vec::new();
    while guest.wait_connect(to, deadline()).is_ok() {
        ends.push(program.accept().unwrap());
        assert!(ends.len() < DESCRIPTORS, "connections without end");
    }
    Ok(bench.sample_beside(move || {
        if guest.wait_connect(to, deadline()).is_ok() {
            ends.push(program.accept().unwrap());
        }
    }))
}

/// A guest that sends packets while its VMM frees the pages of the transmit buffers: a page fault
/// of the worker waits until the kernel has freed all of them.
fn punch_holes(daemon: &Daemon, bench: &mut Bench) -> Result<Samples, String> {
    if let Some(reason) = no_memory() {
        return Err(reason);
    }
    let mut config = DriverConfig::new(daemon.socket(ATTACKER));
    config.queue_size = 1024;
    config.rx_buffer_size = 1024;
    config.tx_buffer_size = 65_536;
    config.seal = false;
    let mut guest = Driver::attach(config).unwrap();
    let memory = largest_memory().map_err(|error| format!("no memory of a guest: {error}"))?;
    // More than is mapped: the worker waits for all of it.
    memory.set_len(LARGE).unwrap();
    let to = Address::new(Cid::HOST, PORT);
    let (going_on, ended) = mpsc::channel::<()>();
    Ok(std::thread::scope(|scope| {
        scope.spawn(move || {
            let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            while ended.try_recv() == Err(TryRecvError::Empty) {
                fallocate(&memory, FallocateFlags::empty(), KEPT, LARGE - KEPT).unwrap();
                fallocate(&memory, punch, KEPT, LARGE - KEPT).unwrap();
            }
        });
        // Dropped before the thread is waited for, also by a panic.
        let _going_on = going_on;
        bench.sample_beside(move || {
            // Packets without a header are dropped.
            let streams: Vec<_> = (0..BURST).map_while(|_| guest.connect(to).ok()).collect();
            let soon = Instant::now() + Duration::from_millis(1);
            guest.wait_until(soon, |_| None::<()>).unwrap();
            for stream in streams {
                guest.abort(stream);
            }
        })
    }))
}

/// The largest memory of a guest of this process.
fn largest_memory() -> io::Result<File> {
    let mut largest = Err(io::ErrorKind::NotFound.into());
    let mut most = 0;
    for fd in fs::read_dir("/proc/self/fd")? {
        let path = fd?.path();
        let name = fs::read_link(&path).unwrap_or_default();
        if !name.to_string_lossy().starts_with("/memfd:zerosock-driver") {
            continue;
        }
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        let len = file.metadata()?.len();
        if len > most {
            (most, largest) = (len, Ok(file));
        }
    }
    largest
}

/// A guest with a call eventfd that an epoll instance watches very often: each notification walks
/// all waiters.
fn wait_for_calls(daemon: &Daemon, bench: &mut Bench) -> Result<Samples, String> {
    let program = UnixListener::bind(daemon.service(ATTACKER, PORT)).unwrap();
    let mut config = DriverConfig::new(daemon.socket(ATTACKER));
    config.event_idx = false;
    let mut guest = Driver::attach(config).unwrap();
    let to = Address::new(Cid::HOST, PORT);
    let stream = guest.wait_connect(to, deadline()).unwrap();
    let (mut end, _) = program.accept().unwrap();
    let call = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
    let watcher = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
    let mut waiters = Vec::new();
    for _ in 0..WAITERS {
        let waiter = call.try_clone().map_err(|error| error.to_string())?;
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
        epoll::add(&watcher, &waiter, epoll::EventData::new_u64(0), flags)
            .map_err(|error| error.to_string())?;
        waiters.push(waiter);
    }
    for queue in [0u64, 1] {
        send_by(
            &mut guest,
            SET_VRING_CALL,
            &queue.to_ne_bytes(),
            &[call.as_fd()],
        );
    }
    let samples = bench.sample_beside(move || {
        end.write_all(&[7]).unwrap();
        // Nothing wakes the guest.
        let soon = Instant::now() + Duration::from_micros(200);
        guest.wait_until(soon, |_| None::<()>).unwrap();
        while guest.recv(stream, &mut [0; 4096]).is_ok_and(|len| len > 0) {}
    });
    let calls = rustix::io::read(&call, &mut [0; 8]);
    calls.map_err(|error| format!("no notification: {error}"))?;
    drop(waiters);
    Ok(samples)
}

/// A listener that lets one connection wait.
fn listener_of_one(path: &Path) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    bind(&socket, &SocketAddrUnix::new(path)?)?;
    listen(&socket, 0)?;
    Ok(socket)
}

fn start_with_few_descriptors() -> Daemon {
    let alone = alone();
    let dir = tempfile::tempdir().unwrap();
    let serve = command(dir.path());
    let mut shell = Command::new("sh");
    let script = format!("ulimit -n {DESCRIPTORS}; exec \"$0\" \"$@\"");
    shell.args(["-c", &script]).arg(serve.get_program());
    shell.args(serve.get_args());
    Daemon::with(Running::start(&mut shell), dir, alone)
}

struct Figures {
    median: Duration,
    p99: Duration,
    longest: Duration,
}

fn figures(times: &mut [Duration]) -> Figures {
    times.sort_unstable();
    let at = |percent: usize| times[(times.len() - 1) * percent / 100];
    Figures {
        median: at(50),
        p99: at(99),
        longest: at(100),
    }
}

impl fmt::Display for Figures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [median, p99, longest] = [self.median, self.p99, self.longest].map(|t| t.as_micros());
        write!(f, "{median} / {p99} / {longest}")
    }
}

/// The table, row by row.
struct Table {
    rounds: usize,
    /// For how long each of the two is measured in a round.
    time: Duration,
    /// Without an attack, and under attack.
    longest: [Duration; 2],
    skipped: Vec<String>,
}

impl Table {
    fn measure(&mut self, name: &str, start: fn() -> Daemon, attack: Attacker) {
        let (mut quiet, mut attacked) = (Samples::default(), Samples::default());
        for _ in 0..self.rounds {
            let daemon = start();
            let neighbour = Neighbour::new(&daemon);
            let time = self.time;
            let mut bench = Bench { neighbour, time };
            // As most attacks do. It decides which processors the threads run on afterwards, and
            // with that the median.
            daemon.while_stopped(|| ());
            quiet.extend(bench.sample());
            match attack(&daemon, &mut bench) {
                Ok(samples) => attacked.extend(samples),
                Err(reason) => return self.skipped.push(format!("{name}: {reason}")),
            }
        }
        let [trips, trips_then] = [&mut quiet, &mut attacked].map(|s| figures(&mut s.round_trips));
        let [answers, answers_then] = [&mut quiet, &mut attacked].map(|s| figures(&mut s.answers));
        println!("| {name} | {trips} | {trips_then} | {answers} | {answers_then} |");
        let longest =
            [(trips, answers), (trips_then, answers_then)].map(|(a, b)| a.longest.max(b.longest));
        for (so_far, now) in self.longest.iter_mut().zip(longest) {
            *so_far = now.max(*so_far);
        }
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let has = |name| arguments.iter().any(|argument| argument == name);
    let (rounds, time) = match has("--quick") || !has("--bench") {
        true => (1, Duration::from_millis(20)),
        false => (3, Duration::from_millis(600)),
    };
    let mut table = Table {
        rounds,
        time,
        longest: [Duration::ZERO; 2],
        skipped: Vec::new(),
    };
    println!("p50 / p99 / longest, in microseconds\n");
    println!(
        "| attack | round trip, quiet | under attack | control answer, quiet | under attack |"
    );
    println!("|---|---|---|---|---|");
    for (name, attack) in ATTACKS {
        table.measure(name, || Daemon::start(&[]), attack);
    }
    table.measure(
        "descriptors used up by one guest",
        start_with_few_descriptors,
        use_up_descriptors,
    );
    let [quiet, attacked] = table.longest;
    for (name, attack) in REMAINING {
        table.measure(name, || Daemon::start(&[]), attack);
    }
    println!(
        "\nlongest of all but the last {}: {quiet:?} quiet, {attacked:?} under attack; the bound is \
         20 ms",
        REMAINING.len()
    );
    for skipped in table.skipped {
        println!("SKIPPED {skipped}");
    }
}
