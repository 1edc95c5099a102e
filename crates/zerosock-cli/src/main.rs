//! The `zerosock` command.
//!
//! Every subcommand goes the same way: raw flags (clap, one `args.rs` each) → validated settings
//! (plain types in which nothing illegal can be said) → run. A room never ends the process: it
//! returns a [`Failure`], and this file alone turns that into an exit code.
#![deny(unsafe_code)]

mod args;
mod bench;
mod demo;
mod duration;
mod failure;
mod guest;
mod logging;
mod nc;
mod number;
mod perf;
mod serve;
mod signals;
mod size;
mod sockets;

use std::process::ExitCode;

use clap::Parser;

use crate::args::{Cli, Command};
use crate::failure::Failure;

fn main() -> ExitCode {
    // clap itself prints help and usage errors, the latter with exit code 2.
    let cli = Cli::parse_from(args::with_implied_command(std::env::args_os()));
    let outcome = match cli.command {
        Command::Serve(flags) => serve::main(*flags),
        Command::Nc(flags) => nc::main(flags),
        Command::Demo(flags) => demo::main(&flags),
        Command::Perf(flags) => perf::main(flags),
        Command::Bench(flags) => bench::main(flags),
        Command::BenchWorker(flags) => bench::worker(&flags),
        Command::Guest(flags) => guest::main(flags),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("zerosock: {failure}");
            ExitCode::from(match failure {
                Failure::Usage(_) => 2,
                Failure::Runtime(_) => 1,
            })
        }
    }
}
