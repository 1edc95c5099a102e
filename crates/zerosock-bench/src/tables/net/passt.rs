//! passt, as a back-end over vhost-user.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::peers::install;

const OPTION: &str = "--vhost-user";

/// Path of a passt that has the option.
pub(super) fn find() -> Result<PathBuf, String> {
    let program = install::find("PASST", "passt").map_err(|_| {
        format!("passt is not installed: set PASST to the path of a build of 2025 or later, with {OPTION}")
    })?;
    let help = Command::new(&program).arg("--help").output();
    let help = help.map_err(|error| format!("{}: {error}", program.display()))?;
    let says = |text: &[u8]| String::from_utf8_lossy(text).contains(OPTION);
    match says(&help.stdout) || says(&help.stderr) {
        true => Ok(program),
        false => Err(format!(
            "{} has no {OPTION}, as that of Debian 12: set PASST to the path of a build of 2025 or later",
            program.display()
        )),
    }
}

/// Its arguments for one guest, which reaches the host's loopback device as `here`.
pub(super) fn arguments(socket: &Path, interface: &str, here: &str, there: &str) -> Vec<String> {
    let line = format!(
        "{OPTION} --foreground --runas 0 --socket {} --ipv4-only --interface {interface} \
         --map-host-loopback {here} --address {there} --netmask 24 --gateway {here}",
        socket.display()
    );
    line.split_whitespace().map(str::to_owned).collect()
}
