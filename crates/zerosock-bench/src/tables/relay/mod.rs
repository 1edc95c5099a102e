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

use std::cell::Cell;
use std::rc::Rc;

use zerosock_relay::relay::Way;

use crate::bench::Bench;
use crate::machine;
use crate::namespace;
use crate::report::{Metric, Outcomes};
use crate::tables::device;
use crate::worker::order::{Job, Outcome};
use address::Kind;
use guest::{MB_S, PATHS, Path, Traffic};
use programs::Relay;
use streams::{Case, Figures};

pub(crate) use programs::{COMMAND, install_peers};

const THROUGHPUT: Metric = Metric::higher("throughput", "GB/s");
const DELIVERED: Metric = Metric::higher("datagrams", "1000/s");
const CPU: Metric = Metric::lower("CPU of all", "s/GB");
const P50: Metric = Metric::lower("round trip p50", "us");
const P99: Metric = Metric::lower("round trip p99", "us");
const EACH: Metric = Metric::lower("user memory", "B each");
const MEMORY: Metric = Metric::lower("user memory", "KiB");
const RATE: Metric = Metric::higher("connects and closes", "1/s");
const ANSWER: Metric = Metric::lower("connect to answer p99", "us");
const RELAY_CPU: Metric = Metric::lower("relay CPU", "us each");

const METHOD: &str = "Two programs and a relay between them, which has the receiver's core to itself; \
    the programs share the sender's, unless a placement says otherwise. Every byte is checked. zerosock is `zerosock relay --workers 1` \
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

const fn one_way(from: Kind, to: Kind, size: usize) -> Case {
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
        ..one_way(kind, kind, 64)
    }
}

const STREAMS: [(&str, Case); 7] = [
    ("64 KiB", one_way(Kind::Tcp, Kind::Tcp, 64 << 10)),
    ("64 KiB", one_way(Kind::Unix, Kind::Tcp, 64 << 10)),
    ("64 KiB", one_way(Kind::Tcp, Kind::Unix, 64 << 10)),
    ("64 KiB", one_way(Kind::Unix, Kind::Unix, 64 << 10)),
    ("8 KiB", one_way(Kind::Tcp, Kind::Tcp, 8 << 10)),
    ("1400 B", one_way(Kind::Udp, Kind::Udp, 1400)),
    ("64 B", one_way(Kind::Udp, Kind::Udp, 64)),
];

const TRIPS: [(&str, Case); 3] = [
    ("64 B and back", trip(Kind::Tcp, false)),
    ("64 B and back", trip(Kind::Unix, false)),
    ("64 B and back, two cores", trip(Kind::Tcp, true)),
];
/// The end of a name of [`TRIPS`] that a placement replaces.
const TWO_CORES: &str = ", two cores";

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

/// Most rounds of the cases that measure memory.
const FEW: usize = 3;

/// Measures the table.
pub(crate) fn run(bench: &mut Bench<'_>) {
    METHOD.clone_into(&mut bench.table.method);
    for version in programs::versions() {
        bench.table.method.push_str(&format!(" {version}."));
    }
    namespace::on_thread(|entered| {
        let ready = entered
            .and_then(|()| namespace::set("ipv4/ip_local_port_range", address::CONNECTING_PORTS));
        if let Err(reason) = ready {
            let reason = format!("measured on the machine's own loopback device: {reason}");
            bench.table.note_missing("namespace", &reason);
        }
        all(bench);
    });
}

fn all(bench: &mut Bench<'_>) {
    let settings = bench.settings;
    let name =
        |what: &str, case: &Case| format!("{} to {}, {what}", case.from.name(), case.to.name());
    let mut ways = Vec::new();
    for (size, case) in STREAMS {
        let name = name(size, &case);
        if settings.wants(&name) {
            let way = stream(bench, &name, case);
            ways.extend(way.map(|way| format!("{name}: {way}")));
        }
    }
    for (what, case) in TRIPS {
        // A placement says which cores are shared.
        let what = match bench.table.placement {
            Some(_) if !case.has_own_core => continue,
            Some(_) => what.trim_end_matches(TWO_CORES),
            None => what,
        };
        let name = name(what, &case);
        if settings.wants(&name) {
            round_trip(bench, &name, case);
        }
    }
    many(bench);
    for (name, traffic) in [
        ("guest to TCP, packets of 64 KiB", Traffic::Send),
        ("TCP to guest, writes of 64 KiB", Traffic::Receive),
        ("guest to TCP, 64 B and back", Traffic::Ping),
    ] {
        if settings.wants(name) {
            guest(bench, name, traffic);
        }
    }
    if settings.vm && settings.releases.is_empty() {
        vm::guests(bench);
    }
    if !ways.is_empty() {
        let ways = format!(" zerosock took these ways: {}.", ways.join("; "));
        bench.table.method.push_str(&ways);
    }
}

/// zerosock, and those of the peers that were selected.
fn contestants(bench: &Bench<'_>, suits: impl Fn(Relay) -> bool) -> Vec<(String, Relay)> {
    let peers = PEERS.into_iter().filter(|peer| suits(*peer));
    let relays = std::iter::once(OURS).chain(peers);
    let titled = relays.map(|relay| (relay.title(), relay));
    bench.wanted_with(titled, Relay::Release)
}

fn through(bench: &Bench<'_>, name: &str, case: Case) -> Outcomes<Figures> {
    let relays = contestants(bench, |relay| case.suits(relay));
    bench.measure(name, &relays, |relay| streams::measure(*relay, case, bench))
}

/// Returns the way that zerosock took.
fn stream(bench: &mut Bench<'_>, name: &str, case: Case) -> Option<String> {
    let outcomes = through(bench, name, case);
    let table = &mut bench.table;
    if case.from == Kind::Udp {
        table.add_rows(name, DELIVERED, &outcomes, Figures::thousands);
    } else {
        let gb_s = |figures: &Figures| figures.outcome.gb_s(case.size);
        table.add_rows(name, THROUGHPUT, &outcomes, gb_s);
    }
    table.add_rows(name, CPU, &outcomes, |figures| figures.cpu_s_per_gb);
    outcomes.first(0)?.way.clone()
}

fn round_trip(bench: &mut Bench<'_>, name: &str, case: Case) {
    let outcomes = through(bench, name, case).map(|figures| figures.outcome);
    bench.table.add_rows(name, P50, &outcomes, Outcome::p50_us);
    bench.table.add_rows(name, P99, &outcomes, Outcome::p99_us);
}

/// The cases with many connections.
fn many(bench: &mut Bench<'_>) {
    // Two for each connection, in the relay and in the bench, which has both ends.
    let descriptors = machine::raise_descriptors(3 * IDLE as u64);
    let few = if bench.settings.quick { 50 } else { 1 };
    let most = (descriptors.saturating_sub(RESERVE) / 2).saturating_sub(many::FIRST);
    let count = most.min(IDLE / few);
    let name = format!("{count} idle connections");
    if bench.settings.wants(&name) {
        idle(bench, &name, count);
    }
    let count = SHORT / few as u64;
    let name = format!("after {count} short connections");
    if bench.settings.wants(&name) {
        growth(bench, &name, count);
    }
    let name = "short connections";
    if bench.settings.wants(name) {
        rate(bench, name);
    }
}

fn idle(bench: &mut Bench<'_>, name: &str, count: usize) {
    let mut relays = contestants(bench, |relay| relay == HAPROXY || relay == SOCAT);
    for (title, _) in relays.iter_mut().filter(|(_, relay)| *relay == SOCAT) {
        title.push_str(&format!(", {IDLE_SOCAT} of them"));
    }
    let mut outcomes = bench.measure_at_most(FEW, name, &relays, |relay| {
        let count = if *relay == SOCAT { IDLE_SOCAT } else { count };
        many::idle(*relay, count, bench.cores)
    });
    outcomes.push("the bound", Ok(vec![BOUND]));
    bench.table.add_rows(name, EACH, &outcomes, |bytes| *bytes);
}

fn growth(bench: &mut Bench<'_>, name: &str, count: u64) {
    let relays = contestants(bench, |relay| relay == HAPROXY);
    let outcomes = bench.measure_at_most(FEW, name, &relays, |relay| {
        many::growth(*relay, count, bench.cores)
    });
    let mut after = outcomes.map(|[_, after]| *after);
    // The same relay before them.
    let before = outcomes.map(|[before, _]| *before).0.swap_remove(0).1;
    after.push(format!("zerosock, after {}", count / 100), before);
    bench
        .table
        .add_rows(name, MEMORY, &after, |bytes| bytes / 1024.0);
}

fn rate(bench: &mut Bench<'_>, name: &str) {
    let is_ours = |relay| matches!(relay, Relay::Zerosock(_));
    let relays = contestants(bench, |relay| {
        relay.takes(Kind::Tcp) && (is_ours(relay) || relay == HAPROXY || relay == SOCAT)
    });
    let outcomes = bench.measure(name, &relays, |relay| {
        many::rate(*relay, bench.settings, bench.cores)
    });
    let table = &mut bench.table;
    table.add_rows(name, RATE, &outcomes, |rate| rate.per_second);
    table.add_rows(name, ANSWER, &outcomes, |rate| rate.p99_us);
    table.add_rows(name, RELAY_CPU, &outcomes, |rate| rate.cpu_us);
}

fn guest(bench: &mut Bench<'_>, name: &str, traffic: Traffic) {
    // The length of a stream is not known before the first one.
    let shared = Rc::new(Cell::new(None));
    let paths = PATHS.map(|path| match path {
        Path::Rule(_) => (path.title(), (path, shared.clone())),
        _ => (path.title(), (path, Rc::default())),
    });
    let release = |binary| (Path::Rule(binary), shared.clone());
    let paths = bench.wanted_with(paths, release);
    let outcomes = bench.measure(name, &paths, |(path, length)| {
        let measure = |bytes| guest::measure(*path, traffic, bytes, bench);
        if traffic == Traffic::Ping {
            return measure(None);
        }
        if length.get().is_none() {
            let speed = measure(None)?.mb_s;
            length.set(Some(device::stream_bytes(
                speed,
                guest::SIZE,
                bench.settings,
            )));
        }
        measure(length.get())
    });
    let table = &mut bench.table;
    if traffic == Traffic::Ping {
        table.add_rows(name, P50, &outcomes, |one| one.trips.p50_us());
        table.add_rows(name, P99, &outcomes, |one| one.trips.p99_us());
    } else {
        table.add_rows(name, MB_S, &outcomes, |one| one.mb_s);
    }
}
