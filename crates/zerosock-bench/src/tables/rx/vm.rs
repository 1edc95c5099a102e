//! The rows of `rx` over a VM. To the host: the guest's program sends, and the host dequeues with
//! the same calls as between processes. To the guest: the host sends from a loan or by copying, and
//! the guest's program dequeues by its kernel's `read()`, the only call that a stock kernel has.

use super::document;
use super::rows::{DEQUEUE, ROWS, SIZES, THROUGHPUT, TO_HOST, rows, value};
use crate::bench::Bench;
use crate::peers::dequeue::{COPY, IN_PLACE};
use crate::report::{Metric, Outcomes};
use crate::vm::{Figures, Sending, Side, Vm, measure_over, order};
use crate::worker::order::Wait;

const SENDER_CPU: Metric = Metric::lower("host's CPU time per piece", "ns");
const GUEST_CPU: Metric = Metric::lower("guest's CPU time per piece", "ns");

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

/// Adds the rows, or the reason why there are none.
pub(super) fn rows_of_vm(bench: &mut Bench<'_>) {
    let settings = bench.settings;
    let cases = SIZES.into_iter().flat_map(|(size, name)| {
        let name = |direction| format!("VM {direction}, {name}");
        [
            (size, name("to host"), true),
            (size, name("to guest"), false),
        ]
    });
    let cases: Vec<_> = cases.filter(|(_, name, _)| settings.wants(name)).collect();
    if cases.is_empty() {
        return;
    }
    measure_over(bench, |bench, vm| {
        let (mut to_guest, mut to_host) = (document::TO_GUEST.table(), document::TO_HOST.table());
        for (size, name, is_to_host) in cases {
            if is_to_host {
                let outcomes = measure_to_host(bench, vm, size, &name);
                document::TO_HOST.fill(&mut to_host, size, &outcomes);
            } else {
                let outcomes = measure_to_guest(bench, vm, size, &name);
                document::TO_GUEST.fill(&mut to_guest, size, &outcomes);
            }
        }
        bench.table.grids = vec![to_guest, to_host];
    });
}

fn measure_to_host(bench: &mut Bench<'_>, vm: &Vm, size: usize, name: &str) -> Outcomes<Figures> {
    let of_kernel = TO_HOST.map(|(how, wait)| (Side::Kernel, how, wait));
    let of_endpoint = FROM_ENDPOINT.map(|(how, wait)| (Side::Endpoint, how, wait));
    let ways = of_kernel.into_iter().chain(of_endpoint);
    let title = |side: Side, how| format!("zerosock, {how}, from the VM's {}", side.name());
    let ways: Vec<_> = ways.map(|way| (title(way.0, way.1), way)).collect();
    let outcomes = bench.measure(name, &ways, |&(side, how, wait)| {
        vm.to_host(&order(bench, size, wait)?, side, how)
    });
    let value = |figures: &Figures, metric| figure(figures, metric, size);
    rows(&mut bench.table, name, &ROWS, &outcomes, value);
    rows(
        &mut bench.table,
        name,
        &FROM_ENDPOINT_ROWS,
        &outcomes,
        value,
    );
    outcomes
}

fn measure_to_guest(bench: &mut Bench<'_>, vm: &Vm, size: usize, name: &str) -> Outcomes<Figures> {
    let ways = TO_GUEST.map(|way| (format!("zerosock, {}, to the VM", way.0), way));
    let outcomes = bench.measure(name, &ways, |&(_, sending, side, how, wait)| {
        vm.to_guest(&order(bench, size, wait)?, sending, side, how)
    });
    let value = |figures: &Figures, metric| figure(figures, metric, size);
    rows(&mut bench.table, name, &TO_GUEST_ROWS, &outcomes, value);
    outcomes
}

fn figure(figures: &Figures, metric: Metric, size: usize) -> f64 {
    match metric {
        SENDER_CPU => figures.sender_cpu.unwrap_or(f64::NAN),
        GUEST_CPU => figures.guest_cpu.unwrap_or(f64::NAN),
        _ => value(&figures.outcome, metric, size),
    }
}
