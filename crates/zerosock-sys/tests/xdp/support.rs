//! A pair of veth interfaces: a program on one, a packet socket on the other.

use std::os::fd::{AsFd, OwnedFd};
use std::process::Command;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{RecvFlags, SendFlags, recv, send};
use zerosock_ring::{Memory, Piece, RegionConfig};
use zerosock_sys::bpf::BpfError;
use zerosock_sys::memfd;
use zerosock_sys::network;
use zerosock_sys::tun::InterfaceName;
use zerosock_sys::xdp::{
    AttachMode, InterfaceOptions, ReceivedChunk, Registered, RingSizes, Umem, XdpError,
    XdpInterface, XdpSocket,
};

/// Longer than anything takes on a slow machine.
pub(crate) const DEADLINE: Duration = Duration::from_secs(300);
pub(crate) const SIZES: RingSizes = RingSizes {
    receive: 64,
    transmit: 64,
};
/// Bytes of a header on packet sockets.
const HOST_HEADER: usize = 10;
/// The frame's type, which no protocol has.
const TYPE: [u8; 2] = [0x88, 0xb5];

pub(crate) fn name(text: &str) -> InterfaceName {
    text.parse().unwrap()
}

/// Runs `ip` in the namespace of this thread.
pub(crate) fn ip(arguments: &str) {
    let status = Command::new("ip").args(arguments.split(' ')).status();
    assert!(status.unwrap().success(), "ip {arguments}");
}

/// Runs a test on a thread in a namespace with two interfaces, `near` and `far`, which are up and have
/// two queues. Says that it is skipped where that is not to be had.
pub(crate) fn isolated(test_name: &str, test: impl FnOnce() + Send + 'static) {
    isolated_with(1, test_name, test);
}

/// As [`isolated`], with so many queues from `far` to `near`. The kernel chooses one by a hash with a key of
/// the boot.
pub(crate) fn isolated_with(queues: u32, test_name: &str, test: impl FnOnce() + Send + 'static) {
    let test_name = test_name.to_owned();
    let thread = thread::spawn(move || {
        if let Err(error) = network::isolate_thread() {
            println!("SKIPPED {test_name}: no network namespace: {error}");
            return;
        }
        // The kernel would send frames of its own. A kernel without IPv6 has no such file.
        for which in ["all", "default"] {
            let path = format!("/proc/sys/net/ipv6/conf/{which}/disable_ipv6");
            let _ = std::fs::write(path, "1");
        }
        let near = "mtu 1600 numrxqueues 2 numtxqueues 2";
        let far = format!("mtu 1600 numrxqueues 2 numtxqueues {queues}");
        let pair = format!("link add near {near} type veth peer name far {far}");
        match Command::new("ip").args(pair.split(' ')).output() {
            Err(error) => {
                println!("SKIPPED {test_name}: no `ip`: {error}");
                return;
            }
            Ok(output) if !output.status.success() => {
                let told = String::from_utf8_lossy(&output.stderr);
                println!("SKIPPED {test_name}: no veth: {told}");
                return;
            }
            Ok(_) => {}
        }
        name("near").bring_up().unwrap();
        name("far").bring_up().unwrap();
        match open_near(InterfaceOptions::default()) {
            Err(XdpError::Program(
                error @ (BpfError::Denied { .. } | BpfError::NotSupported { .. }),
            )) => println!("SKIPPED {test_name}: {error}"),
            result => {
                let interface = result.unwrap();
                match Registered::create(Umem::map(None, 1).unwrap(), SIZES) {
                    Err(error @ (XdpError::Denied | XdpError::NotSupported)) => {
                        println!("SKIPPED {test_name}: {error}");
                    }
                    result => {
                        drop((result.unwrap(), interface));
                        test();
                    }
                }
            }
        }
    });
    thread.join().expect("the test has failed");
}

/// Opens `near`. A program that another test starts holds a copy of each descriptor until it is executed,
/// and so the program of an interface that was closed here can still be attached.
pub(crate) fn open_near(options: InterfaceOptions) -> Result<XdpInterface, XdpError> {
    let end = Instant::now() + DEADLINE;
    loop {
        match XdpInterface::open(&name("near"), options) {
            Err(XdpError::Attached) if Instant::now() < end => {
                thread::sleep(Duration::from_millis(1));
            }
            result => return result,
        }
    }
}

/// As [`isolated`], once for each place where the program can run.
pub(crate) fn isolated_each(test_name: &str, test: fn(InterfaceOptions)) {
    for attach in [AttachMode::Driver, AttachMode::Generic] {
        isolated(test_name, move || {
            test(InterfaceOptions {
                attach: Some(attach),
                ..InterfaceOptions::default()
            });
        });
    }
}

/// The interface with the program, and the other end.
pub(crate) struct Link {
    pub(crate) interface: XdpInterface,
    pub(crate) far: OwnedFd,
}

impl Link {
    pub(crate) fn open(options: InterfaceOptions) -> Link {
        Link {
            interface: open_near(options).unwrap(),
            far: listen("far"),
        }
    }

    /// A socket on queue 0.
    pub(crate) fn bind(&self, umem: Umem) -> XdpSocket {
        let registered = Registered::create(umem, SIZES).unwrap();
        registered.bind(&self.interface, 0, DEADLINE).unwrap()
    }

    pub(crate) fn send(&self, frame: &[u8]) {
        let bytes = [&[0; HOST_HEADER][..], frame].concat();
        send(&self.far, &bytes, SendFlags::empty()).unwrap();
    }

    /// The next frame that arrives at the other end.
    pub(crate) fn receive(&self) -> Vec<u8> {
        next_frame(&self.far)
    }
}

/// A packet socket.
pub(crate) fn listen(interface: &str) -> OwnedFd {
    let socket = network::packet_socket(&name(interface)).unwrap();
    set_socket_timeout(&socket, Timeout::Recv, Some(DEADLINE)).unwrap();
    socket
}

/// The next frame of a test at a packet socket, other than those that it has sent itself.
pub(crate) fn next_frame(socket: &OwnedFd) -> Vec<u8> {
    let mut bytes = vec![0; 70_000];
    loop {
        let (_, len) = recv(socket, &mut bytes[..], RecvFlags::empty()).unwrap();
        let frame = &bytes[HOST_HEADER..len];
        if frame[12..14] == TYPE {
            return frame.to_vec();
        }
    }
}

/// A frame of `len` bytes, different from others by `mark`.
pub(crate) fn frame(len: usize, mark: u8) -> Vec<u8> {
    let head = [2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2];
    let rest = (14..len).map(|index| (index as u8).wrapping_mul(7) ^ mark);
    head.into_iter().chain(TYPE).chain(rest).take(len).collect()
}

/// Waits until the socket has a frame.
#[track_caller]
pub(crate) fn take(socket: &mut XdpSocket) -> ReceivedChunk {
    let end = Instant::now() + DEADLINE;
    loop {
        if let Some(received) = socket.receive().unwrap() {
            return received;
        }
        let left = end.saturating_duration_since(Instant::now());
        assert!(!left.is_zero(), "no frame within the deadline");
        wait_readable(&*socket, left);
    }
}

/// Whether it can be read within the limit.
pub(crate) fn wait_readable(fd: impl AsFd, limit: Duration) -> bool {
    let limit = Timespec::try_from(limit).unwrap();
    poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&limit)).unwrap() > 0
}

/// Waits until `done`.
#[track_caller]
pub(crate) fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let end = Instant::now() + DEADLINE;
    while !done() {
        assert!(Instant::now() < end, "not within the deadline: {what}");
        thread::sleep(Duration::from_millis(1));
    }
}

/// Guest memory.
pub(crate) struct Guest {
    pub(crate) memory: Arc<Memory>,
    /// All bytes, region after region.
    bytes: u32,
}

/// Where regions begin, in guest addresses: there are gaps between them.
pub(crate) const APART: u64 = 1 << 30;

impl Guest {
    /// Memory of regions with these lengths.
    pub(crate) fn new(lengths: &[u32]) -> Guest {
        let regions = lengths.iter().enumerate().map(|(index, len)| {
            let guest_addr = index as u64 * APART;
            let config = RegionConfig {
                guest_addr,
                user_addr: guest_addr,
                len: u64::from(*len),
                fd_offset: 0,
            };
            let file = memfd::create("guest", u64::from(*len), false).unwrap();
            (file, config)
        });
        Guest {
            memory: Arc::new(Memory::map(regions.collect()).unwrap()),
            bytes: lengths.iter().sum(),
        }
    }

    /// One region of 64 KiB.
    pub(crate) fn small() -> Guest {
        Guest::new(&[64 << 10])
    }

    pub(crate) fn umem(&self, chunks: u32) -> Umem {
        Umem::map(Some(Arc::clone(&self.memory)), chunks).unwrap()
    }

    pub(crate) fn pieces(&self, addr: u64, len: u32) -> Vec<Piece> {
        let mut pieces = Vec::new();
        self.memory.translate(addr, len, &mut pieces).unwrap();
        pieces
    }

    pub(crate) fn write(&self, addr: u64, bytes: &[u8]) {
        let pieces = self.pieces(addr, bytes.len() as u32);
        assert_eq!(self.memory.write(&pieces, 0, bytes), bytes.len());
    }

    /// All regions, whole.
    fn all(&self) -> Vec<Piece> {
        let mut pieces = Vec::new();
        let mut region = 0;
        while let Ok(piece) = self.whole(region) {
            pieces.push(piece);
            region += 1;
        }
        pieces
    }

    fn whole(&self, region: u64) -> Result<Piece, ()> {
        // The longest piece that begins there.
        let mut pieces = Vec::new();
        for pages in (1..=self.bytes / 4096).rev() {
            if (self.memory)
                .translate(region * APART, pages * 4096, &mut pieces)
                .is_ok()
            {
                return pieces.first().copied().ok_or(());
            }
        }
        Err(())
    }

    pub(crate) fn contents(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.bytes as usize];
        assert_eq!(self.memory.read(&self.all(), 0, &mut bytes), bytes.len());
        bytes
    }

    /// Fills all memory with a pattern.
    pub(crate) fn fill(&self) {
        let bytes: Vec<u8> = (0..self.bytes)
            .map(|index| (index % 251) as u8 ^ 0x5a)
            .collect();
        assert_eq!(self.memory.write(&self.all(), 0, &bytes), bytes.len());
    }
}
