//! `zerosock leash`: a program that does not outlive its starter, also when that is killed.

use std::ffi::OsString;
use std::io;
use std::os::unix::process::{CommandExt, parent_id};
use std::process::Command;

use clap::Args;
use rustix::process::{Signal, set_parent_process_death_signal};

use crate::failure::Failure;

/// Become a program that is killed when its starter ends
#[derive(Debug, Args)]
pub(crate) struct LeashArgs {
    /// The process id of the starter
    starter: u32,
    /// Program and arguments
    #[arg(last = true, required = true)]
    argv: Vec<OsString>,
}

/// Becomes the program, to be killed when the thread that started us ends.
pub(crate) fn main(args: &LeashArgs) -> Result<(), Failure> {
    become_program(args).map_err(|error| Failure::runtime(format!("leash: {error}")))
}

fn become_program(args: &LeashArgs) -> io::Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    // The starter may have ended before the line above.
    if parent_id() != args.starter {
        return Err(io::Error::other("the starter has ended"));
    }
    let (program, arguments) = args
        .argv
        .split_first()
        .ok_or_else(|| io::Error::other("no program to run"))?;
    Err(Command::new(program).args(arguments).exec())
}
