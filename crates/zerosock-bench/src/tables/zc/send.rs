//! Sends per second: with a copy, without, and with a notification for each.

use zerosock::zc::Copying;
use zerosock_zc::sys::bare::{Bare, Posting};

use super::sockets::{Carried, with_network};
use super::{BATCH, Measured, Ours, Window, bare_ring, blocks, ours, tool, vectors};
use crate::args::Settings;
use crate::pair::Cores;
use crate::report::{Metric, Row, Table};
use crate::rounds::{Spread, alternate};

const RATE: Metric = Metric {
    name: "sends",
    unit: "1000/s",
    higher_is_better: true,
};

const UDP: [usize; 7] = [600, 1000, 1200, 1500, 4000, 8000, 65_000];
const TCP: [usize; 3] = [4000, 16_000, 65_000];

const METHOD: &str = "One thread on a core of its own sends 64 buffers in turn, 32 to each \
    submission, over io_uring. UDP goes into an ifb device, which drops what it gets without \
    looking at it, so that the kernel copies nothing that it is not asked to; TCP goes over a \
    veth pair to a thread on the other core, which takes it unseen (MSG_TRUNC); the receiving \
    side of the pair copies, on that core; congestion control is Reno, which does not pace. \
    `bare` is a loop written for this table that does nothing but submit prepared requests and \
    read completions: the limit of one request for each send. There are two, one with a ring that \
    is one thread's alone (DEFER_TASKRUN); the better counts. `io_uring_zerocopy_tx` is the \
    kernel's own test program: one buffer, 1.2 s, no warm-up, and on TCP no order. Ours makes one \
    request of the sends of a stream that wait together. `flush`: every send closes its slot's \
    notifier and is told of by one notification; else there is one at the end. `registered`: the \
    buffers are blocks of a pool. What counts is sends that are over, not requests. The interval \
    is that of the mean of the rounds' ratios, 95 %.";

/// Contestants and the way each sends.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Who {
    /// The kernel's interface without zerosock.
    Bare(Bare, Posting),
    /// The kernel's own test program.
    Tool(Bare),
    /// zerosock's sender with a fixed back-end and one flush at the end.
    Ours(Bare),
    /// With a flush for each send.
    Flush(Bare),
    /// Choosing between copying and zero-copy by itself.
    Auto(Bare),
}

use Bare::{Plain, Registered, ZeroCopy};
use Posting::{OnAsking, OnEntry};

const ALL: [Who; 16] = [
    Who::Bare(Plain, OnEntry),
    Who::Bare(Plain, OnAsking),
    Who::Ours(Plain),
    Who::Bare(ZeroCopy, OnEntry),
    Who::Bare(ZeroCopy, OnAsking),
    Who::Ours(ZeroCopy),
    Who::Flush(ZeroCopy),
    Who::Auto(ZeroCopy),
    Who::Bare(Registered, OnEntry),
    Who::Bare(Registered, OnAsking),
    Who::Ours(Registered),
    Who::Flush(Registered),
    Who::Auto(Registered),
    Who::Tool(Plain),
    Who::Tool(ZeroCopy),
    Who::Tool(Registered),
];

/// End of a row's name, zerosock's way, name of the peers, and the peers: the best of them counts.
type Compared = (&'static str, Who, &'static str, &'static [Who]);

/// The compared pairs.
const ROWS: [Compared; 12] = [
    (
        "plain",
        Who::Ours(Plain),
        "bare, plain",
        &[Who::Bare(Plain, OnEntry), Who::Bare(Plain, OnAsking)],
    ),
    ("plain", Who::Ours(Plain), tool::NAME, &[Who::Tool(Plain)]),
    (
        "zc",
        Who::Ours(ZeroCopy),
        "bare, zc",
        &[Who::Bare(ZeroCopy, OnEntry), Who::Bare(ZeroCopy, OnAsking)],
    ),
    (
        "zc",
        Who::Ours(ZeroCopy),
        tool::NAME,
        &[Who::Tool(ZeroCopy)],
    ),
    (
        "zc",
        Who::Ours(ZeroCopy),
        "zerosock, plain",
        &[Who::Ours(Plain)],
    ),
    (
        "zc, registered",
        Who::Ours(Registered),
        "bare, registered",
        &[
            Who::Bare(Registered, OnEntry),
            Who::Bare(Registered, OnAsking),
        ],
    ),
    (
        "zc, registered",
        Who::Ours(Registered),
        tool::NAME,
        &[Who::Tool(Registered)],
    ),
    (
        "zc, registered",
        Who::Ours(Registered),
        "zerosock, plain",
        &[Who::Ours(Plain)],
    ),
    (
        "zc + flush",
        Who::Flush(ZeroCopy),
        "zerosock, one flush",
        &[Who::Ours(ZeroCopy)],
    ),
    (
        "zc + flush, registered",
        Who::Flush(Registered),
        "zerosock, one flush",
        &[Who::Ours(Registered)],
    ),
    (
        "automatic",
        Who::Auto(ZeroCopy),
        "zerosock, plain or zc",
        &[Who::Ours(ZeroCopy), Who::Ours(Plain)],
    ),
    (
        "automatic, registered",
        Who::Auto(Registered),
        "zerosock, plain or zc",
        &[Who::Ours(Registered), Who::Ours(Plain)],
    ),
];

/// Measures the table.
pub(crate) fn run(settings: &Settings, cores: Cores, machine: &str) -> Table {
    let mut table = Table {
        name: "send",
        method: METHOD.to_owned(),
        machine: machine.to_owned(),
        rounds: settings.rounds,
        rows: Vec::new(),
        missing: Vec::new(),
    };
    let missing = tool::missing();
    let measured = with_network(cores, |network| {
        let udp = UDP.map(|size| ("UDP", network.udp4, size));
        let tcp = TCP.map(|size| ("TCP", network.tcp4, size));
        let mut rows = Vec::new();
        for (protocol, carried, size) in udp.into_iter().chain(tcp) {
            let case = format!("{protocol}, {size} B");
            let wanted: Vec<_> = ROWS
                .into_iter()
                .filter(|(row, .., peers)| {
                    let is_tool = peers.iter().any(|peer| matches!(peer, Who::Tool(_)));
                    settings.wants(&format!("{case}, {row}")) && !(is_tool && missing.is_some())
                })
                .collect();
            case_of(settings, carried, size, &case, &wanted, &mut rows);
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
    if let Some(reason) = missing {
        table.note_missing(tool::NAME, &reason);
    }
    table
}

/// Measures all contestants of these rows.
fn case_of(
    settings: &Settings,
    carried: Carried,
    size: usize,
    case: &str,
    wanted: &[Compared],
    rows: &mut Vec<Row>,
) {
    let takes_part =
        |who: &Who| (wanted.iter()).any(|(_, us, _, peers)| us == who || peers.contains(who));
    let all: Vec<Who> = ALL.into_iter().filter(takes_part).collect();
    let outcomes = alternate(settings.rounds, all.len(), |round, who| {
        eprintln!("{case}: round {}, {:?}", round + 1, all[who]);
        measure(settings, carried, size, all[who])
    });
    let figure = |who: Who| -> Result<Spread, String> {
        let at = all.iter().position(|&one| one == who);
        let outcomes = at.and_then(|at| outcomes.get(at)).ok_or("not measured")?;
        let rates = outcomes.as_ref().map_err(Clone::clone)?.iter().map(rate);
        Spread::of(rates.collect(), RATE.higher_is_better).ok_or_else(|| "no rounds".to_owned())
    };
    for &(name, us, peer_name, peers) in wanted {
        let peers = peers.iter().map(|&peer| figure(peer));
        let peers: Result<Vec<_>, _> = peers.collect();
        let best = |peers: Vec<Spread>| {
            (peers.into_iter())
                .max_by(|one, other| one.median.total_cmp(&other.median))
                .ok_or_else(|| "no peer".to_owned())
        };
        rows.push(Row {
            name: format!("{case}, {name}"),
            metric: RATE,
            ours: figure(us),
            peer_name: peer_name.to_owned(),
            peer: peers.and_then(best),
        });
    }
}

fn measure(
    settings: &Settings,
    carried: Carried,
    size: usize,
    who: Who,
) -> Result<Measured, String> {
    let window = Window::new(settings.warm, settings.time);
    let (memory, copying, flush) = match who {
        Who::Tool(how) => return tool::run(&carried, size, how),
        Who::Bare(Registered, posting) => {
            return bare_ring(&carried, blocks(size)?, Registered, posting, window);
        }
        Who::Bare(how, posting) => {
            return bare_ring(&carried, vectors(size), how, posting, window);
        }
        Who::Ours(Plain) => (Plain, Copying::Always, false),
        Who::Ours(memory) => (memory, Copying::Never, false),
        Who::Flush(memory) => (memory, Copying::Never, true),
        Who::Auto(memory) => (memory, Copying::Auto, false),
    };
    let how = Ours {
        backend: None,
        copying,
        batch: BATCH,
        flush,
        ask: None,
    };
    match memory {
        Registered => ours(&carried, blocks(size)?, how, window),
        Plain | ZeroCopy => ours(&carried, vectors(size), how, window),
    }
}

fn rate(measured: &Measured) -> f64 {
    measured.counts.sends as f64 / measured.time.as_secs_f64() / 1e3
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_rate_is_thousands_a_second() {
        let mut measured = Measured {
            time: Duration::from_millis(500),
            ..Measured::default()
        };
        measured.counts.sends = 1_000_000;
        assert_eq!(rate(&measured), 2000.0);
    }

    #[test]
    fn every_row_is_of_contestants_that_take_part() {
        for (name, us, peer_name, peers) in ROWS {
            let all_of_them = peers.iter().all(|peer| ALL.contains(peer));
            assert!(ALL.contains(&us) && all_of_them, "{name}, {peer_name}");
        }
    }
}
