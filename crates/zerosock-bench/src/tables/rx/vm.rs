//! The rows of `rx` over a VM. To the host: the guest's program sends, and the host dequeues with
//! the same calls as between processes. To the guest: the host sends from a loan or by copying, and
//! the guest's program dequeues by its kernel's `read()`, the only call that a stock kernel has.

use super::rows::{DEQUEUE, ROWS, SIZES, THROUGHPUT, TO_HOST, rows, value};
use crate::args::Settings;
use crate::pair::Cores;
use crate::report::{Metric, Table};
use crate::rounds::alternate;
use crate::vm::{Figures, Sending, Setup, Vm};
use crate::worker::order::{Job, Order, Wait};

const SENDER_CPU: Metric = Metric {
    name: "host's CPU time per piece",
    unit: "ns",
    higher_is_better: false,
};

/// How the host sends to the guest: the contestants of [`alternate`], by index.
const SENDING: [(&str, Sending); 2] = [("copy", Sending::Copy), ("loan", Sending::Loan)];

const SENDING_ROWS: [(&str, usize, usize, Metric); 3] = [
    ("from a loan", 1, 0, DEQUEUE),
    ("from a loan", 1, 0, THROUGHPUT),
    ("from a loan", 1, 0, SENDER_CPU),
];

/// A guest in software emulation needs this multiple of the warm-up time.
const WARM_UP_FACTOR: u32 = 3;

/// Adds the rows, or the reason why there are none.
pub(super) fn rows_of_vm(table: &mut Table, settings: &Settings, cores: Cores) {
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
        Err(reason) => return table.note_missing("VM", &reason),
    };
    table.method = format!("{} {}", table.method, vm.describe());
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
            let outcomes = alternate(settings.rounds, TO_HOST.len(), |round, index| {
                let (how, wait) = TO_HOST[index];
                if wait == Wait::Spin && cores.sender.is_none() {
                    return Err("a spinning host needs a core beside the guest's".to_owned());
                }
                progress!("{name}: round {}, {how}, {wait:?}", round + 1);
                vm.to_host(&order(wait), how)
            });
            let ways = TO_HOST.map(|(how, _)| format!("{how}, from the VM"));
            let ways = ways.each_ref().map(String::as_str);
            rows(table, &name, &ways, &ROWS, &outcomes, value);
        } else {
            let outcomes = alternate(settings.rounds, SENDING.len(), |round, index| {
                let (how, sending) = SENDING[index];
                progress!("{name}: round {}, {how}", round + 1);
                vm.to_guest(&order(Wait::Sleep), sending)
            });
            let ways = SENDING.map(|(how, _)| format!("{how}, to the VM"));
            let ways = ways.each_ref().map(String::as_str);
            rows(table, &name, &ways, &SENDING_ROWS, &outcomes, value);
        }
    }
}
