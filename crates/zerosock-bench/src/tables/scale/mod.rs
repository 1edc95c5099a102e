//! Very many connections: memory of one at rest, memory left after closing, rate of connecting, and
//! effect of busy connections on the others.

mod many;
mod rates;

use crate::args::Settings;
use crate::pair::Cores;
use crate::report::{Metric, Row, Table};
use crate::rounds::{Spread, alternate};
use crate::tables::device::program::{self, Device};
use crate::tables::device::traffic;

const MEMORY: Metric = Metric {
    name: "resident memory",
    unit: "B each",
    higher_is_better: false,
};
const LATENCY: Metric = Metric {
    name: "round trip p99",
    unit: "us",
    higher_is_better: false,
};
const RATE: Metric = Metric {
    name: "connects and closes",
    unit: "1/s",
    higher_is_better: true,
};
const CPU: Metric = Metric {
    name: "device CPU",
    unit: "us each",
    higher_is_better: false,
};
const TRIP: Metric = Metric {
    name: "round trip p50",
    unit: "us",
    higher_is_better: false,
};

const METHOD: &str = "Memory: growth of the device's process per connection, after each connection has \
    carried a byte each way. Between two attached processes, both halves of a connection are in serve, \
    without a socket or descriptor; the peer is the bound of 1 KiB. With a host socket for each \
    connection, zerosock's driver takes the place of the guest, for the peer's device too. Round trips: \
    1000 connections from the guest to an echo server, each with one message of 64 bytes in flight, \
    beside a connection that sends as fast as it can; the peer's figure is without that connection. \
    Connects: the guest connects to a program and closes, 64 at a time. The bare Unix socket is a \
    process without a guest that connects to the program and closes, 64 at a time. Spinning: round \
    trips of one connection with serve --spin-us 50; the peer's figure is without spinning.";

/// Connections between two processes.
const MANY: usize = 100_000;
/// Descriptors reserved for other uses than connections.
const RESERVE: usize = 300;
/// Design limit for a connection at rest, bytes.
const BOUND: f64 = 1024.0;
/// The kernel's share of a connect to a program.
const BARE: &str = "bare Unix socket";
const SPINNING: &[&str] = &["serve", "--log-level", "off", "--spin-us", "50"];

struct Bench<'s> {
    settings: &'s Settings,
    cores: Cores,
    table: Table,
}

/// Measures the table.
pub(crate) fn run(settings: &Settings, cores: Cores, machine: &str) -> Table {
    let descriptors = crate::machine::raise_descriptors(0);
    let mut bench = Bench {
        settings,
        cores,
        table: Table {
            name: "scale",
            method: METHOD.to_owned(),
            machine: machine.to_owned(),
            rounds: settings.rounds,
            rows: Vec::new(),
            missing: Vec::new(),
        },
    };
    let count = if settings.quick { 2_000 } else { MANY };
    let name = format!("{count} connections between two processes");
    if settings.wants(&name) {
        bench.between_processes(&name, count);
    }
    let count = if settings.quick { 200 } else { 8_000 };
    let count = count.min(descriptors.saturating_sub(RESERVE));
    let name = format!("{count} connections with a socket each");
    if settings.wants(&name) {
        bench.with_sockets(&name, count);
    }
    let name = "1000 connections beside one bulk stream";
    if settings.wants(name) {
        bench.beside_bulk(name);
    }
    let name = "guest to host";
    if settings.wants(name) {
        bench.connects(name);
    }
    let name = "64 B, --spin-us 50";
    if settings.wants(name) {
        bench.spinning(name);
    }
    bench.table
}

impl Bench<'_> {
    fn between_processes(&mut self, name: &str, count: usize) {
        let mut left = None;
        let outcomes = alternate(self.settings.rounds.min(3), 1, |round, _| {
            progress!("{name}: round {}", round + 1);
            let (each, counts) = many::between_processes(count)?;
            left = Some(counts);
            Ok(each)
        });
        if let Some(left) = left {
            let counts = format!(
                " After {count} connections were opened and closed, serve's gauges were {left}; \
                 before, all were 0."
            );
            self.table.method.push_str(&counts);
        }
        let bound = Ok(vec![BOUND]);
        self.row(name, MEMORY, "the bound", [&outcomes[0], &bound]);
    }

    fn with_sockets(&mut self, name: &str, count: usize) {
        let (devices, peer) = devices();
        let outcomes = alternate(self.settings.rounds.min(3), 2, |round, contestant| {
            let device = devices[contestant].as_ref().map_err(Clone::clone)?;
            progress!(
                "{name}: round {}, {}",
                round + 1,
                [program::OURS, &peer][contestant]
            );
            many::with_sockets(device, count, self.cores)
        });
        self.row(name, MEMORY, &peer, [&outcomes[0], &outcomes[1]]);
    }

    fn beside_bulk(&mut self, name: &str) {
        let outcomes = alternate(self.settings.rounds, 2, |round, contestant| {
            let beside = contestant == 0;
            let how = if beside { "beside it" } else { "alone" };
            progress!("{name}: round {}, {how}", round + 1);
            rates::ping_pong(&program::ours()?, beside, self.settings, self.cores)
        });
        self.row(
            name,
            LATENCY,
            "zerosock, alone",
            [&outcomes[0], &outcomes[1]],
        );
    }

    fn connects(&mut self, name: &str) {
        let (devices, peer) = devices();
        let outcomes = alternate(self.settings.rounds, 3, |round, contestant| {
            progress!(
                "{name}: round {}, {}",
                round + 1,
                [program::OURS, &peer, BARE][contestant]
            );
            match devices.get(contestant) {
                Some(device) => {
                    let device = device.as_ref().map_err(Clone::clone)?;
                    rates::connects(device, self.settings, self.cores)
                }
                None => rates::bare_connects(self.settings, self.cores),
            }
        });
        let part = |of: fn(&(f64, f64)) -> f64| {
            let outcome = |contestant: usize| -> Result<Vec<f64>, String> {
                let rounds = outcomes[contestant].as_ref().map_err(Clone::clone)?;
                Ok(rounds.iter().map(of).collect())
            };
            [outcome(0), outcome(1), outcome(2)]
        };
        let [ours, theirs, bare] = part(|outcome| outcome.0);
        self.row(name, RATE, &peer, [&ours, &theirs]);
        self.row(name, RATE, BARE, [&ours, &bare]);
        let [ours, theirs, bare] = part(|outcome| outcome.1);
        self.row(name, CPU, &peer, [&ours, &theirs]);
        self.row(name, CPU, BARE, [&ours, &bare]);
    }

    fn spinning(&mut self, name: &str) {
        let outcomes = alternate(self.settings.rounds, 2, |round, contestant| {
            let device = match contestant {
                0 => program::ours_with(SPINNING)?,
                _ => program::ours()?,
            };
            let how = ["spinning", "asleep"][contestant];
            progress!("{name}: round {}, {how}", round + 1);
            let (warm, time) = (self.settings.warm, self.settings.time);
            let outcome = traffic::round_trips(&device, warm, time, self.cores)?;
            let p50 = outcome.p50.ok_or("no round trip")?;
            Ok(p50 as f64 / 1e3)
        });
        self.row(
            name,
            TRIP,
            "zerosock, --spin-us 0",
            [&outcomes[0], &outcomes[1]],
        );
    }

    fn row(
        &mut self,
        name: &str,
        metric: Metric,
        peer: &str,
        outcomes: [&Result<Vec<f64>, String>; 2],
    ) {
        let [ours, theirs] = outcomes.map(|outcome| -> Result<Spread, String> {
            let rounds = outcome.as_ref().map_err(Clone::clone)?.clone();
            Spread::of(rounds, metric.higher_is_better).ok_or_else(|| "no rounds".to_owned())
        });
        for (title, figure) in [(program::OURS, &ours), (peer, &theirs)] {
            if let Err(reason) = figure {
                self.table.note_missing(title, reason);
            }
        }
        self.table.rows.push(Row {
            name: name.to_owned(),
            metric,
            ours,
            peer_name: peer.to_owned(),
            peer: theirs,
        });
    }
}

/// zerosock and the peer, or why the peer is missing, and its name.
fn devices() -> ([Result<Device, String>; 2], String) {
    ([program::ours(), program::peer()], program::peer_title())
}
