//! Ends other than one listener and one target: two listeners, none, hybrid sockets, PROXY headers.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixListener;
use std::time::Duration;

use super::support::{Kind, Rig, read_all, wait_readable};
use crate::relay::{Relay, RelayConfig};

fn start(ends: [String; 2]) -> Relay {
    Relay::start(RelayConfig::new(ends.map(|end| end.parse().unwrap()))).unwrap()
}

#[test]
fn connections_to_two_listeners_are_joined_in_order() {
    let relay = start(["tcp-listen:127.0.0.1:0".into(), "tcp-listen:[::1]:0".into()]);
    let [one, two] = relay.addresses().map(Option::unwrap);
    let mut first: Vec<_> = (0..3).map(|_| TcpStream::connect(one).unwrap()).collect();
    for (n, client) in first.iter_mut().enumerate() {
        client.write_all(&[n as u8]).unwrap();
    }
    for n in 0..3 {
        let mut second = TcpStream::connect(two).unwrap();
        let mut got = [9];
        second.read_exact(&mut got).unwrap();
        assert_eq!(got[0], n);
    }
    // The other way round.
    let mut second = TcpStream::connect(two).unwrap();
    second.write_all(b"early").unwrap();
    let mut client = TcpStream::connect(one).unwrap();
    drop(second);
    assert_eq!(read_all(&mut client), b"early");
    drop(client);
}

#[test]
fn the_order_of_the_ends_does_not_matter() {
    let target = TcpListener::bind("127.0.0.1:0").unwrap();
    let relay = start([
        format!("tcp:{}", target.local_addr().unwrap()),
        "tcp-listen:127.0.0.1:0".into(),
    ]);
    let [none, at] = relay.addresses();
    assert_eq!(none, None);
    let mut client = TcpStream::connect(at.unwrap()).unwrap();
    client.write_all(b"x").unwrap();
    let (mut accepted, _) = target.accept().unwrap();
    drop(client);
    assert_eq!(read_all(&mut accepted), b"x");
}

#[test]
fn without_a_listener_one_pair_is_relayed_to_its_end() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let one = UnixListener::bind(&path).unwrap();
    let two = TcpListener::bind("127.0.0.1:0").unwrap();
    let relay = start([
        format!("unix:{}", path.display()),
        format!("tcp:{}", two.local_addr().unwrap()),
    ]);
    let (mut one, mut two) = (one.accept().unwrap().0, two.accept().unwrap().0);
    one.write_all(b"there").unwrap();
    drop(one.shutdown(std::net::Shutdown::Write));
    assert_eq!(read_all(&mut two), b"there");
    two.write_all(b"back").unwrap();
    drop(two);
    assert_eq!(read_all(&mut one), b"back");
    wait_readable(relay.over());
    assert!(relay.succeeded());
    assert_eq!(relay.shutdown().opened, 1);
}

#[test]
fn without_a_listener_a_target_that_refuses_ends_the_relay() {
    let closed = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = closed.local_addr().unwrap();
    drop(closed);
    let relay = start([format!("tcp:{address}"), format!("tcp:{address}")]);
    wait_readable(relay.over());
    assert!(!relay.succeeded());
}

#[test]
fn a_hybrid_socket_is_told_the_port_and_bytes_behind_its_answer_are_the_guests() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("vm.sock");
    let device = UnixListener::bind(&path).unwrap();
    let relay = start([
        "tcp-listen:127.0.0.1:0".into(),
        format!("hybrid:{}:1234", path.display()),
    ]);
    let at = relay.addresses()[0].unwrap();
    for answer in [&b"OK 1073741824\nhello"[..], b"OK 1\nhello"] {
        let mut client = TcpStream::connect(at).unwrap();
        client.write_all(b"early\n").unwrap();
        let mut guest = BufReader::new(device.accept().unwrap().0);
        let mut line = String::new();
        guest.read_line(&mut line).unwrap();
        assert_eq!(line, "CONNECT 1234\n");
        // In two parts, and the guest's first bytes with the second.
        guest.get_mut().write_all(&answer[..4]).unwrap();
        std::thread::yield_now();
        guest.get_mut().write_all(&answer[4..]).unwrap();
        line.clear();
        guest.read_line(&mut line).unwrap();
        assert_eq!(line, "early\n");
        let mut got = [0; 5];
        client.read_exact(&mut got).unwrap();
        assert_eq!(&got, b"hello");
        drop(guest);
        assert_eq!(read_all(&mut client), b"");
    }
    // A guest without a listener.
    let mut client = TcpStream::connect(at).unwrap();
    drop(device.accept().unwrap());
    client.read(&mut [0]).unwrap_err();
    assert_eq!(relay.shutdown().unreachable, 1);
}

#[test]
fn a_hybrid_socket_that_closes_behind_part_of_its_answer_is_noticed_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("vm.sock");
    let device = UnixListener::bind(&path).unwrap();
    let ends = [
        "tcp-listen:127.0.0.1:0".into(),
        format!("hybrid:{}:1234", path.display()),
    ];
    let mut config = RelayConfig::new(ends.map(|end: String| end.parse().unwrap()));
    config.connect_timeout = Duration::from_secs(3600);
    let relay = Relay::start(config).unwrap();
    let mut client = TcpStream::connect(relay.addresses()[0].unwrap()).unwrap();
    let mut guest = BufReader::new(device.accept().unwrap().0);
    guest.read_line(&mut String::new()).unwrap();
    guest.get_mut().write_all(b"OK 10").unwrap();
    drop(guest);
    client
        .set_read_timeout(Some(Duration::from_secs(60)))
        .unwrap();
    let error = client.read(&mut [0]).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
    assert_eq!(relay.shutdown().unreachable, 1);
}

#[test]
fn a_silent_hybrid_socket_is_given_up() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("vm.sock");
    let device = UnixListener::bind(&path).unwrap();
    let ends = [
        "tcp-listen:127.0.0.1:0".into(),
        format!("hybrid:{}:1234", path.display()),
    ];
    let mut config = RelayConfig::new(ends.map(|end: String| end.parse().unwrap()));
    config.connect_timeout = Duration::from_millis(200);
    let relay = Relay::start(config).unwrap();
    let mut client = TcpStream::connect(relay.addresses()[0].unwrap()).unwrap();
    let _guest = device.accept().unwrap();
    client.read(&mut [0]).unwrap_err();
    assert_eq!(relay.shutdown().unreachable, 1);
}

#[test]
fn a_proxy_header_comes_before_the_first_byte() {
    let rig = Rig::start(Kind::Tcp, Kind::Unix, |config| config.proxy_protocol = true);
    let (mut client, mut target) = rig.pair();
    client.write_all(b"first").unwrap();
    drop(client);
    let all = read_all(&mut target);
    assert_eq!(&all[..12], b"\r\n\r\n\0\r\nQUIT\n");
    // Version 2, PROXY; TCP over IPv4; 12 bytes; 127.0.0.1 twice.
    assert_eq!(&all[12..16], [0x21, 0x11, 0, 12]);
    assert_eq!(&all[16..24], [127, 0, 0, 1, 127, 0, 0, 1]);
    assert_eq!(all[26..28], rig.address().port().to_be_bytes());
    assert_eq!(&all[28..], b"first");
}

#[test]
fn a_name_is_resolved_for_each_connection() {
    let target = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = target.local_addr().unwrap().port();
    let relay = start([
        "tcp-listen:127.0.0.1:0".into(),
        format!("tcp:localhost:{port}"),
    ]);
    for _ in 0..3 {
        let mut client = TcpStream::connect(relay.addresses()[0].unwrap()).unwrap();
        client.write_all(b"name").unwrap();
        drop(client);
        assert_eq!(read_all(&mut target.accept().unwrap().0), b"name");
    }
}

#[test]
fn ends_that_do_not_fit_are_refused() {
    for (one, two) in [
        ("udp-listen:127.0.0.1:0", "tcp:127.0.0.1:1"),
        ("unix-listen:/nonexistent/x", "unix-seqpacket:/x"),
        ("udp-listen:127.0.0.1:0", "udp-listen:127.0.0.1:0"),
    ] {
        let ends = [one, two].map(|end| end.parse().unwrap());
        let said = Relay::start(RelayConfig::new(ends))
            .unwrap_err()
            .to_string();
        assert!(said.contains(one), "{said}");
    }
}
