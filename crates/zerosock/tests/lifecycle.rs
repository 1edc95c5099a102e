//! Guests that connect and disconnect, daemons that die, queues that stop, memory that changes.

use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::common::driver::{
    Directions, Driver, DriverEvent, Port, RecvError, SendError, StreamId, StreamState,
};
use crate::common::raw::{RawGuest, TX};
use crate::common::{
    self, TestDaemon, assert_bytes, bytes, connect_guest, deadline, eventually_with, host,
    host_listener, hybrid,
};
use zerosock_proto::wire::vsock::Op;

const PORT: Port = Port::new(1000);

/// A guest's connection to a host program that sends back all it gets.
struct Echo {
    stream: StreamId,
    seed: u64,
}

impl Echo {
    fn new(guest: &mut Driver, uds_path: &std::path::Path, port: u32) -> Echo {
        let mut path = uds_path.as_os_str().to_owned();
        path.push(format!("_{port}"));
        let _ = std::fs::remove_file(PathBuf::from(path));
        let listener = host_listener(uds_path, port);
        let stream = guest.wait_connect(host(port), deadline()).unwrap();
        let (program, _) = listener.accept().unwrap();
        thread::spawn(move || {
            let (mut from, mut to) = (program.try_clone().unwrap(), program);
            // Ends with the connection.
            let _ = std::io::copy(&mut from, &mut to);
        });
        Echo { stream, seed: 0 }
    }

    /// There and back again.
    #[track_caller]
    fn beat(&mut self, guest: &mut Driver) {
        self.seed += 1;
        let want = bytes(self.seed, 20_000);
        guest.wait_send(self.stream, &want, deadline()).unwrap();
        let mut got = vec![0u8; want.len()];
        guest
            .wait_recv_exact(self.stream, &mut got, deadline())
            .unwrap();
        assert_bytes(&got, &want);
    }
}

/// Reads to the end, in whatever way it comes.
fn until_closed(mut program: UnixStream) {
    program.set_read_timeout(Some(common::PATIENCE)).unwrap();
    let mut rest = Vec::new();
    if let Err(error) = program.read_to_end(&mut rest) {
        assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset, "{error}");
    }
}

#[test]
fn a_guest_that_vanishes_closes_its_host_sockets() {
    let daemon = TestDaemon::new();
    let listener = daemon.host_listener(2000);
    let mut guest = RawGuest::attach(&daemon.vms[0].socket);
    guest.connect(5000, 2000);
    let (program, _) = listener.accept().unwrap();
    for _ in 0..30 {
        let header = guest.header(5000, 2000, Op::Rw);
        guest.send(header, &[7u8; 4000]);
    }
    // No farewell: the sockets close as those of a killed process do.
    drop(guest);
    until_closed(program);
    // The next guest finds a device as good as new.
    let mut guest = daemon.guest();
    Echo::new(&mut guest, &daemon.uds_path(), 2001).beat(&mut guest);
}

#[test]
fn a_guest_that_leaves_while_the_host_sends_closes_its_host_sockets() {
    let daemon = TestDaemon::new();
    let mut guest = daemon.guest();
    guest.listen(PORT, 8).unwrap();
    let uds_path = daemon.uds_path();
    let writer = thread::spawn(move || {
        let mut program = connect_guest(&uds_path, PORT.get()).unwrap();
        let give_up = deadline();
        while program.write_all(&[1u8; 10_000]).is_ok() {
            assert!(Instant::now() < give_up, "the device goes on reading");
        }
    });
    let stream = guest.wait_accept(PORT, deadline()).unwrap();
    let mut some = [0u8; 100_000];
    guest
        .wait_recv_exact(stream, &mut some, deadline())
        .unwrap();
    drop(guest);
    writer.join().unwrap();
    let mut guest = daemon.guest();
    Echo::new(&mut guest, &daemon.uds_path(), 2001).beat(&mut guest);
}

#[test]
fn guests_come_and_go_many_times() {
    let daemon = TestDaemon::new();
    for _ in 0..30 {
        let mut guest = daemon.guest();
        Echo::new(&mut guest, &daemon.uds_path(), 2001).beat(&mut guest);
    }
}

/// After the daemon came back at the same paths: reset seen, listeners stay, all works.
fn after_restart(guest: &mut Driver, old: StreamId, uds_path: &std::path::Path) {
    eventually_with(guest, "the hang-up", |guest| !guest.is_attached());
    let give_up = deadline();
    while let Err(error) = guest.reconnect() {
        assert!(Instant::now() < give_up, "{error}");
        thread::sleep(Duration::from_millis(5));
    }
    loop {
        match guest.poll(Some(give_up)).unwrap() {
            Some(DriverEvent::TransportReset) => break,
            Some(_) => {}
            None => panic!("no TRANSPORT_RESET"),
        }
    }
    assert_eq!(guest.stats().transport_resets, 1);
    // Its connection is gone, whichever way.
    assert_ne!(guest.state(old), Some(StreamState::Connected));
    // Both ways, more than once around the rings.
    let mut echo = Echo::new(guest, uds_path, 3000);
    for _ in 0..50 {
        echo.beat(guest);
    }
    let uds_path = uds_path.to_owned();
    let program = thread::spawn(move || {
        let mut program = connect_guest(&uds_path, PORT.get()).unwrap();
        program.write_all(b"the listener stayed").unwrap();
        program.shutdown(Shutdown::Write).unwrap();
    });
    let stream = guest.wait_accept(PORT, deadline()).unwrap();
    let mut got = Vec::new();
    guest
        .wait_recv_to_end(stream, &mut got, deadline())
        .unwrap();
    assert_eq!(got, b"the listener stayed");
    program.join().unwrap();
}

#[test]
fn a_daemon_that_restarts_resets_the_transport() {
    let mut daemon = TestDaemon::new();
    let mut guest = daemon.guest();
    guest.listen(PORT, 8).unwrap();
    let mut echo = Echo::new(&mut guest, &daemon.uds_path(), 2000);
    for _ in 0..20 {
        echo.beat(&mut guest);
    }
    daemon.stop();
    daemon.start();
    after_restart(&mut guest, echo.stream, &daemon.uds_path());
}

/// Not a test by itself: the daemon that the next test kills, in a process of its own.
#[test]
#[ignore = "a part of a_daemon_that_is_killed_and_restarted_resets_the_transport"]
fn daemon_process() {
    let Some(dir) = std::env::var_os("ZEROSOCK_TEST_CHILD").map(PathBuf::from) else {
        return;
    };
    let vm = common::Vm {
        cid: 3,
        socket: dir.join("vm.sock"),
        uds_path: dir.join("vm.vsock"),
    };
    let daemon = common::start_daemon(&[vm], |_| {});
    println!("\nready");
    // Until killed; or until the test that started us is gone.
    let mut byte = [0u8; 1];
    let _ = std::io::stdin().read(&mut byte);
    daemon.shutdown();
}

#[test]
fn a_daemon_that_is_killed_and_restarted_resets_the_transport() {
    let dir = tempfile::tempdir().unwrap();
    let (socket, uds_path) = (dir.path().join("vm.sock"), dir.path().join("vm.vsock"));
    let start = || {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([
                "lifecycle::daemon_process",
                "--exact",
                "--ignored",
                "--nocapture",
            ])
            .env("ZEROSOCK_TEST_CHILD", dir.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        common::wait_for_line(&mut child, "ready");
        child
    };
    let mut child = start();
    let mut guest = Driver::attach(crate::common::driver::DriverConfig::new(&socket)).unwrap();
    guest.listen(PORT, 8).unwrap();
    let mut echo = Echo::new(&mut guest, &uds_path, 2000);
    for _ in 0..20 {
        echo.beat(&mut guest);
    }
    // In the middle of things.
    for _ in 0..10 {
        let _ = guest.send(echo.stream, &[3u8; 20_000]);
    }
    guest.flush();
    child.kill().unwrap();
    child.wait().unwrap();
    let mut child = start();
    after_restart(&mut guest, echo.stream, &uds_path);
    child.kill().unwrap();
    child.wait().unwrap();
}

/// Streams both ways through a program that sends everything back, and calls `disturb` now and
/// then.
fn disturbed(mut disturb: impl FnMut(&mut Driver, &TestDaemon)) {
    const LEN: usize = 4 << 20;
    let daemon = TestDaemon::new();
    let mut guest = daemon.guest();
    let echo = Echo::new(&mut guest, &daemon.uds_path(), 2000);
    let want = bytes(9, LEN);
    let (mut sent, mut got, mut ended) = (0, Vec::new(), false);
    let mut part = [0u8; 30_000];
    let mut mark = 0;
    eventually_with(&mut guest, "everything back", |guest| {
        while sent < want.len() {
            let end = want.len().min(sent + 30_000);
            match guest.send(echo.stream, &want[sent..end]) {
                Ok(more) => sent += more,
                Err(SendError::WouldBlock) => break,
                Err(error) => panic!("after {sent} bytes: {error}"),
            }
            if sent == want.len() {
                guest.shutdown(echo.stream, Directions::SEND);
            }
        }
        guest.flush();
        while !ended {
            match guest.recv(echo.stream, &mut part) {
                Ok(0) => ended = true,
                Ok(more) => got.extend_from_slice(&part[..more]),
                Err(RecvError::WouldBlock) => break,
                Err(error) => panic!("after {} bytes: {error}", got.len()),
            }
        }
        if got.len() >= mark {
            mark = got.len() + LEN / 20;
            disturb(guest, &daemon);
        }
        ended
    });
    assert_bytes(&got, &want);
}

#[test]
fn queues_stop_and_go_on_in_the_middle_of_traffic() {
    disturbed(|guest, daemon| {
        let bases = guest.suspend().unwrap();
        // Nothing is in the device's hands: it goes on where the used index is.
        assert_eq!(bases, guest.used_indices());
        let before = guest.used_indices();
        if daemon.stats().is_some() {
            // The device turns away what comes now: it has had a turn, with bytes to be had.
            let mut program = hybrid(&daemon.uds_path());
            program.write_all(b"no CONNECT\n").unwrap();
            let end = program.read(&mut [0]).map_err(|error| error.kind());
            assert!(matches!(end, Ok(0) | Err(ErrorKind::ConnectionReset)));
        }
        assert_eq!(guest.used_indices(), before, "a stopped queue moved");
        guest.resume(&bases).unwrap();
    });
}

#[test]
fn the_memory_table_comes_again_in_the_middle_of_traffic() {
    disturbed(|guest, _| guest.send_memory_table().unwrap());
}

#[test]
fn an_incomplete_control_message_does_not_stop_the_data_path() {
    let daemon = TestDaemon::new();
    let mut guest = daemon.guest_of(0, |config| {
        // It leaves without an answer.
        config.control_timeout = Duration::from_millis(100);
    });
    let mut echo = Echo::new(&mut guest, &daemon.uds_path(), 2000);
    // GET_FEATURES, cut in its flags.
    guest
        .frontend()
        .unwrap()
        .send_raw(&[1, 0, 0, 0, 1, 0], &[])
        .unwrap();
    for _ in 0..20 {
        echo.beat(&mut guest);
    }
}

#[test]
fn memory_that_vanishes_affects_only_its_vm() {
    let daemon = TestDaemon::with(2, |_| {});
    if !daemon.is_ours("memory_that_vanishes_affects_only_its_vm") {
        return;
    }
    let mut other = daemon.guest_of(1, |_| {});
    let mut echo = Echo::new(&mut other, &daemon.vms[1].uds_path, 2000);
    let listener = daemon.host_listener(2000);
    let mut guest = RawGuest::attach_with(&daemon.vms[0].socket, false);
    guest.connect(5000, 2000);
    let (program, _) = listener.accept().unwrap();
    echo.beat(&mut other);
    rustix::fs::ftruncate(&guest.fd, 0).unwrap();
    guest.kick(TX);
    until_closed(program);
    for _ in 0..10 {
        echo.beat(&mut other);
    }
    common::eventually("the loss counted", || {
        daemon.stats().is_some_and(|stats| stats.devices_lost > 0)
    });
    // The VM may come again.
    drop(guest);
    let mut guest = daemon.guest();
    Echo::new(&mut guest, &daemon.uds_path(), 2002).beat(&mut guest);
}

/// A guest that sends and powers off: its host program is slow, and gets every byte.
#[test]
fn what_a_guest_sent_before_it_went_still_arrives() {
    const LEN: usize = 400_000;
    let daemon = TestDaemon::new();
    let listener = daemon.host_listener(2000);
    let mut guest = daemon.guest();
    let stream = guest.wait_connect(common::host(2000), deadline()).unwrap();
    let (mut program, _) = listener.accept().unwrap();
    // More than the socket takes: the rest waits in the device.
    let all = common::bytes(9, LEN);
    guest.wait_send(stream, &all, deadline()).unwrap();
    common::eventually_with(&mut guest, "all taken", |_| {
        daemon
            .stats()
            .is_none_or(|stats| stats.rx_bytes == LEN as u64)
    });
    drop(guest);
    // The next guest is let in when the device has seen the last one off.
    let mut guest = daemon.guest();
    let mut got = Vec::new();
    program.read_to_end(&mut got).unwrap();
    common::assert_bytes(&got, &all);
    Echo::new(&mut guest, &daemon.uds_path(), 2001).beat(&mut guest);
}
