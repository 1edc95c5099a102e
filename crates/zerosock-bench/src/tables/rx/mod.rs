//! Receiving in place compared with receiving by copying: cost of a dequeue, and overall.
//!
//! The same measurements as in the two tables of the kernel's patch set on zero-copy receive:
//! dequeues of 4 KiB to 512 KiB, by copying, in place, and in place with polling. The peer in each
//! row is zerosock with copying. With `--vm`, the same over a VM (`vm.rs`).

mod document;
mod rows;
mod vm;

use crate::bench::Bench;
use crate::pair::{self, Task};
use crate::peers::{Contestant, ours};
use crate::worker::order::{Job, Outcome, Wait};
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
pub(crate) fn run(bench: &mut Bench<'_>) {
    bench.table.method = format!("{METHOD} {}", ours::HOW);
    for (size, name) in SIZES {
        for (direction, hows) in [("to host", &TO_HOST), ("to guest", &TO_GUEST)] {
            let name = format!("{direction}, {name}");
            if bench.settings.wants(&name) {
                processes(bench, size, &name, hows);
            }
        }
    }
    if bench.settings.vm {
        vm::rows_of_vm(bench);
    }
}

fn processes(bench: &mut Bench<'_>, size: usize, name: &str, ways: &[(&'static str, Wait)]) {
    let title = |how: &str| format!("zerosock, {how}");
    let ways: Vec<_> = ways.iter().map(|way| (title(way.0), *way)).collect();
    let outcomes = bench.measure(name, &ways, |(how, wait)| {
        let task = Task {
            how: Some((*how).to_owned()),
            ..bench.task(Job::Receive, *wait, size)
        };
        pair::measure(Contestant::Ours, &task)
    });
    let value = |outcome: &Outcome, metric| value(outcome, metric, size);
    rows(&mut bench.table, name, &ROWS, &outcomes, value);
}
