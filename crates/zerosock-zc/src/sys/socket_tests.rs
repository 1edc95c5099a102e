//! Unit tests of `socket`.

use super::*;
use std::net::{TcpListener, UdpSocket};

#[test]
fn the_kind_of_each_socket_is_found() {
    let tcp = TcpListener::bind("127.0.0.1:0").expect("a listener");
    let udp = UdpSocket::bind("127.0.0.1:0").expect("a socket");
    let (unix, _peer) = std::os::unix::net::UnixStream::pair().expect("a pair");
    assert_eq!(kind(&tcp).expect("a socket"), SocketKind::Tcp4);
    assert_eq!(kind(&udp).expect("a socket"), SocketKind::Udp4);
    assert_eq!(kind(&unix).expect("a socket"), SocketKind::OtherStream);
    assert!(permit_zero_copy(&tcp).expect("an answer"));
    assert!(permit_zero_copy(&udp).expect("an answer"));
    assert!(!permit_zero_copy(&unix).expect("an answer"));
    let file = tempfile();
    assert_eq!(
        kind(&file).map_err(|error| error.raw_os_error()),
        Err(Some(libc::ENOTSOCK))
    );
}

#[test]
fn a_reset_is_immediate_with_other_descriptors_open() {
    use std::io::Read;
    let listener = TcpListener::bind("127.0.0.1:0").expect("a listener");
    let ours = std::net::TcpStream::connect(listener.local_addr().expect("an address"));
    let ours = ours.expect("loopback");
    let mut theirs = listener.accept().expect("a stream").0;
    let _other = ours.try_clone().expect("a descriptor");
    assert!(reset(&ours).expect("an answer"));
    let read = theirs.read(&mut [0]).map_err(|error| error.kind());
    assert_eq!(read, Err(io::ErrorKind::ConnectionReset));
    assert!(reset(&ours).expect("again"));
    let (unix, _peer) = std::os::unix::net::UnixStream::pair().expect("a pair");
    assert!(!reset(&unix).expect("an answer"));
}

#[test]
fn forgotten_pieces_of_a_datagram_are_not_sent() {
    for address in ["127.0.0.1:0", "[::1]:0"] {
        let far = UdpSocket::bind(address).expect("loopback");
        let near = UdpSocket::bind(address).expect("loopback");
        let to = far.local_addr().expect("an address");
        for connected in [false, true] {
            if connected {
                near.connect(to).expect("loopback");
            }
            // Without any, and with some.
            forget_pieces(&near).expect("it is UDP");
            let more = SendFlags::MORE;
            match connected {
                true => send(&near, &[1; 100], more),
                false => rustix::net::sendto(&near, &[1; 100], more, &to),
            }
            .expect("it is gathered");
            forget_pieces(&near).expect("it is UDP");
            match connected {
                true => near.send(&[2; 5]),
                false => near.send_to(&[2; 5], to),
            }
            .expect("it is sent");
            let count = far.recv(&mut [0; 1000]).expect("a datagram");
            assert_eq!(count, 5, "{address}, {connected}");
        }
    }
}

fn tempfile() -> std::fs::File {
    std::fs::File::open("/dev/null").expect("the null device")
}
