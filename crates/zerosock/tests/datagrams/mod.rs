//! Datagrams between processes, the host, and siblings of one daemon.

mod bad_input;
mod basics;
mod flow;
mod hostile;
mod place;
#[cfg(feature = "tokio")]
mod tasks;
mod waiting;

use std::ops::Deref;
use std::path::PathBuf;
use std::time::Duration;

use crate::common::pump::Pumped;
use crate::common::{self, PATIENCE, daemon_config};
use zerosock::attach::{self, AttachConfig};
use zerosock::daemon::{Daemon, Stats};
use zerosock::vsock::{Datagram, DatagramError, Endpoint, EndpointBuilder, Host, HostBuilder};
use zerosock::{Address, Cid, Port};

const PORT: Port = Port::new(514);

/// A hold time longer than any test: leased bytes stay in place.
const FOR_EVER: Duration = Duration::from_secs(600);

/// A host with an attach socket and a VM with CID 3, and a thread that calls its `drive`.
struct Hub {
    host: Pumped,
    dir: tempfile::TempDir,
}

impl Hub {
    fn new() -> Hub {
        Hub::with(|builder| builder.hold(FOR_EVER))
    }

    fn with(tune: impl FnOnce(HostBuilder) -> HostBuilder) -> Hub {
        let dir = tempfile::tempdir().unwrap();
        let builder = Host::builder().attach(dir.path().join("attach.sock"));
        let builder = builder.vm(Cid::new(3), dir.path().join("vm.sock"));
        let host = Pumped::new(tune(builder).start().unwrap());
        Hub { host, dir }
    }

    fn vm(&self) -> PathBuf {
        self.dir.path().join("vm.sock")
    }

    fn process(&self) -> Endpoint {
        self.process_with(|builder| builder)
    }

    fn process_with(&self, tune: impl FnOnce(EndpointBuilder) -> EndpointBuilder) -> Endpoint {
        let path = self.dir.path().join("attach.sock");
        tune(Endpoint::builder()).attach(path).unwrap()
    }
}

impl Deref for Hub {
    type Target = Host;

    fn deref(&self) -> &Host {
        &self.host
    }
}

/// A daemon with an attach socket.
struct Serve {
    daemon: Option<Daemon>,
    vms: Vec<common::Vm>,
    dir: tempfile::TempDir,
}

impl Serve {
    fn new(workers: usize) -> Serve {
        let dir = tempfile::tempdir().unwrap();
        let vms = vec![common::Vm {
            cid: 3,
            socket: dir.path().join("vm3.sock"),
            uds_path: dir.path().join("vm3.vsock"),
        }];
        let mut config = daemon_config(&vms);
        config.workers = workers;
        let listener = attach::listen(&dir.path().join("attach.sock")).unwrap();
        let mut attach = AttachConfig::new(listener);
        attach.service_uids = attach.allowed_uids.clone();
        config.attach = Some(attach);
        Serve {
            daemon: Some(Daemon::start(config).unwrap()),
            vms,
            dir,
        }
    }

    fn stats(&self) -> Stats {
        self.daemon.as_ref().unwrap().stats()
    }

    fn process(&self) -> Endpoint {
        self.process_with(|builder| builder)
    }

    fn process_with(&self, tune: impl FnOnce(EndpointBuilder) -> EndpointBuilder) -> Endpoint {
        let path = self.dir.path().join("attach.sock");
        tune(Endpoint::builder()).attach(path).unwrap()
    }
}

impl Drop for Serve {
    fn drop(&mut self) {
        if let Some(daemon) = self.daemon.take() {
            daemon.shutdown();
        }
    }
}

/// A socket with time-outs of `PATIENCE`.
fn patient(socket: Datagram) -> Datagram {
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    socket.set_write_timeout(Some(PATIENCE)).unwrap();
    socket
}

fn at_host(host: &Host, port: Port) -> Datagram {
    patient(Datagram::bind(host, port).unwrap())
}

fn at(endpoint: &Endpoint, port: Port) -> Datagram {
    patient(Datagram::bind(endpoint, port).unwrap())
}

/// The reason for a failed send.
fn reason(error: &std::io::Error) -> DatagramError {
    let inner = error.get_ref().unwrap_or_else(|| panic!("{error}"));
    *inner
        .downcast_ref()
        .unwrap_or_else(|| panic!("{error} is not about datagrams"))
}

fn recv(socket: &Datagram) -> (Vec<u8>, Address) {
    let mut bytes = vec![0; 65536];
    let (len, from) = socket.recv_from(&mut bytes).unwrap();
    bytes.truncate(len);
    (bytes, from)
}
