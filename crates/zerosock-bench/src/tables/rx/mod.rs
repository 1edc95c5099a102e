//! Receiving in place compared with receiving by copying: cost of a dequeue, and overall.
//!
//! The same measurements as in the two tables of the kernel's patch set on zero-copy receive:
//! dequeues of 4 KiB to 512 KiB, by copying, in place, and in place with polling. The peer in each
//! row is zerosock with copying. With `--vm`, the same over a VM (`vm.rs`).

mod vm;

use std::thread;

use crate::args::Settings;
use crate::pair::{self, Cores, Task};
use crate::peers::dequeue::{COPY, COPY_UNTOUCHED, IN_PLACE, IN_PLACE_UNTOUCHED, SHOWN};
use crate::peers::{Contestant, ours};
use crate::report::{Metric, Row, Table};
use crate::rounds::{Spread, alternate};
use crate::worker::order::{Job, Outcome, Wait};

const DEQUEUE: Metric = Metric {
    name: "dequeue",
    unit: "ns",
    higher_is_better: false,
};
const THROUGHPUT: Metric = Metric {
    name: "throughput",
    unit: "GB/s",
    higher_is_better: true,
};

const SIZES: [(usize, &str); 6] = [
    (4 << 10, "4 KiB"),
    (16 << 10, "16 KiB"),
    (64 << 10, "64 KiB"),
    (128 << 10, "128 KiB"),
    (256 << 10, "256 KiB"),
    (512 << 10, "512 KiB"),
];

/// Ways to receive, as the rounds count them: the embedding process (the host) receives.
const TO_HOST: [(&str, Wait); 6] = [
    (COPY, Wait::Sleep),
    (IN_PLACE, Wait::Sleep),
    (IN_PLACE, Wait::Spin),
    (COPY_UNTOUCHED, Wait::Sleep),
    (IN_PLACE_UNTOUCHED, Wait::Sleep),
    (SHOWN, Wait::Sleep),
];

/// The same, with the attached process as receiver.
const TO_GUEST: [(&str, Wait); 6] = [
    ("guest:copy", Wait::Sleep),
    ("guest:in-place", Wait::Sleep),
    ("guest:in-place", Wait::Spin),
    ("guest:copy-untouched", Wait::Sleep),
    ("guest:in-place-untouched", Wait::Sleep),
    ("guest:shown", Wait::Sleep),
];

/// The rows of each size: name, zerosock's way, the peer's way, metric.
const ROWS: [(&str, usize, usize, Metric); 7] = [
    ("in place, shown", 5, 0, DEQUEUE),
    ("in place, shown", 5, 0, THROUGHPUT),
    ("in place", 1, 0, DEQUEUE),
    ("in place", 1, 0, THROUGHPUT),
    ("in place, polling", 2, 0, DEQUEUE),
    ("in place, polling", 2, 0, THROUGHPUT),
    ("in place, untouched", 4, 3, DEQUEUE),
];

const METHOD: &str = "Receiving in pieces. In place: by leases, all of a piece held at once; shown: packet \
    after packet, by recv_each, without a lease. A dequeue is the time from \
    when its bytes are there until they were taken, and read where the row does not say untouched; \
    the time of waiting counts in the throughput alone.";

/// Measures the table.
pub(crate) fn run(settings: &Settings, cores: Cores, machine: &str) -> Table {
    let mut table = Table {
        name: "rx",
        method: format!("{METHOD} {}", ours::HOW),
        machine: machine.to_owned(),
        rounds: settings.rounds,
        rows: Vec::new(),
        missing: Vec::new(),
    };
    for (size, name) in SIZES {
        for (direction, hows) in [("to host", &TO_HOST), ("to guest", &TO_GUEST)] {
            let name = format!("{direction}, {name}");
            if settings.wants(&name) {
                processes(&mut table, settings, cores, size, &name, hows);
            }
        }
    }
    if settings.vm {
        // A thread of its own, because it changes its core.
        thread::scope(|scope| {
            let vm = scope.spawn(|| vm::rows_of_vm(&mut table, settings, cores));
            if vm.join().is_err() {
                panic!("the measurement of the VM panicked");
            }
        });
    }
    table
}

fn processes(
    table: &mut Table,
    settings: &Settings,
    cores: Cores,
    size: usize,
    name: &str,
    ways: &[(&'static str, Wait)],
) {
    let outcomes = alternate(settings.rounds, ways.len(), |round, who| {
        let (how, wait) = ways[who];
        if wait == Wait::Spin && cores.sender.is_none() {
            return Err("two spinning sides need two cores".to_owned());
        }
        eprintln!("{name}: round {}, {how}, {wait:?}", round + 1);
        let contestant = Contestant::Ours;
        pair::measure(
            contestant,
            &contestant.program()?,
            &Task {
                timed: Job::Receive,
                wait,
                size,
                warm: settings.warm,
                time: settings.time,
                cores,
                how: Some(how),
            },
        )
    });
    let ways: Vec<_> = ways.iter().map(|(how, _)| *how).collect();
    rows(table, name, &ways, &ROWS, &outcomes, |outcome, metric| {
        value(outcome, metric, size)
    });
}

/// The rows of one size and direction, from the outcomes of each way.
fn rows<T>(
    table: &mut Table,
    name: &str,
    ways: &[&str],
    rows: &[(&str, usize, usize, Metric)],
    outcomes: &[Result<Vec<T>, String>],
    value: impl Fn(&T, Metric) -> f64,
) {
    for (how, outcome) in ways.iter().zip(outcomes) {
        if let Err(reason) = outcome {
            table.note_missing(&format!("zerosock, {how}"), reason);
        }
    }
    let figure = |way: usize, metric: Metric| -> Result<Spread, String> {
        let outcomes = outcomes[way].as_ref().map_err(Clone::clone)?.iter();
        let values = outcomes.map(|outcome| value(outcome, metric));
        Spread::of(values.collect(), metric.higher_is_better).ok_or_else(|| "no rounds".to_owned())
    };
    for &(what, way, beside, metric) in rows {
        table.rows.push(Row {
            name: format!("{name}, {what}"),
            metric,
            ours: figure(way, metric),
            peer_name: "zerosock, copying".to_owned(),
            peer: figure(beside, metric),
        });
    }
}

fn value(outcome: &Outcome, metric: Metric, size: usize) -> f64 {
    let messages = outcome.messages as f64;
    if metric == DEQUEUE {
        outcome.busy.unwrap_or(outcome.nanoseconds) as f64 / messages
    } else {
        messages * size as f64 / outcome.nanoseconds as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiting_counts_in_the_throughput_alone() {
        let outcome = Outcome {
            messages: 10,
            nanoseconds: 10_000,
            busy: Some(1_000),
            ..Outcome::default()
        };
        assert_eq!(value(&outcome, DEQUEUE, 4096), 100.0);
        assert_eq!(value(&outcome, THROUGHPUT, 4096), 4.096);
    }
}
