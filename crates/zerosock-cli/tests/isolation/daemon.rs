//! `serve` with two VMs on one worker.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::driver::{Driver, DriverConfig};
use tempfile::TempDir;
use zerosock::{Cid, Port};

use super::process::{Running, wait_until, zerosock};
use super::raw::{RawFrontend, Way};
use super::threads;

pub(crate) const ATTACKER: Cid = Cid::new(3);
pub(crate) const NEIGHBOUR: Cid = Cid::new(4);

pub(crate) struct Daemon {
    pub(crate) running: Running,
    pub(crate) dir: TempDir,
    /// Last, so that the next test begins when this daemon has ended.
    _alone: Alone,
}

/// Serialises the tests: a child process briefly has copies of all descriptors, including those
/// that cannot be closed.
pub(crate) type Alone = MutexGuard<'static, ()>;

/// Waits for the other tests.
pub(crate) fn alone() -> Alone {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Daemon {
    pub(crate) fn start(options: &[&str]) -> Daemon {
        let alone = alone();
        let dir = tempfile::tempdir().unwrap();
        let running = Running::start(command(dir.path()).args(options));
        Daemon::with(running, dir, alone)
    }

    /// Starts the daemon with the options of [`command`].
    pub(crate) fn with(running: Running, dir: TempDir, alone: Alone) -> Daemon {
        let daemon = Daemon {
            running,
            dir,
            _alone: alone,
        };
        daemon.wait_for_sockets();
        daemon
    }

    fn wait_for_sockets(&self) {
        let ready = || {
            let cids = [ATTACKER, NEIGHBOUR];
            let mut all = cids.iter().flat_map(|&c| [self.socket(c), self.hybrid(c)]);
            all.all(|path| path.exists()) && self.running.stderr().contains("cid=4")
        };
        wait_until("the sockets", ready);
    }

    pub(crate) fn pid(&self) -> u32 {
        self.running.child.id()
    }

    /// The vhost-user socket of a VM.
    pub(crate) fn socket(&self, cid: Cid) -> PathBuf {
        self.dir.path().join(format!("vm{}.sock", cid.get()))
    }

    /// The socket by which host programs call a VM.
    pub(crate) fn hybrid(&self, cid: Cid) -> PathBuf {
        hybrid_path(self.dir.path(), cid)
    }

    /// The socket of the host program that a VM reaches at this port.
    pub(crate) fn service(&self, cid: Cid, port: Port) -> PathBuf {
        let name = format!("vm{}.vsock_{}", cid.get(), port.get());
        self.dir.path().join(name)
    }

    /// A front-end with a guest. Waits until the previous one has disconnected.
    pub(crate) fn attach(&self, cid: Cid) -> Driver {
        let mut driver = None;
        wait_until("a place for a front-end", || {
            driver = Driver::attach(DriverConfig::new(self.socket(cid))).ok();
            driver.is_some()
        });
        driver.unwrap()
    }

    /// Runs `act` while all threads are stopped: what it sends is read after it has returned.
    /// Interrupts threads in an interruptible call.
    pub(crate) fn while_stopped<T>(&self, act: impl FnOnce() -> T) -> T {
        self.running.signal("STOP");
        wait_until("all threads to stop", || {
            let mut tasks = threads::tasks(self.pid()).into_iter();
            tasks.all(|task| threads::state(&task).is_none_or(|state| state == 'T'))
        });
        let result = act();
        self.running.signal("CONT");
        result
    }

    /// A front-end sends descriptors and keeps no copies.
    pub(crate) fn pass(
        &self,
        frontend: RawFrontend,
        way: Way,
        fds: Vec<OwnedFd>,
    ) -> Option<RawFrontend> {
        self.while_stopped(|| frontend.pass(way, fds))
    }

    /// A front-end without a guest.
    pub(crate) fn frontend(&self, cid: Cid) -> RawFrontend {
        RawFrontend::connect(&self.socket(cid))
    }
}

/// `serve` with both VMs.
pub(crate) fn command(dir: &Path) -> Command {
    let mut command = zerosock();
    command.args(["serve", "--no-supervisor", "--workers", "1"]);
    for cid in [ATTACKER, NEIGHBOUR] {
        let at = dir.join(format!("vm{}", cid.get()));
        let (at, cid) = (at.display(), cid.get());
        let vm = format!("guest-cid={cid},socket={at}.sock,uds-path={at}.vsock");
        command.args(["--vm", &vm]);
    }
    command
}

pub(crate) fn hybrid_path(dir: &Path, cid: Cid) -> PathBuf {
    dir.join(format!("vm{}.vsock", cid.get()))
}

/// Starts it with a socket of the service manager: a shell gets the socket as its standard input,
/// moves it, sets LISTEN_PID, and executes the program.
pub(crate) fn start_with_listener(command: &Command, listener: UnixListener) -> Running {
    let script = "exec 3<&0 0</dev/null; export LISTEN_PID=$$ LISTEN_FDS=1; exec \"$@\"";
    let mut shell = Command::new("sh");
    shell.args(["-c", script, "sh"]).arg(command.get_program());
    shell.args(command.get_args()).stdout(Stdio::piped());
    Running::start_with(shell.stdin(Stdio::from(OwnedFd::from(listener))))
}
