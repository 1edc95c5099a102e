//! Host programs that do not read or do not accept: what they hold is freed after a time limit.

use std::io::Read;
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};

use crate::common::driver::{Driver, SendError, StreamId};
use crate::common::raw::RawGuest;
use crate::common::{self, TestDaemon, assert_bytes, bytes, deadline, eventually_with, host};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use zerosock_proto::wire::vsock::Op;

/// Sends until socket, device and credit are full.
fn fill(guest: &mut Driver, stream: StreamId, bytes: &[u8]) -> usize {
    let mut sent = 0;
    let mut full_since = None;
    loop {
        match guest.send(stream, &bytes[sent..]) {
            Ok(more) => {
                sent += more;
                full_since = None;
            }
            Err(SendError::WouldBlock) => {
                let since = *full_since.get_or_insert_with(Instant::now);
                if since.elapsed() > Duration::from_millis(300) {
                    return sent;
                }
                let soon = Instant::now() + Duration::from_millis(5);
                guest.poll(Some(soon)).unwrap();
            }
            Err(error) => panic!("{error}"),
        }
    }
}

#[test]
fn sockets_that_never_take_the_last_bytes_are_closed_and_others_are_served() {
    let daemon = TestDaemon::with(1, |config| config.linger = Duration::from_millis(200));
    if !daemon.is_ours("sockets_that_never_take_the_last_bytes_are_closed_and_others_are_served") {
        return;
    }
    let mut guest = daemon.guest();
    let listener = daemon.host_listener(2000);
    let want = bytes(4, 4 << 20);
    let mut programs: Vec<(UnixStream, usize)> = Vec::new();
    for _ in 0..3 {
        let stream = guest.wait_connect(host(2000), deadline()).unwrap();
        let (program, _) = listener.accept().unwrap();
        let sent = fill(&mut guest, stream, &want);
        assert!(sent < want.len());
        guest.close(stream);
        programs.push((program, sent));
    }
    eventually_with(&mut guest, "sockets closed", |_| {
        let stats = daemon.stats().unwrap();
        stats.linger_timeouts == 3 && stats.bridges_now == 0
    });
    for (mut program, sent) in programs {
        let mut got = Vec::new();
        program.read_to_end(&mut got).unwrap();
        assert!(got.len() < sent, "there was something to drop");
        assert_bytes(&got, &want[..got.len()]);
    }
    guest.wait_connect(host(2000), deadline()).unwrap();
    listener.accept().unwrap();
}

/// A listener that lets one connection wait.
fn small_listener(daemon: &TestDaemon, port: u32) -> UnixListener {
    let mut path = daemon.uds_path().into_os_string();
    path.push(format!("_{port}"));
    let (kind, flags) = (SocketType::STREAM, SocketFlags::CLOEXEC);
    let socket = rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None).unwrap();
    rustix::net::bind(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
    rustix::net::listen(&socket, 0).unwrap();
    socket.into()
}

#[test]
fn a_full_backlog_costs_few_attempts_and_its_waiters_get_in_when_there_is_room() {
    let daemon = TestDaemon::new();
    if !daemon
        .is_ours("a_full_backlog_costs_few_attempts_and_its_waiters_get_in_when_there_is_room")
    {
        return;
    }
    let mut guest = daemon.guest();
    let listener = small_listener(&daemon, 2000);
    // The first fills the backlog; the others find it full, and time out.
    guest.wait_connect(host(2000), deadline()).unwrap();
    const WAITING: u64 = 200;
    for _ in 0..WAITING {
        guest.connect(host(2000)).unwrap();
    }
    eventually_with(&mut guest, "all over but the first", |_| {
        let stats = daemon.stats().unwrap();
        stats.conns_added > WAITING && stats.bridges_now == 1
    });
    let tried = daemon.stats().unwrap().connect_retries;
    assert!(tried > 0 && tried < WAITING, "{tried} attempts");
    let accepting = std::thread::spawn(move || {
        for _ in 0..2 {
            listener.accept().unwrap();
        }
        listener
    });
    guest.wait_connect(host(2000), deadline()).unwrap();
    accepting.join().unwrap();
}

/// A guest, which waits as long as Linux does by default, gets the daemon's answer about a target that does
/// not answer: the daemon gives up in time before it.
#[test]
fn the_daemon_gives_up_before_the_guest_does() {
    let guest = crate::common::driver::DriverConfig::default().connect_timeout;
    assert_eq!(guest, Duration::from_secs(2));
    let daemon = zerosock::daemon::DaemonConfig::default().connect_timeout;
    assert!(daemon + Duration::from_millis(250) <= guest, "{daemon:?}");
}

/// The queues stop for a pause as for a reset; only RESET_DEVICE tells them apart.
#[test]
fn connections_of_a_stopped_device_end_at_the_limit_or_at_once_with_its_reset() {
    for resets in [false, true] {
        let daemon = match resets {
            false => TestDaemon::with(1, |config| {
                config.vms[0].stopped_timeout = Some(Duration::from_millis(100));
            }),
            true => TestDaemon::new(),
        };
        if !daemon
            .is_ours("connections_of_a_stopped_device_end_at_the_limit_or_at_once_with_its_reset")
        {
            return;
        }
        let listener = daemon.host_listener(2000);
        let mut guest = RawGuest::attach(&daemon.vms[0].socket);
        guest.connect(5000, 2000);
        let (mut program, _) = listener.accept().unwrap();
        program.set_read_timeout(Some(common::PATIENCE)).unwrap();
        for queue in 0..3 {
            guest.frontend.get_vring_base(queue).unwrap();
        }
        if resets {
            guest.frontend.reset_device().unwrap();
        }
        match program.read(&mut [0]) {
            Ok(0) => {}
            Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset),
            Ok(_) => panic!("a byte"),
        }
    }
}

#[test]
fn connections_of_a_device_that_starts_again_before_the_limit_go_on() {
    let daemon = TestDaemon::with(1, |config| {
        config.vms[0].stopped_timeout = Some(2 * common::PATIENCE);
    });
    if !daemon.is_ours("connections_of_a_device_that_starts_again_before_the_limit_go_on") {
        return;
    }
    let listener = daemon.host_listener(2000);
    let mut guest = RawGuest::attach(&daemon.vms[0].socket);
    guest.connect(5000, 2000);
    let (mut program, _) = listener.accept().unwrap();
    program.set_read_timeout(Some(common::PATIENCE)).unwrap();
    let bases = [0, 1, 2].map(|queue| guest.frontend.get_vring_base(queue).unwrap());
    guest.start(&bases).unwrap();
    let header = guest.header(5000, 2000, Op::Rw);
    guest.send(header, b"on");
    let mut got = [0; 2];
    program.read_exact(&mut got).unwrap();
    assert_eq!(&got, b"on");
}
