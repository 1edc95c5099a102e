//! The `zerosock` command, and the part of it that boots guests.
//!
//! Every subcommand has the same steps: raw flags (clap, in `args.rs`), validated settings (plain
//! types without invalid values), run. A subcommand never ends the process: it returns a
//! [`Failure`], and only [`main`] turns that into an exit code.
//!
//! Not an interface for others; the library is the crate `zerosock`. It is a library so that the
//! tests and benchmarks of the command contain it and need no second program.
#![forbid(unsafe_code)]

mod args;
mod demo;
mod duration;
mod endpoint;
mod failure;
#[cfg(fuzzing)]
pub mod fuzz;
mod group;
mod guest;
mod help;
mod key_file;
mod logging;
mod mode;
mod nc;
mod net;
mod number;
mod perf;
mod relay;
mod sandbox;
mod serve;
mod service_manager;
mod signals;
mod size;
mod socket_access;
mod sockets;
mod supervised;
mod user;
pub mod vm;

use std::process::ExitCode;

use clap::Parser;
use zerosock::guest::agent::keeper::KeeperEntry;

use crate::args::{Cli, Command};
pub use crate::failure::Failure;

/// Runs the subcommand of the process's arguments.
pub fn main() -> ExitCode {
    let keeper = KeeperEntry::enter();
    // clap itself prints help and usage errors, and exits with code 2 for the latter.
    let cli = Cli::parse_from(args::with_implied_command(std::env::args_os()));
    let outcome = match cli.command {
        Command::Serve(flags) => serve::main(*flags),
        Command::Net(flags) => net::main(*flags),
        Command::Nc(flags) => nc::main(flags),
        Command::Demo(flags) => demo::main(&flags),
        Command::DemoGuest(flags) => demo::guest::main(&flags),
        Command::Guest(flags) => guest::main(*flags, keeper),
        Command::ParentWatchdog(flags) => vm::parent_watchdog::main(&flags),
        Command::Perf(flags) => perf::main(flags),
        Command::Relay(flags) => relay::main(*flags),
    };
    Failure::exit_code("zerosock", outcome)
}
