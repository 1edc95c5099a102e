//! The driver as a backend. The device is the test.

use crate::table::sending::SendingCalls;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use zerosock_proto::Port;
use zerosock_proto::vsock::ConnectError;
use zerosock_proto::wire::vsock::{Op, SocketType};
use zerosock_virtio::poller::Events;

use super::test_device::{SERVER, TestDevice, connect, pair};
use super::{Driver, IDLE_TURNS, StreamId, StreamState};
use crate::table::sockets::BufferPlace;
use crate::table::{
    backend::{Backend, ReadySource},
    calls::ConnectionCalls,
    transfers::{Publish, RecvFault, SendFault},
};

/// A driver with 32 slots each way.
fn small() -> (Driver, TestDevice, StreamId) {
    let (mut driver, mut peer) = pair(|config| config.queue_size = 64);
    let id = connect(&mut driver, &mut peer);
    while driver.next_ready().is_some() {}
    (driver, peer, id)
}

fn disarm_and_clear(driver: &mut Driver) {
    driver.disarm();
    let mut events = Events::default();
    events.wait(driver.fd(), Some(Duration::ZERO)).unwrap();
    driver.handle_events(&events);
}

fn is_notified(driver: &Driver) -> bool {
    let fd = driver.fd();
    let mut fds = [PollFd::new(&fd, PollFlags::IN)];
    let now = rustix::event::Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    poll(&mut fds, Some(&now)).unwrap() > 0
}

#[test]
fn packets_beyond_three_quarters_wait_in_the_ring_and_let_the_driver_sleep() {
    let (mut driver, mut peer, id) = small();
    for _ in 0..30 {
        peer.send(Op::Rw, b"x");
    }
    assert!(driver.pending());
    Backend::drive(&mut driver).unwrap();
    assert_eq!(driver.unread(id), 24);
    assert!(!driver.pending(), "no packet may be received");
    assert!(!Backend::arm(&mut driver), "the caller may sleep");
    assert!(
        Backend::next_timeout(&driver).is_some(),
        "the hold time is due later"
    );
    // A read on another thread makes room: the sleeper must wake, since the device does not notify
    // again.
    driver.watch.clear().unwrap();
    assert!(!is_notified(&driver));
    let mut out = [0; 4];
    assert_eq!(driver.read(id, &mut out, false), Ok(4));
    Backend::flush_after_read(&mut driver);
    assert!(is_notified(&driver));
    disarm_and_clear(&mut driver);
    assert!(!is_notified(&driver));
    assert!(driver.pending());
    Backend::drive(&mut driver).unwrap();
    assert_eq!(driver.unread(id), 24);
}

#[test]
fn a_reset_and_a_connection_pass_a_reader_that_never_reads() {
    let (mut driver, mut peer, id) = small();
    Backend::listen(&mut driver, Port::new(7), 4, SocketType::Stream).unwrap();
    for _ in 0..30 {
        peer.send(Op::Rw, b"x");
    }
    let stuck = peer.header;
    peer.header.dst.port = Port::new(7);
    peer.header.src.port = Port::new(9999);
    peer.send(Op::Request, &[]);
    peer.header = stuck;
    peer.send(Op::Rst, &[]);
    let give_up = Instant::now() + Duration::from_secs(60);
    while driver.state(id) != Some(StreamState::Reset) {
        assert!(Instant::now() < give_up);
        Backend::drive(&mut driver).unwrap();
    }
    assert!(driver.is_acceptable(Port::new(7)));
    assert!(Backend::accept(&mut driver, Port::new(7)).is_some());
    let mut out = [0; 64];
    assert_eq!(driver.read(id, &mut out, false), Ok(30), "what came before");
    assert_eq!(driver.read(id, &mut out, false), Err(RecvFault::Reset));
}

#[test]
fn loans_leave_slots_for_others_and_continue_as_copies() {
    let (mut driver, mut peer, id) = small();
    let other = connect(&mut driver, &mut peer);
    let loans: Vec<_> = (0..6)
        .map(|_| SendingCalls::loan(&mut driver, id, 8).unwrap())
        .collect();
    let in_place = loans.iter().filter(|loan| loan.place.is_some()).count();
    assert_eq!(in_place, 4, "an eighth of 32");
    assert_eq!(driver.write(other, b"passes", Publish::Later), Ok(6));
    for (n, loan) in (0u8..).zip(&loans) {
        assert_eq!(loan.len, 8);
        let bytes = [n; 8];
        match &loan.place {
            Some(BufferPlace::InPlace { memory, pieces, .. }) => {
                memory.write(pieces, 0, &bytes);
                driver.send_loan(loan.index, 7, None).unwrap();
            }
            _ => {
                driver.send_loan(loan.index, 7, Some(&bytes)).unwrap();
            }
        }
        assert_eq!(
            driver.send_loan(loan.index, 7, None),
            Err(SendFault::Unknown)
        );
    }
    Backend::flush(&mut driver);
    assert_eq!(peer.take().unwrap().1, b"passes");
    for n in 0..6 {
        assert_eq!(peer.take().unwrap().1, [n; 7]);
    }
    let stats = Backend::stats(&driver);
    assert_eq!(
        (stats.sent, stats.sent_in_place, stats.copied_in),
        (48, 28, 20)
    );
    // A loan dropped unsent returns its slot, its lease table entry and its credit.
    for _ in 0..1000 {
        let loan = SendingCalls::loan(&mut driver, id, 8).unwrap();
        assert!(loan.place.is_some());
        driver.handle_dropped(loan.index);
    }
}

#[test]
fn a_quarter_of_the_slots_is_never_out_on_loan() {
    let (mut driver, mut peer, first) = small();
    let mut ids = vec![first];
    for _ in 0..7 {
        ids.push(connect(&mut driver, &mut peer));
    }
    let mut in_place = 0;
    for id in &ids {
        for _ in 0..4 {
            in_place += u32::from(
                SendingCalls::loan(&mut driver, *id, 8)
                    .unwrap()
                    .place
                    .is_some(),
            );
        }
    }
    assert_eq!(in_place, 24);
    assert_eq!(driver.write(first, b"still", Publish::Later), Ok(5));
}

#[test]
fn a_device_that_hangs_up_resets_all_and_ends_the_endpoint() {
    let (mut driver, mut peer, id) = small();
    peer.send(Op::Rw, b"last");
    Backend::drive(&mut driver).unwrap();
    let loan = SendingCalls::loan(&mut driver, id, 8).unwrap();
    assert_eq!(driver.next_ready(), Some(ReadySource::Conn(id)));
    assert!(!Backend::arm(&mut driver));
    driver.watch.clear().unwrap();
    peer.socket = None;
    assert!(is_notified(&driver));
    disarm_and_clear(&mut driver);
    assert!(!driver.is_attached());
    assert_eq!(driver.next_ready(), Some(ReadySource::Conn(id)));
    assert_eq!(driver.state(id), Some(StreamState::Reset));
    let mut out = [0; 8];
    assert_eq!(driver.read(id, &mut out, false), Ok(4));
    assert_eq!(driver.read(id, &mut out, false), Err(RecvFault::Reset));
    assert_eq!(
        driver.write(id, b"x", Publish::Later),
        Err(SendFault::Reset)
    );
    let sent = driver.send_loan(loan.index, 8, None);
    assert_eq!(sent, Err(SendFault::Reset));
    let connect = Backend::connect(&mut driver, Port::ANY, SERVER, SocketType::Stream);
    assert_eq!(connect, Err(ConnectError::Unreachable));
    assert!(!driver.pending());
    assert!(!is_notified(&driver));
    assert!(Backend::arm(&mut driver), "the caller must not sleep");
    assert!(Backend::drive(&mut driver).is_err());
}

#[test]
fn a_spinning_caller_notices_a_hang_up() {
    let (mut driver, mut peer, id) = small();
    peer.socket = None;
    assert!((0..=IDLE_TURNS).any(|_| Backend::drive(&mut driver).is_err()));
    assert_eq!(driver.state(id), Some(StreamState::Reset));
}

#[test]
fn a_wake_up_is_reported_until_it_is_cleared() {
    let (mut driver, _peer, _) = small();
    let waker = driver.watch.waker().clone();
    assert!(!Backend::arm(&mut driver));
    driver.watch.clear().unwrap();
    assert!(!is_notified(&driver));
    for _ in 0..2 {
        rustix::io::write(&waker, &1u64.to_ne_bytes()).unwrap();
        assert!(is_notified(&driver));
        disarm_and_clear(&mut driver);
        assert!(!is_notified(&driver));
        assert!(!Backend::arm(&mut driver));
    }
}

#[test]
fn a_published_write_publishes_the_slots_that_were_returned_before() {
    let (mut driver, mut peer, id) = small();
    peer.send(Op::Rw, b"bytes");
    let _ = peer.rx.publish();
    let posted = peer.rx.posted();
    assert_eq!(driver.read(id, &mut [0; 8], false), Ok(5));
    assert_eq!(peer.rx.posted(), posted);
    assert_eq!(driver.write(id, b"x", Publish::Later), Ok(1));
    assert_eq!((peer.rx.posted(), peer.take()), (posted, None));
    assert_eq!(driver.write(id, b"y", Publish::Now), Ok(1));
    assert_eq!(peer.rx.posted(), posted + 1);
    let sent = [(); 2].map(|()| peer.take().expect("a packet").1);
    assert_eq!(sent, [b"x", b"y"]);
}

#[test]
fn arming_publishes_the_request_for_credit_of_a_write_that_found_none() {
    let (mut driver, mut peer, id) = small();
    peer.header.buf_alloc = 8;
    peer.send(Op::CreditUpdate, &[]);
    let _ = peer.rx.publish();
    while Backend::drive(&mut driver).unwrap() {}
    assert_eq!(driver.write(id, b"12345678", Publish::Now), Ok(8));
    let refused = driver.write(id, b"x", Publish::Now);
    assert_eq!(refused, Err(SendFault::WouldBlock));
    Backend::arm(&mut driver);
    peer.take_op(Op::CreditRequest);
}
