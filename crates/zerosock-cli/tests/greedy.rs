//! Guests that exhaust what `zerosock serve` offers: one opens connections without end, one never
//! reads.
//!
//! # Invariants
//! - The resident memory of the process stays bounded.
//! - Another guest's connections make progress in every round.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::driver::{Driver, DriverConfig, StreamId, StreamState};
use crate::process::{DEADLINE, Running, wait_until, zerosock};
use zerosock::{Address, Cid, Port};

/// Nothing has been taken for so long: nothing will be.
const QUIET: Duration = Duration::from_secs(1);
const MIB: usize = 1 << 20;
/// Directory of the greedy guest's and its sibling's sockets.
const GREEDY: Cid = Cid::new(3);
const SIBLING: Cid = Cid::new(4);
const PORT: Port = Port::new(7);

fn deadline() -> Instant {
    Instant::now() + DEADLINE
}

/// `serve` with three VMs: the greedy one, its sibling, and a neighbour connected to an echo
/// program.
struct Daemon {
    serve: Running,
    dir: tempfile::TempDir,
    neighbour: Driver,
    echo: StreamId,
    program: UnixStream,
}

fn socket(dir: &Path, cid: Cid) -> PathBuf {
    dir.join(format!("vm{}.sock", cid.get()))
}

fn program_at(dir: &Path, cid: Cid, port: Port) -> UnixListener {
    UnixListener::bind(dir.join(format!("vm{}.vsock_{}", cid.get(), port.get()))).unwrap()
}

impl Daemon {
    fn start(options: &[&str]) -> Daemon {
        let dir = tempfile::tempdir().unwrap();
        let neighbour = Cid::new(5);
        let mut command = zerosock();
        let words = [
            "serve",
            "--no-supervisor",
            "--workers",
            "1",
            "--log-level",
            "off",
        ];
        command.args(words);
        command.args(options);
        for cid in [GREEDY, SIBLING, neighbour] {
            let vsock = dir.path().join(format!("vm{}.vsock", cid.get()));
            let vm = format!(
                "guest-cid={},socket={},uds-path={}",
                cid.get(),
                socket(dir.path(), cid).display(),
                vsock.display()
            );
            command.args(["--vm", &vm]);
        }
        let serve = Running::start(&mut command);
        wait_until("the sockets", || socket(dir.path(), neighbour).exists());
        let listener = program_at(dir.path(), neighbour, PORT);
        let mut guest = attach(dir.path(), neighbour);
        let to = Address::new(Cid::HOST, PORT);
        let echo = guest.wait_connect(to, deadline()).unwrap();
        let (program, _) = listener.accept().unwrap();
        program.set_read_timeout(Some(DEADLINE)).unwrap();
        Daemon {
            serve,
            dir,
            neighbour: guest,
            echo,
            program,
        }
    }

    fn attach(&self, cid: Cid) -> Driver {
        attach(self.dir.path(), cid)
    }

    /// The neighbour makes progress: a message in each direction.
    fn neighbour_goes_on(&mut self, round: u8) {
        let message = [round; 300];
        let mut got = [0; 300];
        self.neighbour
            .wait_send(self.echo, &message, deadline())
            .unwrap();
        self.program.read_exact(&mut got).unwrap();
        self.program.write_all(&got).unwrap();
        self.neighbour
            .wait_recv_exact(self.echo, &mut got, deadline())
            .unwrap();
        assert_eq!(got, message);
    }

    /// Resident memory of `serve` itself, bytes, without the guests' mapped memory.
    fn resident(&self) -> usize {
        let path = format!("/proc/{}/status", self.serve.child.id());
        let status = std::fs::read_to_string(path).unwrap();
        let own = status
            .lines()
            .find_map(|line| line.strip_prefix("RssAnon:"));
        let kib = own.and_then(|own| own.split_whitespace().next());
        kib.unwrap().parse::<usize>().unwrap() << 10
    }
}

fn attach(dir: &Path, cid: Cid) -> Driver {
    let mut driver = None;
    wait_until("a guest", || {
        driver = Driver::attach(DriverConfig::new(socket(dir, cid))).ok();
        driver.is_some()
    });
    driver.unwrap()
}

/// The greedy guest requests connections without end: to a port without a listener, to a program
/// that does not accept, and to a sibling that does not answer. It keeps all pending ones, and
/// reads answers rarely or never.
#[test]
fn a_guest_that_opens_connections_without_end_costs_bounded_memory() {
    let mut daemon = Daemon::start(&["--max-connections", "500"]);
    let _deaf_program = program_at(daemon.dir.path(), GREEDY, Port::new(8));
    let mut sibling = daemon.attach(SIBLING);
    sibling.listen(PORT, 10_000).unwrap();
    sibling.withhold_buffers(true).unwrap();
    let mut config = DriverConfig::new(socket(daemon.dir.path(), GREEDY));
    config.max_connections = 1 << 20;
    let mut guest = Driver::attach(config).unwrap();
    let unused = Address::new(Cid::HOST, Port::new(9));
    let undecided = [
        Address::new(Cid::HOST, Port::new(8)),
        Address::new(SIBLING, PORT),
    ];
    let mut asked = 0u64;
    let mut kept: Vec<StreamId> = Vec::new();
    let mut ask = |guest: &mut Driver| {
        let lost: Vec<StreamId> = (0..100).map(|_| guest.connect(unused).unwrap()).collect();
        for n in 0..200 {
            kept.push(guest.connect(undecided[n % 2]).unwrap());
        }
        guest.drive().unwrap();
        // From other ports the next time.
        for stream in lost {
            guest.abort(stream);
        }
        guest.drive().unwrap();
        asked += 300;
    };
    guest.withhold_buffers(true).unwrap();
    for round in 0..20 {
        ask(&mut guest);
        daemon.neighbour_goes_on(round);
    }
    let before = daemon.resident();
    let first = guest.endpoint_stats().packets_sent;
    for round in 0..400u32 {
        ask(&mut guest);
        sibling.drive().unwrap();
        daemon.neighbour_goes_on(round as u8);
        if round < 200 {
            // It reads the answers, so that it can send more requests.
            guest.withhold_buffers(false).unwrap();
            for _ in 0..4 {
                guest.drive().unwrap();
                daemon.neighbour_goes_on(round as u8);
            }
            guest.withhold_buffers(true).unwrap();
        }
    }
    let grown = daemon.resident().saturating_sub(before);
    let came = guest.endpoint_stats().packets_sent - first;
    println!("{grown} bytes for {asked} requests, {came} packets");
    assert!(came > 5000, "{came}: nothing to be bounded");
    assert!(grown < MIB / 2, "{grown} bytes for {asked} requests");
    // The guest is served again once it behaves.
    for stream in kept {
        guest.abort(stream);
    }
    for guest in [&mut guest, &mut sibling] {
        guest.withhold_buffers(false).unwrap();
    }
    let listener = program_at(daemon.dir.path(), GREEDY, Port::new(10));
    let to = Address::new(Cid::HOST, Port::new(10));
    let give_up = deadline();
    while guest.wait_connect(to, deadline()).is_err() {
        sibling.drive().unwrap();
        assert!(Instant::now() < give_up, "never served again");
    }
    listener.accept().unwrap();
}

/// The sibling sends to it on very many connections, and host programs on others: it has granted
/// credit for everything, and reads nothing.
#[test]
fn a_guest_that_never_reads_costs_bounded_memory() {
    const CONNECTIONS: usize = 500;
    /// Limit of a device's copies, bytes.
    const KEPT: usize = 64 * MIB;
    let mut daemon = Daemon::start(&[]);
    let mut guest = daemon.attach(GREEDY);
    guest.listen(PORT, 64).unwrap();
    let mut sibling = daemon.attach(SIBLING);
    let mut streams = Vec::new();
    let mut programs = Vec::new();
    for n in 0..CONNECTIONS {
        if n < 50 {
            let path = daemon.dir.path().join(format!("vm{}.vsock", GREEDY.get()));
            let mut program = UnixStream::connect(path).unwrap();
            writeln!(program, "CONNECT {}", PORT.get()).unwrap();
            guest.wait_accept(PORT, deadline()).unwrap();
            program.set_nonblocking(true).unwrap();
            programs.push(program);
        }
        let stream = sibling.connect(Address::new(GREEDY, PORT)).unwrap();
        sibling.drive().unwrap();
        guest.wait_accept(PORT, deadline()).unwrap();
        let give_up = deadline();
        while sibling.state(stream) != Some(StreamState::Connected) {
            sibling.drive().unwrap();
            assert!(Instant::now() < give_up, "not connected");
        }
        streams.push(stream);
    }
    guest.withhold_buffers(true).unwrap();
    daemon.neighbour_goes_on(0);
    let before = daemon.resident();
    let part = vec![7; 64 << 10];
    let (mut sent, mut most, mut moved_at) = (0, 0, Instant::now());
    let give_up = Instant::now() + 3 * DEADLINE;
    let mut round = 0u8;
    // Until nothing is taken for much longer than chains are held in place (20 ms), and more was taken than is
    // kept: a daemon on a busy machine may have no time for as long.
    while moved_at.elapsed() < QUIET || sent <= KEPT {
        let mut moved = 0;
        for &stream in &streams {
            moved += sibling.send(stream, &part).unwrap_or(0);
        }
        sibling.drive().unwrap();
        for program in &mut programs {
            moved += program.write(&part).unwrap_or(0);
        }
        sent += moved;
        most = most.max(daemon.resident());
        if moved > 0 {
            moved_at = Instant::now();
        }
        round = round.wrapping_add(1);
        daemon.neighbour_goes_on(round);
        assert!(Instant::now() < give_up, "{sent} bytes taken, and no end");
    }
    let grown = most.saturating_sub(before);
    let states = streams.iter().map(|&stream| sibling.state(stream));
    let reset = states.filter(|state| *state == Some(StreamState::Reset));
    let reset = reset.count();
    println!("{sent} bytes sent, {grown} grown, {reset} of {CONNECTIONS} reset");
    assert!(sent > KEPT, "{sent}: nothing to be bounded");
    assert!(reset > 0, "somebody pays for what is beyond");
    assert!(grown < KEPT + 24 * MIB, "{grown} bytes");
}
