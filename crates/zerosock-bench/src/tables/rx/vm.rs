//! The rows of `rx` over a VM. To the host: the guest's program sends, and the host dequeues with
//! the same calls as between processes. To the guest: the host sends from a loan or by copying, and
//! the guest's program dequeues by its kernel's `read()`, the only call that a stock kernel has.

use super::rows::{DEQUEUE, ROWS, SIZES, THROUGHPUT, TO_HOST, rows, value};
use crate::bench::Bench;
use crate::report::Metric;
use crate::vm::{Figures, Sending, Setup, Vm};
use crate::worker::order::{Job, Order, Wait};

const SENDER_CPU: Metric = Metric::lower("host's CPU time per piece", "ns");

/// How the host sends to the guest: the contestants of [`alternate`](crate::rounds::alternate), by index.
const SENDING: [(&str, Sending); 2] = [("copy", Sending::Copy), ("loan", Sending::Loan)];

const SENDING_ROWS: [(&str, usize, usize, Metric); 3] = [
    ("from a loan", 1, 0, DEQUEUE),
    ("from a loan", 1, 0, THROUGHPUT),
    ("from a loan", 1, 0, SENDER_CPU),
];

/// A guest in software emulation needs this multiple of the warm-up time.
const WARM_UP_FACTOR: u32 = 3;

/// Adds the rows, or the reason why there are none.
pub(super) fn rows_of_vm(bench: &mut Bench<'_>) {
    let (settings, cores) = (bench.settings, bench.cores);
    let cases = || {
        SIZES.into_iter().flat_map(|(size, name)| {
            let name = |direction| format!("VM {direction}, {name}");
            [
                (size, name("to host"), true),
                (size, name("to guest"), false),
            ]
        })
    };
    let wanted = |name: &str| settings.wants(name);
    if !cases().any(|(_, name, _)| wanted(&name)) {
        return;
    }
    let vm = match Vm::boot(Setup::rx(cores)) {
        Ok(vm) => vm,
        Err(reason) => return bench.table.note_missing("VM", &reason),
    };
    bench.table.method = format!("{} {}", bench.table.method, vm.describe());
    for (size, name, to_host) in cases().filter(|(_, name, _)| wanted(name)) {
        let order = |wait| Order {
            peer: String::new(),
            job: Job::Receive,
            wait,
            size,
            warm: settings.warm * WARM_UP_FACTOR,
            time: settings.time,
            cpu: None,
            other_cpu: None,
            place: "-".to_owned(),
            to: None,
            how: None,
        };
        let value = |figures: &Figures, metric: Metric| {
            if metric == SENDER_CPU {
                figures.sender_cpu.unwrap_or(f64::NAN)
            } else {
                value(&figures.outcome, metric, size)
            }
        };
        if to_host {
            let ways = TO_HOST.map(|way| (format!("zerosock, {}, from the VM", way.0), way));
            let outcomes = bench.measure(&name, &ways, |(how, wait)| {
                if *wait == Wait::Spin && cores.sender.is_none() {
                    return Err("a spinning host needs a core beside the guest's".to_owned());
                }
                vm.to_host(&order(*wait), how)
            });
            rows(&mut bench.table, &name, &ROWS, &outcomes, value);
        } else {
            let ways =
                SENDING.map(|(how, sending)| (format!("zerosock, {how}, to the VM"), sending));
            let outcomes = bench.measure(&name, &ways, |sending| {
                vm.to_guest(&order(Wait::Sleep), *sending)
            });
            rows(&mut bench.table, &name, &SENDING_ROWS, &outcomes, value);
        }
    }
}
