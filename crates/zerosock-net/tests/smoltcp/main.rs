//! Two stacks of smoltcp, each on an interface, over a switch.

#[path = "../interface/lan.rs"]
#[expect(dead_code, reason = "others use more of it")]
mod lan;

use std::thread;
use std::time::{Duration, Instant};

use sha2::{Digest, Sha256};
use smoltcp::iface::{Config, Interface as Stack, SocketHandle, SocketSet};
use smoltcp::socket::tcp;
use smoltcp::wire::{EthernetAddress, IpAddress, IpCidr};
use zerosock_net::interface::{
    Checksum, Gso, InterfaceConfig, Repr, Segments, SmoltcpDevice, Trust,
};
use zerosock_proto::wire::net::Offloads;

use lan::{DEADLINE, Lan};

const BYTES: usize = 2 << 20;
const PORT: u16 = 80;

/// A stack with one TCP socket.
struct Host {
    device: SmoltcpDevice,
    stack: Stack,
    sockets: SocketSet<'static>,
    socket: SocketHandle,
    since: Instant,
}

impl Host {
    fn new(lan: &Lan, number: u8, config: &InterfaceConfig) -> Host {
        let interface = lan.connect(number.into(), config);
        let address = EthernetAddress(interface.mac().0);
        let mut device = SmoltcpDevice::new(interface);
        let now = smoltcp::time::Instant::ZERO;
        let mut stack = Stack::new(Config::new(address.into()), &mut device, now);
        stack.update_ip_addrs(|addresses| {
            let address = IpAddress::v4(10, 0, 0, number + 1);
            addresses.push(IpCidr::new(address, 24)).unwrap();
        });
        let buffer = || tcp::SocketBuffer::new(vec![0; 256 << 10]);
        let mut sockets = SocketSet::new(Vec::new());
        let socket = sockets.add(tcp::Socket::new(buffer(), buffer()));
        Host {
            device,
            stack,
            sockets,
            socket,
            since: Instant::now(),
        }
    }

    fn socket(&mut self) -> &mut tcp::Socket<'static> {
        self.sockets.get_mut(self.socket)
    }

    fn connect(&mut self, to: u8) {
        let remote = (IpAddress::v4(10, 0, 0, to + 1), PORT);
        let socket = self.sockets.get_mut::<tcp::Socket<'_>>(self.socket);
        socket.connect(self.stack.context(), remote, 49152).unwrap();
    }

    /// Runs the stack until `done`.
    fn run(&mut self, mut done: impl FnMut(&mut tcp::Socket<'_>) -> bool) {
        let end = Instant::now() + DEADLINE;
        loop {
            let now = smoltcp::time::Instant::from_micros(self.since.elapsed().as_micros() as i64);
            self.stack.poll(now, &mut self.device, &mut self.sockets);
            if done(self.socket()) {
                self.device.interface().flush();
                return;
            }
            assert!(Instant::now() < end, "no end of a transfer");
            let delay = self.stack.poll_delay(now, &self.sockets);
            self.device.wait(delay).unwrap();
        }
    }

    /// Sends all of the bytes and closes.
    fn send(&mut self, bytes: &[u8]) {
        let mut sent = 0;
        self.run(|socket| {
            if sent < bytes.len() && socket.can_send() {
                sent += socket.send_slice(&bytes[sent..]).unwrap();
            }
            sent == bytes.len()
        });
        self.socket().close();
        // It answers the other side's end before that.
        self.run(|socket| matches!(socket.state(), tcp::State::TimeWait | tcp::State::Closed));
    }

    /// The sum of all bytes until the end.
    fn receive(&mut self) -> (usize, Vec<u8>) {
        let mut sum = Sha256::new();
        let mut count = 0;
        self.run(|socket| {
            while socket.can_recv() {
                count += socket
                    .recv(|bytes| {
                        sum.update(&*bytes);
                        (bytes.len(), bytes.len())
                    })
                    .unwrap();
            }
            !socket.may_recv() && socket.state() != tcp::State::SynSent && count > 0
        });
        self.socket().close();
        self.run(|socket| !socket.is_open());
        (count, sum.finalize().to_vec())
    }
}

fn transfer(config: &InterfaceConfig) {
    let lan = Lan::new(&[None, Some(1500)]);
    let bytes: Vec<u8> = (0..BYTES as u32)
        .map(|at| at.wrapping_mul(0x9e37_79b1).to_be_bytes()[0])
        .collect();
    let expected = Sha256::digest(&bytes).to_vec();
    let mut server = Host::new(&lan, 0, config);
    let mut client = Host::new(&lan, 1, config);
    server.socket().listen(PORT).unwrap();
    let client = thread::spawn(move || {
        client.connect(0);
        client.receive()
    });
    server.send(&bytes);
    let (count, sum) = client.join().unwrap();
    assert_eq!(count, BYTES);
    assert_eq!(sum, expected);
}

#[test]
fn a_tcp_transfer_between_two_stacks_keeps_its_bytes() {
    transfer(&InterfaceConfig::default());
}

#[test]
fn a_tcp_transfer_with_trust_and_polling_keeps_its_bytes() {
    transfer(&InterfaceConfig {
        // SAFETY: the device is the switch of this process, which writes a buffer only while it has
        // it. The memory is sealed, no other process has it, and nothing here writes a lease.
        trust: Some(unsafe { Trust::declare() }),
        spin: Duration::from_micros(50),
        offloads: Offloads::default(),
        ..InterfaceConfig::default()
    });
}

fn sum(bytes: &[u8]) -> u32 {
    let words = bytes.chunks(2);
    words
        .map(|word| u32::from(word[0]) << 8 | u32::from(word.get(1).copied().unwrap_or(0)))
        .sum()
}

fn fold(sum: u32) -> u16 {
    let sum = (sum & 0xffff) + (sum >> 16);
    ((sum & 0xffff) + (sum >> 16)) as u16
}

/// A segment as a Linux guest sends it with TSO: of many kilobytes, with a partial checksum.
#[test]
fn a_tso_frame_with_a_partial_checksum_is_received() {
    let lan = Lan::new(&[None, None]);
    let config = InterfaceConfig::default();
    let mut server = Host::new(&lan, 0, &config);
    server.socket().listen(PORT).unwrap();
    let mut client = Host::new(&lan, 1, &config);
    client.connect(0);
    let (sender, received) = std::sync::mpsc::channel();
    let server = thread::spawn(move || {
        let mut bytes = vec![0; 20_000];
        let mut count = 0;
        server.run(|socket| {
            if socket.can_recv() {
                count += socket.recv_slice(&mut bytes[count..]).unwrap();
            }
            count == 20_000
        });
        sender.send(bytes).unwrap();
    });
    client.run(|socket| socket.may_send());
    // The client's own stack has sent nothing: its sequence number is that of its acknowledgement.
    // It is taken from a frame that it sends, and sent again in one piece.
    let payload: Vec<u8> = (0..20_000u32).map(|at| (at % 251) as u8).collect();
    let first = {
        let mut probe = Probe::default();
        client.socket().send_slice(&payload[..100]).unwrap();
        let now = smoltcp::time::Instant::from_micros(client.since.elapsed().as_micros() as i64);
        client.stack.poll(now, &mut probe, &mut client.sockets);
        probe.frames.pop().expect("a frame")
    };
    let mut frame = first[..54].to_vec();
    frame.extend(&payload);
    let len = frame.len();
    frame[16..18].copy_from_slice(&((len - 14) as u16).to_be_bytes());
    frame[24..26].fill(0);
    let checksum = !fold(sum(&frame[14..34]));
    frame[24..26].copy_from_slice(&checksum.to_be_bytes());
    let pseudo = fold(sum(&frame[26..34]) + 6 + (len - 34) as u32);
    frame[50..52].copy_from_slice(&pseudo.to_be_bytes());
    assert_eq!(frame[46] >> 4, 5, "no options");
    let interface = client.device.interface();
    let mut loan = interface.loan(len).unwrap();
    loan.write(0, &frame);
    let repr = Repr {
        checksum: Checksum::Partial {
            start: 34,
            offset: 16,
        },
        gso: Some(Gso {
            kind: Segments::Tcp4,
            ecn: false,
            size: 1460,
            hdr_len: 54,
        }),
    };
    loan.queue(&repr).unwrap();
    interface.flush();
    assert_eq!(received.recv_timeout(DEADLINE).unwrap(), payload);
    server.join().unwrap();
}

/// A device that keeps what is sent.
#[derive(Default)]
struct Probe {
    frames: Vec<Vec<u8>>,
}

impl smoltcp::phy::Device for Probe {
    type RxToken<'a> = Nothing;
    type TxToken<'a> = Keep<'a>;

    fn receive(&mut self, _: smoltcp::time::Instant) -> Option<(Nothing, Keep<'_>)> {
        None
    }

    fn transmit(&mut self, _: smoltcp::time::Instant) -> Option<Keep<'_>> {
        Some(Keep(&mut self.frames))
    }

    fn capabilities(&self) -> smoltcp::phy::DeviceCapabilities {
        let mut capabilities = smoltcp::phy::DeviceCapabilities::default();
        capabilities.medium = smoltcp::phy::Medium::Ethernet;
        capabilities.max_transmission_unit = 1514;
        capabilities
    }
}

struct Nothing;

impl smoltcp::phy::RxToken for Nothing {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, f: F) -> R {
        f(&[])
    }
}

struct Keep<'a>(&'a mut Vec<Vec<u8>>);

impl smoltcp::phy::TxToken for Keep<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, len: usize, f: F) -> R {
        let mut frame = vec![0; len];
        let result = f(&mut frame);
        self.0.push(frame);
        result
    }
}
