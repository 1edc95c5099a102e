//! A veth pair for tests, in a network namespace of its own.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use rustix::net::{SendFlags, send};
use zerosock_sys::bpf::BpfError;
use zerosock_sys::network;
use zerosock_sys::tun::InterfaceName;
use zerosock_sys::xdp::{InterfaceOptions, Registered, Umem, XdpError, XdpInterface};

use super::sizes::SIZES;

/// Longer than anything takes on a slow machine.
pub(super) const DEADLINE: Duration = Duration::from_secs(60);
/// Bytes of a header on packet sockets.
const HOST_HEADER: usize = 10;

/// One end with the program, and a packet socket at the other.
pub(super) struct VethPair {
    pub(super) near: Arc<XdpInterface>,
    far: OwnedFd,
}

/// A frame of 100 bytes.
pub(super) fn frame(seed: u8) -> Vec<u8> {
    let head = [2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 0x88, 0xb5];
    head.into_iter().chain([seed; 86]).collect()
}

impl VethPair {
    /// Sends [`frame`] from the other end.
    pub(super) fn send(&self, seed: u8) {
        let bytes = [&[0; HOST_HEADER][..], &frame(seed)].concat();
        send(&self.far, &bytes, SendFlags::empty()).unwrap();
    }
}

/// Runs a test on a thread in a namespace of its own. Says that it is skipped where that is not to be had.
pub(super) fn with_pair(test_name: &'static str, test: impl FnOnce(VethPair) + Send + 'static) {
    let thread = thread::spawn(move || match open() {
        Ok(pair) => test(pair),
        Err(reason) => println!("SKIPPED {test_name}: {reason}"),
    });
    thread.join().expect("the test has failed");
}

fn open() -> Result<VethPair, String> {
    network::isolate_thread().map_err(|error| format!("no network namespace: {error}"))?;
    // The kernel would send frames of its own. A kernel without IPv6 has no such file.
    for which in ["all", "default"] {
        let path = format!("/proc/sys/net/ipv6/conf/{which}/disable_ipv6");
        let _ = std::fs::write(path, "1");
    }
    let [near, far] = ["near", "far"].map(|name| name.parse::<InterfaceName>().unwrap());
    let pair = network::add_veth_pair([&near, &far], 1600, 1);
    pair.map_err(|error| format!("no veth: {error}"))?;
    near.bring_up().unwrap();
    far.bring_up().unwrap();
    let near = match XdpInterface::open(&near, InterfaceOptions::default()) {
        Err(XdpError::Program(
            error @ (BpfError::Denied { .. } | BpfError::NotSupported { .. }),
        )) => return Err(error.to_string()),
        result => result.unwrap(),
    };
    match Registered::create(Umem::map(None, 1).unwrap(), SIZES) {
        Err(error @ (XdpError::Denied | XdpError::NotSupported)) => return Err(error.to_string()),
        result => drop(result.unwrap()),
    }
    let far = network::packet_socket(&far).unwrap();
    let near = Arc::new(near);
    Ok(VethPair { near, far })
}
