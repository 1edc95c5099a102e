//! Guests to TCP and Unix stream sockets: contents, and targets that do not answer.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::thread;
use std::time::{Duration, Instant};

use zerosock::access::{Cids, Party};
use zerosock::driver::Directions;
use zerosock::forward::ForwardRule;
use zerosock::{Cid, Port};

use super::{ForwardingDaemon, accept, refused, rule, tcp_server, unix};
use crate::common::{assert_bytes, bytes, deadline, eventually, eventually_with, host};

const LEN: usize = 5 << 20;

/// Answers with all bytes that it has received, after their end.
fn echo_at_end(mut stream: impl Read + Write, end: impl FnOnce()) {
    let mut got = Vec::new();
    stream.read_to_end(&mut got).unwrap();
    stream.write_all(&got).unwrap();
    end();
}

#[track_caller]
fn there_and_back(lab: &ForwardingDaemon, port: u32) {
    let mut guest = lab.guest();
    let stream = guest.wait_connect(host(port), deadline()).unwrap();
    let sent = bytes(1, LEN);
    guest.wait_send(stream, &sent, deadline()).unwrap();
    guest.shutdown(stream, Directions::SEND);
    let mut got = Vec::new();
    guest
        .wait_recv_to_end(stream, &mut got, deadline())
        .unwrap();
    assert_bytes(&got, &sent);
    guest.close(stream);
    eventually_with(&mut guest, "the end", |guest| guest.connections() == 0);
    lab.until_none_is_left();
    let stats = lab.rule(0);
    assert_eq!((stats.opened, stats.refused), (1, 0));
    assert_eq!(
        (stats.bytes_sent, stats.bytes_received),
        (LEN as u64, LEN as u64)
    );
}

#[test]
fn bytes_go_to_a_tcp_server_and_back_after_a_half_close() {
    let (listener, target) = tcp_server();
    let lab = ForwardingDaemon::new(vec![rule(8080, target)]);
    let server = thread::spawn(move || {
        let stream = accept(&listener);
        echo_at_end(&stream, || stream.shutdown(Shutdown::Write).unwrap());
    });
    there_and_back(&lab, 8080);
    server.join().unwrap();
}

#[test]
fn bytes_go_to_an_ipv6_server() {
    let listener = match TcpListener::bind("[::1]:0") {
        Ok(listener) => listener,
        Err(error) => return eprintln!("SKIPPED: no IPv6: {error}"),
    };
    let lab = ForwardingDaemon::new(vec![rule(
        1,
        format!("tcp:{}", listener.local_addr().unwrap()),
    )]);
    let server = thread::spawn(move || {
        let stream = accept(&listener);
        echo_at_end(&stream, || stream.shutdown(Shutdown::Write).unwrap());
    });
    there_and_back(&lab, 1);
    server.join().unwrap();
}

#[test]
fn bytes_go_to_a_unix_server_whose_path_has_port_and_cid() {
    let dir = tempfile::tempdir().unwrap();
    let listener = UnixListener::bind(dir.path().join("3_9.sock")).unwrap();
    let lab = ForwardingDaemon::new(vec![rule(
        9,
        unix("unix", &dir.path().join("{cid}_{port}.sock")),
    )]);
    let server = thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        echo_at_end(&stream, || stream.shutdown(Shutdown::Write).unwrap());
    });
    there_and_back(&lab, 9);
    server.join().unwrap();
}

#[test]
fn a_range_goes_to_the_same_ports_and_other_connections_as_without_rules() {
    let (listener, _) = tcp_server();
    let port = u32::from(listener.local_addr().unwrap().port());
    let mut range = rule(port, "tcp:127.0.0.1");
    range.ports = Port::new(port - 1)..=Port::new(port + 1);
    range.from = vec![Party::Cids(Cids::new(Cid::new(3), Cid::new(3)).unwrap())];
    let lab = ForwardingDaemon::with(2, |config| config.forward = vec![range]);
    let (mut three, mut four) = (lab.guest_of(0), lab.guest_of(1));
    three.wait_connect(host(port), deadline()).unwrap();
    accept(&listener);
    // No rule: the hybrid socket, on which nothing listens.
    refused(&mut four, port);
    refused(&mut three, port + 2);
    let hybrid = crate::common::host_listener(&lab.vms[1].uds_path, port);
    four.wait_connect(host(port), deadline()).unwrap();
    hybrid.accept().unwrap();
    assert_eq!(lab.rule(0).opened, 1);
}

#[test]
fn a_refused_target_resets_the_guest_at_once() {
    let (listener, target) = tcp_server();
    drop(listener);
    let lab = ForwardingDaemon::with(1, |config| {
        config.forward = vec![rule(1, target), rule(2, "unix:/nonexistent/socket")];
        config.connect_timeout = Duration::from_secs(600);
    });
    let mut guest = lab.guest();
    refused(&mut guest, 1);
    refused(&mut guest, 2);
    lab.until_none_is_left();
    for index in [0, 1] {
        assert_eq!((lab.rule(index).opened, lab.rule(index).refused), (0, 1));
    }
}

/// The reason is counted however it is learned: from the connect, from the poller, from the connector.
#[test]
fn refused_targets_are_counted_by_cause() {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
    let (listener, closed) = tcp_server();
    drop(listener);
    let dir = tempfile::tempdir().unwrap();
    let (stale, full) = (dir.path().join("stale"), dir.path().join("full"));
    drop(UnixListener::bind(&stale).unwrap());
    let flags = SocketFlags::CLOEXEC;
    let backlog =
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
    rustix::net::bind(&backlog, &SocketAddrUnix::new(&full).unwrap()).unwrap();
    // Linux admits one connection more than the backlog.
    rustix::net::listen(&backlog, 0).unwrap();
    let _filler = UnixStream::connect(&full).unwrap();
    let with_header = |port, target: String| {
        let mut rule = rule(port, target);
        rule.proxy_protocol = true;
        rule
    };
    let missing = dir.path().join("missing");
    let mut busy = rule(6, unix("unix", &full));
    busy.connect_timeout = Some(Duration::from_millis(100));
    let hole = BlackHole::new();
    let silent = |mut rule: ForwardRule| {
        rule.connect_timeout = Some(Duration::from_millis(100));
        rule
    };
    let mut limited = rule(9, unix("unix", &full));
    limited.max_connections = Some(0);
    let lab = ForwardingDaemon::with(1, |config| {
        config.forward = vec![
            rule(1, unix("unix", &missing)),
            rule(2, unix("unix", &stale)),
            rule(3, &closed),
            // The connector writes the header.
            with_header(4, unix("unix", &missing)),
            with_header(5, closed.clone()),
            busy,
            silent(rule(7, hole.target())),
            silent(with_header(8, hole.target())),
            limited,
        ];
    });
    let mut guest = lab.guest();
    for port in 1..=9 {
        refused(&mut guest, port);
    }
    eventually("nine connections refused", || {
        lab.stats().conns_refused == 9
    });
    let stats = lab.stats();
    let (no_listener, full) = (stats.refused_no_listener, stats.refused_backlog_full);
    assert_eq!((no_listener, full), (5, 1), "{stats}");
    let (silent, limited) = (stats.refused_unreachable, stats.refused_by_limit);
    assert_eq!((silent, limited), (2, 1), "{stats}");
}

/// A TCP listener whose backlog is full: it answers no SYN.
pub(super) struct BlackHole {
    listener: TcpListener,
    _fillers: Vec<TcpStream>,
}

impl BlackHole {
    pub(super) fn new() -> BlackHole {
        use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, listen, socket_with};
        let flags = SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::INET, SocketType::STREAM, flags, None).unwrap();
        bind(&socket, &std::net::SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
        listen(&socket, 0).unwrap();
        let listener = TcpListener::from(socket);
        let to = listener.local_addr().unwrap();
        let mut fillers = Vec::new();
        while let Ok(filler) = TcpStream::connect_timeout(&to, Duration::from_millis(200)) {
            fillers.push(filler);
        }
        BlackHole {
            listener,
            _fillers: fillers,
        }
    }

    pub(super) fn target(&self) -> String {
        format!("tcp:{}", self.listener.local_addr().unwrap())
    }
}

#[test]
fn a_target_that_does_not_answer_resets_the_guest_at_the_connect_timeout() {
    let hole = BlackHole::new();
    let mut late = rule(2, hole.target());
    late.connect_timeout = Some(Duration::from_secs(600));
    let lab = ForwardingDaemon::with(1, |config| {
        config.forward = vec![rule(1, hole.target()), late];
        config.connect_timeout = Duration::from_millis(300);
    });
    let mut guest = lab.guest();
    let start = Instant::now();
    refused(&mut guest, 1);
    assert!(start.elapsed() >= Duration::from_millis(300));
    // The guest gives up first: nothing is left of its connect.
    let stream = guest.connect(host(2)).unwrap();
    eventually_with(&mut guest, "a connect under way", |_| {
        lab.rule(1).active == 1
    });
    guest.abort(stream);
    eventually_with(&mut guest, "no connect under way", |_| {
        lab.rule(1).active == 0
    });
}

/// The target has closed before the worker learns that the connect has succeeded, or after it.
#[test]
fn a_target_that_closes_at_once_ends_the_stream_in_order() {
    const ROUNDS: usize = 200;
    let (listener, target) = tcp_server();
    let lab = ForwardingDaemon::new(vec![rule(1, target)]);
    let mut guest = lab.guest();
    let server = thread::spawn(move || {
        for round in 0..ROUNDS {
            let mut stream = accept(&listener);
            if round % 2 == 0 {
                stream.write_all(b"bye").unwrap();
            }
        }
    });
    for round in 0..ROUNDS {
        let stream = guest.wait_connect(host(1), deadline()).unwrap();
        let mut got = Vec::new();
        guest
            .wait_recv_to_end(stream, &mut got, deadline())
            .unwrap();
        assert_eq!(got.len(), if round % 2 == 0 { 3 } else { 0 });
        guest.close(stream);
    }
    server.join().unwrap();
    eventually_with(&mut guest, "the end", |_| lab.rule(0).active == 0);
    eventually("counted out", || lab.stats().bridges_now == 0);
}

/// The target sends after the guest has closed, while the socket has not taken the guest's last bytes:
/// closing it with unread bytes must not reset the connection under these.
#[test]
fn the_last_bytes_of_a_guest_that_closes_arrive() {
    let (listener, target) = tcp_server();
    let lab = ForwardingDaemon::new(vec![rule(1, target)]);
    let mut guest = lab.guest();
    let all = bytes(3, 32 << 20);
    let stream = guest.wait_connect(host(1), deadline()).unwrap();
    let mut server = accept(&listener);
    // Until the sockets and the credit are full.
    let (mut sent, mut since) = (0, Instant::now());
    eventually_with(&mut guest, "full sockets", |guest| {
        if let Ok(more) = guest.send(stream, &all[sent..]) {
            (sent, since) = (sent + more, Instant::now());
        }
        assert!(sent < all.len(), "no back-pressure");
        since.elapsed() > Duration::from_millis(300)
    });
    guest.close(stream);
    eventually_with(&mut guest, "a socket that outlives its connection", |_| {
        let stats = lab.stats();
        (stats.connections_now, stats.bridges_now) == (0, 1)
    });
    server.write_all(b"unread").unwrap();
    let mut got = Vec::new();
    server.read_to_end(&mut got).unwrap();
    assert_bytes(&got, &all[..sent]);
    lab.until_none_is_left();
}
