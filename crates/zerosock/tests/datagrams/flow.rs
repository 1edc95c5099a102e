//! Flow control: full receivers, and senders that are told to stop.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::thread;
use std::time::Instant;

use super::*;
use crate::common::{assert_bytes, bytes, eventually};

const LEN: usize = 2000;

/// Sends numbered datagrams until `stop`, at most `most`; returns the number sent.
fn pour(from: &Datagram, to: Address, most: u64, stop: &AtomicBool) -> u64 {
    let mut sent = 0;
    while sent < most && !stop.load(Ordering::Relaxed) {
        from.send_to(&bytes(sent, LEN), to).unwrap();
        sent += 1;
    }
    sent
}

/// One endpoint sends to two receivers. The fast one reads at once. The slow one reads nothing
/// until the fast one has received many times the slow one's limit, and then reads slowly. Neither
/// loses a datagram, and the fast one never waits for the slow one.
fn slow_and_fast(sender: &Datagram, other: &Datagram, slow: &Datagram, fast: &Datagram) {
    const FAST: u64 = 5000;
    const SLOW: u64 = 1000;
    // Three quarters of the buffer are for datagrams in flight: both send buffers, and the queues
    // of a device and of a process that makes no call.
    slow.set_receive_buffer(700 << 10);
    for socket in [sender, other] {
        socket.set_send_buffer(32 << 10);
    }
    let (to_slow, to_fast) = (slow.local_addr(), fast.local_addr());
    let never = AtomicBool::new(false);
    let fast_done = AtomicBool::new(false);
    thread::scope(|scope| {
        let never = &never;
        scope.spawn(move || assert_eq!(pour(sender, to_slow, SLOW, never), SLOW));
        scope.spawn(move || assert_eq!(pour(other, to_fast, FAST, never), FAST));
        let fast_done = &fast_done;
        scope.spawn(move || {
            let mut buffer = vec![0; LEN];
            for number in 0..FAST {
                assert_eq!(fast.recv(&mut buffer).unwrap(), LEN);
                assert_bytes(&buffer, &bytes(number, LEN));
            }
            fast_done.store(true, Ordering::Relaxed);
        });
        eventually("the fast one is done", || fast_done.load(Ordering::Relaxed));
        // The slow one's sender was told to stop long before it had sent all.
        let held = sender.stats();
        assert!(held.stopped > 0, "told to stop");
        assert!(held.sent < SLOW, "{} of {SLOW} sent", held.sent);
        let mut buffer = vec![0; LEN];
        for number in 0..SLOW {
            assert_eq!(slow.recv(&mut buffer).unwrap(), LEN);
            assert_bytes(&buffer, &bytes(number, LEN));
            if number.is_multiple_of(64) {
                // Slow, and sometimes slower than a STOP lasts.
                thread::sleep(Duration::from_millis(if number == 512 { 700 } else { 5 }));
            }
        }
    });
    for socket in [slow, fast] {
        let stats = socket.stats();
        assert_eq!((stats.dropped_full, socket.drops().full), (0, 0));
    }
}

#[test]
fn a_slow_receiver_loses_nothing_while_a_fast_one_runs_on() {
    let hub = Hub::with(|builder| builder);
    let process = hub.process();
    let (slow, fast) = (at_host(&hub, PORT), at_host(&hub, Port::ANY));
    let (sender, other) = (at(&process, Port::ANY), at(&process, Port::ANY));
    slow_and_fast(&sender, &other, &slow, &fast);
}

#[test]
fn a_slow_process_of_a_host_loses_nothing() {
    let hub = Hub::with(|builder| builder);
    let process = hub.process();
    let (slow, fast) = (at(&process, PORT), at(&process, Port::ANY));
    let (sender, other) = (at_host(&hub, Port::ANY), at_host(&hub, Port::ANY));
    slow_and_fast(&sender, &other, &slow, &fast);
}

#[test]
fn a_slow_sibling_loses_nothing() {
    let serve = Serve::new(2);
    let (from, to) = (serve.process(), serve.process());
    let (slow, fast) = (at(&to, PORT), at(&to, Port::ANY));
    let (sender, other) = (at(&from, Port::ANY), at(&from, Port::ANY));
    slow_and_fast(&sender, &other, &slow, &fast);
}

/// A receiver that others may send to, and that may not answer, because none of its ports is open.
#[test]
fn a_slow_receiver_that_may_not_answer_loses_nothing() {
    let serve = Serve::new(2);
    let from = serve.process_with(|builder| builder.ports([Port::new(9000)]));
    let to = serve.process();
    let (slow, fast) = (at(&to, PORT), at(&to, Port::ANY));
    let (sender, other) = (at(&from, Port::ANY), at(&from, Port::ANY));
    slow_and_fast(&sender, &other, &slow, &fast);
}

#[test]
fn a_process_that_does_not_read_loses_nothing_while_another_reads() {
    let serve = Serve::new(1);
    let (from, idle, busy) = (serve.process(), serve.process(), serve.process());
    let (slow, fast) = (at(&idle, PORT), at(&busy, PORT));
    let (sender, other) = (at(&from, Port::ANY), at(&from, Port::ANY));
    slow_and_fast(&sender, &other, &slow, &fast);
    assert!(serve.stats().copied_bytes > 0, "the switch kept some");
}

#[test]
fn a_full_receiver_drops_datagrams_of_senders_without_flow_control() {
    let hub = Hub::with(|builder| builder);
    let ours = at_host(&hub, PORT);
    ours.set_receive_buffer(20_000);
    let mut guest = super::hostile::guest(&hub, true, false);
    for _ in 0..100 {
        guest.datagram(PORT, &[1; 1000]);
    }
    guest.raw.wait_tx_done();
    // 18 of 1000 bytes and 128, and the one that overshoots.
    let mut got = 0;
    ours.set_nonblocking(true).unwrap();
    while ours.recv_from(&mut [0; 1000]).is_ok() {
        got += 1;
    }
    assert_eq!((got, ours.stats().dropped_full), (18, 82));
    assert_eq!(ours.drops().full, 82);
}

#[test]
fn a_blocked_destination_says_would_block_and_others_are_not() {
    let hub = Hub::new();
    let process = hub.process();
    let (full, free) = (at_host(&hub, PORT), at_host(&hub, Port::ANY));
    full.set_receive_buffer(40_000);
    let theirs = at(&process, Port::ANY);
    theirs.set_nonblocking(true).unwrap();
    let send = |to: &Datagram| theirs.send_to(&[0; 1000], to.local_addr());
    eventually("it is blocked", || {
        process.drive().unwrap();
        send(&full).is_err() && theirs.stats().stopped > 0
    });
    let error = send(&full).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock);
    // The host takes it before the other's STOP arrives: the send buffer has room.
    eventually("another is sent to", || {
        process.drive().unwrap();
        send(&free).is_ok()
    });
    theirs.set_nonblocking(false).unwrap();
    theirs
        .set_write_timeout(Some(Duration::from_millis(50)))
        .unwrap();
    let error = send(&full).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::TimedOut);
    assert_eq!(full.stats().dropped_full, 0);
    // Once all is read, it sends START.
    full.set_nonblocking(true).unwrap();
    while full.recv_from(&mut [0; 1000]).is_ok() {}
    theirs.set_write_timeout(Some(PATIENCE)).unwrap();
    let began = Instant::now();
    send(&full).unwrap();
    assert!(began.elapsed() < PATIENCE);
}

#[test]
fn a_receiver_that_dies_lets_its_sources_go() {
    let serve = Serve::new(1);
    let (from, to) = (serve.process(), serve.process());
    let theirs = at(&to, PORT);
    theirs.set_receive_buffer(40_000);
    let there = theirs.local_addr();
    let ours = at(&from, Port::ANY);
    ours.set_nonblocking(true).unwrap();
    eventually("it is blocked", || {
        from.drive().unwrap();
        to.drive().unwrap();
        let refused = ours.send_to(&[0; 1000], there).is_err();
        refused && ours.stats().stopped > 0
    });
    drop((theirs, to));
    // No START arrives; the block ends by its time-out.
    ours.set_nonblocking(false).unwrap();
    ours.send_to(&[0; 1000], there).unwrap();
}

/// A program that exits after a flush has lost nothing. Without the flush the datagrams that the
/// host holds in the program's memory would be lost with it.
#[test]
fn what_is_flushed_outlives_its_sender() {
    const MOST: u64 = 10;
    let hub = Hub::new();
    let (from, there) = (hub.process(), at_host(&hub, PORT));
    let to = there.local_addr();
    thread::scope(|scope| {
        let (tell, told) = channel();
        scope.spawn(move || {
            let ours = at(&from, Port::ANY);
            for number in 0..MOST {
                ours.send_to(&bytes(number, LEN), to).unwrap();
            }
            tell.send("sent").unwrap();
            ours.flush().unwrap();
            drop((ours, from));
            tell.send("gone").unwrap();
        });
        assert_eq!(told.recv_timeout(PATIENCE), Ok("sent"));
        // Far longer than an exiting endpoint waits by itself.
        let early = told.recv_timeout(Duration::from_millis(1000));
        assert!(early.is_err(), "it is gone with what it sent");
        for number in 0..MOST {
            assert_bytes(&recv(&there).0, &bytes(number, LEN));
        }
        assert_eq!(told.recv_timeout(PATIENCE), Ok("gone"));
    });
}

/// A daemon takes everything at once, so this test does not show that the flush waits.
#[test]
fn what_is_flushed_through_a_switch_arrives() {
    const MOST: u64 = 100;
    let serve = Serve::new(2);
    let (from, to) = (serve.process(), serve.process());
    let (ours, there) = (at(&from, Port::ANY), at(&to, PORT));
    for number in 0..MOST {
        ours.send_to(&bytes(number, LEN), there.local_addr())
            .unwrap();
    }
    ours.flush().unwrap();
    drop((ours, from));
    for number in 0..MOST {
        assert_bytes(&recv(&there).0, &bytes(number, LEN));
    }
}

#[test]
fn a_flush_waits_for_the_device_and_no_longer_than_it_may() {
    let hub = Hub::new();
    let process = hub.process();
    let (ours, theirs) = (at_host(&hub, PORT), at(&process, Port::ANY));
    theirs.flush().unwrap();
    theirs.send_to(b"held in place", ours.local_addr()).unwrap();
    theirs
        .set_write_timeout(Some(Duration::from_millis(50)))
        .unwrap();
    assert_eq!(
        theirs.flush().unwrap_err().kind(),
        std::io::ErrorKind::TimedOut
    );
    theirs.set_write_timeout(Some(PATIENCE)).unwrap();
    thread::scope(|scope| {
        let began = Instant::now();
        let flushing = scope.spawn(|| theirs.flush());
        assert_eq!(recv(&ours).0, b"held in place");
        flushing.join().unwrap().unwrap();
        assert!(began.elapsed() < PATIENCE, "never told");
    });
    // A host's are in the receiver's buffers at once.
    ours.send_to(b"back", theirs.local_addr()).unwrap();
    ours.flush().unwrap();
}
