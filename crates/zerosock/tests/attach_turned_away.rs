//! Processes that have sent descriptors that cannot be closed.

mod common;

use std::io::{ErrorKind, IoSlice, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use common::{daemon_config, eventually};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::net::{bind, connect, listen, socket_with, sockopt};
use zerosock::attach::codec::{Request, decode_answer, encode_request};
use zerosock::attach::{AttachConfig, AttachRequest, Status};
use zerosock::daemon::{Daemon, Reload};
use zerosock_sys::{PeerFd, fd_passing};

/// More than may be refused at a time.
const PROCESSES: usize = 100;
const LIMIT: usize = 64;

fn socket() -> OwnedFd {
    let flags = SocketFlags::CLOEXEC;
    socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap()
}

/// A socket with unsent data. Its close waits until the other end is dropped.
fn lingering_socket() -> (OwnedFd, TcpStream) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    sockopt::set_socket_recv_buffer_size(&listener, 4096).unwrap();
    let mut socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (receiver, _) = listener.accept().unwrap();
    sockopt::set_socket_linger(&socket, Some(Duration::from_secs(600))).unwrap();
    sockopt::set_socket_send_buffer_size(&socket, 4096).unwrap();
    socket.set_nonblocking(true).unwrap();
    loop {
        match socket.write(&[0; 1 << 16]) {
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
            Err(error) => panic!("{error}"),
        }
    }
    (socket.into(), receiver)
}

/// A connection that waits in the backlog, with a descriptor that does not close.
fn process(path: &Path) -> (OwnedFd, TcpStream) {
    let process = socket();
    connect(&process, &SocketAddrUnix::new(path).unwrap()).unwrap();
    let (fd, receiver) = lingering_socket();
    // Only the first descriptor of a refused client is received; the others are closed with the
    // socket.
    for _ in 0..3 {
        fd_passing::send(&process, &[IoSlice::new(b"x")], &[fd.as_fd()]).unwrap();
    }
    (process, receiver)
}

fn is_answered(process: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(process, PollFlags::IN)];
    poll(&mut fds, Some(&Timespec::default())).unwrap() > 0
}

#[test]
fn processes_that_are_turned_away_use_up_their_common_account_only() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("attach.sock");
    let listener = socket();
    // The kernel does not refuse the descriptors: they arrive before the daemon sets SO_PASSRIGHTS.
    bind(&listener, &SocketAddrUnix::new(&path).unwrap()).unwrap();
    listen(&listener, PROCESSES as i32).unwrap();
    let (processes, receivers): (Vec<_>, Vec<_>) = (0..PROCESSES).map(|_| process(&path)).unzip();
    let answered = || {
        processes
            .iter()
            .filter(|process| is_answered(process))
            .count()
    };

    let mut attach = AttachConfig::new(listener);
    attach.allowed_uids.clear();
    let mut config = daemon_config(&[]);
    config.attach = Some(attach);
    let daemon = Daemon::start(config).unwrap();
    eventually("as many turned away as may be", || answered() >= LIMIT);
    // Each is a turn of the control thread, in which it would accept more.
    for _ in 0..PROCESSES {
        daemon.reload(Reload::default()).unwrap();
    }
    assert_eq!(answered(), LIMIT);
    drop(receivers);
    eventually("all turned away", || answered() == PROCESSES);
    daemon.shutdown();
}

/// More than may wait behind those of the same user that are stuck.
const ATTACHED: usize = 48;

/// The next answer and its descriptors; `None`: the daemon has ended the connection.
fn answer(process: &OwnedFd) -> Option<(Status, Vec<PeerFd>)> {
    eventually("an answer", || is_answered(process));
    let (mut bytes, mut fds) = ([0; 100], Vec::new());
    match fd_passing::recv(process, &mut bytes, &mut fds) {
        Ok(received) if received.bytes > 0 => {
            let answer = decode_answer(&bytes[..received.bytes]).unwrap();
            Some((answer.status, fds))
        }
        Ok(_) => None,
        Err(error) if error.kind() == ErrorKind::ConnectionReset => None,
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn attached_process_that_sends_descriptors_loses_its_connection() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("attach.sock");
    let listener = socket();
    // The kernel does not refuse the descriptors: the processes connect before the daemon asks it
    // to.
    bind(&listener, &SocketAddrUnix::new(&path).unwrap()).unwrap();
    listen(&listener, ATTACHED as i32 + 1).unwrap();
    let attach = encode_request(&Request::Attach(AttachRequest::default())).unwrap();
    let resolve = encode_request(&Request::Resolve("db".parse().unwrap())).unwrap();
    let attached = || {
        let process = socket();
        connect(&process, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        fd_passing::send(&process, &[IoSlice::new(&attach)], &[]).unwrap();
        process
    };
    let processes: Vec<_> = (0..ATTACHED).map(|_| attached()).collect();
    let honest = attached();

    let mut config = daemon_config(&[]);
    config.attach = Some(AttachConfig::new(listener));
    let daemon = Daemon::start(config).unwrap();
    // Their devices, which would otherwise end with the descriptor.
    let devices = processes.iter().chain([&honest]).map(|process| {
        let (status, fds) = answer(process).unwrap();
        assert_eq!(status, Status::Ok);
        fds
    });
    let devices: Vec<_> = devices.collect();
    fd_passing::send(&honest, &[IoSlice::new(&resolve)], &[]).unwrap();
    assert_eq!(answer(&honest).unwrap().0, Status::UnknownName);

    let receivers = processes.iter().map(|process| {
        let (fd, receiver) = lingering_socket();
        fd_passing::send(process, &[IoSlice::new(&resolve)], &[fd.as_fd()]).unwrap();
        // If the daemon has closed its own already, this close is the one that waits.
        std::thread::spawn(move || drop(fd));
        assert!(answer(process).is_none(), "the process stays attached");
        receiver
    });
    let receivers: Vec<_> = receivers.collect();
    eventually("all but one gone", || daemon.stats().attached == 1);

    // The account is the user's: nothing more is received from its other process either, once the
    // reaper has found the closes to be stuck.
    eventually("the end of the other process", || {
        fd_passing::send(&honest, &[IoSlice::new(&resolve)], &[]).is_err()
            || answer(&honest).is_none()
    });
    drop((receivers, devices));
    daemon.shutdown();
}
