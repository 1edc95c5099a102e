//! Processes that serve a device: `zerosock net`, and those of its peers.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use zerosock_cli::vm::children::{self, Guarded, Log};

use crate::binary::Binary;
use crate::processes::{own_program, wait_until};
use crate::report::line;

/// The name of a file that is this program as the command `zerosock`. In guests the bench itself is a file
/// `zerosock`.
pub(crate) const COMMAND_FILE: &str = "zerosock-command";
/// Longest time that a daemon may take to start.
pub(super) const START: Duration = Duration::from_secs(20);

/// A process that serves a device.
pub(super) struct Daemon {
    pub(super) process: Guarded,
    /// It polls instead of sleeping: it is stopped while others are measured.
    pub(super) polls: bool,
}

impl Daemon {
    pub(super) fn signal(&self, signal: Signal) -> Result<(), String> {
        let pid = i32::try_from(self.process.id())
            .ok()
            .and_then(Pid::from_raw);
        let pid = pid.ok_or("no process id")?;
        kill_process(pid, signal).map_err(|error| format!("signal a daemon: {error}"))
    }
}

/// `zerosock net` with these options and sockets, which are in a directory of their own. It ends with
/// the calling thread.
pub(super) fn zerosock(
    binary: Binary,
    options: &[&str],
    sockets: &[&Path],
) -> Result<Daemon, String> {
    zerosock_by(None, binary, options, sockets)
}

/// As [`zerosock`], started by a command that ends in the program to start: its words.
pub(super) fn zerosock_by(
    starter: Option<&str>,
    binary: Binary,
    options: &[&str],
    sockets: &[&Path],
) -> Result<Daemon, String> {
    // The name makes `zerosock-bench` the command, also behind the watchdog.
    let dir = sockets.first().and_then(|socket| socket.parent());
    let program = dir.ok_or("no socket")?.join(COMMAND_FILE);
    std::os::unix::fs::symlink(binary.path()?, &program).map_err(line)?;
    let mut words = starter.into_iter().flat_map(|words| words.split(' '));
    let mut command = match words.next() {
        None => watched(&program)?,
        Some(first) => watched(Path::new(first))?,
    };
    command.args(words);
    if starter.is_some() {
        command.arg(&program);
    }
    command.args(["net", "--log-level", "warn"]).args(options);
    for socket in sockets {
        command.arg("--socket").arg(socket);
    }
    let is_ready = || sockets.iter().all(|socket| socket.exists());
    Ok(Daemon {
        process: start(&mut command, is_ready)?,
        polls: false,
    })
}

/// A command that ends with the thread that starts it.
pub(super) fn watched(program: &Path) -> Result<Command, String> {
    Ok(children::with_parent_watchdog(&own_program()?, program))
}

/// Starts a program, with all that it prints in a log.
pub(super) fn spawn_logged(command: &mut Command) -> Result<(Guarded, Log), String> {
    let name = command.get_program().to_string_lossy().into_owned();
    command.stdin(Stdio::null());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut process = Guarded::spawn(command).map_err(|error| format!("{name}: {error}"))?;
    let log = Log::default();
    if let Some(output) = process.child().stdout.take() {
        log.follow(output, None);
    }
    if let Some(errors) = process.child().stderr.take() {
        log.follow(errors, None);
    }
    Ok((process, log))
}

/// Starts a daemon and waits for `is_ready`.
pub(super) fn start(command: &mut Command, is_ready: impl Fn() -> bool) -> Result<Guarded, String> {
    let (mut process, log) = spawn_logged(command)?;
    let ready = wait_until(START, || match process.try_wait() {
        _ if is_ready() => Ok(true),
        Some(status) => Err(format!("it ended with {status}")),
        None => Ok(false),
    });
    let reason = match ready {
        Ok(true) => return Ok(process),
        Ok(false) => format!("it is not ready after {START:?}"),
        Err(reason) => reason,
    };
    Err(line(format!("{reason}: {}", log.tail(5))))
}
