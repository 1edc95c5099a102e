//! Senders with a time limit for sends: no buffer stays busy for longer, every waiting thread or
//! task is woken, and sends in time are not affected.

use std::io::Read;
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt;
use zerosock_zc::{
    CloseOutcome, Copying, Interest, Outgoing, Refusal, Returned, SendBackend, Sender,
    SenderBuilder,
};

use crate::asleep::spawn_waiter;
use crate::ends::{ALL, SENDS, pair, read_to_reset};
use crate::network::{BACKENDS, SINK, fill, tc, with_sink};

const PATIENCE: Duration = Duration::from_secs(300);
const LIMIT: Duration = Duration::from_millis(500);
const LEN: usize = ALL as usize / SENDS;

fn limited(backend: SendBackend) -> SenderBuilder {
    Sender::builder().backend(backend).limit(LIMIT)
}

/// A sender with the limit of more than the kernel takes, when the first of it was accepted, and the receiver.
fn stuck(backend: SendBackend) -> (Sender<Vec<u8>>, Instant, TcpStream) {
    let give_up = Instant::now() + PATIENCE;
    while Instant::now() < give_up {
        let (socket, far) = pair();
        let builder = limited(backend).capacity(SENDS as u32);
        let mut sender: Sender<Vec<u8>> = builder.open(socket).expect("a sender");
        let begun = Instant::now();
        for _ in 0..SENDS {
            let outgoing = Outgoing::new(vec![1; LEN]).copying(Copying::Never);
            let pushed = sender.push(outgoing).map_err(|refused| refused.why);
            pushed.expect("a place");
        }
        sender.submit().expect("the kernel answers");
        // A busy machine can take longer than the limit: then the sends are late already.
        if begun.elapsed() < LIMIT {
            assert!(!sender.is_quiet(), "{backend:?}");
            return (sender, begun, far);
        }
    }
    panic!("{backend:?}: the machine is too slow");
}

fn code(returned: &Returned<Vec<u8>>) -> Option<i32> {
    let failed = returned.outcome.as_ref().err()?;
    failed.error.raw_os_error()
}

fn assert_refused(why: &Refusal) {
    match why {
        Refusal::Broken(error) => assert_eq!(error.raw_os_error(), Some(libc::ETIMEDOUT)),
        other => panic!("{other}"),
    }
}

/// Every buffer is returned and counted; the stream is reset and accepts nothing.
fn assert_recalled(mut sender: Sender<Vec<u8>>, begun: Instant, far: TcpStream) {
    let backend = sender.report().backend;
    assert!(begun.elapsed() >= LIMIT, "{backend:?}");
    let back: Vec<_> = std::iter::from_fn(|| sender.returned()).collect();
    assert_eq!(back.len(), SENDS, "{backend:?}");
    let failed = back.iter().filter(|one| one.outcome.is_err()).count() as u64;
    let late = |one: &&Returned<Vec<u8>>| code(one) == Some(libc::ETIMEDOUT);
    assert_eq!(back.iter().filter(late).count() as u64, failed);
    let stats = sender.stats();
    assert_eq!((stats.accepted, stats.over), (SENDS as u64, SENDS as u64));
    assert_eq!((stats.failed, stats.timed_out), (failed, failed));
    assert!(failed > 0 && sender.next_timeout().is_none(), "{backend:?}");
    assert_eq!(stats.freed(), SENDS as u64, "{backend:?}: {stats}");
    // The peer does not read: zero-copy sends have not arrived, and are not reported as sent.
    assert!(backend == SendBackend::Copy || failed == SENDS as u64 || stats.copied_by_kernel > 0);
    let refused = sender.push(Outgoing::new(vec![1])).expect_err("it is late");
    assert_refused(&refused.why);
    let closed = sender.close(None);
    match &closed.outcome {
        CloseOutcome::Broken(error) => assert_eq!(error.raw_os_error(), Some(libc::ETIMEDOUT)),
        other => panic!("{other:?}"),
    }
    assert!(closed.reset && closed.held == 0, "{backend:?}");
    assert!(read_to_reset(far) < ALL, "{backend:?}");
}

#[test]
fn a_receiver_that_stops_is_reset_when_the_oldest_send_is_late() {
    for backend in BACKENDS {
        let (mut sender, begun, far) = stuck(backend);
        let left = sender.next_timeout().expect("there is a limit");
        assert!(left <= LIMIT, "{backend:?}");
        assert!(sender.finish(None).expect("the kernel answers"));
        assert_recalled(sender, begun, far);
    }
}

/// The kernel has taken all bytes, and the receiver has not acknowledged them: the sends fail.
#[test]
fn unacknowledged_buffers_are_returned_as_failed() {
    for backend in [SendBackend::Uring, SendBackend::ErrorQueue] {
        let (mut sender, far) = unread(limited(backend));
        assert_eq!(sender.stats().over, 1, "{backend:?}: the socket has room");
        sender.wait(None).expect("the kernel answers");
        let mut back = sender.returned();
        while back.is_none() {
            sender.wait(None).expect("the kernel answers");
            back = sender.returned();
        }
        assert_eq!(code(&back.expect("it")), Some(libc::ETIMEDOUT));
        let stats = sender.stats();
        assert_eq!((stats.failed, stats.timed_out, stats.over), (1, 1, 1));
        assert!(read_to_reset(far) < 100_000, "{backend:?}");
    }
}

/// No send is queued, and no thread waits.
#[test]
fn polling_after_next_timeout_returns_the_buffer() {
    for backend in [SendBackend::Uring, SendBackend::ErrorQueue] {
        let (mut sender, far) = unread(limited(backend));
        while let Some(time) = sender.next_timeout() {
            // The test waits for the time itself.
            thread::sleep(time);
            sender.poll().expect("the kernel answers");
        }
        assert_eq!(sender.stats().timed_out, 1, "{backend:?}");
        assert!(read_to_reset(far) < 100_000, "{backend:?}");
    }
}

/// A sender with no bytes left to submit, and a receiver that does not read them.
fn unread(builder: SenderBuilder) -> (Sender<Vec<u8>>, TcpStream) {
    let (mut sender, far) = small(builder);
    let outgoing = Outgoing::new(vec![1; 100_000]).copying(Copying::Never);
    let sent = sender.send(outgoing).map_err(|refused| refused.why);
    sent.expect("it is accepted");
    (sender, far)
}

/// A sender to a receiver with little room.
fn small<B: zerosock_zc::Stable>(builder: SenderBuilder) -> (Sender<B>, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
    sockopt::set_socket_recv_buffer_size(&listener, 4096).expect("a socket");
    let socket = TcpStream::connect(listener.local_addr().expect("it")).expect("loopback");
    sockopt::set_socket_send_buffer_size(&socket, 1 << 20).expect("a socket");
    let far = listener.accept().expect("a stream").0;
    (builder.open(socket).expect("a sender"), far)
}

#[test]
fn a_sender_without_a_limit_waits() {
    for backend in [SendBackend::Uring, SendBackend::ErrorQueue] {
        let (mut sender, far) = unread(Sender::builder().backend(backend));
        assert_eq!(sender.next_timeout(), None, "{backend:?}");
        assert!(!sender.finish(Some(2 * LIMIT)).expect("the kernel answers"));
        assert_eq!(sender.next_timeout(), None, "{backend:?}");
        let reader = thread::spawn(move || std::io::copy(&mut &far, &mut std::io::sink()));
        assert!(sender.finish(Some(PATIENCE)).expect("the kernel answers"));
        let back = sender.returned().expect("it");
        assert!(back.outcome.is_ok(), "{backend:?}");
        drop(sender);
        assert_eq!(reader.join().expect("it").expect("a stream"), 100_000);
    }
}

/// Sends that finished in time and are polled late were in time.
#[test]
fn a_late_poll_does_not_reset_sends_that_were_in_time() {
    for backend in BACKENDS {
        let (socket, mut far) = pair();
        let mut sender: Sender<Vec<u8>> = limited(backend).open(socket).expect("a sender");
        for _ in 0..50 {
            let outgoing = Outgoing::new(vec![1; 1000]).copying(Copying::Never);
            let sent = sender.send(outgoing).map_err(|refused| refused.why);
            sent.expect("it is accepted");
            far.read_exact(&mut [0; 1000]).expect("it arrives");
        }
        // The test waits for the time itself.
        thread::sleep(2 * LIMIT);
        sender.submit().expect("the kernel answers");
        let sent = sender.send(Outgoing::new(vec![1; 1000]));
        sent.map_err(|refused| refused.why).expect("it goes on");
        far.read_exact(&mut [0; 1000]).expect("it arrives");
        assert!(sender.finish(Some(PATIENCE)).expect("the kernel answers"));
        assert_eq!(sender.stats().failed, 0, "{backend:?}");
        assert!(sender.close(None).is_whole(), "{backend:?}");
    }
}

#[test]
fn a_slow_but_steady_reader_is_not_reset() {
    // Each send finishes within the limit; all of them together take longer.
    const LONG: Duration = Duration::from_secs(5);
    thread::scope(|scope| {
        for backend in BACKENDS {
            scope.spawn(move || {
                let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
                sockopt::set_socket_recv_buffer_size(&listener, 1 << 17).expect("a socket");
                let socket = TcpStream::connect(listener.local_addr().expect("it"));
                let socket = socket.expect("loopback");
                sockopt::set_socket_send_buffer_size(&socket, 1 << 17).expect("a socket");
                let mut far = listener.accept().expect("a stream").0;
                let reader = thread::spawn(move || {
                    let (mut at, mut bytes, mut wanted) = (0, [0; 1 << 14], [0; 1 << 14]);
                    loop {
                        let count = crate::streams::read(&mut far, &mut bytes)
                            .expect("it is not disturbed");
                        fill(&mut wanted[..count], at);
                        assert!(bytes[..count] == wanted[..count], "{backend:?}: {at}");
                        at += count as u64;
                        if count == 0 {
                            return at;
                        }
                        thread::sleep(Duration::from_millis(4));
                    }
                });
                let builder = Sender::builder().backend(backend).limit(LONG).capacity(4);
                let mut sender: Sender<Vec<u8>> = builder.open(socket).expect("a sender");
                let (begun, mut at) = (Instant::now(), 0);
                while begun.elapsed() < LONG * 3 / 2 {
                    let mut bytes = vec![0; 1 << 16];
                    fill(&mut bytes, at);
                    at += bytes.len() as u64;
                    let outgoing = Outgoing::new(bytes).copying(Copying::Never);
                    let sent = sender.send(outgoing).map_err(|refused| refused.why);
                    sent.expect("it is accepted");
                    while let Some(back) = sender.returned() {
                        back.outcome.expect("it was sent");
                    }
                }
                assert!(sender.finish(Some(PATIENCE)).expect("the kernel answers"));
                assert_eq!(sender.stats().failed, 0, "{backend:?}");
                assert!(sender.close(Some(PATIENCE)).is_whole(), "{backend:?}");
                assert_eq!(reader.join().expect("the contents"), at, "{backend:?}");
            });
        }
    });
}

#[test]
fn a_wait_for_a_place_ends_with_the_limit() {
    for backend in BACKENDS {
        let (mut sender, begun, far) = stuck(backend);
        let refused = loop {
            // There is no place at some time.
            match sender.send(Outgoing::new(vec![1; 1 << 17])) {
                Ok(_) => while sender.returned().is_some() {},
                Err(refused) => break refused,
            }
        };
        assert_refused(&refused.why);
        assert!(begun.elapsed() >= LIMIT, "{backend:?}");
        drop(sender);
        read_to_reset(far);
    }
}

/// An event loop that waits for `next_timeout`.
#[test]
fn next_timeout_is_the_time_until_the_next_poll() {
    for backend in BACKENDS {
        let (mut sender, begun, far) = stuck(backend);
        while !sender.is_quiet() {
            let wanted = match sender.interest() {
                Interest::Readable => PollFlags::IN,
                Interest::Error => PollFlags::empty(),
                Interest::WritableOrError => PollFlags::OUT,
            };
            let time = sender.next_timeout().unwrap_or(PATIENCE);
            let time = Timespec::try_from(time).expect("it fits");
            let mut descriptors = [PollFd::from_borrowed_fd(sender.as_fd(), wanted)];
            let found = poll(&mut descriptors, Some(&time)).expect("a descriptor");
            sender.poll().expect("the kernel answers");
            assert!(found > 0 || begun.elapsed() >= LIMIT, "{backend:?}");
            assert!(begun.elapsed() < PATIENCE, "{backend:?}");
        }
        assert_recalled(sender, begun, far);
    }
}

#[test]
fn the_limit_wakes_every_waiting_thread() {
    for backend in BACKENDS {
        let (sender, begun, far) = stuck(backend);
        let sender = sender.into_shared().expect("descriptors");
        thread::scope(|scope| {
            let waiting = [
                scope.spawn(|| sender.clone().finish(None).expect("an answer")),
                scope.spawn(|| sender.clone().finish(None).expect("an answer")),
                scope.spawn(|| {
                    let sender = sender.clone();
                    while !sender.is_quiet() {
                        sender.wait(None).expect("an answer");
                    }
                    true
                }),
            ];
            for waiting in waiting {
                assert!(waiting.join().expect("a thread"), "{backend:?}");
            }
        });
        let sender = sender.into_inner().map_err(drop).expect("the last");
        assert_recalled(sender, begun, far);
    }
}

/// The descriptor becomes readable without another thread.
#[test]
fn the_limit_wakes_an_event_loop_beside_threads() {
    for backend in BACKENDS {
        let (sender, begun, far) = stuck(backend);
        let sender = sender.into_shared().expect("descriptors");
        while !sender.is_quiet() {
            let events = sender.events().expect("descriptors");
            let time = Timespec::try_from(PATIENCE).expect("it fits");
            // Clears the event that `events` itself causes.
            sender.poll().expect("the kernel answers");
            if sender.is_quiet() {
                break;
            }
            let mut descriptors = [PollFd::from_borrowed_fd(events, PollFlags::IN)];
            let found = poll(&mut descriptors, Some(&time)).expect("a descriptor");
            assert!(found > 0, "{backend:?}");
        }
        let sender = sender.into_inner().map_err(drop).expect("the last");
        assert_recalled(sender, begun, far);
    }
}

#[cfg(feature = "tokio")]
#[test]
fn the_limit_wakes_a_waiting_task() {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    // It needs no timers of the runtime's.
    let runtime = builder.enable_io().build().expect("a runtime");
    for backend in BACKENDS {
        let (sender, begun, far) = stuck(backend);
        let sender = runtime.block_on(async {
            let mut sender = zerosock_zc::tokio::AsyncSender::try_from(sender).expect("it");
            sender.finish().await.expect("the kernel answers");
            sender.into_inner()
        });
        assert_recalled(sender, begun, far);
    }
}

/// Buffers of a sender that was dropped after the kernel had taken all bytes.
#[test]
fn the_limit_holds_after_the_sender_is_dropped() {
    for backend in [SendBackend::Uring, SendBackend::ErrorQueue] {
        let (mut sender, far) = small(limited(backend));
        let bytes: Arc<[u8]> = vec![1; 100_000].into();
        let begun = Instant::now();
        let outgoing: Outgoing = Outgoing::new(Arc::clone(&bytes)).copying(Copying::Never);
        let sent = sender.send(outgoing).map_err(|refused| refused.why);
        sent.expect("it is accepted");
        assert_eq!(sender.stats().over, 1, "{backend:?}: the socket has room");
        drop(sender);
        while Arc::strong_count(&bytes) > 1 {
            assert!(begun.elapsed() < PATIENCE, "{backend:?}: it is held yet");
            thread::sleep(Duration::from_millis(1));
        }
        assert!(begun.elapsed() >= LIMIT, "{backend:?}");
        assert!(read_to_reset(far) < 100_000, "{backend:?}");
    }
}

/// Datagrams that the kernel has taken, and of which a device has let the first pass.
const TAKEN: u8 = 5;
/// The later datagrams, for which the socket has no room.
const LEFT: u8 = 10;

/// A sender of datagrams to the sink that the kernel takes no more from.
fn full(backend: SendBackend) -> Sender<Vec<u8>> {
    tc("qdisc replace dev sink0 root tbf rate 8bit burst 3000 limit 100000");
    let socket = UdpSocket::bind("0.0.0.0:0").expect("an address");
    socket.connect(SINK[0]).expect("a route");
    let mut sender: Sender<Vec<u8>> = limited(backend).open(socket).expect("a sender");
    for mark in 0..TAKEN {
        sender
            .send(datagram(mark))
            .map_err(|refused| refused.why)
            .expect("a place");
    }
    sender.poll().expect("the kernel answers");
    assert_eq!(sender.stats().over, u64::from(TAKEN), "{backend:?}");
    sockopt::set_socket_send_buffer_size(sender.socket(), 0).expect("a socket");
    sender
}

fn datagram(mark: u8) -> Outgoing<Vec<u8>> {
    Outgoing::new(vec![mark; 2500]).copying(Copying::Never)
}

/// The returned buffers, and the error of each.
fn back(sender: &mut Sender<Vec<u8>>) -> Vec<(u8, Option<i32>)> {
    std::iter::from_fn(|| sender.returned())
        .map(|one| (one.buffer[0], code(&one)))
        .collect()
}

#[test]
fn the_limit_cancels_datagrams_that_were_not_taken() {
    with_sink("datagrams_that_are_not_taken_in_time", || {
        for backend in BACKENDS {
            let mut sender = full(backend);
            let mut passed = back(&mut sender);
            assert!(sender.next_timeout().is_none(), "{backend:?}: none counts");
            let begun = Instant::now();
            for mark in 0..LEFT {
                let sent = sender.send(datagram(TAKEN + mark));
                sent.map_err(|refused| refused.why).expect("a place");
            }
            assert!(sender.next_timeout().is_some(), "{backend:?}");
            while sender.stats().over < u64::from(TAKEN + LEFT) {
                sender.wait(None).expect("the kernel answers");
                assert!(begun.elapsed() < PATIENCE, "{backend:?}");
            }
            assert!(begun.elapsed() >= LIMIT, "{backend:?}");
            let late = |mark| (TAKEN + mark, Some(libc::ETIMEDOUT));
            let mut found = back(&mut sender);
            // They fail in any order over a ring.
            found.sort_unstable();
            assert_eq!(found, (0..LEFT).map(late).collect::<Vec<_>>());
            assert_eq!(sender.stats().timed_out, u64::from(LEFT), "{backend:?}");
            // The device keeps its buffers, and `next_timeout` does not ask for repeated polls.
            let holds = backend != SendBackend::Copy;
            assert_eq!(!sender.is_quiet(), holds, "{backend:?}");
            assert!(sender.next_timeout().is_none(), "{backend:?}");
            tc("qdisc del dev sink0 root");
            assert!(sender.finish(Some(PATIENCE)).expect("the kernel answers"));
            passed.extend(back(&mut sender));
            passed.sort_unstable();
            assert_eq!(
                passed,
                (0..TAKEN).map(|mark| (mark, None)).collect::<Vec<_>>()
            );
            // It goes on.
            let sent = sender.send(datagram(99));
            sent.map_err(|refused| refused.why).expect("a place");
            assert!(sender.finish(Some(PATIENCE)).expect("the kernel answers"));
            assert_eq!(back(&mut sender), [(99, None)], "{backend:?}");
        }
    });
}

/// No send was under way when the thread began to wait.
#[test]
fn a_waiting_thread_observes_the_limit_of_later_sends() {
    with_sink("a_thread_that_sleeps_hears_of_what", || {
        for backend in [SendBackend::Uring, SendBackend::ErrorQueue] {
            let mut sender = full(backend);
            back(&mut sender);
            let sender = sender.into_shared().expect("descriptors");
            thread::scope(|scope| {
                let waiting = spawn_waiter(scope, &sender);
                let sent = sender.send(datagram(TAKEN));
                sent.map_err(|refused| refused.why).expect("a place");
                assert_eq!(code(&waiting.join().expect("it")), Some(libc::ETIMEDOUT));
            });
            tc("qdisc del dev sink0 root");
            assert!(sender.finish(Some(PATIENCE)).expect("the kernel answers"));
        }
    });
}
