//! Sends per second: copying, zero-copy, and zero-copy with a notification for each send.

use zerosock::zc::Copying;

use super::loops::{CopyMode, Posting};
use super::sockets::Carried;
use super::{
    BATCH, Measured, Ours, Window, blocks, measure_in_network, ours, ring_loop, tool, vectors,
};
use crate::args::Settings;
use crate::bench::Bench;
use crate::report::{Metric, Row};
use crate::rounds::Spread;

const RATE: Metric = Metric::higher("sends", "1000/s");

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
    Loop(CopyMode, Posting),
    /// The kernel's own test program.
    Tool(CopyMode),
    /// zerosock's sender with a fixed back-end and one flush at the end.
    Ours(CopyMode),
    /// zerosock's sender with a flush for each send.
    Flush(CopyMode),
    /// zerosock's sender, which chooses between copying and zero-copy.
    Auto(CopyMode),
}

use CopyMode::{Plain, Registered, ZeroCopy};
use Posting::{OnAsking, OnEntry};
use Variant::{Auto, Flush, Tool};

/// The bare loop, with both kinds of rings.
const LOOP_PLAIN: &[Variant] = &[
    Variant::Loop(Plain, OnEntry),
    Variant::Loop(Plain, OnAsking),
];
const LOOP_ZC: &[Variant] = &[
    Variant::Loop(ZeroCopy, OnEntry),
    Variant::Loop(ZeroCopy, OnAsking),
];
const LOOP_REGISTERED: &[Variant] = &[
    Variant::Loop(Registered, OnEntry),
    Variant::Loop(Registered, OnAsking),
];

/// Name of the peers, and the peers: the fastest of them is compared.
type Peers = (&'static str, &'static [Variant]);

/// End of a row's name, zerosock's variant, and what it is compared with.
const ROWS: [(&str, Variant, &[Peers]); 7] = [
    (
        "plain",
        Variant::Ours(Plain),
        &[("bare, plain", LOOP_PLAIN), (tool::NAME, &[Tool(Plain)])],
    ),
    (
        "zc",
        Variant::Ours(ZeroCopy),
        &[
            ("bare, zc", LOOP_ZC),
            (tool::NAME, &[Tool(ZeroCopy)]),
            ("zerosock, plain", &[Variant::Ours(Plain)]),
        ],
    ),
    (
        "zc, registered",
        Variant::Ours(Registered),
        &[
            ("bare, registered", LOOP_REGISTERED),
            (tool::NAME, &[Tool(Registered)]),
            ("zerosock, plain", &[Variant::Ours(Plain)]),
        ],
    ),
    (
        "zc + flush",
        Flush(ZeroCopy),
        &[("zerosock, one flush", &[Variant::Ours(ZeroCopy)])],
    ),
    (
        "zc + flush, registered",
        Flush(Registered),
        &[("zerosock, one flush", &[Variant::Ours(Registered)])],
    ),
    (
        "automatic",
        Auto(ZeroCopy),
        &[(
            "zerosock, plain or zc",
            &[Variant::Ours(ZeroCopy), Variant::Ours(Plain)],
        )],
    ),
    (
        "automatic, registered",
        Auto(Registered),
        &[(
            "zerosock, plain or zc",
            &[Variant::Ours(Registered), Variant::Ours(Plain)],
        )],
    ),
];

/// Measures the table.
pub(crate) fn run(bench: &mut Bench<'_>) {
    METHOD.clone_into(&mut bench.table.method);
    let missing = tool::missing();
    measure_in_network(bench, |bench, network| {
        let udp = UDP.map(|size| ("UDP", network.udp4, size));
        let tcp = TCP.map(|size| ("TCP", network.tcp4, size));
        for (protocol, carried, size) in udp.into_iter().chain(tcp) {
            case_of(
                bench,
                carried,
                size,
                &format!("{protocol}, {size} B"),
                missing.is_none(),
            );
        }
    });
    if let Some(reason) = missing {
        bench.table.note_missing(tool::NAME, &reason);
    }
}

/// Measures all contestants of the rows that were selected.
fn case_of(bench: &mut Bench<'_>, carried: Carried, size: usize, case: &str, has_tool: bool) {
    let mut rows: Vec<(String, Variant, Peers)> = Vec::new();
    for (end, us, peers) in ROWS {
        let name = format!("{case}, {end}");
        let peers = peers
            .iter()
            .filter(|(peer, _)| has_tool || *peer != tool::NAME);
        if bench.settings.wants(&name) {
            rows.extend(peers.map(|peers| (name.clone(), us, *peers)));
        }
    }
    let mut variants: Vec<(String, Variant)> = Vec::new();
    for variant in rows
        .iter()
        .flat_map(|(_, us, (_, peers))| peers.iter().chain([us]))
    {
        let contestant = (format!("{variant:?}"), *variant);
        if !variants.contains(&contestant) {
            variants.push(contestant);
        }
    }
    let outcomes = bench.measure(case, &variants, |variant| {
        measure(bench.settings, carried, size, *variant)
    });
    let figure = |variant: &Variant| -> Result<Spread, String> {
        let at = variants.iter().position(|(_, one)| one == variant);
        outcomes.figure(at.ok_or("not measured")?, RATE, rate)
    };
    for (name, us, (peer_name, peers)) in rows {
        let peers: Result<Vec<_>, _> = peers.iter().map(figure).collect();
        let best = |peers: Vec<Spread>| {
            (peers.into_iter())
                .max_by(|one, other| one.median.total_cmp(&other.median))
                .ok_or_else(|| "no peer".to_owned())
        };
        bench.table.rows.push(Row {
            name,
            metric: RATE,
            ours: figure(&us),
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
        Variant::Tool(mode) => return tool::run(&carried, size, mode),
        Variant::Loop(Registered, posting) => {
            return ring_loop(&carried, blocks(size)?, Registered, posting, window);
        }
        Variant::Loop(mode, posting) => {
            return ring_loop(&carried, vectors(size), mode, posting, window);
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
}
