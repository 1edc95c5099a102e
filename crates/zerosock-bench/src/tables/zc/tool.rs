//! The kernel's own test program for zero-copy sends, `io_uring_zerocopy_tx` of its self-tests, if
//! it is installed.
//!
//! It sends one buffer repeatedly for a fixed time and prints the count. It has no warm-up, and its
//! requests on a stream are not linked: their order is undefined.

use std::ffi::OsString;
use std::io;
use std::process::Command;
use std::time::Duration;

use super::loops::{CopyMode, Counts};
use super::sockets::Carried;
use super::{BATCH, Measured};

/// The name of the program, which is looked up in PATH.
pub(super) const NAME: &str = "io_uring_zerocopy_tx";
/// The environment variable that names another path of it.
const VARIABLE: &str = "IO_URING_ZEROCOPY_TX";

/// The run time that the program is given, in seconds.
const SECONDS: u64 = 1;
/// How long the program sends: 0.2 s longer than its argument.
const TIME: Duration = Duration::from_millis(1000 * SECONDS + 200);

fn program() -> OsString {
    std::env::var_os(VARIABLE).unwrap_or_else(|| NAME.into())
}

/// Why the program cannot run; none if it can.
pub(super) fn missing() -> Option<String> {
    match Command::new(program()).output() {
        Ok(_) => None,
        Err(error) if error.kind() == io::ErrorKind::NotFound => Some(format!(
            "not installed: neither in PATH nor named by {VARIABLE}"
        )),
        Err(error) => Some(error.to_string()),
    }
}

/// Runs it in this thread's network namespace and on its core.
pub(super) fn run(carried: &Carried, size: usize, mode: CopyMode) -> Result<Measured, String> {
    let to = carried.to();
    let output = Command::new(program())
        .arg(if to.is_ipv4() { "-4" } else { "-6" })
        .arg(format!("-D{}", to.ip()))
        .arg(format!("-p{}", to.port()))
        .arg(format!("-s{size}"))
        .arg(format!("-n{BATCH}"))
        .arg(format!("-t{SECONDS}"))
        .arg(match mode {
            CopyMode::Plain => "-m0",
            CopyMode::ZeroCopy => "-m1",
            CopyMode::Registered => "-m2",
        })
        .arg(if carried.is_stream() { "tcp" } else { "udp" })
        .output()
        .map_err(|error| error.to_string())?;
    let printed = String::from_utf8_lossy(&output.stderr);
    let sends = sends(&printed).ok_or_else(|| printed.trim().to_owned())?;
    let counts = Counts {
        sends,
        bytes: sends * size as u64,
        ..Counts::default()
    };
    Ok(Measured {
        counts,
        time: TIME,
        ..Measured::default()
    })
}

/// The number of sends in the program's output: `tx=N (MB=N), tx/s=N (MB/s=N)`. Its figure per
/// second is too high, because it does not count the extra fifth of a second.
fn sends(printed: &str) -> Option<u64> {
    let (_, rest) = printed.split_once("tx=")?;
    rest.split(' ').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn number_of_sends_is_parsed_from_the_output() {
        assert_eq!(
            sends("tx=478752 (MB=29677), tx/s=478752 (MB/s=29677)\n"),
            Some(478_752)
        );
        assert_eq!(sends("./tool: connect: Network is unreachable"), None);
    }
}
