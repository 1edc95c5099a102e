//! Bad input: each is refused with its cause, nothing is lost, and the sender goes on.

use std::fs::File;
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::time::Duration;

use zerosock::zc::{Backend, Buf, Completion, OpenError, Outgoing, Pool, Refusal, Sender};

use crate::network::BACKENDS;

const PATIENCE: Duration = Duration::from_secs(60);

fn pair(backend: Backend) -> (Sender<Buf>, UdpSocket) {
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
fn what_cannot_be_opened_says_why() {
    let null = File::open("/dev/null").expect("the null device");
    assert!(matches!(Sender::open(null), Err(OpenError::NotASocket)));
    let socket = || UdpSocket::bind("127.0.0.1:0").expect("loopback");
    for places in [0, 1 << 15] {
        let opened = Sender::builder().capacity(places).open::<Buf>(socket());
        assert!(matches!(opened, Err(OpenError::Capacity(found)) if found == places));
    }
    let unix = std::os::unix::net::UnixDatagram::unbound().expect("a socket");
    for backend in [Backend::Uring, Backend::ErrorQueue] {
        let socket = unix.try_clone().expect("a socket");
        let opened = Sender::builder().backend(backend).open::<Buf>(socket);
        assert!(matches!(opened, Err(OpenError::Unavailable(found)) if found == backend));
    }
    // Without a wish it is copied, and says so.
    let sender = Sender::open(unix).expect("a sender");
    assert_eq!(sender.report().backend, Backend::Copy);
}

#[test]
fn what_is_refused_comes_back_with_its_cause() {
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

#[test]
fn a_full_sender_says_so_and_goes_on() {
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
        // They become free, and nobody takes them: at some point no more are accepted.
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
fn a_datagram_too_large_and_one_to_nowhere_come_back() {
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
fn a_closed_stream_gives_every_buffer_back() {
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
