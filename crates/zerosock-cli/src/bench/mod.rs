//! `zerosock bench`: one harness for all tables, ours and the peers' rounds alternating in one run.
//!
//! What must hold: nobody is left out in silence; a side that receives reads every byte unless the
//! row says otherwise; a ratio above 1 always means that ours is better.

pub(crate) mod args;
mod machine;
mod pair;
mod peers;
mod report;
mod rounds;
mod tables;
mod vm;
mod worker;

use std::fs;
use std::path::Path;

use crate::failure::Failure;
use args::{BenchArgs, Settings, TableName, WorkerArgs};
use report::Table;

/// Measures the tables that were asked for.
pub(crate) fn main(args: BenchArgs) -> Result<(), Failure> {
    let settings = Settings::new(args)?;
    if settings.install_peers {
        install(&settings.tables);
    }
    let cores = machine::cores();
    let machine = machine::describe(cores);
    let to_stdout = settings.json.as_deref() == Some(Path::new("-"));
    let mut done: Vec<Table> = Vec::new();
    for name in &settings.tables {
        let table = match name {
            TableName::Local => tables::local::run(&settings, cores, &machine),
            TableName::Device => tables::device::run(&settings, cores, &machine),
            TableName::Rx => tables::rx::run(&settings, cores, &machine),
            TableName::Hold => tables::hold::run(&settings, cores, &machine),
            TableName::Scale => tables::scale::run(&settings, cores, &machine),
            TableName::Dgram => tables::dgram::run(&settings, cores, &machine),
            TableName::Send => tables::zc::send::run(&settings, cores, &machine),
            TableName::Notify => tables::zc::notify::run(&settings, cores, &machine),
        };
        if to_stdout {
            eprintln!("{}", table.text());
        } else {
            println!("{}", table.text());
        }
        done.push(table);
        // After each table: a run that is broken off leaves what it has.
        if let Some(path) = &settings.json {
            write(path, &done)?;
        }
    }
    Ok(())
}

/// Installs what the tables lack. What cannot be had is named as missing in the table, with the
/// reason here.
fn install(tables: &[TableName]) {
    for table in tables {
        let outcome = match table {
            TableName::Local => peers::iceoryx2::install(),
            TableName::Device | TableName::Scale => tables::device::install_peer(),
            TableName::Rx
            | TableName::Hold
            | TableName::Dgram
            | TableName::Send
            | TableName::Notify => Ok(()),
        };
        if let Err(reason) = outcome {
            eprintln!("zerosock: --install-peers: {reason}");
        }
    }
}

/// One side of a pair: a process that [`pair`] starts.
pub(crate) fn worker(args: &WorkerArgs) -> Result<(), Failure> {
    let order = args.order()?;
    if worker::end(peers::work(&order)) {
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
