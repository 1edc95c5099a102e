//! `zerosock demo`: streams through a stock guest, measured and checked.
//!
//! Steps: flags; a payload, a kernel, a device; [`setting`] boots; [`measure`] streams and times;
//! [`report`] prints. In the guest runs [`guest`], which reports on the serial line ([`line`]).

pub(crate) mod args;
pub(crate) mod guest;
mod line;
mod measure;
mod report;
mod setting;

use std::path::Path;

use rustix::termios::isatty;

use crate::failure::Failure;
use crate::vm::pattern::{self, Pattern};
use args::DemoArgs;
use report::Report;
use setting::Setting;

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
    // Notes go to stderr; stdout has only the result.
    let quiet = args.json && !isatty(std::io::stderr());
    let note = |text: String| {
        if !quiet {
            eprintln!("{text}");
        }
    };
    let mut setting = Setting::boot(args, payload.len() as u64, &note)?;
    let measured = measure::run(&setting, &payload, &digest, args.rounds, quiet)?;
    let report = Report::new(&measured, &mut setting, payload.len());
    if args.json {
        println!("{}", report.json());
    } else {
        println!("{report}");
    }
    setting.end();
    if measured.verified {
        Ok(())
    } else {
        Err(Failure::runtime(
            "what arrived is not what was sent: the SHA-256 differ",
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
