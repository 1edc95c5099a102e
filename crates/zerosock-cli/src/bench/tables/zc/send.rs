//! How many sends a second: with a copy, without, and with a notification asked for each.

use zerosock::zc::Copying;
use zerosock_sys::zc::bare::Bare;

use super::sockets::{Carried, with_network};
use super::{BATCH, Measured, Ours, Window, bare_ring, blocks, ours, vectors};
use crate::bench::args::Settings;
use crate::bench::pair::Cores;
use crate::bench::report::{Metric, Row, Table};
use crate::bench::rounds::{Spread, alternate};

const RATE: Metric = Metric {
    name: "sends",
    unit: "1000/s",
    higher_is_better: true,
};

const UDP: [usize; 7] = [600, 1000, 1200, 1500, 4000, 8000, 65_000];
const TCP: [usize; 3] = [4000, 16_000, 65_000];

const METHOD: &str = "One thread on a core of its own sends 64 buffers in turn, 32 to each submission, \
    over io_uring. UDP goes into an ifb device, which drops what it gets without looking at it, so that \
    the kernel copies nothing that it is not asked to; TCP goes over a veth pair to a thread on the \
    other core, which copies on receiving. `bare` is a loop written for this table that does nothing \
    but submit prepared requests and read completions: the limit. `flush`: every send closes its \
    slot's notifier and is told of by one notification; else there is one at the end. `registered`: \
    the buffers are blocks of a pool. What counts is sends that are over, not requests. The interval is that of the mean of the rounds' ratios, 95 %.";

/// Who takes part.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Who {
    Bare(Bare),
    Plain,
    Zc { flush: bool, registered: bool },
    Auto { registered: bool },
}

const ALL: [Who; 10] = [
    Who::Bare(Bare::Plain),
    Who::Plain,
    Who::Bare(Bare::ZeroCopy),
    Who::Zc {
        flush: false,
        registered: false,
    },
    Who::Zc {
        flush: true,
        registered: false,
    },
    Who::Auto { registered: false },
    Who::Bare(Bare::Registered),
    Who::Zc {
        flush: false,
        registered: true,
    },
    Who::Zc {
        flush: true,
        registered: true,
    },
    Who::Auto { registered: true },
];

/// What is set beside what: ours, and the peer.
const ROWS: [(&str, Who, &str, Who); 9] = [
    ("plain", Who::Plain, "bare, plain", Who::Bare(Bare::Plain)),
    (
        "zc",
        Who::Zc {
            flush: false,
            registered: false,
        },
        "bare, zc",
        Who::Bare(Bare::ZeroCopy),
    ),
    (
        "zc, registered",
        Who::Zc {
            flush: false,
            registered: true,
        },
        "bare, registered",
        Who::Bare(Bare::Registered),
    ),
    (
        "zc + flush",
        Who::Zc {
            flush: true,
            registered: false,
        },
        "zerosock, one flush",
        Who::Zc {
            flush: false,
            registered: false,
        },
    ),
    (
        "zc + flush, registered",
        Who::Zc {
            flush: true,
            registered: true,
        },
        "zerosock, one flush",
        Who::Zc {
            flush: false,
            registered: true,
        },
    ),
    (
        "zc",
        Who::Zc {
            flush: false,
            registered: false,
        },
        "zerosock, plain",
        Who::Plain,
    ),
    (
        "zc, registered",
        Who::Zc {
            flush: false,
            registered: true,
        },
        "zerosock, plain",
        Who::Plain,
    ),
    (
        "automatic",
        Who::Auto { registered: false },
        "zerosock, plain or zc",
        Who::Zc {
            flush: false,
            registered: false,
        },
    ),
    (
        "automatic, registered",
        Who::Auto { registered: true },
        "zerosock, plain or zc",
        Who::Zc {
            flush: false,
            registered: true,
        },
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
    let measured = with_network(cores, |network| {
        let udp = UDP.map(|size| ("UDP", network.udp4, size));
        let tcp = TCP.map(|size| ("TCP", network.tcp4, size));
        let mut rows = Vec::new();
        for (protocol, carried, size) in udp.into_iter().chain(tcp) {
            let case = format!("{protocol}, {size} B");
            if ROWS
                .iter()
                .any(|(row, ..)| settings.wants(&format!("{case}, {row}")))
            {
                case_of(settings, carried, size, &case, &mut rows);
            }
        }
        Ok(rows)
    });
    match measured {
        Ok(rows) => table.rows = rows,
        Err(reason) => table.note_missing("zerosock", &reason),
    }
    table
}

fn case_of(settings: &Settings, carried: Carried, size: usize, case: &str, rows: &mut Vec<Row>) {
    let outcomes = alternate(settings.rounds, ALL.len(), |round, who| {
        eprintln!("{case}: round {}, {:?}", round + 1, ALL[who]);
        measure(settings, carried, size, ALL[who])
    });
    let figure = |who: Who| -> Result<Spread, String> {
        let at = ALL.iter().position(|&one| one == who);
        let outcomes = at.and_then(|at| outcomes.get(at)).ok_or("not measured")?;
        let rates = outcomes.as_ref().map_err(Clone::clone)?.iter().map(rate);
        Spread::of(rates.collect(), RATE.higher_is_better).ok_or_else(|| "no rounds".to_owned())
    };
    for (name, us, peer_name, peer) in ROWS {
        let name = format!("{case}, {name}");
        if !settings.wants(&name) {
            continue;
        }
        let peer = match us {
            // The better of the two that it chooses from.
            Who::Auto { .. } => match (figure(peer), figure(Who::Plain)) {
                (Ok(zc), Ok(plain)) => Ok(if zc.median > plain.median { zc } else { plain }),
                (failed @ Err(_), _) | (_, failed) => failed,
            },
            _ => figure(peer),
        };
        rows.push(Row {
            name,
            metric: RATE,
            ours: figure(us),
            peer_name: peer_name.to_owned(),
            peer,
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
    let how = |copying, flush| Ours {
        backend: None,
        copying,
        batch: BATCH,
        flush,
        ask: None,
    };
    match who {
        Who::Bare(Bare::Registered) => bare_ring(&carried, blocks(size)?, Bare::Registered, window),
        Who::Bare(bare) => bare_ring(&carried, vectors(size), bare, window),
        Who::Plain => ours(&carried, vectors(size), how(Copying::Always, false), window),
        Who::Zc {
            flush,
            registered: false,
        } => ours(&carried, vectors(size), how(Copying::Never, flush), window),
        Who::Zc {
            flush,
            registered: true,
        } => ours(&carried, blocks(size)?, how(Copying::Never, flush), window),
        Who::Auto { registered: false } => {
            ours(&carried, vectors(size), how(Copying::Auto, false), window)
        }
        Who::Auto { registered: true } => {
            ours(&carried, blocks(size)?, how(Copying::Auto, false), window)
        }
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
        for (name, us, peer_name, peer) in ROWS {
            assert!(
                ALL.contains(&us) && ALL.contains(&peer),
                "{name}, {peer_name}"
            );
        }
    }
}
