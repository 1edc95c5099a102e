//! Clients of TCP and Unix listeners to guests, attached processes and services.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::thread;

use crate::common::driver::Driver;
use zerosock::Port;
use zerosock::forward::{ListenAddress, ListenRule};
use zerosock::vsock::{Endpoint, Listener};

use super::{ForwardingDaemon, with_time_outs};
use crate::common::{
    PATIENCE, assert_bytes, bytes, deadline, eventually, eventually_with, hybrid, read_ok,
};

/// A bound socket of a rule, and its address.
pub(super) fn tcp_listener() -> (OwnedFd, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let on = listener.local_addr().unwrap();
    (listener.into(), on)
}

pub(super) fn listening(on: SocketAddr, socket: OwnedFd, to: &str) -> ListenRule {
    ListenRule::new(ListenAddress::Tcp(on), socket, to.parse().unwrap())
}

fn connect(on: SocketAddr) -> TcpStream {
    with_time_outs(TcpStream::connect(on).unwrap())
}

/// The client is reset.
#[track_caller]
fn is_reset(mut client: TcpStream) {
    let error = client.read(&mut [0; 1]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
}

/// Sends what the first connection receives back until its end.
fn echo(listener: Listener) -> thread::JoinHandle<()> {
    thread::spawn(move || {
        let (mut stream, _) = listener.accept_timeout(PATIENCE).unwrap();
        let mut got = Vec::new();
        stream.read_to_end(&mut got).unwrap();
        stream.write_all(&got).unwrap();
    })
}

#[track_caller]
fn there_and_back(mut client: TcpStream) {
    let sent = bytes(5, 3 << 20);
    client.write_all(&sent).unwrap();
    client.shutdown(std::net::Shutdown::Write).unwrap();
    let mut got = Vec::new();
    client.read_to_end(&mut got).unwrap();
    assert_bytes(&got, &sent);
}

#[test]
fn a_tcp_client_reaches_a_guest() {
    let (socket, on) = tcp_listener();
    let lab = ForwardingDaemon::with(1, |config| {
        config.listen = vec![listening(on, socket, "3:22")]
    });
    let guest = lab.endpoint();
    let echo = echo(guest.listen(Port::new(22), 8).unwrap());
    there_and_back(connect(on));
    echo.join().unwrap();
    lab.until_none_is_left();
    let stats = lab.rule(0);
    assert_eq!((stats.opened, stats.refused), (1, 0));
    assert_eq!((stats.bytes_sent, stats.bytes_received), (3 << 20, 3 << 20));
}

#[test]
fn a_tcp_client_reaches_an_attached_process_by_name() {
    let (socket, on) = tcp_listener();
    let lab = ForwardingDaemon::with(0, |config| {
        config.listen = vec![listening(on, socket, "name:web:80")];
    });
    is_reset(connect(on));
    let web = lab.process(|process| process.name("web"));
    let echo = echo(web.listen(Port::new(80), 8).unwrap());
    there_and_back(connect(on));
    echo.join().unwrap();
    drop(web);
    eventually("the name gone", || {
        let mut client = connect(on);
        client.read(&mut [0; 1]).is_err()
    });
}

#[test]
fn a_tcp_client_reaches_a_service() {
    let (socket, on) = tcp_listener();
    let lab = ForwardingDaemon::with(0, |config| {
        config.listen = vec![listening(on, socket, "host:80")];
    });
    is_reset(connect(on));
    let service = Endpoint::builder()
        .ports([Port::new(80)])
        .attach_as_host(lab.at("attach"))
        .unwrap();
    let echo = echo(service.listen(Port::new(80), 8).unwrap());
    there_and_back(connect(on));
    echo.join().unwrap();
}

#[test]
fn unix_clients_reach_a_guest() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let socket = UnixListener::bind(&path).unwrap();
    let rule = ListenRule::new(
        ListenAddress::Unix(path.clone()),
        socket.into(),
        "3:22".parse().unwrap(),
    );
    let lab = ForwardingDaemon::with(1, |config| config.listen = vec![rule]);
    let guest = lab.endpoint();
    let echo = echo(guest.listen(Port::new(22), 8).unwrap());
    let mut client = UnixStream::connect(&path).unwrap();
    client.set_read_timeout(Some(PATIENCE)).unwrap();
    client.write_all(b"hello").unwrap();
    client.shutdown(std::net::Shutdown::Write).unwrap();
    let mut got = String::new();
    client.read_to_string(&mut got).unwrap();
    assert_eq!(got, "hello");
    echo.join().unwrap();
}

#[test]
fn a_guest_that_does_not_listen_or_is_not_there_resets_the_client() {
    let (socket, on) = tcp_listener();
    let lab = ForwardingDaemon::with(1, |config| {
        config.listen = vec![listening(on, socket, "3:22")]
    });
    // No driver runs.
    is_reset(connect(on));
    let mut guest = lab.guest();
    let client = connect(on);
    let reset = thread::spawn(move || is_reset(client));
    eventually_with(&mut guest, "a reset", |_| reset.is_finished());
    reset.join().unwrap();
    eventually("counted", || lab.rule(0).refused == 2);
    assert_eq!(lab.rule(0).opened, 0);
}

#[test]
fn clients_from_other_networks_and_over_the_limit_are_reset() {
    let (socket, on) = tcp_listener();
    let (other, denied_on) = tcp_listener();
    let mut limited = listening(on, socket, "3:22");
    limited.max_connections = Some(2);
    let mut denied = listening(denied_on, other, "3:22");
    denied.deny = vec!["127.0.0.0/8".parse().unwrap()];
    let lab = ForwardingDaemon::with(1, |config| config.listen = vec![limited, denied]);
    let mut guest = lab.guest();
    guest.listen(Port::new(22), 8).unwrap();
    is_reset(connect(denied_on));
    let first = connect(on);
    let stream = guest.wait_accept(Port::new(22), deadline()).unwrap();
    let _second = connect(on);
    guest.wait_accept(Port::new(22), deadline()).unwrap();
    is_reset(connect(on));
    // A place is free again once the first connection has ended.
    drop(first);
    guest.close(stream);
    eventually_with(&mut guest, "a free place", |_| lab.rule(0).active == 1);
    let _third = connect(on);
    guest.wait_accept(Port::new(22), deadline()).unwrap();
    assert_eq!((lab.rule(0).refused, lab.rule(1).refused), (1, 1));
}

#[test]
fn many_clients_reach_devices_of_several_workers() {
    let (socket, on) = tcp_listener();
    let lab = ForwardingDaemon::with(1, |config| {
        config.workers = 2;
        config.listen = vec![listening(on, socket, "3:22")];
    });
    let guest = lab.endpoint();
    let listener = guest.listen(Port::new(22), 256).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..200 {
                let (mut stream, _) = listener.accept_timeout(PATIENCE).unwrap();
                let mut number = [0; 8];
                stream.read_exact(&mut number).unwrap();
                stream.write_all(&number).unwrap();
            }
        });
        for number in 0..200u64 {
            let mut client = connect(on);
            client.write_all(&number.to_le_bytes()).unwrap();
            let mut got = [0; 8];
            client.read_exact(&mut got).unwrap();
            assert_eq!(u64::from_le_bytes(got), number);
        }
    });
    lab.until_none_is_left();
    assert_eq!(lab.rule(0).opened, 200);
}

/// The addresses of a header of the PROXY protocol, version 2, at the begin of `got`; the rest follows.
fn proxy_header(got: &[u8]) -> ((u8, u8), &[u8], &[u8]) {
    assert_eq!(&got[..12], b"\r\n\r\n\0\r\nQUIT\n");
    let len = usize::from(u16::from_be_bytes([got[14], got[15]]));
    let (body, rest) = got[16..].split_at(len);
    ((got[12], got[13]), body, rest)
}

#[test]
fn the_proxy_header_has_the_addresses_of_a_tcp_client_and_comes_first() {
    for local in ["127.0.0.1:0", "[::1]:0"] {
        let Ok(listener) = TcpListener::bind(local) else {
            println!("SKIPPED: the_proxy_header {local}: no such address here");
            continue;
        };
        let on = listener.local_addr().unwrap();
        let mut with_header = listening(on, listener.into(), "3:22");
        with_header.proxy_protocol = true;
        let lab = ForwardingDaemon::with(1, |config| config.listen = vec![with_header]);
        let guest = lab.endpoint();
        let listener = guest.listen(Port::new(22), 8).unwrap();
        let mut client = connect(on);
        // Bytes that have come before the guest accepts keep their place.
        client.write_all(&bytes(1, 100_000)).unwrap();
        client.shutdown(std::net::Shutdown::Write).unwrap();
        let (mut stream, _) = listener.accept_timeout(PATIENCE).unwrap();
        let mut got = Vec::new();
        stream.read_to_end(&mut got).unwrap();
        let (kind, body, rest) = proxy_header(&got);
        assert_bytes(rest, &bytes(1, 100_000));
        let from = client.local_addr().unwrap();
        let mut wanted = Vec::new();
        for address in [from, on] {
            match address.ip() {
                std::net::IpAddr::V4(ip) => wanted.extend(ip.octets()),
                std::net::IpAddr::V6(ip) => wanted.extend(ip.octets()),
            }
        }
        wanted.extend(from.port().to_be_bytes());
        wanted.extend(on.port().to_be_bytes());
        // Version 2, PROXY; STREAM over INET or INET6.
        assert_eq!(kind, (0x21, if on.is_ipv4() { 0x11 } else { 0x21 }));
        assert_eq!(body, wanted);
        drop((stream, client));
        lab.until_none_is_left();
        assert_eq!(lab.rule(0).bytes_sent, 100_000, "the header does not count");
    }
}

/// A server that speaks first waits for the header only.
#[test]
fn the_proxy_header_comes_before_a_client_has_sent_anything() {
    let (socket, on) = tcp_listener();
    let mut with_header = listening(on, socket, "3:22");
    with_header.proxy_protocol = true;
    let lab = ForwardingDaemon::with(1, |config| config.listen = vec![with_header]);
    // A buffer has room for 10 bytes of payload.
    let guest = Endpoint::builder()
        .receive_buffers(54)
        .attach_device(&lab.vms[0].socket)
        .unwrap();
    let listener = guest.listen(Port::new(22), 8).unwrap();
    let mut client = connect(on);
    let (mut stream, _) = listener.accept_timeout(PATIENCE).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut got = [0; 28];
    stream.read_exact(&mut got).unwrap();
    assert_eq!(proxy_header(&got).0, (0x21, 0x11));
    stream.write_all(b"welcome").unwrap();
    let mut welcome = [0; 7];
    client.read_exact(&mut welcome).unwrap();
    assert_eq!(&welcome, b"welcome");
}

#[test]
fn the_proxy_header_of_a_unix_client_has_no_address_and_is_a_message_where_there_are_bounds() {
    use rustix::net::{AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType};
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let stream_socket = UnixListener::bind(path("s")).unwrap();
    let packets = || {
        rustix::net::socket_with(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )
    };
    let packet_socket = packets().unwrap();
    let address = SocketAddrUnix::new(path("p")).unwrap();
    rustix::net::bind(&packet_socket, &address).unwrap();
    rustix::net::listen(&packet_socket, 8).unwrap();
    let rule = |on, socket, to: &str| ListenRule {
        proxy_protocol: true,
        ..ListenRule::new(on, socket, to.parse().unwrap())
    };
    let streams = rule(ListenAddress::Unix(path("s")), stream_socket.into(), "3:22");
    let messages = rule(
        ListenAddress::UnixSeqpacket(path("p")),
        packet_socket,
        "3:23",
    );
    let lab = ForwardingDaemon::with(1, |config| config.listen = vec![streams, messages]);
    let guest = lab.endpoint();
    let listener = guest.listen(Port::new(22), 8).unwrap();
    let mut client = UnixStream::connect(path("s")).unwrap();
    client.write_all(b"hello").unwrap();
    client.shutdown(std::net::Shutdown::Write).unwrap();
    let (mut stream, _) = listener.accept_timeout(PATIENCE).unwrap();
    let mut got = Vec::new();
    stream.read_to_end(&mut got).unwrap();
    // Version 2, LOCAL; UNSPEC.
    assert_eq!(proxy_header(&got), ((0x20, 0), &[][..], &b"hello"[..]));

    let listener = guest.listen_seqpacket(Port::new(23), 8).unwrap();
    let client = packets().unwrap();
    rustix::net::connect(&client, &address).unwrap();
    rustix::net::send(&client, b"hello", SendFlags::NOSIGNAL).unwrap();
    let (socket, _) = listener.accept_timeout(PATIENCE).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut got = [0; 100];
    let header = socket.recv(&mut got).unwrap().unwrap().len;
    assert_eq!(proxy_header(&got[..header]), ((0x20, 0), &[][..], &[][..]));
    let hello = socket.recv(&mut got).unwrap().unwrap().len;
    assert_eq!(&got[..hello], b"hello");
}

/// One client, which shows that port 22 has a listener, and then many at once: by a rule, or by the hybrid
/// socket. Whether all are served.
fn is_burst_served(lab: &ForwardingDaemon, guest: &mut Driver, rule: Option<SocketAddr>) -> bool {
    let mut tcp: Vec<TcpStream> = Vec::new();
    let mut unix: Vec<UnixStream> = Vec::new();
    let mut served = 0_u64;
    let before = lab.stats().conns_refused;
    // This guest sends resets before it accepts.
    for burst in [1, 60] {
        for _ in 0..burst {
            if let Some(on) = rule {
                tcp.push(connect(on));
            } else {
                let mut client = hybrid(&lab.vms[0].uds_path);
                client.write_all(b"CONNECT 22\n").unwrap();
                unix.push(client);
            }
        }
        let until = served + burst;
        eventually_with(guest, "all served or refused", |guest| {
            while let Some(stream) = guest.accept(Port::new(22)) {
                assert_eq!(guest.send(stream, b"x").unwrap(), 1);
                served += 1;
            }
            served + (lab.stats().conns_refused - before) == until
        });
        if served < until {
            return false;
        }
    }
    let reading = thread::spawn(move || {
        for client in &mut tcp {
            client.read_exact(&mut [0; 1]).unwrap();
        }
        for client in &mut unix {
            read_ok(client).unwrap();
            client.read_exact(&mut [0; 1]).unwrap();
        }
    });
    eventually_with(guest, "all read", |_| reading.is_finished());
    reading.join().unwrap();
    true
}

/// The guest answers a full backlog as it answers for a port without a listener: by a reset.
#[test]
fn a_burst_above_the_backlog_of_a_guests_listener_is_served() {
    let (socket, on) = tcp_listener();
    let (other, silent_on) = tcp_listener();
    let lab = ForwardingDaemon::with(1, |config| {
        config.listen = vec![
            listening(on, socket, "3:22"),
            listening(silent_on, other, "3:23"),
        ];
        config.connect_timeout = PATIENCE;
    });
    let mut guest = lab.guest();
    guest.listen(Port::new(22), 8).unwrap();
    for to in [Some(on), None] {
        let before = lab.stats().connect_retries;
        // A reset is passed on a second after the port has accepted: a machine may be as slow at times.
        let served = (0..5).any(|_| is_burst_served(&lab, &mut guest, to));
        assert!(served, "{to:?}");
        assert!(lab.stats().connect_retries > before, "{to:?}");
    }
    // A port that has accepted nothing answers at once.
    let before = lab.stats().connect_retries;
    let client = connect(silent_on);
    let reset = thread::spawn(move || is_reset(client));
    eventually_with(&mut guest, "a reset", |_| reset.is_finished());
    reset.join().unwrap();
    assert_eq!(lab.stats().connect_retries, before);
}
