//! What a program does inside the guests of the tests and benchmarks, when its first argument is
//! [`NAME`].

mod agent;
mod calls;
mod forward;
mod owned;
mod stream;
mod xstate;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use zerosock_cli::Failure;

/// The first argument of a program that is to be the agent.
pub const NAME: &str = "guest";

#[derive(Debug, Parser)]
#[command(name = NAME)]
enum Command {
    /// Does as the host says, over a serial line
    Agent {
        /// The serial line
        #[arg(long)]
        tty: PathBuf,
    },
    /// Tests `serve --forward-cid` on this guest's own AF_VSOCK
    Forward,
    /// On the host: becomes a program from which the processor's extended state is hidden
    HideXstate {
        /// Program and arguments
        #[arg(last = true, required = true)]
        argv: Vec<OsString>,
    },
}

/// Does what the arguments behind [`NAME`] say.
pub fn main() -> ExitCode {
    let done = match Command::parse_from(std::env::args_os().skip(1)) {
        Command::Agent { tty } => agent::run(&tty),
        Command::Forward => forward::run(),
        Command::HideXstate { argv } => xstate::run(&argv),
    };
    Failure::exit_code(NAME, done.map_err(Failure::runtime))
}
