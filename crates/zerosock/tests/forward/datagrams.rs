//! Connections of type SEQPACKET to UDP, Unix datagram and Unix SEQPACKET sockets: bounds, empty and
//! long messages, targets that are not there, idle time.

use std::net::UdpSocket;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixDatagram;
use std::time::Duration;

use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, sockopt,
};
use zerosock::vsock::{Endpoint, SeqPacket};

use super::{ForwardingDaemon, rule, unix};
use crate::common::{PATIENCE, bytes, eventually, host};

/// The largest datagram of UDP over IPv4.
pub(super) const LONGEST: usize = 65_507;

pub(super) fn udp_server() -> (UdpSocket, String) {
    let server = UdpSocket::bind("127.0.0.1:0").unwrap();
    server.set_read_timeout(Some(PATIENCE)).unwrap();
    let target = format!("udp:{}", server.local_addr().unwrap());
    (server, target)
}

fn connect(guest: &Endpoint, port: u32) -> SeqPacket {
    let socket = guest.connect_seqpacket(host(port)).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    socket.set_write_timeout(Some(PATIENCE)).unwrap();
    socket
}

#[track_caller]
fn received(socket: &SeqPacket) -> Vec<u8> {
    let mut out = vec![0; 70_000];
    let got = socket.recv(&mut out).unwrap().expect("a message");
    out.truncate(got.len);
    out
}

#[test]
fn each_message_is_one_datagram_in_both_directions() {
    let (server, target) = udp_server();
    let lab = ForwardingDaemon::new(vec![rule(53, target)]);
    let guest = lab.endpoint();
    let socket = connect(&guest, 53);
    let mut datagram = vec![0; 70_000];
    for (number, len) in [1, 0, 512, 1472, 1, LONGEST, 0, 9000]
        .into_iter()
        .enumerate()
    {
        let message = bytes(number as u64, len);
        socket.send(&message).unwrap();
        let (got, from) = server.recv_from(&mut datagram).unwrap();
        assert!(
            datagram[..got] == message,
            "message {number} of {len} bytes"
        );
        server.send_to(&message, from).unwrap();
        server.send_to(&[number as u8], from).unwrap();
        assert!(
            received(&socket) == message,
            "answer {number} of {len} bytes"
        );
        assert_eq!(received(&socket), [number as u8]);
    }
    assert_eq!(lab.rule(0).datagrams_dropped, 0);
}

#[test]
fn a_message_longer_than_a_datagram_is_dropped_and_counted() {
    let (server, target) = udp_server();
    let lab = ForwardingDaemon::new(vec![rule(53, target)]);
    let guest = lab.endpoint();
    let socket = connect(&guest, 53);
    socket.send(&vec![1; LONGEST + 1]).unwrap();
    socket.send(b"next").unwrap();
    let mut datagram = [0; 100];
    let got = server.recv(&mut datagram).unwrap();
    assert_eq!(&datagram[..got], b"next");
    eventually("counted", || lab.rule(0).datagrams_dropped == 1);
}

#[test]
fn a_datagram_that_the_guest_could_never_take_is_dropped_and_counted() {
    let (server, target) = udp_server();
    let lab = ForwardingDaemon::new(vec![rule(53, target)]);
    let guest = lab.endpoint();
    let socket = connect(&guest, 53);
    socket.set_buffer_size(10_000).unwrap();
    socket.send(b"hello").unwrap();
    let (_, from) = server.recv_from(&mut [0; 100]).unwrap();
    server.send_to(&vec![1; 60_000], from).unwrap();
    server.send_to(b"next", from).unwrap();
    assert_eq!(received(&socket), b"next");
    assert_eq!(lab.rule(0).datagrams_dropped, 1);
}

/// ICMP reports a port without a socket at the next call; that is no end.
#[test]
fn a_udp_port_without_a_socket_does_not_end_the_connection() {
    let (server, target) = udp_server();
    let address = server.local_addr().unwrap();
    let lab = ForwardingDaemon::new(vec![rule(53, target)]);
    let guest = lab.endpoint();
    let socket = connect(&guest, 53);
    drop(server);
    for _ in 0..20 {
        socket.send(b"lost").unwrap();
    }
    let server = UdpSocket::bind(address).unwrap();
    server
        .set_read_timeout(Some(Duration::from_millis(20)))
        .unwrap();
    let mut datagram = [0; 100];
    let from = loop {
        // The report for an earlier one can take the place of the first.
        socket.send(b"found").unwrap();
        if let Ok((5, from)) = server.recv_from(&mut datagram)
            && &datagram[..5] == b"found"
        {
            break from;
        }
    };
    server.send_to(b"answer", from).unwrap();
    assert_eq!(received(&socket), b"answer");
}

#[test]
fn an_idle_udp_connection_ends() {
    let (_server, target) = udp_server();
    let mut idle = rule(53, target);
    idle.idle_timeout = Some(Duration::from_millis(200));
    let lab = ForwardingDaemon::new(vec![idle]);
    let guest = lab.endpoint();
    let socket = connect(&guest, 53);
    let ended = socket.recv(&mut [0; 10]);
    assert!(matches!(ended, Ok(None) | Err(_)), "{ended:?}");
    lab.until_none_is_left();
}

#[test]
fn a_unix_datagram_server_is_reached_and_answers() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("log");
    let server = UnixDatagram::bind(&path).unwrap();
    server.set_read_timeout(Some(PATIENCE)).unwrap();
    let lab = ForwardingDaemon::new(vec![rule(514, unix("unix-dgram", &path))]);
    let guest = lab.endpoint();
    let socket = connect(&guest, 514);
    let mut datagram = vec![0; 70_000];
    for len in [1, 0, 5000, 60_000] {
        let message = bytes(7, len);
        socket.send(&message).unwrap();
        let (got, from) = server.recv_from(&mut datagram).unwrap();
        assert!(datagram[..got] == message, "{len} bytes");
        let name = from.as_abstract_name_bytes();
        let to = SocketAddrUnix::new_abstract_name(&name).unwrap();
        rustix::net::sendto(&server, &message, SendFlags::empty(), &to).unwrap();
        assert!(received(&socket) == message, "answer of {len} bytes");
    }
}

/// The abstract name of an address.
trait AbstractName {
    fn as_abstract_name_bytes(&self) -> Vec<u8>;
}

impl AbstractName for std::os::unix::net::SocketAddr {
    fn as_abstract_name_bytes(&self) -> Vec<u8> {
        use std::os::linux::net::SocketAddrExt;
        self.as_abstract_name()
            .expect("chosen by the kernel")
            .to_vec()
    }
}

fn packet_listener(path: &std::path::Path) -> OwnedFd {
    let flags = SocketFlags::CLOEXEC;
    let socket =
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    rustix::net::bind(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
    rustix::net::listen(&socket, 16).unwrap();
    socket
}

#[test]
fn a_seqpacket_server_gets_packets_with_their_bounds_and_the_end() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let listener = packet_listener(&path);
    let lab = ForwardingDaemon::new(vec![rule(7, unix("unix-seqpacket", &path))]);
    let guest = lab.endpoint();
    let socket = connect(&guest, 7);
    let server = rustix::net::accept(&listener).unwrap();
    sockopt::set_socket_timeout(&server, sockopt::Timeout::Recv, Some(PATIENCE)).unwrap();
    let mut packet = vec![0; 70_000];
    for len in [3, 1, 60_000] {
        let message = bytes(9, len);
        socket.send(&message).unwrap();
        let (_, got) = rustix::net::recv(&server, &mut packet[..], RecvFlags::empty()).unwrap();
        assert!(packet[..got] == message, "{len} bytes");
        rustix::net::send(&server, &message, SendFlags::NOSIGNAL).unwrap();
        assert!(received(&socket) == message, "answer of {len} bytes");
    }
    socket.shutdown(std::net::Shutdown::Write).unwrap();
    let end = rustix::net::recv(&server, &mut packet[..], RecvFlags::empty()).unwrap();
    assert_eq!(end.1, 0);
    drop(server);
    assert!(socket.recv(&mut packet).unwrap().is_none());
}

/// The same port can have one rule for streams and one for messages.
#[test]
fn a_stream_does_not_match_a_rule_for_messages() {
    let (_server, target) = udp_server();
    let lab = ForwardingDaemon::new(vec![rule(53, target)]);
    let guest = lab.endpoint();
    let error = guest.connect(host(53)).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionRefused);
    assert_eq!(lab.rule(0).refused, 0);
}
