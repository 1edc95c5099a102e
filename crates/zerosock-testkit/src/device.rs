//! A vsock device as a process: `zerosock serve`, or another device with the same command line.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::thread;
use std::time::{Duration, Instant};

use rustix::io::Errno;

use zerosock_cli::vm::children::{self, Guarded, Log};

const DEADLINE: Duration = Duration::from_secs(20);

/// One VM of the device.
#[derive(Clone, Debug)]
pub struct Endpoint {
    /// Its CID.
    pub cid: u32,
    /// The vhost-user socket.
    pub vhost: PathBuf,
    /// The hybrid vsock socket.
    pub uds: PathBuf,
    /// The hybrid SOCK_SEQPACKET socket, if the device has one.
    pub messages: Option<PathBuf>,
}

impl Endpoint {
    /// An endpoint with its sockets in `dir`, named after the CID.
    pub fn new(dir: &Path, cid: u32) -> Endpoint {
        let path = |what: &str| dir.join(format!("{cid}.{what}"));
        Endpoint {
            cid,
            vhost: path("vhost"),
            uds: path("vsock"),
            messages: None,
        }
    }

    /// The same with a hybrid SOCK_SEQPACKET socket, which only `serve` has.
    pub fn with_messages(self) -> Endpoint {
        let messages = Some(self.uds.with_extension("messages"));
        Endpoint { messages, ..self }
    }
}

/// The device's program.
#[derive(Clone, Debug)]
pub struct Program {
    /// The program.
    pub path: PathBuf,
    /// Arguments before those of the device, such as `serve`.
    pub arguments: Vec<OsString>,
    /// A program with `parent-watchdog`, which starts the device so that it ends with this process.
    pub zerosock: PathBuf,
}

/// Why the device did not start.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// Starting failed.
    #[error("cannot start {0}: {1}")]
    Start(PathBuf, io::Error),
    /// It does not listen.
    #[error("{program}: {what}; its last words:\n{log}")]
    Silent {
        /// The program.
        program: PathBuf,
        /// Exit or deadline.
        what: String,
        /// The last lines of its output.
        log: String,
    },
}

/// A running device; dropping it kills it.
pub struct Device {
    /// Lines that it printed.
    pub log: Log,
    process: Guarded,
}

impl Device {
    /// Starts it and waits until its sockets listen.
    ///
    /// # Errors
    /// See [`DeviceError`].
    pub fn start(
        program: &Program,
        endpoints: &[Endpoint],
        echo: Option<&str>,
    ) -> Result<Device, DeviceError> {
        let mut command = children::with_parent_watchdog(&program.zerosock, &program.path);
        command.args(&program.arguments);
        for each in endpoints {
            let (vhost, uds) = (each.vhost.display(), each.uds.display());
            let mut vm = format!("guest-cid={},socket={vhost},uds-path={uds}", each.cid);
            if let Some(path) = &each.messages {
                vm += &format!(",uds-path-seqpacket={}", path.display());
            }
            command.arg("--vm").arg(vm);
        }
        command.env("RUST_LOG", "info");
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let start = |error| DeviceError::Start(program.path.clone(), error);
        let mut process = Guarded::spawn(&mut command).map_err(start)?;
        let log = Log::default();
        if let Some(out) = process.child().stdout.take() {
            log.follow(out, echo.map(str::to_owned));
        }
        if let Some(err) = process.child().stderr.take() {
            log.follow(err, echo.map(str::to_owned));
        }
        let mut device = Device { log, process };
        let deadline = Instant::now() + DEADLINE;
        let silent = |what: String, log: &Log| DeviceError::Silent {
            program: program.path.clone(),
            what,
            log: log.tail(15),
        };
        loop {
            if let Some(status) = device.process.try_wait() {
                return Err(silent(format!("ended with {status}"), &device.log));
            }
            let paths = |each: &'_ Endpoint| {
                let paths = [Some(&each.vhost), Some(&each.uds), each.messages.as_ref()];
                paths.into_iter().flatten().cloned().collect::<Vec<_>>()
            };
            let paths: Vec<PathBuf> = endpoints.iter().flat_map(paths).collect();
            if listening(paths.iter()).map_err(start)? {
                return Ok(device);
            }
            if Instant::now() >= deadline {
                let what = format!("its sockets do not listen within {} s", DEADLINE.as_secs());
                return Err(silent(what, &device.log));
            }
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Its process id.
    pub fn id(&self) -> u32 {
        self.process.id()
    }

    /// Whether it still runs.
    pub fn is_running(&mut self) -> bool {
        self.process.try_wait().is_none()
    }

    /// Kills it (SIGKILL).
    pub fn kill(&mut self) {
        self.process.kill();
    }

    /// Asks it to end (SIGTERM) and waits; returns its exit code, or `None` if it does not end or
    /// was killed.
    pub fn stop(&mut self, timeout: Duration) -> Option<i32> {
        self.process.terminate();
        self.process.wait(timeout)?.code()
    }
}

/// Whether all these Unix sockets listen, without connecting: a connection would count as a
/// front-end.
fn listening<'p>(mut paths: impl Iterator<Item = &'p PathBuf>) -> io::Result<bool> {
    // "Num RefCount Protocol Flags Type St Inode Path"; the flag is __SO_ACCEPTCON.
    let table = fs::read_to_string("/proc/net/unix")?;
    let listens = |path: &str| {
        table.lines().any(|line| {
            let mut words = line.split_ascii_whitespace();
            words.nth(3) == Some("00010000") && words.nth(3) == Some(path)
        })
    };
    Ok(paths.all(|path| listens(&path.to_string_lossy()) || is_held(path)))
}

/// Whether a process holds the socket at this path. `serve` renames a listening socket to this
/// path, and the kernel's table has the path at which it was made. The kernel refuses a connection
/// of another type with EPROTOTYPE if the socket is held.
fn is_held(path: &Path) -> bool {
    let probe = || -> io::Result<bool> {
        let socket = UnixDatagram::unbound()?;
        let error = socket.connect(path).err();
        Ok(error.is_some_and(|error| Errno::from_io_error(&error) == Some(Errno::PROTOTYPE)))
    };
    probe().unwrap_or(false)
}
