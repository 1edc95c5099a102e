//! Forwarding by rule: guests to TCP, UDP and Unix sockets, and clients of TCP and Unix listeners to
//! guests, attached processes and services.

mod associations;
mod bounds;
mod copies;
mod datagrams;
mod ends;
mod inward;
mod names;
mod outward;
mod reload;
mod sources;
mod zero_copy;

use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::time::Instant;

use crate::common::driver::{Driver, DriverConfig, WaitError};
use zerosock::Port;
use zerosock::attach::{self, AttachConfig};
use zerosock::daemon::{Daemon, DaemonConfig, Stats};
use zerosock::forward::{ForwardRule, RuleStats};
use zerosock::vsock::{Endpoint, EndpointBuilder};

use crate::common::{self, PATIENCE, Vm, deadline, eventually, host};

/// A daemon with rules, VMs from CID 3 on, and an attach socket on which the test's user may also run
/// services.
struct ForwardingDaemon {
    daemon: Option<Daemon>,
    vms: Vec<Vm>,
    dir: tempfile::TempDir,
}

impl ForwardingDaemon {
    /// One VM and these rules.
    fn new(rules: Vec<ForwardRule>) -> ForwardingDaemon {
        ForwardingDaemon::with(1, |config| config.forward = rules)
    }

    fn with(vms: u32, tune: impl FnOnce(&mut DaemonConfig)) -> ForwardingDaemon {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: String| dir.path().join(name);
        let vms: Vec<_> = (3..3 + vms)
            .map(|cid| Vm {
                cid,
                socket: at(format!("vm{cid}.sock")),
                uds_path: at(format!("vm{cid}.vsock")),
            })
            .collect();
        let mut config = common::daemon_config(&vms);
        let mut attach = AttachConfig::new(attach::listen(&at("attach".into())).unwrap());
        attach.service_uids = vec![rustix::process::geteuid().as_raw()];
        config.attach = Some(attach);
        tune(&mut config);
        ForwardingDaemon {
            daemon: Some(Daemon::start(config).unwrap()),
            vms,
            dir,
        }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn daemon(&self) -> &Daemon {
        self.daemon.as_ref().unwrap()
    }

    fn stats(&self) -> Stats {
        self.daemon().stats()
    }

    /// The counters of the rule with this number.
    fn rule(&self, index: usize) -> RuleStats {
        self.daemon().forward_stats().swap_remove(index)
    }

    /// The guest of VM `index`.
    fn guest_of(&self, index: usize) -> Driver {
        let give_up = deadline();
        loop {
            let mut config = DriverConfig::new(&self.vms[index].socket);
            config.queue_pairs = common::pairs();
            match Driver::attach(config) {
                Ok(driver) => return driver,
                Err(error) if Instant::now() > give_up => panic!("{error}"),
                Err(_) => std::thread::yield_now(),
            }
        }
    }

    fn guest(&self) -> Driver {
        self.guest_of(0)
    }

    /// The guest of the first VM, by the blocking API.
    fn endpoint(&self) -> Endpoint {
        Endpoint::builder()
            .attach_device(&self.vms[0].socket)
            .unwrap()
    }

    fn process(&self, tune: impl FnOnce(EndpointBuilder) -> EndpointBuilder) -> Endpoint {
        tune(Endpoint::builder()).attach(self.at("attach")).unwrap()
    }

    /// Waits until no connection by a rule exists any more.
    #[track_caller]
    fn until_none_is_left(&self) {
        eventually("all forwarded connections gone", || {
            let stats = self.daemon().forward_stats();
            stats.iter().all(|rule| rule.active == 0)
        });
    }
}

impl Drop for ForwardingDaemon {
    fn drop(&mut self) {
        if let Some(daemon) = self.daemon.take() {
            daemon.shutdown();
        }
    }
}

/// A rule for one port and all endpoints.
fn rule(port: u32, to: impl AsRef<str>) -> ForwardRule {
    let ports = Port::new(port)..=Port::new(port);
    ForwardRule::new(ports, to.as_ref().parse().unwrap())
}

fn tcp_server() -> (TcpListener, String) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let target = format!("tcp:{}", listener.local_addr().unwrap());
    (listener, target)
}

fn unix(kind: &str, path: &Path) -> String {
    format!("{kind}:{}", path.display())
}

/// A connection of the server, with time-outs.
fn accept(listener: &TcpListener) -> TcpStream {
    let (stream, _) = listener.accept().unwrap();
    with_time_outs(stream)
}

fn with_time_outs(stream: TcpStream) -> TcpStream {
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.set_write_timeout(Some(PATIENCE)).unwrap();
    stream
}

/// A connect of the guest is refused.
#[track_caller]
fn refused(guest: &mut Driver, port: u32) {
    let refused = guest.wait_connect(host(port), deadline());
    assert!(matches!(refused, Err(WaitError::Refused)), "{refused:?}");
}
