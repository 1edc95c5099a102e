//! A device that violates the rules for messages affects one connection or its own endpoint only.
//! The device is the test.

use std::io::{Error, ErrorKind, IoSlice, Write};

use zerosock_proto::Port;
use zerosock_proto::vsock::messages::MAX_UNREAD_EMPTY;
use zerosock_proto::vsock::pairs::TX_QUEUE;
use zerosock_proto::wire::vsock::{Op, SEQ_EOM, SHUTDOWN_RECEIVE, SocketType};

use super::hostile_tests::poke;
use super::test_device::{SERVER, TestDevice, pair};
use crate::table::backend::{Backend, ReadySource};
use crate::table::sending::SendingCalls;
use crate::vsock::{Endpoint, SeqPacket, StreamError};

/// Payload capacity of a buffer of the endpoint, in bytes.
const BUFFER: usize = 4096;
/// Limit on a connection's unread bytes.
const WINDOW: usize = 262_144;

/// An endpoint with a message connection, and its device.
struct Victim {
    endpoint: Endpoint,
    socket: SeqPacket,
    peer: TestDevice,
    /// Address of the transmit queue's used ring.
    used: u64,
}

/// Opens a connection from the endpoint to its device.
fn connect(endpoint: &Endpoint, peer: &mut TestDevice) -> SeqPacket {
    let socket = endpoint.begin_connect_seqpacket(SERVER).unwrap();
    socket.set_nonblocking(true).unwrap();
    let request = peer.take_op(Op::Request);
    assert_eq!(request.socket_type, SocketType::SeqPacket.into());
    peer.header.socket_type = request.socket_type;
    peer.header.dst = request.src;
    peer.header.flags = 0;
    peer.header.fwd_cnt = 0;
    peer.send(Op::Response, &[]);
    endpoint.drive().unwrap();
    socket.wait_connected().unwrap();
    socket
}

impl Victim {
    fn new() -> Victim {
        let (driver, mut peer) = pair(|config| {
            config.queue_size = 64;
            config.rx_buffer_size = BUFFER as u32;
            config.tx_buffer_size = BUFFER as u32;
        });
        let used = driver.store.arena.rings[usize::from(TX_QUEUE)].used;
        let endpoint = Endpoint::of(driver);
        let socket = connect(&endpoint, &mut peer);
        Victim {
            endpoint,
            socket,
            peer,
            used,
        }
    }

    /// Sends a part of a message.
    fn part(&mut self, flags: u32, payload: &[u8]) {
        self.peer.header.flags = flags;
        self.peer.send(Op::Rw, payload);
        self.endpoint.drive().unwrap();
    }

    /// The number of messages that can be sent beside a message loan while the device returns no
    /// buffers.
    fn sendable_messages(&mut self) -> usize {
        let socket = connect(&self.endpoint, &mut self.peer);
        let mut loan = socket.loan(4 * BUFFER).unwrap();
        assert!(loan.is_in_place());
        loan.write_all(&[3; 4 * BUFFER]).unwrap();
        let mut sent = 0;
        while socket.send(&[4; BUFFER]).is_ok() {
            sent += 1;
            assert!(sent < 1000, "no limit is reached");
        }
        loan.send().unwrap();
        let packets = std::iter::from_fn(|| self.peer.take()).count();
        assert_eq!(packets, sent + 4);
        sent
    }

    /// Another connection of the endpoint works.
    fn others_work(&mut self) {
        let bad = self.peer.header;
        let other = connect(&self.endpoint, &mut self.peer);
        self.part(0, b"runs ");
        self.part(SEQ_EOM, b"on");
        assert_eq!(other.recv_leases().unwrap().unwrap().to_vec(), b"runs on");
        other.send(b"as well").unwrap();
        loop {
            let (header, bytes) = self.peer.take().expect("a packet");
            if header.op.known() == Some(Op::Rw) && header.src.port == other.local_addr().port {
                assert_eq!((header.flags, &bytes[..]), (SEQ_EOM, &b"as well"[..]));
                break;
            }
        }
        other.reset();
        self.peer.header = bad;
    }
}

#[track_caller]
fn assert_kind(error: Error, kind: ErrorKind) {
    assert_eq!(error.kind(), kind, "{error}");
}

#[test]
fn a_flood_of_empty_messages_costs_its_connection() {
    let mut victim = Victim::new();
    for _ in 0..MAX_UNREAD_EMPTY {
        victim.part(SEQ_EOM, b"");
    }
    victim.others_work();
    victim.part(SEQ_EOM, b"");
    victim.peer.take_op(Op::Rst);
    // Messages received before are still readable.
    for _ in 0..MAX_UNREAD_EMPTY {
        assert_eq!(victim.socket.recv(&mut []).unwrap().unwrap().len, 0);
    }
    assert_kind(
        victim.socket.recv(&mut []).unwrap_err(),
        ErrorKind::ConnectionReset,
    );
    victim.others_work();
}

#[test]
fn a_message_without_an_end_fills_its_buffer_and_no_more() {
    let mut victim = Victim::new();
    for _ in 1..WINDOW / BUFFER {
        victim.part(0, &[7; BUFFER]);
        assert_kind(
            victim.socket.recv(&mut []).unwrap_err(),
            ErrorKind::WouldBlock,
        );
    }
    victim.others_work();
    assert!(victim.endpoint.stats().copied_aside <= WINDOW as u64);
    victim.part(0, &[7; BUFFER]);
    victim.peer.take_op(Op::Rst);
    assert_kind(
        victim.socket.recv(&mut []).unwrap_err(),
        ErrorKind::ConnectionReset,
    );
    victim.others_work();
}

/// The device consumes nothing while a loan is out: the loan can be sent later, or ends with its
/// connection.
#[test]
fn loans_wait_for_a_device_that_takes_nothing() {
    for reset in [false, true] {
        let mut victim = Victim::new();
        let mut late = victim.socket.loan(20_000).unwrap();
        late.write_all(&[1; 20_000]).unwrap();
        assert!(!late.is_in_place(), "an eighth of 32 buffers");
        // Uses all slots: the message starts, and its rest is queued.
        victim.socket.send(&[2; 200_000]).unwrap();
        let (error, late) = late.try_send().unwrap_err();
        assert_kind(error, ErrorKind::WouldBlock);
        assert_kind(victim.socket.send(b"").unwrap_err(), ErrorKind::WouldBlock);
        assert_kind(victim.socket.loan(1).unwrap_err(), ErrorKind::WouldBlock);
        if reset {
            victim.peer.header.flags = 0;
            victim.peer.send(Op::Rst, b"");
            victim.endpoint.drive().unwrap();
            let (error, late) = late.try_send().unwrap_err();
            let inner = error.get_ref().and_then(|inner| inner.downcast_ref());
            assert_eq!(inner, Some(&StreamError::Reset));
            drop(late);
            // The device takes the parts sent before, which are no complete message.
            while victim.peer.take().is_some() {}
        } else {
            let (mut got, mut late) = (Vec::new(), Some(late));
            while got.len() < 220_000 {
                while let Some((header, bytes)) = victim.peer.take() {
                    assert_eq!(header.op.known(), Some(Op::Rw));
                    got.extend(bytes);
                    let ends = [200_000, 220_000].contains(&got.len());
                    assert_eq!(
                        header.flags,
                        if ends { SEQ_EOM } else { 0 },
                        "{}",
                        got.len()
                    );
                }
                victim.endpoint.drive().unwrap();
                late = late.and_then(|late| late.try_send().err().map(|(_, late)| late));
            }
            assert!(got[..200_000] == [2; 200_000] && got[200_000..] == [1; 20_000]);
        }
        victim.endpoint.drive().unwrap();
        victim.others_work();
        // All slots are free again.
        assert_eq!(
            victim.sendable_messages(),
            Victim::new().sendable_messages()
        );
    }
}

/// A loan remains writable after its endpoint has ended.
#[test]
fn a_loan_outlives_its_endpoint() {
    let victim = Victim::new();
    let mut loan = victim.socket.loan(10_000).unwrap();
    loan.write_all(&[1; 5000]).unwrap();
    // The device returns a chain that it was never given.
    poke(
        &victim.peer.tx,
        victim.used + 4,
        &0x1234_5678u32.to_le_bytes(),
    );
    poke(&victim.peer.tx, victim.used + 2, &5u16.to_le_bytes());
    let mut sent = 0;
    while victim.socket.send(&[2; BUFFER]).is_ok() {
        sent += 1;
        assert!(sent < 1000);
    }
    assert_kind(
        victim.endpoint.drive().unwrap_err(),
        ErrorKind::ConnectionAborted,
    );
    loan.write_all(&[1; 5000]).unwrap();
    // Sending succeeds like a write, into a buffer that is not read any more; the other loan is
    // dropped.
    let other = victim
        .socket
        .loan(10)
        .map_err(|error| assert_kind(error, ErrorKind::ConnectionAborted));
    drop(other);
    let _ = loan.send();
    assert_kind(
        victim.socket.loan(1).unwrap_err(),
        ErrorKind::ConnectionAborted,
    );
}

/// A private loan takes a slot only when its message can start.
#[test]
fn a_loan_of_a_message_that_cannot_start_takes_no_slot() {
    let mut victim = Victim::new();
    let in_place = victim.socket.loan(4 * BUFFER).unwrap();
    let mut late = victim.socket.loan(1).unwrap();
    assert!(in_place.is_in_place() && !late.is_in_place());
    let mut sent = 0;
    while victim.socket.send(b"").is_ok() {
        while victim.peer.take().is_some() {}
        sent += 1;
        assert!(sent < 1000, "no limit is reached");
    }
    for _ in 0..100 {
        let (error, again) = late.try_send().unwrap_err();
        assert_kind(error, ErrorKind::WouldBlock);
        late = again;
    }
    drop((late, in_place));
    while victim.peer.take().is_some() {}
    assert_eq!(
        victim.sendable_messages(),
        Victim::new().sendable_messages()
    );
}

/// The rest of a message is dropped when the peer receives no more, and the sender learns of it.
#[test]
fn a_sender_that_waits_is_woken_when_the_rest_is_not_needed() {
    let (mut driver, mut peer) = pair(|config| {
        config.queue_size = 64;
        config.tx_buffer_size = BUFFER as u32;
    });
    let id = Backend::connect(&mut driver, Port::ANY, SERVER, SocketType::SeqPacket).unwrap();
    Backend::flush(&mut driver);
    peer.header.socket_type = SocketType::SeqPacket.into();
    peer.header.dst = peer.take_op(Op::Request).src;
    peer.send(Op::Response, &[]);
    Backend::drive(&mut driver).unwrap();
    // Uses all slots: the message starts, and its rest is queued.
    let all = driver.send_message(id, &[IoSlice::new(&[2; 200_000])], false);
    assert_eq!(all, Ok(false));
    peer.header.flags = SHUTDOWN_RECEIVE;
    peer.send(Op::Shutdown, &[]);
    Backend::drive(&mut driver).unwrap();
    while driver.next_ready().is_some() {}
    assert!(driver.is_sending(id));
    while peer.take().is_some() {}
    Backend::drive(&mut driver).unwrap();
    assert!(!driver.is_sending(id));
    assert_eq!(driver.next_ready(), Some(ReadySource::Conn(id)));
}
