//! The device programs: where they are, how each is started, and its CPU time.

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::binary::Binary;
use crate::peers::install;
use crate::processes::{self, KilledOnDrop, retry, wait_until};

/// Version of the peer to install.
const PEER_VERSION: &str = "0.3.0";
const PEER: &str = "vhost-device-vsock";
const VARIABLE: &str = "VHOST_DEVICE_VSOCK";
/// Longest time that a device may take to start.
pub(super) const START: Duration = Duration::from_secs(20);

/// A program that serves a vhost-user vsock device.
#[derive(Clone, Debug)]
pub(crate) struct Device {
    program: PathBuf,
    arguments: Vec<String>,
}

/// Name of zerosock in the tables.
pub(crate) const OURS: &str = "zerosock";

/// zerosock: this program.
pub(crate) fn ours() -> Result<Device, String> {
    release(Binary::OWN)
}

/// zerosock.
pub(crate) fn release(binary: Binary) -> Result<Device, String> {
    release_with(binary, &["serve", "--log-level", "off"])
}

/// This program, with these arguments before those that every device gets.
pub(crate) fn ours_with(arguments: &[&str]) -> Result<Device, String> {
    release_with(Binary::OWN, arguments)
}

/// zerosock, with these arguments before those that every device gets.
pub(crate) fn release_with(binary: Binary, arguments: &[&str]) -> Result<Device, String> {
    Ok(Device {
        program: binary.path()?,
        arguments: arguments.iter().copied().map(str::to_owned).collect(),
    })
}

/// vhost-device-vsock, or why it is missing.
pub(crate) fn peer() -> Result<Device, String> {
    install::find(VARIABLE, PEER).map(|program| Device {
        program,
        arguments: Vec::new(),
    })
}

/// Its name with the version that it prints.
pub(crate) fn peer_title() -> String {
    let version = peer().ok().and_then(|device| {
        let output = Command::new(device.program)
            .arg("--version")
            .output()
            .ok()?;
        let line = String::from_utf8(output.stdout).ok()?;
        Some(line.trim().to_owned()).filter(|line| line.starts_with(PEER))
    });
    version.unwrap_or_else(|| PEER.to_owned())
}

/// Installs the peer unless it is installed.
pub(crate) fn install_peer() -> Result<(), String> {
    if peer().is_ok() {
        return Ok(());
    }
    let arguments = [PEER, "--version", PEER_VERSION].map(AsRef::as_ref);
    install::cargo_install(PEER, &arguments)
}

/// A running device.
#[derive(Debug)]
pub(crate) struct Running {
    child: KilledOnDrop,
    /// Its vhost-user socket.
    pub(crate) socket: PathBuf,
    /// Its hybrid socket.
    pub(crate) uds_path: PathBuf,
}

impl Device {
    /// Path of its program.
    pub(crate) fn program(&self) -> &Path {
        &self.program
    }

    /// Starts the device with its sockets in `dir`, all its threads on core `cpu`, and waits until
    /// its control socket is there.
    pub(crate) fn start(&self, dir: &Path, cpu: Option<usize>) -> Result<Running, String> {
        let socket = dir.join("vhost.sock");
        let uds_path = dir.join("vm.vsock");
        let mut command = Command::new(&self.program);
        command
            .args(&self.arguments)
            .args(["--guest-cid", "3", "--socket"])
            .arg(&socket)
            .arg("--uds-path")
            .arg(&uds_path)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let mut running = Running {
            child: KilledOnDrop::spawn(command, cpu)?,
            socket,
            uds_path,
        };
        running.wait_for_socket()?;
        Ok(running)
    }
}

impl Running {
    /// Its process.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// CPU time so far, in seconds: of all threads, user and system.
    pub(crate) fn cpu_seconds(&self) -> Result<f64, String> {
        processes::cpu_seconds(self.child.id())
    }

    /// A bound socket appears as a file before it listens, and a connection to the control socket
    /// would count as a front-end: check only that the file exists.
    fn wait_for_socket(&mut self) -> Result<(), String> {
        let is_there = || match self.child.status() {
            Some(status) => Err(format!("the device ended: {status}")),
            None => Ok(self.socket.exists()),
        };
        match wait_until(START, is_there)? {
            true => Ok(()),
            false => Err("the device made no socket in 20 s".to_owned()),
        }
    }

    /// Connects to the hybrid socket, which may not listen yet.
    pub(crate) fn connect_hybrid(&self) -> Result<UnixStream, String> {
        retry(START, || UnixStream::connect(&self.uds_path))
            .map_err(|error| format!("{}: {error}", self.uds_path.display()))
    }
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::Instant;

    use super::*;

    #[test]
    fn the_time_of_a_busy_process_passes() {
        let mut running = Running {
            child: KilledOnDrop(
                Command::new("sh")
                    .args(["-c", "while :; do :; done"])
                    .spawn()
                    .unwrap(),
            ),
            socket: PathBuf::new(),
            uds_path: PathBuf::new(),
        };
        let deadline = Instant::now() + Duration::from_secs(60);
        while running.cpu_seconds().unwrap() < 0.01 {
            assert!(Instant::now() < deadline, "it got no time");
            thread::yield_now();
        }
        assert!(running.child.status().is_none());
    }
}
