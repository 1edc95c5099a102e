//! A send with room in the peer's queue is done by the calling thread.
//!
//! The packet is in the queue when the call returns, and no thread is woken for it, neither one
//! that sleeps on the endpoint nor one of the device. Shown by counters: turns, notifications, and
//! sleeps of each thread.

use std::cell::RefCell;
use std::io::{Read, Write};
use std::path::PathBuf;
use std::sync::mpsc;
use std::thread;

use crate::common::raw::{RX, RawGuest};
use crate::common::{self, PATIENCE, TestDaemon, eventually, host};
use crate::hosting::{Hosted, raw_send};
use zerosock::Port;
use zerosock::vsock::{Endpoint, Stream};
use zerosock_proto::wire::vsock::Op;

const PORT: Port = Port::new(700);
/// Fewer than there are buffers, and than ask for a word of credit.
const SENDS: u16 = 40;

/// Whether a thread of this process sleeps in `epoll_wait`, and how often it has slept so far.
fn sleeps(thread: i32) -> (bool, u64) {
    let dir = PathBuf::from(format!("/proc/self/task/{thread}"));
    let call = std::fs::read_to_string(dir.join("syscall")).unwrap_or_default();
    let status = std::fs::read_to_string(dir.join("status")).unwrap();
    let slept = status
        .lines()
        .find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"))
        .and_then(|count| count.trim().parse().ok());
    let number = call.split_whitespace().next();
    let waits = [
        libc::SYS_epoll_wait,
        libc::SYS_epoll_pwait,
        libc::SYS_epoll_pwait2,
    ];
    let waits = waits.map(|call| call.to_string());
    let asleep = number.is_some_and(|number| waits.iter().any(|wait| wait == number));
    (asleep, slept.unwrap())
}

/// Makes `SENDS` sends while another thread is blocked in a read of `other`, asleep for its
/// endpoint; how often that thread was woken meanwhile.
fn wakes_of_a_sleeper(other: &Stream, mut send: impl FnMut(u16), end: impl FnOnce()) -> u64 {
    let (tell, told) = mpsc::channel();
    thread::scope(|scope| {
        scope.spawn(move || {
            tell.send(rustix::thread::gettid().as_raw_nonzero().get())
                .unwrap();
            assert_eq!((&mut &*other).read(&mut [0; 8]).unwrap(), 3);
        });
        let sleeper = told.recv().unwrap();
        eventually("asleep", || sleeps(sleeper).0);
        let before = sleeps(sleeper);
        for n in 0..SENDS {
            send(n);
        }
        let after = sleeps(sleeper);
        assert!(before.0 && after.0, "not asleep");
        end();
        after.1 - before.1
    })
}

#[test]
fn a_hosts_send_is_in_the_guests_queue_when_the_call_returns_and_wakes_no_thread() {
    let mut hosted = Hosted::new();
    let listener = hosted.listen(PORT, 4).unwrap();
    let mut guest = hosted.raw_guest();
    let accept = |guest: &mut RawGuest, port| {
        guest.connect(port, PORT.get());
        let (stream, _) = listener.accept_timeout(PATIENCE).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    };
    let stream = accept(&mut guest, 5000);
    let other = accept(&mut guest, 5001);
    // From here on only calls of the test run the host.
    hosted.stop();
    let guest = RefCell::new(guest);
    let first = guest.borrow().used_index(RX);
    let sent = hosted.stats().packets_sent;
    let send = |n: u16| {
        if n.is_multiple_of(2) {
            assert_eq!((&stream).write(b"inline").unwrap(), 6);
        } else {
            let mut loan = stream.loan(6).unwrap();
            loan.write_all(b"inline").unwrap();
            loan.send().unwrap();
        }
        let used = guest.borrow().used_index(RX);
        assert_eq!(used.wrapping_sub(first), n + 1, "not published by the call");
    };
    let woken = wakes_of_a_sleeper(&other, send, || {
        raw_send(&mut guest.borrow_mut(), 5001, PORT.get(), b"end");
    });
    assert_eq!(woken, 0);
    let sent = hosted.stats().packets_sent - sent;
    assert!(sent >= u64::from(SENDS), "{sent} packets");
    let (_, payload) = guest.borrow_mut().recv_op(5000, Op::Rw);
    assert_eq!(payload, b"inline");
}

#[test]
fn an_endpoints_send_is_made_by_the_call_and_wakes_no_thread_of_its_own() {
    let daemon = TestDaemon::new();
    let listener = daemon.host_listener(2000);
    let endpoint = Endpoint::builder()
        .queue_pairs(common::pairs())
        .attach_device(&daemon.vms[0].socket)
        .unwrap();
    let connect = || {
        let stream = endpoint.connect(host(2000)).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let (program, _) = listener.accept().unwrap();
        program.set_read_timeout(Some(PATIENCE)).unwrap();
        (stream, program)
    };
    let (stream, mut program) = connect();
    let (other, mut far) = connect();
    let before = endpoint.stats();
    let send = |n: u16| {
        let message = [n as u8; 6];
        assert_eq!((&stream).write(&message).unwrap(), 6);
        // The program has it, and no other thread has called the endpoint or woken up since.
        let mut got = [0; 6];
        program.read_exact(&mut got).unwrap();
        assert_eq!(got, message);
    };
    let woken = wakes_of_a_sleeper(&other, send, || far.write_all(b"end").unwrap());
    assert_eq!(woken, 0);
    let after = endpoint.stats();
    let sends = u64::from(SENDS);
    assert_eq!(after.packets_sent - before.packets_sent, sends);
    assert!(after.notifications - before.notifications <= sends);
    assert_eq!(after.copied_in - before.copied_in, 6 * sends);
}

/// With a worker that looks for work it takes no system call at all to reach it: see `spin`. With
/// one that sleeps, packets that are sent together are told of once.
#[test]
fn sends_of_a_batch_are_published_together_with_one_notification() {
    let mut hosted = Hosted::new();
    let listener = hosted.listen(PORT, 4).unwrap();
    let mut guest = hosted.raw_guest();
    guest.connect(5000, PORT.get());
    let (stream, _) = listener.accept_timeout(PATIENCE).unwrap();
    hosted.stop();
    let (first, told) = (guest.used_index(RX), hosted.stats().notifications);
    let mut batch = stream.batch();
    for _ in 0..SENDS {
        batch.write(b"inline").unwrap();
    }
    assert_eq!(guest.used_index(RX), first, "shown too early");
    drop(batch);
    assert_eq!(guest.used_index(RX).wrapping_sub(first), SENDS);
    assert_eq!(hosted.stats().notifications - told, 1);
}
