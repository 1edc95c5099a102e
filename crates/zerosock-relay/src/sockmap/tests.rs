//! Pairs of sockets on the running kernel: contents, bytes from before, ends of streams, resets, the
//! limit, datagrams, and what cannot be joined. Without CAP_BPF and CAP_NET_ADMIN they say SKIPPED.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use zerosock_sys::bpf::{BpfError, drop_bpf_capabilities};

use super::*;

/// Far longer than any step takes.
const STEP: Duration = Duration::from_secs(30);
const LIMIT: u64 = 4 << 20;

/// A map, or an end of the test where the machine permits none.
macro_rules! map_or_skip {
    ($pairs:expr) => {
        match RelayMap::new($pairs) {
            Ok(map) => map,
            Err(error @ (BpfError::Denied { .. } | BpfError::NotSupported { .. })) => {
                let name = thread::current().name().unwrap_or_default().to_owned();
                println!("SKIPPED {name}: {error}");
                return;
            }
            Err(error) => panic!("{error}"),
        }
    };
}

fn tcp() -> (TcpStream, OwnedFd) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let outer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    outer.set_read_timeout(Some(STEP)).unwrap();
    outer.set_write_timeout(Some(STEP)).unwrap();
    let (inner, _) = listener.accept().unwrap();
    inner.set_nodelay(true).unwrap();
    (outer, inner.into())
}

fn udp() -> (UdpSocket, OwnedFd) {
    let any = SocketAddr::from(([127, 0, 0, 1], 0));
    let (outer, inner) = (UdpSocket::bind(any).unwrap(), UdpSocket::bind(any).unwrap());
    outer.connect(inner.local_addr().unwrap()).unwrap();
    inner.connect(outer.local_addr().unwrap()).unwrap();
    outer.set_read_timeout(Some(STEP)).unwrap();
    (outer, inner.into())
}

/// Reproducible bytes.
fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        bytes.extend_from_slice(&state.wrapping_mul(0x2545_f491_4f6c_dd1d).to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

fn read_exact(mut from: impl Read, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    from.read_exact(&mut bytes).expect("all bytes in time");
    bytes
}

fn read_to_end(mut from: impl Read) -> Vec<u8> {
    let mut bytes = Vec::new();
    from.read_to_end(&mut bytes).expect("the end in time");
    bytes
}

/// Fails with the place of the first difference.
fn assert_same(received: &[u8], sent: &[u8], what: &str) {
    let differs = received
        .iter()
        .zip(sent)
        .position(|(one, other)| one != other);
    let lengths = (received.len(), sent.len());
    assert_eq!((differs, lengths.0), (None, lengths.1), "{what}");
}

/// Drives a pair as the engine does: turns when a socket is ready or a turn is due.
struct Relay {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<(Pair<OwnedFd>, Result<(), TurnError>)>,
}

impl Relay {
    fn start(mut pair: Pair<OwnedFd>) -> Relay {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let thread = thread::spawn(move || {
            let mut scratch = vec![0; 256 << 10];
            let result = loop {
                match step(&mut pair, &mut scratch) {
                    Ok(true) => break Ok(()),
                    Ok(false) if stopped.load(Ordering::Acquire) => break Ok(()),
                    Ok(false) => {}
                    Err(error) => break Err(error),
                }
            };
            (pair, result)
        });
        Relay { stop, thread }
    }

    /// Waits until both directions have ended.
    fn finish(self) -> (Pair<OwnedFd>, Result<(), TurnError>) {
        self.thread.join().unwrap()
    }

    fn stop(self) -> Pair<OwnedFd> {
        self.stop.store(true, Ordering::Release);
        let (pair, result) = self.finish();
        result.unwrap();
        pair
    }
}

/// One turn each way, and a wait; whether both have ended.
fn step(pair: &mut Pair<OwnedFd>, scratch: &mut [u8]) -> Result<bool, TurnError> {
    let turns = [pair.turn(Side::A, scratch)?, pair.turn(Side::B, scratch)?];
    if turns.iter().all(|turn| turn.state == State::Ended) {
        return Ok(true);
    }
    let again = turns.iter().filter_map(|turn| turn.again).min();
    let again = again.unwrap_or(Duration::from_millis(20));
    // An end of a stream stays readable while the other direction goes on: wait for time only.
    let ended = turns.map(|turn| turn.state == State::Ended);
    let events = [PollFlags::RDHUP | PollFlags::IN; 2];
    let mut sockets: Vec<_> = [Side::A, Side::B]
        .into_iter()
        .filter(|side| !ended[side.index()])
        .map(|side| PollFd::new(pair.socket(side), events[side.index()]))
        .collect();
    let again = Timespec::try_from(again).unwrap();
    poll(&mut sockets, Some(&again)).unwrap();
    Ok(false)
}

#[test]
fn streams_pass_both_ways_with_all_bytes_in_order() {
    let map = map_or_skip!(1);
    let ((one, a), (two, b)) = (tcp(), tcp());
    let relay = Relay::start(map.insert_pair(a, b, LIMIT, Directions::Both).unwrap());
    let (forth, back) = (pattern(1, 12 << 20), pattern(2, 9 << 20));
    thread::scope(|scope| {
        scope.spawn(|| {
            (&one).write_all(&forth).unwrap();
            one.shutdown(Shutdown::Write).unwrap();
        });
        scope.spawn(|| {
            (&two).write_all(&back).unwrap();
            two.shutdown(Shutdown::Write).unwrap();
        });
        let at_two = scope.spawn(|| read_to_end(&two));
        assert_same(&read_to_end(&one), &back, "bytes back");
        assert_same(&at_two.join().unwrap(), &forth, "bytes forth");
    });
    let (pair, result) = relay.finish();
    result.unwrap();
    for (side, sent) in [(Side::A, forth.len()), (Side::B, back.len())] {
        let counters = pair.counters(side);
        assert_eq!(
            counters.redirected_bytes + counters.by_hand_bytes,
            sent as u64,
            "{counters:?}"
        );
        assert!(counters.redirected_bytes > 0, "{counters:?}");
    }
}

#[test]
fn bytes_from_before_the_insertion_come_first() {
    let map = map_or_skip!(1);
    let ((mut one, a), (two, b)) = (tcp(), tcp());
    let bytes = pattern(3, 300_000);
    one.write_all(&bytes[..100_000]).unwrap();
    let pair = map.insert_pair(a, b, LIMIT, Directions::Both).unwrap();
    // Some also between the insertion and the first turn.
    one.write_all(&bytes[100_000..200_000]).unwrap();
    let relay = Relay::start(pair);
    one.write_all(&bytes[200_000..]).unwrap();
    assert!(read_exact(&two, bytes.len()) == bytes);
    let counters = relay.stop().counters(Side::A);
    assert_eq!(counters.redirected_bytes, 300_000, "{counters:?}");
}

#[test]
fn half_close_passes_and_the_other_direction_goes_on() {
    let map = map_or_skip!(1);
    let ((mut one, a), (mut two, b)) = (tcp(), tcp());
    let relay = Relay::start(map.insert_pair(a, b, LIMIT, Directions::Both).unwrap());
    one.write_all(b"request").unwrap();
    one.shutdown(Shutdown::Write).unwrap();
    assert_eq!(read_to_end(&two), b"request");
    for round in 0..100u8 {
        two.write_all(&[round; 1000]).unwrap();
        assert_eq!(read_exact(&one, 1000), [round; 1000]);
    }
    drop(two);
    assert_eq!(read_to_end(&one), b"");
    let (pair, result) = relay.finish();
    result.unwrap();
    assert_eq!(
        pair.counters(Side::A).empty_packets,
        1,
        "the end of the stream"
    );
}

#[test]
fn reset_of_either_end_is_an_error_of_its_side() {
    let map = map_or_skip!(1);
    for side in [Side::A, Side::B] {
        let ((one, a), (two, b)) = (tcp(), tcp());
        let relay = Relay::start(map.insert_pair(a, b, LIMIT, Directions::Both).unwrap());
        let (closes, _stays) = match side {
            Side::A => (one, two),
            Side::B => (two, one),
        };
        let now = Some(Duration::ZERO);
        rustix::net::sockopt::set_socket_linger(&closes, now).unwrap();
        drop(closes);
        let error = relay.finish().1.unwrap_err();
        assert_eq!(error.side, side);
        assert_eq!(error.error.kind(), ErrorKind::ConnectionReset);
    }
}

/// Without a limit the kernel would take everything: sockmap has no back-pressure.
#[test]
fn target_that_does_not_read_stops_the_sender_at_the_limit() {
    let map = map_or_skip!(1);
    let ((one, a), (two, b)) = (tcp(), tcp());
    for socket in [one.as_fd(), a.as_fd(), b.as_fd(), two.as_fd()] {
        use rustix::net::sockopt::{set_socket_recv_buffer_size, set_socket_send_buffer_size};
        set_socket_recv_buffer_size(socket, 1 << 20).unwrap();
        set_socket_send_buffer_size(socket, 1 << 20).unwrap();
    }
    let relay = Relay::start(map.insert_pair(a, b, LIMIT, Directions::Both).unwrap());
    one.set_nonblocking(true).unwrap();
    let bytes = pattern(4, 256 << 20);
    let mut sent = 0;
    let mut stalled = Instant::now();
    while stalled.elapsed() < Duration::from_secs(1) && sent < bytes.len() {
        match (&one).write(&bytes[sent..bytes.len().min(sent + (64 << 10))]) {
            Ok(count) => {
                sent += count;
                stalled = Instant::now();
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => thread::yield_now(),
            Err(error) => panic!("{error}"),
        }
    }
    // The limit, and what four buffers hold, each twice what was asked for.
    assert!(sent < 16 << 20, "{sent} bytes are on their way");
    one.shutdown(Shutdown::Write).unwrap();
    let received = read_to_end(&two);
    assert_eq!(received.len(), sent);
    assert!(received == bytes[..sent]);
    drop(two);
    relay.finish().1.unwrap();
}

/// More passes by hand than is redirected.
#[test]
fn order_is_kept_when_the_limit_is_reached_all_the_time() {
    let map = map_or_skip!(1);
    let ((one, a), (two, b)) = (tcp(), tcp());
    let relay = Relay::start(map.insert_pair(a, b, 10_000, Directions::Both).unwrap());
    let bytes = pattern(5, 6 << 20);
    thread::scope(|scope| {
        scope.spawn(|| {
            for chunk in bytes.chunks(3000) {
                (&one).write_all(chunk).unwrap();
            }
            one.shutdown(Shutdown::Write).unwrap();
        });
        assert!(read_to_end(&two) == bytes);
    });
    let counters = relay.stop().counters(Side::A);
    assert!(counters.by_hand_bytes > 0, "{counters:?}");
    assert!(counters.redirected_bytes > 0, "{counters:?}");
}

/// The kernel discards what the program has left at a TCP socket once both its ends are closed.
#[test]
fn late_reader_gets_everything_after_both_ends_are_closed() {
    let map = map_or_skip!(1);
    // The direction back ends before, and after, the bytes that the reader is late for.
    for first in [true, false] {
        let ((one, a), (two, b)) = (tcp(), tcp());
        for socket in [b.as_fd(), two.as_fd()] {
            use rustix::net::sockopt::{set_socket_recv_buffer_size, set_socket_send_buffer_size};
            set_socket_recv_buffer_size(socket, 1 << 16).unwrap();
            set_socket_send_buffer_size(socket, 1 << 16).unwrap();
        }
        let pair = map.insert_pair(a, b, 1 << 18, Directions::Both).unwrap();
        let relay = Relay::start(pair);
        let bytes = pattern(8, 2 << 20);
        if first {
            two.shutdown(Shutdown::Write).unwrap();
            assert_eq!(read_to_end(&one), b"");
        }
        let sent = thread::scope(|scope| {
            let sending = scope.spawn(|| {
                (&one).write_all(&bytes).unwrap();
                one.shutdown(Shutdown::Write).unwrap();
            });
            if first {
                // Everything is in the kernel.
                sending.join().unwrap();
            } else {
                two.shutdown(Shutdown::Write).unwrap();
            }
            read_to_end(&two)
        });
        assert_eq!(sent.len(), bytes.len(), "{first}");
        assert!(sent == bytes);
        relay.finish().1.unwrap();
    }
}

#[test]
fn target_that_does_not_read_after_a_half_close_is_an_error_at_last() {
    let map = map_or_skip!(1);
    let ((one, a), (two, b)) = (tcp(), tcp());
    let relay = Relay::start(map.insert_pair(a, b, 1 << 18, Directions::Both).unwrap());
    two.shutdown(Shutdown::Write).unwrap();
    assert_eq!(read_to_end(&one), b"");
    // It ends with the relay. What it has sent until the next turn waits in the kernel.
    let writing = thread::spawn(move || while (&one).write_all(&[0; 65536]).is_ok() {});
    let (pair, result) = relay.finish();
    let error = result.unwrap_err();
    assert_eq!(error.side, Side::B);
    assert!(error.to_string().contains("too slowly"), "{error}");
    drop(pair);
    writing.join().unwrap();
}

#[test]
fn datagrams_keep_their_bounds_both_ways() {
    let map = map_or_skip!(1);
    let ((one, a), (two, b)) = (udp(), udp());
    for early in [&b"early"[..], b"", b"later"] {
        one.send(early).unwrap();
    }
    let relay = Relay::start(map.insert_pair(a, b, LIMIT, Directions::Both).unwrap());
    let mut buffer = [0; 65536];
    let mut receive = |socket: &UdpSocket| {
        let len = socket.recv(&mut buffer).expect("a datagram in time");
        buffer[..len].to_vec()
    };
    let mut early = [receive(&two), receive(&two), receive(&two)];
    early.sort();
    assert_eq!(early, [&b""[..], b"early", b"later"]);
    for len in [1, 64, 1400, 9000, 60_000] {
        let sent = pattern(len as u64, len);
        one.send(&sent).unwrap();
        assert!(receive(&two) == sent, "{len} bytes forth");
        two.send(&sent).unwrap();
        assert!(receive(&one) == sent, "{len} bytes back");
    }
    let counters = relay.stop().counters(Side::A);
    assert!(counters.redirected_packets >= 4, "{counters:?}");
    assert_eq!(counters.lost_datagrams, 0);
}

/// The kernel would fail the target with EPIPE, and drop all later packets.
#[test]
fn empty_datagram_does_not_end_the_redirection() {
    let map = map_or_skip!(1);
    let ((one, a), (two, b)) = (udp(), udp());
    let pair = map.insert_pair(a, b, LIMIT, Directions::Both).unwrap();
    one.send(b"").unwrap();
    one.send(b"after").unwrap();
    let mut buffer = [0; 16];
    assert_eq!(two.recv(&mut buffer).unwrap(), 5);
    assert_eq!(pair.counters(Side::A).empty_packets, 1);
    assert_eq!(pair.counters(Side::A).redirected_packets, 1);
}

/// The kernel would keep no bounds of datagrams that a program leaves at their socket.
#[test]
fn datagrams_beyond_the_limit_are_dropped_and_never_merged() {
    let map = map_or_skip!(1);
    let ((one, a), (two, b)) = (udp(), udp());
    let mut pair = map.insert_pair(a, b, 1000, Directions::Both).unwrap();
    for n in 0..50u8 {
        one.send(&[n; 100]).unwrap();
    }
    let mut scratch = vec![0; 256 << 10];
    pair.turn(Side::A, &mut scratch).unwrap();
    one.send(&[50; 100]).unwrap();
    let mut buffer = [0; 10_000];
    for n in (0..10).chain([50u8]) {
        let length = two.recv(&mut buffer).unwrap();
        assert_eq!(buffer[..length], [n; 100]);
    }
    let counters = pair.counters(Side::A);
    assert_eq!(counters.redirected_packets, 11, "{counters:?}");
    assert_eq!(counters.empty_packets, 40, "{counters:?}");
    assert_eq!(counters.by_hand_bytes, 0, "{counters:?}");
}

#[test]
fn refused_datagrams_are_no_error_of_the_pair() {
    let map = map_or_skip!(1);
    let ((one, a), (two, b)) = (udp(), udp());
    let address = two.local_addr().unwrap();
    let relay = Relay::start(map.insert_pair(a, b, LIMIT, Directions::Both).unwrap());
    let back = |socket: &UdpSocket| socket.recv(&mut [0; 16]).expect("a datagram in time");
    one.send(b"there").unwrap();
    assert_eq!(back(&two), 5);
    let peer = two.peer_addr().unwrap();
    drop(two);
    one.send(b"nobody").unwrap();
    // The port is open again: datagrams arrive, though the first may find the old error.
    let two = UdpSocket::bind(address).unwrap();
    two.connect(peer).unwrap();
    two.set_read_timeout(Some(Duration::from_millis(20)))
        .unwrap();
    let give_up = Instant::now() + STEP;
    loop {
        one.send(b"again").unwrap();
        if two.recv(&mut [0; 16]).is_ok() {
            break;
        }
        assert!(Instant::now() < give_up, "nothing arrives any more");
    }
    relay.stop();
}

#[test]
fn datagrams_go_into_a_stream_one_way() {
    let map = map_or_skip!(1);
    let ((one, a), (two, b)) = (udp(), tcp());
    one.send(b"before ").unwrap();
    let relay = Relay::start(map.insert_pair(a, b, LIMIT, Directions::FromA).unwrap());
    assert_eq!(read_exact(&two, 7), b"before ");
    one.send(b"after").unwrap();
    assert_eq!(read_exact(&two, 5), b"after");
    relay.stop();
}

#[test]
fn one_direction_leaves_the_other_one_to_the_caller() {
    let map = map_or_skip!(1);
    let ((mut one, a), (mut two, b)) = (tcp(), tcp());
    let pair = map.insert_pair(a, b, LIMIT, Directions::FromB).unwrap();
    two.write_all(b"redirected").unwrap();
    assert_eq!(read_exact(&one, 10), b"redirected");
    one.write_all(b"by hand").unwrap();
    let a = pair.socket(Side::A).try_clone().unwrap();
    assert_eq!(read_exact(&TcpStream::from(a), 7), b"by hand");
    assert_eq!(pair.counters(Side::B).redirected_bytes, 10);
}

#[test]
fn removed_pair_gives_back_ordinary_sockets() {
    let map = map_or_skip!(1);
    let ((mut one, a), (mut two, b)) = (tcp(), tcp());
    let mut pair = map.insert_pair(a, b, LIMIT, Directions::Both).unwrap();
    let mut scratch = vec![0; 1 << 16];
    pair.turn(Side::A, &mut scratch).unwrap();
    one.write_all(b"redirected").unwrap();
    assert_eq!(read_exact(&two, 10), b"redirected");
    let [a, b] = pair.into_sockets().map(TcpStream::from);
    one.write_all(b"here").unwrap();
    assert_eq!(read_exact(&a, 4), b"here");
    two.write_all(b"there").unwrap();
    assert_eq!(read_exact(&b, 5), b"there");
    // The numbers and the sockets are free again.
    let [a, b] = [a, b].map(OwnedFd::from);
    let pair = map.insert_pair(a, b, LIMIT, Directions::Both).unwrap();
    let relay = Relay::start(pair);
    one.write_all(b"once more").unwrap();
    assert_eq!(read_exact(&two, 9), b"once more");
    relay.stop();
}

#[test]
fn refused_sockets_come_back() {
    let map = map_or_skip!(1);
    let refuse = |a: OwnedFd, b: OwnedFd| {
        let refused = map.insert_pair(a, b, LIMIT, Directions::Both).unwrap_err();
        (refused.error, refused.sockets)
    };
    // The peer has ended its stream.
    let ((one, a), (two, b)) = (tcp(), tcp());
    one.shutdown(Shutdown::Write).unwrap();
    let (error, [a, b]) = refuse(a, b);
    assert!(
        matches!(error, Refusal::Unsupported { side: Side::A, .. }),
        "{error}"
    );
    assert_eq!(read_to_end(TcpStream::from(a)), b"");
    // The other one is as it was.
    let ((_three, c), pair) = (tcp(), b);
    let pair = map.insert_pair(c, pair, LIMIT, Directions::Both).unwrap();
    // No room for another.
    let ((_four, d), (_five, e)) = (tcp(), tcp());
    let (error, [d, _e]) = refuse(d, e);
    assert!(matches!(error, Refusal::Full), "{error}");
    drop((pair, two));
    // A stream has no datagrams.
    let (_six, f) = udp();
    let (error, [d, _f]) = refuse(d, f);
    assert!(matches!(error, Refusal::Mixed), "{error}");
    // A Unix stream would lose bytes.
    let (_eight, stream) = UnixStream::pair().unwrap();
    let (error, [d, _stream]) = refuse(d, stream.into());
    assert!(matches!(error, Refusal::UnixStream(Side::B)), "{error}");
    // Messages.
    let (message, _seven) = rustix::net::socketpair(
        rustix::net::AddressFamily::UNIX,
        rustix::net::SocketType::SEQPACKET,
        rustix::net::SocketFlags::CLOEXEC,
        None,
    )
    .unwrap();
    let (error, [d, _message]) = refuse(d, message);
    assert!(matches!(error, Refusal::Messages(Side::B)), "{error}");
    // Not a socket.
    let (reader, _writer) = std::io::pipe().unwrap();
    let (error, _) = refuse(reader.into(), d);
    assert!(
        matches!(error, Refusal::System { side: Side::A, .. }),
        "{error}"
    );
}

#[test]
fn messages_of_unix_sockets_keep_their_bounds() {
    let map = map_or_skip!(1);
    let ((one, a), (two, b)) = (UnixDatagram::pair().unwrap(), UnixDatagram::pair().unwrap());
    two.set_read_timeout(Some(STEP)).unwrap();
    one.send(b"before").unwrap();
    let pair = map.insert_pair(a.into(), b.into(), LIMIT, Directions::Both);
    let relay = Relay::start(pair.unwrap());
    let mut buffer = [0; 100_000];
    assert_eq!(two.recv(&mut buffer).unwrap(), 6);
    for len in [1, 5000, 60_000] {
        let sent = pattern(len as u64, len);
        one.send(&sent).unwrap();
        let received = two.recv(&mut buffer).unwrap();
        assert!(buffer[..received] == sent);
    }
    let counters = relay.stop().counters(Side::A);
    assert!(counters.redirected_packets > 0, "{counters:?}");
}

#[test]
fn many_pairs_in_one_map_keep_their_bytes_apart() {
    const PAIRS: usize = 200;
    let map = map_or_skip!(PAIRS as u32);
    // Twice, so that all numbers are used again.
    for round in 0..2u64 {
        let mut outer = Vec::new();
        let mut pairs = Vec::new();
        for _ in 0..PAIRS {
            let ((one, a), (two, b)) = (tcp(), tcp());
            outer.push((one, two));
            pairs.push(map.insert_pair(a, b, LIMIT, Directions::Both).unwrap());
        }
        let mut scratch = vec![0; 256 << 10];
        for pair in &mut pairs {
            for side in [Side::A, Side::B] {
                pair.turn(side, &mut scratch).unwrap();
            }
        }
        let seed = |index: usize| round * 1000 + index as u64;
        for (index, (one, two)) in outer.iter_mut().enumerate() {
            one.write_all(&pattern(seed(index), 20_000)).unwrap();
            two.write_all(&pattern(seed(index) + 500, 10_000)).unwrap();
        }
        for (index, (one, two)) in outer.iter().enumerate() {
            assert!(read_exact(two, 20_000) == pattern(seed(index), 20_000));
            assert!(read_exact(one, 10_000) == pattern(seed(index) + 500, 10_000));
        }
        for pair in &pairs {
            assert_eq!(pair.counters(Side::A).redirected_bytes, 20_000);
            assert_eq!(pair.counters(Side::B).redirected_bytes, 10_000);
        }
    }
}

#[test]
fn capabilities_are_not_needed_for_later_pairs() {
    let map = map_or_skip!(1);
    let done = thread::spawn(move || {
        drop_bpf_capabilities().unwrap();
        let ((mut one, a), (two, b)) = (tcp(), tcp());
        let relay = Relay::start(map.insert_pair(a, b, LIMIT, Directions::Both).unwrap());
        one.write_all(b"without").unwrap();
        assert_eq!(read_exact(&two, 7), b"without");
        relay.stop();
        // A Unix socket as a source needs a program of its own.
        let (_three, c) = UnixDatagram::pair().unwrap();
        let (_four, d) = udp();
        let c = OwnedFd::from(c);
        let refused = map.insert_pair(c, d, LIMIT, Directions::Both).unwrap_err();
        let said = refused.error.to_string();
        assert!(said.contains("not permitted without CAP_BPF"), "{said}");
    });
    done.join().unwrap();
}
