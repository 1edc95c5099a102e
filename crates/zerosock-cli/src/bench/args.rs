//! The flags of `zerosock bench`, as typed, and what they come to.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};

use crate::bench::worker::order::Order;
use crate::failure::Failure;

/// Measure zerosock beside its peers, in one run on this machine
///
/// Contestants alternate round by round, each side of a pair a process on a core of its own, and
/// every byte is written by its sender and read by its receiver unless the row says otherwise. The
/// method of each table is in BENCHMARKING.md. Only ratios within one run mean anything.
#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    /// What to measure
    #[arg(required = true, value_enum, value_name = "TABLE")]
    tables: Vec<TableName>,

    /// Measurements of each contestant in each case [default: 5, with --quick 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: Option<u32>,

    /// Write the figures as JSON: an object for one table, an array for several; `-` is standard
    /// output, and the tables then go to standard error
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-")]
    json: Option<PathBuf>,

    /// Install the peers that are missing, with `cargo install` into ~/.cache/zerosock/peers
    #[arg(long)]
    install_peers: bool,

    /// In `rx`, receive from a VM's guest as well
    #[arg(long)]
    vm: bool,

    /// Very short measurements: to see that everything runs, not how fast
    #[arg(long)]
    quick: bool,

    /// Only the cases whose name contains this
    #[arg(
        long,
        value_name = "TEXT",
        default_value = "",
        hide_default_value = true
    )]
    case: String,

    /// Only against these peers
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    against: Vec<String>,
}

/// A table that can be asked for.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub(crate) enum TableName {
    /// Process to process: Unix stream, TCP, pipe, iceoryx2, and a bare loop as the ceiling
    Local,
    /// The device alone, our driver half as its guest: vhost-device-vsock, and a bare Unix socket
    Device,
    /// Receiving: by copying, in place, and in place with polling
    Rx,
}

/// The order of a worker, word by word.
#[derive(Debug, Args)]
pub(crate) struct WorkerArgs {
    words: Vec<String>,
}

/// What is to be measured, and how.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) tables: Vec<TableName>,
    pub(crate) rounds: usize,
    pub(crate) json: Option<PathBuf>,
    pub(crate) install_peers: bool,
    pub(crate) vm: bool,
    pub(crate) quick: bool,
    pub(crate) case: String,
    pub(crate) against: Vec<String>,
    /// Not counted at the beginning of a measurement.
    pub(crate) warm: Duration,
    /// How long is measured behind that.
    pub(crate) time: Duration,
}

impl Settings {
    pub(crate) fn new(args: BenchArgs) -> Settings {
        let mut tables = args.tables;
        let mut seen = Vec::new();
        tables.retain(|table| {
            let new = !seen.contains(table);
            seen.push(*table);
            new
        });
        let (rounds, warm, time) = if args.quick {
            (1, Duration::from_millis(5), Duration::from_millis(25))
        } else {
            (5, Duration::from_millis(100), Duration::from_millis(500))
        };
        Settings {
            tables,
            rounds: args.rounds.map_or(rounds, |rounds| rounds as usize),
            json: args.json,
            install_peers: args.install_peers,
            vm: args.vm,
            quick: args.quick,
            case: args.case,
            against: args.against,
            warm,
            time,
        }
    }

    /// Whether a case was asked for.
    pub(crate) fn wants(&self, case: &str) -> bool {
        case.contains(&self.case)
    }

    /// Whether a peer was asked for.
    pub(crate) fn is_against(&self, peer: &str) -> bool {
        self.against.is_empty() || self.against.iter().any(|name| name == peer)
    }
}

impl WorkerArgs {
    pub(crate) fn order(&self) -> Result<Order, Failure> {
        self.words.join(" ").parse().map_err(Failure::Usage)
    }
}
