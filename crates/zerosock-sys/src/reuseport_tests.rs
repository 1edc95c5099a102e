//! Unit tests of `reuseport`.

use std::net::UdpSocket;
use std::time::Duration;

use rustix::net::{AddressFamily, SocketType, bind, socket, sockopt};

use super::*;

#[test]
fn strangers_reach_the_first_socket_and_a_peer_its_own() {
    let first = UdpSocket::bind("127.0.0.1:0").unwrap();
    let address = first.local_addr().unwrap();
    sockopt::set_socket_reuseport(&first, true).unwrap();
    let second = || {
        let other = socket(AddressFamily::INET, SocketType::DGRAM, None).unwrap();
        sockopt::set_socket_reuseport(&other, true).unwrap();
        bind(&other, &address).unwrap();
        UdpSocket::from(other)
    };
    drop(second());
    deliver_to_first(&first).unwrap();
    let (unconnected, connected) = (second(), second());
    let peer = UdpSocket::bind("127.0.0.1:0").unwrap();
    connected.connect(peer.local_addr().unwrap()).unwrap();
    for socket in [&first, &connected] {
        let limit = Some(Duration::from_secs(10));
        socket.set_read_timeout(limit).unwrap();
    }
    // Of many ports, some would be another socket's.
    for n in 0..64u8 {
        let stranger = UdpSocket::bind("127.0.0.1:0").unwrap();
        stranger.send_to(&[n], address).unwrap();
        let mut got = [0];
        first.recv(&mut got).unwrap();
        assert_eq!(got, [n]);
    }
    peer.send_to(b"peer", address).unwrap();
    let mut got = [0; 8];
    assert_eq!(connected.recv(&mut got).unwrap(), 4);
    unconnected.set_nonblocking(true).unwrap();
    unconnected.recv(&mut got).unwrap_err();
}
