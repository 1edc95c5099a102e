//! The decisions of the flights that no peer can be made to bring about.

use std::io::Read;
use std::net::{TcpListener, TcpStream, UdpSocket};

use super::super::policy::Threshold;
use super::*;

/// Of datagrams, over calls that copy.
fn flights() -> Flights<Vec<u8>> {
    flights_over(Backend::Copy)
}

fn flights_over(backend: Backend) -> Flights<Vec<u8>> {
    let socket = UdpSocket::bind("127.0.0.1:0").expect("loopback");
    let address = socket.local_addr().expect("an address");
    socket.connect(address).expect("loopback");
    let opened = Carrier::open(socket.into(), 8, Some(backend));
    let (carrier, kind) = opened.expect("a carrier");
    let policy = Policy::new(kind, backend, Threshold::Measured);
    Flights::new(carrier, false, 8, Slots::new([0]), policy)
}

#[test]
fn what_is_asked_again_goes_in_the_order_of_acceptance() {
    let mut flights = flights();
    // Places are used again: their order is not that of the sends.
    for _ in 0..3 {
        assert!(flights.accept(Outgoing::new(vec![1; 100])).is_ok());
    }
    flights.submit().expect("the kernel answers");
    for _ in 0..5 {
        assert!(flights.accept(Outgoing::new(vec![1; 100])).is_ok());
    }
    let accepted: Vec<Key> = flights.queue.drain(..).collect();
    for answered in [4, 0, 2, 1, 3] {
        flights.ask_again(accepted[answered]);
    }
    assert_eq!(Vec::from(flights.again.clone()), accepted);
}

/// What another thread submitted is cancelled in its time, after the call that cancels.
#[test]
fn a_cancellation_that_comes_late_is_one() {
    for code in [CANCELLED, rustix::io::Errno::AGAIN.raw_os_error()] {
        let mut flights = flights();
        assert!(flights.accept(Outgoing::new(vec![1; 100])).is_ok());
        let key = flights.queue.pop_front().expect("it was accepted");
        flights.flights[key.index()].started = true;
        flights.open = 1;
        flights.cancel().expect("the kernel answers");
        flights.open = 0;
        flights.refused(key, code);
        let failed = flights.take().expect("it is over").outcome;
        let error = failed.expect_err("it was cancelled").error;
        assert_eq!(error.raw_os_error(), Some(CANCELLED));
        // The next is none of it.
        assert!(flights.accept(Outgoing::new(vec![1; 100])).is_ok());
        flights.submit().expect("the kernel answers");
        assert!(flights.take().expect("it is over").outcome.is_ok());
    }
}

#[test]
fn memory_is_not_waited_for_when_nothing_is_owed() {
    let mut flights = flights();
    flights.starved = true;
    assert!(flights.accept(Outgoing::new(vec![1; 100])).is_ok());
    flights.submit().expect("the kernel answers");
    assert!(flights.is_quiet());
    assert!(!flights.starved);
}

/// The kernel says of requests that took nothing that it copied.
#[test]
fn what_took_nothing_teaches_nothing() {
    let mut flights = flights_over(Backend::ErrorQueue);
    assert!(flights.accept(Outgoing::new(vec![1; 100])).is_ok());
    let key = flights.queue.pop_front().expect("it was accepted");
    flights.starved = true;
    for _ in 0..100 {
        flights.noted(key, None, true);
    }
    assert!(!flights.policy.is_off());
    assert!(flights.starved, "no memory was freed");
    assert!(!flights.flights[key.index()].copied);
    // One notification of many sends is one.
    for _ in 0..100 {
        flights.noted(key, Some(true), false);
    }
    assert!(!flights.policy.is_off());
    for _ in 0..100 {
        flights.noted(key, Some(true), true);
    }
    assert!(flights.policy.is_off());
    assert!(!flights.starved);
}

#[test]
fn memory_is_not_waited_for_when_nothing_will_free_any() {
    let mut flights = flights_over(Backend::ErrorQueue);
    let outgoing = Outgoing::new(vec![1; 100]).copying(Copying::Never);
    assert!(flights.accept(outgoing).is_ok());
    let key = flights.queue.pop_front().expect("it was accepted");
    flights.refused(key, rustix::io::Errno::NOBUFS.raw_os_error());
    assert!(!flights.starved);
    assert_eq!(flights.stats.copied_for_memory, 1);
    // The result of another is to come, which may have taken some.
    let outgoing = Outgoing::new(vec![1; 100]).copying(Copying::Never);
    assert!(flights.accept(outgoing).is_ok());
    let key = flights.queue.pop_front().expect("it was accepted");
    flights.open = 1;
    flights.refused(key, rustix::io::Errno::NOBUFS.raw_os_error());
    assert!(flights.starved);
    assert_eq!(flights.stats.copied_for_memory, 1);
}

/// A request of several sends that is too long for the memory there is: the next one is shorter, and
/// nothing is copied for that.
#[test]
fn where_memory_is_short_requests_are_shorter_before_anything_is_copied() {
    let mut flights = flights_over(Backend::ErrorQueue);
    let outgoing = Outgoing::new(vec![1; 100]).copying(Copying::Never);
    assert!(flights.accept(outgoing).is_ok());
    let key = flights.queue.pop_front().expect("it was accepted");
    flights.flights[key.index()].gathered = 100_000;
    let refused = rustix::io::Errno::NOBUFS.raw_os_error();
    flights.refused(key, refused);
    assert_eq!(flights.gather, 50_000);
    assert_eq!(flights.stats.copied_for_memory, 0);
    assert_eq!(flights.flights[key.index()].rounds, 0);
    assert_eq!(flights.again.pop_front(), Some(key));
    // One alone is no shorter for that.
    flights.flights[key.index()].gathered = 0;
    flights.refused(key, refused);
    assert_eq!(flights.gather, 50_000);
    assert_eq!(flights.stats.copied_for_memory, 1);
    flights.noted(key, Some(false), true);
    assert!(flights.gather > 50_000);
}

/// Which sends one request is to be made of.
#[test]
fn what_goes_alike_goes_together() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
    let socket = TcpStream::connect(listener.local_addr().expect("an address"));
    let socket = socket.expect("loopback").into();
    let (carrier, kind) =
        Carrier::<Vec<u8>>::open(socket, 8, Some(Backend::ErrorQueue)).expect("a carrier");
    let policy = Policy::new(kind, Backend::ErrorQueue, Threshold::Measured);
    let mut flights = Flights::new(carrier, true, 8, Slots::new([0]), policy);
    let (never, always) = (Copying::Never, Copying::Always);
    for (copying, more) in [
        (never, false),
        (never, false),
        (always, false),
        (always, true),
        (always, true),
        (always, false),
    ] {
        let outgoing = Outgoing {
            more,
            ..Outgoing::new(vec![1; 1000]).copying(copying)
        };
        assert!(flights.accept(outgoing).is_ok());
    }
    let mut runs = |gather, most| {
        flights.gather = gather;
        let (mut queue, mut runs) = (flights.queue.clone(), Vec::new());
        std::mem::swap(&mut flights.queue, &mut queue);
        while !flights.queue.is_empty() {
            let mut run = Vec::new();
            flights.run(most, &mut run);
            flights.queue.drain(..run.len());
            runs.push(run.len());
        }
        flights.queue = queue;
        runs
    };
    // What is to be continued does not hold back what is not.
    assert_eq!(runs(GATHERED, 32), [2, 1, 3]);
    assert_eq!(runs(GATHERED, 1), [1; 6]);
    // Copies need no memory that could be short.
    assert_eq!(runs(1999, 32), [1, 1, 1, 3]);
}

/// What was cancelled is taken all the same, and what belongs to it is not.
#[test]
fn pieces_that_are_taken_after_a_cancellation_are_forgotten() {
    let mut flights = flights();
    let piece = |len, more| Outgoing {
        more,
        ..Outgoing::new(vec![1; len])
    };
    assert!(flights.accept(piece(100, true)).is_ok());
    flights.submit().expect("the kernel answers");
    // It is as if the kernel had not said so yet.
    flights.cork.under_way = true;
    flights.open = 1;
    assert!(flights.accept(piece(200, true)).is_ok());
    flights.cancel().expect("the kernel answers");
    flights.open = 0;
    flights.settle_cork();
    for len in [300, 10] {
        assert!(flights.accept(piece(len, false)).is_ok());
    }
    flights.submit().expect("the kernel answers");
    let mut bytes = [0; 1000];
    let received = rustix::net::recv(
        flights.carrier.socket(),
        &mut bytes,
        rustix::net::RecvFlags::empty(),
    );
    assert_eq!(received.expect("a datagram").0, 10);
}

/// A socket that refuses MSG_WAITALL, as kernel TLS does.
#[test]
fn a_stream_whose_requests_cannot_be_whole_is_sent_one_by_one() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
    let socket = TcpStream::connect(listener.local_addr().expect("an address"));
    let mut peer = listener.accept().expect("a stream").0;
    let socket = socket.expect("loopback").into();
    let Ok((carrier, kind)) = Carrier::<Vec<u8>>::open(socket, 8, Some(Backend::Uring)) else {
        return eprintln!("SKIPPED io_uring: a_stream_whose_requests_cannot_be_whole");
    };
    let policy = Policy::new(kind, Backend::Uring, Threshold::Measured);
    let mut flights = Flights::new(carrier, true, 8, Slots::new([0]), policy);
    for byte in 0..4 {
        let outgoing = Outgoing::new(vec![byte; 60_000]).copying(Copying::Always);
        assert!(flights.accept(outgoing).is_ok());
    }
    // The first of a chain is refused, and the others with it.
    let accepted: Vec<Key> = flights.queue.drain(..).collect();
    let refused = rustix::io::Errno::OPNOTSUPP.raw_os_error();
    flights.refused(accepted[0], refused);
    for &other in &accepted[1..] {
        flights.refused(other, CANCELLED);
    }
    assert!(!flights.whole && flights.broken.is_none());
    assert_eq!(Vec::from(flights.again.clone()), accepted);
    // One request, of two sends.
    assert_eq!(flights.start_some(true).expect("the kernel answers"), 2);
    assert_eq!(flights.stats.requests, 1);
    assert!(!flights.may_start(), "one at a time");
    while !flights.is_quiet() {
        flights.wait(None).expect("the kernel answers");
        flights.progress();
        flights.submit().expect("the kernel answers");
    }
    let mut bytes = vec![0; 240_000];
    peer.read_exact(&mut bytes).expect("all of it");
    assert!(
        bytes
            .chunks(60_000)
            .zip(0..)
            .all(|(chunk, byte)| chunk == [byte; 60_000])
    );
    // A socket that refuses without the flag, too, has refused.
    assert!(
        flights
            .accept(Outgoing::new(vec![0]).copying(Copying::Always))
            .is_ok()
    );
    let key = flights.queue.pop_front().expect("it was accepted");
    flights.refused(key, refused);
    assert_eq!(flights.broken, Some(refused));
}

/// An old one may be there for as long as the limit is, and very many come and go meanwhile.
#[test]
fn what_is_over_is_forgotten_also_behind_what_is_not() {
    let mut flights = flights();
    flights.limit.time = Some(Duration::from_secs(3600));
    assert!(flights.accept(Outgoing::new(vec![1; 100])).is_ok());
    // It is not started.
    flights.queue.clear();
    flights.submit().expect("the kernel answers");
    let due = flights.due();
    for _ in 0..100 {
        assert!(flights.accept(Outgoing::new(vec![1; 100])).is_ok());
        flights.submit().expect("the kernel answers");
        assert!(flights.limit.sends.len() <= 16);
    }
    assert_eq!(flights.due(), due);
}

/// One look at the clock serves what is submitted together, and nothing that comes later.
#[test]
fn what_is_submitted_together_is_late_together() {
    let mut flights = flights();
    flights.limit.time = Some(Duration::from_secs(3600));
    for submits in [false, true, true] {
        assert!(flights.accept(Outgoing::new(vec![1; 100])).is_ok());
        flights.queue.clear();
        if submits {
            flights.submit().expect("the kernel answers");
        }
    }
    let at: Vec<_> = flights.limit.sends.iter().map(|send| send.at).collect();
    assert!(at[0] == at[1] && at[1] < at[2]);
}

#[test]
fn a_limit_without_end_is_none() {
    let mut flights = flights();
    flights.limit.time = Some(Duration::MAX);
    assert!(flights.accept(Outgoing::new(vec![1; 100])).is_ok());
    assert_eq!(flights.due(), None);
    flights.submit().expect("the kernel answers");
    assert_eq!(flights.stats.failed, 0);
}
