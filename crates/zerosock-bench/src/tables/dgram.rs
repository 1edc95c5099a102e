//! Datagrams from process to process: ours beside UDP over the loopback interface.
//!
//! Only delivered datagrams with correct number and content count; lost ones do not. One sender,
//! and one for each core; both sides sleep, and in rows of their own zerosock spins.

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

/// How zerosock waits, and whether its receivers take many datagrams per call.
const WAYS: [(&str, Wait, bool); 3] = [
    ("sleeping", Wait::Sleep, false),
    ("sleeping, recv_each", Wait::Sleep, true),
    ("ours spinning, recv_each", Wait::Spin, true),
];

const METHOD: &str = "Two processes. Every datagram is sent with a call of its own, and received with \
    one but in the rows named recv_each; UDP always so. Send buffers are equal, 212992 bytes. UDP has \
    the largest receive buffer that the system gives, ours has 1 MiB. Senders write every byte and \
    receivers check every byte and the order; only datagrams that arrived within the time count. \
    zerosock: the receiving process has the device in itself (Host), the sending one is attached to \
    it (Endpoint), both have declared trust; each sender has an endpoint, a queue of 1024 entries \
    and a thread of its own, each receiver a host and a thread. Of several senders no side is \
    pinned.";

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
    let nobody = Cores {
        sender: None,
        receiver: None,
    };
    let mut lanes = vec![(1, "one sender".to_owned(), cores)];
    if all > 1 {
        lanes.push((all, format!("{all} senders"), nobody));
    }
    for (count, lanes, cores) in &lanes {
        for (size, size_name) in SIZES {
            let name = |way: &str| format!("{size_name}, {lanes}, {way}");
            if WAYS.iter().any(|(way, ..)| settings.wants(&name(way))) {
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
    lanes: usize,
    name: &dyn Fn(&str) -> String,
) {
    // Several pairs that spin would need two cores each.
    let ways: Vec<_> = WAYS
        .iter()
        .filter(|(way, wait, _)| settings.wants(&name(way)) && (lanes == 1 || *wait == Wait::Sleep))
        .collect();
    let udp = ways.len();
    let outcomes = alternate(settings.rounds, udp + 1, |round, who| {
        let (contestant, wait, many) = match ways.get(who) {
            Some((_, wait, many)) => (Contestant::Datagrams, *wait, *many),
            None => (Contestant::Udp, Wait::Sleep, false),
        };
        if wait == Wait::Spin && cores.sender.is_none() {
            return Err("two spinning sides need two cores".to_owned());
        }
        eprintln!("{}: round {}, {}", name(""), round + 1, contestant.title());
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
                how: Some(how(lanes, many)),
            },
        )
    });
    let figure = |who: usize| -> Result<Spread, String> {
        let outcomes = outcomes.get(who).ok_or("not measured")?;
        let outcomes = outcomes.as_ref().map_err(Clone::clone)?.iter();
        let rates = outcomes.map(|outcome| rate(outcome, size)).collect();
        Spread::of(rates, DELIVERED.higher_is_better).ok_or_else(|| "no rounds".to_owned())
    };
    let peer = figure(udp);
    if let Err(reason) = &peer {
        table.note_missing(Contestant::Udp.title(), reason);
    }
    for (who, (way, ..)) in ways.iter().enumerate() {
        table.rows.push(Row {
            name: name(way),
            metric: DELIVERED,
            ours: figure(who),
            peer_name: Contestant::Udp.title().to_owned(),
            peer: peer.clone(),
        });
    }
}

/// As the workers parse it.
fn how(lanes: usize, many: bool) -> &'static str {
    let how = if many {
        format!("{lanes}-many")
    } else {
        lanes.to_string()
    };
    // A few words in the life of a program that measures.
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
