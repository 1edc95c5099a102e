//! Guests that break the rules for messages harm only their own connections.

use std::io::ErrorKind;
use std::time::Duration;

use zerosock::vsock::SeqPacket;
use zerosock_proto::vsock::messages::MAX_UNREAD_EMPTY;
use zerosock_proto::wire::vsock::{Op, Repr, SEQ_EOM, SEQ_EOR, SocketType};

use super::PORT;
use super::hybrid::{HybridDaemon, Program, listen};
use super::raw::{OURS, Raw};
use crate::common::{PATIENCE, eventually};
use crate::hosting::Hosted;

const OTHER: u32 = OURS + 1;
/// Most unread bytes of a connection.
const WINDOW: usize = 262_144;
/// A part of a message, so long that a whole number of them fill the window.
const PART: [u8; 8192] = [7; 8192];

/// Connections of a hostile guest: the bad one, and one that must continue.
struct Pair {
    raw: Raw,
    bad: SeqPacket,
    good: SeqPacket,
}

impl Pair {
    fn new(hosted: &Hosted) -> Pair {
        let (mut raw, bad) = Raw::joined(hosted);
        let good = raw.connect(hosted, OTHER);
        Pair { raw, bad, good }
    }

    #[track_caller]
    fn still_good(&mut self) {
        self.raw.part(OTHER, 0, b"runs ");
        self.raw.part(OTHER, SEQ_EOM, b"on");
        let message = self.good.recv_leases().unwrap().unwrap();
        assert_eq!(message.to_vec(), b"runs on");
    }

    /// The bad connection was reset on both sides, and no part of an incomplete message was
    /// delivered.
    #[track_caller]
    fn is_reset(&mut self) {
        self.raw.guest.recv_op(OURS, Op::Rst);
        let error = self.bad.recv(&mut []).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
        self.still_good();
    }
}

/// CVE-2026-23086, CVE-2026-53132: they cost no credit, and are bounded by their number.
#[test]
fn a_flood_of_empty_messages_costs_its_connection() {
    let hosted = Hosted::new();
    let mut pair = Pair::new(&hosted);
    for _ in 0..MAX_UNREAD_EMPTY {
        pair.raw.part(OURS, SEQ_EOM, b"");
    }
    pair.raw.is_quiet(OURS);
    eventually("all are there", || {
        pair.bad.unread() == usize::from(MAX_UNREAD_EMPTY)
    });
    pair.still_good();
    pair.raw.part(OURS, SEQ_EOM, b"");
    pair.raw.guest.recv_op(OURS, Op::Rst);
    // Complete messages stay readable.
    for _ in 0..MAX_UNREAD_EMPTY {
        assert_eq!(pair.bad.recv(&mut []).unwrap().unwrap().len, 0);
    }
    let error = pair.bad.recv(&mut []).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    pair.still_good();
}

/// Packets without a byte and without an end are ignored.
#[test]
fn packets_without_bytes_or_end_change_no_message() {
    let hosted = Hosted::new();
    let mut pair = Pair::new(&hosted);
    pair.raw.part(OURS, 0, b"half, ");
    for _ in 0..10_000 {
        pair.raw.part(OURS, 0, b"");
    }
    pair.raw.part(OURS, SEQ_EOM, b"whole");
    let message = pair.bad.recv_leases().unwrap().unwrap();
    assert_eq!(message.to_vec(), b"half, whole");
    drop(message);
    pair.raw.is_quiet(OURS);
    pair.still_good();
}

#[test]
fn a_message_above_the_buffer_is_reset_at_once() {
    // Without an end: as soon as it exceeds the buffer. With an end: when it is one byte too long.
    for (last, flags) in [(8192, 0), (8192, SEQ_EOR)] {
        let hosted = Hosted::new();
        let mut pair = Pair::new(&hosted);
        for _ in 0..WINDOW / PART.len() - 1 {
            pair.raw.part(OURS, 0, &PART);
        }
        pair.raw.is_quiet(OURS);
        assert_eq!(pair.bad.unread(), 0);
        pair.raw.part(OURS, flags, &PART[..last]);
        pair.is_reset();
    }
    let hosted = Hosted::new();
    let mut pair = Pair::new(&hosted);
    for _ in 0..WINDOW / PART.len() - 1 {
        pair.raw.part(OURS, 0, &PART);
    }
    pair.raw.part(OURS, 0, &PART[..8191]);
    pair.raw.is_quiet(OURS);
    pair.raw.part(OURS, SEQ_EOM, &PART[..2]);
    pair.is_reset();
    // A message that just fits arrives whole.
    let hosted = Hosted::new();
    let mut pair = Pair::new(&hosted);
    for _ in 0..WINDOW / PART.len() - 1 {
        pair.raw.part(OURS, 0, &PART);
    }
    pair.raw.part(OURS, SEQ_EOM, &PART);
    assert_eq!(pair.bad.recv_leases().unwrap().unwrap().len(), WINDOW);
    pair.still_good();
}

/// It fills its own buffer at most, delays no other connection, and is dropped when its sender
/// resets.
#[test]
fn a_message_that_never_ends_fills_its_buffer_and_no_more() {
    for parts in [WINDOW / PART.len() - 1, 1] {
        for reset in [false, true] {
            let hosted = Hosted::new();
            let mut pair = Pair::new(&hosted);
            for _ in 0..parts {
                pair.raw.part(OURS, 0, &PART);
            }
            // All buffers return without a reader: after the hold time the bytes are copied.
            pair.raw.guest.wait_tx_done();
            pair.still_good();
            assert_eq!(pair.bad.unread(), 0);
            pair.bad.set_nonblocking(true).unwrap();
            for error in [
                pair.bad.recv(&mut [0; 10]).unwrap_err(),
                pair.bad.recv_leases().unwrap_err(),
            ] {
                assert_eq!(error.kind(), ErrorKind::WouldBlock);
            }
            pair.bad.set_nonblocking(false).unwrap();
            let stats = hosted.stats();
            assert!(stats.copied_aside <= WINDOW as u64, "{stats:?}");
            if reset {
                let header = pair.raw.header(OURS, Op::Rst);
                pair.raw.guest.send(header, b"");
                let error = pair.bad.recv(&mut []).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::ConnectionReset);
            } else {
                let header = Repr {
                    flags: 2,
                    ..pair.raw.header(OURS, Op::Shutdown)
                };
                pair.raw.guest.send(header, b"");
                assert_eq!(pair.bad.recv(&mut []).unwrap(), None);
            }
            pair.still_good();
        }
    }
}

/// As in Linux: EOR has an effect only on a packet that ends a message; flags have an effect only
/// on RW; other flags have none.
#[test]
fn ends_on_odd_packets_end_nothing() {
    let hosted = Hosted::new();
    let mut pair = Pair::new(&hosted);
    pair.raw.part(OURS, SEQ_EOR, b"one, ");
    pair.raw.part(OURS, SEQ_EOR, b"");
    for op in [Op::CreditUpdate, Op::CreditRequest] {
        let header = Repr {
            flags: SEQ_EOM | SEQ_EOR,
            ..pair.raw.header(OURS, op)
        };
        pair.raw.guest.send(header, b"");
    }
    pair.raw.part(OURS, !(SEQ_EOM | SEQ_EOR), b"two, ");
    pair.raw.is_quiet(OURS);
    assert_eq!(pair.bad.unread(), 0);
    pair.raw.part(OURS, SEQ_EOM, b"three");
    let message = pair.bad.recv_leases().unwrap().unwrap();
    assert_eq!(message.to_vec(), b"one, two, three");
    assert!(!message.end_of_record());
    drop(message);
    // The end in a separate packet.
    pair.raw.part(OURS, 0, b"four");
    pair.raw.part(OURS, !0, b"");
    let message = pair.bad.recv_leases().unwrap().unwrap();
    assert_eq!(message.to_vec(), b"four");
    assert!(message.end_of_record());
    drop(message);
    // SHUTDOWN with both bits of its flags, which mean something else there.
    let header = Repr {
        flags: SEQ_EOM | SEQ_EOR,
        ..pair.raw.header(OURS, Op::Shutdown)
    };
    pair.raw.guest.send(header, b"");
    assert_eq!(pair.bad.recv(&mut []).unwrap(), None);
    pair.still_good();
}

/// A packet of another type is answered with RST, and does not affect the connection.
#[test]
fn packets_of_another_type_are_refused() {
    let hosted = Hosted::new();
    let mut pair = Pair::new(&hosted);
    let listener = hosted.listen(PORT, 4).unwrap();
    let stream_port = OTHER + 1;
    pair.raw.guest.connect(stream_port, PORT.get());
    let (stream, _) = listener.accept_timeout(PATIENCE).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    for (port, socket_type) in [
        (OURS, SocketType::Stream),
        (stream_port, SocketType::SeqPacket),
    ] {
        for flags in [0, SEQ_EOM] {
            let header = Repr {
                socket_type: socket_type.into(),
                flags,
                ..pair.raw.header(port, Op::Rw)
            };
            pair.raw.guest.send(header, b"of another type");
            let (reset, _) = pair.raw.guest.recv_op(port, Op::Rst);
            assert_eq!(reset.socket_type, socket_type.into());
        }
    }
    // A guest that continues all the same keeps its connections.
    pair.raw.part(OURS, SEQ_EOM, b"a message");
    let message = pair.bad.recv_leases().unwrap().unwrap();
    assert_eq!(message.to_vec(), b"a message");
    drop(message);
    let header = pair.raw.guest.header(stream_port, PORT.get(), Op::Rw);
    pair.raw.guest.send(header, b"bytes");
    assert_eq!(stream.recv().unwrap().unwrap().to_vec(), b"bytes");
    pair.still_good();
}

/// More unread messages than credit allows.
#[test]
fn messages_above_the_credit_are_reset() {
    let hosted = Hosted::new();
    let mut pair = Pair::new(&hosted);
    for _ in 0..WINDOW / PART.len() {
        pair.raw.part(OURS, SEQ_EOM, &PART);
    }
    pair.raw.is_quiet(OURS);
    pair.raw.part(OURS, SEQ_EOM, b"x");
    pair.raw.guest.recv_op(OURS, Op::Rst);
    for _ in 0..WINDOW / PART.len() {
        let message = pair.bad.recv_leases().unwrap().unwrap();
        assert_eq!(message.to_vec(), PART);
    }
    let error = pair.bad.recv(&mut []).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    pair.still_good();
}

/// Very many messages of one byte: the overhead of each message counts too, far more than the
/// bytes.
#[test]
fn a_crowd_of_tiny_messages_is_bounded() {
    const MOST: usize = 512 << 10;
    const CROWD: usize = 20_000;
    let hosted = Hosted::tuned(|builder| builder.hold(Duration::from_millis(1)).max_copied(MOST));
    let mut pair = Pair::new(&hosted);
    let is_reset = (0..CROWD).any(|_| {
        pair.raw.part(OURS, SEQ_EOM, b"x");
        pair.raw.guest.wait_tx_done();
        std::iter::from_fn(|| pair.raw.guest.try_recv())
            .any(|(header, _)| header.op.known() == Some(Op::Rst))
    });
    assert!(is_reset, "all are kept");
    pair.still_good();
    pair.bad.set_nonblocking(true).unwrap();
    let (mut out, mut read) = ([0; 2], 0);
    let end = loop {
        match pair.bad.recv(&mut out) {
            Ok(message) => {
                let message = message.expect("no end in good order");
                assert_eq!((message.len, out[0]), (1, b'x'));
                read += 1;
            }
            Err(error) => break error,
        }
    };
    // The bytes without the overhead would fit.
    assert_eq!(end.kind(), ErrorKind::ConnectionReset, "after {read}");
    pair.still_good();
}

/// A host program's socket gets whole messages, or none.
#[test]
fn a_host_program_gets_no_part_of_an_incomplete_message() {
    let lab = HybridDaemon::new();
    let listener = listen(&lab.at(&format!("messages_{PORT}")));
    let mut raw = Raw::at(&lab.at("vm.sock"));
    let mut connect = |port| {
        raw.request(port);
        Program::accept(&listener)
    };
    let (bad, good) = (connect(OURS), connect(OTHER));
    for _ in 0..WINDOW / PART.len() - 1 {
        raw.part(OURS, 0, &PART);
    }
    raw.guest.wait_tx_done();
    let still_good = |raw: &mut Raw| {
        raw.part(OTHER, 0, b"runs ");
        raw.part(OTHER, SEQ_EOM, b"on");
        assert_eq!(good.recv(), b"runs on");
    };
    still_good(&mut raw);
    let flags = rustix::net::RecvFlags::DONTWAIT;
    let half = rustix::net::recv(&bad.0, &mut [0; 1][..], flags);
    assert!(matches!(half, Err(rustix::io::Errno::AGAIN)), "{half:?}");
    raw.part(OURS, 0, &PART);
    raw.guest.recv_op(OURS, Op::Rst);
    let end = rustix::net::recv(&bad.0, &mut [0; 1][..], rustix::net::RecvFlags::empty());
    assert!(
        matches!(end, Ok((_, 0)) | Err(rustix::io::Errno::CONNRESET)),
        "{end:?}"
    );
    still_good(&mut raw);
}

/// A guest that has not negotiated VIRTIO_VSOCK_F_SEQPACKET has no messages: it receives none,
/// and its own are refused.
#[test]
fn a_guest_that_has_not_negotiated_messages_has_none() {
    let hosted = Hosted::new();
    let _listener = hosted.listen_seqpacket(PORT, 4).unwrap();
    let mut guest = hosted.raw_guest();
    let to = zerosock::Address::new(guest.cid, zerosock::Port::new(9));
    for error in [
        hosted.connect_seqpacket(to).unwrap_err(),
        hosted.begin_connect_seqpacket(to).unwrap_err(),
    ] {
        assert_eq!(error.kind(), ErrorKind::Unsupported);
    }
    let request = Repr {
        socket_type: SocketType::SeqPacket.into(),
        ..guest.header(OURS, PORT.get(), Op::Request)
    };
    guest.send(request, &[]);
    let (reset, _) = guest.recv_op(OURS, Op::Rst);
    assert_eq!(reset.socket_type, SocketType::SeqPacket.into());
}
