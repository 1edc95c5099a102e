//! Running the built binary, with a deadline on everything.
#![allow(dead_code, reason = "each test file uses its part")]

use std::io::Read;
use std::process::{Child, ChildStderr, ChildStdout, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Generous: only a hang takes this long.
pub(crate) const DEADLINE: Duration = Duration::from_secs(300);

/// The built binary, with an environment in which the service manager says nothing.
/// ZEROSOCK_TEST_BINARY names another one, to run the tests against another version.
pub(crate) fn zerosock() -> Command {
    let built = env!("CARGO_BIN_EXE_zerosock").into();
    let mut command = Command::new(std::env::var_os("ZEROSOCK_TEST_BINARY").unwrap_or(built));
    for name in [
        "RUST_LOG",
        "NOTIFY_SOCKET",
        "WATCHDOG_USEC",
        "LISTEN_FDS",
        "LISTEN_PID",
    ] {
        command.env_remove(name);
    }
    command
}

/// Waits for a condition, and fails the test at the deadline.
pub(crate) fn wait_until(what: &str, holds: impl FnMut() -> bool) {
    wait_within(DEADLINE, what, holds);
}

fn wait_within(time: Duration, what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + time;
    while !holds() {
        assert!(Instant::now() < deadline, "waited in vain for {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// A process under test; killed when the test ends before it.
pub(crate) struct Running {
    pub(crate) child: Child,
    stdout: Option<JoinHandle<Vec<u8>>>,
    stderr: Option<JoinHandle<()>>,
    said: Arc<Mutex<Vec<u8>>>,
}

/// Result of a process.
#[derive(Debug)]
pub(crate) struct Ended {
    /// `None` when a signal ended it.
    pub(crate) code: Option<i32>,
    pub(crate) stdout: Vec<u8>,
    pub(crate) stderr: String,
}

impl Running {
    /// Starts it with nothing on standard input.
    pub(crate) fn start(command: &mut Command) -> Running {
        Running::start_with(command.stdin(Stdio::null()).stdout(Stdio::piped()))
    }

    /// Starts it with the command's own standard input and output.
    pub(crate) fn start_with(command: &mut Command) -> Running {
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        let said = Arc::new(Mutex::new(Vec::new()));
        let stderr = child
            .stderr
            .take()
            .map(|from| collect_live(from, said.clone()));
        let stdout = child.stdout.take().map(collect);
        Running {
            child,
            stdout,
            stderr,
            said,
        }
    }

    /// Its standard error so far.
    pub(crate) fn stderr(&self) -> String {
        String::from_utf8_lossy(&self.said.lock().unwrap()).into_owned()
    }

    /// Sends a signal by its name without SIG, or by its number.
    pub(crate) fn signal(&self, name: &str) {
        use rustix::process::{Pid, Signal};
        let signal = match name {
            "TERM" => Signal::TERM,
            "INT" => Signal::INT,
            "KILL" => Signal::KILL,
            "HUP" => Signal::HUP,
            "STOP" => Signal::STOP,
            "CONT" => Signal::CONT,
            "USR1" => Signal::USR1,
            "USR2" => Signal::USR2,
            "ALRM" => Signal::ALARM,
            "VTALRM" => Signal::VTALARM,
            "PROF" => Signal::PROF,
            "IO" => Signal::IO,
            "PWR" => Signal::POWER,
            "STKFLT" => Signal::STKFLT,
            number => {
                number.parse::<u32>().expect("a known signal");
                let command = format!("kill -{number} {}", self.child.id());
                let status = std::process::Command::new("sh")
                    .args(["-c", &command])
                    .status();
                return assert!(status.unwrap().success(), "{command}");
            }
        };
        rustix::process::kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Waits for its end.
    pub(crate) fn finish(self) -> Ended {
        self.finish_within(DEADLINE)
    }

    /// The same, for one that has a lot to do.
    pub(crate) fn finish_within(mut self, time: Duration) -> Ended {
        let mut status = None;
        wait_within(time, "a process to end", || {
            status = self.child.try_wait().unwrap();
            status.is_some()
        });
        let stdout = self
            .stdout
            .take()
            .map(|thread| thread.join().unwrap())
            .unwrap_or_default();
        if let Some(thread) = self.stderr.take() {
            thread.join().unwrap();
        }
        Ended {
            code: status.unwrap().code(),
            stdout,
            stderr: self.stderr(),
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Fails when the process has ended, which is expected.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn collect(mut from: ChildStdout) -> JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let mut all = Vec::new();
        from.read_to_end(&mut all).unwrap();
        all
    })
}

fn collect_live(mut from: ChildStderr, into: Arc<Mutex<Vec<u8>>>) -> JoinHandle<()> {
    std::thread::spawn(move || {
        let mut buffer = [0; 4096];
        while let Ok(length @ 1..) = from.read(&mut buffer) {
            into.lock().unwrap().extend_from_slice(&buffer[..length]);
        }
    })
}
