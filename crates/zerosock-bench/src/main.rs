//! `zerosock-bench`: one harness for all tables. Rounds of zerosock and of its peers alternate in
//! one run.
//!
//! # Invariants
//! - A contestant that cannot run is listed as missing, with the reason.
//! - A receiver reads every byte unless the row says otherwise.
//! - A ratio above 1 always means that zerosock is better.
//!
//! The program is also the measured device and each worker process: the first argument can be
//! [`WORKER`], [`guest::NAME`], [`instructions::NAME`] or a subcommand of `zerosock`. If its file has the name
//! [`COMMAND`] or [`net::COMMAND_FILE`], it is the whole command `zerosock` besides: a subcommand can have the name
//! of a table. In guests, also those of tests, it is `/bin/zerosock`.
#![deny(unsafe_code)]

mod args;
mod bench;
mod binary;
mod image;
mod instructions;
mod machine;
mod namespace;
mod pair;
mod peers;
mod placement;
mod processes;
mod report;
mod rounds;
mod tables;
mod vm;
mod worker;

use std::fs;
use std::path::Path;
use std::process::ExitCode;

use clap::Parser;
use zerosock_cli::Failure;
use zerosock_testkit::guest;

use args::{BenchArgs, Settings, TableName};
use bench::Bench;
use binary::WORKER;
use placement::Placement;
use report::{Comparison, Table};
use tables::net;
use tables::relay::{self, COMMAND};

/// The subcommands of `zerosock` that measurements start.
const PRODUCT: [&str; 2] = ["serve", "parent-watchdog"];

fn main() -> ExitCode {
    let name = std::env::args_os().next().unwrap_or_default();
    let file = Path::new(&name).file_name();
    let first = std::env::args_os().nth(1).unwrap_or_default();
    if first == guest::NAME {
        return guest::main();
    }
    let is_worker = first == WORKER;
    let mut names = [COMMAND, net::COMMAND_FILE].into_iter();
    let is_command = names.any(|name| file == Some(name.as_ref()));
    if !is_worker && (is_command || PRODUCT.iter().any(|name| first == *name)) {
        return zerosock_cli::main();
    }
    if first == instructions::NAME {
        instructions::run();
        return ExitCode::SUCCESS;
    }
    let outcome = if is_worker {
        worker()
    } else {
        run(BenchArgs::parse())
    };
    Failure::exit_code("zerosock-bench", outcome)
}

/// Measures the selected tables.
fn run(args: BenchArgs) -> Result<(), Failure> {
    let settings = Settings::new(args)?;
    if settings.install_peers {
        install(&settings.tables);
    }
    let cores = machine::cores();
    let to_stdout = settings.json.as_deref() == Some(Path::new("-"));
    let mut done: Vec<Table> = Vec::new();
    let mut losses = 0;
    for (name, placement) in settings.runs() {
        let cores = placement.map_or(cores, Placement::cores);
        let run = match name {
            TableName::Local => tables::local::run,
            TableName::Device => tables::device::run,
            TableName::Rx => tables::rx::run,
            TableName::Hold => tables::hold::run,
            TableName::Scale => tables::scale::run,
            TableName::Dgram => tables::dgram::run,
            TableName::Send => tables::zc::send::run,
            TableName::Notify => tables::zc::notify::run,
            TableName::Relay => relay::run,
            TableName::Net => net::run,
        };
        let mut bench = Bench {
            settings: &settings,
            cores,
            table: Table {
                name: name.as_typed(),
                method: String::new(),
                machine: machine::describe(cores, placement),
                placement: placement.map(|placement| placement.to_string()),
                rounds: settings.rounds,
                comparison: settings.releases.first().map(|_| Comparison {
                    releases: settings
                        .releases
                        .iter()
                        .map(|release| release.title())
                        .collect(),
                    loss: settings.loss,
                }),
                rows: Vec::new(),
                grids: Vec::new(),
                missing: Vec::new(),
            },
        };
        run(&mut bench);
        let table = bench.table;
        let mark = match settings.quick {
            true => "Quick: the measurements are too short for figures that mean anything.\n\n",
            false => "",
        };
        if to_stdout {
            eprintln!("{mark}{}", table.text());
        } else {
            println!("{mark}{}", table.text());
        }
        losses += table.losses().filter(|loss| loss.is_certain).count();
        done.push(table);
        // Print after each table, so that an interrupted run keeps its finished tables.
        if let Some(path) = &settings.json {
            write(path, &done)?;
        }
    }
    match losses {
        1.. if settings.fails => Err(Failure::Runtime(format!(
            "{losses} ratios are below {}",
            settings.loss
        ))),
        _ => Ok(()),
    }
}

/// Installs missing peers. On failure the table lists the peer as missing; the reason is printed
/// here.
fn install(tables: &[TableName]) {
    for table in tables {
        let outcome = match table {
            TableName::Local => peers::iceoryx2::install(),
            TableName::Device | TableName::Scale => tables::device::install_peer(),
            TableName::Relay => relay::install_peers().and(tables::device::install_peer()),
            TableName::Net => net::install_peers(),
            TableName::Rx
            | TableName::Hold
            | TableName::Dgram
            | TableName::Send
            | TableName::Notify => Ok(()),
        };
        if let Err(reason) = outcome {
            eprintln!("zerosock-bench: --install-peers: {reason}");
        }
    }
}

/// One side of a pair: a process that [`pair`] starts.
fn worker() -> Result<(), Failure> {
    let words: Vec<String> = std::env::args().skip(2).collect();
    let order = words.join(" ").parse().map_err(Failure::Usage)?;
    if worker::report_fault(peers::work(&order)) {
        Ok(())
    } else {
        Err(Failure::runtime("the measurement failed"))
    }
}

fn write(path: &Path, tables: &[Table]) -> Result<(), Failure> {
    let json = format!("{:#}\n", report::json(tables));
    if path == Path::new("-") {
        print!("{json}");
        return Ok(());
    }
    fs::write(path, json)
        .map_err(|error| Failure::Runtime(format!("--json {}: {error}", path.display())))
}
