//! `zerosock demo`: streams through a stock guest, measured and checked.
//!
//! [`environment`] starts a device and boots a guest, [`measure`] streams to and from it,
//! [`report`] prints the figures. The program in the guest is [`guest`]; it reports on the serial
//! line ([`line`]) that it runs.

pub(crate) mod args;
mod environment;
pub(crate) mod guest;
mod line;
mod measure;
mod report;

use std::path::Path;

use rustix::termios::isatty;

use crate::failure::Failure;
use crate::vm::pattern::{self, Pattern};
use args::DemoArgs;
use environment::Environment;
use report::Report;

/// Size of the payload when the user names no file.
const GENERATED: usize = 64 << 20;
/// Largest file: guest and host hold it in memory.
const LARGEST: u64 = 4 << 30;

/// Runs `zerosock demo`.
pub(crate) fn main(args: &DemoArgs) -> Result<(), Failure> {
    let payload = match &args.file {
        Some(path) => read(path)?,
        None => Pattern::bytes(u64::from(std::process::id()), GENERATED),
    };
    let digest = pattern::sha256(&payload);
    // Progress goes to stderr; stdout has only the result.
    let quiet = !isatty(std::io::stderr());
    let progress = |text: String| {
        if !quiet {
            eprintln!("{text}");
        }
    };
    let mut environment = Environment::boot(args, payload.len() as u64, &progress)?;
    let measured = measure::run(&environment, &payload, &digest, args.rounds, quiet)?;
    let report = Report::new(&measured, &mut environment, payload.len());
    if args.json {
        println!("{}", report.json());
    } else {
        println!("{report}");
    }
    environment.shutdown();
    if measured.verified {
        Ok(())
    } else {
        Err(Failure::runtime(
            "the received bytes differ from those sent: their SHA-256 is another one",
        ))
    }
}

fn read(path: &Path) -> Result<Vec<u8>, Failure> {
    let failed = |error| Failure::usage(format!("--file {}: {error}", path.display()));
    let len = std::fs::metadata(path).map_err(failed)?.len();
    if len > LARGEST {
        return Err(Failure::usage(format!(
            "--file {}: {} MiB; the guest keeps it in memory, so choose one of at most {} MiB",
            path.display(),
            len >> 20,
            LARGEST >> 20
        )));
    }
    let bytes = std::fs::read(path).map_err(failed)?;
    if bytes.is_empty() {
        return Err(Failure::usage(format!(
            "--file {}: it is empty; choose one with bytes in it",
            path.display()
        )));
    }
    Ok(bytes)
}
