//! Host programs that send their own end of a hybrid connection over that connection, and exit: the
//! message in the daemon's socket holds the end open, so the kernel does not report the end of
//! file.
//!
//! On kernels with SO_PASSRIGHTS only programs that connect before the daemon starts can do that.
//! With ZEROSOCK_WITHOUT_PASSRIGHTS set, all can.

use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};

use super::driver::{Driver, DriverConfig, StreamId};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use zerosock::{Address, Cid, Port};
use zerosock_sys::fd_passing;

use super::daemon::{ATTACKER, Daemon};
use super::neighbour::deadline;
use super::process::wait_until;
use super::programs::{EarlyProgram, kernel_refuses_rights};

const PORT: Port = Port::new(9);
/// Bytes that the daemon can send a guest that does not read: later ones stay in its socket.
const WINDOW: usize = 8192;
const LONG: Timespec = Timespec {
    tv_sec: 60,
    tv_nsec: 0,
};

fn send(socket: &UnixStream, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> std::io::Result<usize> {
    fd_passing::send(socket, &[std::io::IoSlice::new(bytes)], fds)
}

/// Sends `bytes` with the program's own end and an end of a pipe, and closes both. The returned end
/// of the pipe reports when the daemon has released the message.
fn send_own_end(program: UnixStream, bytes: &[u8]) -> OwnedFd {
    let (released, held) = rustix::pipe::pipe().unwrap();
    let sent = send(&program, bytes, &[program.as_fd(), held.as_fd()]);
    assert_eq!(sent.unwrap(), bytes.len());
    released
}

/// Whether the other end of the pipe is closed before the time is over.
fn is_released(pipe: &OwnedFd, within: &Timespec) -> bool {
    let mut fds = [PollFd::new(pipe, PollFlags::empty())];
    poll(&mut fds, Some(within)).unwrap() > 0
}

fn expect_bytes_then_end(guest: &mut Driver, stream: StreamId, bytes: &[u8]) {
    let mut got = Vec::new();
    let result = guest.wait_recv_to_end(stream, &mut got, deadline());
    result.expect("the end of the stream");
    assert_eq!(got, bytes);
}

/// A connection of the program to the guest.
fn connect(program: &mut UnixStream, guest: &mut Driver) -> StreamId {
    program.write_all(b"CONNECT 9\n").unwrap();
    let stream = guest.wait_accept(PORT, deadline()).unwrap();
    let mut line = [0; 5];
    program.read_exact(&mut line).unwrap();
    assert_eq!(&line, b"OK 9\n");
    stream
}

fn listening_guest(daemon: &Daemon) -> Driver {
    let mut config = DriverConfig::new(daemon.socket(ATTACKER));
    config.buf_alloc = WINDOW as u32;
    let mut guest = Driver::attach(config).unwrap();
    guest.listen(PORT, 4).unwrap();
    guest
}

#[test]
fn own_end_with_the_connect_line_is_released_and_the_guest_reads_the_end() {
    let (daemon, program) = EarlyProgram::new().start_daemon();
    let mut guest = listening_guest(&daemon);
    let pipe = send_own_end(program, b"CONNECT 9\nhello");
    let stream = guest.wait_accept(PORT, deadline()).unwrap();
    expect_bytes_then_end(&mut guest, stream, b"hello");
    assert!(is_released(&pipe, &LONG));
}

/// The line is incomplete and stays in the socket.
#[test]
fn own_end_with_half_a_connect_line_is_released_by_the_connect_timeout() {
    let (daemon, program) = EarlyProgram::new().start_daemon();
    let _guest = listening_guest(&daemon);
    let pipe = send_own_end(program, b"CONN");
    assert!(is_released(&pipe, &LONG));
}

#[test]
fn own_end_with_payload_is_released_and_the_guest_reads_the_end() {
    let (daemon, mut program) = EarlyProgram::new().start_daemon();
    let mut guest = listening_guest(&daemon);
    let stream = connect(&mut program, &mut guest);
    let pipe = send_own_end(program, b"hello");
    expect_bytes_then_end(&mut guest, stream, b"hello");
    assert!(is_released(&pipe, &LONG));
}

/// As of any program that has exited, the connection remains while the guest does not read.
#[test]
fn own_end_behind_unread_payload_is_released_when_the_guest_closes() {
    let close: [fn(&mut Driver, StreamId); 2] = [
        |guest, stream| guest.abort(stream),
        |guest, stream| guest.close(stream),
    ];
    for close in close {
        let (daemon, mut program) = EarlyProgram::new().start_daemon();
        let mut guest = listening_guest(&daemon);
        let stream = connect(&mut program, &mut guest);
        program.write_all(&[0; WINDOW]).unwrap();
        let pipe = send_own_end(program, b"x");
        close(&mut guest, stream);
        wait_until("the daemon to release the message", || {
            guest.drive().unwrap();
            is_released(&pipe, &Timespec::default())
        });
    }
}

#[test]
fn own_end_behind_unread_payload_is_released_when_the_guest_ends() {
    let (daemon, mut program) = EarlyProgram::new().start_daemon();
    let mut guest = listening_guest(&daemon);
    connect(&mut program, &mut guest);
    program.write_all(&[0; WINDOW]).unwrap();
    let pipe = send_own_end(program, b"x");
    drop(guest);
    assert!(is_released(&pipe, &LONG));
}

/// A connection that the guest begins.
#[test]
fn own_end_of_a_program_that_was_called_is_released_or_refused() {
    let daemon = Daemon::start(&[]);
    let listener = UnixListener::bind(daemon.service(ATTACKER, PORT)).unwrap();
    let mut guest = daemon.attach(ATTACKER);
    let to = Address::new(Cid::HOST, PORT);
    let stream = guest.wait_connect(to, deadline()).unwrap();
    let (program, _) = listener.accept().unwrap();
    if kernel_refuses_rights() {
        let error = send(&program, b"hello", &[program.as_fd()]).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::PermissionDenied);
        return;
    }
    let pipe = send_own_end(program, b"hello");
    expect_bytes_then_end(&mut guest, stream, b"hello");
    assert!(is_released(&pipe, &LONG));
}
