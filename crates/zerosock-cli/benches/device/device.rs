//! The devices: where their programs are, and how each is started.

use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The peer's version that figures are given for.
const PEER_VERSION: &str = "0.3.0";
const PEER: &str = "vhost-device-vsock";

/// A program that serves a vhost-user vsock device.
#[derive(Clone, Debug)]
pub(crate) struct Device {
    pub(crate) name: &'static str,
    program: PathBuf,
    arguments: &'static [&'static str],
}

/// Every device, and whether it is there.
pub(crate) fn all(root: &Path) -> Vec<(Device, bool)> {
    let ours = Device {
        name: "zerosock",
        program: PathBuf::from(env!("CARGO_BIN_EXE_zerosock")),
        arguments: &["serve"],
    };
    let (program, found) = match find_peer(root) {
        Some(program) => (program, true),
        None => (PathBuf::from(PEER), false),
    };
    vec![
        (ours, true),
        (
            Device {
                name: PEER,
                program,
                arguments: &[],
            },
            found,
        ),
    ]
}

/// By the variable VHOST_DEVICE_VSOCK, in `.cache/peers`, or on the PATH.
fn find_peer(root: &Path) -> Option<PathBuf> {
    let named = std::env::var_os("VHOST_DEVICE_VSOCK").map(PathBuf::from);
    let cached = peers_dir(root).join("bin").join(PEER);
    let path = std::env::var_os("PATH").unwrap_or_default();
    named
        .into_iter()
        .chain([cached])
        .chain(std::env::split_paths(&path).map(|dir| dir.join(PEER)))
        .find(|program| program.is_file())
}

fn peers_dir(root: &Path) -> PathBuf {
    root.join(".cache").join("peers")
}

/// `cargo install`s the peer, unless it is there.
pub(crate) fn install_peer(root: &Path) -> Result<(), String> {
    if find_peer(root).is_some() {
        return Ok(());
    }
    let status = Command::new(env!("CARGO"))
        .args([
            "install",
            PEER,
            "--version",
            PEER_VERSION,
            "--locked",
            "--root",
        ])
        .arg(peers_dir(root))
        .status()
        .map_err(|error| format!("cargo install: {error}"))?;
    if status.success() {
        Ok(())
    } else {
        Err(format!("cargo install {PEER}: {status}"))
    }
}

/// A device that runs; killed when dropped.
#[derive(Debug)]
pub(crate) struct Running {
    child: Child,
    /// Its vhost-user socket.
    pub(crate) socket: PathBuf,
    /// Its hybrid socket.
    pub(crate) uds_path: PathBuf,
}

impl Device {
    /// Starts the device with its sockets in `dir` and waits until it listens.
    pub(crate) fn start(&self, dir: &Path) -> Result<Running, String> {
        let socket = dir.join("vhost.sock");
        let uds_path = dir.join("vm.vsock");
        let child = Command::new(&self.program)
            .args(self.arguments)
            .args(["--guest-cid", "3", "--socket"])
            .arg(&socket)
            .arg("--uds-path")
            .arg(&uds_path)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|error| format!("{}: {error}", self.program.display()))?;
        let mut running = Running {
            child,
            socket,
            uds_path,
        };
        running.wait_for_socket()?;
        Ok(running)
    }
}

impl Running {
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// CPU time so far, in seconds.
    pub(crate) fn cpu_seconds(&self) -> Result<f64, String> {
        cpu_seconds(self.pid())
    }

    /// Bound sockets appear as files before they listen, and one connection
    /// to the control socket would be one front-end: look at the file only.
    /// The hybrid socket is made by the time the device serves its guest.
    fn wait_for_socket(&mut self) -> Result<(), String> {
        let deadline = Instant::now() + Duration::from_secs(20);
        while !self.socket.exists() {
            if let Ok(Some(status)) = self.child.try_wait() {
                return Err(format!("the device ended: {status}"));
            }
            if Instant::now() > deadline {
                return Err("the device made no socket in 20 s".to_owned());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    /// Connects to the hybrid socket, which may not listen yet.
    pub(crate) fn connect_hybrid(&self) -> Result<UnixStream, String> {
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            match UnixStream::connect(&self.uds_path) {
                Ok(stream) => return Ok(stream),
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused
                    ) && Instant::now() < deadline =>
                {
                    std::thread::sleep(Duration::from_millis(5));
                }
                Err(error) => return Err(format!("{}: {error}", self.uds_path.display())),
            }
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Our own child, by its handle.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// CPU time of a process so far, in seconds: utime and stime of `/proc/PID/stat`, all
/// threads together.
pub(crate) fn cpu_seconds(pid: u32) -> Result<f64, String> {
    let path = format!("/proc/{pid}/stat");
    let stat = std::fs::read_to_string(&path).map_err(|error| format!("{path}: {error}"))?;
    // The name, in parentheses, may hold anything; fields are counted
    // behind it. utime and stime are fields 14 and 15 (proc(5)).
    let fields = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
    let ticks: Vec<u64> = fields
        .split_whitespace()
        .skip(11)
        .take(2)
        .filter_map(|field| field.parse().ok())
        .collect();
    match ticks[..] {
        [user, system] => {
            let per_second = rustix::param::clock_ticks_per_second();
            Ok((user + system) as f64 / per_second as f64)
        }
        _ => Err(format!("{path}: no CPU times")),
    }
}
