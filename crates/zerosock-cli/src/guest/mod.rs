//! `zerosock guest`: what this program does inside the guests of `demo` and the VM tests.
//! Hidden from the help, because nobody else needs it.

mod agent;
mod calls;
mod forward;
mod leash;
mod owned;
mod stream;

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, Subcommand};

use crate::failure::Failure;

/// Flags of `zerosock guest`.
#[derive(Args, Debug)]
pub(crate) struct GuestArgs {
    #[command(subcommand)]
    command: GuestCommand,
}

#[derive(Subcommand, Debug)]
enum GuestCommand {
    /// Does as the host says, over a serial line
    Agent {
        /// The serial line
        #[arg(long)]
        tty: PathBuf,
    },
    /// Tests `serve --forward-cid` on this guest's own AF_VSOCK
    Forward,
    /// On the host: becomes a program that is killed when its starter ends
    Leash {
        /// The process id of the starter
        starter: u32,
        /// Hides the processor's extended state from ptrace
        #[arg(long)]
        hide_xstate: bool,
        /// Program and arguments
        #[arg(last = true, required = true)]
        argv: Vec<OsString>,
    },
}

/// Runs `zerosock guest`.
pub(crate) fn main(args: GuestArgs) -> Result<(), Failure> {
    let done = match args.command {
        GuestCommand::Agent { tty } => agent::run(&tty),
        GuestCommand::Forward => forward::run(),
        GuestCommand::Leash {
            starter,
            hide_xstate,
            argv,
        } => leash::run(starter, hide_xstate, &argv),
    };
    done.map_err(|error| Failure::Runtime(format!("guest: {error}")))
}
