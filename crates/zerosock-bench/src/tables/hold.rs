//! Cost of a reader that never returns its leases for the other connections of its device.
//!
//! Two processes have two connections on one device. On the second one either nothing is sent, or
//! its reader holds as many leases as the device lends (`peers/slow_reader.rs`). The goal: with the
//! slow reader, the first connection keeps at least 80 % of its rate.

use crate::bench::Bench;
use crate::pair::{self, Task};
use crate::peers::{Contestant, ours, slow_reader};
use crate::report::Metric;
use crate::worker::order::{Job, Wait};

const RATE: Metric = Metric::higher("rate", "MB/s");

const SIZES: [(usize, &str); 3] = [(64, "64 B"), (4 << 10, "4 KiB"), (64 << 10, "64 KiB")];

/// For each direction: with the slow reader, and without. The receiving process is the slow reader:
/// the host, or the attached process.
const DIRECTIONS: [(&str, [&str; 2]); 2] = [
    ("to host", [slow_reader::BESIDE, slow_reader::ALONE]),
    ("to guest", ["guest:beside", "guest:alone"]),
];

const METHOD: &str = "Two connections share a device. The reader of the second one has leased as much \
    as its credit allows, in packets of 4 KiB, keeps every lease, and holds a read guard on half of \
    them. The figure is the rate of the first connection meanwhile; the peer's is its rate while \
    nothing is sent on the second. The first connection's receiver holds the leases of one piece at a \
    time. Both sides spin, write and read every byte.";

/// Measures the table.
pub(crate) fn run(bench: &mut Bench<'_>) {
    bench.table.method = format!("{METHOD} {}", ours::HOW);
    for (direction, [beside, alone]) in DIRECTIONS {
        let contestants = [("zerosock, beside", beside), ("zerosock, alone", alone)];
        for (size, size_name) in SIZES {
            let name = format!("{direction}, {size_name}, beside a slow reader");
            if !bench.settings.wants(&name) {
                continue;
            }
            let outcomes = bench.measure(&name, &contestants, |how| {
                let task = Task {
                    how: Some((*how).to_owned()),
                    ..bench.task(Job::Receive, Wait::Spin, size)
                };
                pair::measure(Contestant::Ours, &task)
            });
            let table = &mut bench.table;
            table.add_rows(&name, RATE, &outcomes, |outcome| outcome.mb_s(size));
        }
    }
}
