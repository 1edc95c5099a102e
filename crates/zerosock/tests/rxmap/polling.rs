//! Waiting for data of a map: by polling, by the low-water mark, and until the end.

use std::collections::BTreeMap;
use std::io::{ErrorKind, Write};
use std::thread;
use std::time::{Duration, Instant};

use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, TargetArch};
use zerosock::vsock::rxmap::{CLOSED, DATA, EMPTY, PAGE, Protection, RxMapConfig};
use zerosock::vsock::{PagedRxMap, RxMap, Wait};

use super::{pair, send_packets, wait_for_word};
use crate::common::{PATIENCE, bytes};

#[test]
fn polling_makes_no_system_call_while_no_data_arrives() {
    const LOOKS: usize = 100_000;
    // The system calls by which a backend could query, notify, or wait.
    let calls = [
        libc::SYS_read,
        libc::SYS_write,
        libc::SYS_readv,
        libc::SYS_writev,
        libc::SYS_poll,
        libc::SYS_ppoll,
        libc::SYS_epoll_wait,
        libc::SYS_epoll_pwait,
        libc::SYS_epoll_pwait2,
        libc::SYS_epoll_ctl,
        libc::SYS_recvmsg,
        libc::SYS_recvfrom,
        libc::SYS_sendmsg,
        libc::SYS_sendto,
        libc::SYS_ioctl,
        libc::SYS_fcntl,
        libc::SYS_futex,
        libc::SYS_nanosleep,
        libc::SYS_clock_nanosleep,
        libc::SYS_sched_yield,
        libc::SYS_mmap,
        libc::SYS_madvise,
    ];
    let rules: BTreeMap<i64, Vec<_>> = calls.into_iter().map(|call| (call, vec![])).collect();
    let filter = SeccompFilter::new(
        rules,
        SeccompAction::Allow,
        SeccompAction::KillProcess,
        TargetArch::try_from(std::env::consts::ARCH).unwrap(),
    );
    let filter: BpfProgram = filter.unwrap().try_into().unwrap();
    // In a child process: the filter ends it at the first call, and cannot be removed.
    const UNDER_FILTER: &str = "ZEROSOCK_TEST_UNDER_FILTER";
    const PROVED: i32 = 7;
    if std::env::var_os(UNDER_FILTER).is_none() {
        let ended = std::process::Command::new(std::env::current_exe().unwrap())
            .arg("polling_makes_no_system_call_while_no_data_arrives")
            .env(UNDER_FILTER, "1")
            .output()
            .unwrap();
        assert_eq!(ended.status.code(), Some(PROVED), "{ended:?}");
        return;
    }
    pair(
        |builder| builder,
        |stream| {
            send_packets(&stream, &[10]);
            wait_for_word(&stream);
        },
        |stream, _| {
            let mut map = RxMap::new(&stream, RxMapConfig::default()).unwrap();
            let mut paged = PagedRxMap::new(&stream, 2 * PAGE, Protection::READ).unwrap();
            map.wait().unwrap();
            assert_eq!(map.fill().unwrap(), 1);
            map.release(0..1).unwrap();
            // Work that is due some time after an arrival is done.
            let until = Instant::now() + Duration::from_millis(50);
            while Instant::now() < until {
                assert_eq!(map.poll_value().unwrap(), EMPTY);
            }
            thread::scope(|scope| {
                scope.spawn(|| {
                    seccompiler::apply_filter(&filter).unwrap();
                    for _ in 0..LOOKS {
                        assert_eq!(map.poll_value().unwrap(), EMPTY);
                        assert_eq!(paged.poll_value().unwrap(), EMPTY);
                    }
                    // Even the exit of a thread is a system call.
                    std::process::exit(PROVED);
                });
            });
        },
    );
}

#[test]
fn polling_reports_data_above_the_low_water_mark() {
    pair(
        |builder| builder,
        |stream| {
            (&stream).write_all(&bytes(1, 10)).unwrap();
            wait_for_word(&stream);
            (&stream).write_all(&bytes(2, 90)).unwrap();
            wait_for_word(&stream);
        },
        |stream, _| {
            let mut map = RxMap::new(&stream, RxMapConfig::default()).unwrap();
            let give_up = Instant::now() + PATIENCE;
            let spin = |map: &mut RxMap<_>| {
                loop {
                    let value = map.poll_value().unwrap();
                    if value != EMPTY {
                        return value;
                    }
                    assert!(Instant::now() < give_up);
                }
            };
            assert_eq!(spin(&mut map), DATA);
            stream.set_low_water(100).unwrap();
            assert_eq!(map.poll_value().unwrap(), EMPTY, "10 bytes are not 100");
            stream
                .set_read_timeout(Some(Duration::from_millis(20)))
                .unwrap();
            let error = std::io::Error::from(map.wait().unwrap_err());
            assert_eq!(error.kind(), ErrorKind::TimedOut);
            stream.set_wait(Wait::Spin);
            (&stream).write_all(b"!").unwrap();
            assert_eq!(spin(&mut map), DATA);
            map.fill().unwrap();
            let got: Vec<u8> = map.packets().flat_map(|packet| packet.to_vec()).collect();
            assert_eq!(got, [bytes(1, 10), bytes(2, 90)].concat());
            (&stream).write_all(b"!").unwrap();
            map.release_all();
            assert_eq!(spin(&mut map), CLOSED);
            assert_eq!(map.fill().unwrap(), 0);
        },
    );
}

#[test]
fn a_reset_is_reported_after_the_received_bytes() {
    pair(
        |builder| builder,
        |stream| {
            send_packets(&stream, &[300]);
            wait_for_word(&stream);
            stream.reset();
        },
        |stream, _| {
            let mut map = PagedRxMap::new(&stream, 2 * PAGE, Protection::READ).unwrap();
            let mut native = RxMap::new(&stream, RxMapConfig::default()).unwrap();
            map.wait().unwrap();
            (&stream).write_all(b"!").unwrap();
            stream.set_low_water(301).unwrap();
            assert_eq!(map.wait().unwrap(), CLOSED);
            assert_eq!(map.fill().unwrap(), 1);
            assert_eq!(map.packets().next().unwrap().1.unwrap(), bytes(0, 300));
            map.release(1..2).unwrap();
            for refused in [map.fill().unwrap_err(), native.fill().unwrap_err()] {
                let error = std::io::Error::from(refused);
                assert_eq!(error.kind(), ErrorKind::ConnectionReset);
            }
            assert_eq!(map.poll_value().unwrap(), CLOSED);
        },
    );
}
