//! Leases on a peer's memory are sent to kernel sockets without a copy.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

use tempfile::TempDir;
use zerosock::vsock::{Endpoint, Host, Stream};
use zerosock::zc::{Buf, Copying, Outgoing, Refusal, SendBackend, Sender};
use zerosock::{Address, Cid, Port};

use crate::common::PATIENCE;
use crate::common::pump::Pumped;

const MOMENT: Duration = Duration::from_millis(1);
const TOTAL: usize = 4 << 20;
const BACKENDS: [SendBackend; 3] = [
    SendBackend::Uring,
    SendBackend::ErrorQueue,
    SendBackend::Copy,
];

/// `TOTAL` bytes in which every position can be told apart.
fn pattern() -> Vec<u8> {
    (0..TOTAL as u64)
        .map(|index| (index.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8)
        .collect()
}

/// A connection between a host and a process that has attached to it, neither of which trusts the
/// other, and what keeps the host going until it is dropped.
fn connection() -> (Stream, Stream, (Pumped, TempDir)) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("attach.sock");
    let host = Pumped::new(Host::builder().attach(&path).start().expect("a host"));
    let listener = host.listen(Port::new(1), 1).expect("a port");
    let process = Endpoint::attach(&path).expect("an endpoint");
    let theirs = process
        .connect(Address::new(Cid::HOST, Port::new(1)))
        .expect("a connection");
    let ours = listener.accept().expect("a connection").0;
    (ours, theirs, (host, folder))
}

#[test]
fn a_lease_on_a_peers_memory_goes_to_a_socket_from_there() {
    for backend in BACKENDS {
        let (ours, theirs, _going) = connection();
        ours.set_nonblocking(true).expect("a stream");
        let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
        let socket = TcpStream::connect(listener.local_addr().expect("an address"));
        let far = listener.accept().expect("a stream").0;
        far.set_read_timeout(Some(PATIENCE)).expect("a socket");
        let reader = thread::spawn(move || {
            let mut received = Vec::new();
            (&far).read_to_end(&mut received).expect("the bytes");
            received
        });
        let writer = thread::spawn(move || {
            (&theirs).write_all(&pattern()).expect("all of it");
            theirs
        });
        let mut sender: Sender = Sender::builder()
            .backend(backend)
            .open(socket.expect("loopback"))
            .expect("a sender");
        let (mut passed, mut in_place) = (0, 0);
        while passed < TOTAL {
            let lease = match ours.recv() {
                Ok(lease) => lease.expect("more"),
                Err(error) => {
                    // The peer may wait for buffers that the sender has, so this loop waits for
                    // both.
                    assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}");
                    sender.wait(Some(MOMENT)).expect("the kernel answers");
                    while sender.returned().is_some() {}
                    thread::yield_now();
                    continue;
                }
            };
            passed += lease.len();
            let buffer = lease.into_zc_buf().map_err(|(error, _)| error);
            let buffer = buffer.expect("the peer lives");
            in_place += usize::from(matches!(buffer, Buf::Mapped(_)));
            sender
                .send(Outgoing::new(buffer).copying(Copying::Never))
                .map_err(|refused| refused.why)
                .expect("a place");
            while let Some(returned) = sender.returned() {
                returned.outcome.expect("it was sent");
            }
        }
        assert!(sender.finish(Some(PATIENCE)).expect("the kernel answers"));
        // The writer has more than its credit to write: it gets on only because buffers go back.
        drop(writer.join().expect("the peer"));
        assert!(in_place > 0, "{backend:?}");
        assert_eq!(sender.stats().failed, 0, "{backend:?}");
        if backend != SendBackend::Copy {
            assert!(sender.stats().notified > 0, "{backend:?}");
        }
        drop(sender);
        let received = reader.join().expect("the contents");
        assert!(received == pattern(), "{backend:?}: other bytes arrived");
    }
}

#[test]
fn a_peers_buffer_is_returned_only_after_it_was_sent() {
    let (ours, theirs, _going) = connection();
    (&theirs).write_all(b"these bytes stay").expect("a packet");
    let lease = ours.recv().expect("a connection").expect("a packet");
    let buffer = lease
        .into_zc_buf()
        .map_err(|(error, _)| error)
        .expect("alive");
    // Whatever else the peer writes goes elsewhere, also when its other buffers have been in use
    // several times over.
    for _ in 0..5000 {
        (&theirs).write_all(&[b'x'; 100]).expect("a packet");
        let lease = ours.recv().expect("a connection").expect("a packet");
        assert_eq!(lease.len(), 100);
    }
    let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
    let socket = TcpStream::connect(listener.local_addr().expect("an address"));
    let mut sender: Sender = Sender::open(socket.expect("loopback")).expect("a sender");
    let outgoing = Outgoing::new(buffer).copying(Copying::Never);
    sender
        .send(outgoing)
        .map_err(|refused| refused.why)
        .expect("a place");
    assert!(sender.finish(Some(PATIENCE)).expect("the kernel answers"));
    drop(sender);
    let mut received = Vec::new();
    let mut far = listener.accept().expect("a stream").0;
    far.read_to_end(&mut received).expect("the bytes");
    assert_eq!(received, b"these bytes stay");
}

/// Memory that a peer waits for is not held for as long as a receiver likes.
#[test]
fn a_slow_receiver_holds_a_peers_memory_for_a_bounded_time() {
    for backend in [SendBackend::Uring, SendBackend::ErrorQueue] {
        let (ours, theirs, _going) = connection();
        ours.set_nonblocking(true).expect("a stream");
        theirs.set_nonblocking(true).expect("a stream");
        let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
        rustix::net::sockopt::set_socket_recv_buffer_size(&listener, 4096).expect("a socket");
        let socket = TcpStream::connect(listener.local_addr().expect("an address"));
        let _far = listener.accept().expect("a stream").0;
        let mut sender: Sender = Sender::builder()
            .backend(backend)
            .open(socket.expect("loopback"))
            .expect("a sender");
        // The peer writes as long as it can, and the far end does not read.
        let mut in_place = 0;
        let (bytes, begun) = ([7; 1 << 16], std::time::Instant::now());
        let mut waits = None;
        while waits.is_none_or(|since: std::time::Instant| since.elapsed() < 20 * MOMENT) {
            assert!(begun.elapsed() < PATIENCE, "{backend:?}: it is never full");
            match (&theirs).write(&bytes) {
                Ok(_) => waits = None,
                Err(_) => _ = waits.get_or_insert_with(std::time::Instant::now),
            }
            if let Ok(lease) = ours.recv() {
                let buffer = lease
                    .expect("more")
                    .into_zc_buf()
                    .map_err(|(error, _)| error);
                let buffer = buffer.expect("the peer lives");
                in_place += usize::from(matches!(buffer, Buf::Mapped(_)));
                let outgoing = Outgoing::new(buffer).copying(Copying::Never);
                let sent = sender.send(outgoing).map_err(|refused| refused.why);
                sent.expect("a place");
            }
            while sender.returned().is_some() {}
        }
        assert!(in_place > 0 && !sender.is_quiet(), "{backend:?}");
        let closed = sender.close(Some(10 * MOMENT));
        assert!(closed.reset, "{backend:?}");
        assert_eq!(closed.held, 0, "{backend:?}");
        drop(closed);
        let begun = std::time::Instant::now();
        while (&theirs).write(&bytes).is_err() {
            assert!(begun.elapsed() < PATIENCE, "{backend:?}");
            let _ = ours.recv();
            thread::yield_now();
        }
    }
}

/// A sender with a limit returns a peer's memory without a call of the program.
#[test]
fn a_limit_bounds_how_long_a_receiver_holds_a_peers_memory() {
    const LIMIT: Duration = Duration::from_millis(200);
    for backend in [SendBackend::Uring, SendBackend::ErrorQueue] {
        let (ours, theirs, _going) = connection();
        ours.set_nonblocking(true).expect("a stream");
        theirs.set_nonblocking(true).expect("a stream");
        let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
        rustix::net::sockopt::set_socket_recv_buffer_size(&listener, 4096).expect("a socket");
        let socket = TcpStream::connect(listener.local_addr().expect("an address"));
        let mut far = listener.accept().expect("a stream").0;
        let builder = Sender::builder().backend(backend).limit(LIMIT);
        let mut sender: Sender = builder.open(socket.expect("loopback")).expect("a sender");
        let begun = std::time::Instant::now();
        // The peer writes as long as the sender takes what it has written.
        let (mut in_place, mut late, mut out) = (0, 0, 0);
        let refused = loop {
            assert!(begun.elapsed() < PATIENCE, "{backend:?}: nothing is late");
            let _ = (&theirs).write(&[7; 1 << 16]);
            if let Ok(lease) = ours.recv() {
                let buffer = lease
                    .expect("more")
                    .into_zc_buf()
                    .map_err(|(error, _)| error);
                let buffer = buffer.expect("the peer lives");
                in_place += usize::from(matches!(buffer, Buf::Mapped(_)));
                let outgoing = Outgoing::new(buffer).copying(Copying::Never);
                match sender.send(outgoing) {
                    Ok(_) => out += 1,
                    Err(refused) => break refused.why,
                }
            }
            // For as long as it is told, unless the peer is to be looked at.
            let time = sender.next_timeout().unwrap_or(MOMENT).min(MOMENT);
            sender.wait(Some(time)).expect("the kernel answers");
            while let Some(back) = sender.returned() {
                out -= 1;
                late += u64::from(back.outcome.is_err());
            }
            if late > 0 {
                let refused = sender.send(Outgoing::new(vec![1u8]));
                break refused.expect_err("it is late").why;
            }
        };
        assert!(in_place > 0 && begun.elapsed() >= LIMIT, "{backend:?}");
        match refused {
            Refusal::Broken(error) => assert_eq!(error.raw_os_error(), Some(libc::ETIMEDOUT)),
            other => panic!("{backend:?}: {other}"),
        }
        assert!(sender.finish(Some(PATIENCE)).expect("the kernel answers"));
        while let Some(back) = sender.returned() {
            out -= 1;
            late += u64::from(back.outcome.is_err());
        }
        assert_eq!(out, 0, "{backend:?}");
        assert_eq!(sender.stats().timed_out, late, "{backend:?}");
        // The memory is the peer's again, while the sender is there.
        let begun = std::time::Instant::now();
        while (&theirs).write(&[7; 1 << 16]).is_err() {
            assert!(begun.elapsed() < PATIENCE, "{backend:?}");
            let _ = ours.recv();
            thread::yield_now();
        }
        let end = std::io::copy(&mut far, &mut std::io::sink()).map_err(|error| error.kind());
        assert_eq!(end, Err(ErrorKind::ConnectionReset), "{backend:?}");
        drop(sender);
    }
}
