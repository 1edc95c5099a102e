//! iperf3: where it is, its server on the host, and what a client has measured.

use std::path::{Path, PathBuf};

use zerosock_cli::vm::children::Guarded;

use super::daemon::{START, spawn_logged, watched};
use crate::peers::install;
use crate::report::line;

const PROGRAM: &str = "iperf3";

/// Path of the program; the error says what to do.
fn find() -> Result<PathBuf, String> {
    install::find_packaged("IPERF3", PROGRAM)
}

/// Its package, if it is missing.
pub(super) fn missing_package() -> Option<&'static str> {
    find().is_err().then_some(PROGRAM)
}

/// A server on a port of the calling thread's namespace.
pub(super) fn serve(port: u16) -> Result<Guarded, String> {
    let mut command = watched(&find()?)?;
    command.args(["--server", "--forceflush", "--port", &port.to_string()]);
    let (process, log) = spawn_logged(&mut command)?;
    match log.wait_for("Server listening", START) {
        Some(_) => Ok(process),
        None => Err(format!("{PROGRAM} does not listen: {}", log.tail(3))),
    }
}

/// Adds the program of this machine to a guest, with its libraries.
pub(super) fn add(image: &mut zerosock_cli::vm::initramfs::Builder) -> Result<(), String> {
    let program: &Path = &find()?;
    image.program("bin/iperf3", program, &[]).map_err(line)
}

/// What a client measures.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Amount {
    Seconds(u32),
    Bytes(u64),
}

/// The command of a client in a guest. `reverse`: the server sends.
pub(super) fn client(to: &str, port: u16, amount: Amount, reverse: bool) -> String {
    let amount = match amount {
        Amount::Seconds(seconds) => format!("--time {seconds}"),
        Amount::Bytes(bytes) => format!("--bytes {bytes}"),
    };
    let reverse = if reverse { " --reverse" } else { "" };
    format!("/bin/iperf3 --client {to} --port {port} --json --interval 0 {amount}{reverse}")
}

/// Bytes that arrived, and how long that took.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Flow {
    pub(super) bytes: f64,
    pub(super) seconds: f64,
}

impl Flow {
    /// Parses what a client with `--json` prints.
    pub(super) fn parse(said: &str) -> Result<Flow, String> {
        let json = said.find('{').map_or(said, |at| &said[at..]);
        let value: serde_json::Value = serde_json::from_str(json)
            .map_err(|_| format!("iperf3 in the guest: {}", said.trim().replace('\n', "; ")))?;
        if let Some(error) = value["error"].as_str() {
            return Err(format!("iperf3 in the guest: {error}"));
        }
        let received = &value["end"]["sum_received"];
        let number = |name: &str| received[name].as_f64().filter(|number| *number > 0.0);
        match (number("bytes"), number("seconds")) {
            (Some(bytes), Some(seconds)) => Ok(Flow { bytes, seconds }),
            _ => Err("iperf3 in the guest: nothing arrived".to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flow_is_what_was_received() {
        let said = r#"warning: x
            {"end": {"sum_sent": {"bytes": 9, "seconds": 2.0},
                     "sum_received": {"bytes": 8, "seconds": 2.5}}}"#;
        let (bytes, seconds) = (8.0, 2.5);
        assert_eq!(Flow::parse(said), Ok(Flow { bytes, seconds }));
    }

    #[test]
    fn a_failed_client_gives_its_reason() {
        for (said, wanted) in [
            (r#"{"error": "unable to connect"}"#, "unable to connect"),
            ("sh: not found\n", "sh: not found"),
            (
                r#"{"end": {"sum_received": {"bytes": 0, "seconds": 1.0}}}"#,
                "nothing arrived",
            ),
        ] {
            let reason = Flow::parse(said).unwrap_err();
            assert!(reason.contains(wanted), "{reason}");
        }
    }
}
