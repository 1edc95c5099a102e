//! Memory, descriptors, threads, connections and latency, and whether they have grown.
//!
//! Growth is the difference between the medians of the first and the last third of a span. For the supervisor the span is
//! the run without its first tenth; for the process that serves, memory and threads are those of the second half, in which
//! it stays the same process. Its descriptors are passed on at kills and upgrades: they are compared over the whole run.

use std::fs;
use std::io;

use rustix::process::Pid;

use super::common::now;

/// Counts of a process.
#[derive(Clone, Copy, Default)]
pub(super) struct Process {
    /// Anonymous memory in MiB.
    pub(super) memory: f64,
    pub(super) descriptors: f64,
    pub(super) threads: f64,
}

impl Process {
    fn of(pid: u32) -> io::Result<Process> {
        let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            line.and_then(|line| line.split_ascii_whitespace().next()?.parse::<f64>().ok())
        };
        Ok(Process {
            memory: field("RssAnon:").unwrap_or(0.0) / 1024.0,
            descriptors: fs::read_dir(format!("/proc/{pid}/fd"))?.count() as f64,
            threads: field("Threads:").unwrap_or(0.0),
        })
    }
}

/// Counts at a time.
#[derive(Clone, Copy, Default)]
pub(super) struct Counts {
    pub(super) at: f64,
    pub(super) supervisor: Process,
    pub(super) worker: Process,
    pub(super) connections: f64,
    /// Milliseconds of an idle ping; 0 for none.
    pub(super) latency: f64,
}

impl Counts {
    /// The counts now, of the supervisor and the process that serves.
    pub(super) fn of(supervisor: u32, worker: Option<Pid>, connections: u64) -> Counts {
        let worker = worker.and_then(|pid| Process::of(pid.as_raw_pid() as u32).ok());
        Counts {
            at: now(),
            supervisor: Process::of(supervisor).unwrap_or_default(),
            worker: worker.unwrap_or_default(),
            connections: connections as f64,
            latency: 0.0,
        }
    }
}

/// A curve: its name, the value of a sample, and what it may grow by: a part and a number. `true`: only in the second half.
type Curve = (&'static str, fn(&Counts) -> f64, Option<(f64, f64, bool)>);

pub(super) const CURVES: [Curve; 8] = [
    (
        "memory of the process that serves, MiB",
        |it| it.worker.memory,
        Some((0.15, 2.0, true)),
    ),
    (
        "memory of the supervisor, MiB",
        |it| it.supervisor.memory,
        Some((0.1, 0.5, false)),
    ),
    (
        "descriptors of the process that serves",
        |it| it.worker.descriptors,
        Some((0.1, 30.0, false)),
    ),
    (
        "descriptors of the supervisor",
        |it| it.supervisor.descriptors,
        Some((0.1, 10.0, false)),
    ),
    (
        "threads of the process that serves",
        |it| it.worker.threads,
        Some((0.0, 2.0, true)),
    ),
    (
        "threads of the supervisor",
        |it| it.supervisor.threads,
        Some((0.0, 1.0, false)),
    ),
    ("connections", |it| it.connections, Some((0.2, 30.0, false))),
    ("latency of an idle ping, ms", |it| it.latency, None),
];

pub(super) fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

/// The medians of the first and the last third of the span in which a curve is compared.
fn thirds(samples: &[Counts], began: f64, quiet_from: f64, curve: &Curve) -> (f64, f64) {
    let (_, value, allowed) = curve;
    let end = samples.last().map_or(began, |it| it.at);
    let from = match allowed {
        Some((_, _, true)) => quiet_from + (end - quiet_from) / 10.0,
        _ => began + (end - began) / 10.0,
    };
    let third = (end - from) / 3.0;
    let of = |from: f64, to: f64| {
        median(
            samples
                .iter()
                .filter(|it| it.at >= from && it.at <= to)
                .map(value),
        )
    };
    (of(from, from + third), of(end - third, end))
}

/// The curves that have grown.
pub(super) fn growth(samples: &[Counts], began: f64, quiet_from: f64) -> Vec<String> {
    let grown = CURVES.iter().filter_map(|curve| {
        let ((first, last), (part, number, _)) =
            (thirds(samples, began, quiet_from, curve), curve.2?);
        let limit = first * (1.0 + part) + number;
        (last > limit).then(|| {
            format!(
                "{}: {first:.1}, later {last:.1}, more than {limit:.1}",
                curve.0
            )
        })
    });
    grown.collect()
}

/// What is left when all traffic has stopped.
pub(super) fn left(before: &Counts, after: &Counts) -> Vec<String> {
    let exact = CURVES.iter().filter(|curve| !curve.0.starts_with("memory"));
    // Threads that close descriptors of peers come when they are needed, and stay for a while.
    let may_stay = |name: &str| {
        if name.starts_with("threads") {
            4.0
        } else {
            0.0
        }
    };
    let left = exact.filter(|(name, value, _)| value(after) > value(before) + may_stay(name));
    left.map(|(name, value, _)| {
        format!(
            "{name}: {} before the traffic, {} after it",
            value(before),
            value(after)
        )
    })
    .collect()
}

pub(super) fn summary(
    samples: &[Counts],
    began: f64,
    quiet_from: f64,
    before: &Counts,
    after: &Counts,
) -> String {
    let lines = CURVES.iter().map(|curve| {
        let (first, last) = thirds(samples, began, quiet_from, curve);
        let most = samples.iter().map(curve.1).fold(0.0, f64::max);
        format!(
            "  {}: first third {first:.1}, last third {last:.1}, most {most:.1}; idle before {:.1}, after {:.1}\n",
            curve.0, curve.1(before), curve.1(after)
        )
    });
    lines.collect()
}
