//! The service manager's watchdog and threads of the daemon that are stuck.
//!
//! A thread is stopped with ptrace(2), which a parent may do to its child. The other threads go on.

use std::fs;
use std::os::unix::net::UnixDatagram;
use std::time::{Duration, Instant};

use crate::process::{DEADLINE, Running, wait_until, zerosock};

/// A thread of a child that is stopped until this is dropped.
struct Stopped(libc::pid_t);

impl Stopped {
    fn new(running: &Running, name: &str) -> Stopped {
        let tid = thread_of(running.child.id(), name);
        ptrace(libc::PTRACE_SEIZE, tid);
        ptrace(libc::PTRACE_INTERRUPT, tid);
        let mut status = 0;
        // SAFETY: `status` is an int that lives as long as the call.
        let waited = unsafe { libc::waitpid(tid, &mut status, libc::__WALL) };
        assert_eq!(waited, tid, "{}", std::io::Error::last_os_error());
        assert!(libc::WIFSTOPPED(status));
        Stopped(tid)
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        ptrace(libc::PTRACE_DETACH, self.0);
    }
}

fn ptrace(request: libc::c_uint, tid: libc::pid_t) {
    let none = std::ptr::null_mut::<libc::c_void>();
    // SAFETY: none of the three requests reads or writes memory of this process.
    let result = unsafe { libc::ptrace(request, tid, none, none) };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
}

fn thread_of(process: u32, name: &str) -> libc::pid_t {
    let tasks = fs::read_dir(format!("/proc/{process}/task")).unwrap();
    let mut tasks = tasks.map(|task| task.unwrap().path());
    // The kernel keeps 15 bytes of a name.
    let name = &name[..name.len().min(15)];
    let is_it = |comm: String| comm.trim_end() == name;
    let task = tasks.find(|task| fs::read_to_string(task.join("comm")).is_ok_and(is_it));
    let task = task.expect("a thread of that name");
    task.file_name().unwrap().to_str().unwrap().parse().unwrap()
}

/// The service manager's end.
struct Manager(UnixDatagram);

impl Manager {
    /// The next message, or none in that time.
    fn hear_within(&self, time: Duration) -> Option<String> {
        self.0.set_read_timeout(Some(time)).unwrap();
        let mut message = [0; 1024];
        match self.0.recv(&mut message) {
            Ok(length) => Some(String::from_utf8(message[..length].to_vec()).unwrap()),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => None,
            Err(error) => panic!("{error}"),
        }
    }

    fn wait_for(&self, text: &str) {
        let deadline = Instant::now() + DEADLINE;
        while !self.hear_within(DEADLINE).expect(text).contains(text) {
            assert!(Instant::now() < deadline, "waited in vain for {text}");
        }
    }

    /// The manager is told that the named thread makes no progress, and gets no watchdog
    /// notification from then on, for several checks.
    fn expect_silence(&self, name: &str) {
        let told = format!("STATUS=no progress of {name}");
        let deadline = Instant::now() + DEADLINE;
        let mut silent_since: Option<Instant> = None;
        while silent_since.is_none_or(|since| since.elapsed() < 2 * INTERVAL) {
            assert!(Instant::now() < deadline, "waited in vain for {told}");
            let heard = self.hear_within(INTERVAL / 4).unwrap_or_default();
            if heard.contains(&told) {
                silent_since.get_or_insert_with(Instant::now);
            } else if heard.contains("STATUS=all threads") {
                // From before the thread was stopped: the machine is busy.
                silent_since = None;
            }
            let pinged = heard.contains("WATCHDOG=1");
            assert!(!pinged || silent_since.is_none(), "{name} is stopped");
        }
    }
}

const INTERVAL: Duration = Duration::from_millis(800);

#[test]
fn the_watchdog_is_served_only_while_every_thread_makes_progress() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let manager = Manager(UnixDatagram::bind(at("notify")).unwrap());
    let mut serve = zerosock();
    serve
        .args(["serve", "--no-supervisor", "--workers", "2"])
        // Only root may stop the threads of a confined process.
        .args(["--sandbox", "log", "--vm"])
        .arg(format!(
            "guest-cid=3,socket={},uds-path={}",
            at("3.vhost").display(),
            at("3.vsock").display()
        ))
        .arg("--vm")
        .arg(format!(
            "guest-cid=4,socket={},uds-path={}",
            at("4.vhost").display(),
            at("4.vsock").display()
        ))
        .env("NOTIFY_SOCKET", at("notify"))
        .env("WATCHDOG_USEC", INTERVAL.as_micros().to_string());
    let running = Running::start(&mut serve);
    manager.wait_for("READY=1");
    for _ in 0..3 {
        // All threads are idle: each is woken to answer.
        manager.wait_for("WATCHDOG=1");
    }
    for name in ["zerosock-0", "zerosock-1", "zerosock-control"] {
        let stopped = Stopped::new(&running, name);
        manager.expect_silence(name);
        drop(stopped);
        manager.wait_for("STATUS=all threads make progress again");
        manager.wait_for("WATCHDOG=1");
    }
    wait_until("the log line", || {
        running.stderr().contains("no progress of zerosock-control")
    });
    running.signal("TERM");
    assert_eq!(running.finish().code, Some(0));
}
