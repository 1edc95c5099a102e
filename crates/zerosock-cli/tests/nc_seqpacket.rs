//! `zerosock nc --seqpacket` as a process: over SOCK_SEQPACKET Unix sockets, against a hybrid
//! server in this test, and through a running `zerosock serve`.

use std::io::IoSlice;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::process::{DEADLINE, Ended, Running, wait_until, zerosock};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, Shutdown, SocketAddrUnix, SocketFlags, SocketType, sockopt,
};
use zerosock::vsock::{Endpoint, SeqPacket};
use zerosock::{Address, Cid, Port};

struct TestDir {
    dir: tempfile::TempDir,
}

impl TestDir {
    fn new() -> TestDir {
        TestDir {
            dir: tempfile::tempdir().unwrap(),
        }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn show(&self, name: &str) -> String {
        self.at(name).display().to_string()
    }

    /// A server of one VM and of processes.
    fn serve(&self) -> Running {
        let mut serve = zerosock();
        serve.arg("serve").arg("--socket").arg(self.at("vm"));
        serve.arg("--uds-path").arg(self.at("bytes"));
        serve.arg("--uds-path-seqpacket").arg(self.at("hybrid"));
        serve.arg("--attach-socket").arg(self.at("attach"));
        let running = Running::start(&mut serve);
        wait_until("the sockets", || {
            ["vm", "hybrid", "attach"]
                .iter()
                .all(|name| self.at(name).exists())
        });
        running
    }
}

/// `zerosock nc --seqpacket` with a SOCK_SEQPACKET socket as standard input: a packet is a message.
fn nc(words: &[&str]) -> (Command, Packets) {
    let (ours, stdin) = rustix::net::socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )
    .unwrap();
    let mut command = zerosock();
    command.args(["nc", "-v", "--seqpacket"]).args(words);
    command.stdin(Stdio::from(stdin)).stdout(Stdio::piped());
    (command, Packets(ours))
}

fn start(words: &[&str]) -> (Running, Packets) {
    let (mut command, stdin) = nc(words);
    (Running::start_with(&mut command), stdin)
}

/// One that listens, and has said so.
fn listening(words: &[&str]) -> (Running, Packets) {
    let (running, stdin) = start(words);
    wait_until("it to listen", || running.stderr().contains(": listening"));
    (running, stdin)
}

fn finish_successfully(running: Running) -> Vec<u8> {
    let ended = running.finish();
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    ended.stdout
}

#[track_caller]
fn failed(running: Running, wanted: &str) -> Ended {
    let ended = running.finish();
    assert_eq!(ended.code, Some(1), "{}", ended.stderr);
    assert!(ended.stderr.contains(wanted), "{}", ended.stderr);
    ended
}

/// A socket of packets.
struct Packets(OwnedFd);

impl Packets {
    fn listen(path: &Path) -> Packets {
        let flags = SocketFlags::CLOEXEC;
        let kind = SocketType::SEQPACKET;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None).unwrap();
        rustix::net::bind(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
        rustix::net::listen(&socket, 4).unwrap();
        sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, Some(DEADLINE)).unwrap();
        Packets(socket)
    }

    fn accept(&self) -> Packets {
        let socket = rustix::net::accept_with(&self.0, SocketFlags::CLOEXEC).unwrap();
        sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, Some(DEADLINE)).unwrap();
        Packets(socket)
    }

    fn send(&self, parts: &[&[u8]]) {
        let slices: Vec<_> = parts.iter().map(|part| IoSlice::new(part)).collect();
        let mut none = rustix::net::SendAncillaryBuffer::default();
        let flags = SendFlags::NOSIGNAL;
        rustix::net::sendmsg(&self.0, &slices, &mut none, flags).unwrap();
    }

    fn recv(&self) -> Vec<u8> {
        let mut out = vec![0; 300_000];
        let (_, len) = rustix::net::recv(&self.0, &mut out[..], RecvFlags::TRUNC).unwrap();
        out.truncate(len);
        out
    }

    fn end(&self) {
        rustix::net::shutdown(&self.0, Shutdown::Write).unwrap();
    }
}

#[test]
fn what_is_read_at_once_is_a_message_and_empty_ones_end_nothing() {
    let dir = TestDir::new();
    let listener = Packets::listen(&dir.at("server"));
    let (running, stdin) = start(&[&format!("unix:{}", dir.show("server"))]);
    let peer = listener.accept();
    for len in [1, 5000, 65_536] {
        stdin.send(&[&vec![7; len]]);
        assert_eq!(peer.recv(), vec![7; len]);
    }
    // Empty ones, between others and before the end; and one longer than any that it sends.
    let long = vec![9; 150_000];
    for answer in [&b"one, "[..], b"", b"", b"two", b"", &long, b"", b""] {
        peer.send(&[answer]);
    }
    stdin.send(&[b"still here"]);
    assert_eq!(peer.recv(), b"still here");
    peer.send(&[b"and three", b"."]);
    peer.send(&[b""]);
    peer.end();
    drop(stdin);
    assert_eq!(peer.recv(), b"", "the end");
    let stdout = finish_successfully(running);
    assert_eq!(stdout, [b"one, two", &long[..], b"and three."].concat());
}

/// A pipe has no messages: a file goes in pieces, and arrives as it was.
#[test]
fn a_file_goes_from_one_that_connects_to_one_that_listens() {
    let dir = TestDir::new();
    let file: Vec<u8> = (0..3_000_000u32)
        .map(|n| (n.wrapping_mul(n) >> 7) as u8)
        .collect();
    std::fs::write(dir.at("file"), &file).unwrap();
    let (server, nothing) = listening(&[&format!("unix-listen:{}", dir.show("server"))]);
    drop(nothing);
    let (mut client, _) = nc(&[&format!("unix:{}", dir.show("server"))]);
    client.stdin(std::fs::File::open(dir.at("file")).unwrap());
    finish_successfully(Running::start_with(&mut client));
    assert!(finish_successfully(server) == file, "other bytes");
    assert!(!dir.at("server").exists());
}

#[test]
fn a_peer_that_closes_altogether_ends_it_though_input_is_open() {
    let dir = TestDir::new();
    let listener = Packets::listen(&dir.at("server"));
    let (running, stdin) = start(&[&format!("unix:{}", dir.show("server"))]);
    let peer = listener.accept();
    peer.send(&[b"bye"]);
    drop(peer);
    assert_eq!(finish_successfully(running), b"bye");
    drop(stdin);
}

#[test]
fn sockets_of_another_kind_are_reported() {
    let dir = TestDir::new();
    let _stream = std::os::unix::net::UnixListener::bind(dir.at("stream")).unwrap();
    let (running, _stdin) = start(&[&format!("unix:{}", dir.show("stream"))]);
    failed(running, "is not a SOCK_SEQPACKET socket");
    let _packets = Packets::listen(&dir.at("packets"));
    let mut command = zerosock();
    command.args(["nc", &format!("unix:{}", dir.show("packets"))]);
    failed(
        Running::start(&mut command),
        "is not a stream socket (--seqpacket?)",
    );
}

#[test]
fn a_hybrid_socket_takes_lines_as_packets() {
    let dir = TestDir::new();
    let endpoint = format!("hybrid:{}:77", dir.show("hybrid"));
    let listener = Packets::listen(&dir.at("hybrid"));
    let (running, stdin) = start(&[&endpoint]);
    let guest = listener.accept();
    assert_eq!(guest.recv(), b"CONNECT 77\n");
    guest.send(&[b"OK 1073741824\n"]);
    guest.send(&[b"OK 5\n"]);
    stdin.send(&[b"to the guest"]);
    assert_eq!(guest.recv(), b"to the guest");
    drop((stdin, guest));
    assert_eq!(finish_successfully(running), b"OK 5\n");
    for (answer, wanted) in [
        (&b"OK x\n"[..], "answered `OK x` to CONNECT"),
        (b"NO", "answered `NO` to CONNECT"),
        (&[b'x'; 4096], "to CONNECT"),
        (b"", "closed without OK for port 77 (no VMM"),
    ] {
        let (running, _stdin) = start(&[&endpoint]);
        let guest = listener.accept();
        guest.recv();
        match answer {
            b"" => drop(guest),
            answer => guest.send(&[answer]),
        }
        failed(running, wanted);
    }
}

fn patient(socket: SeqPacket) -> SeqPacket {
    socket.set_read_timeout(Some(DEADLINE)).unwrap();
    socket.set_write_timeout(Some(DEADLINE)).unwrap();
    socket
}

/// As a process, as a service, and by the hybrid socket of a guest: with a process of ours, which
/// sees the messages.
#[test]
fn messages_go_through_a_server() {
    let dir = TestDir::new();
    let _serve = dir.serve();
    let attach = dir.show("attach");
    let guest = Endpoint::builder().attach_device(dir.at("vm")).unwrap();
    let talk = |running: Running, stdin: Packets, ours: SeqPacket| {
        let long = vec![3; 200_000];
        for message in [&b"first"[..], b"", &long, b"last"] {
            ours.send(message).unwrap();
        }
        for len in [1, 65_536, 9] {
            stdin.send(&[&vec![5; len]]);
            let got = ours.recv_leases().unwrap().expect("a message");
            assert_eq!(got.to_vec(), vec![5; len]);
        }
        drop(stdin);
        assert_eq!(ours.recv(&mut []).unwrap(), None, "the end");
        drop(ours);
        assert_eq!(
            finish_successfully(running),
            [b"first", &long[..], b"last"].concat()
        );
    };
    // They connect.
    let port = Port::new(1001);
    let process = Endpoint::builder()
        .name("ours")
        .attach(dir.at("attach"))
        .unwrap();
    let listener = process.listen_seqpacket(port, 4).unwrap();
    for endpoint in [
        format!("attach:{attach}:ours:1001"),
        format!("service:{attach}:ours:1001"),
    ] {
        let (running, stdin) = start(&[&endpoint]);
        let (ours, _) = listener.accept_timeout(DEADLINE).unwrap();
        talk(running, stdin, patient(ours));
    }
    let at_guest = guest.listen_seqpacket(port, 4).unwrap();
    let (running, stdin) = start(&[&format!("hybrid:{}:1001", dir.show("hybrid"))]);
    let (ours, peer) = at_guest.accept_timeout(DEADLINE).unwrap();
    assert_eq!(peer.cid, Cid::HOST);
    // OK comes when we have accepted; the device is told with our next call.
    talk(running, stdin, patient(ours));
    // They listen.
    let (running, stdin) = listening(&[&format!("service-listen:{attach}:1002")]);
    let ours = guest
        .connect_seqpacket(Address::new(Cid::HOST, Port::new(1002)))
        .unwrap();
    talk(running, stdin, patient(ours));
    // A stream is not what is listened for there.
    let (running, stdin) = listening(&[&format!("service-listen:{attach}:1004")]);
    let error = guest
        .connect(Address::new(Cid::HOST, Port::new(1004)))
        .unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionRefused);
    running.signal("TERM");
    drop((running.finish(), stdin));
}
