//! Receiving in place compared with receiving by copying: cost of a dequeue, and overall.
//!
//! The same measurements as in the two tables of the kernel's patch set on zero-copy receive:
//! dequeues of 4 KiB to 512 KiB, by copying, in place, and in place with polling. The peer in each
//! row is zerosock with copying. With `--vm`, the same over a VM (`vm.rs`).

mod rows;
mod vm;

use std::thread;

use crate::args::Settings;
use crate::pair::{self, Cores, Task};
use crate::peers::{Contestant, ours};
use crate::report::Table;
use crate::rounds::alternate;
use crate::worker::order::{Job, Wait};
use rows::{ROWS, SIZES, TO_HOST, rows, value};

/// The same, with the attached process as receiver.
const TO_GUEST: [(&str, Wait); 6] = [
    ("guest:copy", Wait::Sleep),
    ("guest:in-place", Wait::Sleep),
    ("guest:in-place", Wait::Spin),
    ("guest:copy-untouched", Wait::Sleep),
    ("guest:in-place-untouched", Wait::Sleep),
    ("guest:shown", Wait::Sleep),
];

const METHOD: &str = "The receiver dequeues pieces of a fixed size. In place: by leases, all leases of \
    a piece held at once. Shown: recv_each passes packet after packet to a callback, without leases. \
    A dequeue is the time from when the bytes of a piece are available until the receiver has taken \
    them and, except in the rows named untouched, has read them. Time spent waiting counts for \
    throughput only.";

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
    let outcomes = alternate(settings.rounds, ways.len(), |round, index| {
        let (how, wait) = ways[index];
        if wait == Wait::Spin && cores.sender.is_none() {
            return Err("two spinning sides need two cores".to_owned());
        }
        progress!("{name}: round {}, {how}, {wait:?}", round + 1);
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
