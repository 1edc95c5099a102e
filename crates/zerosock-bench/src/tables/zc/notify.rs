//! Cost of learning that a sent buffer is free: inline notifications compared with the error queue.

use zerosock::zc::{Copying, SendBackend};

use super::sockets::Carried;
use super::{Measured, Ours, Window, error_queue_loop, measure_in_network, ours, vectors};
use crate::bench::Bench;
use crate::report::Metric;

const MOVED: Metric = Metric::higher("moved", "MB/s");
const CPU: Metric = Metric::lower("sender's CPU", "s/GB");
const CALLS: Metric = Metric::lower("system calls", "1/send");

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

/// The two back-ends of zerosock's sender, and the peer.
const WAYS: [(&str, Option<SendBackend>); 3] = [
    ("io_uring", Some(SendBackend::Uring)),
    ("error queue", Some(SendBackend::ErrorQueue)),
    ("error queue, as msg_zerocopy", None),
];
const PEER: usize = 2;

/// Measures the table.
pub(crate) fn run(bench: &mut Bench<'_>) {
    METHOD.clone_into(&mut bench.table.method);
    if !bench.settings.quick {
        bench.table.rounds = bench.table.rounds.max(PAIRS);
    }
    measure_in_network(bench, |bench, network| {
        for (name, carried) in [
            ("UDP, IPv4", network.udp4),
            ("UDP, IPv6", network.udp6),
            ("TCP, IPv4", network.tcp4),
            ("TCP, IPv6", network.tcp6),
        ] {
            for limit in [1, 32] {
                let case = format!("{name}, limit {limit}");
                if bench.settings.wants(&case) {
                    case_of(bench, carried, limit, &case);
                }
            }
        }
    });
}

fn case_of(bench: &mut Bench<'_>, carried: Carried, limit: u32, case: &str) {
    let outcomes = bench.measure(case, &WAYS, |backend| {
        let window = Window::new(bench.settings.warm, bench.settings.time);
        if backend.is_none() {
            return error_queue_loop(&carried, SIZE, limit, window);
        }
        let how = Ours {
            backend: *backend,
            copying: Copying::Never,
            batch: 1,
            flush: false,
            notify_every: Some(limit),
        };
        ours(&carried, vectors(SIZE), how, window)
    });
    for (at, (way, _)) in WAYS[..PEER].iter().enumerate() {
        let (name, pair, table) = (format!("{case}, {way}"), (at, PEER), &mut bench.table);
        table.compare(&name, MOVED, &outcomes, pair, moved);
        table.compare(&name, CPU, &outcomes, pair, cpu);
        table.compare(&name, CALLS, &outcomes, pair, calls);
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
