//! `zerosock guest`: what this program does inside the guests of the VM tests and of `bench`.
//! Hidden from the help, because nobody else needs it.

mod agent;
mod calls;
mod forward;
mod owned;
mod stream;
mod xstate;

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
    /// On the host: becomes a program from which the processor's extended state is hidden
    HideXstate {
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
        GuestCommand::HideXstate { argv } => xstate::run(&argv),
    };
    done.map_err(|error| Failure::Runtime(format!("guest: {error}")))
}
