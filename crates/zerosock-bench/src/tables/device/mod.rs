//! The device without a virtual machine: `zerosock serve` and vhost-device-vsock in turn.
//!
//! zerosock's driver takes the place of the guest of both devices, and the host program uses the
//! same Unix socket, so both devices do the same work. Each measurement starts a new device. The
//! upper limit is the same writes over a Unix socket without a device, between the same two cores.

pub(crate) mod program;
pub(crate) mod traffic;

use crate::args::Settings;
use crate::pair::{self, Cores, Task};
use crate::peers::{Contestant, unix};
use crate::report::{Metric, Row, Table};
use crate::rounds::{Spread, alternate};
use crate::worker::order::{Job, Outcome, Wait};
use program::{Device, OURS};
use traffic::{Case, Direction, Figures, TRIP};

pub(crate) use program::install_peer;

const THROUGHPUT: Metric = Metric {
    name: "throughput",
    unit: "MB/s",
    higher_is_better: true,
};
const CPU: Metric = Metric {
    name: "device CPU",
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

const METHOD: &str = "The device without a VM: zerosock's driver takes the place of the guest and \
    sleeps when idle; the device forwards to a Unix socket. The device has the receiver's core to \
    itself; the driver and the program at the Unix socket share the sender's core. Every byte is \
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

const BARE: &str = "bare Unix socket";

/// Indices of the contestants in [`alternate`].
const US: usize = 0;
const PEER: usize = 1;
const CEILING: usize = 2;

struct Bench<'s> {
    settings: &'s Settings,
    cores: Cores,
    /// zerosock and the peer, or why the peer is missing.
    devices: [Result<Device, String>; 2],
    peer_title: String,
    table: Table,
}

/// Measures the table.
pub(crate) fn run(settings: &Settings, cores: Cores, machine: &str) -> Table {
    let mut bench = Bench {
        settings,
        cores,
        devices: [program::ours(), program::peer()],
        peer_title: program::peer_title(),
        table: Table {
            name: "device",
            method: METHOD.to_owned(),
            machine: machine.to_owned(),
            rounds: settings.rounds,
            rows: Vec::new(),
            missing: Vec::new(),
        },
    };
    let cases = [
        (
            Direction::ToHost,
            Case::STOCK_RX_BUFFER,
            "to host, packets of",
            "",
        ),
        (
            Direction::ToGuest,
            Case::STOCK_RX_BUFFER,
            "to guest, writes of",
            " into 4 KiB buffers",
        ),
        (
            Direction::ToGuest,
            64 << 10,
            "to guest, writes of",
            " into 64 KiB buffers",
        ),
    ];
    for (direction, rx_buffer, before, after) in cases {
        for (size, size_name) in SIZES {
            let name = format!("{before} {size_name}{after}");
            if settings.wants(&name) {
                bench.stream(
                    &name,
                    Case {
                        direction,
                        size,
                        rx_buffer,
                    },
                );
            }
        }
    }
    let name = "round trip, 64 B";
    if settings.wants(name) {
        bench.round_trip(name);
    }
    bench.table
}

impl Bench<'_> {
    fn stream(&mut self, name: &str, case: Case) {
        let mut bytes = [None; 2];
        let outcomes = alternate(self.settings.rounds, 3, |round, contestant| {
            let Some(device) = self.devices.get(contestant) else {
                return self
                    .bare(name, round, Job::Receive, case.size)
                    .map(bare_stream(case.size));
            };
            let device = device.as_ref().map_err(Clone::clone)?;
            let (settings, cores) = (self.settings, self.cores);
            let bytes = match bytes[contestant] {
                Some(bytes) => bytes,
                None => {
                    let probe = traffic::stream(device, case, probe_bytes(settings), cores)?;
                    *bytes[contestant].insert(stream_bytes(probe.mb_s, case.size, settings))
                }
            };
            self.print_progress(name, round, contestant);
            traffic::stream(device, case, bytes, cores)
        });
        let throughput = |figures: &Figures| figures.mb_s;
        self.rows(name, THROUGHPUT, &outcomes, &[PEER, CEILING], throughput);
        self.rows(name, CPU, &outcomes, &[PEER], |figures| {
            figures.cpu_s_per_gb
        });
    }

    fn round_trip(&mut self, name: &str) {
        let outcomes = alternate(self.settings.rounds, 3, |round, contestant| {
            let Some(device) = self.devices.get(contestant) else {
                return self.bare(name, round, Job::Ping, TRIP);
            };
            let device = device.as_ref().map_err(Clone::clone)?;
            self.print_progress(name, round, contestant);
            let Settings { warm, time, .. } = *self.settings;
            traffic::round_trips(device, warm, time, self.cores)
        });
        let microseconds = |nanoseconds: Option<u64>| {
            nanoseconds.map_or(f64::NAN, |nanoseconds| nanoseconds as f64 / 1e3)
        };
        for metric in [P50, P99] {
            self.rows(name, metric, &outcomes, &[PEER, CEILING], |outcome| {
                microseconds(if metric == P50 {
                    outcome.p50
                } else {
                    outcome.p99
                })
            });
        }
    }

    /// The same writes over a bare Unix socket: the peer of that name in the table `local`.
    fn bare(&self, name: &str, round: usize, timed: Job, size: usize) -> Result<Outcome, String> {
        self.print_progress(name, round, CEILING);
        let contestant = Contestant::Unix;
        pair::measure(
            contestant,
            &contestant.program()?,
            &Task {
                timed,
                wait: Wait::Sleep,
                size,
                warm: self.settings.warm,
                time: self.settings.time,
                cores: self.cores,
                how: Some(unix::USUAL),
            },
        )
    }

    fn title(&self, contestant: usize) -> &str {
        match contestant {
            US => OURS,
            PEER => &self.peer_title,
            _ => BARE,
        }
    }

    fn print_progress(&self, name: &str, round: usize, contestant: usize) {
        progress!("{name}: round {}, {}", round + 1, self.title(contestant));
    }

    fn rows<T>(
        &mut self,
        name: &str,
        metric: Metric,
        outcomes: &[Result<Vec<T>, String>],
        peers: &[usize],
        value: impl Fn(&T) -> f64,
    ) {
        let figure = |contestant: usize| -> Result<Spread, String> {
            let outcomes = outcomes[contestant].as_ref().map_err(Clone::clone)?;
            let values = outcomes.iter().map(&value).collect();
            Spread::of(values, metric.higher_is_better).ok_or_else(|| "no rounds".to_owned())
        };
        for &contestant in peers {
            self.table.rows.push(Row {
                name: name.to_owned(),
                metric,
                ours: figure(US),
                peer_name: self.title(contestant).to_owned(),
                peer: figure(contestant),
            });
        }
        for (contestant, outcome) in outcomes.iter().enumerate() {
            if let Err(reason) = outcome {
                let title = self.title(contestant).to_owned();
                self.table.note_missing(&title, reason);
            }
        }
    }
}

fn bare_stream(size: usize) -> impl Fn(Outcome) -> Figures {
    move |outcome| Figures {
        mb_s: (outcome.messages * size as u64) as f64 * 1e3 / outcome.nanoseconds as f64,
        cpu_s_per_gb: f64::NAN,
    }
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
