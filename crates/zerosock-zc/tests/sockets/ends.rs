//! Closing a sender, as its peer sees it: all of a stream and then end of file, or an error where
//! the rest is missing; and what the application gets back.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::net::sockopt;
use zerosock_zc::{CloseOutcome, Closed, Copying, KeepReason, Outgoing, SendBackend, Sender};

use crate::network::{BACKENDS, fill};
use crate::streams::check;

const PATIENCE: Duration = Duration::from_secs(300);
/// Long enough for a loopback to have moved what it can.
const MOMENT: Duration = Duration::from_millis(50);
pub(crate) const SENDS: usize = 64;
const LEN: usize = 1 << 17;
/// More bytes than a socket and a peer that does not read can hold.
pub(crate) const ALL: u64 = (SENDS * LEN) as u64;

pub(crate) fn pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
    let socket = TcpStream::connect(listener.local_addr().expect("an address"));
    let far = listener.accept().expect("a stream").0;
    (socket.expect("loopback"), far)
}

/// A sender of `ALL` bytes, of which the kernel has what it takes.
pub(crate) fn with_much(
    socket: TcpStream,
    backend: SendBackend,
    copying: Copying,
) -> Sender<Vec<u8>> {
    let builder = Sender::builder().backend(backend).capacity(SENDS as u32);
    let mut sender: Sender<Vec<u8>> = builder.open(socket).expect("a sender");
    for index in 0..SENDS {
        let mut bytes = vec![0; LEN];
        fill(&mut bytes, (index * LEN) as u64);
        let outgoing = Outgoing::new(bytes).slot(0).copying(copying);
        let pushed = sender.push(outgoing).map_err(|refused| refused.why);
        pushed.expect("a place");
    }
    sender.submit().expect("the kernel answers");
    assert!(!sender.is_quiet());
    sender
}

/// Reads until the stream is reset. Returns the number of bytes read before.
pub(crate) fn read_to_reset(mut far: TcpStream) -> u64 {
    far.set_read_timeout(Some(PATIENCE)).expect("a socket");
    let (mut bytes, mut count) = (vec![0; 1 << 16], 0);
    loop {
        match crate::streams::read(&mut far, &mut bytes) {
            Ok(0) => panic!("the end, after {count} bytes"),
            Ok(read) => count += read as u64,
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{error}");
                return count;
            }
        }
    }
}

fn assert_timed_out(closed: &Closed<Vec<u8>>, backend: SendBackend) {
    assert!(
        matches!(closed.outcome, CloseOutcome::TimedOut),
        "{backend:?}"
    );
    assert!(closed.reset && !closed.is_whole(), "{backend:?}");
}

#[test]
fn a_stream_dropped_halfway_is_reset() {
    for backend in BACKENDS {
        for copying in [Copying::Never, Copying::Always] {
            let (socket, far) = pair();
            // Another descriptor of the socket does not delay the end of the connection.
            let other = socket.try_clone().expect("a descriptor");
            drop(with_much(socket, backend, copying));
            assert!(read_to_reset(far) < ALL, "{backend:?}");
            drop(other);
        }
    }
}

#[test]
fn a_stream_that_was_cancelled_is_reset() {
    for backend in BACKENDS {
        for close in [false, true] {
            let (socket, far) = pair();
            let mut sender = with_much(socket, backend, Copying::Never);
            sender.cancel().expect("the kernel answers");
            if close {
                let closed = sender.close(Some(PATIENCE));
                let found = match &closed.outcome {
                    CloseOutcome::Broken(error) => error.raw_os_error(),
                    other => panic!("{backend:?}: {other:?}"),
                };
                assert_eq!(found, Some(libc::ECANCELED), "{backend:?}");
                assert!(closed.reset, "{backend:?}");
                assert_eq!(closed.returned.len() + closed.held, SENDS, "{backend:?}");
            } else {
                drop(sender);
            }
            assert!(read_to_reset(far) < ALL, "{backend:?}");
        }
    }
}

#[test]
fn a_stream_that_is_closed_is_whole() {
    for backend in BACKENDS {
        let (socket, far) = pair();
        // Another descriptor of the socket does not delay the end of the connection.
        let other = socket.try_clone().expect("a descriptor");
        let sender = with_much(socket, backend, Copying::Never);
        let reader = std::thread::spawn(move || check(far));
        let closed = sender.close(Some(PATIENCE));
        assert!(closed.is_whole() && !closed.reset, "{backend:?}");
        assert_eq!((closed.returned.len(), closed.held), (SENDS, 0));
        assert!(closed.returned.iter().all(|one| one.outcome.is_ok()));
        assert_eq!(closed.notifications.len(), 1, "{backend:?}");
        assert_eq!(reader.join().expect("the contents"), ALL, "{backend:?}");
        drop(other);
    }
}

#[test]
fn a_stream_is_reset_when_the_close_times_out() {
    for backend in BACKENDS {
        for time in [MOMENT, Duration::ZERO] {
            let (socket, far) = pair();
            let begun = Instant::now();
            let closed = with_much(socket, backend, Copying::Never).close(Some(time));
            assert!(begun.elapsed() >= time, "{backend:?}");
            assert_timed_out(&closed, backend);
            assert_eq!(closed.returned.len() + closed.held, SENDS, "{backend:?}");
            let failed = closed
                .returned
                .iter()
                .filter_map(|one| one.outcome.as_ref().err());
            let codes: Vec<_> = failed.map(|failed| failed.error.raw_os_error()).collect();
            assert!(!codes.is_empty(), "{backend:?}");
            assert!(
                codes.iter().all(|code| *code == Some(libc::ECANCELED)),
                "{codes:?}"
            );
            assert!(read_to_reset(far) < ALL, "{backend:?}");
        }
    }
}

/// The kernel has taken all of it, but the receiver has not: what the sender holds is another's.
#[test]
fn buffers_of_a_slow_receiver_are_free_after_the_timeout() {
    for backend in [SendBackend::Uring, SendBackend::ErrorQueue] {
        let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
        sockopt::set_socket_recv_buffer_size(&listener, 4096).expect("a socket");
        let socket = TcpStream::connect(listener.local_addr().expect("it")).expect("loopback");
        sockopt::set_socket_send_buffer_size(&socket, 1 << 20).expect("a socket");
        let far = listener.accept().expect("a stream").0;
        let builder = Sender::builder().backend(backend);
        let mut sender: Sender<Vec<u8>> = builder.open(socket).expect("a sender");
        let outgoing = Outgoing::new(vec![1; 100_000]).copying(Copying::Never);
        let sent = sender.send(outgoing).map_err(|refused| refused.why);
        sent.expect("it is accepted");
        assert_eq!(sender.stats().over, 1, "{backend:?}: the socket has room");
        assert!(!sender.finish(Some(MOMENT)).expect("the kernel answers"));
        let closed = sender.close(Some(MOMENT));
        assert_timed_out(&closed, backend);
        assert_eq!((closed.returned.len(), closed.held), (1, 0), "{backend:?}");
        assert!(read_to_reset(far) < 100_000, "{backend:?}");
    }
}

#[test]
fn closing_a_stream_without_reset_reports_that() {
    let (near, mut far) = UnixStream::pair().expect("a pair");
    let mut sender: Sender<Vec<u8>> = Sender::builder().open(near).expect("a sender");
    for _ in 0..16 {
        let pushed = sender.push(Outgoing::new(vec![1; LEN]));
        pushed.map_err(|refused| refused.why).expect("a place");
    }
    let closed = sender.close(Some(Duration::ZERO));
    assert_eq!(closed.returned.len(), 16);
    assert!(matches!(closed.outcome, CloseOutcome::TimedOut) && !closed.reset);
    let mut read = Vec::new();
    far.read_to_end(&mut read).expect("the end");
    assert!(read.len() < 16 * LEN);
}

#[test]
fn closing_cancels_datagrams_that_were_not_taken() {
    for backend in BACKENDS {
        let receiver = UdpSocket::bind("127.0.0.1:0").expect("loopback");
        let socket = UdpSocket::bind("127.0.0.1:0").expect("loopback");
        socket
            .connect(receiver.local_addr().expect("it"))
            .expect("loopback");
        let builder = Sender::builder().backend(backend);
        let mut sender: Sender<Vec<u8>> = builder.open(socket).expect("a sender");
        let pushed = sender.push(Outgoing::new(vec![1; 100]));
        pushed.map_err(|refused| refused.why).expect("a place");
        let closed = sender.close(Some(PATIENCE));
        assert!(closed.is_whole() && !closed.reset, "{backend:?}");
        receiver.set_read_timeout(Some(PATIENCE)).expect("a socket");
        assert_eq!(receiver.recv(&mut [0; 200]).expect("a datagram"), 100);
    }
}

#[test]
fn into_socket_returns_the_socket_of_an_idle_sender() {
    for backend in BACKENDS {
        let (socket, far) = pair();
        let sender = with_much(socket, backend, Copying::Never);
        let kept = sender.into_socket().expect_err("it has much to send");
        assert!(matches!(kept.why, KeepReason::Busy), "{backend:?}");
        let mut sender = *kept.sender;
        let reader = std::thread::spawn(move || check(far));
        assert!(sender.finish(Some(PATIENCE)).expect("the kernel answers"));
        let mut socket = TcpStream::from(sender.into_socket().expect("it is quiet"));
        let mut bytes = vec![0; 5000];
        fill(&mut bytes, ALL);
        socket.write_all(&bytes).expect("the stream goes on");
        drop(socket);
        assert_eq!(
            reader.join().expect("the contents"),
            ALL + 5000,
            "{backend:?}"
        );
    }
}

#[test]
fn a_broken_stream_keeps_its_socket() {
    let (socket, far) = pair();
    let mut sender = with_much(socket, SendBackend::Copy, Copying::Never);
    sender.cancel().expect("the kernel answers");
    let kept = sender.into_socket().expect_err("there is a gap");
    assert!(matches!(kept.why, KeepReason::Broken(_)));
    drop(kept);
    assert!(read_to_reset(far) < ALL);
}

#[test]
fn closing_ends_the_connection_at_once() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
    let took = (0..20).map(|_| {
        let socket = TcpStream::connect(listener.local_addr().expect("it")).expect("loopback");
        let mut peer = listener.accept().expect("a stream").0;
        let builder = Sender::builder().backend(SendBackend::Uring);
        let mut sender: Sender<Vec<u8>> = builder.open(socket).expect("a sender");
        let outgoing = Outgoing::new(vec![1; 5000]).copying(Copying::Never);
        let sent = sender.send(outgoing).map_err(|refused| refused.why);
        sent.expect("it is accepted");
        assert!(sender.finish(Some(Duration::from_secs(60))).expect("it"));
        drop(sender);
        let begun = Instant::now();
        let mut bytes = Vec::new();
        peer.read_to_end(&mut bytes).expect("the end");
        assert_eq!(bytes, [1; 5000]);
        begun.elapsed()
    });
    // The kernel takes rings apart later, which is some 20 ms; a busy machine can be slow, too.
    let best = took.min().expect("some");
    assert!(best < Duration::from_millis(10), "{best:?}");
}
