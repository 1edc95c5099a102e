//! Network namespaces, and `zerosock net` in them.

use std::path::PathBuf;
use std::process::Command;
use std::thread;

use tempfile::TempDir;
use zerosock_sys::network::isolate_thread;
use zerosock_sys::tun::{Tap, TapError};

use crate::process::{Running, wait_until, zerosock};

/// Runs a test on a thread in a namespace of its own. Says that it is skipped where that, or a TAP, is not
/// to be had.
pub(crate) fn isolated(name: &str, test: impl FnOnce() + Send + 'static) {
    let name = name.to_owned();
    let thread = thread::spawn(move || {
        if let Err(error) = isolate_thread() {
            println!("SKIPPED {name}: no network namespace: {error}");
            return;
        }
        if let Err(error) = Command::new("ip").arg("-V").output() {
            println!("SKIPPED {name}: install iproute2: {error}");
            return;
        }
        match Tap::open(&"probe".parse().unwrap(), 1) {
            Err(error @ (TapError::Device(_) | TapError::Take(_))) => {
                println!("SKIPPED {name}: no TAP: {error}");
            }
            result => {
                drop(result.unwrap());
                test();
            }
        }
    });
    thread.join().expect("the test has failed");
}

/// Runs `ip` with these words in the namespace of the calling thread; returns its output.
pub(crate) fn ip(words: &str) -> String {
    try_ip(words).unwrap_or_else(|error| panic!("ip {words}: {error}"))
}

/// The same, and may fail.
pub(crate) fn try_ip(words: &str) -> Result<String, String> {
    let output = Command::new("ip").args(words.split_whitespace()).output();
    let output = output.unwrap();
    match output.status.success() {
        true => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
        false => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
    }
}

/// A running `zerosock net`.
pub(crate) struct Net {
    running: Option<Running>,
    dir: TempDir,
}

/// Starts `zerosock net` with these words, in which `@` stands for a directory, and waits until it serves.
pub(crate) fn start(words: &str) -> Net {
    let mut net = within("", words);
    net.wait();
    net
}

/// Starts it without waiting. `before` is a program that runs it, or a command before it, in a mount
/// namespace.
pub(crate) fn within(before: &str, words: &str) -> Net {
    let dir = tempfile::tempdir().unwrap();
    let words = words.replace('@', &dir.path().display().to_string());
    let zerosock = zerosock();
    let mut command = Command::new("sh");
    let program = zerosock.get_program().to_string_lossy().into_owned();
    match before {
        "" => command = zerosock,
        mount if mount.starts_with("mount ") => {
            command = Command::new("unshare");
            let script = format!("{mount} && exec \"$0\" \"$@\"");
            command.args(["--mount", "sh", "-c", &script, &program]);
        }
        _ => {
            command.args(["-c", &format!("exec {before} \"$0\" \"$@\""), &program]);
        }
    }
    command.arg("net").args(words.split_whitespace());
    Net {
        running: Some(Running::start(&mut command)),
        dir,
    }
}

impl Net {
    fn running(&self) -> &Running {
        self.running.as_ref().unwrap()
    }

    /// Waits until it serves.
    pub(crate) fn wait(&mut self) {
        wait_until("the service", || {
            let running = self.running.as_mut().unwrap();
            let ended = running.child.try_wait().unwrap();
            assert!(ended.is_none(), "{}", running.stderr());
            running.stderr().contains(" INFO serving ")
        });
    }

    /// A path in the directory that `@` stands for.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(crate) fn id(&self) -> u32 {
        self.running().child.id()
    }

    pub(crate) fn signal(&self, name: &str) {
        self.running().signal(name);
    }

    /// Its log so far.
    pub(crate) fn stderr(&self) -> String {
        self.running().stderr()
    }

    /// The process.
    pub(crate) fn take(&mut self) -> Running {
        self.running.take().unwrap()
    }

    /// Ends it by a signal, which must be a success.
    pub(crate) fn stop(mut self) {
        self.signal("TERM");
        let ended = self.take().finish();
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    }
}

/// Whether uid 65534 gets a queue of a TAP: `Err` has the reason of the kernel. `flags` are those of `ip tuntap`.
pub(crate) fn open_as_stranger(tap: &str, flags: &str) -> Result<(), String> {
    let ids = "--reuid 65534 --regid 65534 --clear-groups --no-new-privs";
    let words = format!("{ids} ip tuntap del dev {tap} mode tap {flags}");
    let output = Command::new("setpriv")
        .args(words.split_whitespace())
        .output();
    let output = output.unwrap();
    match output.status.success() {
        true => Ok(()),
        false => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
    }
}
