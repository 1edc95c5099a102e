//! Processes attach to a running daemon, and detach.

mod endpoints;
mod fake_server;
mod hostile;
mod joining;
mod leaving;
mod reloading;
mod services;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::common::driver::{
    Address, Cid, Directions, Driver, DriverConfig, Port, RecvError, SendError, StreamId,
    StreamState,
};
use crate::common::{self, Vm, daemon_config, deadline};
use zerosock::attach::{self, AttachConfig, AttachError, AttachRequest, Attached, Client};
use zerosock::daemon::{Daemon, DaemonConfig, Stats};

const PORT: Port = Port::new(77);

/// A daemon with an attach socket.
struct AttachDaemon {
    daemon: Option<Daemon>,
    vms: Vec<Vm>,
    path: PathBuf,
    _dir: tempfile::TempDir,
}

impl AttachDaemon {
    fn new(vms: u32) -> AttachDaemon {
        AttachDaemon::with(vms, |_| {}, |_| {})
    }

    /// VMs with CIDs from 3 on.
    fn with(
        vms: u32,
        tune: impl FnOnce(&mut DaemonConfig),
        tune_attach: impl FnOnce(&mut AttachConfig),
    ) -> AttachDaemon {
        let dir = tempfile::tempdir().unwrap();
        let vm = |cid| Vm {
            cid,
            socket: dir.path().join(format!("vm{cid}.sock")),
            uds_path: dir.path().join(format!("vm{cid}.vsock")),
        };
        let vms: Vec<Vm> = (3..3 + vms).map(vm).collect();
        let path = dir.path().join("attach.sock");
        let mut config = daemon_config(&vms);
        let mut attach = AttachConfig::new(attach::listen(&path).unwrap());
        tune_attach(&mut attach);
        config.attach = Some(attach);
        tune(&mut config);
        AttachDaemon {
            daemon: Some(Daemon::start(config).unwrap()),
            vms,
            path,
            _dir: dir,
        }
    }

    fn daemon(&self) -> &Daemon {
        self.daemon.as_ref().unwrap()
    }

    fn stats(&self) -> Stats {
        self.daemon().stats()
    }

    fn ask(&self, request: &AttachRequest) -> Result<Attached, AttachError> {
        Client::connect_within(&self.path, request, common::PATIENCE)
    }

    /// A process of this name.
    fn process(&self, name: &str) -> Process {
        self.process_with(&named(name))
    }

    fn process_with(&self, request: &AttachRequest) -> Process {
        let Attached {
            cid,
            socket,
            control,
            host,
        } = self.ask(request).unwrap();
        assert_eq!(host, Cid::HOST);
        let driver = Driver::attach_over(socket, DriverConfig::default()).unwrap();
        assert_eq!(driver.cid(), cid);
        Process {
            cid,
            driver,
            control,
        }
    }

    /// The library's driver as the guest of a VM.
    fn guest(&self, index: usize) -> Driver {
        Driver::attach(DriverConfig::new(&self.vms[index].socket)).unwrap()
    }
}

impl Drop for AttachDaemon {
    fn drop(&mut self) {
        if let Some(daemon) = self.daemon.take() {
            daemon.shutdown();
        }
    }
}

/// An attached process; the test runs its driver.
struct Process {
    cid: Cid,
    driver: Driver,
    control: Client,
}

fn named(name: &str) -> AttachRequest {
    AttachRequest {
        name: Some(name.parse().unwrap()),
        ..AttachRequest::default()
    }
}

fn numbered(cid: u32) -> AttachRequest {
    AttachRequest {
        cid: Some(Cid::new(cid)),
        ..AttachRequest::default()
    }
}

fn at(cid: Cid) -> Address {
    Address::new(cid, PORT)
}

/// Runs all drivers until `done`.
#[track_caller]
fn all<const N: usize>(
    mut drivers: [&mut Driver; N],
    what: &str,
    mut done: impl FnMut(&mut [&mut Driver; N]) -> bool,
) {
    let give_up = deadline();
    while !done(&mut drivers) {
        assert!(Instant::now() < give_up, "never: {what}");
        for driver in &mut drivers {
            if !driver.drive().unwrap() {
                let soon = Instant::now() + Duration::from_micros(300);
                driver.poll(Some(soon)).unwrap();
            }
        }
    }
}

/// A connection from one driver to the other, which listens.
#[track_caller]
fn connected(one: &mut Driver, two: &mut Driver) -> (StreamId, StreamId) {
    let stream = one.connect(at(two.cid())).unwrap();
    let mut accepted = None;
    all([one, two], "connected", |[one, two]| {
        accepted = accepted.or_else(|| two.accept(PORT));
        accepted.is_some() && one.state(stream) == Some(StreamState::Connected)
    });
    (stream, accepted.unwrap())
}

/// Sends `bytes` from one driver to the other, to the end of the stream; returns the received
/// bytes.
#[track_caller]
fn transfer(
    (one, from): (&mut Driver, StreamId),
    (two, to): (&mut Driver, StreamId),
    bytes: &[u8],
) -> Vec<u8> {
    let (mut sent, mut got, mut ended) = (0, Vec::new(), false);
    all([one, two], "all bytes", |[one, two]| {
        push(one, from, bytes, &mut sent);
        pull(two, to, &mut got, &mut ended);
        ended
    });
    got
}

fn push(driver: &mut Driver, stream: StreamId, bytes: &[u8], sent: &mut usize) {
    while *sent < bytes.len() {
        match driver.send(stream, &bytes[*sent..]) {
            Ok(more) => *sent += more,
            Err(SendError::WouldBlock) => return,
            Err(error) => panic!("after {sent} bytes: {error}"),
        }
        if *sent == bytes.len() {
            driver.shutdown(stream, Directions::SEND);
        }
    }
}

fn pull(driver: &mut Driver, stream: StreamId, got: &mut Vec<u8>, ended: &mut bool) {
    let mut part = [0u8; 8192];
    while !*ended {
        match driver.recv(stream, &mut part) {
            Ok(0) => *ended = true,
            Ok(more) => got.extend_from_slice(&part[..more]),
            Err(RecvError::WouldBlock) => return,
            Err(error) => panic!("after {} bytes: {error}", got.len()),
        }
    }
}

/// Whether the other end of a socket is closed.
fn hung_up(fd: impl std::os::fd::AsFd) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let mut fds = [PollFd::new(&fd, PollFlags::empty())];
    let now = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    poll(&mut fds, Some(&now)).unwrap() > 0
}
