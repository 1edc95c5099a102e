//! Child processes that do not outlive their owner, and the last lines of their output.

use std::collections::VecDeque;
use std::io::{self, BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process, kill_process_group};

const LINES_KEPT: usize = 4000;

/// The lines that a process printed, the latest [`LINES_KEPT`] of them.
#[derive(Clone, Default)]
pub struct Log(Arc<(Mutex<VecDeque<String>>, Condvar)>);

impl Log {
    /// Reads lines to the end on a thread of its own; `echo` repeats them on stderr.
    pub fn follow(&self, from: impl Read + Send + 'static, echo: Option<String>) {
        let log = self.clone();
        thread::spawn(move || {
            let mut from = BufReader::new(from);
            let mut line = Vec::new();
            while matches!(from.read_until(b'\n', &mut line), Ok(n) if n > 0) {
                let text = String::from_utf8_lossy(&line).trim_end().to_owned();
                line.clear();
                if let Some(name) = &echo {
                    eprintln!("{name}: {text}");
                }
                log.push(text);
            }
        });
    }

    fn push(&self, line: String) {
        let (lines, changed) = &*self.0;
        if let Ok(mut lines) = lines.lock() {
            if lines.len() == LINES_KEPT {
                lines.pop_front();
            }
            lines.push_back(line);
            changed.notify_all();
        }
    }

    /// Waits until a line contains `needle`; returns the line, or `None` at the deadline.
    pub fn wait_for(&self, needle: &str, timeout: Duration) -> Option<String> {
        let deadline = Instant::now() + timeout;
        let (lines, changed) = &*self.0;
        let mut lines = lines.lock().ok()?;
        loop {
            if let Some(line) = lines.iter().find(|line| line.contains(needle)) {
                return Some(line.clone());
            }
            let left = deadline.checked_duration_since(Instant::now())?;
            lines = changed.wait_timeout(lines, left).ok()?.0;
        }
    }

    /// Whether a line up to now contains `needle`.
    pub fn contains(&self, needle: &str) -> bool {
        self.0
            .0
            .lock()
            .is_ok_and(|lines| lines.iter().any(|line| line.contains(needle)))
    }

    /// The last `count` lines, each indented: for error messages.
    pub fn tail(&self, count: usize) -> String {
        let Ok(lines) = self.0.0.lock() else {
            return String::new();
        };
        let skip = lines.len().saturating_sub(count);
        lines
            .iter()
            .skip(skip)
            .map(|line| format!("    {line}\n"))
            .collect()
    }
}

/// A command that runs `program`; the kernel kills it when the thread that starts it ends, by the
/// hidden subcommand `parent-watchdog` of `zerosock`.
pub fn with_parent_watchdog(zerosock: &Path, program: &Path) -> Command {
    let mut command = Command::new(zerosock);
    command
        .arg("parent-watchdog")
        .arg(std::process::id().to_string())
        .arg("--")
        .arg(program);
    command
}

/// A child process in a process group of its own; dropping it kills the group and reaps.
pub struct Guarded {
    child: Child,
    reaped: bool,
}

impl Guarded {
    /// Starts `command`.
    pub fn spawn(command: &mut Command) -> io::Result<Guarded> {
        let child = command.process_group(0).spawn()?;
        Ok(Guarded {
            child,
            reaped: false,
        })
    }

    /// The child itself, for its pipes.
    pub fn child(&mut self) -> &mut Child {
        &mut self.child
    }

    /// Its process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Asks it to end (SIGTERM).
    pub fn terminate(&self) {
        if !self.reaped {
            let _ = kill_process(self.pid(), Signal::TERM);
        }
    }

    /// Kills it and its process group at once.
    pub fn kill(&mut self) {
        if !self.reaped {
            // The group exists until its leader is reaped, so the id is still valid.
            let _ = kill_process_group(self.pid(), Signal::KILL);
            let _ = self.child.wait();
            self.reaped = true;
        }
    }

    /// Its exit status, if it has ended.
    pub fn try_wait(&mut self) -> Option<ExitStatus> {
        let status = self.child.try_wait().ok().flatten();
        self.reaped |= status.is_some();
        status
    }

    /// Waits for its end; `None` at the deadline.
    pub fn wait(&mut self, timeout: Duration) -> Option<ExitStatus> {
        let deadline = Instant::now() + timeout;
        loop {
            if let Some(status) = self.try_wait() {
                return Some(status);
            }
            if Instant::now() >= deadline {
                return None;
            }
            // Polling a child's end: std has no wait with a deadline.
            thread::sleep(Duration::from_millis(5));
        }
    }

    fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        self.kill();
    }
}
