//! Sockets that an earlier sender or the application used for zero-copy sends: the kernel continues
//! its count of ids, and a buffer is returned when the kernel no longer reads it.

use std::io::Read;
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsRawFd, OwnedFd};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use bytes::Bytes;
use zerosock_zc::sys::permit_zero_copy;
use zerosock_zc::{Copying, Outgoing, SendBackend, Sender, Sent};

use crate::network::{SINK, with_sink};

const PATIENCE: Duration = Duration::from_secs(300);
/// The earlier use of a socket: by a sender, or by the application, which may not have read the
/// error queue.
const BEFORE: [Option<SendBackend>; 3] = [
    Some(SendBackend::Uring),
    Some(SendBackend::ErrorQueue),
    None,
];
/// Number of earlier sends.
const SENDS: usize = 300;

fn open(socket: OwnedFd, backend: SendBackend) -> Sender<Vec<u8>> {
    let builder = Sender::builder().backend(backend).capacity(512);
    builder.open(socket).expect("a sender")
}

fn push(sender: &mut Sender<Vec<u8>>, len: usize) {
    let outgoing = Outgoing::new(vec![1; len]).copying(Copying::Never);
    let pushed = sender.push(outgoing).map_err(|refused| refused.why);
    pushed.expect("a place");
}

/// Sends a while, without a copy, until the kernel is done with it.
fn use_it(socket: OwnedFd, before: Option<SendBackend>) {
    static BYTES: [u8; 1000] = [0; 1000];
    let Some(backend) = before else {
        assert!(permit_zero_copy(&socket).expect("a socket"));
        for _ in 0..SENDS {
            // SAFETY: the bytes are never freed or written.
            let sent = unsafe {
                libc::send(
                    socket.as_raw_fd(),
                    BYTES.as_ptr().cast(),
                    BYTES.len(),
                    libc::MSG_ZEROCOPY,
                )
            };
            assert_eq!(sent, 1000, "{}", std::io::Error::last_os_error());
        }
        return;
    };
    let mut sender = open(socket, backend);
    (0..SENDS).for_each(|_| push(&mut sender, 1000));
    assert!(sender.finish(Some(PATIENCE)).expect("the kernel answers"));
}

fn back(sender: &mut Sender<Vec<u8>>) -> Vec<Option<u32>> {
    sender.poll().expect("the kernel answers");
    let returned = std::iter::from_fn(|| sender.returned());
    let number = |one: zerosock_zc::Returned<Vec<u8>>| {
        one.outcome.expect("it was sent");
        one.number
    };
    returned.map(number).collect()
}

#[test]
fn a_previously_used_stream_returns_received_buffers() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
    let address = listener.local_addr().expect("an address");
    for (before, then) in BEFORE
        .into_iter()
        .flat_map(|before| [SendBackend::ErrorQueue, SendBackend::Uring].map(|then| (before, then)))
    {
        let what = format!("{before:?}, then {then:?}");
        let socket = TcpStream::connect(address).expect("loopback");
        let mut peer = listener.accept().expect("a stream").0;
        let dup = socket.try_clone().expect("a descriptor");
        thread::scope(|scope| {
            scope.spawn(|| peer.read_exact(&mut [0; SENDS * 1000]).expect("bytes"));
            use_it(dup.into(), before);
        });
        let mut sender = open(socket.into(), then);
        // The peer takes the first of them, and not the last.
        let lengths: Vec<usize> = (0..100)
            .map(|index| if index < 50 { 1000 } else { 1 << 20 })
            .collect();
        let total = lengths.iter().sum();
        lengths.into_iter().for_each(|len| push(&mut sender, len));
        sender.submit().expect("the kernel answers");
        let mut numbers = back(&mut sender);
        // The last buffer of a range may be returned first.
        numbers.sort_unstable();
        let early: Vec<_> = (0..numbers.len() as u32).map(Some).collect();
        assert_eq!(numbers, early, "{what}");
        assert!(numbers.len() < 100, "{what}");
        let reading = thread::spawn(move || peer.read_exact(&mut vec![0; total]));
        assert!(sender.finish(Some(PATIENCE)).expect("it answers"), "{what}");
        numbers.extend(back(&mut sender));
        numbers.sort_unstable();
        let all: Vec<_> = (0..100).map(Some).collect();
        assert_eq!(numbers, all, "{what}");
        reading.join().expect("a thread").expect("all of it");
    }
}

/// Runs tc(8) with these words.
fn tc(words: &str) {
    let output = Command::new("tc").args(words.split(' ')).output();
    let output = output.expect("tc(8)");
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "tc {words}: {told}");
}

/// A queue in front of the device that passes 3000 bytes, and queues the rest.
fn delay_packets() {
    tc("qdisc replace dev sink0 root tbf rate 8bit burst 3000 limit 60000");
}

fn release_packets() {
    tc("qdisc del dev sink0 root");
}

fn connected(to: &str) -> UdpSocket {
    let v6 = to.starts_with('[');
    let socket = UdpSocket::bind(if v6 { "[::]:0" } else { "0.0.0.0:0" }).expect("an address");
    socket.connect(to).expect("a route");
    socket
}

#[test]
fn a_previously_used_datagram_socket_returns_sent_buffers() {
    with_sink("a_datagram_socket_that_was_used", || {
        for (to, before) in SINK
            .into_iter()
            .flat_map(|to| BEFORE.map(|before| (to, before)))
        {
            let what = format!("{before:?}, to {to}");
            let socket = connected(to);
            let dup = socket.try_clone().expect("a descriptor");
            use_it(dup.into(), before);
            let mut sender = open(socket.into(), SendBackend::ErrorQueue);
            delay_packets();
            for _ in 0..5 {
                push(&mut sender, 2500);
            }
            sender.submit().expect("the kernel answers");
            // The first is through, the others wait.
            assert_eq!(back(&mut sender), [Some(0)], "{what}");
            release_packets();
            assert!(sender.finish(Some(PATIENCE)).expect("it answers"), "{what}");
            let mut numbers = back(&mut sender);
            numbers.sort_unstable();
            assert_eq!(numbers, [1, 2, 3, 4].map(Some), "{what}");
            assert_eq!(sender.stats().in_place, 5, "{what}");
        }
    });
}

/// Bytes that count when they are freed.
struct Owner(Vec<u8>, Arc<AtomicBool>);

impl AsRef<[u8]> for Owner {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.1.store(true, Ordering::SeqCst);
    }
}

#[test]
fn a_second_sender_copies_while_the_first_has_pending_notifications() {
    with_sink("who_comes_while_another_waits", || {
        let freed = Arc::new(AtomicBool::new(false));
        let is_freed = || freed.load(Ordering::SeqCst);
        let open = |socket: UdpSocket| -> Sender<Bytes> {
            let builder = Sender::builder().backend(SendBackend::ErrorQueue);
            builder.open(socket).expect("a sender")
        };
        let send = |sender: &mut Sender<Bytes>, bytes: Bytes| {
            let sent = sender.send(Outgoing::new(bytes).copying(Copying::Never));
            sent.map_err(|refused| refused.why).expect("it is accepted");
            sender.poll().expect("the kernel answers");
        };
        let socket = connected(SINK[0]);
        let mut second = open(socket.try_clone().expect("a descriptor"));
        let mut first = open(socket);
        delay_packets();
        send(&mut first, vec![1; 2500].into());
        let waits = Owner(vec![2; 2500], Arc::clone(&freed));
        send(&mut first, Bytes::from_owner(waits));
        // While the first sender exists, and after its drop: the second does not take its
        // notifications.
        for round in 0..2 {
            send(&mut second, vec![3; 2500].into());
            let outcome = second.returned().expect("it is free").outcome;
            assert_eq!(outcome.expect("it was sent"), Sent::Copied, "{round}");
            assert!(!is_freed(), "{round}");
            if round == 0 {
                assert_eq!(std::iter::from_fn(|| first.returned()).count(), 1);
                first.finish(Some(Duration::ZERO)).expect("it answers");
                assert!(!first.is_quiet());
            }
        }
        drop(first);
        send(&mut second, vec![4; 2500].into());
        let outcome = second.returned().expect("it is free").outcome;
        assert_eq!(outcome.expect("it was sent"), Sent::Copied);
        assert!(!is_freed());
        release_packets();
        let begun = Instant::now();
        while !is_freed() {
            assert!(begun.elapsed() < PATIENCE, "it is not freed");
            thread::yield_now();
        }
        // The queue is the other's now.
        loop {
            send(&mut second, vec![5; 2500].into());
            let outcome = second.returned().expect("it is free").outcome;
            if outcome.expect("it was sent") == Sent::InPlace {
                break;
            }
            assert!(begun.elapsed() < PATIENCE, "it only copies");
            thread::yield_now();
        }
    });
}
