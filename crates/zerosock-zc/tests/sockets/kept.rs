//! Datagrams in pieces of which a later piece finds no memory for a zero-copy request: taken pieces
//! are kept, so that all of them can be copied, until the application waits for their buffers.

use std::cell::RefCell;
use std::net::UdpSocket;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use zerosock_zc::{
    CloseOutcome, Completion, Copying, KeepReason, Outgoing, Refusal, Returned, SendBackend,
    Sender, Sent,
};

use crate::alone::alone;
use crate::asleep::spawn_waiter;
use crate::faults::limit_locked_memory;
use crate::network::{BACKENDS, SINK, fill, tc, with_sink};

const PATIENCE: Duration = Duration::from_secs(300);
/// The back-ends with zero-copy sends, which can be short of memory.
const IN_PLACE: [SendBackend; 2] = [SendBackend::Uring, SendBackend::ErrorQueue];
/// Less than one piece of [`LARGE`] bytes needs.
const LIMIT: u64 = 64 << 10;
const LARGE: usize = 64_000;

type Piece = (usize, Copying);
const SMALL: Piece = (300, Copying::Always);
const IN_FRONT: Piece = (300, Copying::Never);
const BODY: Piece = (LARGE, Copying::Never);
const TAIL: Piece = (200, Copying::Never);

fn open(backend: SendBackend, capacity: u32) -> (Sender<Vec<u8>>, UdpSocket) {
    let receiver = UdpSocket::bind("127.0.0.1:0").expect("loopback");
    receiver.set_read_timeout(Some(PATIENCE)).expect("a socket");
    let socket = UdpSocket::bind("127.0.0.1:0").expect("loopback");
    let address = receiver.local_addr().expect("an address");
    socket.connect(address).expect("loopback");
    let builder = Sender::builder().backend(backend).capacity(capacity);
    let builder = builder.inline_completions().slots([0]);
    let mut sender = builder.open(socket).expect("a sender");
    // The kernel's count of such sends is not to be had while pieces are gathered.
    push(&mut sender, 0, IN_FRONT, false);
    finish(&mut sender);
    receives(&receiver, 300, "the first");
    assert_eq!(back(&mut sender).len(), 1);
    assert_eq!(numbers(&mut sender), [0]);
    assert!(sender.notification().is_some());
    (sender, receiver)
}

fn outgoing(from: u64, (len, copying): Piece, more: bool) -> Outgoing<Vec<u8>> {
    let mut bytes = vec![0; len];
    fill(&mut bytes, from);
    Outgoing {
        more,
        ..Outgoing::new(bytes).copying(copying).slot(0)
    }
}

fn push(sender: &mut Sender<Vec<u8>>, from: u64, piece: Piece, more: bool) {
    let pushed = sender.push(outgoing(from, piece, more));
    pushed.map_err(|refused| refused.why).expect("a place");
}

/// A piece that the socket has taken.
fn begin(sender: &mut Sender<Vec<u8>>, piece: Piece) {
    let over = sender.stats().over;
    push(sender, 0, piece, true);
    sender.submit().expect("the kernel answers");
    assert_eq!(sender.stats().over, over + 1);
}

fn receives(receiver: &UdpSocket, len: usize, of: &str) {
    let mut bytes = vec![0; 1 << 16];
    let count = receiver.recv(&mut bytes).expect("a datagram");
    assert_eq!(count, len, "{of}");
    let mut expected = vec![0; len];
    fill(&mut expected, 0);
    assert!(bytes[..len] == expected, "{of}: other bytes");
}

fn arrives_alone(sender: &mut Sender<Vec<u8>>, receiver: &UdpSocket, of: &str) {
    push(sender, 0, (10, Copying::Always), false);
    finish(sender);
    receives(receiver, 10, of);
    assert_eq!(back(sender).len(), 1, "{of}");
}

fn finish(sender: &mut Sender<Vec<u8>>) {
    assert!(sender.finish(Some(PATIENCE)).expect("the kernel answers"));
}

fn back(sender: &mut Sender<Vec<u8>>) -> Vec<Returned<Vec<u8>>> {
    std::iter::from_fn(|| sender.returned()).collect()
}

/// Lengths, and whether they were sent.
fn outcomes(back: &[Returned<Vec<u8>>]) -> Vec<(usize, bool)> {
    back.iter()
        .map(|one| (one.buffer.len(), one.outcome.is_ok()))
        .collect()
}

fn numbers(sender: &mut Sender<Vec<u8>>) -> Vec<u32> {
    let mut room = [Completion::default(); 16];
    let count = sender.completions(&mut room).expect("the kernel answers");
    assert!(count < 16);
    let ranges = room[..count].iter();
    let mut all: Vec<_> = ranges.flat_map(|range| range.lo..=range.hi).collect();
    all.sort_unstable();
    all
}

fn with_little_memory(name: &str, test: impl Fn(SendBackend)) {
    alone(&format!("kept::{name}"), || {
        limit_locked_memory(LIMIT);
        IN_PLACE.into_iter().for_each(&test);
    });
}

#[test]
fn a_datagram_of_which_a_later_piece_finds_no_memory_is_copied() {
    let name = "a_datagram_of_which_a_later_piece_finds_no_memory_is_copied";
    let datagrams: [&[Piece]; 6] = [
        &[SMALL, BODY],
        &[IN_FRONT, BODY],
        &[SMALL, BODY, TAIL],
        &[IN_FRONT, SMALL, BODY],
        &[SMALL, IN_FRONT, TAIL, BODY, TAIL],
        &[BODY, TAIL],
    ];
    with_little_memory(name, |backend| {
        let (mut sender, receiver) = open(backend, 8);
        let mut next = 1;
        for (pieces, together) in datagrams.iter().flat_map(|it| [(it, true), (it, false)]) {
            let of = format!("{backend:?}, {pieces:?}, {together}");
            let before = sender.stats();
            let mut len = 0;
            for (index, &piece) in pieces.iter().enumerate() {
                push(&mut sender, len as u64, piece, index + 1 < pieces.len());
                len += piece.0;
                if !together {
                    sender.submit().expect("the kernel answers");
                    let is_last = index + 1 == pieces.len();
                    assert!(is_last || sender.returned().is_none(), "{of}: given back");
                }
            }
            // With the last piece, without being waited for.
            let mut all = back(&mut sender);
            assert_eq!(all.is_empty(), together, "{of}");
            finish(&mut sender);
            receives(&receiver, len, &of);
            all.extend(back(&mut sender));
            let back = all;
            let lengths: Vec<_> = back.iter().map(|one| one.buffer.len()).collect();
            let expected: Vec<_> = pieces.iter().map(|piece| piece.0).collect();
            let mut sorted = [lengths, expected];
            sorted
                .iter_mut()
                .for_each(|lengths| lengths.sort_unstable());
            assert_eq!(sorted[0], sorted[1], "{of}");
            for one in &back {
                let outcome = one.outcome.as_ref().expect("it was sent");
                assert_eq!(*outcome, Sent::Copied, "{of}");
            }
            let numbered = pieces.iter().filter(|piece| piece.1 == Copying::Never);
            let expected: Vec<_> = numbered.zip(next..).map(|(_, number)| number).collect();
            next += expected.len() as u32;
            assert_eq!(numbers(&mut sender), expected, "{of}");
            let posted: Vec<_> = std::iter::from_fn(|| sender.notification()).collect();
            assert_eq!(posted.len(), 1, "{of}");
            let stats = sender.stats();
            assert_eq!(stats.over, stats.accepted, "{of}");
            assert_eq!(stats.freed(), stats.accepted, "{of}: {stats}");
            assert_eq!(stats.bytes, before.bytes + len as u64, "{of}");
            assert_eq!((stats.failed, stats.in_place), (0, 0), "{of}");
            let copied = stats.copied_for_memory - before.copied_for_memory;
            // A ring refuses a chain as a whole, before anything of it is sent.
            match together && backend == SendBackend::ErrorQueue && pieces[0] != BODY {
                true => assert_eq!(copied, expected.len() as u64, "{of}: all at once"),
                false => assert!(copied > 0, "{of}"),
            }
            assert_eq!(sender.room(), 8, "{of}");
            arrives_alone(&mut sender, &receiver, &of);
            assert_eq!(sender.notification().map(|it| it.tag), Some(0), "{of}");
        }
    });
}

#[test]
fn a_flush_of_a_piece_waits_for_its_datagram() {
    with_little_memory("a_flush_of_a_piece_waits_for_its_datagram", |backend| {
        let of = &format!("{backend:?}");
        let (mut sender, receiver) = open(backend, 8);
        let pushed = sender.push(outgoing(0, SMALL, true).flush());
        pushed.map_err(|refused| refused.why).expect("a place");
        sender.submit().expect("the kernel answers");
        assert!(sender.notification().is_none(), "{of}");
        push(&mut sender, 300, BODY, false);
        sender.submit().expect("the kernel answers");
        // It is for that piece alone.
        assert!(sender.notification().is_some(), "{of}");
        assert!(sender.notification().is_none(), "{of}");
        finish(&mut sender);
        assert!(sender.notification().is_some(), "{of}");
        receives(&receiver, 300 + LARGE, of);
    });
}

/// Earlier pieces are released: otherwise the later ones would find no place.
#[test]
fn more_pieces_than_places_are_one_datagram() {
    for backend in BACKENDS {
        let (mut sender, receiver) = open(backend, 4);
        for submits in [true, false] {
            for index in 0..20 {
                let piece = outgoing(300 * index, SMALL, index < 19);
                match submits {
                    true => drop(sender.send(piece).map_err(|refused| refused.why)),
                    false => {
                        if let Err(refused) = sender.push(piece) {
                            assert!(matches!(refused.why, Refusal::Full), "{refused}");
                            sender.submit().expect("the kernel answers");
                            push(&mut sender, 300 * index, SMALL, index < 19);
                        }
                    }
                }
            }
            finish(&mut sender);
            receives(&receiver, 6000, &format!("{backend:?}, {submits}"));
            assert_eq!(outcomes(&back(&mut sender)), [(300, true); 20]);
        }
    }
}

#[test]
fn released_pieces_are_not_retried() {
    with_little_memory("released_pieces_are_not_retried", |backend| {
        let of = &format!("{backend:?}");
        let (mut sender, receiver) = open(backend, 4);
        // Because no place is free; and because the application waited.
        for waits in [false, true] {
            for index in 0..5 {
                let sent = sender.send(outgoing(300 * index, SMALL, true));
                sent.map_err(|refused| refused.why).expect("a place");
                if waits {
                    sender.wait(None).expect("the kernel answers");
                    assert!(sender.returned().is_some(), "{of}");
                }
            }
            push(&mut sender, 1500, (63_000, Copying::Never), false);
            // It takes all of the limit.
            finish(&mut sender);
            let outcomes = outcomes(&back(&mut sender));
            assert_eq!(outcomes.last(), Some(&(63_000, false)), "{of}");
            let rest = &outcomes[..outcomes.len() - 1];
            assert!(rest.iter().all(|&one| one == (300, true)), "{of}");
            arrives_alone(&mut sender, &receiver, of);
        }
    });
}

#[test]
fn a_cancellation_ends_kept_and_retried_pieces() {
    let name = "a_cancellation_ends_kept_and_retried_pieces";
    with_little_memory(name, |backend| {
        let of = &format!("{backend:?}");
        for body in [false, true] {
            let (mut sender, receiver) = open(backend, 8);
            let before = sender.stats().over;
            begin(&mut sender, IN_FRONT);
            let mut expected = vec![(300, true)];
            if body {
                // All of it has been copied by now.
                push(&mut sender, 300, BODY, true);
                sender.submit().expect("the kernel answers");
                assert!(sender.returned().is_none(), "{of}");
                assert_eq!(sender.stats().over, before + 2, "{of}");
                expected.push((LARGE, true));
            }
            // No bytes that the kernel has not taken.
            sender.cancel().expect("the kernel answers");
            push(&mut sender, 0, TAIL, true);
            sender.cancel().expect("the kernel answers");
            push(&mut sender, 0, (50, Copying::Never), false);
            finish(&mut sender);
            expected.extend([(200, false), (50, false)]);
            let mut back = back(&mut sender);
            back.sort_by_key(|one| one.number);
            assert_eq!(outcomes(&back), expected, "{of}");
            assert_eq!(numbers(&mut sender).len(), expected.len(), "{of}");
            arrives_alone(&mut sender, &receiver, of);
        }
    });
}

#[test]
fn waiting_releases_a_copied_piece() {
    for backend in BACKENDS {
        let of = &format!("{backend:?}");
        let modes: [fn(&mut Sender<Vec<u8>>); 4] = [
            |sender| sender.wait(None).expect("the kernel answers"),
            |sender| sender.poll().expect("the kernel answers"),
            |sender| assert!(sender.finish(None).expect("the kernel answers")),
            |sender| {
                let finished = sender.finish(Some(Duration::ZERO));
                assert!(finished.expect("the kernel answers"));
            },
        ];
        let (mut sender, receiver) = open(backend, 8);
        for mode in modes {
            begin(&mut sender, SMALL);
            // `next_timeout` tells an event loop to poll.
            let keeps = sender.next_timeout().is_some();
            assert_eq!(keeps, !sender.is_quiet(), "{of}");
            mode(&mut sender);
            assert!(sender.next_timeout().is_none() && sender.is_quiet(), "{of}");
            assert_eq!(outcomes(&back(&mut sender)), [(300, true)], "{of}");
            // It goes on.
            push(&mut sender, 300, (100, Copying::Always), false);
            finish(&mut sender);
            receives(&receiver, 400, of);
            assert_eq!(outcomes(&back(&mut sender)), [(100, true)], "{of}");
        }
        begin(&mut sender, SMALL);
        let kept = sender.into_socket().expect_err("it is to be continued");
        assert!(
            matches!(kept.why, KeepReason::Corked),
            "{of}: {:?}",
            kept.why
        );
    }
}

#[test]
fn a_waiting_thread_is_woken_for_a_copied_piece() {
    let name = "a_waiting_thread_is_woken_for_a_copied_piece";
    with_sink(name, || {
        for backend in IN_PLACE {
            tc("qdisc replace dev sink0 root tbf rate 8bit burst 3000 limit 100000");
            let socket = UdpSocket::bind("0.0.0.0:0").expect("an address");
            socket.connect(SINK[0]).expect("a route");
            let builder = Sender::builder().backend(backend);
            let mut sender: Sender<Vec<u8>> = builder.open(socket).expect("a sender");
            let send = |len, more| Outgoing {
                more,
                ..Outgoing::new(vec![1; len])
            };
            // The device keeps the second buffer busy, so a wait has an event to wait for.
            for _ in 0..2 {
                let sent = sender.send(send(2500, false).copying(Copying::Never));
                sent.map_err(|refused| refused.why).expect("a place");
            }
            sender.poll().expect("the kernel answers");
            assert!(!sender.is_quiet(), "{backend:?}");
            back(&mut sender);
            let sender = sender.into_shared().expect("descriptors");
            thread::scope(|scope| {
                let waiting = spawn_waiter(scope, &sender);
                let sent = sender.send(send(300, true).copying(Copying::Always));
                sent.map_err(|refused| refused.why).expect("a place");
                assert_eq!(waiting.join().expect("it").buffer.len(), 300, "{backend:?}");
            });
            tc("qdisc del dev sink0 root");
        }
    });
}

#[test]
fn closing_does_not_wait_for_missing_pieces() {
    for backend in BACKENDS {
        let timeouts = [Some(Duration::ZERO), Some(PATIENCE), None];
        let copied = timeouts.map(|timeout| (SMALL, timeout));
        for (piece, timeout) in copied.into_iter().chain([(IN_FRONT, None)]) {
            let (mut sender, _receiver) = open(backend, 8);
            begin(&mut sender, piece);
            let closed = sender.close(timeout);
            assert!(
                matches!(closed.outcome, CloseOutcome::Corked),
                "{backend:?}: {closed:?}"
            );
            assert_eq!(outcomes(&closed.returned), [(300, true)], "{backend:?}");
            assert_eq!((closed.held, closed.notifications.len()), (0, 1));
        }
    }
}

#[test]
fn dropping_a_sender_frees_kept_pieces() {
    for backend in BACKENDS {
        for copying in [Copying::Never, Copying::Always] {
            let socket = UdpSocket::bind("127.0.0.1:0").expect("loopback");
            let address = socket.local_addr().expect("an address");
            socket.connect(address).expect("loopback");
            let builder = Sender::builder().backend(backend);
            let mut sender: Sender<Arc<[u8]>> = builder.open(socket).expect("a sender");
            let bytes: Arc<[u8]> = vec![1; 300].into();
            let piece = Outgoing::new(Arc::clone(&bytes)).copying(copying);
            let sent = sender.send(piece.more()).map_err(|refused| refused.why);
            sent.expect("a place");
            drop(sender);
            let begun = Instant::now();
            while Arc::strong_count(&bytes) > 1 {
                assert!(begun.elapsed() < PATIENCE, "{backend:?}, {copying:?}");
                thread::yield_now();
            }
        }
    }
}

#[derive(Clone, Debug)]
enum Step {
    Push(Piece, bool),
    Submit,
    Poll,
    Take,
    Cancel,
    Wait,
}

fn step() -> impl Strategy<Value = Step> {
    let copying = prop_oneof![Just(Copying::Never), Just(Copying::Always)];
    let len = prop_oneof![4 => 1usize..500, 2 => 500usize..9000, 2 => 20_000usize..64_000];
    let piece = ((len, copying), prop::bool::weighted(0.6));
    prop_oneof![
        8 => piece.prop_map(|(piece, more)| Step::Push(piece, more)),
        6 => Just(Step::Submit),
        1 => Just(Step::Poll),
        3 => Just(Step::Take),
        1 => Just(Step::Cancel),
        1 => Just(Step::Wait),
    ]
}

/// Exactly the datagrams of which all pieces were sent arrive, whole.
fn run(sender: &mut Sender<Vec<u8>>, receiver: &UdpSocket, steps: &[Step]) {
    receiver.set_nonblocking(true).expect("a socket");
    let (mut received, mut bytes) = (Vec::new(), vec![0; 1 << 16]);
    // The pieces of each datagram, and whether they were sent, once that is known.
    let mut datagrams: Vec<Vec<(Vec<u8>, Option<bool>)>> = vec![Vec::new()];
    let (mut told, mut numbered) = (Vec::new(), Vec::new());
    let mut next = 0u64;
    let last = [Step::Push((7, Copying::Always), false)];
    for step in steps.iter().chain(&last) {
        match *step {
            Step::Push(piece, more) => {
                next += 1 << 20;
                // The kernel can keep as many as there are places until the rest comes.
                let more = more && datagrams.last().is_some_and(|pieces| pieces.len() < 4);
                let piece = outgoing(next, piece, more);
                let copy = piece.buffer.clone();
                let mut pushed = sender.push(piece);
                if pushed.is_err() {
                    sender.cancel().expect("the kernel answers");
                    while sender.room() == 0 {
                        sender.wait(None).expect("the kernel answers");
                    }
                    let Err(refused) = pushed else { unreachable!() };
                    pushed = sender.push(refused.outgoing);
                }
                let number = pushed.map_err(|refused| refused.why).expect("a place");
                numbered.extend(number);
                if let Some(datagram) = datagrams.last_mut() {
                    datagram.push((copy, None));
                }
                if !more {
                    datagrams.push(Vec::new());
                }
            }
            Step::Submit => sender.submit().expect("the kernel answers"),
            Step::Poll => sender.poll().expect("the kernel answers"),
            Step::Cancel => sender.cancel().expect("the kernel answers"),
            Step::Wait => sender
                .wait(Some(Duration::from_millis(1)))
                .expect("the kernel answers"),
            Step::Take => {}
        }
        take(sender, &mut datagrams);
        while let Ok(count) = receiver.recv(&mut bytes) {
            received.push(bytes[..count].to_vec());
        }
    }
    finish(sender);
    take(sender, &mut datagrams);
    loop {
        let more = numbers(sender);
        if more.is_empty() {
            break;
        }
        told.extend(more);
    }
    told.sort_unstable();
    assert_eq!(told, numbered);
    assert!(std::iter::from_fn(|| sender.notification()).count() <= 1);
    let stats = sender.stats();
    assert_eq!((stats.over, sender.room()), (stats.accepted, 6));
    datagrams.retain(|datagram| !datagram.is_empty());
    let mut expected = Vec::new();
    for datagram in &datagrams {
        assert!(datagram.iter().all(|(_, sent)| sent.is_some()), "not back");
        if datagram.iter().all(|(_, sent)| *sent == Some(true)) {
            let pieces = datagram.iter().map(|(bytes, _)| bytes.as_slice());
            expected.push(pieces.collect::<Vec<_>>().concat());
        }
    }
    receiver.set_nonblocking(false).expect("a socket");
    while received.len() < expected.len() {
        let count = receiver.recv(&mut bytes).expect("a datagram");
        received.push(bytes[..count].to_vec());
    }
    receiver.set_nonblocking(true).expect("a socket");
    assert!(receiver.recv(&mut bytes).is_err(), "one too many");
    // A datagram without memory is overtaken.
    received.sort_unstable();
    expected.sort_unstable();
    assert!(received == expected);
}

fn take(sender: &mut Sender<Vec<u8>>, datagrams: &mut [Vec<(Vec<u8>, Option<bool>)>]) {
    for one in back(sender) {
        let mut pieces = datagrams.iter_mut().flatten();
        let piece = pieces.find(|(bytes, sent)| sent.is_none() && *bytes == one.buffer);
        let (_, sent) = piece.expect("it was under way");
        *sent = Some(one.outcome.is_ok());
    }
}

#[test]
fn a_datagram_in_pieces_arrives_whole_or_not_at_all() {
    let name = "a_datagram_in_pieces_arrives_whole_or_not_at_all";
    with_little_memory(name, |backend| {
        let config = ProptestConfig {
            cases: 150,
            failure_persistence: None,
            ..ProptestConfig::default()
        };
        // One ring for all: the kernel takes those that are closed apart later, and they count.
        let (sender, receiver) = open(backend, 6);
        let sender = RefCell::new(sender);
        let tested = TestRunner::new(config).run(&prop::collection::vec(step(), 1..60), |steps| {
            run(&mut sender.borrow_mut(), &receiver, &steps);
            Ok(())
        });
        tested.unwrap_or_else(|failed| panic!("{backend:?}: {failed}"));
    });
}
