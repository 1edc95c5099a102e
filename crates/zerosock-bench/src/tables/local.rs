//! Process to process on one machine: latency, messages each second, throughput.
//!
//! Kernel sockets and pipes sleep, shared-memory peers spin, and zerosock is measured both ways, so
//! that each row compares the same way of waiting unless its name says otherwise.

use crate::args::Settings;
use crate::pair::{self, Cores, Task};
use crate::peers::{self, Contestant, ours};
use crate::report::{Metric, Row, Table};
use crate::rounds::{Spread, alternate};
use crate::worker::order::{Job, Outcome, Wait};

const ONE_WAY: Metric = Metric {
    name: "one-way latency",
    unit: "ns",
    higher_is_better: false,
};
const ROUND_TRIP: Metric = Metric {
    name: "round trip",
    unit: "ns",
    higher_is_better: false,
};
const MESSAGES: Metric = Metric {
    name: "messages per second",
    unit: "million/s",
    higher_is_better: true,
};
const THROUGHPUT: Metric = Metric {
    name: "throughput",
    unit: "GB/s",
    higher_is_better: true,
};

/// Measurements that alternate: each contestant, in each mode of waiting that it supports.
#[derive(Clone, Copy, Debug)]
struct Group {
    job: Job,
    size: usize,
    /// The resulting rows: name, zerosock's mode of waiting, the peer's, metric.
    rows: &'static [(&'static str, Wait, Wait, Metric)],
}

const GROUPS: [Group; 6] = [
    Group {
        job: Job::Ping,
        size: 64,
        rows: &[
            ("one way, 64 B, spinning", Wait::Spin, Wait::Spin, ONE_WAY),
            ("one way, 64 B, sleeping", Wait::Sleep, Wait::Sleep, ONE_WAY),
            (
                "round trip, 64 B, ours spinning, theirs sleeping",
                Wait::Spin,
                Wait::Sleep,
                ROUND_TRIP,
            ),
        ],
    },
    Group {
        job: Job::Ping,
        size: 8 << 10,
        rows: &[
            ("one way, 8 KiB, spinning", Wait::Spin, Wait::Spin, ONE_WAY),
            (
                "one way, 8 KiB, sleeping",
                Wait::Sleep,
                Wait::Sleep,
                ONE_WAY,
            ),
        ],
    },
    Group {
        job: Job::Receive,
        size: 64,
        rows: &[
            ("messages, 64 B", Wait::Spin, Wait::Spin, MESSAGES),
            ("messages, 64 B", Wait::Spin, Wait::Sleep, MESSAGES),
        ],
    },
    Group {
        job: Job::Receive,
        size: 4 << 10,
        rows: &[
            ("throughput, 4 KiB", Wait::Spin, Wait::Spin, THROUGHPUT),
            ("throughput, 4 KiB", Wait::Spin, Wait::Sleep, THROUGHPUT),
        ],
    },
    Group {
        job: Job::Receive,
        size: 64 << 10,
        rows: &[
            ("throughput, 64 KiB", Wait::Spin, Wait::Spin, THROUGHPUT),
            ("throughput, 64 KiB", Wait::Spin, Wait::Sleep, THROUGHPUT),
        ],
    },
    Group {
        job: Job::Receive,
        size: 1 << 20,
        rows: &[
            ("throughput, 1 MiB", Wait::Spin, Wait::Spin, THROUGHPUT),
            ("throughput, 1 MiB", Wait::Spin, Wait::Sleep, THROUGHPUT),
        ],
    },
];

const METHOD: &str = "Process to process. Each message is a packet, sample or write of its own; \
    both sides write and read every byte. Kernel sockets and pipes sleep, shared memory spins. \
    Each contestant has the largest buffers that make it faster. zerosock: queues of 1024 entries and \
    a window of 8 MiB for messages of at most 4 KiB, 128 entries and 4 MiB for larger ones, 256 \
    entries and 4 MiB for pings. Unix sockets: as much as the system allows, up to 4 MiB. Pipes: \
    1 MiB. iceoryx2: 1 MiB of samples, 4 to 4096 of them.";

/// Measures the table.
pub(crate) fn run(settings: &Settings, cores: Cores, machine: &str) -> Table {
    let mut table = Table {
        name: "local",
        method: format!("{METHOD} {}", ours::HOW),
        machine: machine.to_owned(),
        rounds: settings.rounds,
        rows: Vec::new(),
        missing: Vec::new(),
    };
    for group in GROUPS {
        if group.rows.iter().any(|(name, ..)| settings.wants(name)) {
            measure(&mut table, settings, cores, &group);
        }
    }
    table
}

fn measure(table: &mut Table, settings: &Settings, cores: Cores, group: &Group) {
    let rows = || {
        let wanted = group.rows.iter();
        wanted.filter(|(name, ..)| settings.wants(name))
    };
    let is_ours = |contestant| contestant == Contestant::Ours;
    // Contestants in the order of the rows, each with the mode of waiting of its row.
    let mut pairs: Vec<(Contestant, Wait)> = Vec::new();
    for (_, our_wait, their_wait, _) in rows() {
        for contestant in peers::ALL {
            let wait = if is_ours(contestant) {
                *our_wait
            } else {
                *their_wait
            };
            let wanted = is_ours(contestant) || settings.is_against(contestant.name());
            if wanted && contestant.waits(wait) && !pairs.contains(&(contestant, wait)) {
                pairs.push((contestant, wait));
            }
        }
    }
    let outcomes = alternate(settings.rounds, pairs.len(), |round, index| {
        let (contestant, wait) = pairs[index];
        let program = contestant.program()?;
        if wait == Wait::Spin && cores.sender.is_none() {
            return Err("two spinning sides need two cores".to_owned());
        }
        let case = rows().next().map_or("", |(name, ..)| name);
        progress!("{case}: round {}, {}", round + 1, contestant.title());
        pair::measure(
            contestant,
            &program,
            &Task {
                timed: group.job,
                wait,
                size: group.size,
                warm: settings.warm,
                time: settings.time,
                cores,
                how: None,
            },
        )
    });
    for ((contestant, _), outcome) in pairs.iter().zip(&outcomes) {
        if let Err(reason) = outcome {
            table.note_missing(contestant.title(), reason);
        }
    }
    let figure = |pair: (Contestant, Wait), metric: Metric| -> Result<Spread, String> {
        let at = pairs.iter().position(|measured| *measured == pair);
        let outcomes = at.and_then(|at| outcomes.get(at)).ok_or("not measured")?;
        let figures = outcomes.as_ref().map_err(Clone::clone)?.iter();
        let figures = figures.map(|outcome| value(outcome, metric, group.size));
        Spread::of(figures.collect(), metric.higher_is_better).ok_or_else(|| "no rounds".to_owned())
    };
    for &(name, our_wait, their_wait, metric) in rows() {
        for &(contestant, wait) in &pairs {
            if is_ours(contestant) || wait != their_wait {
                continue;
            }
            table.rows.push(Row {
                name: name.to_owned(),
                metric,
                ours: figure((Contestant::Ours, our_wait), metric),
                peer_name: contestant.title().to_owned(),
                peer: figure((contestant, wait), metric),
            });
        }
    }
}

fn value(outcome: &Outcome, metric: Metric, size: usize) -> f64 {
    let (messages, nanoseconds) = (outcome.messages as f64, outcome.nanoseconds as f64);
    match metric {
        ONE_WAY => nanoseconds / messages / 2.0,
        ROUND_TRIP => nanoseconds / messages,
        MESSAGES => messages / nanoseconds * 1e3,
        _ => messages * size as f64 / nanoseconds,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_in_the_units_of_their_metrics() {
        let outcome = Outcome {
            messages: 1000,
            nanoseconds: 500_000,
            ..Outcome::default()
        };
        assert_eq!(value(&outcome, ROUND_TRIP, 64), 500.0);
        assert_eq!(value(&outcome, ONE_WAY, 64), 250.0);
        assert_eq!(value(&outcome, MESSAGES, 64), 2.0);
        assert_eq!(value(&outcome, THROUGHPUT, 1000), 2.0);
    }
}
