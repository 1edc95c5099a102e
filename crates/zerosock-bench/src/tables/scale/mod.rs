//! Very many connections: memory of one at rest, memory left after closing, rate of connecting, and
//! effect of busy connections on the others.

mod many;
mod rates;

use crate::bench::Bench;
use crate::report::Metric;
use crate::tables::device::program::{self, Device};
use crate::tables::device::traffic;
use crate::worker::order::Outcome;

const MEMORY: Metric = Metric::lower("resident memory", "B each");
const LATENCY: Metric = Metric::lower("round trip p99", "us");
const RATE: Metric = Metric::higher("connects and closes", "1/s");
const CPU: Metric = Metric::lower("device CPU", "us each");
const TRIP: Metric = Metric::lower("round trip p50", "us");

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

/// Most rounds of the cases with very many connections.
const FEW: usize = 3;

/// Measures the table.
pub(crate) fn run(bench: &mut Bench<'_>) {
    METHOD.clone_into(&mut bench.table.method);
    let descriptors = crate::machine::raise_descriptors(0);
    let is_quick = bench.settings.quick;
    let count = if is_quick { 2_000 } else { MANY };
    let name = format!("{count} connections between two processes");
    if bench.settings.wants(&name) {
        between_processes(bench, &name, count);
    }
    let count = if is_quick { 200 } else { 8_000 };
    let count = count.min(descriptors.saturating_sub(RESERVE));
    let name = format!("{count} connections with a socket each");
    if bench.settings.wants(&name) {
        with_sockets(bench, &name, count);
    }
    for (name, case) in [
        (
            "1000 connections beside one bulk stream",
            beside_bulk as fn(&mut Bench<'_>, &str),
        ),
        ("guest to host", connects),
        ("64 B, --spin-us 50", spinning),
    ] {
        if bench.settings.wants(name) {
            case(bench, name);
        }
    }
}

/// zerosock and the peer, or why the peer is missing.
fn devices() -> [(String, Result<Device, String>); 2] {
    [
        (program::OURS.to_owned(), program::ours()),
        (program::peer_title(), program::peer()),
    ]
}

fn between_processes(bench: &mut Bench<'_>, name: &str, count: usize) {
    let mut left = None;
    let ours = [(program::OURS, ())];
    let mut outcomes = bench.measure_at_most(FEW, name, &ours, |()| {
        let (each, counts) = many::between_processes(count)?;
        left = Some(counts);
        Ok(each)
    });
    if let Some(left) = left {
        let counts = format!(
            " After {count} connections were opened and closed, serve's gauges were {left}; \
             before, all were 0."
        );
        bench.table.method.push_str(&counts);
    }
    outcomes.push("the bound", Ok(vec![BOUND]));
    bench.table.add_rows(name, MEMORY, &outcomes, |each| *each);
}

fn with_sockets(bench: &mut Bench<'_>, name: &str, count: usize) {
    let outcomes = bench.measure_at_most(FEW, name, &devices(), |device| {
        let device = device.as_ref().map_err(Clone::clone)?;
        many::with_sockets(device, count, bench.cores)
    });
    bench.table.add_rows(name, MEMORY, &outcomes, |each| *each);
}

fn beside_bulk(bench: &mut Bench<'_>, name: &str) {
    let contestants = [(program::OURS, true), ("zerosock, alone", false)];
    let outcomes = bench.measure(name, &contestants, |is_beside| {
        rates::ping_pong(&program::ours()?, *is_beside, bench)
    });
    bench.table.add_rows(name, LATENCY, &outcomes, |p99| *p99);
}

fn connects(bench: &mut Bench<'_>, name: &str) {
    let mut contestants = Vec::from(devices().map(|(title, device)| (title, Some(device))));
    contestants.push((BARE.to_owned(), None));
    let outcomes = bench.measure(name, &contestants, |device| match device {
        Some(device) => {
            let device = device.as_ref().map_err(Clone::clone)?;
            rates::connects(device, bench)
        }
        None => rates::bare_connects(bench),
    });
    bench
        .table
        .add_rows(name, RATE, &outcomes, |(rate, _)| *rate);
    bench.table.add_rows(name, CPU, &outcomes, |(_, cpu)| *cpu);
}

fn spinning(bench: &mut Bench<'_>, name: &str) {
    let contestants = [
        (program::OURS, program::ours_with(SPINNING)),
        ("zerosock, --spin-us 0", program::ours()),
    ];
    let (warm, time) = (bench.settings.warm, bench.settings.time);
    let outcomes = bench.measure(name, &contestants, |device| {
        let device = device.as_ref().map_err(Clone::clone)?;
        traffic::round_trips(device, warm, time, bench.cores)
    });
    bench.table.add_rows(name, TRIP, &outcomes, Outcome::p50_us);
}
