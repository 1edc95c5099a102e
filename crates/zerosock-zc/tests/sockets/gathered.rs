//! Waiting sends of a stream form one request, and each of them is reported separately.

use std::io::{ErrorKind, Read};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, Sender as Teller, channel};
use std::time::{Duration, Instant};

use rustix::net::sockopt::{set_socket_recv_buffer_size, set_socket_send_buffer_size};
use zerosock_zc::{
    Completion, Copying, Outgoing, Pool, PoolBuf, Returned, SendBackend, Sender, Sent,
};

use crate::network::{BACKENDS, CABLE, accept, byte, fill, with_cable};
use crate::streams::check;

const PATIENCE: Duration = Duration::from_secs(300);

/// The bytes of the stream from `at` on.
fn part(at: &mut u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    fill(&mut bytes, *at);
    *at += len as u64;
    bytes
}

fn push(sender: &mut Sender<Vec<u8>>, bytes: Vec<u8>, copying: Copying) {
    let pushed = sender.push(Outgoing::new(bytes).copying(copying));
    pushed.map_err(|refused| refused.why).expect("a place");
}

/// A sender near, and a far end that has its stream.
fn over_cable(
    name: &str,
    backend: SendBackend,
    near: impl FnOnce(TcpStream) -> u64 + Send,
    far: impl FnOnce(TcpStream) -> u64 + Send,
) {
    let (told, address) = channel::<SocketAddr>();
    let lengths = with_cable(
        name,
        move || {
            let address = address.recv().expect("the far end");
            near(TcpStream::connect(address).expect("a route"))
        },
        move || {
            let listener = TcpListener::bind(CABLE[0][1]).expect("an address");
            // The socket takes few bytes while the peer does not read.
            set_socket_recv_buffer_size(&listener, 1 << 17).expect("a socket");
            told.send(listener.local_addr().expect("an address"))
                .expect("the near end");
            far(accept(&listener))
        },
    );
    if let Some((sent, received)) = lengths {
        assert_eq!(sent, received, "{backend:?}");
    }
}

fn open(backend: SendBackend, socket: TcpStream) -> Sender<Vec<u8>> {
    let builder = Sender::builder().backend(backend).inline_completions();
    builder.capacity(512).open(socket).expect("a sender")
}

#[test]
fn waiting_sends_become_one_request_and_each_is_reported() {
    for backend in BACKENDS {
        let near = |socket| {
            let mut sender = open(backend, socket);
            let mut at = 0;
            for turn in 0..32 {
                let bytes = part(&mut at, 500 + 40 * turn);
                push(&mut sender, bytes, Copying::Never);
            }
            sender.submit().expect("the kernel answers");
            assert_eq!(sender.stats().requests, 1, "{backend:?}");
            // Two that lie between others are a request of their own: they go another way.
            let modes = [Copying::Never, Copying::Always, Copying::Never];
            for turn in 0..6 {
                push(&mut sender, part(&mut at, 2000), modes[turn / 2]);
            }
            // A send above the limit of a gathered request, or that does not fit, is one of its
            // own.
            for len in [200_000, 80_000, 60_000] {
                push(&mut sender, part(&mut at, len), Copying::Never);
            }
            assert!(sender.finish(Some(PATIENCE)).expect("the kernel answers"));
            let expected = match backend {
                SendBackend::Copy => 1 + 2 + 2,
                _ => 1 + 3 + 3,
            };
            if backend == SendBackend::Uring {
                assert_eq!(sender.stats().requests, expected, "{backend:?}");
            } else {
                // A call that does not wait can take a part.
                assert!(sender.stats().requests >= expected, "{backend:?}");
            }
            let all: Vec<Returned<Vec<u8>>> = std::iter::from_fn(|| sender.returned()).collect();
            assert_eq!(all.len(), 41);
            let mut numbers: Vec<_> = all.iter().filter_map(|one| one.number).collect();
            numbers.sort_unstable();
            assert!(numbers.into_iter().eq(0..39));
            let in_place = (all.iter())
                .filter(|one| matches!(one.outcome, Ok(Sent::InPlace)))
                .count();
            let copied = all.iter().filter(|one| one.outcome.is_ok()).count() - in_place;
            let stats = sender.stats();
            assert_eq!(copied as u64, 41 - stats.in_place);
            let mut room = [Completion::default(); 16];
            let told = sender.completions(&mut room).expect("the kernel answers");
            let over: u32 = room[..told].iter().map(|range| range.count()).sum();
            assert_eq!(over, 39);
            at
        };
        over_cable("what_waits_together_is_one_request", backend, near, check);
    }
}

/// A socket that takes few bytes at a time takes requests in part; the stream continues after that
/// part.
#[test]
fn a_request_taken_in_part_continues_after_that_part() {
    for backend in BACKENDS {
        let near = |socket: TcpStream| {
            set_socket_send_buffer_size(&socket, 20_000).expect("a socket");
            let mut sender = open(backend, socket);
            let (mut at, mut back, mut turn) = (0, 0, 0);
            while back < 3000 {
                while turn < 3000 && sender.room() > 0 {
                    let len = 1 + turn * 7919 % 5000;
                    let mode = match turn / 50 % 3 {
                        0 => Copying::Always,
                        _ => Copying::Never,
                    };
                    push(&mut sender, part(&mut at, len), mode);
                    turn += 1;
                }
                sender.wait(Some(PATIENCE)).expect("the kernel answers");
                while let Some(mut returned) = sender.returned() {
                    returned.outcome.expect("it was sent");
                    // The receiver must not see bytes that are written now.
                    returned.buffer.fill(0xee);
                    back += 1;
                }
            }
            let stats = sender.stats();
            assert!(stats.requests < stats.over, "{backend:?}: {stats:?}");
            assert_eq!((stats.failed, stats.bytes), (0, at), "{backend:?}");
            at
        };
        over_cable("what_is_cut_short_goes_on", backend, near, check);
    }
}

/// The kernel has taken some sends of a request, perhaps one in part, and none of the others: each
/// reports its bytes, and the peer reads exactly those.
#[test]
fn cancelled_sends_report_the_bytes_taken() {
    for backend in BACKENDS {
        let (tell, told) = channel::<()>();
        let (count, counted) = channel::<u64>();
        let (have, had) = channel::<()>();
        let near = move |socket: TcpStream| {
            set_socket_send_buffer_size(&socket, 20_000).expect("a socket");
            let mut sender = open(backend, socket);
            let mut at = 0;
            for _ in 0..512 {
                push(&mut sender, part(&mut at, 3000), Copying::Never);
            }
            sender.submit().expect("the kernel answers");
            let until = Instant::now() + PATIENCE;
            while sender.stats().over == 0 {
                assert!(Instant::now() < until, "{backend:?}: nothing is taken");
                sender.wait(Some(PATIENCE)).expect("the kernel answers");
            }
            sender.cancel().expect("the kernel answers");
            let until = Instant::now() + PATIENCE;
            let (mut sent, mut back) = (0, Vec::new());
            tell.send(()).expect("the far end");
            while back.len() < 512 {
                assert!(Instant::now() < until, "{backend:?}: a buffer is missing");
                sender.wait(Some(PATIENCE)).expect("the kernel answers");
                back.extend(std::iter::from_fn(|| sender.returned()));
            }
            back.sort_by_key(|one| one.number);
            let mut ended = false;
            for (number, one) in (0..).zip(&back) {
                assert_eq!(one.number, Some(number));
                let took = match &one.outcome {
                    Ok(_) => 3000,
                    Err(failed) => failed.sent as u64,
                };
                assert!(!ended || took == 0, "{backend:?}: {number} is behind a gap");
                ended |= took < 3000;
                sent += took;
            }
            assert!(ended, "{backend:?}: everything was taken");
            // Submitted bytes arrive; a stream with dropped bytes is reset.
            count.send(sent).expect("the far end");
            had.recv().expect("the far end");
            sent
        };
        let far = move |mut stream: TcpStream| {
            // The peer does not read before the sender has cancelled.
            told.recv().expect("the near end");
            // The sender learns how much was sent when the peer has read it.
            let moment = Some(Duration::from_millis(10));
            stream.set_read_timeout(moment).expect("a socket");
            let until = Instant::now() + PATIENCE;
            let (mut bytes, mut at, mut sent) = (vec![0; 1 << 16], 0, None);
            while sent.is_none_or(|sent| at < sent) {
                sent = sent.or_else(|| counted.try_recv().ok());
                match crate::streams::read(&mut stream, &mut bytes) {
                    Ok(count @ 1..) => {
                        for (offset, &found) in (at..).zip(&bytes[..count]) {
                            assert_eq!(found, byte(offset), "at {offset}");
                        }
                        at += count as u64;
                    }
                    Err(error) if error.kind() == ErrorKind::WouldBlock => {
                        assert!(Instant::now() < until, "{at} bytes of {sent:?}");
                    }
                    other => panic!("{at} bytes of {sent:?}, and then {other:?}"),
                }
            }
            have.send(()).expect("the near end");
            stream.set_read_timeout(Some(PATIENCE)).expect("a socket");
            while let Ok(count @ 1..) = crate::streams::read(&mut stream, &mut bytes) {
                at += count as u64;
            }
            at
        };
        over_cable("what_is_cancelled_says_how_much", backend, near, far);
    }
}

/// Sends until the window of the peer is full, and waits for the buffers of acknowledged bytes.
fn goes_on(backend: SendBackend, one_by_one: bool, socket: TcpStream, go_on: &Teller<()>) -> u64 {
    set_socket_send_buffer_size(&socket, 1 << 22).expect("a socket");
    let mut sender = open(backend, socket);
    let mut at = 0;
    for _ in 0..500 {
        push(&mut sender, part(&mut at, 4000), Copying::Never);
        if one_by_one {
            sender.submit().expect("the kernel answers");
        }
    }
    let until = Instant::now() + PATIENCE;
    let mut back = 0;
    while back < 20 {
        assert!(
            Instant::now() < until,
            "{backend:?}: what was read long ago is held by what is to be sent"
        );
        sender.wait(Some(PATIENCE)).expect("the kernel answers");
        back += std::iter::from_fn(|| sender.returned()).count();
    }
    assert!(back < 500, "{backend:?}: the peer has taken everything");
    go_on.send(()).expect("the far end");
    assert!(sender.finish(Some(PATIENCE)).expect("the kernel answers"));
    at
}

fn reads_late(mut stream: TcpStream, go_on: &Receiver<()>) -> u64 {
    // Over the error queue half a megabyte is one notification's, over the ring a quarter.
    let mut bytes = vec![0; 1_000_000];
    stream.read_exact(&mut bytes).expect("the stream goes on");
    go_on.recv().expect("the near end");
    1_000_000 + std::io::copy(&mut stream, &mut std::io::sink()).expect("the stream goes on")
}

/// The kernel ties the notifications of sends together that share a packet.
#[test]
fn buffers_are_returned_while_the_stream_continues() {
    for backend in [SendBackend::Uring, SendBackend::ErrorQueue] {
        for one_by_one in [false, true] {
            let (tell, told) = channel();
            over_cable(
                "a_buffer_comes_back_while_there_is_more",
                backend,
                move |socket| goes_on(backend, one_by_one, socket, &tell),
                move |stream| reads_late(stream, &told),
            );
        }
    }
}

/// An application that only submits, and never polls nor waits, finds free places, also with few
/// requests.
#[test]
fn submitting_alone_frees_slots_of_completed_sends() {
    for (backend, capacity) in [
        (SendBackend::Uring, 64),
        (SendBackend::ErrorQueue, 64),
        (SendBackend::ErrorQueue, 3),
        (SendBackend::Copy, 64),
    ] {
        let near = |socket| {
            let builder = Sender::builder().backend(backend).capacity(capacity);
            let mut sender: Sender<Vec<u8>> = builder.open(socket).expect("a sender");
            let until = Instant::now() + PATIENCE;
            let (mut at, mut pushed, mut back) = (0, 0, 0);
            while pushed < 500 {
                while pushed < 500 && sender.room() > 0 {
                    push(&mut sender, part(&mut at, 3000), Copying::Never);
                    pushed += 1;
                }
                sender.submit().expect("the kernel answers");
                back += std::iter::from_fn(|| sender.returned()).count();
                assert!(Instant::now() < until, "{backend:?}: {back} are back");
            }
            assert!(sender.finish(Some(PATIENCE)).expect("the kernel answers"));
            back += std::iter::from_fn(|| sender.returned()).count();
            assert_eq!(back, 500, "{backend:?}");
            at
        };
        over_cable(
            "submitting_alone_frees_slots_of_completed_sends",
            backend,
            near,
            check,
        );
    }
}

/// Blocks of a pool are sent from registered memory: together where the kernel knows how (Linux
/// 6.15), one by one before, and those of another pool by themselves.
#[test]
fn blocks_of_a_pool_are_sent_from_registered_memory() {
    let near = |socket| {
        let builder = Sender::builder().backend(SendBackend::Uring).capacity(64);
        let mut sender: Sender<PoolBuf> = builder.open(socket).expect("a sender");
        let pools = [(); 2].map(|()| Pool::new(8, 2000).expect("memory"));
        let mut at = 0;
        for _ in 0..8 {
            for pool in &pools {
                for _ in 0..4 {
                    let mut block = pool.loan().expect("a block");
                    block.set_range(0, 2000).expect("within");
                    fill(&mut block, at);
                    at += 2000;
                    let pushed = sender.push(Outgoing::new(block).copying(Copying::Never));
                    pushed.map_err(|refused| refused.why).expect("a place");
                }
                sender.submit().expect("the kernel answers");
            }
            assert!(sender.finish(Some(PATIENCE)).expect("the kernel answers"));
            for returned in std::iter::from_fn(|| sender.returned()) {
                returned.outcome.expect("it was sent");
            }
        }
        let stats = sender.stats();
        assert_eq!(stats.registered, stats.requests, "{stats:?}");
        at
    };
    over_cable("blocks_of_a_pool", SendBackend::Uring, near, check);
}
