//! A network namespace with `zerosock net` in it.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use zerosock_cli::vm::children::{self, Guarded, Log};
use zerosock_sys::network::isolate_thread;

use crate::lab::{STEP, Skipped, echo, short_dir, zerosock};

/// Moves the calling thread into a network namespace of its own, with a loopback interface. What the
/// thread starts is in it too: threads, sockets, the daemon and the guests.
pub(crate) fn isolate() -> Result<(), Skipped> {
    isolate_thread().map_err(|error| Skipped(format!("no network namespace: {error}")))?;
    if !Path::new("/dev/net/tun").exists() {
        return Err(Skipped("the kernel has no /dev/net/tun".to_owned()));
    }
    match Command::new("ip").arg("-V").output() {
        Ok(_) => ip("link set lo up"),
        Err(error) => return Err(Skipped(format!("install iproute2: {error}"))),
    }
    Ok(())
}

/// Skips without ethtool.
pub(crate) fn needs_ethtool() -> Result<(), Skipped> {
    let version = Command::new("ethtool").arg("--version").output();
    version.map_err(|error| Skipped(format!("install ethtool: {error}")))?;
    Ok(())
}

/// Runs `ip` with these words in the namespace of the calling thread.
pub(crate) fn ip(words: &str) {
    run("ip", words);
}

/// Runs a program of this machine with these words; returns its output. Fails the test if it fails.
pub(crate) fn run(program: &str, words: &str) -> String {
    let output = try_run(program, words);
    output.unwrap_or_else(|text| panic!("{program} {words}: {text}"))
}

/// The same, and returns the output in either case.
pub(crate) fn try_run(program: &str, words: &str) -> Result<String, String> {
    let mut command = Command::new(program);
    let output = command.args(words.split_whitespace()).output();
    let output = output.unwrap_or_else(|error| panic!("{program}: {error}"));
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&text).into_owned();
    match output.status.success() {
        true => Ok(text),
        false => Err(text),
    }
}

/// Waits for a condition, and fails the test at the deadline.
pub(crate) fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + STEP;
    while !holds() {
        assert!(Instant::now() < deadline, "waited in vain for {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A running `zerosock net`; dropping it kills it. A test that fails shows the end of its log.
pub(crate) struct Daemon {
    /// Lines of its log.
    pub(crate) log: Log,
    process: Guarded,
    dir: TempDir,
}

impl Daemon {
    /// Starts `zerosock net` with these words, in which `@` stands for a directory, and waits until it
    /// serves.
    pub(crate) fn start(words: &str) -> Daemon {
        let dir = short_dir();
        let words = words.replace('@', &dir.path().display().to_string());
        let mut command = children::with_parent_watchdog(zerosock(), zerosock());
        command.arg("net").args(words.split_whitespace());
        command.env("RUST_LOG", "info").stdin(Stdio::null());
        command.stdout(Stdio::null()).stderr(Stdio::piped());
        let mut process = Guarded::spawn(&mut command).expect("a daemon");
        let log = Log::default();
        let errors = process.child().stderr.take().expect("a pipe");
        log.follow(errors, echo("daemon").map(str::to_owned));
        let mut daemon = Daemon { log, process, dir };
        wait_until("the daemon to serve", || {
            let ended = daemon.process.try_wait();
            assert!(ended.is_none(), "{words}: {}", daemon.log.tail(15));
            daemon.log.contains(" INFO serving ")
        });
        daemon
    }

    /// A path in the directory that `@` stands for.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Has the daemon log its counters; returns one of them. `device` is the name of the device in the
    /// log or its end: that of the interface, or of the guest's socket on a switch.
    pub(crate) fn counter(&self, device: &str, name: &str) -> u64 {
        let reports = || -> Vec<String> {
            let all = self.log.tail(usize::MAX);
            let named = format!("{device}\" ");
            let is_report = |line: &&str| line.contains(" INFO counters ") && line.contains(&named);
            all.lines().filter(is_report).map(str::to_owned).collect()
        };
        let before = reports().len();
        let pid = Pid::from_raw(self.id().cast_signed()).expect("a process");
        kill_process(pid, Signal::USR1).expect("a signal");
        wait_until("the counters", || reports().len() > before);
        let report = reports().pop().expect("a report");
        let key = format!(" {name}=");
        let value = report.split(&key).nth(1);
        let value = value.and_then(|rest| rest.split_whitespace().next());
        value.and_then(|text| text.parse().ok()).expect(&report)
    }

    /// Its process id.
    pub(crate) fn id(&self) -> u32 {
        self.process.id()
    }

    /// Waits until it ends by itself.
    pub(crate) fn wait(&mut self) -> ExitStatus {
        self.process.wait(STEP).expect("the daemon ends")
    }

    /// Ends it by SIGTERM, which must be a success.
    pub(crate) fn stop(mut self) {
        self.process.terminate();
        let status = self.wait();
        assert!(status.success(), "{}", self.log.tail(15));
        println!("{}", self.log.tail(1).trim_end());
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let ended = self.process.try_wait();
            let ended = ended.map_or("runs".to_owned(), |status| status.to_string());
            eprintln!("zerosock net ({ended}):\n{}", self.log.tail(15));
        }
    }
}
