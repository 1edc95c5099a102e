//! `zerosock parent-watchdog`: runs a program that the kernel kills when its parent ends.

use std::ffi::OsString;
use std::io;
use std::os::unix::process::{CommandExt, parent_id};
use std::process::Command;

use clap::Args;
use rustix::process::{Signal, set_parent_process_death_signal};

use crate::failure::Failure;

/// Replace this process by a program that is killed when its parent process ends
#[derive(Debug, Args)]
pub(crate) struct ParentWatchdogArgs {
    /// The process id of the parent
    parent: u32,
    /// Program and arguments
    #[arg(last = true, required = true)]
    argv: Vec<OsString>,
}

/// Executes the program, which gets SIGKILL when the thread that started this process ends.
pub(crate) fn main(args: &ParentWatchdogArgs) -> Result<(), Failure> {
    become_program(args).map_err(|error| Failure::runtime(format!("parent-watchdog: {error}")))
}

fn become_program(args: &ParentWatchdogArgs) -> io::Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    // The parent may have ended before the line above.
    if parent_id() != args.parent {
        return Err(io::Error::other("the parent process has ended"));
    }
    let (program, arguments) = args
        .argv
        .split_first()
        .ok_or_else(|| io::Error::other("no program to run"))?;
    Err(Command::new(program).args(arguments).exec())
}
