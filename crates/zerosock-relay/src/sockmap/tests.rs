//! Pairs of sockets on the running kernel: datagrams, their limit, and what cannot be joined. Without
//! CAP_BPF and CAP_NET_ADMIN they say SKIPPED. Streams from vsock pass in guests only: see the scenarios
//! `sockmap` of zerosock-testkit.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::OwnedFd;
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

fn receive(socket: &UdpSocket) -> Vec<u8> {
    let mut buffer = vec![0; 65536];
    let len = socket.recv(&mut buffer).expect("a datagram in time");
    buffer.truncate(len);
    buffer
}

/// Drives a pair as the engine does: turns when a socket is ready or a turn is due.
struct Relay {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<(RedirectedPair<OwnedFd>, Result<(), TurnError>)>,
}

impl Relay {
    fn start(mut pair: RedirectedPair<OwnedFd>) -> Relay {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let thread = thread::spawn(move || {
            let mut scratch = vec![0; SCRATCH];
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
    fn finish(self) -> (RedirectedPair<OwnedFd>, Result<(), TurnError>) {
        self.thread.join().unwrap()
    }

    fn stop(self) -> RedirectedPair<OwnedFd> {
        self.stop.store(true, Ordering::Release);
        let (pair, result) = self.finish();
        result.unwrap();
        pair
    }
}

/// One turn each way, and a wait; whether both have ended.
fn step(pair: &mut RedirectedPair<OwnedFd>, scratch: &mut [u8]) -> Result<bool, TurnError> {
    let turns = [pair.turn(Side::A, scratch)?, pair.turn(Side::B, scratch)?];
    if turns.iter().all(|turn| turn.state == RedirectState::Ended) {
        return Ok(true);
    }
    let again = turns.iter().filter_map(|turn| turn.again).min();
    let again = again.unwrap_or(Duration::from_millis(20));
    // An end of a stream stays readable while the other direction goes on: wait for time only.
    let ended = turns.map(|turn| turn.state == RedirectState::Ended);
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
fn datagrams_keep_their_bounds_both_ways() {
    let map = map_or_skip!(1);
    let ((one, a), (two, b)) = (udp(), udp());
    for early in [&b"early"[..], b"", b"later"] {
        one.send(early).unwrap();
    }
    let relay = Relay::start(map.insert_pair(a, b, LIMIT, Directions::Both).unwrap());
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
    let mut scratch = vec![0; SCRATCH];
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
    let ((one, a), (two, b)) = (udp(), udp());
    let pair = map.insert_pair(a, b, LIMIT, Directions::FromB).unwrap();
    two.send(b"redirected").unwrap();
    assert_eq!(receive(&one), b"redirected");
    one.send(b"by hand").unwrap();
    let a = pair.socket(Side::A).try_clone().unwrap();
    assert_eq!(receive(&UdpSocket::from(a)), b"by hand");
    assert_eq!(pair.counters(Side::B).redirected_bytes, 10);
}

#[test]
fn removed_pair_gives_back_ordinary_sockets() {
    let map = map_or_skip!(1);
    let ((one, a), (two, b)) = (udp(), udp());
    let mut pair = map.insert_pair(a, b, LIMIT, Directions::Both).unwrap();
    let small = pair.turn(Side::A, &mut vec![0; SCRATCH - 1]).unwrap_err();
    assert_eq!(small.error.kind(), ErrorKind::InvalidInput);
    pair.turn(Side::A, &mut vec![0; SCRATCH]).unwrap();
    one.send(b"redirected").unwrap();
    assert_eq!(receive(&two), b"redirected");
    let [a, b] = pair.into_sockets().map(UdpSocket::from);
    one.send(b"here").unwrap();
    assert_eq!(receive(&a), b"here");
    two.send(b"there").unwrap();
    assert_eq!(receive(&b), b"there");
    // The numbers and the sockets are free again.
    let [a, b] = [a, b].map(OwnedFd::from);
    let pair = map.insert_pair(a, b, LIMIT, Directions::Both).unwrap();
    let relay = Relay::start(pair);
    one.send(b"once more").unwrap();
    assert_eq!(receive(&two), b"once more");
    relay.stop();
}

#[test]
fn refused_sockets_come_back() {
    let map = map_or_skip!(1);
    let refuse = |a: OwnedFd, b: OwnedFd, directions| {
        let refused = map.insert_pair(a, b, LIMIT, directions).unwrap_err();
        (refused.error, refused.sockets)
    };
    // The peer of the target has ended its stream.
    let ((_one, a), (two, b)) = (udp(), tcp());
    two.shutdown(Shutdown::Write).unwrap();
    let (error, [a, b]) = refuse(a, b, Directions::FromA);
    assert!(
        matches!(error, Refusal::Unsupported { side: Side::B, .. }),
        "{error}"
    );
    assert_eq!(TcpStream::from(b).read(&mut [0]).unwrap(), 0);
    // The other one is as it was.
    let (_three, c) = udp();
    let pair = map.insert_pair(a, c, LIMIT, Directions::Both).unwrap();
    // No room for another.
    let ((_four, d), (_five, e)) = (udp(), udp());
    let (error, [d, _e]) = refuse(d, e, Directions::Both);
    assert!(matches!(error, Refusal::Full), "{error}");
    drop(pair);
    // A stream has no datagrams.
    let (_six, f) = tcp();
    let (error, [_f, d]) = refuse(f, d, Directions::Both);
    assert!(matches!(error, Refusal::Mixed), "{error}");
    // TCP is no source, in either direction.
    for directions in [Directions::Both, Directions::FromA, Directions::FromB] {
        let ((mut one, a), (_two, b)) = (tcp(), tcp());
        let source = match directions {
            Directions::FromB => Side::B,
            _ => Side::A,
        };
        let (error, [a, _b]) = refuse(a, b, directions);
        assert!(
            matches!(error, Refusal::TcpSource(side) if side == source),
            "{error}"
        );
        let said = error.to_string();
        assert!(said.contains("TCP, which can be no source"), "{said}");
        one.write_all(b"as it was").unwrap();
        assert_eq!(read_exact(TcpStream::from(a), 9), b"as it was");
    }
    // A Unix stream would lose bytes.
    let (_eight, stream) = UnixStream::pair().unwrap();
    let (error, [d, _stream]) = refuse(d, stream.into(), Directions::Both);
    assert!(matches!(error, Refusal::UnixStream(Side::B)), "{error}");
    // Messages.
    let (message, _seven) = rustix::net::socketpair(
        rustix::net::AddressFamily::UNIX,
        rustix::net::SocketType::SEQPACKET,
        rustix::net::SocketFlags::CLOEXEC,
        None,
    )
    .unwrap();
    let (error, [d, _message]) = refuse(d, message, Directions::Both);
    assert!(matches!(error, Refusal::Messages(Side::B)), "{error}");
    // Not a socket.
    let (reader, _writer) = std::io::pipe().unwrap();
    let (error, _) = refuse(reader.into(), d, Directions::Both);
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
fn many_pairs_in_one_map_keep_their_datagrams_apart() {
    const PAIRS: usize = 200;
    let map = map_or_skip!(PAIRS as u32);
    // Twice, so that all numbers are used again.
    for round in 0..2u64 {
        let mut outer = Vec::new();
        let mut pairs = Vec::new();
        for _ in 0..PAIRS {
            let ((one, a), (two, b)) = (udp(), udp());
            outer.push((one, two));
            pairs.push(map.insert_pair(a, b, LIMIT, Directions::Both).unwrap());
        }
        let seed = |index: usize| round * 1000 + index as u64;
        for (index, (one, two)) in outer.iter().enumerate() {
            one.send(&pattern(seed(index), 20_000)).unwrap();
            two.send(&pattern(seed(index) + 500, 10_000)).unwrap();
        }
        for (index, (one, two)) in outer.iter().enumerate() {
            assert!(receive(two) == pattern(seed(index), 20_000));
            assert!(receive(one) == pattern(seed(index) + 500, 10_000));
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
        let ((one, a), (two, b)) = (udp(), udp());
        let relay = Relay::start(map.insert_pair(a, b, LIMIT, Directions::Both).unwrap());
        one.send(b"without").unwrap();
        assert_eq!(receive(&two), b"without");
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
