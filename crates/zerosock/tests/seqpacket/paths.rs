//! Connections for messages over each path: between a process and a host, and between two processes
//! through a host and through a daemon.

use std::path::{Path, PathBuf};

use zerosock::attach::{self, AttachConfig};
use zerosock::daemon::{Daemon, DaemonConfig};
use zerosock::vsock::{Endpoint, EndpointBuilder, Host, HostBuilder, SeqPacket};
use zerosock::{Address, Cid};

use super::{FOR_EVER, PORT, with_time_outs};
use crate::common::pump::Pumped;
use crate::common::{PATIENCE, pairs};

/// A host with an attach socket, and a thread that calls its `drive`.
pub(crate) struct Hub {
    pub(crate) host: Pumped,
    dir: tempfile::TempDir,
}

impl Hub {
    pub(crate) fn new() -> Hub {
        Hub::with(|builder| builder.hold(FOR_EVER))
    }

    pub(crate) fn with(tune: impl FnOnce(HostBuilder) -> HostBuilder) -> Hub {
        let dir = tempfile::tempdir().unwrap();
        let builder = Host::builder().attach(dir.path().join("attach.sock"));
        let builder = builder.queue_pairs(pairs());
        let host = Pumped::new(tune(builder).start().unwrap());
        Hub { host, dir }
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.dir.path().join("attach.sock")
    }

    pub(crate) fn process(&self) -> Endpoint {
        self.process_with(|builder| builder)
    }

    pub(crate) fn process_with(
        &self,
        tune: impl FnOnce(EndpointBuilder) -> EndpointBuilder,
    ) -> Endpoint {
        tune(Endpoint::builder().queue_pairs(pairs()))
            .attach(self.path())
            .unwrap()
    }

    /// A connection from a process to the host: the host's side, and the process's.
    pub(crate) fn joined(&self, process: &Endpoint) -> (SeqPacket, SeqPacket) {
        let listener = self.host.listen_seqpacket(PORT, 4).unwrap();
        let to = Address::new(Cid::HOST, PORT);
        let theirs = process.connect_seqpacket(to).unwrap();
        let (ours, _) = listener.accept_timeout(PATIENCE).unwrap();
        (with_time_outs(ours), with_time_outs(theirs))
    }
}

/// A daemon with an attach socket.
pub(crate) struct TestDaemon {
    daemon: Option<Daemon>,
    dir: tempfile::TempDir,
}

impl TestDaemon {
    pub(crate) fn new(workers: usize) -> TestDaemon {
        let dir = tempfile::tempdir().unwrap();
        let listener = attach::listen(&dir.path().join("attach.sock")).unwrap();
        let daemon = Daemon::start(DaemonConfig {
            attach: Some(AttachConfig::new(listener)),
            workers,
            ..DaemonConfig::default()
        });
        TestDaemon {
            daemon: Some(daemon.unwrap()),
            dir,
        }
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.dir.path().join("attach.sock")
    }

    pub(crate) fn stats(&self) -> zerosock::daemon::Stats {
        self.daemon.as_ref().unwrap().stats()
    }
}

impl Drop for TestDaemon {
    fn drop(&mut self) {
        if let Some(daemon) = self.daemon.take() {
            daemon.shutdown();
        }
    }
}

/// Two processes at an attach socket, and a connection between them: the listener, then the client.
pub(crate) fn siblings(
    path: &Path,
    tune: [fn(EndpointBuilder) -> EndpointBuilder; 2],
) -> ((Endpoint, SeqPacket), (Endpoint, SeqPacket)) {
    let [one, two] = tune.map(|tune| {
        tune(Endpoint::builder().queue_pairs(pairs()))
            .attach(path)
            .unwrap()
    });
    let listener = one.listen_seqpacket(PORT, 4).unwrap();
    let to = Address::new(one.cid(), PORT);
    let theirs = two.begin_connect_seqpacket(to).unwrap();
    let (ours, peer) = listener.accept_timeout(PATIENCE).unwrap();
    assert_eq!(peer, theirs.local_addr());
    theirs.wait_connected().unwrap();
    ((one, with_time_outs(ours)), (two, with_time_outs(theirs)))
}
