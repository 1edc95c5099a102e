//! Datagrams from process to process: ours beside UDP over the loopback interface.
//!
//! The figure is the rate of delivered datagrams with the expected number and content; lost ones do
//! not count. Each size is measured with one sender, and with one sender per core. Both sides
//! sleep; separate rows measure zerosock spinning.

use crate::args::Settings;
use crate::pair::{self, Cores, Task};
use crate::peers::Contestant;
use crate::report::{Metric, Row, Table};
use crate::rounds::{Spread, alternate};
use crate::worker::order::{Job, Outcome, Wait};

const DELIVERED: Metric = Metric {
    name: "delivered",
    unit: "MB/s",
    higher_is_better: true,
};

const SIZES: [(usize, &str); 4] = [
    (64, "64 B"),
    (1 << 10, "1 KiB"),
    (4 << 10, "4 KiB"),
    (32 << 10, "32 KiB"),
];

/// zerosock's variants: name of the row, how both sides wait, and whether a receiver calls
/// `recv_each`, which takes many datagrams per call.
const VARIANTS: [(&str, Wait, bool); 3] = [
    ("sleeping", Wait::Sleep, false),
    ("sleeping, recv_each", Wait::Sleep, true),
    ("ours spinning, recv_each", Wait::Spin, true),
];

const METHOD: &str = "Two processes. Each call sends or receives one datagram, except in the rows \
    named recv_each, where zerosock's receiver takes all available datagrams per call. Send buffers \
    are equal, 212992 bytes. UDP has the largest receive buffer that the system grants, zerosock has \
    1 MiB. Senders write every byte; receivers check every byte and the order. Only datagrams that \
    arrived within the time count. zerosock: the receiving process embeds the device (Host), the \
    sending one is attached to it (Endpoint), and both have declared trust; each sender has an \
    endpoint, a queue of 1024 entries and a thread of its own, each receiver a host and a thread. \
    With several senders, no process is pinned to a core.";

/// Measures the table.
pub(crate) fn run(settings: &Settings, cores: Cores, machine: &str) -> Table {
    let mut table = Table {
        name: "dgram",
        method: METHOD.to_owned(),
        machine: machine.to_owned(),
        rounds: settings.rounds,
        rows: Vec::new(),
        missing: Vec::new(),
    };
    let all = std::thread::available_parallelism().map_or(1, usize::from);
    let unpinned = Cores {
        sender: None,
        receiver: None,
    };
    let mut sender_counts = vec![(1, "one sender".to_owned(), cores)];
    if all > 1 {
        sender_counts.push((all, format!("{all} senders"), unpinned));
    }
    for (count, senders, cores) in &sender_counts {
        for (size, size_name) in SIZES {
            let name = |variant: &str| format!("{size_name}, {senders}, {variant}");
            if VARIANTS
                .iter()
                .any(|(variant, ..)| settings.wants(&name(variant)))
            {
                measure(&mut table, settings, *cores, size, *count, &name);
            }
        }
    }
    table
}

fn measure(
    table: &mut Table,
    settings: &Settings,
    cores: Cores,
    size: usize,
    senders: usize,
    name: &dyn Fn(&str) -> String,
) {
    // Each spinning sender and its receiver would need two cores.
    let variants: Vec<_> = VARIANTS
        .iter()
        .filter(|(variant, wait, _)| {
            settings.wants(&name(variant)) && (senders == 1 || *wait == Wait::Sleep)
        })
        .collect();
    // UDP is the contestant after zerosock's variants.
    let udp = variants.len();
    let outcomes = alternate(settings.rounds, udp + 1, |round, index| {
        let (contestant, wait, many) = match variants.get(index) {
            Some((_, wait, many)) => (Contestant::Datagrams, *wait, *many),
            None => (Contestant::Udp, Wait::Sleep, false),
        };
        if wait == Wait::Spin && cores.sender.is_none() {
            return Err("two spinning sides need two cores".to_owned());
        }
        progress!("{}: round {}, {}", name(""), round + 1, contestant.title());
        pair::measure(
            contestant,
            &contestant.program()?,
            &Task {
                timed: Job::Receive,
                wait,
                size,
                warm: settings.warm,
                time: settings.time,
                cores,
                how: Some(how(senders, many)),
            },
        )
    });
    let figure = |index: usize| -> Result<Spread, String> {
        let outcomes = outcomes.get(index).ok_or("not measured")?;
        let outcomes = outcomes.as_ref().map_err(Clone::clone)?.iter();
        let rates = outcomes.map(|outcome| rate(outcome, size)).collect();
        Spread::of(rates, DELIVERED.higher_is_better).ok_or_else(|| "no rounds".to_owned())
    };
    let peer = figure(udp);
    if let Err(reason) = &peer {
        table.note_missing(Contestant::Udp.title(), reason);
    }
    for (index, (variant, ..)) in variants.iter().enumerate() {
        table.rows.push(Row {
            name: name(variant),
            metric: DELIVERED,
            ours: figure(index),
            peer_name: Contestant::Udp.title().to_owned(),
            peer: peer.clone(),
        });
    }
}

/// The argument `how` of a worker: the number of senders, with `-many` for `recv_each`.
fn how(senders: usize, many: bool) -> &'static str {
    let how = if many {
        format!("{senders}-many")
    } else {
        senders.to_string()
    };
    // Leaks a few bytes per row of a short-lived program.
    Box::leak(how.into_boxed_str())
}

fn rate(outcome: &Outcome, size: usize) -> f64 {
    (outcome.messages * size as u64) as f64 * 1e3 / outcome.nanoseconds as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_megabytes_a_second() {
        let outcome = Outcome {
            messages: 1000,
            nanoseconds: 1_000_000,
            ..Outcome::default()
        };
        assert_eq!(rate(&outcome, 4000), 4000.0);
    }
}
