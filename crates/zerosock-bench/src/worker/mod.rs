//! One side of a measured pair: a process that sends, receives, pings or answers.
//!
//! Every contestant runs these same loops and differs only in its [`Link`]. The sender writes and
//! the receiver reads each byte of a message, in place where the contestant lends its buffers. This
//! folder uses only the standard library and rustix: peers with heavy dependencies are programs of
//! their own that include it.

pub(crate) mod jobs;
pub(crate) mod link;
pub(crate) mod order;
pub(crate) mod touch;

use std::io::{BufRead, Write};

use order::{Order, Outcome};
use touch::Fault;

pub(crate) use link::Link;

/// Pins the thread to processor `cpu`, if given.
pub(crate) fn pin(cpu: Option<usize>) -> Result<(), Fault> {
    use rustix::thread::{CpuSet, sched_setaffinity};
    let Some(cpu) = cpu.filter(|cpu| *cpu < CpuSet::MAX_CPU) else {
        return Ok(());
    };
    let mut set = CpuSet::new();
    set.set(cpu);
    sched_setaffinity(None, &set).map_err(|error| format!("pin to core {cpu}: {error}"))
}

/// Prints that the other side may connect, and the address at which it reaches this side.
pub(crate) fn announce_open(address: &str) -> Result<(), Fault> {
    print_line(&format!("open {address}"))
}

/// Waits for the start line, carries out the order, prints the outcome, and waits until the other
/// side has finished.
pub(crate) fn work(link: &mut impl Link, order: &Order) -> Result<(), Fault> {
    work_with(|| jobs::run(link, order))
}

/// As [`work`], for a contestant that runs both sides itself.
pub(crate) fn work_with(run: impl FnOnce() -> Result<Outcome, Fault>) -> Result<(), Fault> {
    print_line("ready")?;
    if !read_line()? {
        return Ok(());
    }
    let outcome = run()?;
    print_line(&format!("result {outcome}"))?;
    read_line().map(drop)
}

/// Carries out the work and prints the outcome: for a side that needs no start line.
pub(crate) fn work_alone(run: impl FnOnce() -> Result<Outcome, Fault>) -> Result<(), Fault> {
    print_line(&format!("result {}", run()?))
}

/// Prints the fault, if there is one. Returns whether there is none.
pub(crate) fn report_fault(result: Result<(), Fault>) -> bool {
    match result {
        Ok(()) => true,
        Err(fault) => {
            // The reader may have closed.
            let _ = print_line(&format!("fault {}", fault.replace('\n', " ")));
            false
        }
    }
}

fn print_line(line: &str) -> Result<(), Fault> {
    let mut output = std::io::stdout().lock();
    writeln!(output, "{line}")
        .and_then(|()| output.flush())
        .map_err(|error| format!("standard output: {error}"))
}

/// Whether a line was read; false at the end of the input.
fn read_line() -> Result<bool, Fault> {
    let mut line = String::new();
    std::io::stdin()
        .lock()
        .read_line(&mut line)
        .map(|got| got > 0)
        .map_err(|error| format!("standard input: {error}"))
}
