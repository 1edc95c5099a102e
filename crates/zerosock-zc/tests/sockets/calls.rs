//! The number of system calls for sends and completions.

use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use zerosock_zc::{Completion, Copying, Outgoing, SendBackend, Sender, SenderBuilder};

use crate::network::{BACKENDS, SINK, with_sink};

const PATIENCE: Duration = Duration::from_secs(300);
const SENDS: u64 = 500;

fn sender(backend: SendBackend) -> Sender<Vec<u8>> {
    let socket = UdpSocket::bind("0.0.0.0:0").expect("an address");
    socket.connect(SINK[0]).expect("a route");
    let builder = Sender::builder().backend(backend).capacity(1024);
    builder.inline_completions().open(socket).expect("a sender")
}

fn outgoing() -> Outgoing<Vec<u8>> {
    Outgoing::new(vec![1; 4000])
        .slot(0)
        .flush()
        .copying(Copying::Never)
}

/// Reads every report that needs no system call: all except `completions`.
fn read(sender: &mut Sender<Vec<u8>>) {
    let before = sender.stats().system_calls;
    while sender.returned().is_some() {}
    while sender.notification().is_some() {}
    assert_eq!(sender.stats().system_calls, before);
}

/// Before the first, what it costs to find out which number it has.
fn beginning(backend: SendBackend) -> u64 {
    match backend {
        SendBackend::ErrorQueue => 3,
        _ => 0,
    }
}

#[test]
fn inline_completions_cost_no_call_over_io_uring_and_one_over_the_error_queue() {
    with_sink("being_told_inline", || {
        // With the error queue: each send, and a look behind it.
        for (backend, each) in [
            (SendBackend::Uring, 1),
            (SendBackend::ErrorQueue, 2),
            (SendBackend::Copy, 1),
        ] {
            let mut sender = sender(backend);
            let mut room = [Completion::default(); 16];
            let mut told = 0;
            for _ in 0..SENDS {
                let count = sender.send_with(outgoing(), &mut room);
                let count = count.map_err(|refused| refused.why).expect("a place");
                told += room[..count].iter().map(|range| range.count()).sum::<u32>();
                read(&mut sender);
            }
            let calls = sender.stats().system_calls;
            assert!(
                calls <= SENDS * each + beginning(backend),
                "{backend:?}: {calls} for {SENDS} sends"
            );
            // Completions were taken during the loop.
            assert!(u64::from(told) > SENDS / 2, "{backend:?}: {told}");
            assert!(sender.finish(Some(PATIENCE)).expect("the kernel answers"));
        }
    });
}

#[test]
fn a_tcp_sender_that_keeps_completions_takes_the_error_queue() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
    let address = listener.local_addr().expect("an address");
    let backend = |builder: SenderBuilder| {
        let socket = TcpStream::connect(address).expect("loopback");
        let sender: Sender<Vec<u8>> = builder.open(socket).expect("a sender");
        sender.report().backend
    };
    let inline = || Sender::builder().inline_completions();
    assert_eq!(backend(inline()), SendBackend::ErrorQueue);
    let required = SendBackend::Copy;
    assert_eq!(backend(inline().backend(required)), required);
    // A Unix socket sends nothing in place.
    let (unix, _peer) = UnixStream::pair().expect("a pair");
    let sender: Sender<Vec<u8>> = inline().open(unix).expect("a sender");
    assert_eq!(sender.report().backend, SendBackend::Copy);
}

#[test]
fn taking_buffers_costs_no_system_call() {
    with_sink("what_is_taken_without_asking", || {
        for backend in BACKENDS {
            let mut sender = sender(backend);
            for _ in 0..SENDS {
                let sent = sender.send(outgoing()).map_err(|refused| refused.why);
                sent.expect("a place");
                // Also while something is owed.
                read(&mut sender);
            }
            // With the error queue: a look for each 16.
            let looks = match backend {
                SendBackend::ErrorQueue => SENDS / 16,
                _ => 0,
            };
            let calls = sender.stats().system_calls;
            let most = SENDS + looks + beginning(backend);
            assert!((SENDS..=most).contains(&calls), "{backend:?}: {calls}");
            assert!(sender.finish(Some(PATIENCE)).expect("the kernel answers"));
        }
    });
}

#[test]
fn one_submission_costs_one_call_over_io_uring() {
    with_sink("what_is_submitted_together", || {
        let mut sender = sender(SendBackend::Uring);
        for _ in 0..10 {
            for _ in 0..50 {
                let pushed = sender.push(outgoing());
                pushed.map_err(|refused| refused.why).expect("a place");
            }
            sender.submit().expect("the kernel answers");
            read(&mut sender);
        }
        assert_eq!(sender.stats().system_calls, 10);
        assert!(sender.finish(Some(PATIENCE)).expect("the kernel answers"));
        assert_eq!(sender.stats().accepted, 500);
    });
}
