//! Sends per second: copying, zero-copy, and zero-copy with a notification for each send.

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

const METHOD: &str = "One thread, pinned to a core, sends 64 buffers in turn over io_uring, 32 per \
    submission. UDP goes to an ifb device, which drops packets unread, so that the kernel copies only \
    when a send requests it. TCP goes over a veth pair to a thread on the other core, which discards \
    the bytes (MSG_TRUNC); the receiving side of the pair copies, on that core. Congestion control is \
    Reno, which does not pace. `bare` is a loop that only submits prepared requests and reads \
    completions: the upper limit with one request per send. It runs twice, once with a ring that only \
    one thread uses (DEFER_TASKRUN); the faster one is compared. `io_uring_zerocopy_tx` is the kernel's \
    own test program: one buffer, 1.2 s, no warm-up, and no order on TCP. zerosock merges the waiting \
    sends of a stream into one request. `flush`: each send requests a notification of its own; \
    otherwise there is one at the end. `registered`: the buffers are blocks of a pool. Completed sends \
    are counted, not requests. The interval is the 95 % interval of the mean of the rounds' ratios.";

/// Contestants, and how each sends.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Variant {
    /// The kernel's interface without zerosock.
    Bare(Bare, Posting),
    /// The kernel's own test program.
    Tool(Bare),
    /// zerosock's sender with a fixed back-end and one flush at the end.
    Ours(Bare),
    /// zerosock's sender with a flush for each send.
    Flush(Bare),
    /// zerosock's sender, which chooses between copying and zero-copy.
    Auto(Bare),
}

use Bare::{Plain, Registered, ZeroCopy};
use Posting::{OnAsking, OnEntry};

const ALL: [Variant; 16] = [
    Variant::Bare(Plain, OnEntry),
    Variant::Bare(Plain, OnAsking),
    Variant::Ours(Plain),
    Variant::Bare(ZeroCopy, OnEntry),
    Variant::Bare(ZeroCopy, OnAsking),
    Variant::Ours(ZeroCopy),
    Variant::Flush(ZeroCopy),
    Variant::Auto(ZeroCopy),
    Variant::Bare(Registered, OnEntry),
    Variant::Bare(Registered, OnAsking),
    Variant::Ours(Registered),
    Variant::Flush(Registered),
    Variant::Auto(Registered),
    Variant::Tool(Plain),
    Variant::Tool(ZeroCopy),
    Variant::Tool(Registered),
];

/// End of a row's name, zerosock's variant, name of the peers, and the peers: the fastest of them
/// is compared.
type Compared = (&'static str, Variant, &'static str, &'static [Variant]);

/// The compared pairs.
const ROWS: [Compared; 12] = [
    (
        "plain",
        Variant::Ours(Plain),
        "bare, plain",
        &[
            Variant::Bare(Plain, OnEntry),
            Variant::Bare(Plain, OnAsking),
        ],
    ),
    (
        "plain",
        Variant::Ours(Plain),
        tool::NAME,
        &[Variant::Tool(Plain)],
    ),
    (
        "zc",
        Variant::Ours(ZeroCopy),
        "bare, zc",
        &[
            Variant::Bare(ZeroCopy, OnEntry),
            Variant::Bare(ZeroCopy, OnAsking),
        ],
    ),
    (
        "zc",
        Variant::Ours(ZeroCopy),
        tool::NAME,
        &[Variant::Tool(ZeroCopy)],
    ),
    (
        "zc",
        Variant::Ours(ZeroCopy),
        "zerosock, plain",
        &[Variant::Ours(Plain)],
    ),
    (
        "zc, registered",
        Variant::Ours(Registered),
        "bare, registered",
        &[
            Variant::Bare(Registered, OnEntry),
            Variant::Bare(Registered, OnAsking),
        ],
    ),
    (
        "zc, registered",
        Variant::Ours(Registered),
        tool::NAME,
        &[Variant::Tool(Registered)],
    ),
    (
        "zc, registered",
        Variant::Ours(Registered),
        "zerosock, plain",
        &[Variant::Ours(Plain)],
    ),
    (
        "zc + flush",
        Variant::Flush(ZeroCopy),
        "zerosock, one flush",
        &[Variant::Ours(ZeroCopy)],
    ),
    (
        "zc + flush, registered",
        Variant::Flush(Registered),
        "zerosock, one flush",
        &[Variant::Ours(Registered)],
    ),
    (
        "automatic",
        Variant::Auto(ZeroCopy),
        "zerosock, plain or zc",
        &[Variant::Ours(ZeroCopy), Variant::Ours(Plain)],
    ),
    (
        "automatic, registered",
        Variant::Auto(Registered),
        "zerosock, plain or zc",
        &[Variant::Ours(Registered), Variant::Ours(Plain)],
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
                    let is_tool = peers.iter().any(|peer| matches!(peer, Variant::Tool(_)));
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
    let is_compared = |variant: &Variant| {
        (wanted.iter()).any(|(_, us, _, peers)| us == variant || peers.contains(variant))
    };
    let all: Vec<Variant> = ALL.into_iter().filter(is_compared).collect();
    let outcomes = alternate(settings.rounds, all.len(), |round, index| {
        progress!("{case}: round {}, {:?}", round + 1, all[index]);
        measure(settings, carried, size, all[index])
    });
    let figure = |variant: Variant| -> Result<Spread, String> {
        let at = all.iter().position(|&one| one == variant);
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
    variant: Variant,
) -> Result<Measured, String> {
    let window = Window::new(settings.warm, settings.time);
    let (memory, copying, flush) = match variant {
        Variant::Tool(how) => return tool::run(&carried, size, how),
        Variant::Bare(Registered, posting) => {
            return bare_ring(&carried, blocks(size)?, Registered, posting, window);
        }
        Variant::Bare(how, posting) => {
            return bare_ring(&carried, vectors(size), how, posting, window);
        }
        Variant::Ours(Plain) => (Plain, Copying::Always, false),
        Variant::Ours(memory) => (memory, Copying::Never, false),
        Variant::Flush(memory) => (memory, Copying::Never, true),
        Variant::Auto(memory) => (memory, Copying::Auto, false),
    };
    let how = Ours {
        backend: None,
        copying,
        batch: BATCH,
        flush,
        notify_every: None,
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
    fn every_row_compares_contestants_that_are_measured() {
        for (name, us, peer_name, peers) in ROWS {
            let all_of_them = peers.iter().all(|peer| ALL.contains(peer));
            assert!(ALL.contains(&us) && all_of_them, "{name}, {peer_name}");
        }
    }
}
