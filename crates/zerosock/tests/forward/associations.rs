//! vsock datagrams to UDP and Unix datagram sockets: contents, sources kept apart, limits, idle time,
//! targets that are not there, and what the policy denies.

use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::UnixDatagram;
use std::time::{Duration, Instant};

use zerosock::Port;
use zerosock::access::{AccessList, Party, Ports, Rule, Verdict};
use zerosock::daemon::Reload;
use zerosock::vsock::{Datagram, Endpoint};

use super::datagrams::{LONGEST, udp_server};
use super::names::name_server;
use super::{ForwardingDaemon, rule, unix};
use crate::common::{PATIENCE, assert_bytes, bytes, deadline, eventually, host};

fn bound(guest: &Endpoint, port: u32) -> Datagram {
    let socket = Datagram::bind(guest, Port::new(port)).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    socket.set_write_timeout(Some(PATIENCE)).unwrap();
    socket
}

/// The next datagram of the server, and its source.
#[track_caller]
fn at_server(server: &UdpSocket) -> (Vec<u8>, SocketAddr) {
    let mut out = vec![0; 70_000];
    let (len, from) = server.recv_from(&mut out).unwrap();
    out.truncate(len);
    (out, from)
}

/// The next datagram of the guest, which comes from `port` of CID 2.
#[track_caller]
fn answer(socket: &Datagram, port: u32) -> Vec<u8> {
    let mut out = vec![0; 70_000];
    let (len, from) = socket.recv_from(&mut out).unwrap();
    assert_eq!(from, host(port));
    out.truncate(len);
    out
}

#[test]
fn datagrams_keep_their_bounds_and_are_not_copied() {
    let (server, target) = udp_server();
    let lab = ForwardingDaemon::new(vec![rule(53, target)]);
    let guest = lab.endpoint();
    let socket = bound(&guest, 1000);
    let mut total = 0;
    for (seed, len) in [1, 0, 512, 1472, 1, LONGEST, 0, 9000]
        .into_iter()
        .enumerate()
    {
        let sent = bytes(seed as u64, len);
        socket.send_to(&sent, host(53)).unwrap();
        let (got, from) = at_server(&server);
        assert_bytes(&got, &sent);
        server.send_to(&sent, from).unwrap();
        server.send_to(&[seed as u8], from).unwrap();
        assert_bytes(&answer(&socket, 53), &sent);
        assert_eq!(answer(&socket, 53), [seed as u8]);
        total += 2 * len as u64 + 1;
    }
    eventually("counted", || lab.stats().in_place_bytes == total);
    let stats = lab.stats();
    assert_eq!((stats.copied_bytes, stats.datagrams_dropped), (0, 0));
    let rule = lab.rule(0);
    assert_eq!((rule.active, rule.opened), (1, 1));
    assert_eq!((rule.refused, rule.datagrams_dropped), (0, 0));
}

/// Each fragment is a packet of its own between guest and device. Those of the guest are assembled in a
/// copy; an answer is copied if its buffers are too many for one receive.
#[test]
fn small_buffers_of_the_guest_keep_the_bounds() {
    const LENGTHS: [usize; 3] = [999, 10_000, LONGEST];
    let sum = |lengths: &[usize]| lengths.iter().sum::<usize>() as u64;
    for (receive_buffers, copied_answers) in [(1000, 0..0), (500, 2..3)] {
        let (server, target) = udp_server();
        let lab = ForwardingDaemon::new(vec![rule(53, target)]);
        let guest = Endpoint::builder()
            .receive_buffers(receive_buffers)
            .transmit_buffers(3000)
            .queue_size(512)
            .attach_device(&lab.vms[0].socket)
            .unwrap();
        let socket = bound(&guest, 1000);
        for len in LENGTHS {
            let sent = bytes(3, len);
            socket.send_to(&sent, host(53)).unwrap();
            let (got, from) = at_server(&server);
            assert_bytes(&got, &sent);
            server.send_to(&sent, from).unwrap();
            assert_bytes(&answer(&socket, 53), &sent);
        }
        let copied = sum(&LENGTHS[1..]) + sum(&LENGTHS[copied_answers]);
        let in_place = 2 * sum(&LENGTHS) - copied;
        let counted = || {
            let stats = lab.stats();
            (stats.copied_bytes, stats.in_place_bytes)
        };
        eventually("counted", || counted() == (copied, in_place));
    }
}

/// `localhost` has ::1 first, where nothing listens: the ICMP error moves the guest's next datagram to
/// 127.0.0.1. (Without IPv6 that is the first address.)
#[test]
fn an_address_of_a_name_that_refuses_datagrams_is_replaced_by_the_next() {
    let (server, target) = udp_server();
    let port = target.rsplit(':').next().unwrap();
    let lab = ForwardingDaemon::new(vec![rule(53, format!("udp:localhost:{port}"))]);
    let guest = lab.endpoint();
    let socket = bound(&guest, 1000);
    server.set_nonblocking(true).unwrap();
    let mut out = [0; 16];
    let mut arrived = None;
    eventually("a datagram at 127.0.0.1", || {
        socket.send_to(b"query", host(53)).unwrap();
        arrived = server.recv_from(&mut out).ok();
        arrived.is_some()
    });
    let (len, from) = arrived.unwrap();
    assert_eq!(&out[..len], b"query");
    server.send_to(b"answer", from).unwrap();
    assert_eq!(answer(&socket, 53), b"answer");
    // Remembered: another source goes there at once.
    let other = bound(&guest, 1001);
    other.send_to(b"other", host(53)).unwrap();
    eventually(
        "the other source",
        || matches!(server.recv_from(&mut out), Ok((5, _)) if out.starts_with(b"other")),
    );
}

#[test]
fn each_source_has_a_socket_of_its_own() {
    let (server, target) = udp_server();
    let lab = ForwardingDaemon::with(2, |config| config.forward = vec![rule(53, target)]);
    let one = lab.endpoint();
    let two = Endpoint::builder()
        .attach_device(&lab.vms[1].socket)
        .unwrap();
    let sockets = [bound(&one, 1000), bound(&one, 1001), bound(&two, 1000)];
    let mut sources = Vec::new();
    for (number, socket) in sockets.iter().enumerate() {
        socket.send_to(&[number as u8], host(53)).unwrap();
        let (got, from) = at_server(&server);
        assert_eq!(got, [number as u8]);
        sources.push(from);
    }
    for (number, from) in sources.iter().enumerate().rev() {
        server.send_to(&[10 + number as u8], from).unwrap();
    }
    for (number, socket) in sockets.iter().enumerate() {
        assert_eq!(answer(socket, 53), [10 + number as u8]);
    }
    // A stranger's datagram does not reach the guest.
    let stranger = UdpSocket::bind("127.0.0.1:0").unwrap();
    stranger.send_to(b"x", sources[0]).unwrap();
    server.send_to(b"y", sources[0]).unwrap();
    assert_eq!(answer(&sockets[0], 53), b"y");
    assert_eq!(lab.rule(0).opened, 3);
}

#[test]
fn a_rule_is_full_until_an_association_has_been_idle() {
    let (server, target) = udp_server();
    let mut limited = rule(53, target);
    limited.max_connections = Some(1);
    limited.idle_timeout = Some(Duration::from_millis(300));
    let lab = ForwardingDaemon::new(vec![limited]);
    let guest = lab.endpoint();
    let (first, second) = (bound(&guest, 1000), bound(&guest, 1001));
    first.send_to(b"first", host(53)).unwrap();
    assert_eq!(at_server(&server).0, b"first");
    second.send_to(b"second", host(53)).unwrap();
    eventually("dropped", || lab.stats().datagrams_dropped == 1);
    assert_eq!(lab.rule(0).refused, 1);
    lab.until_none_is_left();
    second.send_to(b"third", host(53)).unwrap();
    let (got, from) = at_server(&server);
    assert_eq!(got, b"third");
    server.send_to(b"answer", from).unwrap();
    assert_eq!(answer(&second, 53), b"answer");
    assert_eq!(lab.rule(0).opened, 2);
}

#[test]
fn the_longest_idle_association_makes_room_for_a_new_one() {
    const MOST: u32 = 1024;
    let (server, target) = udp_server();
    let lab = ForwardingDaemon::new(vec![rule(53, target)]);
    let guest = lab.endpoint();
    let send = |port| {
        let socket = bound(&guest, port);
        socket.send_to(b"x", host(53)).unwrap();
        let (_, from) = at_server(&server);
        (socket, from)
    };
    let (first, first_from) = send(10_000);
    let (second, second_from) = send(10_001);
    for number in 2..MOST {
        send(10_000 + number);
    }
    // The second is the longest idle one now.
    server.send_to(b"x", first_from).unwrap();
    answer(&first, 53);
    assert_eq!(lab.rule(0).active, u64::from(MOST));
    send(20_000);
    assert_eq!(lab.rule(0).active, u64::from(MOST));
    server.send_to(b"y", first_from).unwrap();
    assert_eq!(answer(&first, 53), b"y");
    second.send_to(b"again", host(53)).unwrap();
    let (got, from) = at_server(&server);
    assert_eq!(got, b"again");
    assert_ne!(from, second_from);
    assert_eq!(lab.rule(0).opened, u64::from(MOST) + 2);
}

#[test]
fn a_datagram_to_a_full_rule_ends_no_association_of_another() {
    const MOST: u32 = 1024;
    let (server, target) = udp_server();
    let mut limited = rule(54, &target);
    limited.max_connections = Some(1);
    let lab = ForwardingDaemon::new(vec![rule(53, &target), limited]);
    let guest = lab.endpoint();
    let send = |port, to| {
        let socket = bound(&guest, port);
        socket.send_to(b"x", host(to)).unwrap();
    };
    for number in 1..MOST {
        send(10_000 + number, 53);
        at_server(&server);
    }
    send(20_000, 54);
    at_server(&server);
    send(20_001, 54);
    eventually("refused", || lab.rule(1).refused == 1);
    assert_eq!((lab.rule(0).active, lab.rule(1).active), (1023, 1));
    // One that is admitted takes a place.
    send(20_002, 53);
    at_server(&server);
    assert_eq!((lab.rule(0).active, lab.rule(0).opened), (1023, 1024));
}

#[test]
fn datagrams_that_are_too_long_are_dropped_and_counted() {
    let (server, target) = udp_server();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let unix_server = UnixDatagram::bind(&path).unwrap();
    let lab = ForwardingDaemon::new(vec![rule(53, target), rule(54, unix("unix-dgram", &path))]);
    let guest = lab.endpoint();
    let socket = bound(&guest, 1000);
    socket.send_to(&[1; LONGEST + 1], host(53)).unwrap();
    socket.send_to(b"next", host(53)).unwrap();
    assert_eq!(at_server(&server).0, b"next");
    assert_eq!(lab.rule(0).datagrams_dropped, 1);
    // To the guest: longer than a vsock datagram can be.
    socket.send_to(b"hello", host(54)).unwrap();
    let (_, from) = unix_server.recv_from(&mut [0; 10]).unwrap();
    unix_server.send_to_addr(&[2; 65_537], &from).unwrap();
    unix_server.send_to_addr(b"next", &from).unwrap();
    assert_eq!(answer(&socket, 54), b"next");
    assert_eq!(lab.rule(1).datagrams_dropped, 1);
    assert_eq!(lab.stats().datagrams_dropped, 2);
}

/// ICMP reports a port without a socket at the next call; that is no end.
#[test]
fn a_udp_port_without_a_socket_ends_nothing() {
    let (server, target) = udp_server();
    let address = server.local_addr().unwrap();
    let lab = ForwardingDaemon::new(vec![rule(53, target)]);
    let guest = lab.endpoint();
    let socket = bound(&guest, 1000);
    drop(server);
    for _ in 0..20 {
        socket.send_to(b"lost", host(53)).unwrap();
    }
    let server = UdpSocket::bind(address).unwrap();
    server
        .set_read_timeout(Some(Duration::from_millis(20)))
        .unwrap();
    let mut datagram = [0; 100];
    let give_up = deadline();
    let from = loop {
        assert!(Instant::now() < give_up, "not found");
        // The report for an earlier one can take the place of the first.
        socket.send_to(b"found", host(53)).unwrap();
        if let Ok((5, from)) = server.recv_from(&mut datagram)
            && &datagram[..5] == b"found"
        {
            break from;
        }
    };
    server.send_to(b"answer", from).unwrap();
    assert_eq!(answer(&socket, 53), b"answer");
    assert_eq!((lab.rule(0).opened, lab.rule(0).active), (1, 1));
}

#[test]
fn a_unix_server_is_reached_and_found_again_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("log");
    let mut lasting = rule(514, unix("unix-dgram", &path));
    lasting.idle_timeout = Some(10 * PATIENCE);
    let lab = ForwardingDaemon::new(vec![lasting]);
    let guest = lab.endpoint();
    let socket = bound(&guest, 1000);
    socket.send_to(b"lost", host(514)).unwrap();
    eventually("refused", || lab.rule(0).refused == 1);
    for _ in 0..2 {
        let server = UnixDatagram::bind(&path).unwrap();
        server
            .set_read_timeout(Some(Duration::from_millis(20)))
            .unwrap();
        let sent = bytes(7, 60_000);
        let mut got = vec![0; 70_000];
        let give_up = deadline();
        let (len, from) = loop {
            assert!(Instant::now() < give_up, "not found");
            // The first one after a restart tells that the old socket is closed.
            socket.send_to(&sent, host(514)).unwrap();
            if let Ok(got) = server.recv_from(&mut got) {
                break got;
            }
        };
        assert_bytes(&got[..len], &sent);
        assert!(from.as_abstract_name().is_some());
        server.send_to_addr(&sent, &from).unwrap();
        assert_bytes(&answer(&socket, 514), &sent);
        drop(server);
        std::fs::remove_file(&path).unwrap();
    }
}

/// More than the queue of the server holds: the rest waits for room.
#[test]
fn a_burst_waits_for_a_unix_server_that_is_full() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let server = UnixDatagram::bind(&path).unwrap();
    server.set_read_timeout(Some(PATIENCE)).unwrap();
    let lab = ForwardingDaemon::new(vec![rule(514, unix("unix-dgram", &path))]);
    let guest = lab.endpoint();
    let socket = bound(&guest, 1000);
    let queue = std::fs::read_to_string("/proc/sys/net/unix/max_dgram_qlen").unwrap();
    let queue: usize = queue.trim().parse().unwrap();
    // A queue takes one more than its limit.
    let most = queue + 1 + 16;
    for number in 0..most + 10 {
        socket
            .send_to(&(number as u32).to_le_bytes(), host(514))
            .unwrap();
    }
    // The last 10 find neither room nor a place to wait. Only then does the server make room.
    eventually("all handled", || lab.stats().datagrams_dropped == 10);
    let mut received = 0;
    while (received as usize) < most {
        let mut number = [0; 4];
        assert_eq!(server.recv(&mut number).unwrap(), 4);
        assert_eq!(u32::from_le_bytes(number), received);
        received += 1;
    }
    assert_eq!(lab.stats().datagrams_dropped, 10);
}

#[test]
fn a_name_is_resolved_while_datagrams_wait_and_the_policy_holds() {
    let (server, target) = udp_server();
    let port = target.rsplit(':').next().unwrap();
    let denied = rule(1, format!("udp:inside.test:{port}"));
    let mut allowed = rule(2, format!("udp:inside.test:{port}"));
    allowed.allow = vec!["127.0.0.0/8".parse().unwrap()];
    let lab = ForwardingDaemon::with(1, |config| {
        config.forward = vec![denied, allowed];
        config.connect_timeout = Duration::from_secs(30);
        config.name_servers = vec![name_server(Ipv4Addr::LOCALHOST)];
    });
    let guest = lab.endpoint();
    let socket = bound(&guest, 1000);
    socket.send_to(b"inside", host(1)).unwrap();
    eventually("dropped", || lab.rule(0).datagrams_dropped == 1);
    eventually("nothing left", || lab.rule(0).active == 0);
    assert_eq!((lab.rule(0).opened, lab.rule(0).refused), (0, 1));
    for number in 0..10 {
        socket.send_to(&[number], host(2)).unwrap();
    }
    let mut from = None;
    for number in 0..10 {
        let (got, source) = at_server(&server);
        assert_eq!(got, [number]);
        assert_eq!(*from.get_or_insert(source), source);
    }
    server.send_to(b"answer", from.unwrap()).unwrap();
    assert_eq!(answer(&socket, 2), b"answer");
}

#[test]
fn datagrams_that_wait_for_a_name_are_bounded() {
    let silent = UdpSocket::bind("127.0.0.1:0").unwrap();
    let address = silent.local_addr().unwrap();
    let lab = ForwardingDaemon::with(1, |config| {
        config.forward = vec![rule(1, "udp:nowhere.test:80")];
        config.connect_timeout = 10 * PATIENCE;
        config.name_servers = vec![address];
    });
    let guest = lab.endpoint();
    let socket = bound(&guest, 1000);
    for _ in 0..20 {
        socket.send_to(b"x", host(1)).unwrap();
    }
    eventually("those that may not wait dropped", || {
        lab.rule(0).datagrams_dropped == 4
    });
    assert_eq!(lab.rule(0).active, 1);
    drop((socket, guest));
    lab.until_none_is_left();
    assert_eq!(lab.stats().datagrams_dropped, 20);
}

#[test]
fn access_rules_and_changed_rules_apply_to_the_next_datagram() {
    let (server, target) = udp_server();
    let (other, other_target) = udp_server();
    let lab = ForwardingDaemon::new(vec![rule(53, &target)]);
    let guest = lab.endpoint();
    let socket = bound(&guest, 1000);
    socket.send_to(b"one", host(53)).unwrap();
    assert_eq!(at_server(&server).0, b"one");
    let reload = |forward, access| {
        let order = Reload {
            forward,
            access,
            ..Reload::default()
        };
        lab.daemon().reload(order).unwrap();
    };
    reload(vec![rule(53, &other_target)], AccessList::default());
    socket.send_to(b"two", host(53)).unwrap();
    assert_eq!(at_server(&other).0, b"two");
    let deny = Rule {
        name: None,
        verdict: Verdict::Deny,
        from: vec![Party::Any],
        to: vec![Party::Host],
        ports: Ports::all(),
    };
    reload(vec![rule(53, &other_target)], AccessList::new([deny]));
    let before = lab.stats().datagrams_dropped;
    socket.send_to(b"three", host(53)).unwrap();
    eventually("dropped", || lab.stats().datagrams_dropped == before + 1);
    reload(Vec::new(), AccessList::default());
    socket.send_to(b"four", host(53)).unwrap();
    eventually("dropped", || lab.stats().datagrams_dropped == before + 2);
    for server in [server, other] {
        server.set_nonblocking(true).unwrap();
        assert!(server.recv(&mut [0; 10]).is_err());
    }
}

#[test]
fn a_rule_that_gets_another_name_keeps_its_associations_and_counters() {
    let (server, target) = udp_server();
    let named = |name: &str| rule(53, &target).name(name.parse().unwrap());
    let lab = ForwardingDaemon::new(vec![named("dns")]);
    let guest = lab.endpoint();
    let socket = bound(&guest, 1000);
    socket.send_to(b"one", host(53)).unwrap();
    let (_, from) = at_server(&server);
    for name in ["names", "dns"] {
        let order = Reload {
            forward: vec![named(name)],
            ..Reload::default()
        };
        lab.daemon().reload(order).unwrap();
        socket.send_to(b"two", host(53)).unwrap();
        assert_eq!(at_server(&server), (b"two".to_vec(), from));
        let stats = lab.daemon().forward_stats();
        assert_eq!(stats.len(), 1, "{stats:?}");
        assert_eq!(stats[0].rule, format!("forward {name}"));
        assert_eq!((stats[0].active, stats[0].opened), (1, 1));
    }
    drop((socket, guest));
    lab.until_none_is_left();
}

#[test]
fn a_guest_that_goes_leaves_no_association() {
    let (server, target) = udp_server();
    let lab = ForwardingDaemon::new(vec![rule(53, target)]);
    let guest = lab.endpoint();
    let socket = bound(&guest, 1000);
    socket.send_to(b"one", host(53)).unwrap();
    at_server(&server);
    assert_eq!(lab.rule(0).active, 1);
    drop((socket, guest));
    lab.until_none_is_left();
    eventually("no timer left", || lab.stats().timers_now == 0);
}
