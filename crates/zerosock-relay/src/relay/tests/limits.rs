//! Targets that cannot be reached, and limits.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpListener;
use std::os::unix::net::UnixListener;
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketType, listen, socket};

use super::support::{Kind, Rig, Sock, wait_until};
use crate::relay::{Relay, RelayConfig};

/// A socket that is closed: by a reset if it is TCP.
fn assert_refused(client: &mut Sock) {
    match client.read(&mut [0; 8]) {
        Ok(0) => assert!(matches!(client, Sock::Unix(_)), "TCP has to be reset"),
        Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset),
        Ok(more) => panic!("{more} bytes"),
    }
}

#[test]
fn a_target_that_refuses_resets_the_client() {
    for from in [Kind::Tcp, Kind::Unix] {
        for to in [Kind::Tcp, Kind::Unix] {
            let mut rig = Rig::start(from, to, |_| {});
            rig.close_target();
            assert_refused(&mut rig.connect());
            wait_until("the counters", || {
                let stats = rig.stats();
                (stats.unreachable, stats.open, stats.opened) == (1, 0, 1)
            });
        }
    }
}

/// A listener with a full backlog drops what else comes, as a black hole does.
#[test]
fn a_target_that_does_not_answer_resets_the_client_in_time() {
    let fd = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    let any: std::net::SocketAddr = "127.0.0.1:0".parse().unwrap();
    rustix::net::bind(&fd, &any).unwrap();
    listen(&fd, 0).unwrap();
    let hole = TcpListener::from(fd);
    let address = hole.local_addr().unwrap();
    let flags = rustix::net::SocketFlags::NONBLOCK;
    let _fill: Vec<_> = (0..4)
        .map(|_| {
            let kind = SocketType::STREAM;
            let fd = rustix::net::socket_with(AddressFamily::INET, kind, flags, None).unwrap();
            let _ = rustix::net::connect(&fd, &address);
            fd
        })
        .collect();
    let ends = ["tcp-listen:127.0.0.1:0".into(), format!("tcp:{address}")];
    let mut config = RelayConfig::new(ends.map(|end: String| end.parse().unwrap()));
    config.connect_timeout = Duration::from_millis(300);
    let relay = Relay::start(config).unwrap();
    let at = relay.addresses()[0].unwrap();
    let began = Instant::now();
    let mut client = Sock::Tcp(std::net::TcpStream::connect(at).unwrap());
    assert_refused(&mut client);
    assert!(began.elapsed() >= Duration::from_millis(300));
    assert_eq!(relay.shutdown().unreachable, 1);
}

#[test]
fn a_connection_over_the_limit_is_refused_and_the_others_go_on() {
    for from in [Kind::Tcp, Kind::Unix] {
        let rig = Rig::start(from, Kind::Tcp, |config| config.max_connections = 2);
        let mut kept = [rig.pair(), rig.pair()];
        assert_refused(&mut rig.connect());
        for (client, target) in &mut kept {
            client.write_all(b"x").unwrap();
            target.read_exact(&mut [0]).unwrap();
        }
        assert_eq!(rig.stats().refused, 1);
        let [first, _second] = kept;
        drop(first);
        wait_until("a free place", || rig.stats().open == 1);
        let (mut client, mut target) = rig.pair();
        client.write_all(b"x").unwrap();
        target.read_exact(&mut [0]).unwrap();
    }
}

#[test]
fn a_connection_without_bytes_ends_after_the_idle_timeout_and_a_used_one_does_not() {
    const LIMIT: Duration = Duration::from_secs(3);
    let rig = Rig::start(Kind::Tcp, Kind::Unix, |config| {
        config.idle_timeout = Some(LIMIT);
    });
    let (mut used, mut target) = rig.pair();
    let began = Instant::now();
    let (mut idle, _other) = rig.pair();
    let ended = std::thread::spawn(move || {
        assert_refused(&mut idle);
        began.elapsed()
    });
    while !ended.is_finished() {
        used.write_all(b"x").unwrap();
        target.read_exact(&mut [0]).unwrap();
        std::thread::sleep(LIMIT / 60);
    }
    let took = ended.join().unwrap();
    assert!(took >= LIMIT, "{took:?}");
    let stats = rig.stats();
    assert_eq!((stats.idle, stats.open), (1, 1));
}

#[test]
fn a_unix_listener_with_a_full_backlog_is_tried_again() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("target");
    let target = UnixListener::bind(&path).unwrap();
    listen(&target, 0).unwrap();
    let ends = [
        "tcp-listen:127.0.0.1:0".into(),
        format!("unix:{}", path.display()),
    ];
    let config = RelayConfig::new(ends.map(|end: String| end.parse().unwrap()));
    let relay = Relay::start(config).unwrap();
    let at = relay.addresses()[0].unwrap();
    let mut clients: Vec<_> = (0..4)
        .map(|n: u8| {
            let mut client = std::net::TcpStream::connect(at).unwrap();
            client.write_all(&[n]).unwrap();
            client
        })
        .collect();
    let mut seen = Vec::new();
    for _ in 0..clients.len() {
        let (mut socket, _) = target.accept().unwrap();
        let mut got = [0];
        socket.read_exact(&mut got).unwrap();
        seen.push(got[0]);
        socket.write_all(&got).unwrap();
    }
    seen.sort_unstable();
    assert_eq!(seen, [0, 1, 2, 3]);
    for (n, client) in clients.iter_mut().enumerate() {
        let mut got = [0];
        client.read_exact(&mut got).unwrap();
        assert_eq!(usize::from(got[0]), n);
    }
    assert_eq!(relay.stats().unreachable, 0);
}

#[test]
fn a_listener_that_is_taken_is_named() {
    let rig = Rig::start(Kind::Tcp, Kind::Tcp, |_| {});
    let at = rig.address();
    let ends = [format!("tcp-listen:{at}"), "tcp:127.0.0.1:1".into()];
    let config = RelayConfig::new(ends.map(|end: String| end.parse().unwrap()));
    let said = Relay::start(config).unwrap_err().to_string();
    assert!(
        said.contains(&at.to_string()) && said.contains("in use"),
        "{said}"
    );
    let rig = Rig::start(Kind::Unix, Kind::Tcp, |_| {});
    let path = rig.path();
    let ends = [
        format!("unix-listen:{}", path.display()),
        "tcp:127.0.0.1:1".into(),
    ];
    let config = RelayConfig::new(ends.map(|end: String| end.parse().unwrap()));
    let said = Relay::start(config).unwrap_err().to_string();
    assert!(said.contains("in use"), "{said}");
    drop(rig);
    assert!(!path.exists(), "the socket's file is removed");
}

/// Receiving fails each time, as without memory for a packet: the worker's other pairs have their turns.
#[test]
fn an_error_of_a_datagram_socket_that_stays_ends_the_turn() {
    use crate::relay::direction::{Direction, Outcome, Ready, WatchedSocket};
    use crate::relay::socket::{Socket, SocketKind};
    use crate::relay::store::Store;
    use crate::relay::way::Mode;

    // It is no datagram socket, so that receiving fails with ENOTCONN.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let target = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let side = |fd| {
        let mut ready = Ready::READ;
        ready.set(Ready::WRITE);
        let socket = Socket::new(fd, SocketKind::Udp, true);
        WatchedSocket { socket, ready }
    };
    let (sender, turns) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let (mut from, mut to) = (side(listener.into()), side(target.into()));
        let mut store = Store::new(64 << 10, 0);
        let mut direction = Direction::new(Mode::Messages);
        let outcome = direction.run(&mut from, &mut to, &mut store, &mut (1 << 20));
        sender.send(outcome).unwrap();
    });
    let outcome = turns.recv_timeout(Duration::from_secs(60));
    assert_eq!(outcome, Ok(Outcome::Exhausted));
}
