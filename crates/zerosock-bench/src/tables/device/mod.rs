//! The device without a virtual machine: `zerosock serve` and vhost-device-vsock in turn.
//!
//! zerosock's driver takes the place of the guest of both devices, and the host program uses the
//! same Unix socket, so both devices do the same work. Each measurement starts a new device. The
//! upper limit is the same writes over a Unix socket without a device, between the same two cores.

pub(crate) mod program;
pub(crate) mod traffic;
mod user_mode;

use std::cell::Cell;
use std::rc::Rc;

use crate::args::Settings;
use crate::bench::Bench;
use crate::binary::Binary;
use crate::pair::{self, Task};
use crate::peers::{Contestant, unix};
use crate::report::{Metric, Outcomes};
use crate::worker::order::{Job, Outcome, Wait};
use program::{Device, OURS};
use traffic::{Case, Direction, Figures, TRIP};

pub(crate) use program::install_peer;

const THROUGHPUT: Metric = Metric::higher("throughput", "MB/s");
const CPU: Metric = Metric::lower("device CPU", "s/GB");
const P50: Metric = Metric::lower("round trip p50", "us");
const P99: Metric = Metric::lower("round trip p99", "us");

const METHOD: &str = "The device without a VM: zerosock's driver takes the place of the guest and \
    sleeps when idle; the device forwards to a Unix socket. Unless a placement says otherwise, the device \
    has the receiver's core to itself, and the driver and the program at the Unix socket share the sender's. Every byte is \
    checked. The bare socket is the same writes without a device, between the same cores.";

const SIZES: [(usize, &str); 4] = [
    (64, "64 B"),
    (512, "512 B"),
    (4 << 10, "4 KiB"),
    (64 << 10, "64 KiB"),
];

/// Bytes of the first, unmeasured stream, whose speed determines the length of the measured ones.
const PROBE: u64 = 2 << 20;
/// Largest size of a stream, bytes.
const MOST: u64 = 8 << 30;

/// Measures the table.
pub(crate) fn run(bench: &mut Bench<'_>) {
    METHOD.clone_into(&mut bench.table.method);
    const STOCK: u32 = Case::STOCK_RX_BUFFER;
    for (direction, rx_buffer, before, after) in [
        (Direction::ToHost, STOCK, "to host, packets of", ""),
        (
            Direction::ToGuest,
            STOCK,
            "to guest, writes of",
            " into 4 KiB buffers",
        ),
        (
            Direction::ToGuest,
            64 << 10,
            "to guest, writes of",
            " into 64 KiB buffers",
        ),
    ] {
        for (size, size_name) in SIZES {
            let name = format!("{before} {size_name}{after}");
            if bench.settings.wants(&name) {
                let case = Case {
                    direction,
                    size,
                    rx_buffer,
                };
                stream(bench, &name, case);
            }
        }
    }
    let name = "round trip, 64 B";
    if bench.settings.wants(name) {
        round_trip(bench, name);
    }
    let name = "round trip, 64 B, user-mode Linux";
    if bench.settings.wants(name)
        && let Some(outcomes) = user_mode::measure(bench, name)
    {
        add_round_trips(bench, name, &outcomes);
    }
}

/// What carries the bytes: the contestants of the table.
enum Means {
    /// A device, or why it is missing, and the bytes of its streams: 0 until that is known.
    Device(Result<Device, String>, Rc<Cell<u64>>),
    /// A bare Unix socket: the peer of that name in the table `local`.
    Bare,
}

fn contestants(bench: &Bench<'_>) -> Vec<(String, Means)> {
    // The streams of all releases have one length.
    let length = Rc::new(Cell::new(0));
    let release = |binary| Means::Device(program::release(binary), length.clone());
    let peer = Means::Device(program::peer(), Rc::default());
    let contestants = [
        (OURS.to_owned(), release(Binary::OWN)),
        (program::peer_title(), peer),
        ("bare Unix socket".to_owned(), Means::Bare),
    ];
    bench.wanted_with(contestants, release)
}

fn stream(bench: &mut Bench<'_>, name: &str, case: Case) {
    let (settings, cores) = (bench.settings, bench.cores);
    let contestants = contestants(bench);
    let outcomes = bench.measure(name, &contestants, |means| {
        let Means::Device(device, length) = means else {
            return bare(bench, Job::Receive, case.size).map(|outcome| Figures {
                mb_s: outcome.mb_s(case.size),
                cpu_s_per_gb: f64::NAN,
            });
        };
        let device = device.as_ref().map_err(Clone::clone)?;
        let stream = |bytes| traffic::stream(device, case, bytes, cores);
        if length.get() == 0 {
            let probe = stream(probe_bytes(settings))?;
            length.set(stream_bytes(probe.mb_s, case.size, settings));
        }
        stream(length.get())
    });
    let table = &mut bench.table;
    table.add_rows(name, THROUGHPUT, &outcomes, |figures| figures.mb_s);
    for (at, (_, means)) in contestants.iter().enumerate().skip(1) {
        // The bare socket has no device.
        if let Means::Device(..) = means {
            table.compare(name, CPU, &outcomes, (0, at), |figures| {
                figures.cpu_s_per_gb
            });
        }
    }
}

fn round_trip(bench: &mut Bench<'_>, name: &str) {
    let outcomes = bench.measure(name, &contestants(bench), |means| {
        let Means::Device(device, _) = means else {
            return bare(bench, Job::Ping, TRIP);
        };
        let device = device.as_ref().map_err(Clone::clone)?;
        let Settings { warm, time, .. } = *bench.settings;
        traffic::round_trips(device, warm, time, bench.cores)
    });
    add_round_trips(bench, name, &outcomes);
}

fn add_round_trips(bench: &mut Bench<'_>, name: &str, outcomes: &Outcomes<Outcome>) {
    bench.table.add_rows(name, P50, outcomes, Outcome::p50_us);
    bench.table.add_rows(name, P99, outcomes, Outcome::p99_us);
}

/// The same writes over a bare Unix socket.
fn bare(bench: &Bench<'_>, timed: Job, size: usize) -> Result<Outcome, String> {
    let task = Task {
        how: Some(unix::USUAL.to_owned()),
        ..bench.task(timed, Wait::Sleep, size)
    };
    pair::measure(Contestant::Unix, &task)
}

/// Bytes of the first stream.
pub(crate) fn probe_bytes(settings: &Settings) -> u64 {
    if settings.quick { PROBE / 8 } else { PROBE }
}

/// Bytes that take about twice the time of the settings at the speed of the probe, which is lower
/// than that of a long run.
pub(crate) fn stream_bytes(probe_mb_s: f64, size: usize, settings: &Settings) -> u64 {
    let bytes = probe_mb_s * 1e6 * settings.time.as_secs_f64() * 2.0;
    (bytes as u64)
        .clamp(PROBE / 8, MOST)
        .next_multiple_of(size as u64)
}
