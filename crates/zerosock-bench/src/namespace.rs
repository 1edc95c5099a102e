//! A network namespace for a thread of the bench, so that no setting of the machine's own network
//! has an effect on a measurement.

use std::process::Command;
use std::thread;

use zerosock_sys::network::isolate_thread;

/// Runs `measure` on a thread of its own, after that thread has tried to [`enter`] a namespace. A
/// namespace is that of a thread, and of the threads and processes that it starts.
pub(crate) fn on_thread(measure: impl FnOnce(Result<(), String>) + Send) {
    let thread = thread::scope(|scope| scope.spawn(|| measure(enter())).join());
    if thread.is_err() {
        eprintln!("the measuring thread panicked");
    }
}

/// Moves the calling thread into a new network namespace with a loopback device, and with Reno as
/// the congestion control of TCP. Threads and processes that it starts later are in the namespace.
///
/// # Errors
/// Why the namespace cannot be made.
pub(crate) fn enter() -> Result<(), String> {
    isolate_thread().map_err(|error| format!("a network namespace: {error}"))?;
    do_not_pace()?;
    ip("link set lo up")
}

/// Sets TCP of this thread's network namespace to Reno. A congestion control that paces packets
/// (BBR, the default of some machines) would measure the pacing timer.
fn do_not_pace() -> Result<(), String> {
    set("ipv4/tcp_congestion_control", "reno")
}

/// Sets a value below /proc/sys/net, which shows the calling thread's namespace.
pub(crate) fn set(name: &str, value: &str) -> Result<(), String> {
    let path = format!("/proc/sys/net/{name}");
    std::fs::write(&path, value).map_err(|error| format!("{path}: {error}"))
}

/// Runs ip(8) with these arguments.
pub(crate) fn ip(words: &str) -> Result<(), String> {
    run(Command::new("ip").args(words.split(' '))).map_err(|told| format!("ip {words}: {told}"))
}

/// Runs a program to its end; returns its output if it failed.
pub(crate) fn run(command: &mut Command) -> Result<(), String> {
    let output = command.output().map_err(|error| error.to_string())?;
    match output.status.success() {
        true => Ok(()),
        false => Err(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
    }
}
