//! System calls of `zerosock serve` for a connection between a guest and a Unix socket of the host, from its
//! connect to its close, counted by strace(1).

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::Command;

use crate::process::{DEADLINE, Running, wait_until, zerosock};
use rustix::process::{Pid, Signal, kill_process};
use zerosock::vsock::{Endpoint, Listener};
use zerosock::{Address, Cid, Port};

const PORT: Port = Port::new(7);
const CONNECTIONS: usize = 100;

/// Calls that depend on how often a worker sleeps, not on the number of connections; and `fcntl`, by which
/// debug builds check each descriptor that they close.
const NOT_COUNTED: [&str; 7] = [
    "epoll_pwait",
    "epoll_pwait2",
    "epoll_wait",
    "futex",
    "io_submit",
    "write",
    "fcntl",
];

/// A server of one VM under strace, and this process as its guest.
struct Traced {
    dir: tempfile::TempDir,
    guest: Endpoint,
    serve: Running,
}

impl Drop for Traced {
    /// The end of strace would leave the server running; that of the server ends strace.
    fn drop(&mut self) {
        let strace = self.serve.child.id();
        let children = std::fs::read_to_string(format!("/proc/{strace}/task/{strace}/children"));
        for child in children.unwrap_or_default().split_whitespace() {
            let pid = child.parse().ok().and_then(Pid::from_raw);
            if let Some(pid) = pid {
                // Fails if it has ended.
                let _ = kill_process(pid, Signal::KILL);
            }
        }
    }
}

impl Traced {
    /// `None` where nothing can be traced.
    fn start() -> Option<Traced> {
        let probe = Command::new("strace")
            .args(["-o", "/dev/null", "true"])
            .status();
        if !probe.is_ok_and(|status| status.success()) {
            println!("SKIPPED: strace is missing, or may not trace");
            return None;
        }
        let dir = tempfile::tempdir().unwrap();
        let at = |name| dir.path().join(name);
        let mut traced = Command::new("strace");
        traced.arg("-f").arg("-qq").arg("-o").arg(at("calls"));
        traced
            .arg(zerosock().get_program())
            .args(["serve", "--workers", "1"]);
        traced
            .arg("--socket")
            .arg(at("vm"))
            .arg("--uds-path")
            .arg(at("hybrid"));
        let serve = Running::start(&mut traced);
        wait_until("the sockets", || UnixStream::connect(at("hybrid")).is_ok());
        let guest = Endpoint::builder().attach_device(at("vm")).unwrap();
        Some(Traced { dir, guest, serve })
    }

    fn at(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The calls so far, by name.
    fn calls(&self) -> BTreeMap<String, usize> {
        let mut calls = BTreeMap::new();
        for line in std::fs::read_to_string(self.at("calls")).unwrap().lines() {
            // The number of the thread, the call, and its arguments.
            let call = line
                .split_whitespace()
                .nth(1)
                .and_then(|it| it.split_once('('));
            if let Some((name, _)) = call.filter(|(name, _)| !NOT_COUNTED.contains(name)) {
                *calls.entry(name.to_owned()).or_default() += 1;
            }
        }
        calls
    }

    /// Makes connections by `connect`, each of which ends before the next one begins. Fails if one of them
    /// takes more than `most` calls.
    fn count(&self, most: usize, mut connect: impl FnMut()) {
        connect();
        let before = self.calls();
        (0..CONNECTIONS).for_each(|_| connect());
        let mut calls = self.calls();
        for (name, count) in &mut calls {
            *count -= before.get(name).copied().unwrap_or(0);
        }
        calls.retain(|_, count| *count > 0);
        // Some are made once in a while, such as a look at the rights of the directory, and a read that comes
        // too early on a busy machine.
        let all: usize = calls.values().sum();
        assert!(
            all <= most * CONNECTIONS + CONNECTIONS / 2,
            "{calls:?}\n{}",
            self.last_calls()
        );
    }

    fn last_calls(&self) -> String {
        let all = std::fs::read_to_string(self.at("calls")).unwrap();
        let lines: Vec<_> = all.lines().collect();
        lines[lines.len().saturating_sub(40)..].join("\n")
    }
}

/// Four of them see that no part of the path, and no mount, leads where another user could make the worker wait:
/// openat2, statx, ppoll on the list of mounts, close.
#[test]
fn connection_of_a_guest_takes_ten_system_calls() {
    let Some(traced) = Traced::start() else {
        return;
    };
    let listener = UnixListener::bind(traced.at(&format!("hybrid_{PORT}"))).unwrap();
    traced.count(10, || {
        let stream = traced.guest.connect(Address::new(Cid::HOST, PORT)).unwrap();
        let (mut program, _) = listener.accept().unwrap();
        drop(stream);
        program.set_read_timeout(Some(DEADLINE)).unwrap();
        assert_eq!(program.read(&mut [0]).unwrap(), 0);
    });
}

#[test]
fn connection_of_a_host_program_takes_nine_system_calls() {
    let Some(traced) = Traced::start() else {
        return;
    };
    let listener: Listener = traced.guest.listen(PORT, 8).unwrap();
    traced.count(9, || {
        let mut program = UnixStream::connect(traced.at("hybrid")).unwrap();
        program
            .write_all(format!("CONNECT {PORT}\n").as_bytes())
            .unwrap();
        let (mut stream, _) = listener.accept_timeout(DEADLINE).unwrap();
        let mut line = String::new();
        BufReader::new(&program).read_line(&mut line).unwrap();
        assert_eq!(line, format!("OK {PORT}\n"));
        drop(program);
        assert_eq!(stream.read(&mut [0]).unwrap(), 0);
    });
}
