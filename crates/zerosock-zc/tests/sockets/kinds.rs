//! Raw and packet sockets: the kernel copies their sends, which is known before the first send.

use std::num::NonZeroU32;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::net::{AddressFamily, Protocol, RecvFlags, SocketFlags, SocketType, recv, socket_with};
use zerosock_zc::{
    Buf, Copying, Outgoing, SendBackend, Sender, SenderOpenError, Sent, SocketAddress, SocketKind,
};

use crate::network::with_loopback;

const PATIENCE: Duration = Duration::from_secs(300);
/// For experiments: an IP protocol (RFC 3692) and an EtherType (IEEE 802).
const IP_PROTOCOL: u32 = 253;
const ETHER_TYPE: u16 = 0x88b5;
const LENGTHS: [usize; 4] = [1, 100, 1400, 9000];

fn socket(family: AddressFamily, kind: SocketType, protocol: u32) -> OwnedFd {
    let protocol = NonZeroU32::new(protocol).map(Protocol::from_raw);
    let socket = socket_with(family, kind, SocketFlags::CLOEXEC, protocol);
    let socket = socket.expect("a socket");
    rustix::net::sockopt::set_socket_timeout(
        &socket,
        rustix::net::sockopt::Timeout::Recv,
        Some(PATIENCE),
    )
    .expect("a socket");
    socket
}

/// Sends arrive whole after `header` bytes, and are reported as copied.
fn arrives(
    open: impl Fn() -> OwnedFd,
    far: &OwnedFd,
    to: SocketAddress,
    kind: SocketKind,
    header: usize,
) {
    for wanted in [SendBackend::Uring, SendBackend::ErrorQueue] {
        let opened = Sender::builder().backend(wanted).open::<Buf>(open());
        assert!(matches!(opened, Err(SenderOpenError::Unavailable(found)) if found == wanted));
    }
    let mut sender: Sender = Sender::open(open()).expect("a sender");
    assert_eq!(sender.report().backend, SendBackend::Copy);
    assert_eq!(sender.report().socket, kind);
    let mut received = vec![0; 1 << 16];
    for len in LENGTHS {
        let bytes: Vec<u8> = (0..len).map(|index| index as u8).collect();
        let outgoing = Outgoing::new(bytes.clone()).to(to).copying(Copying::Never);
        sender
            .send(outgoing)
            .map_err(|refused| refused.why)
            .expect("a place");
        assert!(sender.finish(Some(PATIENCE)).expect("the kernel answers"));
        let returned = sender.returned().expect("it is over");
        assert_eq!(returned.outcome.expect("it was sent"), Sent::Copied);
        let (count, _) = recv(far, &mut received, RecvFlags::empty()).expect("a packet");
        assert_eq!(&received[header..count], bytes);
    }
}

#[test]
fn raw_packets_arrive() {
    with_loopback("raw_packets_arrive", || {
        for (family, address, header) in [
            (AddressFamily::INET, "127.0.0.1:0", 20),
            // Raw sockets of IPv6 do not show the header.
            (AddressFamily::INET6, "[::1]:0", 0),
        ] {
            let far = socket(family, SocketType::RAW, IP_PROTOCOL);
            let address: std::net::SocketAddr = address.parse().expect("an address");
            let to = SocketAddress::new(&address).expect("it is short");
            let open = || socket(family, SocketType::RAW, IP_PROTOCOL);
            arrives(open, &far, to, SocketKind::Raw, header);
        }
    });
}

#[test]
fn frames_arrive() {
    with_loopback("frames_arrive", || {
        let listening = u32::from(ETHER_TYPE.to_be());
        let far = socket(AddressFamily::PACKET, SocketType::DGRAM, listening);
        // The first device of a namespace is its loopback.
        let to = SocketAddress::on_device(1, ETHER_TYPE, [0; 6]);
        // It listens to nothing itself.
        let open = || socket(AddressFamily::PACKET, SocketType::DGRAM, 0);
        arrives(open, &far, to, SocketKind::Packet, 0);
    });
}
