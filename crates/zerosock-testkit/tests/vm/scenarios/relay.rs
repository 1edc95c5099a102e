//! `zerosock relay` in a guest, with the kernel's vsock as one of its ends. A chain of relays leads from
//! this machine through the guest and back, so that both of its ends are here.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::thread;
use std::time::Instant;

use zerosock_cli::vm::hybrid;
use zerosock_testkit::protocol::Command;
use zerosock_testkit::remote::Pending;

use super::sockmap::{has_sockmap_for_vsock, loopback_up};
use crate::lab::{Lab, STEP, deadlines, port, read_exact, read_to_end, write};

/// Connections of [`many`].
const MANY: u64 = 16;

/// A relay in guest a.
struct Relay {
    /// Of its files.
    name: String,
    running: Pending,
}

impl Relay {
    /// Starts it, with `before` in front of the command, and waits until it listens.
    fn start(lab: &Lab, before: &str, ends: [&str; 2], way: &str) -> Relay {
        let name = format!("/tmp/relay-{}", port());
        let [a, b] = ends;
        let running = lab.a.start(shell(&format!(
            "echo $$ > {name}.pid; exec {before} /bin/zerosock relay {a} {b} --way {way} \
             --log-level debug 2> {name}.log"
        )));
        // Nothing else tells that it listens.
        let listening = lab.a.run(shell(&format!(
            "until grep -q ' relaying ' {name}.log; do \
             [ ! -s {name}.pid ] || kill -0 $(cat {name}.pid) || exit 1; usleep 10000; done"
        )));
        let relay = Relay { name, running };
        assert_eq!(listening.bytes, 0, "{a} {b}: {}", relay.log(lab));
        relay
    }

    fn log(&self, lab: &Lab) -> String {
        let log = lab.a.run(shell(&format!("cat {}.log", self.name)));
        log.text.unwrap_or_default()
    }

    /// Waits for the end of so many connections, ends it, and returns its log.
    fn stop(self, lab: &Lab, connections: u64) -> String {
        let name = &self.name;
        let waiting = lab.a.start(shell(&format!(
            "until [ $(grep -c 'connection ended' {name}.log) -ge {connections} ]; do \
             usleep 10000; done"
        )));
        let ended = waiting.wait(STEP);
        assert!(ended.is_ok(), "connections are left: {}", self.log(lab));
        lab.a.run(shell(&format!("kill $(cat {name}.pid)")));
        let log = shell(&format!("cat {name}.log"));
        let done = self.running.wait(STEP).expect("the end of the relay");
        let log = lab.a.run(log).text.unwrap_or_default();
        assert_eq!(done.bytes, 0, "{log}");
        let ended = log.matches("connection ended").count() as u64;
        assert_eq!(ended, connections, "{log}");
        log
    }
}

/// A line for the guest's shell.
fn shell(line: &str) -> Command {
    Command::Run {
        argv: ["/bin/busybox", "sh", "-c", line]
            .map(str::to_owned)
            .to_vec(),
    }
}

/// Relays one after the other; connections enter and leave on this machine.
struct Chain {
    relays: Vec<Relay>,
    entry: u32,
    exit: UnixListener,
    connections: u64,
}

impl Chain {
    /// By each kind of end, over virtio and over the loopback CID: vsock to `between`, which leads to
    /// vsock, which leads to vsock, which leads to `last`, which leads to vsock.
    fn start(lab: &Lab, way: &str, [between, last]: [&str; 2]) -> Chain {
        let (entry, joint, middle, exit) = (port(), port(), port(), port());
        let socket = |kind: &str| match kind {
            "tcp" => format!("127.0.0.1:{}", port()),
            _ => format!("/tmp/relay-{}.sock", port()),
        };
        let (here, there) = (socket(between), socket(last));
        let listener = lab.a.host_listener(exit);
        let ends = [
            [format!("{last}-listen:{there}"), format!("vsock:2:{exit}")],
            [format!("vsock-listen:{middle}"), format!("{last}:{there}")],
            [format!("vsock-listen:{joint}"), format!("vsock:1:{middle}")],
            [
                format!("{between}-listen:{here}"),
                format!("vsock:1:{joint}"),
            ],
            [format!("vsock-listen:{entry}"), format!("{between}:{here}")],
        ];
        let relays = ends
            .each_ref()
            .map(|[a, b]| Relay::start(lab, "", [a, b], way));
        Chain {
            relays: relays.into(),
            entry,
            exit: listener,
            connections: 0,
        }
    }

    /// The two ends of a new connection.
    fn connect(&mut self, lab: &Lab) -> [UnixStream; 2] {
        self.connections += 1;
        let near = lab.a.connect(self.entry).expect("connected to the relay");
        let far = hybrid::accept(&self.exit, STEP).expect("the last relay connects");
        deadlines(&far);
        [near, far]
    }

    /// Ends the relays, which have to have nothing left; their logs, the first one's first.
    fn stop(self, lab: &Lab) -> Vec<String> {
        let connections = self.connections;
        let logs = self.relays.into_iter().rev();
        logs.map(|relay| relay.stop(lab, connections)).collect()
    }
}

/// Sends both ways at once.
fn exchange(one: &UnixStream, other: &UnixStream, seed: u64, len: u64) {
    thread::scope(|scope| {
        let forth = scope.spawn(|| write(one, seed, len, &[65536, 1000]));
        let back = scope.spawn(|| write(other, seed + 1, len, &[65536]));
        let arrived = scope.spawn(|| read_exact(one, len));
        assert_eq!(read_exact(other, len), forth.join().expect("written"));
        let arrived = arrived.join().expect("read");
        assert_eq!(arrived, back.join().expect("written"));
    });
}

/// The first end stops sending; the other one answers after that.
fn half_close([one, other]: [&UnixStream; 2], seed: u64) {
    const LEN: u64 = 300_000;
    let question = thread::scope(|scope| {
        let asking = scope.spawn(|| {
            let digest = write(one, seed, LEN, &[65536]);
            one.shutdown(Shutdown::Write).expect("shut down");
            digest
        });
        let (arrived, bytes) = read_to_end(other);
        assert_eq!(bytes, LEN);
        assert_eq!(arrived, asking.join().expect("written"));
        arrived
    });
    let answer = thread::scope(|scope| {
        let answering = scope.spawn(|| {
            let digest = write(other, seed + 1, LEN, &[65536]);
            other.shutdown(Shutdown::Write).expect("shut down");
            digest
        });
        let (arrived, bytes) = read_to_end(one);
        assert_eq!(bytes, LEN);
        assert_eq!(arrived, answering.join().expect("written"));
        arrived
    });
    assert_ne!(question, answer);
}

/// The first end vanishes while the other one sends: that one's writes fail.
fn vanish(one: UnixStream, mut other: UnixStream) {
    let mut one = one;
    other.write_all(&[1; 65536]).expect("sent");
    one.read_exact(&mut [0; 1]).expect("a byte of many");
    drop(one);
    // Buffers on the way take some writes, and no more than that once nothing reads.
    let begun = Instant::now();
    let error = loop {
        if let Err(error) = other.write_all(&[1; 65536]) {
            break error;
        }
        assert!(begun.elapsed() < STEP, "written for longer than {STEP:?}");
    };
    // A time-out is WouldBlock.
    let kind = error.kind();
    use std::io::ErrorKind::{BrokenPipe, ConnectionReset};
    assert!(matches!(kind, BrokenPipe | ConnectionReset), "{error}");
}

/// The first end sends and closes at once: the other one gets everything.
fn close_at_once(one: UnixStream, other: &UnixStream) {
    const LEN: u64 = 200_000;
    let digest = thread::scope(|scope| {
        let reading = scope.spawn(|| read_to_end(other));
        let digest = write(&one, 40, LEN, &[65536]);
        drop(one);
        assert_eq!(reading.join().expect("read"), (digest.clone(), LEN));
        digest
    });
    assert!(!digest.is_empty());
}

fn many(lab: &Lab, chain: &mut Chain) {
    let open: Vec<_> = (0..MANY).map(|_| chain.connect(lab)).collect();
    thread::scope(|scope| {
        for (n, [near, far]) in (0..).zip(&open) {
            scope.spawn(move || exchange(near, far, 1000 + 2 * n, 64 << 10));
        }
    });
}

/// Everything, through one chain.
fn everything(lab: &Lab, way: &str, kinds: [&str; 2]) -> Vec<String> {
    loopback_up(lab);
    let mut chain = Chain::start(lab, way, kinds);
    let [near, far] = chain.connect(lab);
    exchange(&near, &far, 10, 1 << 20);
    half_close([&near, &far], 20);
    let [near, far] = chain.connect(lab);
    half_close([&far, &near], 30);
    drop((near, far));
    let [near, far] = chain.connect(lab);
    vanish(near, far);
    let [near, far] = chain.connect(lab);
    vanish(far, near);
    let [near, far] = chain.connect(lab);
    close_at_once(near, &far);
    drop(far);
    let [near, far] = chain.connect(lab);
    close_at_once(far, &near);
    drop(near);
    many(lab, &mut chain);
    chain.stop(lab)
}

/// The way in each line of a log.
fn ways(log: &str) -> Vec<&str> {
    let ended = log.lines().filter(|line| line.contains("connection ended"));
    ended
        .map(|line| {
            line.split_whitespace()
                .find_map(|word| word.strip_prefix("way="))
                .unwrap_or_else(|| panic!("no way: {line}"))
        })
        .collect()
}

/// The sum of all numbers with this name.
fn numbers(log: &str, name: &str) -> u64 {
    let words = log.split_whitespace();
    let numbers = words.filter_map(|word| word.strip_prefix(name));
    numbers
        .map(|text| text.parse::<u64>().expect("a number"))
        .sum()
}

fn copies(lab: &Lab, way: &str, kinds: [&str; 2]) {
    for log in everything(lab, way, kinds) {
        // No end of vsock can be spliced without a copy.
        assert!(ways(&log).iter().all(|way| *way == "copy"), "{log}");
    }
}

pub(crate) fn auto(lab: &Lab) {
    copies(lab, "auto", ["tcp", "unix"]);
}

pub(crate) fn copy(lab: &Lab) {
    copies(lab, "copy", ["unix", "tcp"]);
}

pub(crate) fn splice(lab: &Lab) {
    copies(lab, "splice", ["tcp", "unix"]);
}

/// The kernel redirects from vsock to TCP. From vsock to vsock, with Unix sockets, and on kernels before
/// 6.4, the relay says why not, and copies.
pub(crate) fn sockmap(lab: &Lab) {
    let expected = match has_sockmap_for_vsock(lab) {
        true => "sockmap",
        false => "copy",
    };
    for (kinds, tcp) in [(["tcp", "unix"], 0..2), (["unix", "tcp"], 3..5)] {
        for (n, log) in everything(lab, "sockmap", kinds).into_iter().enumerate() {
            let (wanted, said) = match tcp.contains(&n) {
                true if expected == "sockmap" => ("sockmap", "joined=22"),
                true => ("copy", ": such connections move as with --way auto"),
                false => ("copy", "or vsock and TCP: auto is used"),
            };
            assert!(ways(&log).iter().all(|way| *way == wanted), "{log}");
            assert_eq!(log.matches(said).count(), 1, "{said}: {log}");
            if wanted == "sockmap" {
                let redirected = numbers(&log, "redirected=");
                assert!(redirected > 0, "all bytes passed by hand: {log}");
                println!(
                    "relay {n}: {redirected} bytes redirected, {} by hand",
                    numbers(&log, "by_hand=")
                );
            }
        }
    }
}

/// Without capabilities the relay names them, and copies.
pub(crate) fn sockmap_unprivileged(lab: &Lab) {
    loopback_up(lab);
    let (entry, exit) = (port(), port());
    let tcp = format!("127.0.0.1:{}", port());
    let listener = lab.a.host_listener(exit);
    let nobody = "/bin/zerosock test-guest unprivileged --";
    let ends = [format!("tcp-listen:{tcp}"), format!("vsock:2:{exit}")];
    let second = Relay::start(lab, "", ends.each_ref().map(String::as_str), "auto");
    let ends = [format!("vsock-listen:{entry}"), format!("tcp:{tcp}")];
    let ends = ends.each_ref().map(String::as_str);
    let first = Relay::start(lab, nobody, ends, "sockmap");
    let mut chain = Chain {
        relays: vec![second, first],
        entry,
        exit: listener,
        connections: 0,
    };
    let [near, far] = chain.connect(lab);
    exchange(&near, &far, 50, 100_000);
    half_close([&near, &far], 60);
    let logs = chain.stop(lab);
    assert!(logs[0].contains("CAP_BPF"), "{}", logs[0]);
    assert!(logs[0].contains("auto is used"), "{}", logs[0]);
    assert_eq!(ways(&logs[0]), ["copy"]);
}
