//! The flags of `zerosock-bench`, as typed, and what they come to.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Parser, ValueEnum};
use zerosock_cli::Failure;

use crate::binary::Binary;
use crate::placement::Placement;

/// Measure zerosock beside its peers, in one run on this machine
///
/// Contestants alternate round by round, each side of a pair a process on a core of its own, and
/// every byte is written by its sender and read by its receiver unless the row says otherwise. The
/// method of each table is in bench/results. Compare figures only within one run
#[derive(Debug, Parser)]
#[command(name = "zerosock-bench", version, max_term_width = 100)]
pub(crate) struct BenchArgs {
    /// What to measure
    #[arg(value_enum, value_name = "TABLE", required_unless_present = "json")]
    tables: Vec<TableName>,

    /// Measurements of each contestant in each case [default: 5, with --quick 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: Option<u32>,

    /// Write the figures as JSON: an object for one table, an array for several. Without FILE, or
    /// with `-`, to standard output, and the tables then go to standard error. A word that names a
    /// table is one: call a file of that name `./local`
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-")]
    json: Option<PathBuf>,

    /// Install the peers that are missing: with `cargo install` into ~/.cache/zerosock/peers, socat,
    /// HAProxy, iperf3 and DPDK's libraries with apt-get
    #[arg(long)]
    install_peers: bool,

    /// In `local`, `rx`, `relay` and `net`, with a VM's guest as well: boots Debian's Linux 6.12 under QEMU
    #[arg(long)]
    vm: bool,

    /// Very short measurements: to see that everything runs, not how fast
    #[arg(long)]
    quick: bool,

    /// Only the cases with this text in their name; can be repeated
    #[arg(long, value_name = "TEXT")]
    case: Vec<String>,

    /// Only against this peer; can be repeated. With --against-binary: also against this peer
    #[arg(long, value_name = "NAME")]
    against: Vec<String>,

    /// In `local`, `device`, `relay` and `net`, compare with another release instead of with peers: the path of
    /// its `zerosock` or `zerosock-bench`; can be repeated. Cases of 64 B have 12 rounds or more
    #[arg(long, value_name = "PATH")]
    against_binary: Vec<PathBuf>,

    /// In the same tables, the cores of the device or relay, of its driver or connecting program, and of the
    /// program on the host; can be repeated, each placement is a table. `all`: the first two cores as 0/1/1,
    /// 0/0/1 and 0/1/0 [default with --against-binary: all]
    #[arg(long, value_name = "DEVICE/DRIVER/HOST")]
    placement: Vec<String>,

    /// With --against-binary, fail if a ratio is below this and not by chance
    #[arg(long, value_name = "RATIO", requires = "against_binary")]
    fail_below: Option<f64>,
}

/// A ratio below it is named under the table of a comparison with another release.
const LOSS: f64 = 0.97;

/// A table that can be asked for.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub(crate) enum TableName {
    /// Process to process: Unix stream, TCP, pipe, iceoryx2, and a bare loop as the ceiling
    Local,
    /// The device alone, our driver half as its guest: vhost-device-vsock, and a bare Unix socket; `zerosock` is
    /// the device of zerosock-bench itself, not of an installed `zerosock`
    Device,
    /// Receiving: by copying, in place, and in place with polling
    Rx,
    /// A connection's rate beside a reader that never returns its leases
    Hold,
    /// Very many connections: memory, how fast they come and go, and beside a bulk stream
    Scale,
    /// Datagrams: ours beside UDP over the loopback interface
    Dgram,
    /// Zero-copy sends a second on the kernel's sockets, beside a bare io_uring loop
    Send,
    /// What it costs to know that a sent buffer is free, beside the error queue
    Notify,
    /// Relays between kernel sockets, and guests' ports: socat and HAProxy
    Relay,
    /// Network devices: QEMU and user-mode Linux without us, DPDK, passt
    Net,
}

impl TableName {
    /// Whether its roles can be placed, and a role be that of another release.
    fn is_of_roles(self) -> bool {
        matches!(
            self,
            TableName::Local | TableName::Device | TableName::Relay | TableName::Net
        )
    }

    /// Its word on the command line.
    pub(crate) fn as_typed(self) -> String {
        let value = self.to_possible_value();
        value.map_or_else(String::new, |value| value.get_name().to_owned())
    }
}

/// What to measure, and how.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) tables: Vec<TableName>,
    pub(crate) rounds: usize,
    pub(crate) json: Option<PathBuf>,
    pub(crate) install_peers: bool,
    pub(crate) vm: bool,
    pub(crate) quick: bool,
    /// Texts of which a selected case has one; none: all cases.
    pub(crate) cases: Vec<String>,
    pub(crate) against: Vec<String>,
    /// The releases to compare with.
    pub(crate) releases: Vec<Binary>,
    /// Each is a table of its own; none: one table, without a placement.
    pub(crate) placements: Vec<Placement>,
    /// Ratios below it are losses.
    pub(crate) loss: f64,
    /// Whether a loss is a failure.
    pub(crate) fails: bool,
    /// Warm-up time at the beginning of a measurement, not counted.
    pub(crate) warm: Duration,
    /// Measured time after the warm-up.
    pub(crate) time: Duration,
}

impl Settings {
    pub(crate) fn new(args: BenchArgs) -> Result<Settings, Failure> {
        let (mut tables, mut json) = (args.tables, args.json);
        // `--json local`: the option's value is optional, and this one is a table.
        let table = json.as_deref().and_then(Path::to_str);
        if let Some(table) = table.and_then(|word| TableName::from_str(word, false).ok()) {
            tables.insert(0, table);
            json = Some("-".into());
        }
        if tables.is_empty() {
            return Err(Failure::usage(
                "which table? give one or more of local, device, rx, hold, scale, dgram, send, notify, \
                 relay and net",
            ));
        }
        let mut seen = Vec::new();
        tables.retain(|table| {
            let new = !seen.contains(table);
            seen.push(*table);
            new
        });
        let is_of_roles = args.against_binary.is_empty() && args.placement.is_empty();
        if let Some(other) = tables
            .iter()
            .find(|table| !is_of_roles && !table.is_of_roles())
        {
            return Err(Failure::Usage(format!(
                "--against-binary and --placement are for local, device, relay and net, not for {}",
                other.as_typed()
            )));
        }
        let (rounds, warm, time) = if args.quick {
            (1, Duration::from_millis(5), Duration::from_millis(25))
        } else {
            (5, Duration::from_millis(100), Duration::from_millis(500))
        };
        Ok(Settings {
            tables,
            rounds: args.rounds.map_or(rounds, |rounds| rounds as usize),
            json,
            install_peers: args.install_peers,
            vm: args.vm,
            quick: args.quick,
            cases: args.case,
            against: args.against,
            placements: placements(&args.placement, !args.against_binary.is_empty())?,
            releases: releases(args.against_binary)?,
            loss: args.fail_below.unwrap_or(LOSS),
            fails: args.fail_below.is_some(),
            warm,
            time,
        })
    }

    /// The tables to measure, each in its placements.
    pub(crate) fn runs(&self) -> Vec<(TableName, Option<Placement>)> {
        let mut runs = Vec::new();
        for &table in &self.tables {
            let mut pairs = Vec::new();
            for &placement in &self.placements {
                // `local` has two sides: the program on the host is the device.
                let pair =
                    (table == TableName::Local).then_some((placement.device, placement.driver));
                if pair.is_none() || !pairs.contains(&pair) {
                    runs.push((table, Some(placement)));
                }
                pairs.push(pair);
            }
            if self.placements.is_empty() {
                runs.push((table, None));
            }
        }
        runs
    }

    /// Whether a case was selected.
    pub(crate) fn wants(&self, case: &str) -> bool {
        self.cases.is_empty() || self.cases.iter().any(|text| case.contains(text))
    }

    /// Whether a peer was selected.
    pub(crate) fn is_against(&self, peer: &str) -> bool {
        let all = self.against.is_empty() && self.releases.is_empty();
        all || self.against.iter().any(|name| name == peer)
    }
}

fn placements(words: &[String], is_comparison: bool) -> Result<Vec<Placement>, Failure> {
    let mut placements = Vec::new();
    let default = (is_comparison && words.is_empty()).then(|| "all".to_owned());
    for word in words.iter().chain(&default) {
        if word == "all" {
            placements.extend(Placement::all());
        } else {
            let placement = word.parse();
            placements.push(
                placement
                    .map_err(|error| Failure::Usage(format!("--placement {word}: {error}")))?,
            );
        }
    }
    Ok(placements)
}

fn releases(paths: Vec<PathBuf>) -> Result<Vec<Binary>, Failure> {
    let mut releases = Vec::new();
    for (path, number) in paths.into_iter().zip(1..) {
        if number > Binary::MOST {
            return Err(Failure::usage("--against-binary: too many releases"));
        }
        // Below it is run from other directories, and must be no name on the PATH.
        let real = path.canonicalize().ok().filter(|path| path.is_file());
        let real = real.ok_or_else(|| {
            Failure::Usage(format!("--against-binary {}: no file", path.display()))
        })?;
        releases.push(Binary::other(Box::leak(real.into_boxed_path()), number));
    }
    Ok(releases)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(line: &str) -> Result<Settings, String> {
        let words = std::iter::once("bench").chain(line.split_whitespace());
        let args = BenchArgs::try_parse_from(words).map_err(|error| error.to_string())?;
        Settings::new(args).map_err(|failure| failure.to_string())
    }

    #[test]
    fn json_does_not_eat_the_name_of_a_table() {
        use TableName::{Device, Local, Rx};
        let stdout = Some(PathBuf::from("-"));
        for (line, tables, json) in [
            ("local", vec![Local], None),
            (
                "local device rx --json",
                vec![Local, Device, Rx],
                stdout.clone(),
            ),
            ("--json local", vec![Local], stdout.clone()),
            ("--json local rx", vec![Local, Rx], stdout.clone()),
            ("--json - local", vec![Local], stdout.clone()),
            ("--json=local rx rx", vec![Local, Rx], stdout),
            ("--json ./local rx", vec![Rx], Some("./local".into())),
            ("rx --json figures", vec![Rx], Some("figures".into())),
        ] {
            let settings = settings(line).unwrap();
            assert_eq!((settings.tables, settings.json), (tables, json), "{line}");
        }
    }

    #[test]
    fn a_comparison_is_of_tables_with_roles_in_all_placements() {
        let own = std::env::current_exe().unwrap();
        let own = own.display();
        let compared = settings(&format!("device local --against-binary {own}")).unwrap();
        assert_eq!(compared.placements, Placement::all());
        let count = |table| {
            let runs = compared.runs();
            runs.iter().filter(|(of, _)| *of == table).count()
        };
        let all = Placement::all().len();
        assert_eq!(count(TableName::Device), all);
        // Two of the three differ only in the core of the host.
        assert_eq!(count(TableName::Local), if all == 3 { 2 } else { 1 });
        assert!(!compared.is_against("unix"));
        assert!(settings("device").unwrap().runs() == [(TableName::Device, None)]);
        for (line, wanted) in [
            (format!("rx --against-binary {own}"), "not for rx"),
            ("hold --placement all".to_owned(), "not for hold"),
            ("device --placement 0".to_owned(), "such as 0/1/1"),
            ("device --against-binary /nowhere".to_owned(), "no file"),
            ("device --fail-below 0.9".to_owned(), "--against-binary"),
        ] {
            let said = settings(&line).unwrap_err();
            assert!(said.contains(wanted), "{line}: {said}");
        }
    }

    #[test]
    fn a_run_without_a_table_says_so() {
        for line in ["", "--json", "--json figures"] {
            let said = settings(line).unwrap_err();
            assert!(
                said.contains("TABLE") || said.contains("which table"),
                "{line}: {said}"
            );
        }
        assert!(settings("speed").unwrap_err().contains("possible values"));
    }
}
