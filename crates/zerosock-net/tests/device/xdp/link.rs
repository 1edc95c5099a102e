//! A veth pair with the device at one end.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{SendFlags, send};
use tempfile::TempDir;
use zerosock_net::server::Server;
use zerosock_net::stats::NetStats;
use zerosock_net::xdp::{Use, XdpBackend, XdpConfig};
use zerosock_proto::wire::net::Header;
use zerosock_sys::bpf::BpfError;
use zerosock_sys::network;
use zerosock_sys::tun::InterfaceName;
use zerosock_sys::xdp::{InterfaceOptions, Registered, RingSizes, Umem, XdpError, XdpInterface};

use super::super::driver::Driver;
use super::super::frames::plain;
use super::super::network::{DEADLINE, receive_from, serve, wait_until};

/// Bytes of a buffer of Linux guests.
pub(crate) const BUFFER: u32 = 1536;
/// Bytes of a header on the packet socket.
const HOST_HEADER: usize = 10;

pub(crate) const CONFIG: XdpConfig = XdpConfig {
    queue: 0,
    queues: 1,
    copies: false,
    use_of: Use::Guest,
};

pub(crate) fn name(text: &str) -> InterfaceName {
    text.parse().unwrap()
}

/// Why there is no pair of interfaces with AF_XDP.
fn missing(queues: u32) -> Option<String> {
    if let Err(error) = network::isolate_thread() {
        return Some(format!("no network namespace: {error}"));
    }
    // The kernel would send frames of its own. A kernel without IPv6 has no such file.
    for which in ["all", "default"] {
        let path = format!("/proc/sys/net/ipv6/conf/{which}/disable_ipv6");
        let _ = std::fs::write(path, "1");
    }
    let ends = [&name("near"), &name("far")];
    if let Err(error) = network::add_veth_pair(ends, 1600, queues) {
        return Some(format!("no veth: {error}"));
    }
    name("near").bring_up().unwrap();
    name("far").bring_up().unwrap();
    match XdpInterface::open(&name("near"), InterfaceOptions::default()) {
        Err(XdpError::Program(
            error @ (BpfError::Denied { .. } | BpfError::NotSupported { .. }),
        )) => return Some(error.to_string()),
        result => drop(result.unwrap()),
    }
    let sizes = RingSizes {
        receive: 64,
        transmit: 64,
    };
    match Registered::create(Umem::map(None, 1).unwrap(), sizes) {
        Err(error @ (XdpError::Denied | XdpError::NotSupported)) => Some(error.to_string()),
        result => {
            drop(result.unwrap());
            None
        }
    }
}

/// Runs a test on a thread in a namespace with two interfaces, `near` and `far`, which are up and have one
/// queue. Says that it is skipped where that is not to be had.
pub(crate) fn isolated(test_name: &str, test: impl FnOnce() + Send + 'static) {
    isolated_with(1, test_name, test);
}

/// As [`isolated`], with so many queues.
pub(crate) fn isolated_with(queues: u32, test_name: &str, test: impl FnOnce() + Send + 'static) {
    let test_name = test_name.to_owned();
    let thread = thread::spawn(move || match missing(queues) {
        Some(reason) => println!("SKIPPED {test_name}: {reason}"),
        None => test(),
    });
    thread.join().expect("the test has failed");
}

/// A device with its interface, and the other end.
pub(crate) struct Link {
    pub(crate) server: Option<Server>,
    pub(crate) socket: PathBuf,
    pub(crate) far: OwnedFd,
    _dir: TempDir,
}

pub(crate) fn open(options: InterfaceOptions) -> XdpInterface {
    XdpInterface::open(&name("near"), options).unwrap()
}

pub(crate) fn backend(options: InterfaceOptions, config: XdpConfig) -> XdpBackend {
    XdpBackend::new(open(options), config).unwrap()
}

/// A packet socket at the other end.
pub(crate) fn listen() -> OwnedFd {
    let far = network::packet_socket(&name("far")).unwrap();
    set_socket_timeout(&far, Timeout::Recv, Some(DEADLINE)).unwrap();
    far
}

pub(crate) fn send_from(far: &OwnedFd, frame: &[u8]) {
    let bytes = [&[0; HOST_HEADER][..], frame].concat();
    send(far, &bytes, SendFlags::empty()).unwrap();
}

impl Link {
    pub(crate) fn new(options: InterfaceOptions, config: XdpConfig) -> Link {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("net");
        let server = serve(&socket, None, backend(options, config));
        Link {
            server: Some(server),
            socket,
            far: listen(),
            _dir: dir,
        }
    }

    pub(crate) fn stats(&self) -> NetStats {
        self.server.as_ref().unwrap().stats()[0].1
    }

    /// A driver that a frame has reached. Nothing is posted.
    pub(crate) fn attach(&self, features: u64) -> Driver {
        let mut driver = Driver::attach(&self.socket, features, 2);
        self.wait_for_link(&mut driver);
        driver
    }

    pub(crate) fn wait_for_link(&self, driver: &mut Driver) {
        self.post(driver, &[2048]);
        self.probe(driver);
    }

    /// Sends probes until one is in a buffer that was posted.
    fn probe(&self, driver: &mut Driver) {
        let end = Instant::now() + DEADLINE;
        loop {
            self.send(&plain(60, 0xff));
            if driver.try_receive(0, Duration::from_millis(300)).is_some() {
                return;
            }
            assert!(Instant::now() < end, "no frame reaches the guest");
        }
    }

    /// Posts a chain of receive buffers. The kernel has it afterwards: without it, a frame is dropped.
    pub(crate) fn post(&self, driver: &mut Driver, lens: &[u32]) {
        driver.post(0, lens);
        self.settle(driver);
    }

    /// As [`post`](Self::post), so many buffers.
    pub(crate) fn post_many(&self, driver: &mut Driver, count: usize, len: u32) {
        driver.post_many(0, count, len);
        self.settle(driver);
    }

    /// The counters, with all that the driver has seen.
    pub(crate) fn settled(&self, driver: &mut Driver) -> NetStats {
        // The counters of a turn change after the driver sees what it has done.
        self.settle(driver);
        self.stats()
    }

    /// Waits until the device has had a turn: it returns a frame that is too short after it has posted
    /// all buffers.
    fn settle(&self, driver: &mut Driver) {
        driver.send(0, &Header::default(), &[0; 4], &[]);
        driver.wait_sent(0);
    }

    /// Posts buffers and sends frames until they are received in place.
    pub(crate) fn wait_in_place(&self, driver: &mut Driver) {
        let end = Instant::now() + DEADLINE;
        loop {
            let before = self.settled(driver);
            self.post(driver, &[BUFFER]);
            self.probe(driver);
            if self.settled(driver).rx_copied == before.rx_copied {
                return;
            }
            assert!(Instant::now() < end, "frames are copied: {before:?}");
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Waits until the memory of the socket is the guest's: a frame is sent in place.
    pub(crate) fn wait_for_memory(&self, driver: &mut Driver) {
        wait_until("sent in place", || {
            let before = self.settled(driver);
            self.check_sent(driver, &plain(60, 1), &[]);
            self.settled(driver).tx_copied == before.tx_copied
        });
    }

    /// All buffers that were posted are used. The next frame may be a probe, but not the one after that:
    /// nothing is left of buffers that were taken back.
    pub(crate) fn check_in_place(&self, driver: &mut Driver) {
        self.wait_for_memory(driver);
        let mut before = self.settled(driver);
        for seed in 4..6 {
            before = self.settled(driver);
            self.post(driver, &[BUFFER]);
            self.send(&plain(1000, seed));
            assert_eq!(driver.receive(0).1, plain(1000, seed));
        }
        assert_eq!(self.settled(driver).rx_copied, before.rx_copied);
    }

    /// A driver that receives in place.
    pub(crate) fn attach_in_place(&self, features: u64) -> Driver {
        let mut driver = self.attach(features);
        self.wait_in_place(&mut driver);
        driver
    }

    /// Sends a frame to the guest.
    pub(crate) fn send(&self, frame: &[u8]) {
        send_from(&self.far, frame);
    }

    /// The next frame of the guest.
    pub(crate) fn receive(&self) -> Vec<u8> {
        receive_from(&self.far).1
    }

    /// The guest sends a frame in buffers of these lengths, and it arrives.
    #[track_caller]
    pub(crate) fn check_sent(&self, driver: &mut Driver, frame: &[u8], lens: &[usize]) {
        driver.send(0, &Header::default(), frame, lens);
        driver.wait_sent(0);
        assert!(self.receive() == frame, "another frame of the guest");
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        if let Some(server) = self.server.take() {
            server.shutdown();
        }
    }
}
