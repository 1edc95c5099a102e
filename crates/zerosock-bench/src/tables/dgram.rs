//! Datagrams from process to process: ours beside UDP over the loopback interface.
//!
//! The figure is the rate of delivered datagrams with the expected number and content; lost ones do
//! not count. Each size is measured with one sender, and with one sender per core. Both sides
//! sleep; separate rows measure zerosock spinning.

use crate::bench::Bench;
use crate::pair::{self, Cores, Task};
use crate::peers::Contestant;
use crate::report::Metric;
use crate::worker::order::{Job, Outcome, Wait};

const DELIVERED: Metric = Metric::higher("delivered", "MB/s");

const SIZES: [(usize, &str); 4] = [
    (64, "64 B"),
    (1 << 10, "1 KiB"),
    (4 << 10, "4 KiB"),
    (32 << 10, "32 KiB"),
];

/// zerosock's variants: name of the row, how both sides wait, and whether a receiver calls
/// `recv_each`, which takes many datagrams per call. A worker's variant is the number of senders,
/// with `-many` for `recv_each`.
const VARIANTS: [(&str, Wait, bool); 3] = [
    ("sleeping", Wait::Sleep, false),
    ("sleeping, recv_each", Wait::Sleep, true),
    ("ours spinning, recv_each", Wait::Spin, true),
];

const METHOD: &str = "Two processes. Each call sends or receives one datagram, except in the rows \
    named recv_each, where zerosock's receiver takes all available datagrams per call. UDP's send buffer \
    has 212992 bytes, its receive buffer the most that the system grants. zerosock has its default buffers: \
    425984 bytes from the sender's call to the receiver's, and 2 MiB for what arrives while the receiver makes other \
    calls. Senders write every byte; receivers check every byte and the order. Only datagrams that \
    arrived within the time count. zerosock: the receiving process embeds the device (Host), the \
    sending one is attached to it (Endpoint), and both have declared trust; each sender has an \
    endpoint, a queue of 1024 entries and a thread of its own, each receiver a host and a thread. \
    With several senders, no process is pinned to a core.";

/// Measures the table.
pub(crate) fn run(bench: &mut Bench<'_>) {
    METHOD.clone_into(&mut bench.table.method);
    let all = std::thread::available_parallelism().map_or(1, usize::from);
    let mut sender_counts = vec![(1, "one sender".to_owned(), bench.cores)];
    if all > 1 {
        sender_counts.push((all, format!("{all} senders"), Cores::ANY));
    }
    for (count, senders, cores) in sender_counts {
        for (size, size_name) in SIZES {
            let name = format!("{size_name}, {senders}");
            case(bench, cores, size, count, &name);
        }
    }
}

fn case(bench: &mut Bench<'_>, cores: Cores, size: usize, senders: usize, case: &str) {
    let wanted = VARIANTS.map(|(variant, wait, many)| (format!("{case}, {variant}"), wait, many));
    let mut rows = Vec::from(wanted);
    // Each spinning sender and its receiver would need two cores.
    let has_cores = |wait| senders == 1 || wait == Wait::Sleep;
    rows.retain(|(name, wait, _)| bench.settings.wants(name) && has_cores(*wait));
    if rows.is_empty() {
        return;
    }
    let ours = rows
        .iter()
        .map(|(_, wait, many)| (Contestant::Datagrams, *wait, *many));
    let contestants: Vec<_> = ours
        .chain([(Contestant::Udp, Wait::Sleep, false)])
        .map(|one| (one.0.title(), one))
        .collect();
    let outcomes = bench.measure(case, &contestants, |(contestant, wait, many)| {
        let many = if *many { "-many" } else { "" };
        let task = Task {
            cores,
            how: Some(format!("{senders}{many}")),
            ..bench.task(Job::Receive, *wait, size)
        };
        pair::measure(*contestant, &task)
    });
    let udp = rows.len();
    for (at, (name, ..)) in rows.iter().enumerate() {
        let rate = |outcome: &Outcome| outcome.mb_s(size);
        let table = &mut bench.table;
        table.compare(name, DELIVERED, &outcomes, (at, udp), rate);
    }
}
