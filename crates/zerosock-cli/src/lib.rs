//! The `zerosock` command, and the part of it that boots guests.
//!
//! Every subcommand goes the same way: raw flags (clap, one `args.rs` each) → validated settings
//! (plain types in which nothing illegal can be said) → run. A subcommand never ends the process: it
//! returns a [`Failure`], and [`main`] alone turns that into an exit code.
//!
//! Not an interface for others; the library is the crate `zerosock`. It is a library so that the
//! programs that test and measure the command contain it and need no second program beside them.
#![forbid(unsafe_code)]

mod args;
mod demo;
mod duration;
mod failure;
mod logging;
mod nc;
mod number;
mod perf;
mod serve;
mod signals;
mod size;
mod sockets;
pub mod vm;

use std::process::ExitCode;

use clap::Parser;

use crate::args::{Cli, Command};
pub use crate::failure::Failure;

/// Runs the subcommand that the process's arguments name.
pub fn main() -> ExitCode {
    // clap itself prints help and usage errors, the latter with exit code 2.
    let cli = Cli::parse_from(args::with_implied_command(std::env::args_os()));
    let outcome = match cli.command {
        Command::Serve(flags) => serve::main(*flags),
        Command::Nc(flags) => nc::main(flags),
        Command::Demo(flags) => demo::main(&flags),
        Command::DemoGuest(flags) => demo::guest::main(&flags),
        Command::ParentWatchdog(flags) => vm::parent_watchdog::main(&flags),
        Command::Perf(flags) => perf::main(flags),
    };
    Failure::exit_code("zerosock", outcome)
}
