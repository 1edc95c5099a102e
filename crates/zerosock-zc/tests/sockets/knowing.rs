//! All ways to learn that buffers are free, mixed: nothing is lost, nothing is reported twice.

use std::collections::HashMap;
use std::net::UdpSocket;
use std::time::Duration;

use zerosock_zc::{Completion, Copying, Notification, Outgoing, SendBackend, Sender};

use crate::network::{BACKENDS, SINK, with_sink};

const PATIENCE: Duration = Duration::from_secs(300);

fn sender(backend: SendBackend) -> Sender<Vec<u8>> {
    let socket = UdpSocket::bind("0.0.0.0:0").expect("an address");
    socket.connect(SINK[0]).expect("a route");
    let builder = Sender::builder()
        .backend(backend)
        .capacity(64)
        .inline_completions();
    builder
        .slots([100, 200, 300])
        .open(socket)
        .expect("a sender")
}

#[test]
fn every_kind_of_completion_reports_every_send_once() {
    with_sink("every_way_of_knowing", || {
        for backend in BACKENDS {
            let mut sender = sender(backend);
            let mut told: HashMap<u32, u32> = HashMap::new();
            let mut back: HashMap<u32, u32> = HashMap::new();
            let mut posted = Vec::new();
            let mut room = [Completion::default(); 3];
            let mut numbers = 0;
            let mut unnumbered = 0;
            let mut flushes = [0; 3];
            for turn in 0..3000_u32 {
                let slot = turn % 3;
                let mut outgoing =
                    Outgoing::new(vec![1; 2000])
                        .slot(slot)
                        .copying(match turn % 4 {
                            0 => Copying::Always,
                            _ => Copying::Never,
                        });
                outgoing.flush = turn % 7 == 0;
                flushes[slot as usize] += u32::from(outgoing.flush);
                numbers += u32::from(turn % 4 != 0);
                let count = match turn % 3 {
                    0 => sender.send(outgoing).map(|_| 0),
                    _ => sender.send_with(outgoing, &mut room),
                };
                let count = count
                    .map_err(|refused| refused.why)
                    .expect("it is accepted");
                for range in &room[..count] {
                    for step in 0..range.count() {
                        *told.entry(range.lo.wrapping_add(step)).or_default() += 1;
                    }
                }
                for returned in std::iter::from_fn(|| sender.returned()) {
                    returned.outcome.expect("it was sent");
                    match returned.number {
                        Some(number) => *back.entry(number).or_default() += 1,
                        None => unnumbered += 1,
                    }
                }
                posted.extend(std::iter::from_fn(|| sender.notification()));
            }
            assert!(sender.finish(Some(PATIENCE)).expect("the kernel answers"));
            loop {
                let count = sender.completions(&mut room).expect("the kernel answers");
                if count == 0 {
                    break;
                }
                for range in &room[..count] {
                    for step in 0..range.count() {
                        *told.entry(range.lo.wrapping_add(step)).or_default() += 1;
                    }
                }
            }
            for returned in std::iter::from_fn(|| sender.returned()) {
                match returned.number {
                    Some(number) => *back.entry(number).or_default() += 1,
                    None => unnumbered += 1,
                }
            }
            posted.extend(std::iter::from_fn(|| sender.notification()));
            let once: HashMap<u32, u32> = (0..numbers).map(|number| (number, 1)).collect();
            assert_eq!(told, once, "{backend:?}: ranges");
            assert_eq!(back, once, "{backend:?}: buffers");
            assert_eq!(unnumbered, 750, "{backend:?}");
            for (slot, tag) in [100, 200, 300].into_iter().enumerate() {
                let mut sequences: Vec<_> = posted
                    .iter()
                    .filter(|found| found.tag == tag)
                    .map(|found| found.sequence)
                    .collect();
                sequences.sort_unstable();
                // One for each flush, and the last that everything is flushed with at the end.
                let all: Vec<_> = (0..=flushes[slot]).collect();
                assert_eq!(sequences, all, "{backend:?}: slot {slot}");
            }
        }
    });
}

#[test]
fn a_flush_on_a_send_posts_a_notification_of_its_own() {
    with_sink("a_flush_on_the_send", || {
        for backend in BACKENDS {
            let mut sender = sender(backend);
            for sequence in 0..10 {
                let outgoing = Outgoing::new(vec![1; 4000]).slot(1).flush();
                sender
                    .send(outgoing)
                    .map_err(|refused| refused.why)
                    .expect("it is accepted");
                let found = loop {
                    match sender.notification() {
                        Some(found) => break found,
                        None => sender.wait(Some(PATIENCE)).expect("the kernel answers"),
                    }
                    sender.returned();
                };
                assert_eq!(found, Notification { tag: 200, sequence }, "{backend:?}");
                while sender.returned().is_some() {}
            }
            sender.flush(0..3).expect("slots");
            assert_eq!(sender.notification(), None, "nothing is attached");
        }
    });
}

#[test]
fn pieces_form_one_datagram_and_have_a_number_each() {
    let receiver = UdpSocket::bind("127.0.0.1:0").expect("loopback");
    for backend in BACKENDS {
        let socket = UdpSocket::bind("127.0.0.1:0").expect("loopback");
        socket
            .connect(receiver.local_addr().expect("an address"))
            .expect("loopback");
        let builder = Sender::builder().backend(backend).inline_completions();
        let mut sender: Sender<Vec<u8>> = builder.open(socket).expect("a sender");
        for (fill, copying) in [
            (1, Copying::Never),
            (2, Copying::Always),
            (3, Copying::Never),
        ] {
            let outgoing = Outgoing {
                more: fill < 3,
                ..Outgoing::new(vec![fill; 3000])
            };
            let sent = sender.push(outgoing.copying(copying));
            sent.map_err(|refused| refused.why).expect("a place");
        }
        assert!(sender.finish(Some(PATIENCE)).expect("the kernel answers"));
        let mut bytes = [0; 10_000];
        receiver.set_read_timeout(Some(PATIENCE)).expect("a socket");
        let count = receiver.recv(&mut bytes).expect("a datagram");
        assert_eq!(count, 9000, "{backend:?}");
        for (part, fill) in bytes.chunks(3000).zip(1..=3) {
            assert!(part.iter().all(|&byte| byte == fill), "{backend:?}");
        }
        let mut room = [Completion::default(); 16];
        let count = sender.completions(&mut room).expect("the kernel answers");
        let told: u32 = room[..count].iter().map(|range| range.count()).sum();
        assert_eq!(told, 2, "{backend:?}");
    }
}

#[test]
fn buffers_are_returned_by_sending_alone() {
    for backend in BACKENDS {
        let (mut sender, _receiver) = datagrams(backend);
        let mut back = 0;
        for _ in 0..100 {
            let outgoing = Outgoing::new(vec![1; 3000]).copying(Copying::Never);
            let sent = sender.send(outgoing).map_err(|refused| refused.why);
            sent.expect("there are 256 places");
            back += std::iter::from_fn(|| sender.returned()).count();
        }
        assert!(back >= 80, "{backend:?}: {back}");
    }
}

/// A receiver, and a sender to it.
fn datagrams(backend: SendBackend) -> (Sender<Vec<u8>>, UdpSocket) {
    let receiver = UdpSocket::bind("127.0.0.1:0").expect("loopback");
    receiver.set_read_timeout(Some(PATIENCE)).expect("a socket");
    let socket = UdpSocket::bind("127.0.0.1:0").expect("loopback");
    let address = receiver.local_addr().expect("an address");
    socket.connect(address).expect("loopback");
    let builder = Sender::builder().backend(backend);
    (builder.open(socket).expect("a sender"), receiver)
}

#[test]
fn a_datagram_with_a_failed_piece_does_not_arrive() {
    for (backend, apart) in BACKENDS
        .into_iter()
        .flat_map(|it| [(it, false), (it, true)])
    {
        let (mut sender, receiver) = datagrams(backend);
        // The second is too long; the fourth is a datagram of its own.
        for (len, more) in [
            (1000, true),
            (65_500, true),
            (2000, true),
            (3000, false),
            (10, false),
        ] {
            let outgoing = Outgoing {
                more,
                ..Outgoing::new(vec![1; len])
            };
            let pushed = sender.push(outgoing.copying(Copying::Always));
            pushed.map_err(|refused| refused.why).expect("a place");
            if apart {
                sender.submit().expect("the kernel answers");
            }
        }
        assert!(sender.finish(Some(PATIENCE)).expect("the kernel answers"));
        let mut outcomes: Vec<_> = std::iter::from_fn(|| sender.returned())
            .map(|returned| (returned.buffer.len(), returned.outcome.is_ok()))
            .collect();
        outcomes.sort_unstable();
        let expected = [
            (10, true),
            (1000, true),
            (2000, false),
            (3000, false),
            (65_500, false),
        ];
        assert_eq!(outcomes, expected, "{backend:?}, {apart}");
        let mut bytes = [0; 10_000];
        let count = receiver.recv(&mut bytes).expect("a datagram");
        assert_eq!(count, 10, "{backend:?}, {apart}: a part of one arrived");
    }
}

#[test]
fn a_datagram_of_many_pieces_does_not_mix_with_others() {
    const PIECES: usize = 50;
    for backend in BACKENDS {
        let (mut sender, receiver) = datagrams(backend);
        let mut push = |len, more| {
            let outgoing = Outgoing {
                more,
                ..Outgoing::new(vec![1; len])
            };
            let pushed = sender.push(outgoing.copying(Copying::Always));
            pushed.map_err(|refused| refused.why).expect("a place");
        };
        for _ in 0..2 {
            push(7, false);
            for piece in 1..=PIECES {
                push(100, piece < PIECES);
            }
        }
        push(8, false);
        assert!(sender.finish(Some(PATIENCE)).expect("the kernel answers"));
        let mut bytes = [0; 10_000];
        for expected in [7, 100 * PIECES, 7, 100 * PIECES, 8] {
            let count = receiver.recv(&mut bytes).expect("a datagram");
            assert_eq!(count, expected, "{backend:?}");
        }
    }
}
