//! The rows of `rx` over a VM. To the host: the guest's program sends, and the host dequeues with
//! the same calls as between processes. To the guest: the host sends from a loan or by copying, and
//! the guest's program dequeues by its kernel's `read()`, the only call that a stock kernel has.

use super::document;
use super::rows::{DEQUEUE, ROWS, SIZES, THROUGHPUT, TO_HOST, rows, value};
use crate::bench::Bench;
use crate::peers::dequeue::{COPY, IN_PLACE};
use crate::report::Metric;
use crate::vm::{Figures, Sending, Setup, Side, Vm};
use crate::worker::order::{Job, Order, Wait};

const SENDER_CPU: Metric = Metric::lower("host's CPU time per piece", "ns");
const GUEST_CPU: Metric = Metric::lower("guest's CPU time per piece", "ns");
const ROUND_TRIP: Metric = Metric::lower("round trip", "ns");

/// Ways to the guest: how the host sends, what the guest's program uses, how it dequeues and waits. The contestants of
/// [`alternate`](crate::rounds::alternate), by index.
const TO_GUEST: [(&str, Sending, Side, &str, Wait); 5] = [
    ("copy", Sending::Copy, Side::Kernel, COPY, Wait::Sleep),
    ("loan", Sending::Loan, Side::Kernel, COPY, Wait::Sleep),
    (
        "loan, endpoint copying",
        Sending::Loan,
        Side::Endpoint,
        COPY,
        Wait::Sleep,
    ),
    (
        "loan, endpoint in place",
        Sending::Loan,
        Side::Endpoint,
        IN_PLACE,
        Wait::Sleep,
    ),
    (
        "loan, endpoint in place, polling",
        Sending::Loan,
        Side::Endpoint,
        IN_PLACE,
        Wait::Spin,
    ),
];

/// The rows: name, index of zerosock's figure and of the baseline, metric.
const TO_GUEST_ROWS: [(&str, usize, usize, Metric); 12] = [
    ("from a loan", 1, 0, DEQUEUE),
    ("from a loan", 1, 0, THROUGHPUT),
    ("from a loan", 1, 0, SENDER_CPU),
    ("endpoint, copying", 2, 0, DEQUEUE),
    ("endpoint, copying", 2, 0, THROUGHPUT),
    ("endpoint, copying", 2, 0, GUEST_CPU),
    ("endpoint, in place", 3, 0, DEQUEUE),
    ("endpoint, in place", 3, 0, THROUGHPUT),
    ("endpoint, in place", 3, 0, GUEST_CPU),
    ("endpoint, in place, polling", 4, 0, DEQUEUE),
    ("endpoint, in place, polling", 4, 0, THROUGHPUT),
    ("endpoint, in place, polling", 4, 0, GUEST_CPU),
];

/// Ways to the host of a program of the guest that sends from its pages, behind those of [`TO_HOST`].
const FROM_ENDPOINT: [(&str, Wait); 3] = [
    (COPY, Wait::Sleep),
    (IN_PLACE, Wait::Sleep),
    (IN_PLACE, Wait::Spin),
];

const FROM_ENDPOINT_ROWS: [(&str, usize, usize, Metric); 9] = [
    ("from an endpoint, copying", 6, 0, DEQUEUE),
    ("from an endpoint, copying", 6, 0, THROUGHPUT),
    ("from an endpoint, copying", 6, 0, GUEST_CPU),
    ("from an endpoint, in place", 7, 0, DEQUEUE),
    ("from an endpoint, in place", 7, 0, THROUGHPUT),
    ("from an endpoint, in place", 7, 0, GUEST_CPU),
    ("from an endpoint, in place, polling", 8, 0, DEQUEUE),
    ("from an endpoint, in place, polling", 8, 0, THROUGHPUT),
    ("from an endpoint, in place, polling", 8, 0, GUEST_CPU),
];

/// How both sides of a ping wait.
const PINGS: [(&str, Side, Wait); 3] = [
    ("kernel", Side::Kernel, Wait::Sleep),
    ("endpoint, sleeping", Side::Endpoint, Wait::Sleep),
    ("endpoint, polling", Side::Endpoint, Wait::Spin),
];

const PING_ROWS: [(&str, usize, usize, Metric); 2] = [
    ("both sleeping", 1, 0, ROUND_TRIP),
    ("both polling", 2, 0, ROUND_TRIP),
];

const PING: &str = "VM, ping, 64 B";
const PING_BYTES: usize = 64;

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
    if !cases().any(|(_, name, _)| wanted(&name)) && !wanted(PING) {
        return;
    }
    let vm = match Vm::boot(Setup::rx(cores)) {
        Ok(vm) => vm,
        Err(reason) => return bench.table.note_missing("VM", &reason),
    };
    bench.table.method = format!("{} {}", bench.table.method, vm.describe());
    if let Some(reason) = vm.no_endpoints() {
        bench.table.note_missing("endpoints in the VM", reason);
    }
    let order = |size, wait| Order {
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
    let may_wait = |wait| match wait {
        Wait::Spin if cores.sender.is_none() => {
            Err("a spinning host needs a core beside the guest's".to_owned())
        }
        _ => Ok(()),
    };
    let (mut to_guest_table, mut to_host_table) =
        (document::TO_GUEST.table(), document::TO_HOST.table());
    for (size, name, to_host) in cases().filter(|(_, name, _)| wanted(name)) {
        let value = |figures: &Figures, metric: Metric| match metric {
            SENDER_CPU => figures.sender_cpu.unwrap_or(f64::NAN),
            GUEST_CPU => figures.guest_cpu.unwrap_or(f64::NAN),
            _ => value(&figures.outcome, metric, size),
        };
        if to_host {
            let of_kernel = TO_HOST.map(|(how, wait)| (Side::Kernel, how, wait));
            let of_endpoint = FROM_ENDPOINT.map(|(how, wait)| (Side::Endpoint, how, wait));
            let ways = of_kernel.into_iter().chain(of_endpoint);
            let ways: Vec<_> = ways
                .map(|way| {
                    (
                        format!("zerosock, {}, from the VM's {}", way.1, way.0.name()),
                        way,
                    )
                })
                .collect();
            let outcomes = bench.measure(&name, &ways, |&(side, how, wait)| {
                may_wait(wait)?;
                vm.to_host(&order(size, wait), side, how)
            });
            document::TO_HOST.fill(&mut to_host_table, size, &outcomes);
            rows(&mut bench.table, &name, &ROWS, &outcomes, value);
            rows(
                &mut bench.table,
                &name,
                &FROM_ENDPOINT_ROWS,
                &outcomes,
                value,
            );
        } else {
            let ways = TO_GUEST.map(|way| (format!("zerosock, {}, to the VM", way.0), way));
            let outcomes = bench.measure(&name, &ways, |&(_, sending, side, how, wait)| {
                may_wait(wait)?;
                vm.to_guest(&order(size, wait), sending, side, how)
            });
            document::TO_GUEST.fill(&mut to_guest_table, size, &outcomes);
            rows(&mut bench.table, &name, &TO_GUEST_ROWS, &outcomes, value);
        }
    }
    bench.table.grids = vec![to_guest_table, to_host_table];
    if wanted(PING) {
        let ways = PINGS.map(|way| (format!("zerosock, {}, ping", way.0), way));
        let outcomes = bench.measure(PING, &ways, |&(_, side, wait)| {
            may_wait(wait)?;
            vm.ping(&order(PING_BYTES, wait), side)
        });
        let value = |figures: &Figures, _| {
            figures.outcome.nanoseconds as f64 / figures.outcome.messages as f64
        };
        rows(&mut bench.table, PING, &PING_ROWS, &outcomes, value);
    }
}
