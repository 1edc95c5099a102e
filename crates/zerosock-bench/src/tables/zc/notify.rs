//! Cost of learning that a sent buffer is free: inline notifications compared with the error queue.

use zerosock::zc::{Copying, SendBackend};

use super::sockets::{Carried, with_network};
use super::{Measured, Ours, Window, bare_queue, ours, vectors};
use crate::args::Settings;
use crate::pair::Cores;
use crate::report::{Metric, Row, Table};
use crate::rounds::{Spread, alternate};

const MOVED: Metric = Metric {
    name: "moved",
    unit: "MB/s",
    higher_is_better: true,
};
const CPU: Metric = Metric {
    name: "sender's CPU",
    unit: "s/GB",
    higher_is_better: false,
};
const CALLS: Metric = Metric {
    name: "system calls",
    unit: "1/send",
    higher_is_better: false,
};

/// Nearly the size that the kernel's own test program sends.
const SIZE: usize = 65_000;
/// Minimum number of pairs of rounds.
const PAIRS: usize = 20;

const METHOD: &str = "One thread, pinned to a core, sends 64 buffers of 65000 bytes in turn by \
    zero-copy, one per submission, and collects completions after every send, or after every 32. \
    UDP goes to an ifb device. TCP goes over a veth pair to a thread on the other core, which \
    discards the bytes (MSG_TRUNC). That core also processes the packets (receive packet steering), \
    as another machine would, including the copy that the receiving side of a veth pair makes and \
    that the kernel reports for every send. Congestion control is Reno, which does not pace. The \
    peer works as the kernel's msg_zerocopy -z -l LIMIT does: sendmsg; after every LIMIT sends \
    recvmsg on the error queue until that is empty, then poll. The interval is the 95 % interval of \
    the mean of the rounds' ratios.";

/// The two back-ends of zerosock's sender.
const WAYS: [(&str, SendBackend); 2] = [
    ("io_uring", SendBackend::Uring),
    ("error queue", SendBackend::ErrorQueue),
];

type Figure = fn(&Measured) -> f64;

/// Measures the table.
pub(crate) fn run(settings: &Settings, cores: Cores, machine: &str) -> Table {
    let rounds = match settings.quick {
        true => settings.rounds,
        false => settings.rounds.max(PAIRS),
    };
    let mut table = Table {
        name: "notify",
        method: METHOD.to_owned(),
        machine: machine.to_owned(),
        rounds,
        rows: Vec::new(),
        missing: Vec::new(),
    };
    let measured = with_network(cores, |network| {
        let mut rows = Vec::new();
        for (name, carried) in [
            ("UDP, IPv4", network.udp4),
            ("UDP, IPv6", network.udp6),
            ("TCP, IPv4", network.tcp4),
            ("TCP, IPv6", network.tcp6),
        ] {
            for limit in [1, 32] {
                let case = format!("{name}, limit {limit}");
                if settings.wants(&case) {
                    case_of(settings, rounds, carried, limit, &case, &mut rows);
                }
            }
        }
        Ok((rows, network.unsteered.clone()))
    });
    match measured {
        Ok((rows, unsteered)) => {
            table.rows = rows;
            table.note_unsteered(unsteered);
        }
        Err(reason) => table.note_missing("zerosock", &reason),
    }
    table
}

fn case_of(
    settings: &Settings,
    rounds: usize,
    carried: Carried,
    limit: u32,
    case: &str,
    rows: &mut Vec<Row>,
) {
    let peer = WAYS.len();
    let outcomes = alternate(rounds, peer + 1, |round, index| {
        progress!("{case}: round {}, contestant {}", round + 1, index + 1);
        let window = Window::new(settings.warm, settings.time);
        let Some((_, backend)) = WAYS.get(index) else {
            return bare_queue(&carried, SIZE, limit, window);
        };
        let how = Ours {
            backend: Some(*backend),
            copying: Copying::Never,
            batch: 1,
            flush: false,
            notify_every: Some(limit),
        };
        ours(&carried, vectors(SIZE), how, window)
    });
    let figure = |index: usize, metric: Metric, of: Figure| -> Result<Spread, String> {
        let outcomes = outcomes.get(index).ok_or("not measured")?;
        let figures = outcomes.as_ref().map_err(Clone::clone)?.iter().map(of);
        Spread::of(figures.collect(), metric.higher_is_better).ok_or_else(|| "no rounds".to_owned())
    };
    let metrics: [(Metric, Figure); 3] = [(MOVED, moved), (CPU, cpu), (CALLS, calls)];
    for (index, (way, _)) in WAYS.iter().enumerate() {
        for (metric, of) in metrics {
            rows.push(Row {
                name: format!("{case}, {way}"),
                metric,
                ours: figure(index, metric, of),
                peer_name: "error queue, as msg_zerocopy".to_owned(),
                peer: figure(peer, metric, of),
            });
        }
    }
}

fn moved(measured: &Measured) -> f64 {
    measured.counts.bytes as f64 / measured.time.as_secs_f64() / 1e6
}

fn cpu(measured: &Measured) -> f64 {
    measured.cpu.as_secs_f64() * 1e9 / measured.counts.bytes as f64
}

fn calls(measured: &Measured) -> f64 {
    measured.counts.calls as f64 / measured.counts.sends as f64
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn figures_are_in_their_units() {
        let mut measured = Measured {
            time: Duration::from_secs(2),
            cpu: Duration::from_millis(500),
            ..Measured::default()
        };
        (measured.counts.bytes, measured.counts.sends) = (4_000_000_000, 100);
        measured.counts.calls = 150;
        assert_eq!(
            (moved(&measured), cpu(&measured), calls(&measured)),
            (2000.0, 0.125, 1.5)
        );
    }
}
