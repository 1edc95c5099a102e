//! Targets with names: what the connector resolves, denies and sends first.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::os::unix::net::UnixListener;
use std::thread;
use std::time::Duration;

use zerosock::driver::Directions;

use super::{ForwardingDaemon, accept, refused, rule, tcp_server, unix};
use crate::common::{deadline, eventually_with, host};

/// A name server that has one IPv4 address for every name, and no IPv6 address. It runs until the test
/// program ends.
pub(super) fn name_server(answer: Ipv4Addr) -> SocketAddr {
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    let address = socket.local_addr().unwrap();
    thread::spawn(move || {
        let mut query = [0; 1500];
        while let Ok((len, from)) = socket.recv_from(&mut query) {
            // A header of 12 bytes, then one question: labels, type and class.
            let question = &query[12..len];
            let name = question.iter().position(|&byte| byte == 0).unwrap() + 1;
            let wants_a = question[name..name + 2] == [0, 1];
            let mut reply = query[..2].to_vec();
            reply.extend([0x81, 0x80, 0, 1, 0, u8::from(wants_a), 0, 0, 0, 0]);
            reply.extend(&question[..name + 4]);
            if wants_a {
                // The name by a pointer, type A, class IN, 60 s, 4 bytes.
                reply.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 60, 0, 4]);
                reply.extend(answer.octets());
            }
            socket.send_to(&reply, from).unwrap();
        }
    });
    address
}

#[test]
fn a_name_that_leads_to_a_denied_address_is_refused_unless_the_rule_allows_it() {
    let (listener, target) = tcp_server();
    let port = target.rsplit(':').next().unwrap();
    let mut allowed = rule(2, format!("tcp:inside.test:{port}"));
    allowed.allow = vec!["127.0.0.0/8".parse().unwrap()];
    let rules = vec![rule(1, format!("tcp:inside.test:{port}")), allowed];
    let lab = ForwardingDaemon::with(1, |config| {
        config.forward = rules;
        config.connect_timeout = Duration::from_secs(30);
        config.name_servers = vec![name_server(Ipv4Addr::LOCALHOST)];
    });
    let mut guest = lab.guest();
    refused(&mut guest, 1);
    let stream = guest.wait_connect(host(2), deadline()).unwrap();
    let mut server = accept(&listener);
    guest.wait_send(stream, b"hello", deadline()).unwrap();
    let mut got = [0; 5];
    server.read_exact(&mut got).unwrap();
    assert_eq!(&got, b"hello");
    // The first never reached the server.
    listener.set_nonblocking(true).unwrap();
    assert!(listener.accept().is_err());
    assert_eq!((lab.rule(0).refused, lab.rule(1).opened), (1, 1));
}

#[test]
fn a_name_server_that_does_not_answer_resets_the_guest_in_time() {
    let silent = UdpSocket::bind("127.0.0.1:0").unwrap();
    let address = silent.local_addr().unwrap();
    let lab = ForwardingDaemon::with(1, |config| {
        config.forward = vec![rule(1, "tcp:nowhere.test:80")];
        config.connect_timeout = Duration::from_millis(300);
        config.name_servers = vec![address];
    });
    let mut guest = lab.guest();
    refused(&mut guest, 1);
    // The guest can give up before.
    let stream = guest.connect(host(1)).unwrap();
    eventually_with(&mut guest, "a connect under way", |_| {
        lab.rule(0).active == 1
    });
    guest.abort(stream);
    eventually_with(&mut guest, "no connect under way", |_| {
        lab.rule(0).active == 0
    });
}

/// The thread for connects is shared by all guests.
#[test]
fn a_guest_has_at_most_256_connects_by_name_under_way() {
    const MOST: usize = 256;
    let silent = UdpSocket::bind("127.0.0.1:0").unwrap();
    let address = silent.local_addr().unwrap();
    let lab = ForwardingDaemon::with(1, |config| {
        config.forward = vec![rule(1, "tcp:nowhere.test:80")];
        config.connect_timeout = Duration::from_secs(600);
        config.name_servers = vec![address];
        config.max_connections = Some(4096);
    });
    let mut guest = lab.guest();
    let streams: Vec<_> = (0..MOST + 100)
        .map(|_| guest.connect(host(1)).unwrap())
        .collect();
    eventually_with(&mut guest, "the others refused", |_| {
        let rule = lab.rule(0);
        rule.active + rule.refused == MOST as u64 + 100 && rule.active == MOST as u64
    });
    for stream in streams {
        guest.abort(stream);
    }
    eventually_with(&mut guest, "no connect under way", |_| {
        lab.rule(0).active == 0
    });
}

#[test]
fn localhost_is_named_and_needs_no_name_server() {
    let (listener, target) = tcp_server();
    let port = target.rsplit(':').next().unwrap();
    let lab = ForwardingDaemon::new(vec![rule(1, format!("tcp:localhost:{port}"))]);
    let mut guest = lab.guest();
    let stream = guest.wait_connect(host(1), deadline()).unwrap();
    let mut server = accept(&listener);
    server.write_all(b"hello").unwrap();
    let mut got = [0; 5];
    guest.wait_recv_exact(stream, &mut got, deadline()).unwrap();
    assert_eq!(&got, b"hello");
}

#[test]
fn the_proxy_header_has_cid_and_ports_of_the_source_and_comes_first() {
    let (listener, target) = tcp_server();
    let mut with_header = rule(8080, target);
    with_header.proxy_protocol = true;
    let lab = ForwardingDaemon::new(vec![with_header]);
    let mut guest = lab.guest();
    let stream = guest.wait_connect(host(8080), deadline()).unwrap();
    let (local, _) = guest.addresses(stream).unwrap();
    let mut server = accept(&listener);
    guest.wait_send(stream, b"payload", deadline()).unwrap();
    guest.shutdown(stream, Directions::SEND);
    let reader = thread::spawn(move || {
        let mut got = Vec::new();
        server.read_to_end(&mut got).unwrap();
        got
    });
    eventually_with(&mut guest, "all read", |_| reader.is_finished());
    let got = reader.join().unwrap();
    assert_eq!(&got[..12], b"\r\n\r\n\0\r\nQUIT\n");
    // Version 2, PROXY; family UNSPEC.
    assert_eq!(got[12..14], [0x21, 0]);
    let len = usize::from(u16::from_be_bytes([got[14], got[15]]));
    let (header, payload) = got[16..].split_at(len);
    assert_eq!(payload, b"payload");
    let mut wanted = vec![0xe0, 0, 12];
    wanted.extend(3u32.to_be_bytes());
    wanted.extend(local.port.get().to_be_bytes());
    wanted.extend(8080u32.to_be_bytes());
    let found = header.windows(wanted.len()).any(|window| window == wanted);
    assert!(found, "{header:?}");
    // The header does not count.
    drop(guest);
    lab.until_none_is_left();
    assert_eq!(lab.rule(0).bytes_sent, 7);
}

/// The kernel answers EAGAIN for a full backlog, and reports no room.
#[test]
fn a_unix_server_with_a_full_backlog_is_tried_until_it_accepts() {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let flags = SocketFlags::CLOEXEC;
    let socket =
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
    rustix::net::bind(&socket, &SocketAddrUnix::new(&path).unwrap()).unwrap();
    rustix::net::listen(&socket, 0).unwrap();
    let listener = UnixListener::from(socket);
    let lab = ForwardingDaemon::with(1, |config| {
        config.forward = vec![rule(1, unix("unix", &path))];
        config.connect_timeout = Duration::from_secs(600);
    });
    let mut guest = lab.guest();
    let first = guest.connect(host(1)).unwrap();
    let second = guest.connect(host(1)).unwrap();
    let accepting = thread::spawn(move || {
        for _ in 0..2 {
            let (mut stream, _) = listener.accept().unwrap();
            stream.write_all(b"x").unwrap();
        }
    });
    for stream in [first, second] {
        eventually_with(&mut guest, "a byte", |guest| {
            guest.recv(stream, &mut [0; 1]).is_ok_and(|got| got == 1)
        });
    }
    accepting.join().unwrap();
}
