//! Datagram sockets that wait: time-outs, pollers, several threads.

use std::io::ErrorKind;
use std::thread;
use std::time::Instant;

use super::*;
use crate::common;
use zerosock::vsock::{Poller, Readiness, Ready, Wait};

#[test]
fn a_receive_times_out() {
    let hub = Hub::new();
    let process = hub.process();
    for socket in [at_host(&hub, PORT), at(&process, PORT)] {
        socket
            .set_read_timeout(Some(Duration::from_millis(30)))
            .unwrap();
        let began = Instant::now();
        let error = socket.recv_from(&mut [0]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
        assert!(began.elapsed() >= Duration::from_millis(30));
        socket.set_nonblocking(true).unwrap();
        assert_eq!(
            socket.recv_from(&mut [0]).unwrap_err().kind(),
            ErrorKind::WouldBlock
        );
        assert_eq!(
            socket
                .set_read_timeout(Some(Duration::ZERO))
                .unwrap_err()
                .kind(),
            ErrorKind::InvalidInput
        );
    }
}

#[test]
fn a_sleeping_receiver_is_woken_with_every_kind_of_wait() {
    for wait in [Wait::Sleep, Wait::ADAPTIVE, Wait::Spin] {
        let hub = Hub::with(|builder| builder.wait(wait));
        let process = hub.process_with(|builder| builder.wait(wait));
        let (ours, theirs) = (at_host(&hub, PORT), at(&process, PORT));
        let to = theirs.local_addr();
        thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..500 {
                    let (bytes, from) = recv(&theirs);
                    theirs.send_to(&bytes, from).unwrap();
                }
            });
            for number in 0..500u32 {
                ours.send_to(&number.to_le_bytes(), to).unwrap();
                assert_eq!(recv(&ours).0, number.to_le_bytes());
            }
        });
    }
}

#[test]
fn several_threads_share_a_socket() {
    let hub = Hub::new();
    let process = hub.process();
    let (ours, theirs) = (at_host(&hub, PORT), at(&process, PORT));
    let to = ours.local_addr();
    const EACH: usize = 400;
    thread::scope(|scope| {
        let readers = [(); 3].map(|()| {
            scope.spawn(|| {
                let mut got = 0;
                loop {
                    match recv(&ours).0.as_slice() {
                        b"end" => return got,
                        _ => got += 1,
                    }
                }
            })
        });
        let writers = [(); 2].map(|()| {
            scope.spawn(|| {
                (0..EACH).for_each(|_| {
                    theirs.send_to(&[0; 500], to).unwrap();
                })
            })
        });
        for writer in writers {
            writer.join().unwrap();
        }
        for _ in 0..3 {
            theirs.send_to(b"end", to).unwrap();
        }
        let all: usize = readers
            .into_iter()
            .map(|reader| reader.join().unwrap())
            .sum();
        assert_eq!(all, 2 * EACH);
    });
}

#[test]
fn a_poller_reports_readable_and_writable_sockets() {
    let hub = Hub::new();
    let process = hub.process();
    let ours = at_host(&hub, PORT);
    ours.set_receive_buffer(40_000);
    let (one, other) = (at(&process, PORT), at(&process, Port::ANY));
    other.connect(ours.local_addr());
    let mut poller = Poller::new(Wait::Sleep);
    poller.add_datagram(&one, 1, Readiness::READABLE);
    assert!(poller.wait(Some(Duration::ZERO)).unwrap().is_empty());
    ours.send_to(b"x", one.local_addr()).unwrap();
    let readable = Ready {
        key: 1,
        readiness: Readiness::READABLE,
    };
    assert_eq!(poller.wait(Some(PATIENCE)).unwrap(), [readable]);
    recv(&one);
    // It may send until STOP, and again after START.
    poller.add_datagram(&other, 2, Readiness::WRITABLE);
    let writable = Ready {
        key: 2,
        readiness: Readiness::WRITABLE,
    };
    assert_eq!(poller.wait(Some(PATIENCE)).unwrap(), [writable]);
    other.set_nonblocking(true).unwrap();
    let give_up = common::deadline();
    while !(other.send(&[0; 1000]).is_err() && other.stats().stopped > 0) {
        assert!(Instant::now() < give_up);
        process.drive().unwrap();
    }
    assert!(poller.wait(Some(Duration::ZERO)).unwrap().is_empty());
    ours.set_nonblocking(true).unwrap();
    while ours.recv_from(&mut [0; 1000]).is_ok() {}
    assert_eq!(poller.wait(Some(PATIENCE)).unwrap(), [writable]);
}

#[test]
fn calls_on_a_socket_of_an_ended_endpoint_fail_with_endpoint_over() {
    let mut serve = Serve::new(1);
    let process = serve.process();
    let theirs = at(&process, PORT);
    thread::scope(|scope| {
        let waiting = scope.spawn(|| theirs.recv_from(&mut [0]).unwrap_err());
        serve.daemon.take().unwrap().shutdown();
        assert_eq!(waiting.join().unwrap().kind(), ErrorKind::ConnectionAborted);
    });
}

/// A UDP socket's sender would not sleep: its kernel drops what exceeds the receiver's buffer.
#[test]
fn sender_of_long_datagrams_sleeps_at_most_once_for_seven() {
    const COUNT: u64 = 700;
    const LEN: usize = 32 << 10;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("attach.sock");
    let host = Host::builder().attach(&path).start().unwrap();
    let ours = at_host(&host, PORT);
    let to = ours.local_addr();
    thread::scope(|scope| {
        let sending = scope.spawn(|| {
            let process = Endpoint::attach(&path).unwrap();
            let theirs = at(&process, Port::ANY);
            let before = process.stats().sleeps;
            for _ in 0..COUNT {
                theirs.send_to(&[7; LEN], to).unwrap();
            }
            let sleeps = process.stats().sleeps - before;
            (sleeps, process, theirs)
        });
        for _ in 0..COUNT {
            assert_eq!(recv(&ours).0.len(), LEN);
        }
        let (sleeps, ..) = sending.join().unwrap();
        assert!(sleeps <= COUNT / 7 + 1, "{sleeps} sleeps");
    });
}
