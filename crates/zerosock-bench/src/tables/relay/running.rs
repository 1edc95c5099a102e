//! A relay as a running program.

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use super::address::{Address, Kind};
use super::programs::Relay;
use crate::worker;

/// Longest time that a relay may take to start.
const START: Duration = Duration::from_secs(20);

/// A relay that listens; killed when dropped. A child that it has for a connection ends with the
/// connection.
pub(super) struct Running {
    child: Child,
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
        most: usize,
        cpu: Option<usize>,
    ) -> Result<Running, String> {
        let dir = tempfile::tempdir().map_err(|error| format!("temporary directory: {error}"))?;
        let from = from.free(dir.path())?;
        Running::start_at(relay, from, to, most, cpu, dir)
    }

    /// Starts a relay from this address; its files are in `dir`.
    pub(super) fn start_at(
        relay: Relay,
        from: Address,
        to: &Address,
        most: usize,
        cpu: Option<usize>,
        dir: TempDir,
    ) -> Result<Running, String> {
        let log = dir.path().join("log");
        let file = File::create(&log).map_err(|error| format!("{}: {error}", log.display()))?;
        let copy = file.try_clone().map_err(|error| error.to_string())?;
        let mut command = relay.command(&from, to, most, dir.path())?;
        command.stdin(Stdio::null()).stdout(file).stderr(copy);
        // A child inherits the affinity of the thread that starts it.
        let start = move || {
            worker::pin(cpu)?;
            let name = command.get_program().to_string_lossy().into_owned();
            command.spawn().map_err(|error| format!("{name}: {error}"))
        };
        let child = thread::spawn(start)
            .join()
            .map_err(|_| "starting the relay panicked")??;
        let mut running = Running {
            child,
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

    /// The reason with the last line that the relay said, which often is the cause.
    pub(super) fn explain(&self, reason: String) -> String {
        let said = fs::read_to_string(&self.log).unwrap_or_default();
        match said.lines().rfind(|line| !line.trim().is_empty()) {
            Some(line) => format!("{reason}; the relay said: {}", line.trim()),
            None => reason,
        }
    }

    fn wait_until_open(&mut self, title: &str) -> Result<(), String> {
        let deadline = Instant::now() + START;
        while !self.from.is_open()? {
            if let Ok(Some(status)) = self.child.try_wait() {
                return Err(self.explain(format!("{title} ended: {status}")));
            }
            if Instant::now() > deadline {
                return Err(self.explain(format!("{title} does not listen after {START:?}")));
            }
            thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // A child of this process, addressed by its handle.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
