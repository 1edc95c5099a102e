//! A program that embeds the device reads guests' bytes in place, and writes into buffers that
//! guests will read.

use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::common::driver::{
    Directions, Driver, DriverAttachError, DriverConfig, FrontendError, StreamState,
};
use crate::common::raw::RawGuest;
use crate::common::{self, assert_bytes, bytes, deadline, eventually, host};
use crate::hosting::{self, Hosted};
use zerosock::access::{AccessList, Party, Ports, Rule, Verdict};
use zerosock::vsock::{
    ConnectError, ConnectReason, Endpoint, Fault, FrontendFault, Host, Stream, Wait,
};
use zerosock::{Address, Cid, Port};
use zerosock_proto::wire::vsock::Op;

const PORT: Port = Port::new(700);

fn guest_port() -> Address {
    Address::new(Cid::new(3), PORT)
}

#[test]
fn bytes_arrive_both_ways_and_so_do_ends() {
    const LEN: usize = 3 << 20;
    for wait in [Wait::Sleep, Wait::Spin, Wait::ADAPTIVE] {
        let hosted = Hosted::with(1, wait);
        let listener = hosted.listen(PORT, 4).unwrap();
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut guest = hosted.guest();
                let stream = guest.wait_connect(host(700), deadline()).unwrap();
                guest.wait_send(stream, &bytes(1, LEN), deadline()).unwrap();
                guest.shutdown(stream, Directions::SEND);
                let mut back = Vec::new();
                guest
                    .wait_recv_to_end(stream, &mut back, deadline())
                    .unwrap();
                assert_bytes(&back, &bytes(2, LEN));
                guest.close(stream);
                guest.drive().unwrap();
            });
            let (mut stream, peer) = listener.accept_timeout(common::PATIENCE).unwrap();
            assert_eq!(peer.cid, Cid::new(3));
            let mut got = Vec::new();
            stream.read_to_end(&mut got).unwrap();
            assert_bytes(&got, &bytes(1, LEN));
            stream.write_all(&bytes(2, LEN)).unwrap();
            stream.shutdown(Shutdown::Write).unwrap();
            let stats = hosted.stats();
            assert_eq!(stats.received, LEN as u64);
            assert_eq!(stats.copied_in, LEN as u64);
        });
    }
}

#[test]
fn leases_and_loans_copy_nothing() {
    const LEN: usize = 1 << 20;
    let hosted = Hosted::with_hold(1, Duration::from_secs(600));
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut guest = hosted.guest();
            guest.listen(PORT, 4).unwrap();
            let stream = guest.wait_accept(PORT, deadline()).unwrap();
            let mut got = vec![0; LEN];
            guest.wait_recv_exact(stream, &mut got, deadline()).unwrap();
            assert_bytes(&got, &bytes(3, LEN));
            guest.wait_send(stream, &bytes(4, LEN), deadline()).unwrap();
            // Until it is closed.
            let mut end = Vec::new();
            guest
                .wait_recv_to_end(stream, &mut end, deadline())
                .unwrap();
        });
        let stream = hosted.connect_to(guest_port());
        let all = bytes(3, LEN);
        let mut rest = &all[..];
        while !rest.is_empty() {
            let mut loan = stream.loan(rest.len()).unwrap();
            assert!(loan.is_in_place());
            let took = loan.write(rest).unwrap();
            assert_eq!(loan.send().unwrap(), took);
            rest = &rest[took..];
        }
        drop(stream.loan(100).unwrap());
        let mut got = Vec::new();
        while got.len() < LEN {
            let lease = stream.recv().unwrap().unwrap();
            got.extend_from_slice(&lease.to_vec());
        }
        assert_bytes(&got, &bytes(4, LEN));
        let stats = hosted.stats();
        assert_eq!((stats.sent, stats.sent_in_place), (LEN as u64, LEN as u64));
        assert_eq!((stats.copied_in, stats.copied_out), (0, 0));
        assert_eq!(stats.received_in_place, LEN as u64);
        assert_eq!(stats.copied_aside, 0);
    });
}

/// The mapping of this process that has `at` in it.
fn mapping(at: *const u8) -> String {
    let at = at.addr();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let found = maps.lines().find(|line| {
        let (range, _) = line.split_once(' ').unwrap();
        let (from, to) = range.split_once('-').unwrap();
        let parse = |word| usize::from_str_radix(word, 16).unwrap();
        (parse(from)..parse(to)).contains(&at)
    });
    found.unwrap_or_default().to_owned()
}

/// A guest of raw rings with a connection to the program: what it sends lies where it says.
fn raw_pair(hosted: &Hosted) -> (RawGuest, Stream) {
    let listener = hosted.listen(PORT, 4).unwrap();
    let mut guest = hosted.raw_guest();
    guest.connect(5000, PORT.get());
    let (stream, _) = listener.accept_timeout(common::PATIENCE).unwrap();
    stream.set_read_timeout(Some(common::PATIENCE)).unwrap();
    (guest, stream)
}

#[test]
fn a_lease_is_in_guest_memory_and_shows_later_writes_of_the_guest() {
    let hosted = Hosted::with_hold(1, Duration::from_secs(600));
    let (mut guest, stream) = raw_pair(&hosted);
    let at = hosting::raw_send(&mut guest, 5000, PORT.get(), b"hello");
    let lease = stream.recv().unwrap().unwrap();
    assert!(lease.is_in_place());
    let reading = lease.read();
    let name = mapping(reading.as_ptr());
    assert!(name.contains("raw-guest"), "{name}");
    assert_eq!(reading.to_vec(), b"hello");
    guest.write(at, b"j");
    assert_eq!(reading.to_vec(), b"jello", "not a copy");
    drop(reading);
    // And beyond the bounds it is one.
    let more: Vec<_> = (0..20)
        .map(|_| hosting::raw_send(&mut guest, 5000, PORT.get(), b"hello"))
        .collect();
    let leases: Vec<_> = more
        .iter()
        .map(|_| stream.recv().unwrap().unwrap())
        .collect();
    assert!(leases[0].is_in_place());
    let copied = leases.iter().position(|lease| !lease.is_in_place());
    let copied = copied.expect("an eighth of the queue is leased");
    guest.write(more[copied], b"j");
    assert_eq!(leases[copied].to_vec(), b"hello", "a copy");
}

#[test]
fn a_loan_lies_in_a_buffer_that_the_guest_has_posted() {
    let hosted = Hosted::new();
    let (mut guest, stream) = raw_pair(&hosted);
    let mut loan = stream.loan(5).unwrap();
    assert!(loan.is_in_place());
    loan.write_all(b"hello").unwrap();
    let count = hosting::raw_count(&guest, b"hello");
    assert_eq!(count, 1, "there before it is sent");
    loan.send().unwrap();
    let (_, payload) = guest.recv_op(5000, Op::Rw);
    assert_eq!(payload, b"hello");
    // One that is dropped comes to nothing, in whichever order.
    let (one, two) = (stream.loan(5).unwrap(), stream.loan(5).unwrap());
    drop(one);
    let mut two = two;
    two.write_all(b"again").unwrap();
    two.send().unwrap();
    let (_, payload) = guest.recv_op(5000, Op::Rw);
    assert_eq!(payload, b"again");
}

#[test]
fn only_ports_with_a_listener_accept_connects() {
    let hosted = Hosted::new();
    let listener = hosted.listen(PORT, 1).unwrap();
    let mut guest = hosted.guest();
    assert!(guest.wait_connect(host(701), deadline()).is_err(), "nobody");
    let _one = guest.wait_connect(host(700), deadline()).unwrap();
    let _two = guest.wait_connect(host(700), deadline()).unwrap();
    assert!(
        guest.wait_connect(host(700), deadline()).is_err(),
        "backlog"
    );
    let _accepted = listener.accept_timeout(common::PATIENCE).unwrap();
    let three = guest.wait_connect(host(700), deadline()).unwrap();
    drop(listener);
    common::eventually_with(&mut guest, "reset with its listener", |guest| {
        guest.state(three) == Some(StreamState::Reset)
    });
    assert!(guest.wait_connect(host(700), deadline()).is_err(), "gone");
}

#[test]
fn denied_connects_of_the_host_are_counted_by_rule() {
    let deny = Rule {
        name: None,
        verdict: Verdict::Deny,
        from: vec![Party::Host],
        to: vec![Party::Any],
        ports: Ports::one(PORT).unwrap(),
    };
    let access = AccessList::new([deny]);
    let hosted = Hosted::tuned(|builder| builder.access(access.clone()));
    let mut guest = hosted.guest();
    guest.listen(PORT, 1).unwrap();
    // Nothing is denied before the host has seen that the driver runs.
    eventually("one connect is denied", || {
        let error = hosted.connect(guest_port()).unwrap_err();
        assert_eq!(reason(&error), ConnectReason::Unreachable);
        access.denied() == [1]
    });
}

fn reason(error: &std::io::Error) -> ConnectReason {
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref());
    let inner: &ConnectError = inner.unwrap_or_else(|| panic!("untyped: {error}"));
    assert_eq!(inner.fault(), inner.reason().fault());
    // The text has both.
    let text = format!("{:#}: {}", inner.peer(), inner.reason());
    assert_eq!(error.to_string(), text);
    inner.reason()
}

#[test]
fn a_silent_guest_times_out_a_refusing_one_refuses_and_an_absent_one_is_unreachable() {
    let dir = tempfile::tempdir().unwrap();
    let (socket, empty) = (dir.path().join("vm3.sock"), dir.path().join("vm4.sock"));
    let builder = Host::builder().vm(Cid::new(3), &socket);
    let builder = builder.vm(Cid::new(4), &empty);
    let hosted = Hosted::of(builder.connect_timeout(Duration::from_millis(100)));
    for cid in [4, 9, Cid::HOST.get(), Cid::ANY.get()] {
        let error = hosted
            .connect(Address::new(Cid::new(cid), PORT))
            .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::HostUnreachable, "{cid}: {error}");
        assert!(
            error.to_string().contains(&format!(":{}: ", PORT.get())),
            "{error}"
        );
        assert_eq!(reason(&error), ConnectReason::Unreachable);
        assert_eq!(reason(&error).fault(), Fault::Caller);
    }
    // A guest that no thread runs.
    let mut guest = hosting::guest_at(&socket);
    let error = loop {
        let error = hosted.connect(guest_port()).unwrap_err();
        // Its queues may not run yet.
        if error.kind() != ErrorKind::HostUnreachable {
            break error;
        }
        thread::yield_now();
    };
    assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
    assert_eq!(reason(&error), ConnectReason::TimedOut);
    assert_eq!(reason(&error).fault(), Fault::Peer);
    // A port without a listener.
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                let soon = Instant::now() + Duration::from_millis(5);
                guest.poll(Some(soon)).unwrap();
            }
        });
        let error = loop {
            let error = hosted.connect(guest_port()).unwrap_err();
            // On a machine that is busy.
            if error.kind() != ErrorKind::TimedOut {
                break error;
            }
        };
        done.store(true, Ordering::Relaxed);
        assert_eq!(error.kind(), ErrorKind::ConnectionRefused, "{error}");
        assert_eq!(reason(&error), ConnectReason::Refused);
        assert_eq!(reason(&error).fault(), Fault::Peer);
    });
}

#[test]
fn a_front_end_that_disconnects_during_a_connect_resets_it() {
    let hosted = Hosted::new();
    let mut guest = hosted.raw_guest();
    thread::scope(|scope| {
        let connecting = scope.spawn(|| hosted.connect(guest_port()).unwrap_err());
        guest.recv_op(PORT.get(), Op::Request);
        drop(guest);
        let error = connecting.join().unwrap();
        assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{error}");
        assert_eq!(reason(&error), ConnectReason::PeerGone);
    });
}

#[test]
fn closing_lets_what_was_sent_arrive_and_resetting_does_not_wait() {
    const LEN: usize = 100_000;
    let hosted = Hosted::new();
    let listener = hosted.listen(PORT, 2).unwrap();
    let mut guest = hosted.guest();
    let stream = guest.wait_connect(host(700), deadline()).unwrap();
    guest.wait_send(stream, &bytes(6, 100), deadline()).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            let (mut stream, _) = listener.accept_timeout(common::PATIENCE).unwrap();
            stream.write_all(&bytes(5, LEN)).unwrap();
            // Dropped with bytes of the guest's unread.
        });
        let mut got = Vec::new();
        guest
            .wait_recv_to_end(stream, &mut got, deadline())
            .unwrap();
        assert_bytes(&got, &bytes(5, LEN));
    });
    common::eventually_with(&mut guest, "an end", |guest| {
        guest.state(stream) != Some(StreamState::Connected)
    });
    assert_eq!(guest.state(stream), Some(StreamState::Finished));
    let stream = guest.wait_connect(host(700), deadline()).unwrap();
    let (accepted, _) = listener.accept_timeout(common::PATIENCE).unwrap();
    accepted.reset();
    common::eventually_with(&mut guest, "a reset", |guest| {
        guest.state(stream) == Some(StreamState::Reset)
    });
    // And the other way.
    let stream = guest.wait_connect(host(700), deadline()).unwrap();
    let (accepted, _) = listener.accept_timeout(common::PATIENCE).unwrap();
    accepted.set_read_timeout(Some(common::PATIENCE)).unwrap();
    guest.wait_send(stream, b"last words", deadline()).unwrap();
    guest.abort(stream);
    guest.drive().unwrap();
    let mut got = [0; 10];
    (&accepted).read_exact(&mut got).unwrap();
    assert_eq!(&got, b"last words");
    let error = (&accepted).read(&mut got).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
}

#[test]
fn a_front_end_that_dies_resets_its_connections_and_no_others() {
    let hosted = Hosted::with(2, Wait::Sleep);
    let listener = hosted.listen(PORT, 4).unwrap();
    let mut other = hosted.guest_of(1);
    let kept = other.wait_connect(host(700), deadline()).unwrap();
    let (alive, _) = listener.accept_timeout(common::PATIENCE).unwrap();
    let mut guest = hosted.guest_of(0);
    let stream = guest.wait_connect(host(700), deadline()).unwrap();
    let (dying, _) = listener.accept_timeout(common::PATIENCE).unwrap();
    dying.set_read_timeout(Some(common::PATIENCE)).unwrap();
    guest.wait_send(stream, b"half a mess", deadline()).unwrap();
    let lease = dying.recv().unwrap().unwrap();
    let reading = lease.read();
    drop(guest);
    let error = dying.recv().map(drop).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    assert!(reading.is_revoked(), "still mapped, but not promised");
    assert_eq!(reading.to_vec(), b"half a mess");
    other.wait_send(kept, b"here", deadline()).unwrap();
    let mut got = [0; 4];
    (&alive).read_exact(&mut got).unwrap();
    // The place is free for another one.
    let mut guest = hosted.guest_of(0);
    guest.wait_connect(host(700), deadline()).unwrap();
    eventually("accepted", || listener.accept().is_ok());
}

#[test]
fn a_reader_is_woken_by_a_shutdown_of_another_thread() {
    let hosted = Hosted::new();
    let mut guest = hosted.guest();
    guest.listen(PORT, 4).unwrap();
    let stream = thread::scope(|scope| {
        scope.spawn(|| guest.wait_accept(PORT, deadline()).unwrap());
        hosted.connect_to(guest_port())
    });
    stream.set_read_timeout(Some(common::PATIENCE)).unwrap();
    thread::scope(|scope| {
        let (tell, told) = std::sync::mpsc::channel();
        let stream = &stream;
        let reading = scope.spawn(move || {
            tell.send(rustix::thread::gettid()).unwrap();
            (&*stream).read(&mut [0])
        });
        // Asleep for good, and not for a moment, on the lock.
        let path = format!(
            "/proc/self/task/{}/stat",
            told.recv().unwrap().as_raw_nonzero()
        );
        let (give_up, mut asleep) = (deadline(), 0);
        while asleep < 1000 {
            assert!(std::time::Instant::now() < give_up, "it never sleeps");
            let stat = std::fs::read_to_string(&path).unwrap();
            asleep = if stat.contains(") S ") { asleep + 1 } else { 0 };
        }
        stream.shutdown(Shutdown::Read).unwrap();
        assert_eq!(reading.join().unwrap().unwrap(), 0, "end of file");
    });
}

#[test]
fn a_host_refuses_shrinkable_memory_unless_it_is_allowed() {
    let refused = |guest: Result<Driver, DriverAttachError>| match guest {
        Err(DriverAttachError::Frontend(FrontendError::Refused { request, .. })) => request,
        Err(error) => panic!("{error}"),
        Ok(_) => panic!("taken"),
    };
    let unsealed = |socket: &std::path::Path| {
        Driver::attach(DriverConfig {
            seal: false,
            ..DriverConfig::new(socket)
        })
    };
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("vm3.sock");
    let builder = || Host::builder().vm(Cid::new(3), &socket);
    {
        let hosted = Hosted::of(builder());
        assert_eq!(refused(unsealed(&socket)), "SET_MEM_TABLE");
        assert_eq!(hosted.faults(FrontendFault::Unsealed), 1, "by its name");
        // A guest with sealed memory is accepted afterwards.
        let listener = hosted.listen(PORT, 4).unwrap();
        let mut guest = hosting::guest_at(&socket);
        guest.wait_connect(host(700), deadline()).unwrap();
        listener.accept_timeout(common::PATIENCE).unwrap();
        assert_eq!(hosted.faults(FrontendFault::Unsealed), 1);
    }
    let hosted = Hosted::of(builder().allow_unsealed_memory());
    let mut guest = unsealed(&socket).unwrap();
    let listener = hosted.listen(PORT, 4).unwrap();
    guest.wait_connect(host(700), deadline()).unwrap();
    listener.accept_timeout(common::PATIENCE).unwrap();
    assert_eq!(hosted.faults(FrontendFault::Unsealed), 0);
}

#[test]
fn background_thread_accepts_processes_and_connections_while_the_program_makes_no_call() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("attach");
    let host_endpoint = Host::builder().attach(&path).background().start().unwrap();
    let listener = host_endpoint.listen(PORT, 4).unwrap();
    // Everything in one thread: without those of the endpoints, each of these calls would time out.
    let passive = Endpoint::builder().background().attach(&path).unwrap();
    let accepting = passive.listen(PORT, 4).unwrap();
    let active = Endpoint::attach(&path).unwrap();
    let mut to_host = active.connect(host(700)).unwrap();
    let mut to_process = active.connect(Address::new(passive.cid(), PORT)).unwrap();
    for stream in [&mut to_host, &mut to_process] {
        stream.write_all(b"hello").unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
    }
    for listener in [listener, accepting] {
        let (mut stream, _) = listener.accept().unwrap();
        let mut read = Vec::new();
        stream.read_to_end(&mut read).unwrap();
        assert_eq!(read, b"hello");
    }
    // The streams that were accepted are dropped: their peers read the end.
    for mut stream in [to_host, to_process] {
        assert_eq!(stream.read(&mut [0]).unwrap(), 0);
    }
}

#[test]
fn stream_counts_its_own_bytes_by_every_way_to_send_and_receive() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("attach");
    let host_endpoint = Host::builder().attach(&path).background().start().unwrap();
    let listener = host_endpoint.listen(PORT, 4).unwrap();
    let process = Endpoint::attach(&path).unwrap();
    let other = process.connect(host(700)).unwrap();
    let mut sender = process.connect(host(700)).unwrap();
    let (mut to_other, _) = listener.accept().unwrap();
    let (mut receiver, _) = listener.accept().unwrap();
    // Another connection of the same endpoint does not count.
    (&other).write_all(&[0; 1000]).unwrap();
    to_other.read_exact(&mut [0; 1000]).unwrap();

    // Copied on both sides: 1 + 2 + 4 + 8 bytes.
    sender.write_all(&[1; 1]).unwrap();
    let slices = [
        std::io::IoSlice::new(&[2; 2]),
        std::io::IoSlice::new(&[2; 4]),
    ];
    assert_eq!(sender.write_vectored(&slices).unwrap(), 6);
    let mut batch = sender.batch();
    batch.write(&[3; 8]).unwrap();
    drop(batch);
    receiver.read_exact(&mut [0; 15]).unwrap();
    // Written and read in place: 16 on a lease, 32 shown.
    for len in [16, 32] {
        let mut loan = sender.loan(len).unwrap();
        loan.write_all(&vec![4; len]).unwrap();
        loan.send().unwrap();
        if len == 16 {
            assert_eq!(receiver.recv().unwrap().unwrap().len(), 16);
        }
    }
    assert_eq!(
        receiver
            .recv_each(8, |shown| assert_eq!(shown.len(), 32))
            .unwrap(),
        1
    );
    // Not read yet.
    sender.write_all(&[5; 64]).unwrap();
    eventually("the last bytes arrive", || receiver.stats().received == 127);

    let stats = sender.stats();
    assert_eq!((stats.sent, stats.sent_in_place), (127, 48));
    assert_eq!((stats.received, stats.received_in_place), (0, 0));
    let stats = receiver.stats();
    assert_eq!(stats.received_in_place, 48);
    assert_eq!((stats.sent, stats.sent_in_place), (0, 0));
}
