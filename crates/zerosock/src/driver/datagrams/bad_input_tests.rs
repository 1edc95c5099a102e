//! Invalid datagrams from a device are dropped, counted and bounded, and do not affect other
//! sockets or streams of the endpoint. The device is the test.

use std::time::Duration;

use zerosock_proto::vsock::datagram::{
    ASSEMBLY_TIMEOUT, DatagramDrops, DatagramId, DatagramLimits, MAX_DATAGRAM, OVERHEAD, data,
};
use zerosock_proto::wire::vsock::{HEADER_LEN, Op, Repr, SocketType};
use zerosock_proto::{Address, Cid, Port};

use crate::driver::test_device::{CID, TestDevice, connect, pair};
use crate::driver::{Driver, StreamId};
use crate::table::backend::Backend;
use crate::table::calls::{ConnectionCalls, InboxCalls};

const PORT: Port = Port::new(514);
const LIMITS: DatagramLimits = DatagramLimits {
    receive: 20_000,
    send: 20_000,
};

struct Victim {
    driver: Driver,
    peer: TestDevice,
    socket: DatagramId,
    /// A socket that the invalid datagrams do not concern.
    other: DatagramId,
    stream: StreamId,
    stream_header: Repr,
}

impl Victim {
    fn new() -> Victim {
        let (mut driver, mut peer) = pair(|config| {
            config.queue_size = 64;
            config.rx_buffer_size = 128 << 10;
        });
        let stream = connect(&mut driver, &mut peer);
        let mut bind = |port| InboxCalls::bind(&mut driver, port, LIMITS).unwrap().0;
        let (socket, other) = (bind(PORT), bind(Port::new(2)));
        Victim {
            socket,
            other,
            stream,
            stream_header: peer.header,
            driver,
            peer,
        }
    }

    fn drive(&mut self) {
        Backend::drive(&mut self.driver).unwrap();
    }

    /// The device sends a packet that comes from port `from` of the host.
    fn part(&mut self, from: u32, to: Address, payload: &[u8], last: bool) {
        let from = Address::new(Cid::HOST, Port::new(from));
        self.peer.header = data(from, to, 0, last);
        self.peer.send(Op::Rw, payload);
        self.drive();
    }

    fn recv(&mut self, socket: DatagramId) -> Option<(Vec<u8>, u32)> {
        let mut out = vec![0; 1 << 17];
        let got = InboxCalls::recv(&mut self.driver, socket, &mut out, false)?;
        out.truncate(got.len);
        Some((out, got.source.port.get()))
    }

    fn drops(&self) -> DatagramDrops {
        InboxCalls::drops(&self.driver)
    }

    /// The socket still receives a valid datagram.
    fn still_receives(&mut self, wanted: &[u8]) {
        self.part(9, local(), wanted, true);
        assert_eq!(self.recv(self.socket), Some((wanted.to_vec(), 9)));
    }

    /// A stream and another socket still receive, and all buffers are posted again.
    fn others_are_unharmed(&mut self) {
        for round in 0..100u32 {
            let sent = round.to_le_bytes();
            self.peer.header = self.stream_header;
            self.peer.send(Op::Rw, &sent);
            self.drive();
            let mut got = [0; 8];
            assert_eq!(self.driver.read(self.stream, &mut got, false), Ok(4));
            assert_eq!(got[..4], sent);
            self.part(9, Address::new(CID, Port::new(2)), &sent, true);
            assert_eq!(self.recv(self.other), Some((sent.to_vec(), 9)));
        }
        assert!(self.driver.datagrams.fragments.capacity() <= 2 * MAX_DATAGRAM as usize);
    }

    /// The number of flow control packets that the device received.
    fn flow_control_packets(&mut self) -> usize {
        let mut packets = 0;
        while let Some((header, _)) = self.peer.take() {
            packets += usize::from(header.socket_type.known() == Some(SocketType::Datagram));
        }
        packets
    }
}

fn local() -> Address {
    Address::new(CID, PORT)
}

#[test]
fn datagrams_to_unbound_ports_are_counted_and_unanswered() {
    let mut victim = Victim::new();
    // Many more than there are buffers.
    for port in 0..500 {
        victim.part(9, Address::new(CID, Port::new(1000 + port)), b"lost", true);
        victim.part(9, Address::new(Cid::new(77), PORT), b"another's", true);
    }
    assert_eq!(victim.drops().no_socket, 1000);
    assert_eq!(victim.driver.stats().rx_dropped, 1000);
    assert_eq!(victim.flow_control_packets(), 0);
    assert_eq!(victim.recv(victim.socket), None);
    victim.still_receives(b"here");
    victim.others_are_unharmed();
}

#[test]
fn datagrams_to_a_full_receiver_are_bounded_and_counted() {
    let mut victim = Victim::new();
    for port in 0..2000 {
        victim.part(port, local(), &[1; 1000], true);
        if port % 500 == 0 {
            victim.others_are_unharmed();
        }
    }
    // 17 datagrams of 1000 bytes with their overhead are below the limit; one more may exceed it.
    let most = 1 + u64::from(LIMITS.receive / (1000 + OVERHEAD));
    let stats = InboxCalls::stats(&victim.driver, victim.socket).unwrap();
    assert_eq!((stats.received, stats.dropped_full), (most, 2000 - most));
    assert_eq!(victim.drops().full, 2000 - most);
    for from in 0..most as u32 {
        assert_eq!(victim.recv(victim.socket), Some((vec![1; 1000], from)));
    }
    assert_eq!(victim.recv(victim.socket), None);
    victim.still_receives(b"there is room again");
    victim.others_are_unharmed();
}

#[test]
fn datagrams_above_64_kib_are_dropped_to_their_end() {
    let mut victim = Victim::new();
    for round in 0..20 {
        for _ in 0..40 {
            victim.part(9, local(), &[7; 60_000], false);
            let kept = victim.driver.datagrams.fragments.capacity();
            assert!(kept <= 2 * MAX_DATAGRAM as usize, "{kept} bytes kept");
        }
        victim.part(9, local(), &[7; 10], true);
        assert_eq!(victim.drops().too_long, round + 1);
        victim.still_receives(b"short");
    }
    // In one packet, although the buffer has room for more.
    let before = victim.driver.stats().rx_malformed;
    victim.part(9, local(), &[7; MAX_DATAGRAM as usize + 1], true);
    assert_eq!(victim.driver.stats().rx_malformed, before + 1);
    assert_eq!(victim.recv(victim.socket), None);
    victim.others_are_unharmed();
    victim.still_receives(&[3; 8000]);
}

#[test]
fn fragments_that_are_missing_cost_their_datagram_alone() {
    let mut victim = Victim::new();
    for port in 0..500 {
        victim.part(1000 + port, local(), &[7; 4000], false);
    }
    assert_eq!(
        victim.drops().incomplete,
        499,
        "the last may still be ended"
    );
    victim.still_receives(b"whole");
    assert_eq!(victim.drops().incomplete, 500);
    victim.part(9, local(), b"and no more", false);
    let late = victim.driver.now() + ASSEMBLY_TIMEOUT + Duration::from_millis(1);
    victim.driver.datagrams.handle_timeout(late);
    assert_eq!(victim.drops().incomplete, 501);
    assert_eq!(victim.driver.datagrams.fragments.capacity(), 0);
    // Later fragments without a beginning are dropped.
    victim.part(9, local(), b", too late", true);
    victim.still_receives(b"whole again");
    victim.others_are_unharmed();
}

#[test]
fn fragments_out_of_order_are_no_datagram() {
    let mut victim = Victim::new();
    // The end arrives first and counts as a whole datagram.
    victim.still_receives(b"end");
    victim.part(9, local(), b"middle, ", false);
    victim.part(9, local(), b"beginning, ", false);
    victim.part(8, local(), b"another", true);
    assert_eq!(victim.recv(victim.socket), Some((b"another".to_vec(), 8)));
    assert_eq!(victim.recv(victim.socket), None);
    assert_eq!(victim.drops().incomplete, 1);
    victim.others_are_unharmed();
}

#[test]
fn interleaved_fragments_never_mix() {
    let mut victim = Victim::new();
    for _ in 0..100 {
        for (from, what, last) in [
            (1, "a", false),
            (2, "b", false),
            (1, "c", true),
            (2, "d", true),
        ] {
            victim.part(from, local(), what.as_bytes(), last);
        }
        assert_eq!(victim.recv(victim.socket), Some((b"c".to_vec(), 1)));
        assert_eq!(victim.recv(victim.socket), Some((b"d".to_vec(), 2)));
    }
    assert_eq!(victim.drops().incomplete, 200);
    victim.others_are_unharmed();
}

/// Packets with a length above the written bytes, or with another operation, are dropped.
#[test]
fn inconsistent_headers_are_dropped() {
    let mut victim = Victim::new();
    let from = Address::new(Cid::HOST, Port::new(9));
    let mut malformed = victim.driver.stats().rx_malformed;
    for len in [6, 4096, MAX_DATAGRAM, MAX_DATAGRAM + 1, u32::MAX] {
        let chain = victim.peer.rx.pop().unwrap().expect("a buffer");
        let mut bytes = [0; HEADER_LEN];
        data(from, local(), len, true).emit(&mut bytes);
        victim.peer.rx.memory().write(chain.writable(), 0, &bytes);
        victim.peer.rx.complete(chain, HEADER_LEN as u32 + 5);
        victim.peer.rx.publish_without_notify();
        victim.drive();
        malformed += 1;
        assert_eq!(victim.driver.stats().rx_malformed, malformed, "{len}");
    }
    for op in [Op::Request, Op::Rst, Op::Shutdown, Op::CreditUpdate] {
        victim.peer.header = data(from, local(), 0, true);
        victim.peer.send(op, b"");
        victim.drive();
        malformed += 1;
        assert_eq!(victim.driver.stats().rx_malformed, malformed, "{op:?}");
    }
    assert_eq!(
        (victim.recv(victim.socket), victim.flow_control_packets()),
        (None, 0)
    );
    victim.still_receives(b"here");
    victim.others_are_unharmed();
}
