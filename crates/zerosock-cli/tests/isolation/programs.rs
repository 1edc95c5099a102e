//! Host programs and processes that send descriptors where none are expected.

use std::io::{IoSlice, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};

use rustix::net::sockopt::set_socket_linger;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use tempfile::TempDir;
use zerosock::Port;
use zerosock_sys::fd_passing;
use zerosock_sys::reaper::MAX_STUCK_EACH;

use super::daemon::{self, ATTACKER, Alone, Daemon, hybrid_path};
use super::lingering::lingering_socket;
use super::neighbour::{Neighbour, deadline};
use super::process::{DEADLINE, wait_until};
use super::threads::{Held, REAPER, count_held};

const PORT: Port = Port::new(9);

/// False also with ZEROSOCK_WITHOUT_PASSRIGHTS.
pub(crate) fn kernel_refuses_rights() -> bool {
    let (socket, _other) = UnixStream::pair().unwrap();
    fd_passing::refuse_rights(&socket).unwrap()
}

/// Sends a lingering socket with `bytes`. The kernel refuses it, or the reaper must close it.
fn send_lingering(daemon: &Daemon, socket: BorrowedFd<'_>, bytes: &[u8]) {
    let mut neighbour = Neighbour::new(daemon);
    let (lingering, receiver) = lingering_socket();
    let result = daemon.while_stopped(move || {
        let result = fd_passing::send(socket, &[IoSlice::new(bytes)], &[lingering.as_fd()]);
        if result.is_err() {
            // The test keeps the socket, and must not block on it.
            set_socket_linger(&lingering, None).unwrap();
        }
        result
    });
    match result {
        Err(error) => {
            assert!(kernel_refuses_rights(), "{error}");
            assert_eq!(error.kind(), std::io::ErrorKind::PermissionDenied);
            neighbour.round_trip(1);
        }
        Ok(_) => {
            assert!(!kernel_refuses_rights(), "the socket takes descriptors");
            expect_held_reaper(daemon, &mut neighbour, receiver);
        }
    }
}

fn expect_held_reaper(daemon: &Daemon, neighbour: &mut Neighbour, receiver: TcpStream) {
    let held = Held::wait(daemon.pid(), REAPER);
    neighbour.goes_on_while(daemon, &held);
    drop(receiver);
    held.wait_for_end();
    neighbour.round_trip(2);
}

#[test]
fn descriptors_on_a_hybrid_socket_are_refused_or_reaped() {
    let daemon = Daemon::start(&[]);
    let program = UnixStream::connect(daemon.hybrid(ATTACKER)).unwrap();
    send_lingering(&daemon, program.as_fd(), b"CONNECT 9\n");
}

#[test]
fn descriptors_of_a_user_that_may_not_attach_are_refused_or_reaped() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("attach");
    let options = ["--attach-socket", path.to_str().unwrap()];
    // Any user but that of this test.
    let other = (rustix::process::geteuid().as_raw() + 12345).to_string();
    let daemon = Daemon::start(&[&options[..], &["--attach-uid", &other]].concat());
    let flags = SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    connect(&socket, &SocketAddrUnix::new(&path).unwrap()).unwrap();
    send_lingering(&daemon, socket.as_fd(), b"zsat");
}

/// A listener of the service manager, and a program that connects before the daemon starts: this
/// connection accepts descriptors for its lifetime.
pub(crate) struct EarlyProgram {
    alone: Alone,
    dir: TempDir,
    listener: UnixListener,
    socket: UnixStream,
}

impl EarlyProgram {
    pub(crate) fn new() -> EarlyProgram {
        let alone = daemon::alone();
        let dir = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(hybrid_path(dir.path(), ATTACKER)).unwrap();
        let socket = UnixStream::connect(hybrid_path(dir.path(), ATTACKER)).unwrap();
        socket.set_read_timeout(Some(DEADLINE)).unwrap();
        EarlyProgram {
            alone,
            dir,
            listener,
            socket,
        }
    }

    pub(crate) fn start_daemon(self) -> (Daemon, UnixStream) {
        let running = daemon::start_with_listener(&daemon::command(self.dir.path()), self.listener);
        (Daemon::with(running, self.dir, self.alone), self.socket)
    }
}

fn send(socket: &UnixStream, bytes: &[u8], fd: OwnedFd) {
    let sent = fd_passing::send(socket, &[IoSlice::new(bytes)], &[fd.as_fd()]);
    assert_eq!(sent.unwrap(), bytes.len());
}

#[test]
fn descriptor_with_the_connect_line_of_an_early_program_holds_only_the_reaper() {
    let early = EarlyProgram::new();
    let (lingering, receiver) = lingering_socket();
    send(&early.socket, b"CONNECT 9\n", lingering);
    let (daemon, _program) = early.start_daemon();
    let mut neighbour = Neighbour::new(&daemon);
    let mut guest = daemon.attach(ATTACKER);
    guest.listen(PORT, 4).unwrap();
    expect_held_reaper(&daemon, &mut neighbour, receiver);
}

#[test]
fn descriptor_with_payload_of_an_early_program_holds_only_the_reaper() {
    let (daemon, mut program) = EarlyProgram::new().start_daemon();
    let mut neighbour = Neighbour::new(&daemon);
    let mut guest = daemon.attach(ATTACKER);
    guest.listen(PORT, 4).unwrap();
    program.write_all(b"CONNECT 9\n").unwrap();
    let stream = guest.wait_accept(PORT, deadline()).unwrap();
    let mut line = [0; 5];
    program.read_exact(&mut line).unwrap();
    assert_eq!(&line, b"OK 9\n");
    let (lingering, receiver) = lingering_socket();
    daemon.while_stopped(|| send(&program, b"hello", lingering));
    let mut got = [0; 5];
    guest.wait_recv_exact(stream, &mut got, deadline()).unwrap();
    assert_eq!(&got, b"hello");
    expect_held_reaper(&daemon, &mut neighbour, receiver);
}

/// More descriptors than may wait for the stuck ones of one peer.
const STUCK: usize = 64;

#[test]
fn descriptors_of_a_program_that_do_not_close_leave_the_front_end_of_its_vm_alone() {
    let early = EarlyProgram::new();
    let (sockets, receivers): (Vec<OwnedFd>, Vec<TcpStream>) =
        (0..STUCK).map(|_| lingering_socket()).unzip();
    let borrowed: Vec<_> = sockets.iter().map(|fd| fd.as_fd()).collect();
    fd_passing::send(&early.socket, &[IoSlice::new(b"CONNECT 9\n")], &borrowed).unwrap();
    drop(sockets);
    let (daemon, _program) = early.start_daemon();
    wait_until("as many held threads as one peer may have", || {
        count_held(daemon.pid(), REAPER) >= MAX_STUCK_EACH
    });
    let held = Held::wait(daemon.pid(), REAPER);
    for _ in 0..3 {
        let frontend = daemon.frontend(ATTACKER);
        assert!(frontend.ask_features().is_some());
    }
    held.check();
    drop(receivers);
    held.wait_for_end();
}
