//! The rows of `rx`: what each compares, and their figures.

use crate::peers::dequeue::{COPY, COPY_UNTOUCHED, IN_PLACE, IN_PLACE_UNTOUCHED, SHOWN};
use crate::report::{Metric, Outcomes, Row, Table};
use crate::worker::order::{Outcome, Wait};

pub(super) const DEQUEUE: Metric = Metric::lower("dequeue", "ns");
pub(super) const THROUGHPUT: Metric = Metric::higher("throughput", "GB/s");

pub(super) const SIZES: [(usize, &str); 6] = [
    (4 << 10, "4 KiB"),
    (16 << 10, "16 KiB"),
    (64 << 10, "64 KiB"),
    (128 << 10, "128 KiB"),
    (256 << 10, "256 KiB"),
    (512 << 10, "512 KiB"),
];

/// How the embedding process (the host) receives and waits: the contestants of
/// [`alternate`](crate::rounds::alternate), by index.
pub(super) const TO_HOST: [(&str, Wait); 6] = [
    (COPY, Wait::Sleep),
    (IN_PLACE, Wait::Sleep),
    (IN_PLACE, Wait::Spin),
    (COPY_UNTOUCHED, Wait::Sleep),
    (IN_PLACE_UNTOUCHED, Wait::Sleep),
    (SHOWN, Wait::Sleep),
];

/// The rows of each size: name, index of zerosock's figure, index of the baseline, metric.
pub(super) const ROWS: [(&str, usize, usize, Metric); 7] = [
    ("in place, shown", 5, 0, DEQUEUE),
    ("in place, shown", 5, 0, THROUGHPUT),
    ("in place", 1, 0, DEQUEUE),
    ("in place", 1, 0, THROUGHPUT),
    ("in place, polling", 2, 0, DEQUEUE),
    ("in place, polling", 2, 0, THROUGHPUT),
    ("in place, untouched", 4, 3, DEQUEUE),
];

/// Adds the rows of one size and direction.
pub(super) fn rows<T>(
    table: &mut Table,
    name: &str,
    rows: &[(&str, usize, usize, Metric)],
    outcomes: &Outcomes<T>,
    value: impl Fn(&T, Metric) -> f64,
) {
    table.note_failures(outcomes);
    for &(row, way, baseline, metric) in rows {
        let figure = |way| outcomes.figure(way, metric, |outcome| value(outcome, metric));
        table.rows.push(Row {
            name: format!("{name}, {row}"),
            metric,
            ours: figure(way),
            peer_name: "zerosock, copying".to_owned(),
            peer: figure(baseline),
        });
    }
}

pub(super) fn value(outcome: &Outcome, metric: Metric, size: usize) -> f64 {
    if metric == DEQUEUE {
        outcome.busy.unwrap_or(outcome.nanoseconds) as f64 / outcome.messages as f64
    } else {
        outcome.gb_s(size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_spent_waiting_counts_for_throughput_and_not_for_dequeue() {
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
