//! A program that does not outlive its starter, also when that is killed.

use std::ffi::OsString;
use std::io;
use std::os::unix::process::{CommandExt, parent_id};
use std::process::Command;

use rustix::process::{Signal, set_parent_process_death_signal};

/// Becomes `argv`, to be killed when the thread that started us ends.
pub(super) fn run(starter: u32, argv: &[OsString]) -> io::Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    // The starter may have ended before the line above.
    if parent_id() != starter {
        return Err(io::Error::other("the starter has ended"));
    }
    let (program, arguments) =
        argv.split_first().ok_or_else(|| io::Error::other("no program to run"))?;
    Err(Command::new(program).args(arguments).exec())
}
