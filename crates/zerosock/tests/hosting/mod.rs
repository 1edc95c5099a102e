//! A host under test, its VMs' sockets, and a thread that calls its `drive` while the test acts as
//! the guest.
#![allow(dead_code, reason = "each test program uses its own part")]

use std::ops::Deref;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::common::driver::{Driver, DriverConfig};
use zerosock::daemon::{HostSide, VmConfig};
use zerosock::vsock::{Host, HostBuilder, Stream, Wait};
use zerosock::{Address, Cid};
use zerosock_proto::wire::vsock::Op;

use super::common::pump::Pumped;
use super::common::raw::{NEXT, RawGuest, TX, emit};
use super::common::{PATIENCE, deadline, pairs};

/// See the module.
pub(crate) struct Hosted {
    host: Pumped,
    sockets: Vec<PathBuf>,
    dir: Option<tempfile::TempDir>,
}

impl Hosted {
    /// One VM with CID 3.
    pub(crate) fn new() -> Hosted {
        Hosted::with(1, Wait::Sleep)
    }

    /// `vms` VMs with CIDs from 3 on.
    pub(crate) fn with(vms: u32, wait: Wait) -> Hosted {
        Hosted::start(vms, wait, Duration::from_millis(20), |builder| builder)
    }

    /// One VM, and a host with other settings.
    pub(crate) fn tuned(tune: impl FnOnce(HostBuilder) -> HostBuilder) -> Hosted {
        Hosted::start(1, Wait::Sleep, Duration::from_millis(20), tune)
    }

    pub(crate) fn with_hold(vms: u32, hold: Duration) -> Hosted {
        Hosted::start(vms, Wait::Sleep, hold, |builder| builder)
    }

    fn start(
        vms: u32,
        wait: Wait,
        hold: Duration,
        tune: impl FnOnce(HostBuilder) -> HostBuilder,
    ) -> Hosted {
        let dir = tempfile::tempdir().unwrap();
        let mut configs = Vec::new();
        let mut sockets = Vec::new();
        for cid in 3..3 + vms {
            let socket = dir.path().join(format!("vm{cid}.sock"));
            configs.push(VmConfig {
                cid: Cid::new(cid),
                listener: UnixListener::bind(&socket).unwrap(),
                host: HostSide::None,
                buf_alloc: 262_144,
                queue_size: 1024,
                groups: Vec::new(),
                require_sealed_memory: false,
                stopped_timeout: None,
                guest_endpoints: None,
                succession: None,
            });
            sockets.push(socket);
        }
        let builder = Host::builder().hold(hold).wait(wait).queue_pairs(pairs());
        let builder = configs.into_iter().fold(builder, |b, vm| b.vm_with(vm));
        let mut hosted = Hosted::of(tune(builder));
        hosted.sockets = sockets;
        hosted.dir = Some(dir);
        hosted
    }

    /// A host made by the caller, with the caller's sockets.
    pub(crate) fn of(builder: HostBuilder) -> Hosted {
        Hosted {
            host: Pumped::new(builder.start().unwrap()),
            sockets: Vec::new(),
            dir: None,
        }
    }

    /// A guest for the first VM.
    pub(crate) fn guest(&self) -> Driver {
        self.guest_of(0)
    }

    pub(crate) fn guest_of(&self, index: usize) -> Driver {
        guest_at(&self.sockets[index])
    }

    /// The socket of a VM.
    pub(crate) fn socket_path(&self, index: usize) -> &Path {
        &self.sockets[index]
    }

    /// A guest for the first VM that writes its rings by hand.
    pub(crate) fn raw_guest(&self) -> RawGuest {
        RawGuest::attach(&self.sockets[0])
    }

    /// Connects; tries again while the guest is starting.
    pub(crate) fn connect_to(&self, to: Address) -> Stream {
        let give_up = deadline();
        let stream = loop {
            match self.connect(to) {
                Ok(stream) => break stream,
                Err(error) => assert!(Instant::now() < give_up, "{error}"),
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        stream
    }

    /// Stops the thread: from now on only the test's calls run the host.
    pub(crate) fn stop(&mut self) {
        self.host.stop();
    }
}

impl Deref for Hosted {
    type Target = Host;

    fn deref(&self) -> &Host {
        &self.host
    }
}

/// A guest at a VM's socket.
pub(crate) fn guest_at(socket: &Path) -> Driver {
    let give_up = deadline();
    loop {
        let mut config = DriverConfig::new(socket);
        config.queue_pairs = pairs();
        match Driver::attach(config) {
            Ok(driver) => return driver,
            // The device may still disconnect its previous guest.
            Err(error) if Instant::now() > give_up => panic!("{error}"),
            Err(_) => std::thread::sleep(Duration::from_millis(5)),
        }
    }
}

/// Sends a packet from the guest's `port` to the host's `to`; returns the place of its payload.
pub(crate) fn raw_send(guest: &mut RawGuest, port: u32, to: u32, payload: &[u8]) -> u64 {
    let index = guest.tx_pair();
    let (at, data) = (guest.buffer(TX, index), guest.buffer(TX, index + 1));
    let mut header = guest.header(port, to, Op::Rw);
    header.len = payload.len() as u32;
    let header = emit(&header);
    guest.write(at, &header);
    guest.write(data, payload);
    guest.desc(TX, index, at, header.len() as u32, NEXT, index + 1);
    guest.desc(TX, index + 1, data, payload.len() as u32, 0, 0);
    guest.make_available(TX, index);
    guest.kick(TX);
    data
}

/// The number of occurrences of `needle` in the guest's memory.
pub(crate) fn raw_count(guest: &RawGuest, needle: &[u8]) -> usize {
    let mut all = vec![0; 4 << 20];
    guest.read(super::common::raw::GUEST, &mut all);
    all.windows(needle.len()).filter(|at| *at == needle).count()
}
