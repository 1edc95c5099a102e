//! Bad input: each send or option is refused with its cause, nothing is lost, and the sender can
//! still be used.

use std::fs::File;
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::time::Duration;

use zerosock_zc::{Buf, Completion, Outgoing, Pool, Refusal, SendBackend, Sender, SenderOpenError};

use crate::network::{BACKENDS, SINK, with_sink};

const PATIENCE: Duration = Duration::from_secs(300);

fn pair(backend: SendBackend) -> (Sender<Buf>, UdpSocket) {
    let receiver = UdpSocket::bind("127.0.0.1:0").expect("loopback");
    let socket = UdpSocket::bind("127.0.0.1:0").expect("loopback");
    socket
        .connect(receiver.local_addr().expect("an address"))
        .expect("loopback");
    let builder = Sender::builder()
        .backend(backend)
        .capacity(4)
        .inline_completions();
    (builder.open(socket).expect("a sender"), receiver)
}

#[test]
fn opening_an_unsupported_descriptor_returns_the_cause() {
    let null = File::open("/dev/null").expect("the null device");
    assert!(matches!(
        Sender::<Vec<u8>>::open(null),
        Err(SenderOpenError::NotASocket)
    ));
    let socket = || UdpSocket::bind("127.0.0.1:0").expect("loopback");
    for places in [0, 1 << 15] {
        let opened = Sender::builder().capacity(places).open::<Buf>(socket());
        assert!(matches!(opened, Err(SenderOpenError::Capacity(found)) if found == places));
    }
    let unix = std::os::unix::net::UnixDatagram::unbound().expect("a socket");
    for backend in [SendBackend::Uring, SendBackend::ErrorQueue] {
        let socket = unix.try_clone().expect("a socket");
        let opened = Sender::builder().backend(backend).open::<Buf>(socket);
        assert!(matches!(opened, Err(SenderOpenError::Unavailable(found)) if found == backend));
    }
    // Without a requested back-end it copies, and reports that.
    let sender = Sender::<Vec<u8>>::open(unix).expect("a sender");
    assert_eq!(sender.report().backend, SendBackend::Copy);
}

#[test]
fn a_refused_send_is_returned_with_its_cause() {
    for backend in BACKENDS {
        let (mut sender, receiver) = pair(backend);
        let outgoing = || Outgoing::<Buf>::new(vec![5; 100]);
        let refused = sender
            .push(outgoing().slot(1))
            .expect_err("there is one slot");
        assert!(
            matches!(refused.why, Refusal::NoSuchSlot(found) if found.slot == 1 && found.slots == 1)
        );
        let refused = sender.push(outgoing().flush()).expect_err("no slot");
        assert!(matches!(refused.why, Refusal::FlushWithoutSlot));
        let pieces: Vec<Buf> = (0..1025).map(|_| Buf::from(vec![1])).collect();
        let refused = sender.push(Outgoing::new(pieces)).expect_err("too many");
        assert!(matches!(refused.why, Refusal::TooManyPieces));
        assert!(matches!(refused.outgoing.buffer, Buf::Many(list) if list.len() == 1025));
        let mut room = [Completion::default(); 17];
        let refused = sender
            .send_with(outgoing(), &mut room)
            .expect_err("too much room");
        assert!(matches!(refused.why, Refusal::TooMuchRoom));
        assert!(sender.flush(0..2).is_err());
        // None of it took a place or a number, or was sent.
        assert_eq!(
            (sender.room(), sender.stats().accepted),
            (4, 0),
            "{backend:?}"
        );
        assert_eq!(
            sender
                .send(outgoing())
                .map_err(|refused| refused.why)
                .expect("a place"),
            Some(0)
        );
        receiver.set_read_timeout(Some(PATIENCE)).expect("a socket");
        assert_eq!(receiver.recv(&mut [0; 200]).expect("a datagram"), 100);
    }
}

/// Before, nothing ever came, and nothing was said.
#[test]
fn completions_need_the_builder_option() {
    for backend in BACKENDS {
        let socket = UdpSocket::bind("127.0.0.1:0").expect("loopback");
        let opened = Sender::builder().backend(backend).open(socket);
        let mut sender: Sender = opened.expect("a sender");
        let mut room = [Completion::default(); 16];
        for room in [&mut room[..], &mut []] {
            let refused = sender.send_with(Outgoing::new(vec![1; 100]), room);
            let why = refused.expect_err("it keeps none").why;
            assert!(matches!(why, Refusal::NoCompletions));
            let error = sender.completions(room).expect_err("it keeps none");
            assert_eq!(error.kind(), std::io::ErrorKind::InvalidInput);
        }
        assert_eq!(sender.stats().accepted, 0);
    }
}

#[test]
fn a_full_sender_refuses_and_recovers() {
    for backend in BACKENDS {
        let (mut sender, _receiver) = pair(backend);
        for _ in 0..4 {
            sender
                .push(Outgoing::new(vec![1; 10]))
                .map_err(|refused| refused.why)
                .expect("a place");
        }
        let refused = sender
            .push(Outgoing::new(vec![2; 10]))
            .expect_err("no place");
        assert!(matches!(refused.why, Refusal::Full));
        // The buffers become free and are not taken: at some point no more sends are accepted.
        let (mut accepted, mut outgoing) = (4, refused.outgoing);
        let refused = loop {
            match sender.send(outgoing) {
                Ok(_) => accepted += 1,
                Err(refused) => break refused,
            }
            outgoing = Outgoing::new(vec![3; 10]);
        };
        assert!(matches!(refused.why, Refusal::Unread));
        assert!((1024..1100).contains(&accepted), "{accepted}");
        assert!(sender.returned().is_some());
        sender
            .send(refused.outgoing)
            .map_err(|refused| refused.why)
            .expect("a place");
    }
}

#[test]
fn datagrams_that_fail_are_returned_with_their_buffers() {
    for backend in BACKENDS {
        let (mut sender, _receiver) = pair(backend);
        let pool = Pool::new(1, 1 << 17).expect("memory");
        let mut codes = Vec::new();
        for buffer in [
            Buf::from(vec![1; 70_000]),
            Buf::from(pool.loan().expect("a block")),
        ] {
            sender
                .send(Outgoing::new(buffer))
                .map_err(|refused| refused.why)
                .expect("a place");
            assert!(sender.finish(Some(PATIENCE)).expect("the kernel answers"));
            let returned = sender.returned().expect("it is back");
            let failed = returned.outcome.expect_err("it is too large");
            codes.push((failed.sent, failed.error.raw_os_error()));
        }
        assert_eq!(codes, [(0, Some(libc::EMSGSIZE)); 2], "{backend:?}");
        assert_eq!(pool.free(), 1);
        // A datagram socket goes on.
        sender
            .send(Outgoing::new(vec![1; 10]))
            .map_err(|refused| refused.why)
            .expect("a place");
        assert!(sender.finish(Some(PATIENCE)).expect("the kernel answers"));
        sender
            .returned()
            .expect("it is back")
            .outcome
            .expect("it was sent");

        let unconnected = UdpSocket::bind("127.0.0.1:0").expect("loopback");
        let mut sender: Sender = Sender::builder()
            .backend(backend)
            .open(unconnected)
            .expect("one");
        sender
            .send(Outgoing::new(vec![1; 10]))
            .map_err(|refused| refused.why)
            .expect("a place");
        assert!(sender.finish(Some(PATIENCE)).expect("the kernel answers"));
        let failed = sender
            .returned()
            .expect("it is back")
            .outcome
            .expect_err("it goes nowhere");
        assert_eq!(
            failed.error.raw_os_error(),
            Some(libc::EDESTADDRREQ),
            "{backend:?}"
        );
    }
}

#[test]
fn a_stream_closed_by_its_peer_returns_every_buffer() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
    let address = listener.local_addr().expect("an address");
    for backend in BACKENDS {
        let socket = TcpStream::connect(address).expect("loopback");
        let peer = listener.accept().expect("a stream").0;
        let mut sender: Sender<Vec<u8>> = Sender::builder()
            .backend(backend)
            .capacity(64)
            .open(socket)
            .expect("a sender");
        for _ in 0..64 {
            let outgoing = Outgoing::new(vec![1; 1 << 18]);
            sender
                .push(outgoing)
                .map_err(|refused| refused.why)
                .expect("a place");
        }
        sender.submit().expect("the kernel answers");
        // With unread bytes: a reset.
        drop(peer);
        assert!(
            sender.finish(Some(PATIENCE)).expect("the kernel answers"),
            "{backend:?}"
        );
        let back: Vec<_> = std::iter::from_fn(|| sender.returned()).collect();
        assert_eq!(back.len(), 64, "{backend:?}");
        let failed = back
            .iter()
            .filter(|returned| returned.outcome.is_err())
            .count();
        assert!(failed > 0, "{backend:?}");
        let refused = sender
            .push(Outgoing::new(vec![1; 10]))
            .expect_err("it is over");
        assert!(matches!(refused.why, Refusal::Broken(_)));
    }
}

/// Takes buffers back, but reads neither notifications nor completions: it stops at some point, and
/// goes on when one of either is read.
#[test]
fn a_sender_whose_buffers_are_not_taken_refuses() {
    const MOST: usize = 1 << 16;
    with_sink("what_nobody_reads", || {
        for notifications in [true, false] {
            let socket = UdpSocket::bind("0.0.0.0:0").expect("an address");
            socket.connect(SINK[0]).expect("a route");
            let builder = Sender::builder().backend(SendBackend::ErrorQueue);
            let builder = match notifications {
                true => builder,
                false => builder.inline_completions().threshold(2),
            };
            let mut sender: Sender<&'static [u8]> = builder.open(socket).expect("a sender");
            let mut count = 0;
            let refused = loop {
                // Sends that are copied and such as are not make ranges of their own.
                let outgoing = Outgoing::new(match count % 2 {
                    0 => &b"0"[..],
                    _ => &b"00"[..],
                });
                let outgoing = match notifications {
                    true => outgoing.slot(0).flush(),
                    false => outgoing,
                };
                match sender.send(outgoing) {
                    Ok(_) => count += 1,
                    Err(refused) => break refused,
                }
                while sender.returned().is_some() {}
                assert!(count < 2 * MOST, "nothing stops it");
            };
            assert!(matches!(refused.why, Refusal::Unread));
            // Sends that were under way are additional.
            assert!(count >= MOST, "{count}");
            assert!(sender.finish(Some(PATIENCE)).expect("the kernel answers"));
            while sender.returned().is_some() {}
            let mut room = [Completion::default(); 16];
            let mut read = 0;
            while sender.push(Outgoing::new(&b"0"[..])).is_err() {
                read += match notifications {
                    true => usize::from(sender.notification().is_some()),
                    false => sender.completions(&mut room).expect("the kernel answers"),
                };
                assert!(read <= MOST, "nothing makes it go on");
            }
            assert!(sender.finish(Some(PATIENCE)).expect("the kernel answers"));
        }
    });
}
