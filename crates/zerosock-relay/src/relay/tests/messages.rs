//! Pairs of sockets that keep the bounds of messages: SOCK_SEQPACKET, and those joined to datagrams.

use std::net::UdpSocket;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, Shutdown, SocketAddrUnix, SocketFlags, SocketType, accept,
    bind, connect, listen, recv, send, shutdown, socket_with,
};

use super::support::{DEADLINE, pattern, wait_readable, wait_until};
use crate::relay::{Relay, RelayConfig};

fn socket() -> OwnedFd {
    socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )
    .unwrap()
}

fn connect_to(path: &Path) -> OwnedFd {
    let fd = socket();
    connect(&fd, &SocketAddrUnix::new(path).unwrap()).unwrap();
    fd
}

fn receive(fd: &OwnedFd) -> Vec<u8> {
    wait_readable(fd.as_fd());
    let mut buffer = vec![0; 300_000];
    let (got, _) = recv(fd, &mut buffer[..], RecvFlags::empty()).unwrap();
    buffer.truncate(got);
    buffer
}

fn send_one(fd: &OwnedFd, message: &[u8]) {
    assert_eq!(
        send(fd, message, SendFlags::NOSIGNAL).unwrap(),
        message.len()
    );
}

struct Rig {
    relay: Relay,
    listener: OwnedFd,
    dir: tempfile::TempDir,
}

impl Rig {
    fn new() -> Rig {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("target");
        let listener = socket();
        bind(&listener, &SocketAddrUnix::new(&target).unwrap()).unwrap();
        listen(&listener, 16).unwrap();
        let ends = [
            format!(
                "unix-seqpacket-listen:{}",
                dir.path().join("relay").display()
            ),
            format!("unix-seqpacket:{}", target.display()),
        ];
        let relay = Relay::start(RelayConfig::new(ends.map(|end| end.parse().unwrap()))).unwrap();
        Rig {
            relay,
            listener,
            dir,
        }
    }

    fn pair(&self) -> (OwnedFd, OwnedFd) {
        let client = connect_to(&self.dir.path().join("relay"));
        (client, accept(&self.listener).unwrap())
    }
}

#[test]
fn messages_keep_their_bounds_both_ways_and_half_closes_pass() {
    let rig = Rig::new();
    for round in 0..2 {
        let (client, target) = rig.pair();
        let (first, second) = match round {
            0 => (client, target),
            _ => (target, client),
        };
        let lengths = [1, 0, 5000, 3, 65536, 150_000, 2];
        for (n, length) in lengths.into_iter().enumerate() {
            send_one(&first, &pattern(length, n as u64));
            assert_eq!(receive(&second), pattern(length, n as u64), "message {n}");
        }
        for n in 0..20u8 {
            send_one(&first, &[n; 10]);
        }
        shutdown(&first, Shutdown::Write).unwrap();
        for n in 0..20u8 {
            assert_eq!(receive(&second), [n; 10]);
        }
        assert_eq!(receive(&second), b"", "the end");
        send_one(&second, b"answer");
        assert_eq!(receive(&first), b"answer");
        drop(second);
        assert_eq!(receive(&first), b"");
    }
    wait_until("the end", || rig.relay.stats().open == 0);
    assert_eq!(rig.relay.stats().failed, 0);
}

#[test]
fn a_reader_that_stops_stops_the_sender_and_no_message_is_lost() {
    let rig = Rig::new();
    let (client, target) = rig.pair();
    rustix::io::ioctl_fionbio(&client, true).unwrap();
    let mut sent = 0u32;
    let mut idle_since = std::time::Instant::now();
    // Until nothing was taken for a while.
    while idle_since.elapsed() < std::time::Duration::from_millis(200) {
        match send(
            &client,
            &sent.to_ne_bytes().repeat(500),
            SendFlags::NOSIGNAL,
        ) {
            Ok(_) => {
                sent += 1;
                idle_since = std::time::Instant::now();
            }
            Err(Errno::AGAIN) => std::thread::yield_now(),
            Err(errno) => panic!("{errno}"),
        }
        assert!(sent < 1_000_000, "it never stops");
    }
    drop(client);
    for n in 0..sent {
        assert_eq!(receive(&target), n.to_ne_bytes().repeat(500), "message {n}");
    }
    assert_eq!(receive(&target), b"");
}

#[test]
fn messages_of_a_connection_are_datagrams_on_the_other_side() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("relay");
    let target = UdpSocket::bind("127.0.0.1:0").unwrap();
    target.set_read_timeout(Some(DEADLINE)).unwrap();
    let ends = [
        format!("unix-seqpacket-listen:{}", path.display()),
        format!("udp:{}", target.local_addr().unwrap()),
    ];
    let relay = Relay::start(RelayConfig::new(ends.map(|end| end.parse().unwrap()))).unwrap();
    let client = connect_to(&path);
    let mut buffer = [0; 65536];
    for length in [1, 1400, 60_000] {
        send_one(&client, &pattern(length, 1));
        let (got, from) = target.recv_from(&mut buffer).unwrap();
        assert_eq!(buffer[..got], pattern(length, 1));
        target.send_to(&pattern(length, 2), from).unwrap();
        assert_eq!(receive(&client), pattern(length, 2));
    }
    // Too long for a datagram: it alone is lost.
    send_one(&client, &[1; 70_000]);
    send_one(&client, b"next");
    assert_eq!(target.recv(&mut buffer).unwrap(), 4);
    drop(client);
    wait_until("the end", || relay.stats().open == 0);
    assert_eq!(relay.stats().dropped, 1);
}
