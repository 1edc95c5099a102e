//! Decisions of a send queue that no test over a socket can cause.

use std::io::Read;
use std::net::{TcpListener, TcpStream, UdpSocket};

use super::super::stats::CopyReason;
use super::*;

/// A queue of datagrams that are copied.
fn copying_queue() -> SendQueue<Vec<u8>> {
    queue_over(SendBackend::Copy)
}

fn queue_over(backend: SendBackend) -> SendQueue<Vec<u8>> {
    let socket = UdpSocket::bind("127.0.0.1:0").expect("loopback");
    let address = socket.local_addr().expect("an address");
    socket.connect(address).expect("loopback");
    let opened = ZcSocket::open(socket.into(), 8, Some(backend));
    let policy = Policy::new(backend, 10_000);
    SendQueue::new(opened.expect("a zc_socket"), 8, Slots::new([0]), policy)
}

#[test]
fn retries_keep_the_order_of_acceptance() {
    let mut queue = copying_queue();
    // Places are used again: their order is not that of the sends.
    for _ in 0..3 {
        assert!(queue.accept(Outgoing::new(vec![1; 100])).is_ok());
    }
    queue.submit().expect("the kernel answers");
    for _ in 0..5 {
        assert!(queue.accept(Outgoing::new(vec![1; 100])).is_ok());
    }
    let accepted: Vec<Key> = queue.queued.drain(..).collect();
    for answered in [4, 0, 2, 1, 3] {
        queue.queue_retry(accepted[answered]);
    }
    assert_eq!(Vec::from(queue.retries.clone()), accepted);
}

/// The result of a request that another thread submitted follows after `cancel`.
#[test]
fn a_result_after_a_cancellation_fails_the_send() {
    for code in [CANCELLED, rustix::io::Errno::AGAIN.raw_os_error()] {
        let mut queue = copying_queue();
        assert!(queue.accept(Outgoing::new(vec![1; 100])).is_ok());
        let key = queue.queued.pop_front().expect("it was accepted");
        queue.sends[key.index()].started = true;
        queue.open = 1;
        queue.cancel().expect("the kernel answers");
        queue.open = 0;
        queue.handle_error(key, code);
        let failed = queue.free.pop_front().expect("it is over").outcome;
        let error = failed.expect_err("it was cancelled").error;
        assert_eq!(error.raw_os_error(), Some(CANCELLED));
        // The next send is not cancelled.
        assert!(queue.accept(Outgoing::new(vec![1; 100])).is_ok());
        queue.submit().expect("the kernel answers");
        assert!(queue.free.pop_front().expect("it is over").outcome.is_ok());
    }
}

#[test]
fn a_send_does_not_wait_for_memory_when_no_event_is_pending() {
    let mut queue = copying_queue();
    queue.starved = true;
    assert!(queue.accept(Outgoing::new(vec![1; 100])).is_ok());
    queue.submit().expect("the kernel answers");
    assert!(queue.is_quiet());
    assert!(!queue.starved);
}

/// The kernel reports "copied" for requests that took nothing.
#[test]
fn the_notification_of_a_request_that_took_nothing_is_ignored() {
    let mut queue = queue_over(SendBackend::ErrorQueue);
    assert!(queue.accept(Outgoing::new(vec![1; 100])).is_ok());
    let key = queue.queued.pop_front().expect("it was accepted");
    queue.starved = true;
    for _ in 0..100 {
        queue.handle_notification(key, None, true);
    }
    assert_eq!(queue.policy.off(), None);
    assert!(queue.starved, "no memory was freed");
    assert!(!queue.sends[key.index()].copied);
    // One notification of many sends counts once.
    for _ in 0..100 {
        queue.handle_notification(key, Some(true), false);
    }
    assert_eq!(queue.policy.off(), None);
    for _ in 0..100 {
        queue.handle_notification(key, Some(true), true);
    }
    assert!(queue.policy.off().is_some());
    assert!(!queue.starved);
}

#[test]
fn a_send_is_copied_when_no_pending_event_frees_memory() {
    let mut queue = queue_over(SendBackend::ErrorQueue);
    let outgoing = Outgoing::new(vec![1; 100]).copying(Copying::Never);
    assert!(queue.accept(outgoing).is_ok());
    let key = queue.queued.pop_front().expect("it was accepted");
    queue.handle_error(key, rustix::io::Errno::NOBUFS.raw_os_error());
    assert!(!queue.starved);
    assert_eq!(
        queue.sends[key.index()].copy_reason,
        Some(CopyReason::Memory)
    );
    // Another result is pending, and its request may have taken memory.
    let outgoing = Outgoing::new(vec![1; 100]).copying(Copying::Never);
    assert!(queue.accept(outgoing).is_ok());
    let key = queue.queued.pop_front().expect("it was accepted");
    queue.open = 1;
    queue.handle_error(key, rustix::io::Errno::NOBUFS.raw_os_error());
    assert!(queue.starved);
    assert_eq!(queue.sends[key.index()].copy_reason, None);
}

/// A request of several sends finds no memory: the next one is shorter, and nothing is copied.
#[test]
fn requests_get_shorter_before_a_lack_of_memory_leads_to_copies() {
    let mut queue = queue_over(SendBackend::ErrorQueue);
    let outgoing = Outgoing::new(vec![1; 100]).copying(Copying::Never);
    assert!(queue.accept(outgoing).is_ok());
    let key = queue.queued.pop_front().expect("it was accepted");
    queue.sends[key.index()].gathered = 100_000;
    let refused = rustix::io::Errno::NOBUFS.raw_os_error();
    queue.handle_error(key, refused);
    assert_eq!(queue.gather, 50_000);
    assert_eq!(queue.sends[key.index()].copy_reason, None);
    assert_eq!(queue.sends[key.index()].rounds, 0);
    assert_eq!(queue.retries.pop_front(), Some(key));
    // A request of one send cannot be shorter.
    queue.sends[key.index()].gathered = 0;
    queue.handle_error(key, refused);
    assert_eq!(queue.gather, 50_000);
    assert_eq!(
        queue.sends[key.index()].copy_reason,
        Some(CopyReason::Memory)
    );
    queue.handle_notification(key, Some(false), true);
    assert!(queue.gather > 50_000);
}

#[test]
fn consecutive_sends_of_one_mode_form_one_request() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
    let socket = TcpStream::connect(listener.local_addr().expect("an address"));
    let socket = socket.expect("loopback").into();
    let zc_socket =
        ZcSocket::<Vec<u8>>::open(socket, 8, Some(SendBackend::ErrorQueue)).expect("a zc_socket");
    let policy = Policy::new(SendBackend::ErrorQueue, 10_000);
    let mut queue = SendQueue::new(zc_socket, 8, Slots::new([0]), policy);
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
        assert!(queue.accept(outgoing).is_ok());
    }
    let mut runs = |gather, most| {
        queue.gather = gather;
        let (mut queued, mut runs) = (queue.queued.clone(), Vec::new());
        std::mem::swap(&mut queue.queued, &mut queued);
        while !queue.queued.is_empty() {
            let mut run = Vec::new();
            queue.run(most, &mut run);
            queue.queued.drain(..run.len());
            runs.push(run.len());
        }
        queue.queued = queued;
        runs
    };
    // MSG_MORE of a later send does not delay a send without it.
    assert_eq!(runs(GATHERED, 32), [2, 1, 3]);
    assert_eq!(runs(GATHERED, 1), [1; 6]);
    // The limit applies to zero-copy requests only.
    assert_eq!(runs(1999, 32), [1, 1, 1, 3]);
}

/// The kernel takes a piece although it was cancelled; the rest of its datagram is cancelled.
#[test]
fn pieces_that_are_taken_after_a_cancellation_are_forgotten() {
    let mut queue = copying_queue();
    let piece = |len, more| Outgoing {
        more,
        ..Outgoing::new(vec![1; len])
    };
    assert!(queue.accept(piece(100, true)).is_ok());
    queue.submit().expect("the kernel answers");
    // As if the result had not been read yet.
    queue.cork.under_way = true;
    queue.open = 1;
    assert!(queue.accept(piece(200, true)).is_ok());
    queue.cancel().expect("the kernel answers");
    queue.open = 0;
    queue.finish_cork();
    for len in [300, 10] {
        assert!(queue.accept(piece(len, false)).is_ok());
    }
    queue.submit().expect("the kernel answers");
    let mut bytes = [0; 1000];
    let received = rustix::net::recv(
        queue.zc_socket.socket(),
        &mut bytes,
        rustix::net::RecvFlags::empty(),
    );
    assert_eq!(received.expect("a datagram").0, 10);
}

/// A socket that refuses MSG_WAITALL, as kernel TLS does.
#[test]
fn a_stream_without_msg_waitall_has_one_request_at_a_time() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
    let socket = TcpStream::connect(listener.local_addr().expect("an address"));
    let mut peer = listener.accept().expect("a stream").0;
    let socket = socket.expect("loopback").into();
    let Ok(zc_socket) = ZcSocket::<Vec<u8>>::open(socket, 8, Some(SendBackend::Uring)) else {
        return eprintln!("SKIPPED io_uring: a_stream_whose_requests_cannot_be_whole");
    };
    let policy = Policy::new(SendBackend::Uring, 10_000);
    let mut queue = SendQueue::new(zc_socket, 8, Slots::new([0]), policy);
    for byte in 0..4 {
        let outgoing = Outgoing::new(vec![byte; 60_000]).copying(Copying::Always);
        assert!(queue.accept(outgoing).is_ok());
    }
    // The first of a chain is refused, and the others are cancelled.
    let accepted: Vec<Key> = queue.queued.drain(..).collect();
    let refused = rustix::io::Errno::OPNOTSUPP.raw_os_error();
    queue.handle_error(accepted[0], refused);
    for &other in &accepted[1..] {
        queue.handle_error(other, CANCELLED);
    }
    assert!(!queue.whole && queue.broken.is_none());
    assert_eq!(Vec::from(queue.retries.clone()), accepted);
    // One request, of two sends.
    assert_eq!(queue.start_some(true).expect("the kernel answers"), 2);
    assert_eq!(queue.stats.requests, 1);
    assert!(!queue.may_start(), "one at a time");
    while !queue.is_quiet() {
        queue.wait(None).expect("the kernel answers");
        queue.process_events();
        queue.submit().expect("the kernel answers");
    }
    let mut bytes = vec![0; 240_000];
    peer.read_exact(&mut bytes).expect("all of it");
    assert!(
        bytes
            .chunks(60_000)
            .zip(0..)
            .all(|(chunk, byte)| chunk == [byte; 60_000])
    );
    // A refusal without the flag fails the send.
    assert!(
        queue
            .accept(Outgoing::new(vec![0]).copying(Copying::Always))
            .is_ok()
    );
    let key = queue.queued.pop_front().expect("it was accepted");
    queue.handle_error(key, refused);
    assert_eq!(queue.broken, Some(refused));
}

/// One send can be unfinished until the limit, while very many later ones finish.
#[test]
fn completed_sends_are_removed_behind_one_in_flight() {
    let mut queue = copying_queue();
    queue.limit.time = Some(Duration::from_secs(3600));
    assert!(queue.accept(Outgoing::new(vec![1; 100])).is_ok());
    // It is not started.
    queue.queued.clear();
    queue.submit().expect("the kernel answers");
    let due = queue.due();
    for _ in 0..100 {
        assert!(queue.accept(Outgoing::new(vec![1; 100])).is_ok());
        queue.submit().expect("the kernel answers");
        assert!(queue.limit.accepted.len() <= 16);
    }
    assert_eq!(queue.due(), due);
}

/// The clock is read once for the sends of one submission.
#[test]
fn sends_of_one_submission_are_late_at_the_same_time() {
    let mut queue = copying_queue();
    queue.limit.time = Some(Duration::from_secs(3600));
    for submits in [false, true, true] {
        assert!(queue.accept(Outgoing::new(vec![1; 100])).is_ok());
        queue.queued.clear();
        if submits {
            queue.submit().expect("the kernel answers");
        }
    }
    let at: Vec<_> = queue.limit.accepted.iter().map(|send| send.at).collect();
    assert!(at[0] == at[1] && at[1] < at[2]);
}

#[test]
fn a_limit_that_overflows_the_clock_never_ends() {
    let mut queue = copying_queue();
    queue.limit.time = Some(Duration::MAX);
    assert!(queue.accept(Outgoing::new(vec![1; 100])).is_ok());
    assert_eq!(queue.due(), None);
    queue.submit().expect("the kernel answers");
    assert_eq!(queue.stats.failed, 0);
}
