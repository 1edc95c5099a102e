//! Datagrams of several senders: associations, bounds, time-outs, limits.

use std::cell::Cell;
use std::net::{SocketAddr, UdpSocket};
use std::os::unix::net::UnixDatagram;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType};
use zerosock_sys::network::set_segment_size;

use super::support::{DEADLINE, make_map, pattern, skipped, wait_until};
use crate::relay::{Relay, RelayConfig};

fn start(ends: [String; 2], set: impl FnOnce(&mut RelayConfig)) -> Relay {
    let mut config = RelayConfig::new(ends.map(|end| end.parse().unwrap()));
    set(&mut config);
    Relay::start(config).unwrap()
}

fn udp() -> UdpSocket {
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    socket.set_read_timeout(Some(DEADLINE)).unwrap();
    socket
}

fn client(of: &Relay) -> UdpSocket {
    let socket = udp();
    socket.connect(of.addresses()[0].unwrap()).unwrap();
    socket
}

fn recv_from(socket: &UdpSocket) -> (Vec<u8>, SocketAddr) {
    let mut buffer = vec![0; 65536];
    let (got, from) = socket.recv_from(&mut buffer).unwrap();
    buffer.truncate(got);
    (buffer, from)
}

/// The kernel passes datagrams of one packet on together: to the relay, from it, and back.
#[test]
fn datagrams_of_one_packet_are_relayed_as_datagrams() {
    const SIZE: usize = 1200;
    let target = udp();
    let ends = [
        "udp-listen:127.0.0.1:0".into(),
        format!("udp:{}", target.local_addr().unwrap()),
    ];
    let relay = start(ends, |_| {});
    let client = client(&relay);
    // 20 datagrams, the last of which is shorter.
    let bytes = pattern(19 * SIZE + 7, 5);
    let mut from = None;
    set_segment_size(&client, SIZE as u16).unwrap();
    client.send(&bytes).unwrap();
    for wanted in bytes.chunks(SIZE) {
        let (got, source) = recv_from(&target);
        assert_eq!(got, wanted);
        assert_eq!(*from.get_or_insert(source), source);
    }
    set_segment_size(&target, SIZE as u16).unwrap();
    target.send_to(&bytes, from.unwrap()).unwrap();
    for wanted in bytes.chunks(SIZE) {
        assert_eq!(recv_from(&client).0, wanted);
    }
}

#[test]
fn each_sender_has_a_socket_of_its_own_to_the_target() {
    for workers in [1, 3] {
        let target = udp();
        let ends = [
            "udp-listen:127.0.0.1:0".into(),
            format!("udp:{}", target.local_addr().unwrap()),
        ];
        let relay = start(ends, |config| config.workers = workers);
        let clients: Vec<UdpSocket> = (0..8).map(|_| client(&relay)).collect();
        for round in 0..3 {
            let mut sources = Vec::new();
            for (n, client) in clients.iter().enumerate() {
                let message = pattern([0, 1, 1400, 65_000][n % 4], (n + round) as u64);
                client.send(&message).unwrap();
                let (got, from) = recv_from(&target);
                assert_eq!(got, message);
                sources.push(from);
                target.send_to(&pattern(900, n as u64), from).unwrap();
                assert_eq!(recv_from(client).0, pattern(900, n as u64));
            }
            sources.sort();
            sources.dedup();
            assert_eq!(sources.len(), clients.len());
        }
        let stats = relay.stats();
        assert_eq!((stats.opened, stats.open, stats.dropped), (8, 8, 0));
        let stats = relay.shutdown();
        assert_eq!(stats.open, 0);
    }
}

#[test]
fn bursts_arrive_in_order() {
    let target = udp();
    rustix::net::sockopt::set_socket_recv_buffer_size(&target, 4 << 20).unwrap();
    let ends = [
        "udp-listen:127.0.0.1:0".into(),
        format!("udp:{}", target.local_addr().unwrap()),
    ];
    let relay = start(ends, |_| {});
    let client = client(&relay);
    for burst in 0..50u32 {
        // Fewer than the smallest receive buffer of any system has room for.
        for n in 0..100u32 {
            client.send(&(burst * 100 + n).to_ne_bytes()).unwrap();
        }
        for n in 0..100u32 {
            assert_eq!(recv_from(&target).0, (burst * 100 + n).to_ne_bytes());
        }
    }
    // Counted after the turn.
    wait_until("the bytes", || {
        relay.stats().bytes_to_target == 50 * 100 * 4
    });
}

#[test]
fn a_sender_is_forgotten_after_the_timeout_and_can_come_again() {
    let target = udp();
    let ends = [
        "udp-listen:127.0.0.1:0".into(),
        format!("udp:{}", target.local_addr().unwrap()),
    ];
    let relay = start(ends, |config| {
        config.datagram_timeout = Duration::from_millis(100);
    });
    let client = client(&relay);
    client.send(b"one").unwrap();
    let (_, first) = recv_from(&target);
    wait_until("the time-out", || relay.stats().open == 0);
    assert_eq!(relay.stats().idle, 1);
    client.send(b"two").unwrap();
    let (_, second) = recv_from(&target);
    target.send_to(b"back", second).unwrap();
    assert_eq!(recv_from(&client).0, b"back");
    assert_eq!(relay.stats().opened, 2);
    let _ = first;
}

#[test]
fn an_unreachable_target_ends_nothing() {
    let target = udp();
    let address = target.local_addr().unwrap();
    drop(target);
    let ends = ["udp-listen:127.0.0.1:0".into(), format!("udp:{address}")];
    let relay = start(ends, |_| {});
    let client = client(&relay);
    for _ in 0..3 {
        client.send(b"lost").unwrap();
        wait_until("it to be taken", || {
            let stats = relay.stats();
            stats.bytes_to_target + stats.dropped > 0
        });
    }
    let target = UdpSocket::bind(address).unwrap();
    target.set_read_timeout(Some(DEADLINE)).unwrap();
    client.send(b"heard").unwrap();
    // An earlier datagram may have come late.
    while recv_from(&target).0 != b"heard" {}
    assert_eq!(relay.stats().open, 1);
}

/// `localhost` is ::1 first, where no process has the port.
#[test]
fn an_address_of_a_name_that_refuses_datagrams_is_followed_by_the_next() {
    let target = udp();
    target
        .set_read_timeout(Some(Duration::from_millis(20)))
        .unwrap();
    let port = target.local_addr().unwrap().port();
    if let Err(error) = UdpSocket::bind(("::1", port)) {
        return println!("SKIPPED an_address_of_a_name_that_refuses_datagrams: {error}");
    }
    let ends = [
        "udp-listen:127.0.0.1:0".into(),
        format!("udp:localhost:{port}"),
    ];
    let relay = start(ends, |_| {});
    let client = client(&relay);
    wait_until("a datagram to arrive", || {
        client.send(b"asked").unwrap();
        target.recv_from(&mut [0; 8]).is_ok()
    });
    wait_until("the first address to be given up", || {
        relay.stats().failed == 1
    });
    assert_eq!(relay.stats().open, 1);
}

#[test]
fn unix_datagrams_are_answered_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let [relay_path, target_path, client_path] = ["r", "t", "c"].map(|name| dir.path().join(name));
    let target = UnixDatagram::bind(&target_path).unwrap();
    target.set_read_timeout(Some(DEADLINE)).unwrap();
    let ends = [
        format!("unix-dgram-listen:{}", relay_path.display()),
        format!("unix-dgram:{}", target_path.display()),
    ];
    let relay = start(ends, |_| {});
    let client = UnixDatagram::bind(&client_path).unwrap();
    client.set_read_timeout(Some(DEADLINE)).unwrap();
    client.connect(&relay_path).unwrap();
    let mut buffer = vec![0; 300_000];
    for length in [1, 1400, 100_000] {
        client.send(&pattern(length, 1)).unwrap();
        let (got, from) = target.recv_from(&mut buffer).unwrap();
        assert_eq!(buffer[..got], pattern(length, 1));
        // The kernel has given the relay's socket a name.
        let name = rustix::net::SocketAddrUnix::new_abstract_name(
            std::os::linux::net::SocketAddrExt::as_abstract_name(&from).unwrap(),
        );
        let flags = rustix::net::SendFlags::empty();
        rustix::net::sendto(&target, &pattern(length, 2), flags, &name.unwrap()).unwrap();
        let got = client.recv(&mut buffer).unwrap();
        assert_eq!(buffer[..got], pattern(length, 2));
    }
    let unnamed = UnixDatagram::unbound().unwrap();
    unnamed.send_to(b"no answer", &relay_path).unwrap();
    assert_eq!(target.recv(&mut buffer).unwrap(), 9);
    assert_eq!(relay.stats().opened, 2);
}

#[test]
fn a_full_unix_receiver_gets_the_rest_of_a_batch_later() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t");
    let target = UnixDatagram::bind(&path).unwrap();
    target.set_read_timeout(Some(DEADLINE)).unwrap();
    let ends = [
        "udp-listen:127.0.0.1:0".into(),
        format!("unix-dgram:{}", path.display()),
    ];
    let relay = start(ends, |_| {});
    let client = client(&relay);
    // More than net.unix.max_dgram_qlen, less than that and a batch.
    let queue: usize = std::fs::read_to_string("/proc/sys/net/unix/max_dgram_qlen")
        .unwrap()
        .trim()
        .parse()
        .unwrap();
    let count = queue + 20;
    for n in 0..count as u32 {
        client.send(&n.to_ne_bytes()).unwrap();
        if n % 50 == 0 {
            // Not faster than the relay's receive buffer allows.
            wait_until("the relay", || {
                let taken = relay.stats().bytes_to_target / 4;
                taken + 100 > u64::from(n) || taken > queue as u64
            });
        }
    }
    let mut buffer = [0; 8];
    for n in 0..count as u32 {
        let got = target.recv(&mut buffer).unwrap();
        assert_eq!(buffer[..got], n.to_ne_bytes());
    }
    assert_eq!(relay.stats().dropped, 0);
}

/// A sender that goes on keeps its socket; the others are replaced, the longest idle one first.
#[test]
fn a_new_sender_takes_the_place_of_the_longest_idle_one() {
    const MOST: usize = 4;
    let target = udp();
    let set = |config: &mut RelayConfig| config.max_connections = MOST;
    let ends = [
        "udp-listen:127.0.0.1:0".into(),
        format!("udp:{}", target.local_addr().unwrap()),
    ];
    let relays = [Some(start(ends, set)), start_joined(&target, set)];
    for relay in relays.into_iter().flatten() {
        let asked = Cell::new(0);
        let ask = |client: &UdpSocket| {
            client.send(b"question").unwrap();
            let (got, from) = recv_from(&target);
            assert_eq!(got, b"question");
            target.send_to(b"answer", from).unwrap();
            assert_eq!(recv_from(client).0, b"answer");
            asked.set(asked.get() + 1);
            from
        };
        // The kernel tells how much it has moved, not when: the relay is to see it before the next sender's.
        let is_seen = || relay.stats().bytes_to_target == (b"question".len() * asked.get()) as u64;
        let busy = client(&relay);
        let own = ask(&busy);
        let others: Vec<UdpSocket> = (0..20).map(|_| client(&relay)).collect();
        for other in &others {
            // Several, so that the kernel may move them.
            let sockets: Vec<_> = (0..6).map(|_| ask(other)).collect();
            assert!(sockets.iter().all(|socket| *socket == sockets[0]));
            wait_until("the datagrams are counted", is_seen);
            assert_eq!(ask(&busy), own);
            wait_until("the datagrams are counted", is_seen);
        }
        let stats = relay.stats();
        assert_eq!((stats.opened, stats.open), (21, MOST as u64));
        let replaced = (stats.replaced, stats.refused, stats.dropped);
        assert_eq!(replaced, (21 - MOST as u64, 0, 0));
        // The last three are there still.
        for other in &others[17..] {
            ask(other);
        }
        assert_eq!(relay.stats().opened, 21);
    }
}

/// A relay from UDP to this target by way sockmap; `None` where the machine does not permit it.
fn start_joined(target: &UdpSocket, set: impl FnOnce(&mut RelayConfig)) -> Option<Relay> {
    let ends = [
        "udp-listen:127.0.0.1:0".into(),
        format!("udp:{}", target.local_addr().unwrap()),
    ];
    let mut config = RelayConfig::new(ends.map(|end: String| end.parse().unwrap()));
    set(&mut config);
    match make_map(&mut config) {
        None => Some(Relay::start(config).unwrap()),
        Some(reason) => {
            skipped(&reason);
            None
        }
    }
}

#[test]
fn senders_of_several_datagrams_are_joined_and_keep_their_sockets() {
    let target = udp();
    let Some(relay) = start_joined(&target, |config| config.workers = 3) else {
        return;
    };
    let clients: Vec<UdpSocket> = (0..8).map(|_| client(&relay)).collect();
    let mut sources = vec![Vec::new(); clients.len()];
    let mut bytes = [0; 2];
    for round in 0..12 {
        for (n, client) in clients.iter().enumerate() {
            let message = pattern([1, 2, 1400, 65_000][n % 4], (n + round) as u64);
            client.send(&message).unwrap();
            let (got, from) = recv_from(&target);
            assert_eq!(got, message, "client {n}, round {round}");
            sources[n].push(from);
            let answer = pattern(900 + n, round as u64);
            target.send_to(&answer, from).unwrap();
            assert_eq!(recv_from(client).0, answer, "client {n}, round {round}");
            bytes[0] += message.len() as u64;
            bytes[1] += answer.len() as u64;
        }
        if round == 1 {
            assert_eq!(relay.stats().joined, 0, "few datagrams are not worth it");
        }
    }
    for of_one in &mut sources {
        of_one.dedup();
        assert_eq!(of_one.len(), 1);
    }
    sources.sort();
    sources.dedup();
    assert_eq!(sources.len(), clients.len());
    // A stranger is not taken for one of them.
    let stranger = client(&relay);
    stranger.send(b"stranger").unwrap();
    let (got, from) = recv_from(&target);
    assert_eq!(got, b"stranger");
    assert!(!sources.contains(&vec![from]));
    let stats = relay.stats();
    assert_eq!((stats.joined, stats.open, stats.dropped), (8, 9, 0));
    let stats = relay.shutdown();
    assert_eq!(stats.bytes_to_target, bytes[0] + 8);
    assert_eq!(stats.bytes_to_source, bytes[1]);
    assert_eq!(stats.open, 0);
}

#[test]
fn bursts_of_a_joined_sender_arrive_whole() {
    let target = udp();
    rustix::net::sockopt::set_socket_recv_buffer_size(&target, 4 << 20).unwrap();
    let Some(relay) = start_joined(&target, |_| {}) else {
        return;
    };
    let client = client(&relay);
    for burst in 0..200u32 {
        let sent: Vec<u32> = (0..100).map(|n| burst * 100 + n).collect();
        for n in &sent {
            client.send(&n.to_ne_bytes()).unwrap();
        }
        let mut got: Vec<u32> = (0..100)
            .map(|_| u32::from_ne_bytes(recv_from(&target).0.try_into().unwrap()))
            .collect();
        // A turn may take a datagram before the program does, and send it before earlier ones.
        got.sort_unstable();
        assert_eq!(got, sent);
    }
    assert_eq!(relay.stats().joined, 1);
    assert_eq!(relay.shutdown().bytes_to_target, 200 * 100 * 4);
}

#[test]
fn a_joined_sender_is_forgotten_after_the_timeout_and_can_come_again() {
    let target = udp();
    // A busy machine can keep this thread from running for longer than a second.
    const TIMEOUT: Duration = Duration::from_secs(3);
    let relay = start_joined(&target, |config| config.datagram_timeout = TIMEOUT);
    let Some(relay) = relay else { return };
    let client = client(&relay);
    let exchange = || {
        client.send(b"there").unwrap();
        let (got, from) = recv_from(&target);
        assert_eq!(got, b"there");
        target.send_to(b"back", from).unwrap();
        assert_eq!(recv_from(&client).0, b"back");
    };
    for round in 1..=2 {
        if round == 2 {
            // A datagram that reaches the socket of the sender while it is closed is lost.
            target
                .set_read_timeout(Some(Duration::from_millis(20)))
                .unwrap();
            wait_until("a datagram", || {
                client.send(b"there").unwrap();
                target.recv(&mut [0; 8]).is_ok()
            });
            target.set_read_timeout(Some(DEADLINE)).unwrap();
        }
        let begun = Instant::now();
        // Longer than the time-out: it counts from the last datagram.
        while begun.elapsed() < TIMEOUT.mul_f32(1.25) {
            exchange();
            std::thread::sleep(Duration::from_millis(20));
        }
        let stats = relay.stats();
        assert_eq!((stats.opened, stats.joined), (round, round));
        wait_until("the time-out", || relay.stats().open == 0);
        assert_eq!(relay.stats().idle, round);
    }
}

#[test]
fn a_joined_sender_finds_a_target_that_comes_back() {
    let target = udp();
    let address = target.local_addr().unwrap();
    let Some(relay) = start_joined(&target, |_| {}) else {
        return;
    };
    let client = client(&relay);
    for n in 0..10u8 {
        client.send(&[n]).unwrap();
        assert_eq!(recv_from(&target).0, [n]);
    }
    assert_eq!(relay.stats().joined, 1);
    drop(target);
    for _ in 0..3 {
        client.send(b"lost").unwrap();
    }
    let target = UdpSocket::bind(address).unwrap();
    target
        .set_read_timeout(Some(Duration::from_millis(20)))
        .unwrap();
    wait_until("a datagram", || {
        client.send(b"heard").unwrap();
        let mut got = [0; 8];
        matches!(target.recv(&mut got), Ok(5))
    });
    assert_eq!(relay.stats().open, 1);
}

#[test]
fn a_listener_at_all_addresses_joins_no_senders() {
    let ends = ["udp-listen:0.0.0.0:0", "udp:127.0.0.1:9"];
    let mut config = RelayConfig::new(ends.map(|end| end.parse().unwrap()));
    let error = config.make_map().unwrap_err();
    assert!(error.to_string().contains("one address"), "{error}");
    for (ends, reason) in [
        (["unix-listen:/s", "unix:/nonexistent"], "both ends"),
        (["tcp-listen:[::1]:0", "unix:/s"], "TCP can be no source"),
        (["tcp-listen:[::1]:0", "tcp:x:1"], "TCP can be no source"),
    ] {
        let mut config = RelayConfig::new(ends.map(|end| end.parse().unwrap()));
        let error = config.make_map().unwrap_err();
        assert!(error.to_string().contains(reason), "{error}");
        assert!(config.sockmap.is_none());
    }
}

/// The backlog of the target is full, so that the connector tries again and again.
#[test]
fn an_association_that_ends_cancels_its_connect() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("target");
    let packets = || rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
    let (listener, name) = (packets(), SocketAddrUnix::new(&path).unwrap());
    rustix::net::bind(&listener, &name).unwrap();
    rustix::net::listen(&listener, 0).unwrap();
    let first = packets();
    rustix::net::connect(&first, &name).unwrap();
    let ends = [
        "udp-listen:127.0.0.1:0".into(),
        format!("unix-seqpacket:{}", path.display()),
    ];
    let relay = start(ends, |config| {
        config.datagram_timeout = Duration::from_millis(200);
    });
    client(&relay).send(b"lost").unwrap();
    wait_until("the time-out", || relay.stats().idle == 1);
    let accepted = || {
        let mut polled = [PollFd::new(&listener, PollFlags::IN)];
        // Longer than the pauses of the connector.
        let limit = Timespec::try_from(Duration::from_millis(300)).unwrap();
        let waits = poll(&mut polled, Some(&limit)).unwrap() == 1;
        waits.then(|| rustix::net::accept(&listener).unwrap())
    };
    assert!(accepted().is_some(), "the first");
    assert!(accepted().is_none(), "one that nothing needs");
}
