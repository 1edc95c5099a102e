//! Cost of a reader that never returns its leases for the other connections of its device.
//!
//! Two processes have two connections on one device. On the second one either nothing is sent, or
//! its reader holds as many leases as the device lends (`peers/slow_reader.rs`). The goal: with the
//! slow reader, the first connection keeps at least 80 % of its rate.

use crate::args::Settings;
use crate::pair::{self, Cores, Task};
use crate::peers::{Contestant, ours, slow_reader};
use crate::report::{Metric, Row, Table};
use crate::rounds::{Spread, alternate};
use crate::worker::order::{Job, Outcome, Wait};

const RATE: Metric = Metric {
    name: "rate",
    unit: "MB/s",
    higher_is_better: true,
};

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
pub(crate) fn run(settings: &Settings, cores: Cores, machine: &str) -> Table {
    let mut table = Table {
        name: "hold",
        method: format!("{METHOD} {}", ours::HOW),
        machine: machine.to_owned(),
        rounds: settings.rounds,
        rows: Vec::new(),
        missing: Vec::new(),
    };
    for (direction, hows) in DIRECTIONS {
        for (size, size_name) in SIZES {
            let name = format!("{direction}, {size_name}, beside a slow reader");
            if settings.wants(&name) {
                measure(&mut table, settings, cores, size, name, hows);
            }
        }
    }
    table
}

fn measure(
    table: &mut Table,
    settings: &Settings,
    cores: Cores,
    size: usize,
    name: String,
    hows: [&'static str; 2],
) {
    let outcomes = alternate(settings.rounds, hows.len(), |round, index| {
        if cores.sender.is_none() {
            return Err("two spinning sides need two cores".to_owned());
        }
        let how = hows[index];
        progress!("{name}: round {}, {how}", round + 1);
        let contestant = Contestant::Ours;
        pair::measure(
            contestant,
            &contestant.program()?,
            &Task {
                timed: Job::Receive,
                wait: Wait::Spin,
                size,
                warm: settings.warm,
                time: settings.time,
                cores,
                how: Some(how),
            },
        )
    });
    let figure = |index: usize| -> Result<Spread, String> {
        let outcomes = outcomes[index].as_ref().map_err(Clone::clone)?.iter();
        let rates = outcomes.map(|outcome| rate(outcome, size)).collect();
        Spread::of(rates, RATE.higher_is_better).ok_or_else(|| "no rounds".to_owned())
    };
    let (ours, peer) = (figure(0), figure(1));
    for (how, figure) in hows.iter().zip([&ours, &peer]) {
        if let Err(reason) = figure {
            table.note_missing(&format!("zerosock, {how}"), reason);
        }
    }
    table.rows.push(Row {
        name,
        metric: RATE,
        ours,
        peer_name: "zerosock, alone".to_owned(),
        peer,
    });
}

fn rate(outcome: &Outcome, size: usize) -> f64 {
    (outcome.messages * size as u64) as f64 * 1e3 / outcome.nanoseconds as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_megabytes_a_second() {
        let outcome = Outcome {
            messages: 1000,
            nanoseconds: 1_000_000,
            ..Outcome::default()
        };
        assert_eq!(rate(&outcome, 4000), 4000.0);
    }
}
