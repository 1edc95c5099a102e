//! A switch with ports for interfaces.

use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use tempfile::TempDir;
use zerosock_net::interface::{Interface, InterfaceConfig, ReceivedFrame};
use zerosock_net::server::{GuestConfig, Server};
use zerosock_net::tap::TapBackend;
use zerosock_proto::wire::net::Mac;
use zerosock_sys::account::Limits;

/// Longer than anything takes on a slow machine.
pub(crate) const DEADLINE: Duration = Duration::from_secs(300);

const LIMITS: Limits = Limits {
    descriptors: 256,
    numbers: 512,
    mapped: 1 << 30,
    mapped_each: 1 << 30,
};

/// The address of port `number`.
pub(crate) fn mac(number: u8) -> Mac {
    Mac([2, 0, 0, 0, 0, number])
}

/// A switch; dropping it ends it.
pub(crate) struct Lan {
    server: Option<Server>,
    pub(crate) sockets: Vec<PathBuf>,
    _dir: TempDir,
}

impl Lan {
    /// A switch of which each port has the address of its number, with these MTUs.
    pub(crate) fn new(mtus: &[Option<u16>]) -> Lan {
        Lan::with_memory(mtus, true)
    }

    /// As `new`; refuses memory that can shrink if `sealed`.
    pub(crate) fn with_memory(mtus: &[Option<u16>], sealed: bool) -> Lan {
        let dir = tempfile::tempdir().unwrap();
        let ports = (0..).zip(mtus).map(|(number, mtu)| {
            let socket = dir.path().join(number.to_string());
            let config = GuestConfig {
                name: format!("port {number}"),
                listener: UnixListener::bind(&socket).unwrap(),
                mac: Some(mac(number)),
                mac_filter: true,
                mtu: *mtu,
                sealed_memory: sealed,
                limits: LIMITS,
            };
            (socket, config)
        });
        let (sockets, guests) = ports.unzip();
        let uplink = None::<(String, TapBackend)>;
        let server = Server::start_switch(guests, uplink, Duration::ZERO).unwrap();
        Lan {
            server: Some(server),
            sockets,
            _dir: dir,
        }
    }

    pub(crate) fn connect(&self, port: usize, config: &InterfaceConfig) -> Interface {
        Interface::connect(&self.sockets[port], config).unwrap()
    }

    pub(crate) fn server(&self) -> &Server {
        self.server.as_ref().unwrap()
    }

    pub(crate) fn stop(&mut self) {
        if let Some(server) = self.server.take() {
            server.shutdown();
        }
    }
}

impl Drop for Lan {
    fn drop(&mut self) {
        self.stop();
    }
}

/// The next frame; waits for it.
#[track_caller]
pub(crate) fn receive(interface: &Interface) -> ReceivedFrame<'_> {
    let end = Instant::now() + DEADLINE;
    loop {
        if let Some(frame) = interface.recv() {
            return frame;
        }
        interface.wait(Some(end)).unwrap();
        assert!(Instant::now() < end, "no frame");
    }
}
