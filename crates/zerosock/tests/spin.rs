//! A worker that spins before it sleeps: guests need not kick it while work arrives often, it
//! sleeps when none arrives, and it misses nothing in either state. Shown by counters, not by the
//! clock.

mod common;

use std::io::{Read, Write};
use std::thread;
use std::time::Duration;

use crate::common::driver::{Driver, DriverConfig};
use common::{TestDaemon, Vm, deadline, eventually, host, host_listener, start_daemon};
use zerosock::daemon::{DaemonConfig, Reload};

const TRIPS: u64 = 400;

/// Messages from a guest to a program and back, one after the other; kicks that it took.
fn kicks(tune: fn(&mut DaemonConfig)) -> u64 {
    let daemon = TestDaemon::with(1, tune);
    let listener = daemon.host_listener(2000);
    let mut guest = daemon.guest();
    let stream = guest.wait_connect(host(2000), deadline()).unwrap();
    let (mut program, _) = listener.accept().unwrap();
    program.set_read_timeout(Some(common::PATIENCE)).unwrap();
    let echo = thread::spawn(move || {
        let mut message = [0; 64];
        for _ in 0..TRIPS {
            program.read_exact(&mut message).unwrap();
            program.write_all(&message).unwrap();
        }
    });
    let before = daemon.stats().unwrap().kicks;
    for n in 0..TRIPS {
        let message = [n as u8; 64];
        guest.wait_send(stream, &message, deadline()).unwrap();
        let mut back = [0; 64];
        guest
            .wait_recv_exact(stream, &mut back, deadline())
            .unwrap();
        assert_eq!(message, back);
    }
    echo.join().unwrap();
    daemon.stats().unwrap().kicks - before
}

#[test]
fn a_worker_that_looks_for_work_needs_few_kicks() {
    let asleep = kicks(|_| {});
    // Longer than any pause on a machine that has something to do.
    let looking = kicks(|config| config.spin = Duration::from_millis(500));
    assert!(asleep >= TRIPS / 2, "{asleep} kicks without");
    assert!(looking <= TRIPS / 20, "{looking} kicks, {asleep} without");
}

/// With a time that is shorter than most pauses, and with one between: nothing is lost between
/// looking and sleeping.
#[test]
fn nothing_is_missed_between_looking_and_sleeping() {
    assert!(kicks(|config| config.spin = Duration::from_nanos(1)) > 0);
    kicks(|config| config.spin = Duration::from_micros(20));
    kicks(|config| config.spin = Duration::from_micros(200));
}

/// The table of endpoints changes while a worker looks for work and the driver was not asked for
/// kicks: that makes no device active, and the worker may not sleep on it.
#[test]
fn a_message_that_concerns_no_device_does_not_put_a_worker_to_sleep_unkicked() {
    // Longer than any pause on a machine that has something to do.
    let dir = tempfile::tempdir().unwrap();
    let vm = Vm {
        cid: 3,
        socket: dir.path().join("vm.sock"),
        uds_path: dir.path().join("vm.vsock"),
    };
    let listener = host_listener(&vm.uds_path, 2000);
    let config = DriverConfig::new(&vm.socket);
    let daemon = start_daemon(&[vm], |config| config.spin = Duration::from_millis(500));
    let mut guest = Driver::attach(config).unwrap();
    let stream = guest.wait_connect(host(2000), deadline()).unwrap();
    let (mut program, _) = listener.accept().unwrap();
    program.set_read_timeout(Some(common::PATIENCE)).unwrap();
    for round in 0..40 {
        guest.wait_send(stream, b"x", deadline()).unwrap();
        let got = program.read_exact(&mut [0]);
        assert!(
            got.is_ok(),
            "nobody saw the packet of round {round}: {got:?}"
        );
        if round >= 20 {
            daemon.reload(Reload::default()).unwrap();
        }
    }
    daemon.shutdown();
}

/// CPU time of this process's worker threads, in nanoseconds.
fn worked() -> u64 {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let of = |task: std::io::Result<std::fs::DirEntry>| -> Option<u64> {
        let path = task.ok()?.path();
        let name = std::fs::read_to_string(path.join("comm")).ok()?;
        if !name.starts_with("zerosock-") {
            return None;
        }
        let text = std::fs::read_to_string(path.join("schedstat")).ok()?;
        text.split_whitespace().next()?.parse().ok()
    };
    tasks.filter_map(of).sum()
}

#[test]
fn a_worker_without_work_sleeps() {
    let daemon = TestDaemon::with(1, |config| config.spin = Duration::from_millis(20));
    let listener = daemon.host_listener(2000);
    let mut guest = daemon.guest();
    let stream = guest.wait_connect(host(2000), deadline()).unwrap();
    let (mut program, _) = listener.accept().unwrap();
    for _ in 0..100 {
        guest.wait_send(stream, b"x", deadline()).unwrap();
        program.read_exact(&mut [0]).unwrap();
    }
    // Other tests have workers too, and these stop as well.
    let mut last = worked();
    eventually("a worker that does nothing for a time", || {
        thread::sleep(Duration::from_millis(50));
        let before = std::mem::replace(&mut last, worked());
        last.saturating_sub(before) < 5_000_000
    });
}
