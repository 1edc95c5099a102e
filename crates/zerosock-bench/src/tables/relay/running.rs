//! A relay as a running program.

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use super::address::{Address, Kind};
use super::programs::{Load, Relay};
use crate::processes::{KilledOnDrop, wait_until};

/// Longest time that a relay may take to start.
const START: Duration = Duration::from_secs(20);

/// A relay that listens. A child that it has for a connection ends with the
/// connection.
pub(super) struct Running {
    child: KilledOnDrop,
    /// Where it listens.
    pub(super) from: Address,
    /// What it says.
    log: PathBuf,
    _dir: TempDir,
}

impl Running {
    /// Starts a relay from a free address of this kind, on core `cpu`.
    pub(super) fn start(
        relay: Relay,
        from: Kind,
        to: &Address,
        load: Load,
        cpu: Option<usize>,
    ) -> Result<Running, String> {
        let dir = tempfile::tempdir().map_err(|error| format!("temporary directory: {error}"))?;
        let from = from.free(dir.path())?;
        Running::start_at(relay, from, to, load, cpu, dir)
    }

    /// Starts a relay from this address; its files are in `dir`.
    pub(super) fn start_at(
        relay: Relay,
        from: Address,
        to: &Address,
        load: Load,
        cpu: Option<usize>,
        dir: TempDir,
    ) -> Result<Running, String> {
        let log = dir.path().join("log");
        let file = File::create(&log).map_err(|error| format!("{}: {error}", log.display()))?;
        let copy = file.try_clone().map_err(|error| error.to_string())?;
        let mut command = relay.command(&from, to, load, dir.path())?;
        command.stdin(Stdio::null()).stdout(file).stderr(copy);
        let mut running = Running {
            child: KilledOnDrop::spawn(command, cpu)?,
            from,
            log,
            _dir: dir,
        };
        running.wait_until_open(&relay.title())?;
        Ok(running)
    }

    /// Its process.
    pub(super) fn id(&self) -> u32 {
        self.child.id()
    }

    /// The reason with the line of the relay's error, or the last that it said, which often is the cause.
    pub(super) fn explain(&self, reason: String) -> String {
        let said = fs::read_to_string(&self.log).unwrap_or_default();
        let error = said.lines().find(|line| line.starts_with("error: "));
        match error.or_else(|| said.lines().rfind(|line| !line.trim().is_empty())) {
            Some(line) => format!("{reason}; the relay said: {}", line.trim()),
            None => reason,
        }
    }

    /// The first warning that zerosock logged.
    pub(super) fn warning(&self) -> Option<String> {
        let said = fs::read_to_string(&self.log).unwrap_or_default();
        let warning = said.lines().find(|line| line.contains(" WARN "));
        warning.map(|line| line.trim().to_owned())
    }

    /// Ends zerosock, and says which way it took for its only connection, from the connecting side to
    /// the other.
    pub(super) fn way(mut self) -> Result<String, String> {
        let pid = Pid::from_child(&self.child.0);
        kill_process(pid, Signal::TERM).map_err(|error| format!("end the relay: {error}"))?;
        if !wait_until(START, || Ok(self.child.status().is_some()))? {
            return Err("the relay does not end".to_owned());
        }
        let said = fs::read_to_string(&self.log).unwrap_or_default();
        match way(&said) {
            Some(way) => Ok(way.to_owned()),
            None => Err(self.explain("the relay does not say which way it took".to_owned())),
        }
    }

    fn wait_until_open(&mut self, title: &str) -> Result<(), String> {
        let is_open = || match self.child.status() {
            Some(status) => Err(format!("{title} ended: {status}")),
            None => self.from.is_open(self.child.id()),
        };
        let reason = match wait_until(START, is_open) {
            Ok(true) => return Ok(()),
            Ok(false) => format!("{title} does not listen after {START:?}"),
            Err(reason) => reason,
        };
        Err(self.explain(reason))
    }
}

/// The way in the log line of the end of a connection or association: `way=THERE/BACK`, or one word
/// if both are the same.
fn way(log: &str) -> Option<&str> {
    let line = log.lines().find(|line| line.contains(" ended "))?;
    let (_, rest) = line.split_once(" way=")?;
    rest.trim_start_matches('"')
        .split(|byte: char| !byte.is_ascii_alphabetic())
        .next()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_way_there_is_found_in_the_log() {
        for (line, wanted) in [
            (
                "INFO connection ended source=a way=copy reason=closed",
                "copy",
            ),
            (
                "INFO connection ended way=splice/copy reason=closed",
                "splice",
            ),
            (
                "INFO association ended way=\"messages\" reason=idle",
                "messages",
            ),
        ] {
            let log = format!("INFO relaying from=a to=b way=auto workers=1\n{line}\n");
            assert_eq!(way(&log), Some(wanted), "{line}");
        }
        assert_eq!(way("INFO relaying way=auto workers=1\n"), None);
    }
}
