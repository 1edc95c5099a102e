//! A daemon with guests that need no virtual machine, for all integration tests.
//!
//! Each test has its own daemon and directory. If ZEROSOCK_TEST_DEVICE names a program with the
//! command line of vhost-device-vsock, that program is the device instead, which shows whether the
//! device or the driver causes a failure; tests that need several VMs or counters then skip
//! themselves. If ZEROSOCK_TEST_PAIRS is a number, devices and drivers have that many queue pairs,
//! and daemons two workers.
#![allow(dead_code, reason = "each test program uses its own part")]

pub(crate) mod driver;
pub(crate) mod pump;
pub(crate) mod raw;

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use driver::{Address, Cid, Driver, DriverConfig, Port};
use zerosock::daemon::{Daemon, DaemonConfig, HostSide, Stats, VmConfig};

/// Deadline for everything that a test waits for; only a hang exceeds it.
pub(crate) const PATIENCE: Duration = Duration::from_secs(300);

/// Default number of queue pairs of devices and drivers.
pub(crate) fn pairs() -> u16 {
    let pairs = std::env::var("ZEROSOCK_TEST_PAIRS");
    pairs.map_or(1, |pairs| pairs.parse().unwrap())
}

/// The time `PATIENCE` from now.
pub(crate) fn deadline() -> Instant {
    Instant::now() + PATIENCE
}

/// One VM's sockets.
pub(crate) struct Vm {
    pub(crate) cid: u32,
    pub(crate) socket: PathBuf,
    pub(crate) uds_path: PathBuf,
}

enum Backend {
    Ours(Daemon),
    Program(Child),
    Down,
}

/// A daemon under test, its VMs and its directory.
pub(crate) struct TestDaemon {
    backend: Backend,
    pub(crate) vms: Vec<Vm>,
    tune: fn(&mut DaemonConfig),
    dir: tempfile::TempDir,
}

impl TestDaemon {
    /// One VM with CID 3.
    pub(crate) fn new() -> TestDaemon {
        TestDaemon::with(1, |_| {})
    }

    /// `vms` VMs with CIDs from 3 on, in one group; `tune` changes the settings.
    pub(crate) fn with(vms: u32, tune: fn(&mut DaemonConfig)) -> TestDaemon {
        let dir = tempfile::tempdir().unwrap();
        let vms = (3..3 + vms)
            .map(|cid| Vm {
                cid,
                socket: dir.path().join(format!("vm{cid}.sock")),
                uds_path: dir.path().join(format!("vm{cid}.vsock")),
            })
            .collect();
        let mut daemon = TestDaemon {
            backend: Backend::Down,
            vms,
            tune,
            dir,
        };
        daemon.start();
        daemon
    }

    /// Starts the daemon (again) at the same paths.
    pub(crate) fn start(&mut self) {
        self.backend = match std::env::var_os("ZEROSOCK_TEST_DEVICE") {
            Some(program) if self.vms.len() == 1 => {
                let vm = &self.vms[0];
                let _ = std::fs::remove_file(&vm.socket);
                let _ = std::fs::remove_file(&vm.uds_path);
                let child = Command::new(program)
                    .args(["--guest-cid", "3", "--socket"])
                    .arg(&vm.socket)
                    .arg("--uds-path")
                    .arg(&vm.uds_path)
                    .spawn()
                    .unwrap();
                Backend::Program(child)
            }
            _ => Backend::Ours(start_daemon(&self.vms, self.tune)),
        };
    }

    /// Shuts the daemon down, or kills a device that is another program.
    pub(crate) fn stop(&mut self) {
        match std::mem::replace(&mut self.backend, Backend::Down) {
            Backend::Ours(daemon) => daemon.shutdown(),
            Backend::Program(mut child) => {
                child.kill().unwrap();
                child.wait().unwrap();
            }
            Backend::Down => {}
        }
    }

    /// Counters; not available when the device is another program.
    pub(crate) fn stats(&self) -> Option<Stats> {
        match &self.backend {
            Backend::Ours(daemon) => Some(daemon.stats()),
            _ => None,
        }
    }

    /// Whether this is our device, which `test` needs.
    pub(crate) fn is_ours(&self, test: &str) -> bool {
        let is_ours = self.stats().is_some();
        if !is_ours {
            println!("SKIPPED {test}: another device is tested");
        }
        is_ours
    }

    /// A guest for the first VM.
    pub(crate) fn guest(&self) -> Driver {
        self.guest_of(0, |_| {})
    }

    /// A guest for VM `index`; `tune` changes its settings.
    pub(crate) fn guest_of(&self, index: usize, tune: impl Fn(&mut DriverConfig)) -> Driver {
        let give_up = deadline();
        loop {
            let mut config = DriverConfig::new(&self.vms[index].socket);
            config.queue_pairs = pairs();
            tune(&mut config);
            match Driver::attach(config) {
                Ok(driver) => return driver,
                // A device that is a program binds when it is ready. A device may not have
                // noticed yet that its previous guest has left.
                Err(error) if Instant::now() > give_up => panic!("{error}"),
                Err(_) => std::thread::sleep(Duration::from_millis(5)),
            }
        }
    }

    /// The Unix listener for the guest's connects to `port` of the host.
    pub(crate) fn host_listener(&self, port: u32) -> UnixListener {
        host_listener(&self.vms[0].uds_path, port)
    }

    /// The first VM's hybrid socket.
    pub(crate) fn uds_path(&self) -> PathBuf {
        self.vms[0].uds_path.clone()
    }
}

impl Drop for TestDaemon {
    fn drop(&mut self) {
        self.stop();
    }
}

/// A zerosock daemon for `vms`, at their paths.
pub(crate) fn start_daemon(vms: &[Vm], tune: fn(&mut DaemonConfig)) -> Daemon {
    let mut config = daemon_config(vms);
    tune(&mut config);
    Daemon::start(config).unwrap()
}

/// The configuration of a daemon for `vms`, with their sockets bound.
pub(crate) fn daemon_config(vms: &[Vm]) -> DaemonConfig {
    let mut config = DaemonConfig {
        queue_pairs: pairs(),
        workers: usize::from(pairs()).min(2),
        ..DaemonConfig::default()
    };
    for vm in vms {
        let _ = std::fs::remove_file(&vm.socket);
        let _ = std::fs::remove_file(&vm.uds_path);
        config.vms.push(VmConfig {
            cid: Cid::new(vm.cid),
            listener: UnixListener::bind(&vm.socket).unwrap(),
            host: HostSide::Hybrid {
                path: vm.uds_path.clone(),
                listener: UnixListener::bind(&vm.uds_path).unwrap(),
                messages: None,
            },
            buf_alloc: 262_144,
            queue_size: 1024,
            groups: vec!["default".to_owned()],
            require_sealed_memory: false,
            stopped_timeout: None,
            guest_endpoints: None,
            succession: None,
        });
    }
    config
}

/// The address of port `port` of the host.
pub(crate) fn host(port: u32) -> Address {
    Address::new(Cid::HOST, Port::new(port))
}

/// A listener at `uds_path_PORT`.
pub(crate) fn host_listener(uds_path: &Path, port: u32) -> UnixListener {
    let mut path = uds_path.as_os_str().to_owned();
    path.push(format!("_{port}"));
    UnixListener::bind(PathBuf::from(path)).unwrap()
}

/// Connects to a hybrid socket and sends the CONNECT line. Reads have a time-out.
pub(crate) fn hybrid(uds_path: &Path) -> UnixStream {
    let stream = UnixStream::connect(uds_path).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.set_write_timeout(Some(PATIENCE)).unwrap();
    stream
}

/// Reads the line `OK PORT`, byte by byte, so that no byte after it is lost.
pub(crate) fn read_ok(stream: &mut UnixStream) -> io::Result<u32> {
    let mut line = Vec::new();
    let mut byte = [0u8; 1];
    while line.last() != Some(&b'\n') {
        stream.read_exact(&mut byte)?;
        line.push(byte[0]);
    }
    let line = String::from_utf8(line).unwrap();
    let port = line
        .strip_prefix("OK ")
        .and_then(|rest| rest.trim_end().parse().ok());
    port.ok_or_else(|| io::Error::other(format!("no OK line: {line:?}")))
}

/// Connects through a hybrid socket to the guest's `port`. Blocks until the guest has answered.
pub(crate) fn connect_guest(uds_path: &Path, port: u32) -> io::Result<UnixStream> {
    let mut stream = hybrid(uds_path);
    stream.write_all(format!("CONNECT {port}\n").as_bytes())?;
    read_ok(&mut stream)?;
    Ok(stream)
}

/// The byte at offset `at` of stream number `seed`; nearby offsets and seeds give different bytes.
pub(crate) fn byte(seed: u64, at: u64) -> u8 {
    let mut x = (at / 8) ^ seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 31)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x ^= x >> 29;
    (x >> (8 * (at % 8))) as u8
}

/// `len` bytes of stream number `seed`.
pub(crate) fn bytes(seed: u64, len: usize) -> Vec<u8> {
    (0..len as u64).map(|at| byte(seed, at)).collect()
}

/// Panics with the first offset that differs, instead of printing all bytes.
#[track_caller]
pub(crate) fn assert_bytes(got: &[u8], want: &[u8]) {
    if let Some(at) = got.iter().zip(want).position(|(got, want)| got != want) {
        panic!(
            "byte {at} is {:#x}, not {:#x} ({} bytes)",
            got[at],
            want[at],
            got.len()
        );
    }
    assert_eq!(got.len(), want.len(), "wrong number of bytes");
}

/// Open descriptors of this process.
pub(crate) fn open_fds() -> usize {
    assert!(zerosock_sys::reaper::drain(std::time::Duration::from_secs(
        60
    )));
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Polls for a condition without an event; panics after `PATIENCE`.
#[track_caller]
pub(crate) fn eventually(what: &str, mut there: impl FnMut() -> bool) {
    let give_up = deadline();
    while !there() {
        assert!(Instant::now() < give_up, "never: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// This thread's directory in /proc.
pub(crate) fn this_thread() -> PathBuf {
    std::fs::canonicalize("/proc/thread-self").unwrap()
}

/// Waits until the thread sleeps.
#[track_caller]
pub(crate) fn until_asleep(thread: &Path) {
    eventually("a thread that sleeps", || {
        let stat = std::fs::read_to_string(thread.join("stat")).unwrap();
        let state = stat.rsplit(')').next().unwrap().trim_start();
        state.starts_with('S')
    });
}

/// As [`eventually`], and runs a guest meanwhile.
#[track_caller]
pub(crate) fn eventually_with(
    driver: &mut Driver,
    what: &str,
    mut there: impl FnMut(&mut Driver) -> bool,
) {
    let give_up = deadline();
    while !there(driver) {
        assert!(Instant::now() < give_up, "never: {what}");
        driver
            .poll(Some(Instant::now() + Duration::from_millis(2)))
            .unwrap();
    }
}

/// Reads lines of a child's standard output until one starts with `word`.
pub(crate) fn wait_for_line(child: &mut Child, word: &str) {
    let stdout = child.stdout.take().unwrap();
    for line in BufReader::new(stdout).lines() {
        if line.unwrap().starts_with(word) {
            return;
        }
    }
    panic!("the child never said {word}");
}
