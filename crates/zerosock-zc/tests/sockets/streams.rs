//! Streams over a slow cable: every byte arrives, in order, while buffers are overwritten as soon
//! as they are returned.

use std::io::{self, Read};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc;
use std::time::Duration;

use zerosock_zc::{Buf, Copying, Outgoing, Pool, SendBackend, Sender};

use crate::network::{BACKENDS, CABLE, accept, byte, fill, slow_down, with_cable};

/// Lengths of every size class, and what lies beside their bounds.
const LENGTHS: [usize; 14] = [
    1, 63, 600, 1000, 1448, 1500, 4000, 4096, 8000, 9001, 16_384, 65_000, 65_536, 300_000,
];
/// How many bytes each stream has at least.
const VOLUME: u64 = 24 << 20;
const PATIENCE: Duration = Duration::from_secs(300);

/// One read, repeated when it is interrupted: work of an io_uring of this thread can do that.
pub(crate) fn read(stream: &mut impl Read, bytes: &mut [u8]) -> io::Result<usize> {
    loop {
        match stream.read(bytes) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}

/// Reads to the end and compares every byte. How many there were.
pub(crate) fn check(mut stream: TcpStream) -> u64 {
    stream.set_read_timeout(Some(PATIENCE)).expect("a socket");
    let mut bytes = vec![0; 1 << 18];
    let mut at = 0;
    loop {
        let count = read(&mut stream, &mut bytes).expect("the stream goes on");
        if count == 0 {
            return at;
        }
        for (offset, &found) in (at..).zip(&bytes[..count]) {
            assert_eq!(found, byte(offset), "at {offset}");
        }
        at += count as u64;
    }
}

/// Sends with few buffers, each refilled as soon as it is returned. Returns the number of bytes.
fn send(mut sender: Sender<Buf>, wish: impl Fn(u64) -> Copying) -> u64 {
    let pool = Pool::new(4, 300_000).expect("memory");
    let mut at = 0;
    let mut turn = 0;
    let mut under_way = 0;
    while at < VOLUME || under_way > 0 {
        while at < VOLUME && under_way < 8 {
            let len = LENGTHS[turn as usize % LENGTHS.len()];
            // Memory that is registered, memory that is not, and both at once.
            let buffer = match (pool.loan(), turn % 3) {
                (Some(mut block), 0) => {
                    block.set_range(0, len).expect("within");
                    fill(&mut block, at);
                    Buf::from(block)
                }
                (Some(mut block), 1) if len > 1 => {
                    let front = len / 3 + 1;
                    let mut bytes = vec![0; front];
                    fill(&mut bytes, at);
                    block.set_range(7, len - front).expect("within");
                    fill(&mut block, at + front as u64);
                    Buf::from(vec![Buf::from(bytes), Buf::from(block)])
                }
                _ => {
                    let mut bytes = vec![0; len];
                    fill(&mut bytes, at);
                    Buf::from(bytes)
                }
            };
            let outgoing = Outgoing::new(buffer).copying(wish(turn));
            sender
                .send(outgoing)
                .map_err(|refused| refused.why)
                .expect("it is accepted");
            (at, turn, under_way) = (at + len as u64, turn + 1, under_way + 1);
        }
        sender.wait(Some(PATIENCE)).expect("the kernel answers");
        while let Some(returned) = sender.returned() {
            under_way -= 1;
            returned.outcome.expect("it was sent");
            // The receiver must not see bytes that are written now.
            match returned.buffer {
                Buf::Pool(mut block) => block.fill(0xee),
                Buf::Vec(mut bytes) => bytes.fill(0xee),
                Buf::Many(list) => {
                    for buffer in list {
                        match buffer {
                            Buf::Pool(mut block) => block.fill(0xee),
                            Buf::Vec(mut bytes) => bytes.fill(0xee),
                            other => panic!("not sent: {other:?}"),
                        }
                    }
                }
                other => panic!("not sent: {other:?}"),
            }
        }
    }
    assert!(sender.finish(Some(PATIENCE)).expect("the kernel answers"));
    let stats = sender.stats();
    assert_eq!((stats.accepted, stats.failed, stats.bytes), (turn, 0, at));
    at
}

fn stream_arrives(name: &str, backend: SendBackend, wish: impl Fn(u64) -> Copying + Send + Copy) {
    for [_, far] in CABLE {
        let (told, address) = mpsc::channel();
        let ends = with_cable(
            name,
            move || {
                let address: SocketAddr = address.recv().expect("the far end");
                slow_down();
                let socket = TcpStream::connect(address).expect("the cable");
                let builder = Sender::builder().backend(backend).threshold(2000);
                let sender = builder.open(socket).expect("a sender");
                assert_eq!(sender.report().backend, backend);
                send(sender, wish)
            },
            move || {
                let listener = TcpListener::bind(far).expect("an address");
                told.send(listener.local_addr().expect("an address"))
                    .expect("the near end");
                check(accept(&listener))
            },
        );
        let Some((sent, received)) = ends else { return };
        assert_eq!(sent, received);
    }
}

#[test]
fn a_stream_of_zero_copy_sends_arrives_in_order() {
    for backend in BACKENDS {
        stream_arrives("a_stream_arrives_in_place", backend, |_| Copying::Never);
    }
}

#[test]
fn a_stream_of_copied_and_zero_copy_sends_arrives_in_order() {
    let wish = |turn| match turn % 5 {
        0 => Copying::Always,
        1 => Copying::Never,
        _ => Copying::Auto,
    };
    for backend in BACKENDS {
        stream_arrives("a_stream_arrives_mixed", backend, wish);
    }
}

#[test]
fn a_wait_covers_a_full_non_blocking_socket() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
    let address = listener.local_addr().expect("an address");
    for backend in BACKENDS {
        let socket = TcpStream::connect(address).expect("loopback");
        socket.set_nonblocking(true).expect("a socket");
        let peer = listener.accept().expect("a stream").0;
        let mut sender: Sender<Vec<u8>> = Sender::builder()
            .backend(backend)
            .capacity(64)
            .open(socket)
            .expect("a sender");
        // More than the socket and its peer can hold: the rest waits until the peer reads.
        let mut at = 0;
        for _ in 0..64 {
            let mut bytes = vec![0; 1 << 18];
            fill(&mut bytes, at);
            at += bytes.len() as u64;
            sender
                .push(Outgoing::new(bytes))
                .map_err(|refused| refused.why)
                .expect("a place");
        }
        sender.submit().expect("the kernel answers");
        assert!(
            !sender
                .finish(Some(Duration::ZERO))
                .expect("the kernel answers"),
            "{backend:?}"
        );
        let reader = std::thread::spawn(move || check(peer));
        assert!(sender.finish(Some(PATIENCE)).expect("the kernel answers"));
        assert_eq!(std::iter::from_fn(|| sender.returned()).count(), 64);
        drop(sender);
        assert_eq!(reader.join().expect("the contents"), at);
    }
}

#[test]
fn sends_of_a_dropped_sender_arrive() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
    let address = listener.local_addr().expect("an address");
    for backend in BACKENDS {
        let socket = TcpStream::connect(address).expect("loopback");
        let peer = listener.accept().expect("a stream").0;
        let mut sender: Sender<Vec<u8>> = Sender::builder()
            .backend(backend)
            .open(socket)
            .expect("a sender");
        let mut bytes = vec![0; 100_000];
        fill(&mut bytes, 0);
        let outgoing = Outgoing::new(bytes).copying(Copying::Never);
        sender
            .push(outgoing)
            .map_err(|refused| refused.why)
            .expect("a place");
        drop(sender);
        assert_eq!(check(peer), 100_000, "{backend:?}");
    }
}
