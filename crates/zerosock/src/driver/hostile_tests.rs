//! A device that violates the protocol affects its own endpoint only. The device is the test, which
//! writes invalid ring entries directly.

use std::io::{Error, ErrorKind, Read, Write};

use zerosock_proto::wire::vsock::{HEADER_LEN, Op, Repr};
use zerosock_proto::{Address, Cid, Port};
use zerosock_ring::DeviceQueue;

use super::test_device::{SERVER, TestDevice, connect, pair};
use crate::fault::Fault;
use crate::table::backend::Backend;
use crate::table::calls::ConnectionCalls;
use crate::vsock::{Endpoint, EndpointEnded, Stream};
use zerosock_proto::vsock::pairs::{RX_QUEUE, TX_QUEUE};

const RX: usize = RX_QUEUE as usize;
const TX: usize = TX_QUEUE as usize;

/// Payload capacity of a receive buffer.
const BUFFER: u32 = 4096;

/// An endpoint with a connection, its device, and the addresses of the device's used rings.
struct Victim {
    endpoint: Endpoint,
    stream: Stream,
    peer: TestDevice,
    used: [u64; 2],
}

/// Writes into the memory of a queue at address `at`.
pub(super) fn poke(queue: &DeviceQueue, at: u64, bytes: &[u8]) {
    let mut pieces = Vec::new();
    let len = bytes.len() as u32;
    queue.memory().translate(at, len, &mut pieces).unwrap();
    assert_eq!(queue.memory().write(&pieces, 0, bytes), bytes.len());
}

impl Victim {
    fn new() -> Victim {
        let (mut driver, mut peer) = pair(|config| config.queue_size = 64);
        let id = connect(&mut driver, &mut peer);
        let rings = &driver.store.arena.rings;
        let used = [rings[RX].used, rings[TX].used];
        let endpoint = Endpoint::of(driver);
        let stream = endpoint.stream(id);
        stream.set_nonblocking(true).unwrap();
        Victim {
            endpoint,
            stream,
            peer,
            used,
        }
    }

    fn queue(&self, at: usize) -> &DeviceQueue {
        [&self.peer.rx, &self.peer.tx][at]
    }

    fn poke(&self, queue: usize, offset: u64, bytes: &[u8]) {
        poke(self.queue(queue), self.used[queue] + offset, bytes);
    }

    fn used_index(&self, queue: usize) -> u16 {
        let memory = self.queue(queue).memory();
        let mut pieces = Vec::new();
        memory
            .translate(self.used[queue] + 2, 2, &mut pieces)
            .unwrap();
        u16::from_le_bytes(memory.read_array(&pieces, 0).unwrap())
    }

    /// Returns these chains in the used ring.
    fn return_chains(&self, queue: usize, ids: &[u32]) {
        let mut index = self.used_index(queue);
        for id in ids {
            let at = 4 + 8 * u64::from(index % 64);
            self.poke(queue, at, &id.to_le_bytes());
            self.poke(queue, at + 4, &100u32.to_le_bytes());
            index = index.wrapping_add(1);
        }
        self.poke(queue, 2, &index.to_le_bytes());
    }

    /// Sends a byte through the connection.
    fn works(&mut self) {
        self.peer.send(Op::Rw, b"x");
        let mut got = [0];
        assert_eq!((&self.stream).read(&mut got).unwrap(), 1);
        assert_eq!(&got, b"x");
    }

    fn is_over(&self) {
        let says = |error: Error| {
            assert_eq!(error.kind(), ErrorKind::ConnectionAborted, "{error}");
            let inside = error.get_ref().and_then(|inner| inner.downcast_ref());
            let over: &EndpointEnded = inside.expect("typed");
            assert_eq!(over.fault(), Fault::Peer, "{over}");
        };
        let there = Address::new(SERVER.cid, Port::new(9));
        says(self.endpoint.drive().unwrap_err());
        says((&self.stream).read(&mut [0]).unwrap_err());
        says(self.stream.recv().map(drop).unwrap_err());
        says(self.endpoint.connect(there).map(drop).unwrap_err());
    }
}

#[test]
fn returning_a_chain_not_in_flight_ends_that_endpoint_only() {
    let mut other = Victim::new();
    let wild: [(usize, &[u32]); 5] = [
        // Beyond the table; in the table, but not the head of a chain; one twice; more than the
        // queue has.
        (RX, &[0x1234_5678]),
        (RX, &[1]),
        (RX, &[0, 0]),
        (RX, &[0; 60]),
        // No chain of the other queue is in flight.
        (TX, &[0]),
    ];
    for (queue, ids) in wild {
        let mut victim = Victim::new();
        victim.works();
        let lease = {
            victim.peer.send(Op::Rw, b"kept");
            victim.stream.recv().unwrap().unwrap().into_owned()
        };
        victim.return_chains(queue, ids);
        if queue == TX {
            // The driver checks for returned chains when few slots are left.
            while (&victim.stream).write(b"x").is_ok() {}
        }
        victim.is_over();
        // The lease was received before; its memory belongs to the endpoint.
        assert_eq!(lease.to_vec(), b"kept");
        other.works();
    }
}

#[test]
fn bytes_received_before_a_ring_broke_stay_readable() {
    type Look = fn(&Stream) -> Vec<u8>;
    let looks: [Look; 2] = [
        |stream| {
            let mut got = [0; 64];
            let len = { stream }.read(&mut got).unwrap();
            got[..len].to_vec()
        },
        |stream| {
            let mut got = Vec::new();
            let seen = stream.recv_each(8, |message| got.extend_from_slice(&message.to_vec()));
            assert_eq!(seen.unwrap(), 2);
            got
        },
    ];
    for look in looks {
        let mut victim = Victim::new();
        victim.works();
        for half in [b"one", b"two"] {
            victim.peer.send(Op::Rw, half);
        }
        victim.return_chains(RX, &[0x1234_5678]);
        assert_eq!(look(&victim.stream), b"onetwo");
        victim.is_over();
    }
}

#[test]
fn bytes_sent_before_a_ring_broke_are_reported_as_written() {
    // Of 32 slots; the driver checks the ring when few are left, in the middle of the long write.
    for short in 20..32 {
        let mut victim = Victim::new();
        victim.works();
        victim.return_chains(TX, &[0x1234_5678]);
        let mut stream = &victim.stream;
        let mut written = 0;
        for _ in 0..short {
            written += stream.write(b"x").unwrap_or(0) as u64;
        }
        written += stream.write(&[7; 200 << 10]).unwrap_or(0) as u64;
        let stats = victim.endpoint.stats();
        assert_eq!((stats.sent, stats.copied_in), (written, written));
    }
}

#[test]
fn invalid_packets_are_dropped_and_their_buffers_reused() {
    let (mut driver, mut peer) = pair(|config| config.queue_size = 64);
    let id = connect(&mut driver, &mut peer);
    let used = driver.store.arena.rings[RX].used;
    let good = Repr {
        op: Op::Rw.into(),
        len: 5,
        ..peer.header
    };
    let with = |change: fn(&mut Repr)| {
        let mut header = good;
        change(&mut header);
        header
    };
    let whole = HEADER_LEN as u32 + 5;
    // The header, and the written length that the device reports.
    let nonsense = [
        (good, 0),
        (good, HEADER_LEN as u32 - 1),
        // The header's length exceeds the written bytes or the buffer.
        (good, whole - 1),
        (with(|header| header.len = BUFFER + 1), u32::MAX),
        (with(|header| header.len = u32::MAX), u32::MAX),
    ];
    let before = driver.stats();
    // More rounds than there are buffers.
    for round in 0..40 {
        for (header, written) in &nonsense {
            let chain = peer.rx.pop().unwrap().expect("a buffer, over and over");
            let mut bytes = [0; HEADER_LEN];
            header.emit(&mut bytes);
            let memory = peer.rx.memory();
            memory.write(chain.writable(), 0, &bytes);
            memory.write(chain.writable(), HEADER_LEN, b"wrong");
            peer.rx.complete(chain, 0);
            peer.rx.publish_without_notify();
            // The device half of zerosock-ring refuses to report more than the chain holds.
            let element = used + 4 + 8 * u64::from(peer.rx.base().wrapping_sub(1) % 64);
            poke(&peer.rx, element + 4, &written.to_le_bytes());
            Backend::drive(&mut driver).unwrap();
        }
        let malformed = driver.stats().rx_malformed - before.rx_malformed;
        assert_eq!(malformed, (round + 1) * nonsense.len() as u64);
        // The connection continues and contains no bytes of the dropped packets.
        peer.send(Op::Rw, b"right");
        Backend::drive(&mut driver).unwrap();
        let mut got = [0; 16];
        assert_eq!(driver.read(id, &mut got, false), Ok(5));
        assert_eq!(&got[..5], b"right");
    }
}

#[test]
fn packets_of_other_connections_are_dropped() {
    let mut victim = Victim::new();
    let ours = victim.peer.header;
    let changes: [fn(&mut Repr); 4] = [
        |header| header.dst.cid = Cid::new(77),
        |header| header.dst.port = Port::new(4711),
        |header| header.src.cid = Cid::new(78),
        |header| header.src.port = Port::new(4712),
    ];
    for change in changes {
        victim.peer.header = ours;
        change(&mut victim.peer.header);
        victim.peer.send(Op::Rw, b"not for you");
        victim.endpoint.drive().unwrap();
        victim.peer.header = ours;
        let error = (&victim.stream).read(&mut [0; 16]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::WouldBlock);
        victim.works();
    }
}
