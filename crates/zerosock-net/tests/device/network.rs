//! A network namespace with a TAP, the device on it, and the host's side as a packet socket.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{RecvFlags, SendFlags};
use tempfile::TempDir;
use zerosock_net::backend::Backend;
use zerosock_net::server::{GuestConfig, Server};
use zerosock_net::stats::NetStats;
use zerosock_net::tap::TapBackend;
use zerosock_proto::wire::net::Header;
use zerosock_sys::account::Limits;
use zerosock_sys::network;
use zerosock_sys::tun::{InterfaceName, Tap, TapError};

use super::driver::Driver;
use super::frames::{MARK, is_ours};

/// Longer than anything takes on a slow machine.
pub(crate) const DEADLINE: Duration = Duration::from_secs(300);
/// Bytes of a header on the packet socket.
const HOST_HEADER: usize = 10;

/// Waits until `done`.
#[track_caller]
pub(crate) fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let end = Instant::now() + DEADLINE;
    while !done() {
        assert!(Instant::now() < end, "not within the deadline: {what}");
        thread::sleep(Duration::from_millis(1));
    }
}

/// Runs a test on a thread in a namespace of its own. Says that it is skipped where that, or a TAP, is
/// not to be had.
pub(crate) fn isolated(name: &str, test: impl FnOnce() + Send + 'static) {
    let name = name.to_owned();
    let thread = thread::spawn(move || {
        if let Err(error) = network::isolate_thread() {
            println!("SKIPPED {name}: no network namespace: {error}");
            return;
        }
        // The kernel would send frames of its own. A kernel without IPv6 has no such file.
        for which in ["all", "default"] {
            let path = format!("/proc/sys/net/ipv6/conf/{which}/disable_ipv6");
            let _ = std::fs::write(path, "1");
        }
        match Tap::open(&"probe".parse().unwrap(), 1) {
            Err(error @ (TapError::Device(_) | TapError::Take(_))) => {
                println!("SKIPPED {name}: no TAP: {error}");
            }
            result => {
                drop(result.unwrap());
                test();
            }
        }
    });
    thread.join().expect("the test has failed");
}

/// What a test may set.
pub(crate) struct Setup {
    pub(crate) queues: u16,
    pub(crate) mtu: Option<u16>,
}

impl Default for Setup {
    fn default() -> Setup {
        Setup {
            queues: 1,
            mtu: None,
        }
    }
}

/// A device with its TAP and the host's side.
pub(crate) struct Network {
    pub(crate) tap: InterfaceName,
    pub(crate) socket: PathBuf,
    pub(crate) server: Option<Server>,
    pub(crate) host: OwnedFd,
    _dir: TempDir,
}

pub(crate) const LIMITS: Limits = Limits {
    descriptors: 256,
    numbers: 512,
    mapped: 1 << 30,
    mapped_each: 1 << 30,
};

/// A server on any back-end.
pub(crate) fn serve(socket: &PathBuf, mtu: Option<u16>, backend: impl Backend) -> Server {
    let config = GuestConfig {
        name: "test".into(),
        listener: UnixListener::bind(socket).unwrap(),
        mac: Some("52:54:00:00:00:02".parse().unwrap()),
        mac_filter: false,
        mtu,
        sealed_memory: false,
        limits: LIMITS,
    };
    Server::start(config, backend, Duration::ZERO).unwrap()
}

impl Network {
    pub(crate) fn new(setup: &Setup) -> Network {
        let tap: InterfaceName = "guest".parse().unwrap();
        let backend = Tap::open(&tap, setup.queues).unwrap();
        if let Some(mtu) = setup.mtu {
            tap.set_mtu(mtu).unwrap();
        }
        tap.bring_up().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("net");
        let backend = TapBackend::new(backend).unwrap();
        let server = serve(&socket, setup.mtu, backend);
        let host = network::packet_socket(&tap).unwrap();
        set_socket_timeout(&host, Timeout::Recv, Some(DEADLINE)).unwrap();
        Network {
            tap,
            socket,
            server: Some(server),
            host,
            _dir: dir,
        }
    }

    pub(crate) fn stats(&self) -> NetStats {
        self.server.as_ref().unwrap().stats()[0].1
    }

    /// A driver with the link up: a frame of the host has reached it. One receive queue for each pair;
    /// nothing is posted.
    pub(crate) fn attach(&self, features: u64) -> Driver {
        let mut driver = Driver::attach(&self.socket, features, 2);
        self.wait_for_link(&mut driver);
        driver
    }

    pub(crate) fn wait_for_link(&self, driver: &mut Driver) {
        driver.post(0, &[2048]);
        let end = Instant::now() + DEADLINE;
        for flow in (0..=u8::MAX).cycle() {
            let _ = self.try_send(&Header::default(), &super::frames::probe(flow));
            if driver.try_receive(0, Duration::from_millis(300)).is_some() {
                return;
            }
            assert!(Instant::now() < end, "no frame reaches the guest");
        }
    }

    pub(crate) fn try_send(&self, header: &Header, frame: &[u8]) -> io::Result<()> {
        let bytes = [&header.0[..HOST_HEADER], frame].concat();
        rustix::net::send(&self.host, &bytes, SendFlags::empty())?;
        Ok(())
    }

    /// Sends a frame to the guest.
    pub(crate) fn send(&self, header: &Header, frame: &[u8]) {
        self.try_send(header, frame).unwrap();
    }

    /// The next frame of the guest.
    pub(crate) fn receive(&self) -> (Header, Vec<u8>) {
        receive_from(&self.host)
    }
}

/// The next frame of a guest on the host's packet socket.
pub(crate) fn receive_from(host: &OwnedFd) -> (Header, Vec<u8>) {
    let mut bytes = vec![0; 70_000];
    loop {
        let (_, len) = rustix::net::recv(host, &mut bytes[..], RecvFlags::empty()).unwrap();
        let (header, frame) = bytes[..len].split_at(HOST_HEADER);
        if is_ours(frame) && frame[6..12] == MARK {
            let mut full = Header::default();
            full.0[..HOST_HEADER].copy_from_slice(header);
            return (full, frame.to_vec());
        }
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        if let Some(server) = self.server.take() {
            server.shutdown();
        }
    }
}
