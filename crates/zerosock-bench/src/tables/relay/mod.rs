//! Relays between kernel sockets: `zerosock relay` in each of its ways, socat and HAProxy, and
//! guests' ports that lead to TCP. With `--vm`, relays inside a guest too.
//!
//! Each measurement starts its relay afresh. Everything happens on the loopback device of a network
//! namespace of the bench, where it may have one.

mod address;
mod guest;
mod load;
mod many;
mod programs;
mod running;
mod streams;
mod vm;

use std::thread;

use crate::args::Settings;
use crate::machine;
use crate::namespace;
use crate::pair::Cores;
use crate::report::{Metric, Table};
use crate::rounds::alternate;
use crate::tables::device;
use crate::worker::order::Job;
use address::Kind;
use guest::{Measured, PATHS, Traffic};
use programs::{Relay, Way};
use streams::{Case, Figures};

pub(crate) use programs::{COMMAND, install_peers};

const THROUGHPUT: Metric = Metric {
    name: "throughput",
    unit: "GB/s",
    higher_is_better: true,
};
const DELIVERED: Metric = Metric {
    name: "datagrams",
    unit: "1000/s",
    higher_is_better: true,
};
const CPU: Metric = Metric {
    name: "CPU of all",
    unit: "s/GB",
    higher_is_better: false,
};
const P50: Metric = Metric {
    name: "round trip p50",
    unit: "us",
    higher_is_better: false,
};
const P99: Metric = Metric {
    name: "round trip p99",
    unit: "us",
    higher_is_better: false,
};
const EACH: Metric = Metric {
    name: "user memory",
    unit: "B each",
    higher_is_better: false,
};
const MEMORY: Metric = Metric {
    name: "user memory",
    unit: "KiB",
    higher_is_better: false,
};
const RATE: Metric = Metric {
    name: "connects and closes",
    unit: "1/s",
    higher_is_better: true,
};
const ANSWER: Metric = Metric {
    name: "connect to answer p99",
    unit: "us",
    higher_is_better: false,
};
const RELAY_CPU: Metric = Metric {
    name: "relay CPU",
    unit: "us each",
    higher_is_better: false,
};
const MB_S: Metric = Metric {
    name: "throughput",
    unit: "MB/s",
    higher_is_better: true,
};

const METHOD: &str = "Two programs and a relay between them, which has the receiver's core to itself; \
    the programs share the sender's. Every byte is checked. zerosock is `zerosock relay --workers 1` \
    with `--way auto`; its other ways are peers. HAProxy has one thread, mode tcp. CPU is that of the \
    two programs, the relay with its children, and the kernel's threads for sockets, for 10^9 bytes \
    received. UDP has at most 64 datagrams in flight; those lost do not count. Round trips are of 64 \
    bytes, and all on one core where the row does not say two: between cores of a virtual machine a \
    round trip is mostly the time to wake them. Idle connections: growth of the relay's anonymous memory for each, after a message each \
    way. Short connections: 64 at a time connect, exchange a message and close. Guest: our driver; \
    the device, and a relay behind its Unix socket, have the receiver's core. Everything is on the \
    loopback device of a network namespace, with Reno as congestion control.";

/// zerosock as it decides by itself: the first contestant of every case.
const OURS: Relay = Relay::Zerosock(Way::Auto);
/// The peers, as far as they suit a case.
const PEERS: [Relay; 8] = [
    Relay::Socat(8192),
    Relay::Socat(262_144),
    Relay::Haproxy { splice: false },
    Relay::Haproxy { splice: true },
    Relay::Zerosock(Way::Splice),
    Relay::Zerosock(Way::Copy),
    Relay::Zerosock(Way::Sockmap),
    Relay::Direct,
];

const fn stream(from: Kind, to: Kind, size: usize) -> Case {
    Case {
        from,
        to,
        timed: Job::Receive,
        size,
        has_own_core: true,
    }
}

/// Round trips on one core or two.
const fn trip(kind: Kind, has_own_core: bool) -> Case {
    Case {
        timed: Job::Ping,
        has_own_core,
        ..stream(kind, kind, 64)
    }
}

const STREAMS: [(&str, Case); 7] = [
    ("64 KiB", stream(Kind::Tcp, Kind::Tcp, 64 << 10)),
    ("64 KiB", stream(Kind::Unix, Kind::Tcp, 64 << 10)),
    ("64 KiB", stream(Kind::Tcp, Kind::Unix, 64 << 10)),
    ("64 KiB", stream(Kind::Unix, Kind::Unix, 64 << 10)),
    ("8 KiB", stream(Kind::Tcp, Kind::Tcp, 8 << 10)),
    ("1400 B", stream(Kind::Udp, Kind::Udp, 1400)),
    ("64 B", stream(Kind::Udp, Kind::Udp, 64)),
];

const TRIPS: [(&str, Case); 3] = [
    ("64 B and back", trip(Kind::Tcp, false)),
    ("64 B and back", trip(Kind::Unix, false)),
    ("64 B and back, two cores", trip(Kind::Tcp, true)),
];

/// The peers of the cases with many connections.
const HAPROXY: Relay = Relay::Haproxy { splice: false };
const SOCAT: Relay = Relay::Socat(8192);

/// Idle connections, and short ones.
const IDLE: usize = 10_000;
const SHORT: u64 = 100_000;
/// Idle connections through socat, which has a process for each.
const IDLE_SOCAT: usize = 100;
/// Descriptors that the bench and a relay have beside those of connections.
const RESERVE: usize = 200;
/// Design limit for an idle connection, bytes.
const BOUND: f64 = 2048.0;

struct Bench<'s> {
    settings: &'s Settings,
    cores: Cores,
    /// The ways that `auto` took.
    ways: Vec<String>,
    table: Table,
}

/// Measures the table.
pub(crate) fn run(settings: &Settings, cores: Cores, machine: &str) -> Table {
    let mut method = METHOD.to_owned();
    for version in programs::versions() {
        method.push_str(&format!(" {version}."));
    }
    let mut bench = Bench {
        settings,
        cores,
        ways: Vec::new(),
        table: Table {
            name: "relay",
            method,
            machine: machine.to_owned(),
            rounds: settings.rounds,
            rows: Vec::new(),
            missing: Vec::new(),
        },
    };
    // A namespace is that of a thread, and of the threads and processes that it starts.
    thread::scope(|scope| {
        let all = scope.spawn(|| {
            let ready = namespace::enter().and_then(|()| {
                namespace::set("ipv4/ip_local_port_range", address::CONNECTING_PORTS)
            });
            if let Err(reason) = ready {
                let reason = format!("measured on the machine's own loopback device: {reason}");
                bench.table.note_missing("namespace", &reason);
            }
            bench.all();
        });
        if all.join().is_err() {
            eprintln!("relay: the measuring thread panicked");
        }
    });
    if !bench.ways.is_empty() {
        let ways = format!(" zerosock took these ways: {}.", bench.ways.join("; "));
        bench.table.method.push_str(&ways);
    }
    bench.table
}

impl Bench<'_> {
    fn all(&mut self) {
        for (size, case) in STREAMS {
            let name = format!("{} to {}, {size}", case.from.name(), case.to.name());
            if self.settings.wants(&name) {
                self.stream(&name, case);
            }
        }
        for (what, case) in TRIPS {
            let name = format!("{} to {}, {what}", case.from.name(), case.to.name());
            if self.settings.wants(&name) {
                self.round_trip(&name, case);
            }
        }
        self.many();
        for (name, traffic) in [
            ("guest to TCP, packets of 64 KiB", Traffic::Send),
            ("TCP to guest, writes of 64 KiB", Traffic::Receive),
            ("guest to TCP, 64 B and back", Traffic::Ping),
        ] {
            if self.settings.wants(name) {
                self.guest(name, traffic);
            }
        }
        if self.settings.vm {
            self.guests();
        }
    }

    /// zerosock, and those of the peers that were selected.
    fn contestants(&self, suits: impl Fn(Relay) -> bool) -> Vec<Relay> {
        let is_wanted = |peer: &Relay| suits(*peer) && self.settings.is_against(&peer.title());
        let peers = PEERS.into_iter().filter(is_wanted);
        std::iter::once(OURS).chain(peers).collect()
    }

    /// Measures all relays in turn.
    fn outcomes<T>(
        &self,
        name: &str,
        rounds: usize,
        relays: &[Relay],
        measure: impl Fn(Relay) -> Result<T, String>,
    ) -> Vec<Result<Vec<T>, String>> {
        alternate(rounds, relays.len(), |round, at| {
            let relay = relays[at];
            progress!("{name}: round {}, {}", round + 1, relay.title());
            measure(relay)
        })
    }

    fn through(
        &self,
        name: &str,
        relays: &[Relay],
        case: Case,
    ) -> Vec<Result<Vec<Figures>, String>> {
        self.outcomes(name, self.settings.rounds, relays, |relay| {
            streams::measure(relay, case, self.settings, self.cores)
        })
    }

    fn stream(&mut self, name: &str, case: Case) {
        let relays = self.contestants(|relay| case.suits(relay));
        let outcomes = self.through(name, &relays, case);
        let ours = outcomes[0].as_ref().ok().and_then(|rounds| rounds.first());
        if let Some(way) = ours.and_then(|figures| figures.way.clone()) {
            self.ways.push(format!("{name}: {way}"));
        }
        let titles = titles(&relays);
        if case.from == Kind::Udp {
            self.rows(name, DELIVERED, &titles, &outcomes, Figures::thousands);
        } else {
            self.rows(name, THROUGHPUT, &titles, &outcomes, |figures| {
                figures.gb_s(&case)
            });
        }
        self.rows(name, CPU, &titles, &outcomes, |figures| {
            figures.cpu_s_per_gb
        });
    }

    fn round_trip(&mut self, name: &str, case: Case) {
        let relays = self.contestants(|relay| case.suits(relay));
        let outcomes = self.through(name, &relays, case);
        let titles = titles(&relays);
        self.rows(name, P50, &titles, &outcomes, Figures::p50_us);
        self.rows(name, P99, &titles, &outcomes, Figures::p99_us);
    }

    /// The cases with many connections.
    fn many(&mut self) {
        // Two for each connection, in the relay and in the bench, which has both ends.
        let descriptors = machine::raise_descriptors(3 * IDLE as u64);
        let few = if self.settings.quick { 50 } else { 1 };
        let most = (descriptors.saturating_sub(RESERVE) / 2).saturating_sub(many::FIRST);
        let idle = most.min(IDLE / few);
        let name = format!("{idle} idle connections");
        if self.settings.wants(&name) {
            self.idle(&name, idle);
        }
        let short = SHORT / few as u64;
        let name = format!("after {short} short connections");
        if self.settings.wants(&name) {
            self.growth(&name, short);
        }
        let name = "short connections";
        if self.settings.wants(name) {
            self.rate(name);
        }
    }

    fn idle(&mut self, name: &str, count: usize) {
        let cores = self.cores;
        let relays = self.contestants(|relay| relay == HAPROXY || relay == SOCAT);
        let rounds = self.settings.rounds.min(3);
        let mut outcomes = self.outcomes(name, rounds, &relays, |relay| {
            let count = if relay == SOCAT { IDLE_SOCAT } else { count };
            many::idle(relay, count, cores)
        });
        let mut titles = titles(&relays);
        for (title, relay) in titles.iter_mut().zip(&relays) {
            if *relay == SOCAT {
                title.push_str(&format!(", {IDLE_SOCAT} of them"));
            }
        }
        titles.push("the bound".to_owned());
        outcomes.push(Ok(vec![BOUND]));
        self.rows(name, EACH, &titles, &outcomes, |bytes| *bytes);
    }

    fn growth(&mut self, name: &str, count: u64) {
        let cores = self.cores;
        let relays = self.contestants(|relay| relay == HAPROXY);
        let rounds = self.settings.rounds.min(3);
        let outcomes = self.outcomes(name, rounds, &relays, |relay| {
            many::growth(relay, count, cores)
        });
        let part = |outcome: &Result<Vec<[f64; 2]>, String>, at: usize| {
            let rounds = outcome.as_ref().map_err(Clone::clone)?;
            Ok(rounds.iter().map(|both| both[at] / 1024.0).collect())
        };
        let mut titles = titles(&relays);
        let mut after: Vec<_> = outcomes.iter().map(|outcome| part(outcome, 1)).collect();
        // The same relay before them.
        titles.push(format!("zerosock, after {}", count / 100));
        after.push(part(&outcomes[0], 0));
        self.rows(name, MEMORY, &titles, &after, |kib| *kib);
    }

    fn rate(&mut self, name: &str) {
        let is_ours = |relay| matches!(relay, Relay::Zerosock(_));
        let relays = self.contestants(|relay| is_ours(relay) || relay == HAPROXY || relay == SOCAT);
        let outcomes = self.outcomes(name, self.settings.rounds, &relays, |relay| {
            many::rate(relay, self.settings, self.cores)
        });
        let titles = titles(&relays);
        self.rows(name, RATE, &titles, &outcomes, |rate| rate.per_second);
        self.rows(name, ANSWER, &titles, &outcomes, |rate| rate.p99_us);
        self.rows(name, RELAY_CPU, &titles, &outcomes, |rate| rate.cpu_us);
    }

    fn guest(&mut self, name: &str, traffic: Traffic) {
        let (settings, cores) = (self.settings, self.cores);
        let paths: Vec<_> = PATHS
            .into_iter()
            .map(|path| (path, path.title()))
            .filter(|(path, title)| *path == PATHS[0] || settings.is_against(title))
            .collect();
        let titles: Vec<String> = paths.iter().map(|(_, title)| title.clone()).collect();
        let mut lengths = vec![None; paths.len()];
        let outcomes = alternate(settings.rounds, paths.len(), |round, at| {
            let (path, title) = &paths[at];
            progress!("{name}: round {}, {title}", round + 1);
            let measure = |bytes| guest::measure(*path, traffic, bytes, settings, cores);
            if traffic == Traffic::Ping {
                return measure(None);
            }
            let bytes = match lengths[at] {
                Some(bytes) => bytes,
                None => {
                    let speed = measure(None)?.mb_s();
                    *lengths[at].insert(device::stream_bytes(speed, guest::SIZE, settings))
                }
            };
            measure(Some(bytes))
        });
        if traffic == Traffic::Ping {
            self.rows(name, P50, &titles, &outcomes, Measured::p50_us);
            self.rows(name, P99, &titles, &outcomes, Measured::p99_us);
        } else {
            self.rows(name, MB_S, &titles, &outcomes, Measured::mb_s);
        }
    }

    /// A row for each contestant but the first, which is zerosock.
    fn rows<T>(
        &mut self,
        name: &str,
        metric: Metric,
        titles: &[String],
        outcomes: &[Result<Vec<T>, String>],
        value: impl Fn(&T) -> f64,
    ) {
        self.table.add_rows(name, metric, titles, outcomes, value);
    }
}

fn titles(relays: &[Relay]) -> Vec<String> {
    relays.iter().map(|relay| relay.title()).collect()
}
