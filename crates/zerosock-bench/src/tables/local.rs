//! Process to process on one machine: latency, messages each second, throughput.
//!
//! Kernel sockets and pipes sleep, shared-memory peers spin, and zerosock is measured both ways, so
//! that each row compares the same way of waiting unless its name says otherwise.

use Wait::{Sleep, Spin};

use crate::bench::Bench;
use crate::pair;
use crate::peers::{self, Contestant, ours};
use crate::report::{Metric, Row};
use crate::vm::{self, Side, measure_over};
use crate::worker::order::{Job, Outcome, Wait};

const ONE_WAY: Metric = Metric::lower("one-way latency", "ns");
const ROUND_TRIP: Metric = Metric::lower("round trip", "ns");
const MESSAGES: Metric = Metric::higher("messages per second", "million/s");
const THROUGHPUT: Metric = Metric::higher("throughput", "GB/s");

/// Measurements that alternate: each contestant, in each mode of waiting that it supports.
#[derive(Clone, Copy, Debug)]
struct Group {
    job: Job,
    size: usize,
    /// The resulting rows: name, zerosock's mode of waiting, the peer's, metric.
    rows: &'static [(&'static str, Wait, Wait, Metric)],
}

const GROUPS: [Group; 6] = [
    Group {
        job: Job::Ping,
        size: 64,
        rows: &[
            ("one way, 64 B, spinning", Spin, Spin, ONE_WAY),
            ("one way, 64 B, sleeping", Sleep, Sleep, ONE_WAY),
            (
                "round trip, 64 B, ours spinning, theirs sleeping",
                Spin,
                Sleep,
                ROUND_TRIP,
            ),
        ],
    },
    Group {
        job: Job::Ping,
        size: 8 << 10,
        rows: &[
            ("one way, 8 KiB, spinning", Spin, Spin, ONE_WAY),
            ("one way, 8 KiB, sleeping", Sleep, Sleep, ONE_WAY),
        ],
    },
    Group {
        job: Job::Receive,
        size: 64,
        rows: &[
            ("messages, 64 B", Spin, Spin, MESSAGES),
            ("messages, 64 B", Spin, Sleep, MESSAGES),
        ],
    },
    Group {
        job: Job::Receive,
        size: 4 << 10,
        rows: &[
            ("throughput, 4 KiB", Spin, Spin, THROUGHPUT),
            ("throughput, 4 KiB", Spin, Sleep, THROUGHPUT),
        ],
    },
    Group {
        job: Job::Receive,
        size: 64 << 10,
        rows: &[
            ("throughput, 64 KiB", Spin, Spin, THROUGHPUT),
            ("throughput, 64 KiB", Spin, Sleep, THROUGHPUT),
        ],
    },
    Group {
        job: Job::Receive,
        size: 1 << 20,
        rows: &[
            ("throughput, 1 MiB", Spin, Spin, THROUGHPUT),
            ("throughput, 1 MiB", Spin, Sleep, THROUGHPUT),
        ],
    },
];

/// What a program of a guest pings with, and how both sides wait.
const PINGS: [(&str, (Side, Wait)); 3] = [
    (
        "zerosock, endpoint in the VM, spinning",
        (Side::Endpoint, Spin),
    ),
    (
        "zerosock, endpoint in the VM, sleeping",
        (Side::Endpoint, Sleep),
    ),
    ("AF_VSOCK in the VM, sleeping", (Side::Kernel, Sleep)),
];

/// Rows over a VM: name, index of zerosock's figure.
const OVER_VM: [(&str, usize); 2] = [
    ("VM, one way, 64 B, spinning", 0),
    ("VM, one way, 64 B, sleeping", 1),
];

const METHOD: &str = "Process to process. Each message is a packet, sample or write of its own; \
    both sides write and read every byte. Kernel sockets and pipes sleep, shared memory spins. \
    Each contestant has the largest buffers that make it faster. zerosock: queues of 1024 entries and \
    a window of 8 MiB for messages of at most 4 KiB, 128 entries and 4 MiB for larger ones, 256 \
    entries and 4 MiB for pings. Unix sockets: as much as the system allows, up to 4 MiB. Pipes: \
    1 MiB. iceoryx2: 1 MiB of samples, 4 to 4096 of them. In a placement, the receiving or answering side \
    is on the device's core, the other one on the driver's.";

/// Measures the table.
pub(crate) fn run(bench: &mut Bench<'_>) {
    bench.table.method = format!("{METHOD} {}", ours::HOW);
    for group in GROUPS {
        measure(bench, &group);
    }
    if bench.settings.vm && OVER_VM.iter().any(|(name, _)| bench.settings.wants(name)) {
        measure_over(bench, ping_over_vm);
    }
}

/// Pings between a program of a guest and the host.
fn ping_over_vm(bench: &mut Bench<'_>, vm: &vm::Vm) {
    const SIZE: usize = 64;
    let outcomes = bench.measure(OVER_VM[0].0, &PINGS, |&(side, wait)| {
        vm.ping(&vm::order(bench, SIZE, wait)?, side)
    });
    let value = |figures: &vm::Figures| value(&figures.outcome, ONE_WAY, SIZE);
    for (name, ours) in OVER_VM {
        if bench.settings.wants(name) {
            let kernel = PINGS.len() - 1;
            (bench.table).compare(name, ONE_WAY, &outcomes, (ours, kernel), value);
        }
    }
}

fn measure(bench: &mut Bench<'_>, group: &Group) {
    let settings = bench.settings;
    let rows = || (group.rows.iter()).filter(|(name, ..)| settings.wants(name));
    let Some((case, ..)) = rows().next() else {
        return;
    };
    // Contestants in the order of the rows, each with the mode of waiting of its row.
    let mut contestants: Vec<(&str, (Contestant, Wait))> = Vec::new();
    for (_, our_wait, their_wait, _) in rows() {
        let releases = settings.releases.iter().copied().map(Contestant::Release);
        for contestant in peers::ALL.into_iter().chain(releases) {
            let (wait, is_wanted) = match contestant {
                Contestant::Ours | Contestant::Release(_) => (*our_wait, true),
                peer => (*their_wait, settings.is_against(peer.name())),
            };
            let one = (contestant.title(), (contestant, wait));
            if is_wanted && contestant.waits(wait) && !contestants.contains(&one) {
                contestants.push(one);
            }
        }
    }
    let outcomes = bench.measure(case, &contestants, |(contestant, wait)| {
        pair::measure(*contestant, &bench.task(group.job, *wait, group.size))
    });
    for &(name, our_wait, their_wait, metric) in rows() {
        let is_ours = |(_, one): &_| *one == (Contestant::Ours, our_wait);
        let Some(ours) = contestants.iter().position(is_ours) else {
            continue;
        };
        for (peer, (_, (contestant, wait))) in contestants.iter().enumerate() {
            let is_release = matches!(contestant, Contestant::Release(_));
            let their_wait = if is_release { our_wait } else { their_wait };
            // Rows of one name, but with peers that wait in another way, have the same row for a release.
            let is_new = |row: &Row| row.name != name || row.peer_name != contestant.title();
            let is_new = !is_release || bench.table.rows.iter().all(is_new);
            if *contestant != Contestant::Ours && *wait == their_wait && is_new {
                let value = |outcome: &Outcome| value(outcome, metric, group.size);
                bench
                    .table
                    .compare(name, metric, &outcomes, (ours, peer), value);
            }
        }
    }
}

fn value(outcome: &Outcome, metric: Metric, size: usize) -> f64 {
    let (messages, nanoseconds) = (outcome.messages as f64, outcome.nanoseconds as f64);
    match metric {
        ONE_WAY => nanoseconds / messages / 2.0,
        ROUND_TRIP => nanoseconds / messages,
        MESSAGES => messages / nanoseconds * 1e3,
        _ => outcome.gb_s(size),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_in_the_units_of_their_metrics() {
        let outcome = Outcome {
            messages: 1000,
            nanoseconds: 500_000,
            ..Outcome::default()
        };
        assert_eq!(value(&outcome, ROUND_TRIP, 64), 500.0);
        assert_eq!(value(&outcome, ONE_WAY, 64), 250.0);
        assert_eq!(value(&outcome, MESSAGES, 64), 2.0);
        assert_eq!(value(&outcome, THROUGHPUT, 1000), 2.0);
    }
}
