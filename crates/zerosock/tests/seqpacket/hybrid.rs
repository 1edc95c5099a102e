//! Messages between a guest and host programs, over Unix sockets of type SOCK_SEQPACKET.

use std::io::ErrorKind;
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, sockopt,
};
use zerosock::daemon::{Daemon, DaemonConfig, HostSide, HybridMessages, Stats, VmConfig};
use zerosock::vsock::{Endpoint, EndpointBuilder, SeqPacket};
use zerosock::{Address, Cid, Port};

use super::{PORT, ends_record, message, with_time_outs};
use crate::common::{PATIENCE, deadline};

pub(crate) struct HybridDaemon {
    daemon: Option<Daemon>,
    dir: tempfile::TempDir,
}

/// A SOCK_SEQPACKET socket of a host program.
pub(crate) struct Program(pub(crate) OwnedFd);

fn socket() -> OwnedFd {
    let flags = SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
    let socket = socket.unwrap();
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, Some(PATIENCE)).unwrap();
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(PATIENCE)).unwrap();
    socket
}

pub(crate) fn listen(path: &Path) -> OwnedFd {
    let socket = socket();
    rustix::net::bind(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
    rustix::net::listen(&socket, 16).unwrap();
    socket
}

impl Program {
    pub(crate) fn accept(listener: &OwnedFd) -> Program {
        let socket = rustix::net::accept(listener).unwrap();
        sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, Some(PATIENCE)).unwrap();
        Program(socket)
    }

    fn send(&self, packet: &[u8]) {
        let sent = rustix::net::send(&self.0, packet, SendFlags::NOSIGNAL).unwrap();
        assert_eq!(sent, packet.len());
    }

    /// The next packet; empty at the end.
    pub(crate) fn recv(&self) -> Vec<u8> {
        let mut out = vec![0; 300_000];
        let (_, got) = rustix::net::recv(&self.0, &mut out[..], RecvFlags::empty()).unwrap();
        out.truncate(got);
        out
    }
}

impl HybridDaemon {
    pub(crate) fn new() -> HybridDaemon {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let bind = |name: &str| std::os::unix::net::UnixListener::bind(at(name)).unwrap();
        let vm = VmConfig {
            cid: Cid::new(3),
            listener: bind("vm.sock"),
            host: HostSide::Hybrid {
                path: at("streams"),
                listener: bind("streams"),
                messages: Some(HybridMessages {
                    path: at("messages"),
                    listener: listen(&at("messages")),
                }),
            },
            buf_alloc: 262_144,
            queue_size: 1024,
            groups: Vec::new(),
            require_sealed_memory: false,
            stopped_timeout: None,
            guest_endpoints: None,
            succession: None,
        };
        let daemon = Daemon::start(DaemonConfig {
            vms: vec![vm],
            ..DaemonConfig::default()
        });
        HybridDaemon {
            daemon: Some(daemon.unwrap()),
            dir,
        }
    }

    pub(crate) fn at(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn guest(&self, tune: impl FnOnce(EndpointBuilder) -> EndpointBuilder) -> Endpoint {
        tune(Endpoint::builder())
            .attach_device(self.at("vm.sock"))
            .unwrap()
    }

    pub(crate) fn stats(&self) -> Stats {
        self.daemon.as_ref().unwrap().stats()
    }

    fn program(&self) -> Program {
        let socket = socket();
        let address = SocketAddrUnix::new(self.at("messages")).unwrap();
        rustix::net::connect(&socket, &address).unwrap();
        Program(socket)
    }

    /// A connection that the host program has opened.
    fn called(&self, guest: &Endpoint) -> (SeqPacket, Program) {
        let listener = guest.listen_seqpacket(PORT, 4).unwrap();
        let program = self.program();
        program.send(format!(" CONNECT  {PORT} \n").as_bytes());
        let (ours, _) = listener.accept_timeout(PATIENCE).unwrap();
        assert_eq!(program.recv(), format!("OK {PORT}\n").as_bytes());
        (with_time_outs(ours), program)
    }

    /// A connection that the guest has opened.
    fn calls(&self, guest: &Endpoint) -> (SeqPacket, Program) {
        let path = self.at(&format!("messages_{PORT}"));
        let _ = std::fs::remove_file(&path);
        let listener = listen(&path);
        let to = Address::new(Cid::HOST, PORT);
        let ours = guest.connect_seqpacket(to).unwrap();
        (with_time_outs(ours), Program::accept(&listener))
    }
}

impl Drop for HybridDaemon {
    fn drop(&mut self) {
        if let Some(daemon) = self.daemon.take() {
            daemon.shutdown();
        }
    }
}

fn echo(ours: &SeqPacket, program: &Program) {
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..150 {
                // Each message is one packet, in both directions.
                program.send(&program.recv());
            }
        });
        scope.spawn(|| {
            // Another test has messages longer than a socket takes.
            for number in 0..150 {
                let message = short(number);
                match ends_record(number) {
                    true => ours.send_eor(&message).unwrap(),
                    false => ours.send(&message).unwrap(),
                }
            }
        });
        let mut out = vec![0; 262_144];
        for number in 0..150 {
            let got = ours.recv(&mut out).unwrap().expect("not the end");
            crate::common::assert_bytes(&out[..got.len], &short(number));
            assert!(!got.end_of_record, "Unix sockets have none");
        }
    });
}

fn short(number: u64) -> Vec<u8> {
    let mut message = message(number);
    message.truncate(100_000);
    message
}

#[test]
fn a_host_program_calls_and_is_called() {
    let lab = HybridDaemon::new();
    for small in [false, true] {
        let guest = lab.guest(|builder| match small {
            true => builder
                .queue_size(16)
                .receive_buffers(4096)
                .transmit_buffers(4096),
            false => builder,
        });
        for (ours, program) in [lab.called(&guest), lab.calls(&guest)] {
            echo(&ours, &program);
            // An empty message is not sent; an empty packet is the end.
            program.send(b"");
            program.send(b"last");
            rustix::net::shutdown(&program.0, rustix::net::Shutdown::Write).unwrap();
            assert_eq!(ours.recv(&mut []).unwrap().unwrap().len, 0);
            assert_eq!(ours.recv_leases().unwrap().unwrap().to_vec(), b"last");
            assert_eq!(ours.recv(&mut []).unwrap(), None);
            ours.send(b"the other half").unwrap();
            ours.shutdown(Shutdown::Write).unwrap();
            assert_eq!(program.recv(), b"the other half");
            assert_eq!(program.recv(), b"");
        }
        drop(guest);
    }
    assert_eq!(lab.stats().message_resets, 0);
}

#[test]
fn messages_to_and_from_host_programs_are_not_copied() {
    let lab = HybridDaemon::new();
    let guest = lab.guest(|builder| builder);
    let (ours, program) = lab.calls(&guest);
    let before = lab.stats();
    ours.send(&[1; 100_000]).unwrap();
    assert_eq!(program.recv(), [1; 100_000]);
    program.send(&[2; 100_000]);
    assert_eq!(ours.recv_leases().unwrap().unwrap().to_vec(), [2; 100_000]);
    let after = lab.stats();
    assert_eq!(after.in_place_bytes - before.in_place_bytes, 200_000);
    assert_eq!(after.copied_bytes, before.copied_bytes);
}

/// A message that gets EMSGSIZE, in either direction, ends the connection and is counted.
#[test]
fn a_message_that_the_other_side_cannot_take_ends_its_connection() {
    let lab = HybridDaemon::new();
    let guest = lab.guest(|builder| builder.window(5000));
    let (ours, program) = lab.called(&guest);
    program.send(&[1; 5000]);
    assert_eq!(ours.recv_leases().unwrap().unwrap().len(), 5000);
    program.send(&[1; 5001]);
    let error = ours.recv(&mut []).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    assert_eq!(lab.stats().message_resets, 1);
    // The program's side is closed too.
    let end = rustix::net::recv(&program.0, &mut [0; 1][..], RecvFlags::empty());
    assert!(matches!(
        end,
        Ok((_, 0)) | Err(rustix::io::Errno::CONNRESET)
    ));
    // Other connections continue.
    let (ours, program) = lab.called(&guest);
    program.send(b"on");
    assert_eq!(ours.recv_leases().unwrap().unwrap().to_vec(), b"on");
}

/// A program that does not read: the guest's messages to it wait, whole, and other messages do not.
#[test]
fn a_program_that_does_not_read_stalls_its_own() {
    let lab = HybridDaemon::new();
    let guest = lab.guest(|builder| builder);
    let (ours, program) = lab.calls(&guest);
    ours.set_write_timeout(Some(Duration::from_millis(300)))
        .unwrap();
    let mut sent = 0u32;
    while ours.send(&[sent as u8; 20_000]).is_ok() {
        sent += 1;
        assert!(sent < 1000, "nothing stops it");
    }
    let (other, reader) = lab.called(&guest);
    other.send(b"runs on").unwrap();
    assert_eq!(reader.recv(), b"runs on");
    for number in 0..sent {
        assert!(program.recv() == [number as u8; 20_000]);
    }
    let give_up = deadline();
    while lab.stats().conns_added < 2 {
        assert!(std::time::Instant::now() < give_up);
    }
}

#[test]
fn a_first_packet_that_is_no_connect_is_turned_away() {
    let lab = HybridDaemon::new();
    let guest = lab.guest(|builder| builder);
    let _listener = guest.listen_seqpacket(PORT, 4).unwrap();
    let lines = [
        &b"CONNECT 5000\npayload"[..],
        b"CONNECT",
        b"GET /\n",
        b"",
        b"CONNECT 5000",
    ];
    for line in lines {
        let program = lab.program();
        program.send(line);
        let end = rustix::net::recv(&program.0, &mut [0; 1][..], RecvFlags::empty());
        assert!(
            matches!(end, Ok((_, 0)) | Err(rustix::io::Errno::CONNRESET)),
            "{line:?}"
        );
    }
    assert_eq!(lab.stats().bad_handshakes, lines.len() as u64);
    // No listener for messages at another port, nor for streams at this one.
    let program = lab.program();
    program.send(b"CONNECT 1\n");
    while guest.drive().is_ok() && lab.stats().conns_refused == 0 {}
    assert_eq!(program.recv(), b"");
    let to = Address::new(Cid::HOST, Port::new(9));
    let error = guest.connect_seqpacket(to).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
}
